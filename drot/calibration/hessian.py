"""The Hessian of a linear's layer-wise reconstruction error, H = (2/n) Σ x xᵀ, and its inverse."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drot.errors import UserError

#: a failed Cholesky multiplies the damping by 10 at most this often
MAX_DAMPING_STEPS = 6


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


@dataclass(frozen=True)
class DampedHessian:
    """Upper-triangular or full inverse of a damped Hessian, with the damping that it took."""

    inverse: Tensor
    damping: float


def mend_dead(hessian: Tensor) -> Tensor:
    """Columns that no input ever reached, bool [in]; sets H_jj = 1 there, in place."""
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    return dead


def damped_inverse(hessian: Tensor, damping: float, *, name: str = "the Hessian") -> DampedHessian:
    """(H + λ·mean(diag H)·I)⁻¹ [in, in] by Cholesky, in H's dtype.

    λ starts at `damping`; where the factorisation fails it grows tenfold, step by step, and the λ
    that was used is returned. Raises UserError for a Hessian that is not finite or never positive
    definite. H itself is left as it was, but for dead columns (`mend_dead`).
    """
    mend_dead(hessian)
    mean = hessian.diagonal().mean()
    if not torch.isfinite(mean):
        raise UserError(
            f"{name} is not finite: the calibration activations overflowed; use --dtype bfloat16 or float32"
        )
    used = damping
    for _ in range(MAX_DAMPING_STEPS + 1):
        damped = hessian.clone()
        damped.diagonal().add_(used * mean)
        factor, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()):
            return DampedHessian(torch.cholesky_inverse(factor), used)
        used = max(used, 1e-4) * 10
    raise UserError(
        f"{name} is not positive definite even with damping {used / 10:g}: "
        "calibrate on more or other text, or set a higher --damping"
    )
