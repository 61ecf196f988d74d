"""Rotation files: the round trip, and the message for every kind of faulty file."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drot.checkpoint import rotations as stored
from drot.checkpoint.rotations import _digest, open_rotations, save_rotations
from drot.core.errors import UserError
from drot.model.rotation import LayerRotation
from drot.model.sizes import HeadShape

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=4)


def rotations(count=2, d=8, r3=True):
    draw = lambda *size: torch.linalg.qr(torch.randn(*size, dtype=torch.float64))[0]  # noqa: E731
    return [LayerRotation(draw(d, d), draw(2, 4, 4), draw(3, 2, 2) if r3 else None) for _ in range(count)]


def load(path, layers=2, d=8, down_width=6):
    layer = SimpleNamespace(heads=SHAPE, down_inputs=lambda: down_width)
    return open_rotations(path, SimpleNamespace(hidden_size=d, layers=[layer] * layers))


@pytest.mark.parametrize("r3", [True, False])
def test_round_trip_is_orthogonal_to_fp64(r3, tmp_path):
    path, saved = tmp_path / "folder" / "r.safetensors", rotations(r3=r3)
    save_rotations(path, saved, {"model": "x"})
    got, record = load(path)
    assert record == {"model": "x"}
    assert [file.name for file in path.parent.iterdir()] == ["r.safetensors"]
    for a, b in zip(saved, got.values(), strict=True):
        assert list(a.matrices) == list(b.matrices) == ["r1", "r2", "r3"][: 3 if r3 else 2]
        for saved_matrix, matrix in zip(a.matrices.values(), b.matrices.values(), strict=True):
            assert torch.allclose(saved_matrix, matrix, atol=1e-6)
        assert torch.allclose(b.r1.T @ b.r1, torch.eye(8, dtype=torch.float64), atol=1e-13)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_copies_lie_on_the_disk_while_the_file_is_written(tmp_path, monkeypatch):
    """Each is a mapped file of the same folder, and safetensors would write the same bytes from memory."""
    path, saved = tmp_path / "r.safetensors", rotations()
    mapped = []

    def see(tensors, file, metadata):
        mapped.extend(
            line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
        )
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "plain", metadata)
        save_file(tensors, file, metadata)

    monkeypatch.setattr(stored, "save_file", see)
    save_rotations(path, saved, {})
    assert len(mapped) == 6 and all(line.endswith("(deleted)") for line in mapped)
    assert path.read_bytes() == (tmp_path / "plain").read_bytes()


def test_the_message_for_a_faulty_file(tmp_path):
    path = tmp_path / "r.safetensors"
    with pytest.raises(UserError, match="there is no rotation file"):
        load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load(path)
    save_rotations(path, rotations(), {})
    with pytest.raises(UserError, match=r"^\S+: layers.0.r1 must be \[16, 16\] for this model, got \[8, 8\]"):
        load(path, d=16)  # the file is readable, and the message says no more than that
    with pytest.raises(UserError, match="holds 2 layers, but this model has 1"):
        load(path, layers=1)
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="must be a file, got a pipe"):
        load(pipe)
    with pytest.raises(UserError, match=r"layers.0.r3 must be \[4, 2, 2\] for this model, got \[3, 2, 2\]"):
        load(path, down_width=8)
    save_rotations(path, [*rotations(count=1), *rotations(count=1, r3=False)], {})
    with pytest.raises(UserError, match=r"layers.1.r3 must be \[3, 2, 2\] for this model, got None"):
        load(path)
    wrong = rotations()
    wrong[1].r2.mul_(1.1)
    save_rotations(path, wrong, {})
    with pytest.raises(UserError, match="layers.1.r2 must be orthogonal, got"):
        load(path)


#: safetensors writes complex numbers from 0.7 on
COMPLEX = pytest.param(
    torch.complex64, marks=pytest.mark.skipif(version("safetensors") < "0.7", reason="cannot write them")
)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, COMPLEX, torch.float64], ids=str
)
def test_only_fp32_matrices_are_read(tmp_path, dtype):
    """With a digest that fits, as a stranger writes it. A complex matrix would lose its imaginary part."""
    path = tmp_path / "r.safetensors"
    save_rotations(path, rotations(), {})
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"record": json.dumps({"digest": _digest([tensors], {})})})
    with pytest.raises(UserError, match=r"layers\.\d\.r\d must be of dtype F32, got "):
        load(path)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (3, 0, 0)], ids=str)
def test_an_r3_that_is_no_batch_of_blocks_is_refused(tmp_path, shape):
    """With a digest that fits, as a stranger writes it."""
    path = tmp_path / "r.safetensors"
    save_rotations(path, rotations(), {})
    tensors = load_file(path) | {"layers.0.r3": torch.zeros(shape)}
    save_file(tensors, path, {"record": json.dumps({"digest": _digest([tensors], {})})})
    with pytest.raises(UserError, match=r"layers\.0\.r3 must be blocks \[count, size, size\], got \["):
        load(path)


@pytest.mark.parametrize("record", ['{"loss": NaN}', '{"a": ' + "[" * 5000, '{"a": 1, "a": 2}', "[]"])
def test_a_record_that_no_manifest_can_hold_is_refused_before_the_run(tmp_path, record):
    path = tmp_path / "r.safetensors"
    save_rotations(path, rotations(), {})
    save_file(load_file(path), path, {"record": record})
    with pytest.raises(UserError, match=f"{path}: its record"):
        load(path)
