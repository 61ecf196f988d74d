"""Importance scores of rotated weights (paper, appendix A), and the matrices from which they are computed.

The scores are s_ij = Y_ij² · column_scale_j, where Y is the rotated weight. With q = diag(RᵀMR), column_scale
is 1 (magnitude), q for M = H (Wanda) or 1/q for M = H⁻¹ (SparseGPT). The full product RᵀMR is not needed,
because q is the column sum of R ∘ (MR).
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from drot import ops
from drot.architectures import INPUT_GROUPS, HeadShape
from drot.calibration.hessian import HessianFactor, InputHessian, factorize
from drot.products import add_product, product

#: What two halves of 16 bits leave undecided in q = diag(RᵀMR), as a share of the largest element of M's
#: diagonal.
RESOLUTION = 2.0**-20


@dataclass(frozen=True)
class Metric:
    """The matrix M of one input group, from which the column_scale of its linears is computed.

    matrix: M [in, in] for the inputs that R1 rotates; its diagonal blocks [heads, h, h] for o_proj; its
        diagonal [in] for down_proj, whose input is not rotated. None if column_scale is 1.
    inverse: whether column_scale is 1/q (True) or q (False), with q = diag(RᵀMR).
    low: what M lost when `matrix` was rounded to 16 bits, in 16 bits too; None if `matrix` is M itself.
    smallest: the smallest q (0-dim) that the two halves of M can tell from rounding; None if `low` is.
    """

    matrix: Tensor | None
    inverse: bool
    low: Tensor | None = None
    smallest: Tensor | None = None

    def rounded(self, dtype: torch.dtype) -> "Metric":
        """The metric with a matrix in `dtype`. In 16 bits M is the sum of two matrices.

        One matrix of 16 bits is not enough: where M is ill-conditioned, its rounding can make a small q
        negative.
        """
        if self.matrix is None:
            return self
        high = self.matrix.to(dtype).contiguous()
        if dtype.itemsize > 2 or self.diagonal is None:
            return Metric(high, self.inverse)
        low = (self.matrix - high).to(dtype).contiguous()
        return Metric(high, self.inverse, low, RESOLUTION * self.diagonal.amax())

    def times(self, rotation: Tensor, dtype: torch.dtype) -> Tensor:
        """M R [n, b, b] in `dtype` for the diagonal blocks R [n, b, b], given in the dtype of `matrix`."""
        assert self.matrix is not None, "a metric without a matrix has no product"
        result = product(self.matrix, rotation, dtype)
        return result if self.low is None else add_product(result, self.low, rotation)

    def column_scale(self, q: Tensor) -> Tensor:
        """column_scale [in] from q [in]."""
        return q.reciprocal() if self.inverse else q

    @property
    def diagonal(self) -> Tensor | None:
        """diag(M) [in], which is q for R = I; None if column_scale is 1."""
        if self.matrix is None or self.matrix.dim() == 1:
            return self.matrix
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1).reshape(-1)
        return (
            diagonal
            if self.low is None
            else diagonal.float() + self.low.diagonal(dim1=-2, dim2=-1).reshape(-1)
        )

    def to(self, device: torch.device) -> "Metric":
        parts = (self.matrix, self.low, self.smallest)
        matrix, low, smallest = (None if part is None else part.to(device) for part in parts)
        return Metric(matrix, self.inverse, low, smallest)

    def q(self, rotation: Tensor, times: Tensor) -> Tensor:
        """diag(RᵀMR) [n · b] from R [n, b, b] and M R [n, b, b]; above 0 in spite of the rounding of M."""
        if self.smallest is None:
            return (rotation * times).sum(1).flatten()
        return torch.maximum(ops.column_dot(rotation, times).flatten(), self.smallest)

    def gradient_in_q(self, gradient: Tensor, column_scale: Tensor) -> Tensor:
        """The gradient in q from the gradient in column_scale."""
        return -gradient * column_scale * column_scale if self.inverse else gradient


@dataclass(frozen=True)
class LayerMetrics:
    """Input group (architectures.INPUT_GROUPS) → Metric, and → damping of the inverted Hessian."""

    metrics: dict[str, Metric]
    damping: dict[str, float]


def layer_metrics(
    method: str,
    hessians: dict[str, Tensor],
    shape: HeadShape,
    *,
    damping: float,
    average: str = "mean",
    reference_compat: bool = False,
    with_down: bool = True,
    groups: Collection[str] = tuple(INPUT_GROUPS),
    dtype: torch.dtype = torch.float32,
) -> LayerMetrics:
    """The metrics of one layer.

    Args:
        method: `magnitude`, `wanda` or `sparsegpt`.
        hessians: input group → H [in, in]; not used by `magnitude`.
        shape: attention sizes of the model.
        damping: what is added to the diagonal before the inversion, in units of `damping_unit`.
        average: as in `damping_unit`.
        reference_compat: adds the absolute damping to the inverse too, as the paper's code does.
        with_down: False omits the metric of down_proj, and so the inversion of the largest Hessian. The
            entropy does not depend on it, because the entropy normalises each column of down_proj.
        groups: the input groups that have a metric.
        dtype: dtype of the metrics.
    """
    assert method in ("magnitude", "wanda", "sparsegpt"), f"{method} has no metric"
    metrics, dampings = {}, {}
    for group in groups:
        if method == "magnitude" or (group == "down" and not with_down):
            metrics[group] = Metric(None, False)
            continue
        matrix = hessians[group]
        if method == "sparsegpt":
            factor = factorize(matrix, damping, average)
            dampings[group] = factor.damping
            matrix = _inverse(factor, group, shape)
            if reference_compat:
                (matrix if group == "down" else matrix.diagonal(dim1=-2, dim2=-1)).add_(damping * factor.unit)
        elif group == "down":
            matrix = matrix.diagonal().clone()
        elif group == "o":
            matrix = diagonal_blocks(matrix, shape.heads)
        metrics[group] = Metric(matrix.to(dtype), method == "sparsegpt")
    return LayerMetrics(metrics, dampings)


def column_scale(
    method: str, hessian: InputHessian, *, damping: float, reference_compat: bool
) -> Tensor | None:
    """The column_scale [in] of weights whose inputs have the Hessian `hessian`; None if it is 1.

    Args:
        method: `magnitude`, `wanda` or `sparsegpt`.
        hessian: H of the inputs; `sparsegpt` takes its factor.
        damping: as in `layer_metrics`.
        reference_compat: as in `layer_metrics`.
    """
    if method == "magnitude":
        return None
    if method == "wanda":
        return hessian.matrix.diagonal()
    diagonal = hessian.factor.inverse_diagonal
    return 1.0 / (diagonal + damping * hessian.factor.unit if reference_compat else diagonal)


def _inverse(factor: HessianFactor, group: str, shape: HeadShape) -> Tensor:
    """H⁻¹ = UᵀU [in, in], or only its diagonal or diagonal blocks, as in Metric."""
    if group == "down":
        return factor.inverse_diagonal
    hinv = factor.hinv
    if group == "o":
        columns = hinv.unflatten(1, (shape.heads, -1)).transpose(0, 1)
        return columns.mT @ columns
    return hinv.T @ hinv


def diagonal_blocks(matrix: Tensor, count: int) -> Tensor:
    """The diagonal blocks [count, n/count, n/count] of a matrix [n, n]."""
    return matrix.unflatten(0, (count, -1)).unflatten(2, (count, -1)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
