"""The batches of a training on the calibration sequences, and the sequences that it holds out."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from drot.core.errors import UserError
from drot.machine.ranks import ALONE, Ranks

#: Share of the sequences that a training does not see, at least one sequence: of the training of each layer,
#: and of the training of all layers together, which has more sequences.
HELD_OUT_SHARE, DISTILL_HELD_OUT_SHARE = 1 / 8, 1 / 16
#: how often a training reads the sequences of a text that is too short for it
MOST_REPEATS = 3
#: share of the steps in which the learning rate rises to its full value; it then falls as a half cosine
WARM_UP = 0.05


def check_sequences(
    count: int,
    field: str,
    nsamples: str = "nsamples",
    ranks: Ranks = ALONE,
    share: float = HELD_OUT_SHARE,
) -> None:
    """Raises UserError if a training has too few sequences to hold some out and train each rank.

    field: the setting that asks for it, as in `recover="block"`. nsamples: the setting of its sequences.
    share: of the sequences that are held out.
    """
    needed = next(n for n in itertools.count(2) if n - held_out_sequences(n, share) >= ranks.size)
    if count < needed:
        raise UserError(
            f"`{field}` needs at least {needed} calibration sequences, because it holds some out; "
            f"got {count}: use more `{nsamples}`"
        )


def held_out_sequences(nsamples: int, share: float = HELD_OUT_SHARE) -> int:
    return max(1, int(nsamples * share))


def repeats(wanted: int, found: int) -> int:
    """How often a training reads the `found` sequences of a text that has fewer than are `wanted`.

    Not more than MOST_REPEATS times: it would learn them by heart.
    """
    return min(MOST_REPEATS, max(1, round(wanted / found)))


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rate in `step`: a linear rise, then a half cosine down to 0."""
    rise = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Batches:
    """The sequences of this rank in the batches of all ranks.

    The last sequences of all ranks are held out. In a batch each rank takes equally many of its own, while it
    has them.

    count: the sequences of this rank. batch: the sequences of a batch, of all ranks. share: of the sequences,
        which is held out.
    """

    def __init__(
        self, count: int, batch: int, ranks: Ranks, seed: int, share: float = HELD_OUT_SHARE
    ) -> None:
        self._count, self._batch, self._part = count, batch, max(1, batch // ranks.size)
        total = int(ranks.total(count))
        self.held_out_count = held_out_sequences(total, share)
        self.trained_count = total - self.held_out_count
        self._trained = len(ranks.sequences(self.trained_count))
        #: how many each rank trains on
        self._of_ranks = [len(range(rank, self.trained_count, ranks.size)) for rank in range(ranks.size)]
        self.steps = math.ceil(max(self._of_ranks) / self._part)
        self._generator = torch.Generator().manual_seed(seed)

    def held_out(self) -> list[Tensor]:
        parts = torch.arange(self._trained, self._count).split(self._batch)
        return [part for part in parts if len(part)]  # the last rank may hold none out

    def epoch(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yields for each batch this rank's part, how many sequences of it count, and those of all ranks.

        A rank that has no sequence left takes one that does not count, so that it adds gradients of 0.
        """
        order = torch.randperm(self._trained, generator=self._generator)
        for start in range(0, self.steps * self._part, self._part):
            part = order[start : start + self._part]
            size = sum(min(self._part, max(count - start, 0)) for count in self._of_ranks)
            yield (part if len(part) else order[:1]), len(part), size
