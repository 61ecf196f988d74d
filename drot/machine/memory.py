"""The peak memory of each phase of a run, and memory that goes back to the system."""

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import torch

from drot.machine.devices import total_memory

#: the number of a setting of glibc's malloc
M_MMAP_THRESHOLD = -3
LARGE = 2**20
#: where Linux shows the limits of groups of processes
CGROUPS = Path("/sys/fs/cgroup")


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
