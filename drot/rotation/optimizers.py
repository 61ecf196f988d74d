"""Optimisers over orthogonal matrices.

An optimiser holds `matrices`, a list of [n, n] or [batch, n, n]. `step` takes d loss/d Q of each of them, or
None to leave the matrix as it is. No optimiser builds an autograd graph.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.rotation.retraction import SpectralStep
from drot.rotation.tensor_cores import TensorCoreStep, angles, on_tensor_cores


class PaperOptimizer:
    """The optimiser of the paper: Q = qr(A), with Adam on A (section 3.3 and appendix D).

    The gradient norm is clipped to 1, as in the paper's code. diag(R) >= 0 fixes the signs of Q, which the
    paper leaves open.
    """

    CLIP = 1.0

    def __init__(self, start: list[Tensor], *, lr: float, steps: int) -> None:
        self._parameters = [matrix.clone().requires_grad_(True) for matrix in start]
        self._adam = torch.optim.Adam(self._parameters, lr=lr)
        self._factors: list[tuple[Tensor, Tensor]] = []
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
    """Spectral steps in so(n): in every step all directions turn by the same angle θ.

    S = QᵀG - GᵀQ,  m ← μ m + S,  u = μ m + S (Nesterov),  J = the polar factor of u,  Q ← Q exp(-θ J).

    θ is the learning rate, in radians, times a cosine decay. The gradients of all steps lie in the same space
    so(n), so the momentum m needs no transport. The rate does not depend on n or on the scale of the loss.
    """

    MOMENTUM = 0.9

    def __init__(self, start: list[Tensor], *, lr: float, steps: int) -> None:
        self.matrices = [matrix.clone() for matrix in start]
        thetas = [lr * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
        self._step = 0
        self._turns: Sequence[Callable[..., Tensor]]
        self._angles: Tensor | list[float] = thetas
        if on_tensor_cores(start[0]):
            self._turns = [TensorCoreStep(matrix, self.MOMENTUM) for matrix in start]
            self._angles = angles(thetas, start[0].device)
        else:
            self._turns = [SpectralStep(matrix, self.MOMENTUM) for matrix in start]

    @property
    def capturable(self) -> bool:
        """Whether `turned` reads nothing on the host, as a CUDA graph needs."""
        return isinstance(self._angles, Tensor)

    @property
    def angle(self) -> Any:
        """The angle of the next step, as `turned` takes it."""
        return self._angles[self._step]

    @torch.no_grad()
    def step(self, gradients: list[Tensor | None]) -> None:
        # only the steps that can be captured overwrite the matrices
        matrices = [matrix.clone() for matrix in self.matrices] if self.capturable else self.matrices
        self.move(self.turned(matrices, gradients, self.angle))

    def turned(
        self,
        matrices: list[Tensor],
        gradients: list[Tensor | None],
        angle: Any,
        rounded: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """The matrices after a step. Changes the momenta in place.

        Args:
            matrices: the matrices before the step, which are overwritten if `capturable`.
            gradients: d loss/d matrix for each matrix; a matrix with None stays as it is.
            angle: the attribute `angle`, or a tensor with its values.
            rounded: the matrices in a smaller dtype, where the caller has them; steps on tensor cores use
                them if the dtype is bf16.
        """
        further = [()] * len(matrices) if rounded is None else [(copy,) for copy in rounded]
        return [
            matrix if gradient is None else turn(matrix, gradient, angle, *copy)
            for matrix, gradient, turn, copy in zip(matrices, gradients, self._turns, further, strict=True)
        ]

    def move(self, matrices: list[Tensor]) -> None:
        """Ends a step at `matrices`."""
        self.matrices = matrices
        self._step += 1


OPTIMIZERS: dict[str, type[PaperOptimizer] | type[FastOptimizer]] = {
    "paper": PaperOptimizer,
    "fast": FastOptimizer,
}
