"""Interleaved timing: functions take turns, so that a change of the machine's speed meets them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    p20: float
    median: float
    p80: float


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: str | torch.device,
    repeats: int,
    warmup: int = 3,
) -> dict[str, Timing]:
    """Times every function `repeats` times, in turn. On CUDA a call ends when the GPU has finished."""
    cuda = torch.device(device).type == "cuda"

    def once(function: Callable[[], object]) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(warmup):
        for function in functions.values():
            once(function)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(once(function))
    out = {}
    for name, values in seconds.items():
        cuts = statistics.quantiles(values, n=5) if len(values) > 1 else [values[0]] * 4
        out[name] = Timing(p20=cuts[0], median=statistics.median(values), p80=cuts[3])
    return out
