"""The peak rates of a machine, from which the time of a run is estimated: matrix products and a copy."""

import functools
from collections.abc import Callable

import torch

from drot.speed.timing import interleaved

#: device type → rows of the square matrices, and bytes of the copied tensor: large enough for the full rate,
#: and done within a few seconds
SIZES = {"cpu": (1024, 2**27), "cuda": (8192, 2**30)}
REPEATS = 9


@torch.no_grad()
def measure_peaks(
    device: torch.device, *, rows: int | None = None, copied: int | None = None
) -> dict[str, float]:
    """The medians of a product in float32, a product in bfloat16 and a copy.

    Returns `float32` and `bfloat16`, operations a second, and `copy`, bytes a second read and written.

    rows: rows of the square matrices; None is the value of SIZES.
    copied: bytes of the copied tensor; None is the value of SIZES.
    """
    default = SIZES[device.type]
    rows, copied = rows or default[0], copied or default[1]
    factor = torch.randn(rows, rows, device=device)
    half = factor.bfloat16()
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    functions: dict[str, Callable[[], object]] = {
        "float32": functools.partial(torch.matmul, factor, factor),
        "bfloat16": functools.partial(torch.matmul, half, half),
        "copy": functools.partial(torch.zeros_like(source).copy_, source),
    }
    done = {"float32": 2 * rows**3, "bfloat16": 2 * rows**3, "copy": 2 * copied}
    timings = interleaved(functions, device=device, repeats=REPEATS)
    return {name: done[name] / timing.median for name, timing in timings.items()}
