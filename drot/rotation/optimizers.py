"""Optimisers over orthogonal matrices `matrices`, a list of [batch, n, n].

`step` takes d loss/d Q of each of them, or None to leave the matrix as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.rotation.retraction import DIRECTIONS, SpectralStep
from drot.rotation.tensor_cores import TensorCoreStep, angles, on_tensor_cores


class PaperOptimizer:
    """The optimiser of the paper: Q = qr(A), with Adam on A (section 3.3 and appendix C).

    The gradient norm is clipped to 1, as in the paper's code. diag(R) >= 0 fixes the signs of Q, which the
    paper leaves open. The steps are the same for every objective.
    """

    CLIP = 1.0

    def __init__(self, start: list[Tensor], *, lr: float, steps: int, objective: str) -> None:
        self._parameters = [matrix.clone().requires_grad_(True) for matrix in start]
        self._adam = torch.optim.Adam(self._parameters, lr=lr)
        self._factorise()

    def _factorise(self) -> None:
        self._factors = [ops.batched_qr(a.detach()) for a in self._parameters]
        self.matrices = [q for q, _ in self._factors]

    def step(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient, (q, r) in zip(self._parameters, gradients, self._factors, strict=True):
            parameter.grad = None if gradient is None else ops.batched_qr_backward(gradient, q, r)
        torch.nn.utils.clip_grad_norm_(self._parameters, self.CLIP)
        self._adam.step()
        self._factorise()


class FastOptimizer:
    """Steps in so(n), in which no direction turns by more than the angle θ: Q ← Q exp(-θ J).

    For the pruned importance every direction turns by θ (spectral steps): S = QᵀG - GᵀQ, m ← μ m + S, and J
    is the polar factor of S + μ m. For the entropy J is Adam's direction, scaled (retraction.DIRECTIONS).

    θ falls linearly from the learning rate, in radians, to 0. The gradients of all steps lie in the space
    so(n), so the moments need no transport. The rate does not depend on n or on the scale of the loss.
    """

    def __init__(self, start: list[Tensor], *, lr: float, steps: int, objective: str) -> None:
        self.matrices = [matrix.clone(memory_format=torch.contiguous_format) for matrix in start]
        thetas = [lr * (1 - step / steps) for step in range(steps)]
        self._taken = 0
        self._turns: Sequence[Callable[..., None]]
        #: whether `turn` reads nothing on the host, as a CUDA graph needs
        self.capturable = on_tensor_cores(start[0])
        kind = TensorCoreStep if self.capturable else SpectralStep
        self._turns = [kind(matrix, DIRECTIONS[objective]) for matrix in self.matrices]
        if self.capturable:
            # a captured step reads its angle where the first step does
            self._angles: Any = angles(thetas, start[0].device)
            self._angle: Any = self._angles[0].clone() if steps else None
        else:
            self._angles, self._angle = thetas, thetas[0] if steps else None

    @torch.no_grad()
    def step(self, gradients: list[Tensor | None]) -> None:
        self.turn(gradients)
        self.count_step()

    def turn(self, gradients: list[Tensor | None], rounded: list[Tensor] | None = None) -> None:
        """Turns the matrices in place. `count_step` must follow.

        rounded: the matrices in a smaller dtype, where the caller has them (TensorCoreStep).
        """
        copies = [()] * len(self.matrices) if rounded is None else [(copy,) for copy in rounded]
        for matrix, gradient, turn, copy in zip(self.matrices, gradients, self._turns, copies, strict=True):
            if gradient is not None:
                turn(matrix, gradient, self._angle, *copy)

    def count_step(self) -> None:
        """Sets the angle of the next step."""
        self._taken += 1
        if self._taken == len(self._angles):
            return
        if self.capturable:
            self._angle.copy_(self._angles[self._taken])
        else:
            self._angle = self._angles[self._taken]


OPTIMIZERS: dict[str, type[PaperOptimizer] | type[FastOptimizer]] = {
    "paper": PaperOptimizer,
    "fast": FastOptimizer,
}
