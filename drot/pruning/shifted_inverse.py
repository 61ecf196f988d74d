"""ρ(H + ρI)⁻¹ of ADMM for a penalty ρ that grows, with products in 16 bits from one factorisation."""

import torch
from torch import Tensor

from drot.calibration.cholesky import cholesky_, inverse_of_factor_, sharing
from drot.calibration.hessian import diagonal_of
from drot.machine.products import add_product
from drot.machine.ranks import Ranks

#: degree of the polynomial that stands for 1/(1 + e p); its error is below 6e-4 for a growth e up to 0.3
DEGREE = 2
#: rows of a product in fp32 that are held at once
ROWS = 4096


class ShiftedInverse:
    """P = ρ(H + ρI)⁻¹ of one matrix H [in, in], or of each of a batch [..., in, in].

    The eigenvalues p = ρ/(λ + ρ) of P lie between 0 and 1, and ρ' = (1 + e) ρ makes (1 + e) p / (1 + e p) of
    p. So with products in 16 bits the next P is P times a polynomial in P: two products. A factor and an
    inverse take a quarter of the operations, but in fp32. Each update rounds P once, as the first inverse is
    rounded. With products in the dtype of H, every P comes from a factor.

    hessian: H, not changed; it must not change later either. penalty: the first ρ, fp64 [...].
    dtype: of the products. ranks: those that have the same H, and share the work.

    Attributes:
        matrix: P [..., in, in] in `dtype`.

    Raises torch.linalg.LinAlgError if H + ρI has no Cholesky factor.
    """

    matrix: Tensor

    def __init__(self, hessian: Tensor, penalty: Tensor, dtype: torch.dtype, ranks: Ranks) -> None:
        self._hessian, self._penalty, self._dtype = hessian, penalty.clone(), dtype
        self._ranks = sharing(hessian, ranks)
        self._rows = self._ranks.share(hessian.shape[-2])
        self.matrix = self._inverse()

    def grow(self, factor: Tensor) -> None:
        """P of ρ times `factor`, fp64 [...], which is between 1 and 1.3."""
        self._penalty *= factor
        if self._dtype != self._hessian.dtype:
            self._multiply_by_polynomial(_coefficients(factor).to(self._hessian))
        else:
            del self.matrix  # before the next: of a down_proj it is the largest matrix
            self.matrix = self._inverse()

    def _inverse(self) -> Tensor:
        shifted, shift = self._hessian.clone(), self._penalty.to(self._hessian)[..., None]
        diagonal_of(shifted).add_(shift)
        if not cholesky_(shifted, self._ranks).all():
            raise torch.linalg.LinAlgError("the Hessian of ADMM has no Cholesky factor")
        inverse_of_factor_(shifted, self._ranks)
        return shifted.mul_(shift[..., None]).to(self._dtype)

    def _multiply_by_polynomial(self, coefficients: Tensor) -> None:
        """P ← c₀ P + P (c₁ P + c₂ P²), of which each rank computes its rows.

        coefficients: c [3, ..., 1, 1].
        """
        constant, linear, square = coefficients
        inner = torch.empty_like(self.matrix)
        own, new = (whole[..., self._rows, :].split(ROWS, -2) for whole in (self.matrix, inner))
        for rows, result in zip(own, new, strict=True):
            wide = rows.to(self._hessian.dtype)
            squared = add_product(torch.zeros_like(wide), rows, self.matrix)
            result.copy_(squared.mul_(square).addcmul_(wide, linear))
        self._ranks.gather_rows_(inner)
        for rows in own:
            wide = rows.to(self._hessian.dtype).mul_(constant)
            rows.copy_(add_product(wide, rows, inner))
        self._ranks.gather_rows_(self.matrix)


def _coefficients(factor: Tensor) -> Tensor:
    """c [3, ..., 1, 1] in fp64: c₀ + c₁ p + c₂ p² is (1 + e)/(1 + e p) at the Chebyshev nodes of [0, 1]."""
    angles = (2 * torch.arange(DEGREE + 1, dtype=torch.float64) + 1) * torch.pi / (2 * (DEGREE + 1))
    nodes = (1 + angles.cos()) / 2
    wanted = factor[..., None] / (1 + (factor[..., None] - 1) * nodes)
    found = torch.linalg.solve(torch.linalg.vander(nodes, N=DEGREE + 1), wanted[..., None])
    return found.movedim(-2, 0)[..., None]
