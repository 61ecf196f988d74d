"""Parts of files that several threads read into tensors, piece by piece."""

import os

import pytest
import torch

from drot.checkpoint import pieces
from drot.checkpoint.pieces import PieceReader
from drot.core.errors import UserError


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    return PieceReader()


@pytest.mark.parametrize("count", [0, 1, 16, 17, 64, 65, 1000])
def test_numbers_of_a_file_in_any_number_of_pieces(reader, tmp_path, count):
    numbers = torch.randn(count + 3)
    (file := tmp_path / "numbers").write_bytes(numbers.numpy().tobytes())
    same, narrower = torch.empty(count), torch.empty(count, dtype=torch.bfloat16)
    for target in (same, narrower):
        reader.read(target, file, 4 * 3, torch.float32)
    assert torch.equal(same, numbers[3:]) and torch.equal(narrower, numbers[3:].bfloat16())


def test_pieces_that_come_in_small_parts(reader, tmp_path, monkeypatch):
    """The system may read less than it is asked for."""
    numbers, whole = torch.randn(200), os.preadv
    (file := tmp_path / "numbers").write_bytes(numbers.numpy().tobytes())
    monkeypatch.setattr(os, "preadv", lambda file, parts, start: whole(file, [parts[0][:5]], start))
    reader.read(target := torch.empty(200), file, 0, torch.float32)
    assert torch.equal(target, numbers)


def test_a_file_that_is_too_short_or_cannot_be_read(reader, tmp_path):
    (file := tmp_path / "numbers").write_bytes(bytes(4 * 99))
    for _ in range(2):  # the reader can go on
        with pytest.raises(UserError, match="too short"):
            reader.read(torch.empty(100), file, 0, torch.float32)
        reader.read(target := torch.ones(99), file, 0, torch.float32)
        assert not target.any()
    with pytest.raises(UserError, match="cannot read"):
        reader.read(torch.empty(100), tmp_path, 0, torch.float32)
