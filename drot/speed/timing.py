"""Interleaved timing: functions run in turn, so that a change of the machine's speed affects all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call of a function: the 20th percentile, the median and the 80th percentile."""

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
    """The Timing of each function, measured over `repeats` rounds. A round calls every function once.

    functions: name → function. On a GPU, the time of a call ends when the GPU is idle.
    warmup: rounds before the measured ones.
    """
    cuda = torch.device(device).type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(warmup + repeats):
        for name, function in functions.items():
            if cuda:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            function()
            if cuda:
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: _timing(values[warmup:]) for name, values in seconds.items()}


def _timing(values: list[float]) -> Timing:
    cuts = statistics.quantiles(values, n=5) if len(values) > 1 else values * 4
    return Timing(p20=cuts[0], median=statistics.median(values), p80=cuts[3])
