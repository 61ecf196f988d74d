"""The events that a long run reports to its caller, and the phases that they name."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    doing: what happens, in words.
    unit: what a step is; "" for a phase that reports no steps.
    layers: whether the phase goes through the decoder layers.
    often: whether the events come so often that a log should leave most of them out.
    """

    doing: str
    unit: str = ""
    layers: bool = False
    often: bool = False


#: name of a phase → what it is. `read`, `tokenize`, `load`, `sweep` and `save` are reported when they begin.
PHASES = {
    "read": Phase("reading the text", "character"),
    "tokenize": Phase("tokenising the text", "character"),
    "load": Phase("loading the model"),
    "sample": Phase("writing a text", "token", often=True),
    "weigh": Phase("weighting the tokens", layers=True, often=True),
    "calibrate": Phase("calibrating", layers=True, often=True),
    "rotate": Phase("rotating", "step", layers=True, often=True),
    "prune": Phase("pruning", layers=True),
    "recover": Phase("recovering", "epoch", layers=True),
    "distill": Phase("training towards the dense model", "step", often=True),
    "sensitivity": Phase("measuring output errors", layers=True),
    "finetune": Phase("fine-tuning", "step", often=True),
    "evaluate": Phase("evaluating", "window", often=True),
    "stream": Phase("evaluating", layers=True),
    "measure": Phase("measuring", "case"),
    "draw": Phase("drawing", "linear", often=True),
    "export": Phase("exporting", layers=True),
    "apply": Phase("applying", layers=True),
    "sweep": Phase("sweeping", "cell"),
    "save": Phase("saving the model"),
}


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """The position of a run when the event is reported.

    phase: a key of PHASES.
    layer, layers: the decoder layer, counted from 0, and the number of layers; layers is 0 in a phase that
        does not go through the layers, and in the training of one R1 for all of them.
    step, steps: the step inside the phase, in its unit, and the number of steps; steps is 0 if it is not
        known.
    loss: the objective at that step, entropy or pruned importance, as the mean over the layers; the error on
        held-out sequences in the phase `recover`, and the loss of a token in the phases `distill` and
        `finetune`.
    name: the model, in a run over several models; "" in others.
    """

    phase: str
    layer: int = 0
    layers: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    name: str = ""


class Progress(Protocol):
    def __call__(self, event: ProgressEvent) -> None: ...


def silent(event: ProgressEvent) -> None:
    """The default `progress`: ignores the event."""
