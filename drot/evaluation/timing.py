"""Interleaved timing: functions run in turn, so that a change of the machine's speed affects all alike.

On a GPU the clock of the host adds about ten microseconds to a call, as much as a small kernel takes, so many
calls are replayed as one CUDA graph.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drot.machine.graph import WARM_UP, Capture, capture_for

#: seconds that a measurement of a captured function takes at least
SHORTEST = 2e-3
#: the most calls in one graph
MOST_CALLS = 256


@dataclass(frozen=True)
class Timing:
    """Seconds of one call of a function: the 20th percentile, the median and the 80th percentile."""

    p20: float
    median: float
    p80: float


@dataclass(frozen=True)
class Replay:
    """`calls` calls of a function in one CUDA graph.

    replay: launches the graph.
    function: holds in memory what the graph reads.
    """

    replay: Callable[[], None]
    calls: int
    function: Callable[[], object]

    def __call__(self) -> None:
        self.replay()


def replayed(
    function: Callable[[], object], device: torch.device, capture: Capture | None = None
) -> Callable[[], object]:
    """`function` on a CPU. On a GPU a Replay of as many calls of it as take SHORTEST.

    `interleaved` then measures what a call computes, without the time in which Python launches its kernels.
    Raises RuntimeError if the function cannot be captured, as when it waits for the GPU.

    capture: how calls are captured; None is `capture_for`.
    """
    capture = capture or capture_for(device)
    if capture is None:
        return function

    def graph_of(calls: int) -> Replay:
        def step() -> Tensor:
            for _ in range(calls):
                function()
            return torch.empty(0)  # what a step returns

        return Replay(capture(step)[0], calls, function)

    for _ in range(WARM_UP):
        function()
    single = {"": graph_of(1)}
    seconds = interleaved(single, device=device, repeats=5)[""].median
    calls = min(MOST_CALLS, math.ceil(SHORTEST / seconds))
    return single[""] if calls == 1 else graph_of(calls)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: str | torch.device,
    repeats: int,
    warmup: int = 3,
    clock: Callable[[], float] | None = None,
) -> dict[str, Timing]:
    """The Timing of each function, measured over `repeats` rounds. A round calls every function once.

    functions: name → function. On a GPU, the time of a call ends when the GPU is idle. The time of a Replay
        is divided by its calls.
    warmup: rounds before the measured ones.
    clock: gives seconds; None is the wall clock. `time.process_time` counts those in which the process
        computes, for a machine that has other work.
    """
    clock = clock or time.perf_counter
    cuda = torch.device(device).type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(warmup + repeats):
        for name, function in functions.items():
            if cuda:
                torch.cuda.synchronize(device)
            start = clock()
            function()
            if cuda:
                torch.cuda.synchronize(device)
            calls = function.calls if isinstance(function, Replay) else 1
            seconds[name].append((clock() - start) / calls)
    return {name: _timing(values[warmup:]) for name, values in seconds.items()}


def _timing(values: list[float]) -> Timing:
    cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values * 4
    return Timing(p20=cuts[0], median=statistics.median(values), p80=cuts[3])
