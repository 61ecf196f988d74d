"""The peak memory of each phase of a run, and memory that goes back to the system."""

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import torch

from drot.machine.devices import is_gpu, total_memory

#: the number of a setting of glibc's malloc
M_MMAP_THRESHOLD = -3
LARGE = 2**20
#: where Linux shows the limits of groups of processes
CGROUPS = Path("/sys/fs/cgroup")


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


def return_large_blocks() -> None:
    """Lets the C library return each block of at least LARGE bytes to the system when it is freed, for glibc.

    `return_free_memory` finds no such block while a smaller one beside it is in use, and a limit of the
    process counts the gaps. New blocks cost time, so this is for models that memory would not hold otherwise.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def available_memory() -> int:
    """The bytes of main memory that this process can still take, by the system, its cgroups and its limits.

    What the system keeps of files counts as free, since it gives that up.
    """
    found = [total_memory(torch.device("cpu"))]
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        if (most := resource.getrlimit(limit)[0]) != resource.RLIM_INFINITY:
            found.append(most - _of_process(used))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kind, path = line.split(":", 2)
            if kind in ("", "memory"):
                own = CGROUPS / kind / path.strip("/")
                found += [_left_in(group) for group in (own, *own.parents) if group.is_relative_to(CGROUPS)]
    return min(found)


def _of_process(name: str) -> int:
    """A figure of this process in bytes, such as VmData; 0 on a system that does not tell it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _left_in(group: Path) -> int:
    """The bytes that the limit of a cgroup leaves; very many without a limit."""
    for limit, used, files in (
        ("memory.max", "memory.current", "file"),  # version 2 of cgroups
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int((group / limit).read_text())  # "max" is no number
            figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return most - int((group / used).read_text()) + int(figures[files])
    return sys.maxsize
