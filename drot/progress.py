"""What a long run tells its caller while it goes on."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """One sign of life.

    phase: `check`, `calibrate`, `rotate`, `prune`, `evaluate`, `measure` or `save`.
    layer, layers: which decoder layer of how many (0-based; layers = 0 where there is none).
    step, steps: inside the phase (training step, window of an evaluation, case of a benchmark).
    loss: value of the objective at that step (mean entropy or pruned importance a layer).
    """

    phase: str
    layer: int = 0
    layers: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None


class Progress(Protocol):
    def __call__(self, event: ProgressEvent) -> None: ...


def silent(event: ProgressEvent) -> None:
    """The progress of a caller who wants none."""
