"""The peak memory of each phase of a run, and memory that goes back to the system."""

import contextlib
import ctypes
import resource
import sys

import torch

from drot.machine.devices import is_gpu


class PeakMemory:
    """The peak memory of each phase, in bytes.

    `peaks` maps a phase to {"process": …} and, on a GPU, {"gpu": …}. "process" is the largest resident memory
    that the process has had from its start to the end of the phase, so it never falls from one phase to a
    later one. "gpu" is the largest memory that torch had allocated on the GPU during the phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._device = device
        self._active: list[str] = []

    def begin(self, phase: str) -> None:
        """Starts to measure `phase`. A phase may begin within another."""
        self._read()  # torch's peak is set back for the new phase
        self._active.append(phase)

    def end(self, phase: str) -> None:
        self._read()
        self._active.remove(phase)

    def _read(self) -> None:
        """Adds the peaks since the last call to the phases that are active, and sets torch's peaks back."""
        found = {"process": _resident_peak()}
        if is_gpu(self._device):
            module = torch.get_device_module(self._device)
            found["gpu"] = module.max_memory_allocated(self._device)
            module.reset_peak_memory_stats(self._device)
        for phase in self._active:
            peaks = self.peaks.setdefault(phase, {})
            for kind, size in found.items():
                peaks[kind] = max(peaks.get(kind, 0), size)


def _resident_peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def return_free_memory() -> None:
    """Returns the memory that the C library keeps for later use to the system, where the C library is glibc.

    glibc keeps freed blocks of up to 32 MB, which most weights of a layer are: without this, a model that is
    read layer by layer takes as much memory in the end as a model that lies in memory.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
