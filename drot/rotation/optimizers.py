"""Optimisers over orthogonal matrices.

An optimiser holds `matrices`, a list of [n, n] or [batch, n, n]. `step` takes d loss/d Q of each of them, or
None to leave the matrix as it is. No optimiser builds an autograd graph.
"""

import torch
from torch import Tensor

from drot import ops
from drot.rotation.retraction import retract


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
    """Adam in the tangent space so(n) of SO(n), with a cosine decay of the learning rate: Q ← Q · cayley(Ω).

    Ω is Adam's step for the gradient QᵀG - GᵀQ, with G = d loss/d Q. The gradients of all steps lie in the
    same space so(n), so Adam's moments need no transport. Ω is skew-symmetric too, because the first moment
    is skew-symmetric and the second is symmetric.
    """

    def __init__(self, start: list[Tensor], *, lr: float, steps: int) -> None:
        self.matrices = [matrix.clone() for matrix in start]
        self._omegas = [torch.zeros_like(matrix, requires_grad=True) for matrix in start]
        self._adam = torch.optim.Adam(self._omegas, lr=lr)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._adam, T_max=max(steps, 1))

    @torch.no_grad()
    def step(self, gradients: list[Tensor | None]) -> None:
        for omega, gradient, q in zip(self._omegas, gradients, self.matrices, strict=True):
            omega.grad = None
            if gradient is not None:
                s = q.mT @ gradient
                omega.grad = s - s.mT
            omega.zero_()
        self._adam.step()
        self._schedule.step()
        self.matrices = [
            q if omega.grad is None else retract(q, omega)
            for q, omega in zip(self.matrices, self._omegas, strict=True)
        ]


OPTIMIZERS: dict[str, type[PaperOptimizer] | type[FastOptimizer]] = {
    "paper": PaperOptimizer,
    "fast": FastOptimizer,
}
