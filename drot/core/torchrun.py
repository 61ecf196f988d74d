"""What torchrun tells a process in its environment."""

import os


def rank() -> int:
    """The number of this process among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this process among those of its machine, which is that of its GPU; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int | None:
    """The number of processes that torchrun started on this machine; None without it."""
    found = os.environ.get("LOCAL_WORLD_SIZE")
    return None if found is None else int(found)


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
