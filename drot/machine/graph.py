"""A step as one CUDA graph, so that a GPU does not wait for the launches of its kernels."""

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drot.machine.devices import is_gpu

logger = logging.getLogger("drot")

#: A function that reads no value on the host. It reads and changes the same tensors in every call.
Step = Callable[[], Tensor]
#: Records the kernels that a step launches; returns a function that launches them again, and the tensor to
#: which they write the step's result.
Capture = Callable[[Step], tuple[Callable[[], None], Tensor]]

#: Calls before the capture: libraries make handles and workspaces at their first calls.
WARM_UP = 3

#: Devices on which a capture has failed. It is not tried again, since each failure leaves memory behind.
_failed: set[torch.device] = set()


@functools.cache
def _capture_stream(device: torch.device) -> torch.Stream:
    """The stream on which graphs of `device` are captured: always the same one.

    cuBLAS keeps a workspace, on an H100 of 32 MiB, for each stream that it has met.
    """
    return torch.get_device_module(device).Stream(device)


def capture_for(device: torch.device) -> Capture | None:
    """How steps are captured on `device`; None on a CPU, which has no graphs."""
    if not is_gpu(device) or device in _failed:
        return None
    gpu = torch.get_device_module(device)

    def capture(step: Step) -> tuple[Callable[[], None], Tensor]:
        graph = gpu.CUDAGraph()
        try:
            with (
                gpu.device(device),
                gpu.stream(gpu.current_stream(device)),  # is current again after a capture that failed
                # Torch's own stream lies on the first GPU of the process, where a graph of another GPU stays
                # empty. Threads that train on other GPUs may allocate memory meanwhile.
                gpu.graph(graph, stream=_capture_stream(device), capture_error_mode="thread_local"),
            ):
                result = step()
        except RuntimeError:
            _failed.add(device)
            raise

        def replay() -> None:
            with gpu.device(device):
                graph.replay()

        return replay, result

    return capture


class GraphedStep:
    """A step that is captured after WARM_UP calls; without `capture` never.

    If the capture fails, a warning says so, and the step is called as before. Raises RuntimeError if a graph
    does nothing: its loss would stay as it is, and a training would take that for convergence.

    state: tensors that the step changes, unless there is nothing left to change.
    """

    def __init__(self, step: Step, capture: Capture | None, state: Sequence[Tensor]) -> None:
        self._step, self._capture, self._state = step, capture, state
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._result: Tensor

    def __call__(self) -> Tensor:
        """The result of the step, in a new tensor."""
        self._calls += 1
        if self._replay is not None:
            self._replay()
        elif self._capture is None or self._calls <= WARM_UP or not self._captured(self._capture):
            return self._step()
        return self._result.clone()

    def _captured(self, capture: Capture) -> bool:
        """Captures the step and replays it once; returns whether that was possible."""
        try:
            replay, self._result = capture(self._step)
        except RuntimeError as error:
            self._capture = None
            logger.warning(
                "a training step could not be captured as a CUDA graph (%s): its kernels, and those of "
                "later layers, are launched one by one, which is slower",
                str(error).partition("\n")[0],
            )
            return False
        before = [tensor.clone() for tensor in self._state]
        replay()
        if self._is(before):  # as where the gradient is 0
            self._step()
            if not self._is(before):
                raise RuntimeError("the graph of a training step does nothing where a call of the step does")
        self._replay = replay
        return True

    def _is(self, before: list[Tensor]) -> bool:
        return all(map(torch.equal, self._state, before))
