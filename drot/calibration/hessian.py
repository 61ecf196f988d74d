"""The Hessian H = (2/n) Σ x xᵀ of a linear's reconstruction error, and the Cholesky factor of its inverse."""

import torch
from torch import Tensor

from drot.calibration.cholesky import cholesky_
from drot.errors import UserError

#: The largest damping that is tried. With it a positive semi-definite H [in, in] has a condition number of at
#: most in + 1, which fp32 can factorise, so a failure has another cause than too little damping.
MAX_DAMPING = 1.0
#: The damping that is tried after a damping of 0 failed.
FIRST_DAMPING = 1e-3


class HessianAccumulator:
    """Accumulates H = (2/n) Σ x xᵀ [in, in] in fp32 over batches, with n the number of sequences.

    The scale is that of SparseGPT's code. It affects only `reference_compat`, which adds a term in the scale
    of H to the inverse.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._sum = torch.zeros(size, size, dtype=torch.float32, device=device)
        self._sequences = 0

    def add(self, x: Tensor) -> None:
        """Adds inputs x: [sequences, tokens, in], or [tokens, in] for one sequence, any float dtype."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self._sum.addmm_(rows.T, rows)
        self._sequences += x.shape[0] if x.dim() == 3 else 1

    def hessian(self) -> Tensor:
        """H [in, in], fp32. It uses the accumulator's memory, so `add` must not be called afterwards."""
        return self._sum.mul_(2.0 / max(self._sequences, 1))


def fix_dead_columns(hessian: Tensor) -> Tensor:
    """Sets H_jj = 1 in place for dead columns j, whose input is always 0. Returns their mask, bool [in]."""
    dead_columns = hessian.diagonal() == 0
    hessian.diagonal().masked_fill_(dead_columns, 1.0)
    return dead_columns


def inverse_cholesky(hessian: Tensor, damping: float) -> tuple[Tensor, float]:
    """Hinv, the upper Cholesky factor U of (H + λ·mean(diag H)·I)⁻¹ = UᵀU with diag(U) > 0, and λ.

    hessian: [n, n], fp32 or fp64, symmetric, with diag(H) > 0.
    damping: the first λ. While the factorisation fails, λ is multiplied by 10, up to MAX_DAMPING.

    U = J L⁻¹ J, where J reverses the order of the columns and J H J = L Lᵀ. So one factorisation and one
    triangular inverse suffice. Factorising a computed H⁻¹ instead could fail, because of its rounding.

    Raises UserError if the factorisation fails with MAX_DAMPING.
    """
    columns = hessian.shape[0]
    mean = hessian.diagonal().mean()
    identity = torch.eye(columns, dtype=hessian.dtype, device=hessian.device)
    while True:
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(damping * mean)
        if cholesky_(damped):
            upper = torch.linalg.solve_triangular(damped, identity, upper=False).flip(0, 1)
            if bool(torch.isfinite(upper).all()):
                return upper, damping
        if damping >= MAX_DAMPING:
            raise UserError(
                "the Hessian must be symmetric and positive semi-definite; got one of shape "
                f"{list(hessian.shape)} that has no Cholesky factor even with a damping of {damping:g}: "
                'use more calibration samples, or `method="wanda"`'
            )
        damping = min(damping * 10, MAX_DAMPING) if damping else FIRST_DAMPING
