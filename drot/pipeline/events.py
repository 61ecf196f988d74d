"""The events of a run of `drot.prune`, and who listens: clock, peaks of memory, progress."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from drot.core.events import Progress, ProgressEvent
from drot.machine.devices import is_gpu

#: The steps whose time is measured. `load` is the model and the text, `weigh` the gradients that weight the
#: calibration tokens, `calibrate` every pass of the
#: calibration tokens, `merge` brings the rotations into the weights and the hidden states, and `save` writes
#: the finished layers and the checkpoint.
STEPS = ("load", "weigh", "check", "calibrate", "rotate", "merge", "prune", "recover", "distill", "save")


@dataclass(frozen=True, kw_only=True)
class Event:
    """step: one of STEPS. layer: the decoder layer, counted from 0; None outside of the layers."""

    step: str
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepBegan(Event):
    """A step begins. A step of many parts begins several times for a layer."""


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """A step ends."""


@dataclass(frozen=True, kw_only=True)
class Announced(Event):
    """A step begins that is reported to the caller of the run."""


@dataclass(frozen=True, kw_only=True)
class Advanced(Event):
    """done, total: training steps or epochs. loss: as in ProgressEvent."""

    done: int
    total: int
    loss: float


Listener = Callable[[Event], None]


class Stopwatch:
    """Seconds of each step, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(STEPS, 0.0)
        self._device = device
        self._began: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepBegan):
            self._began[event.step] = time.perf_counter()
        elif isinstance(event, StepEnded):
            if is_gpu(self._device):  # the step ends when its queued work is done
                torch.get_device_module(self._device).current_stream(self._device).synchronize()
            seconds = time.perf_counter() - self._began.pop(event.step)
            self.seconds[event.step] = self.seconds.get(event.step, 0.0) + seconds


class MemoryWatch:
    """The peak memory of each step, in bytes.

    `peaks` maps a step to {"process": …} and, on a GPU, {"gpu": …}. "process" is the largest resident memory
    that the process has had from its start to the end of the step, so it never falls from one step to a later
    one. "gpu" is the largest memory that torch had allocated on the GPU during the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._device = device
        self._active: list[str] = []

    def __call__(self, event: Event) -> None:
        """A step may begin within another."""
        if isinstance(event, StepBegan):
            self._read()  # torch's peak is set back for the new step
            self._active.append(event.step)
        elif isinstance(event, StepEnded):
            self._read()
            self._active.remove(event.step)

    def _read(self) -> None:
        """Adds the peaks since the last call to the steps that are active, and sets torch's peaks back."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # macOS counts bytes, Linux KiB
        found = {"process": peak if sys.platform == "darwin" else peak * 1024}
        if is_gpu(self._device):
            module = torch.get_device_module(self._device)
            found["gpu"] = module.max_memory_allocated(self._device)
            module.reset_peak_memory_stats(self._device)
        for step in self._active:
            peaks = self.peaks.setdefault(step, {})
            for kind, size in found.items():
                peaks[kind] = max(peaks.get(kind, 0), size)


class ProgressReports:
    """Reports a run to the caller's `progress`. layers: the number of decoder layers."""

    def __init__(self, progress: Progress, layers: int) -> None:
        self._progress, self._layers = progress, layers

    def __call__(self, event: Event) -> None:
        layers = 0 if event.layer is None else self._layers
        at = dict(phase=event.step, layer=event.layer or 0, layers=layers)
        if isinstance(event, Advanced):
            self._progress(ProgressEvent(**at, step=event.done, steps=event.total, loss=event.loss))  # type: ignore[arg-type]
        elif isinstance(event, Announced):
            self._progress(ProgressEvent(**at))  # type: ignore[arg-type]
