"""A training step as one CUDA graph, so that a GPU does not wait for the launches of its kernels."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("drot")

#: A function that reads no value on the host. It reads and changes the same tensors in every call.
Step = Callable[[], Tensor]
#: Records the kernels that a step launches; returns a function that launches them again, and the tensor to
#: which they write the step's result.
Capture = Callable[[Step], tuple[Callable[[], None], Tensor]]

#: Calls before the capture: libraries make handles and workspaces at their first calls.
WARM_UP = 3


def capture_for(device: torch.device) -> Capture | None:
    """How steps are captured on `device`; None on a CPU, which has no graphs."""
    if device.type != "cuda":
        return None

    def capture(step: Step) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # threads that train on other GPUs may allocate memory meanwhile
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = step()

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay, result

    return capture


class GraphedStep:
    """A step that is captured after WARM_UP calls; without `capture` never.

    If the capture fails, a warning says so, and the step is called as before.
    """

    def __init__(self, step: Step, capture: Capture | None) -> None:
        self._step, self._capture = step, capture
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._result: Tensor

    def __call__(self) -> Tensor:
        """The result of the step, in a new tensor."""
        self._calls += 1
        if self._capture is not None and self._calls > WARM_UP and self._replay is None:
            try:
                self._replay, self._result = self._capture(self._step)
            except RuntimeError as error:
                self._capture = None
                logger.warning(
                    "a training step could not be captured as a CUDA graph (%s): its kernels are launched "
                    "one by one, which is slower",
                    str(error).partition("\n")[0],
                )
        if self._replay is None:
            return self._step()
        self._replay()
        return self._result.clone()
