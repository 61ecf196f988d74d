"""Tensors in files without a name."""

import errno
import os

import pytest
import torch

from drot.core.files import WriteError
from drot.machine.spool import Spool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (0, 4), (1,)])
def test_a_tensor_keeps_its_numbers_and_its_file_has_no_name(tmp_path, shape, dtype):
    spool = Spool(tmp_path)
    tensors = [spool.empty(shape, dtype) for _ in range(2)]
    for tensor, value in zip(tensors, (1.5, 2.5), strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype and not tensor.any()
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.5], [2.5]] if tensors[0].numel() else True
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_a_number_is_written(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match="No space left on device"):
        Spool(tmp_path).empty((4, 4), torch.float32)
    assert list(tmp_path.iterdir()) == []
