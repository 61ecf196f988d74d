"""Optimisers over orthogonal matrices.

Both hold stacks of square matrices ([n, n] or [batch, n, n]), `matrices`, start at the identity and never
build an autograd graph. `step` moves them, given d loss/d Q of each stack, None for one that stays.
"""

import torch
from torch import Tensor

from drot import ops


class PaperOptimizer:
    """The paper's: Q = qr(A), Adam on A (section 3.3 and appendix D), gradient norm clipped to 1 as
    in the paper's code. diag(R) > 0 fixes the signs that the paper leaves free."""

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
    """Adam in the tangent space of SO(n), cosine decay of the rate.

    The gradient in the body frame is the skew part of QᵀG; Adam's two moments live in so(n), so
    they need no transport, and the step Ω (skew again, since the moments of a skew matrix are skew
    and symmetric) is retracted: Q ← Q · cayley(Ω).
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
            q if omega.grad is None else ops.retract(q, omega)
            for q, omega in zip(self.matrices, self._omegas, strict=True)
        ]


OPTIMIZERS: dict[str, type[PaperOptimizer] | type[FastOptimizer]] = {
    "paper": PaperOptimizer,
    "fast": FastOptimizer,
}


def orthogonality_error(q: Tensor) -> float:
    """max |QᵀQ − I| over the stack, measured in fp64."""
    q = q.double()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return float((q.mT @ q - eye).abs().amax())


@torch.no_grad()
def polish(q: Tensor) -> Tensor:
    """The orthogonal matrix next to an almost orthogonal one, in fp64 (Newton–Schulz, two steps)."""
    return ops.newton_schulz(ops.newton_schulz(q.double()))
