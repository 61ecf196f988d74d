"""The keys and values that decoder layers lend to later layers, which have none of their own."""

from collections import ChainMap
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from drot.machine.transfer import Empty, empty_on, gathered


class Lent:
    """Kind of attention → keys and values [sequences, kv_heads, seqlen, head_dim], for all of a stream.

    A layer reads and writes those of some sequences by the argument LENT, which `of` makes.
    """

    def __init__(self, nsamples: int, device: torch.device, empty: Empty | None) -> None:
        self._nsamples, self.device = nsamples, device
        self._empty = empty or partial(empty_on, device)
        self.states: ChainMap[str, tuple[Tensor, ...]] = ChainMap()

    def child(self, nsamples: int, empty: Empty | None) -> "Lent":
        """For a stream of the first `nsamples` sequences, which reads the same until it writes its own.

        empty: makes the tensors that it writes.
        """
        found = Lent(nsamples, self.device, empty)
        found.states = self.states.new_child()
        return found

    def fresh(self) -> "Lent":
        """For other tensors of the same sequences, such as the gradient, in the same place."""
        return Lent(self._nsamples, self.device, self._empty)

    def of(self, sequences: slice | Tensor) -> "LentOfSequences":
        return LentOfSequences(self, sequences)

    def own(self, kind: str, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of this stream, which are 0 at first."""
        own = self.states.maps[0]
        if kind not in own:
            own[kind] = tuple(
                self._empty((self._nsamples, *one.shape[1:]), one.dtype).zero_() for one in like
            )
        return own[kind]


class LentOfSequences:
    """Those of some sequences, as a decoder layer takes them."""

    def __init__(self, lent: Lent, sequences: slice | Tensor) -> None:
        self._lent, self._sequences = lent, sequences

    def __contains__(self, kind: str) -> bool:
        return kind in self._lent.states

    def __getitem__(self, kind: str) -> tuple[Tensor, ...]:
        """A copy on the device where the layers compute."""
        return tuple(
            gathered(states, self._sequences, self._lent.device) for states in self._lent.states[kind]
        )

    def __setitem__(self, kind: str, values: Sequence[Tensor]) -> None:
        for states, one in zip(self._lent.own(kind, values), values, strict=True):
            states[self._sequences] = one.detach().to(states.device)

    def add(self, kind: str, values: Sequence[Tensor]) -> None:
        """Adds values to those that were added before."""
        for states, one in zip(self._lent.own(kind, values), values, strict=True):
            states[self._sequences] += one.to(states.device)
