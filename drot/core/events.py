"""The events that a long run reports to its caller."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The position of a run when the event is reported.

    phase: `read`, `tokenize`, `load`, `calibrate`, `rotate`, `prune`, `recover`, `sensitivity`, `finetune`,
        `evaluate`, `stream`, `measure`, `draw`, `export`, `apply`, `sweep` or `save`. `read`, `tokenize`,
        `load`, `sweep` and `save` are reported when they begin.
    layer, layers: the decoder layer, counted from 0, and the number of layers; layers is 0 in a phase that
        does not go through the layers.
    step, steps: the step inside the phase and the number of steps. A step is a training step, a window of
        an evaluation, an epoch of a recovery, a case of a benchmark, a linear of a report, a cell of a sweep,
        or a character of a text that is read or tokenised; steps is 0 if the length of the text is not known.
    loss: the objective at that step, entropy or pruned importance, as the mean over the layers; the error on
        held-out sequences in the phase `recover`, and the loss of a token in the phase `finetune`.
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
    """The default `progress`: ignores the event."""
