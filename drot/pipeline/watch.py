"""The seconds and the peak memory of each step of a run of `drot.prune`."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch

from drot.machine.devices import is_gpu

#: The steps whose time is measured. `load` is the model and the text, `weigh` the gradients that weight the
#: calibration tokens, `calibrate` every pass of the calibration tokens, `merge` brings the rotations into the
#: weights and the hidden states, and `save` writes the finished layers and the checkpoint.
STEPS = ("load", "weigh", "check", "calibrate", "rotate", "merge", "prune", "recover", "distill", "save")


class Watch:
    """Measures steps on `device`. A step may begin within another, and then counts for both.

    Attributes:
        seconds: step → its seconds.
        peaks: step → its peak memory in bytes, {"process": …} and, on a GPU, {"gpu": …}. "process" is the
            largest resident memory that the process has had from its start to the end of the step, so it
            never falls from one step to a later one. "gpu" is the largest memory that torch had allocated on
            the GPU during the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(STEPS, 0.0)
        self.peaks: dict[str, dict[str, int]] = {}
        self._device = device
        self._active: list[str] = []

    @contextlib.contextmanager
    def during(self, step: str) -> Iterator[None]:
        """A context in which `step` is measured."""
        began = time.perf_counter()
        self._read_peaks()  # torch's peak is set back for the new step
        self._active.append(step)
        try:
            yield
        finally:
            if is_gpu(self._device):  # the step ends when its queued work is done
                torch.get_device_module(self._device).current_stream(self._device).synchronize()
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - began
            self._read_peaks()
            self._active.remove(step)

    def _read_peaks(self) -> None:
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
