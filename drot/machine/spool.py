"""Tensors in memory-mapped files, for numbers that neither a device nor the main memory holds."""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from drot.core.files import writing


class Spool:
    """Makes tensors in main memory whose numbers lie in files: the system keeps of them what it has room for.

    A file has no name once it is made. So it goes when the last tensor does, also when the process is killed.

    folder: an existing folder, on whose disk the files lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros. Raises WriteError if the disk has no room for it."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        with writing(self._folder), tempfile.NamedTemporaryFile(dir=self._folder) as file:
            # a page of a mapped file that the disk cannot take would end the process
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(*shape)
