"""The finished parts of a run on several ranks, of which rank 0 alone reads and writes the files."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.checkpoint.resume import RunState
from drot.machine.ranks import Ranks

#: The tensors and the record of a part.
Part = tuple[dict[str, Tensor], Any]


class SharedState:
    """The RunState of rank 0, from which all ranks get what is loaded. So OUT need not be a shared folder.

    out: the folder of the finished run.
    make: makes the RunState; called on rank 0 alone. Its exceptions are raised on all ranks.

    Attributes:
        own: the RunState; None on the other ranks.
        disk: a folder on the disk of `out`, or, on a machine that does not have it, for temporary files.
    """

    def __init__(self, ranks: Ranks, out: Path, make: Callable[[], RunState]) -> None:
        self._ranks = ranks
        self.disk = out.parent if out.parent.is_dir() else Path(tempfile.gettempdir())
        self.own: RunState | None = None
        self._on_first(lambda: setattr(self, "own", make()))

    def _on_first(self, function: Callable[[], Any]) -> Any:
        return self._ranks.on_first(function)

    def load(self, name: str) -> Part | None:
        """As RunState.load; all ranks call it."""
        return self._on_first(lambda: self._first.load(name))

    def loaded(self, name: str, device: torch.device) -> dict[str, Tensor]:
        """As RunState.loaded, on the device of the ranks, or in main memory; all ranks call it."""
        found = self._ranks.on_rank(0, lambda: self._first.loaded(name), device)
        return {key: tensor.to(device) for key, tensor in found.items()}

    def read_ahead(self, name: str, device: torch.device) -> None:
        """As RunState.read_ahead, for `loaded` with `device`."""
        if self.own is not None:
            self.own.read_ahead(name, device)

    def save(self, name: str, tensors: dict[str, Tensor], record: Any) -> None:
        if self.own is not None:
            self.own.save(name, tensors, record)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.own is None else self.own.saving():
            yield

    def wait(self) -> None:
        """As RunState.wait, on rank 0."""
        if self.own is not None:
            self.own.wait()

    def save_later(self, parts: Mapping[str, tuple[Mapping[str, Tensor], Any]]) -> None:
        if self.own is not None:
            self.own.save_later(parts)

    @property
    def _first(self) -> RunState:
        assert self.own is not None, "rank 0 has the files"
        return self.own
