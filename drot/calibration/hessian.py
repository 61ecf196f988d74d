"""The Hessian of a linear's layer-wise reconstruction error, H = (2/n) Σ x xᵀ, and its inverse."""

import torch
from torch import Tensor

from drot.errors import UserError

#: Where raising the damping ends. A positive semi-definite H plus its mean diagonal has a condition
#: number of at most in + 1, which fp32 factorises, so a failure there is no lack of damping.
MAX_DAMPING = 1.0
#: What follows a damping of 0 that failed.
FIRST_DAMPING = 1e-3


class HessianAccumulator:
    """Sums H [in, in] in fp32 over batches, as 2/n over the n calibration *sequences* (the scale of
    SparseGPT's code: only ratios matter, but for `reference_compat`, which mixes H and its inverse)."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self._sequences = 0

    def add(self, x: Tensor) -> None:
        """x [sequences, tokens, in] or [tokens, in] (one sequence), any float dtype."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self._sum.addmm_(rows.T, rows)
        self._sequences += x.shape[0] if x.dim() == 3 else 1

    def hessian(self) -> Tensor:
        """H [in, in], fp32. The accumulator's memory is handed over: add nothing afterwards."""
        return self._sum.mul_(2.0 / max(self._sequences, 1))


def mend_dead(hessian: Tensor) -> Tensor:
    """Columns that no input ever reached, bool [in]; sets H_jj = 1 there, in place."""
    dead = hessian.diagonal() == 0
    hessian.diagonal().masked_fill_(dead, 1.0)
    return dead


def inverse_factor(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper triangular U, diag(U) > 0, of (H + λ·mean(diag H)·I)^-1 = UᵀU, and the λ it took.

    hessian: [n, n] fp32 or fp64, symmetric, diag(H) > 0. λ starts at `damping` and grows tenfold
    while the Cholesky factorisation fails, up to MAX_DAMPING, then UserError.

    With J the reversal of the order and J H J = L Lᵀ, U = J L^-1 J: one factorisation and one
    triangular inverse, without the product H^-1 whose rounding makes a second factorisation fail.
    """
    columns = hessian.shape[0]
    mean = hessian.diagonal().mean()
    identity = torch.eye(columns, dtype=hessian.dtype, device=hessian.device)
    share = damping
    while True:
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(share * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
            if bool(torch.isfinite(upper).all()):
                return upper, share
        if share >= MAX_DAMPING:
            raise UserError(
                f"the Hessian of shape {list(hessian.shape)} has no Cholesky factor even with a damping of "
                f"{share:g}: it must be symmetric and positive semi-definite; use more calibration "
                "samples, or prune with wanda"
            )
        share = min(share * 10, MAX_DAMPING) if share else FIRST_DAMPING
