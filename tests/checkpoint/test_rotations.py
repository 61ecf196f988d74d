"""Rotation files: the round trip, and the message for every kind of faulty file."""

import pytest
import torch

from drot.checkpoint.rotations import load_rotations, save_rotations
from drot.core.errors import UserError
from drot.model.families import HeadShape
from drot.model.rotation import LayerRotation

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=4)


def rotations(count=2, d=8):
    draw = lambda *size: torch.linalg.qr(torch.randn(*size, dtype=torch.float64))[0]  # noqa: E731
    return [LayerRotation(draw(d, d), draw(2, 4, 4)) for _ in range(count)]


def load(path, layers=2, d=8):
    return load_rotations(path, layers=layers, hidden_size=d, shape=SHAPE)


def test_round_trip_is_orthogonal_to_fp64(tmp_path):
    path, saved = tmp_path / "folder" / "r.safetensors", rotations()
    save_rotations(path, saved, {"model": "x"})
    got, record = load(path)
    assert record == {"model": "x"}
    assert [file.name for file in path.parent.iterdir()] == ["r.safetensors"]
    for a, b in zip(saved, got, strict=True):
        assert torch.allclose(a.r1, b.r1, atol=1e-6)
        assert torch.allclose(a.r2, b.r2, atol=1e-6)
        assert torch.allclose(b.r1.T @ b.r1, torch.eye(8, dtype=torch.float64), atol=1e-13)


def test_the_message_for_a_faulty_file(tmp_path):
    path = tmp_path / "r.safetensors"
    with pytest.raises(UserError, match="there is no rotation file"):
        load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load(path)
    save_rotations(path, rotations(), {})
    with pytest.raises(UserError, match=r"layers.0.r1 must be \[16, 16\] for this model, got \[8, 8\]"):
        load(path, d=16)
    with pytest.raises(UserError, match="holds 2 layers, but this model has 1"):
        load(path, layers=1)
    wrong = rotations()
    wrong[1].r2.mul_(1.1)
    save_rotations(path, wrong, {})
    with pytest.raises(UserError, match="layers.1.r2 must be orthogonal, got"):
        load(path)
