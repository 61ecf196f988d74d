"""Tensors that are read from files piece by piece, by several threads."""

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from drot.core.errors import UserError
from drot.machine.transfer import empty_on_host

#: bytes of a piece, and how many pieces are read at the same time: a disk gives several readers more than one
PIECE_BYTES, READERS = 2**22, 4


class PieceReader:
    """Reads parts of files into tensors on any device, which may have another dtype.

    READERS pieces lie in main memory, pinned for a GPU. They are made once, since pieces of memory between
    the layers of a model leave gaps that the C library does not use again.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(READERS, "drot-pieces")

    def read(self, target: Tensor, file: Path, start: int, dtype: torch.dtype) -> None:
        """Reads a contiguous tensor of `dtype` from the byte `start` of `file`.

        Raises UserError if the file is too short or cannot be read.
        """
        try:
            with self._lock, file.open("rb", buffering=0) as handle:
                self._read(target, handle.fileno(), start, dtype)
        except EOFError:
            raise UserError(
                f"{file} was changed while drot read it, and is too short now: copy it again"
            ) from None
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None

    def _read(self, target: Tensor, file: int, start: int, dtype: torch.dtype) -> None:
        pieces = self._pieces_for(target.device)
        parts = target.view(-1).split(PIECE_BYTES // dtype.itemsize)
        coming: deque[Future[Tensor]] = deque()
        try:
            for index in range(-READERS, len(parts)):
                if index >= 0:
                    stored = coming.popleft().result()
                    parts[index].copy_(stored.view(dtype).to(target.device))  # a GPU casts there
                if (following := index + READERS) < len(parts):
                    piece = pieces[following % READERS][: parts[following].numel() * dtype.itemsize]
                    at = start + following * PIECE_BYTES
                    coming.append(self._threads.submit(_read_piece, file, piece, at))
        finally:
            wait(coming)  # before the file is closed

    def _pieces_for(self, device: torch.device) -> list[Tensor]:
        if device.type not in self._pieces:
            self._pieces[device.type] = [
                empty_on_host((PIECE_BYTES,), torch.uint8, device) for _ in range(READERS)
            ]
        return self._pieces[device.type]


def _read_piece(file: int, piece: Tensor, start: int) -> Tensor:
    """`piece`, filled from the byte `start` of an open file. Raises EOFError if the file is too short."""
    left = piece.numpy().data
    while left and (count := os.preadv(file, [left], start)):
        left, start = left[count:], start + count
    if left:
        raise EOFError
    return piece
