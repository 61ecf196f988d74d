"""A training step as one CUDA graph, so that a GPU does not wait for the launches of its kernels."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("drot")

#: A function of tensors that reads no value on the host.
Step = Callable[[list[Tensor]], list[Tensor]]
#: Records the kernels that its argument launches; returns a function that launches them again, and the
#: tensors to which they write.
Capture = Callable[[Callable[[], list[Tensor]]], tuple[Callable[[], None], list[Tensor]]]

#: Calls before the capture: libraries make handles and workspaces at their first calls.
WARM_UP = 3


def capture_for(device: torch.device) -> Capture | None:
    """How steps are captured on `device`; None on a CPU, which has no graphs."""
    if device.type != "cuda":
        return None

    def capture(work: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # threads that train on other GPUs may allocate memory meanwhile
        with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = work()

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay, outputs

    return capture


class GraphedStep:
    """A step that is captured after WARM_UP calls. What it changes in place is changed by every call.

    The step may overwrite its inputs, which are copies. An input that it overwrites and returns is not copied
    again if the next call has what this call returned.

    If the capture fails, a warning says so, and the step is called as before.

    step: the function. Its inputs have the same shapes in every call.
    capture: how it is captured; None never captures it.
    """

    def __init__(self, step: Step, capture: Capture | None) -> None:
        self._step, self._capture = step, capture
        self._calls = 0
        self._inputs: list[Tensor] = []
        self._held: list[Tensor | None] = []  # whose values the inputs hold
        self._outputs: list[Tensor] = []
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs of the step, in new tensors."""
        self._calls += 1
        if self._capture is not None and self._calls > WARM_UP and self._replay is None:
            self._inputs, self._held = [tensor.clone() for tensor in inputs], [None] * len(inputs)
            try:
                self._replay, self._outputs = self._capture(lambda: self._step(self._inputs))
            except RuntimeError as error:
                self._capture = None
                logger.warning(
                    "a training step could not be captured as a CUDA graph (%s): its kernels are launched "
                    "one by one, which is slower",
                    str(error).partition("\n")[0],
                )
        if self._replay is None:
            return self._step([tensor.clone() for tensor in inputs])
        for static, new, held in zip(self._inputs, inputs, self._held, strict=True):
            if new is not held:
                static.copy_(new)
        self._replay()
        results = [tensor.clone() for tensor in self._outputs]
        returned = {id(output): result for output, result in zip(self._outputs, results, strict=True)}
        self._held = [returned.get(id(static)) for static in self._inputs]
        return results
