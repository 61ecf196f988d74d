"""Importance scores under rotation (paper, appendix A), and the metric each linear needs for them.

A score is s_ij = Y_ij² · f_j with Y the rotated weight and f the column factor: 1 (magnitude),
(RᵀHR)_jj (Wanda) or 1 / (RᵀH⁻¹R)_jj (SparseGPT). Only the diagonal of the rotated matrix is ever
needed: diag(RᵀMR) = colsum(R ∘ MR).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drot.architectures import INPUT_GROUPS, HeadShape
from drot.calibration.hessian import inverse_factor, mend_dead


@dataclass(frozen=True)
class Metric:
    """M of one distinct input and how its rotated diagonal q becomes the factor: q, or 1/q.

    matrix: [in, in] for the inputs that R1 rotates, [heads, h, h] (the diagonal blocks) for o_proj,
    [in] (the diagonal) for down_proj, whose input nothing rotates; None where every factor is 1.
    """

    matrix: Tensor | None
    inverse: bool

    def factor(self, q: Tensor) -> Tensor:
        return 1.0 / q if self.inverse else q

    def to(self, device: torch.device) -> "Metric":
        return Metric(None if self.matrix is None else self.matrix.to(device), self.inverse)

    def chain(self, grad_factor: Tensor, factor: Tensor) -> Tensor:
        """Gradient in q from the gradient in the factor."""
        return -grad_factor * factor * factor if self.inverse else grad_factor


@dataclass(frozen=True)
class LayerMetrics:
    """Input group (architectures.INPUT_GROUPS) → Metric, and the dampings that were needed."""

    metrics: dict[str, Metric]
    damping: dict[str, float]


def layer_metrics(
    method: str,
    hessians: dict[str, Tensor],
    shape: HeadShape,
    *,
    damping: float,
    reference_compat: bool = False,
    with_down: bool = True,
    dtype: torch.dtype = torch.float32,
) -> LayerMetrics:
    """The metrics of one layer from its four Hessians [in, in].

    with_down=False skips down_proj, whose factor the entropy does not depend on (each column is
    normalised by itself), and with it the inverse of the largest Hessian.
    reference_compat: the paper's code adds the absolute damping a second time, onto the inverse.
    """
    metrics, used = {}, {}
    for group in INPUT_GROUPS:
        if method == "magnitude" or (group == "down" and not with_down):
            metrics[group] = Metric(None, False)
            continue
        matrix = hessians[group]
        if method == "sparsegpt":
            mend_dead(matrix)
            absolute = damping * matrix.diagonal().mean()
            upper, used[group] = inverse_factor(matrix, damping)
            matrix = _inverse(upper, group, shape)
            if reference_compat:
                (matrix if group == "down" else matrix.diagonal(dim1=-2, dim2=-1)).add_(absolute)
        elif group == "down":
            matrix = matrix.diagonal().clone()
        elif group == "o":
            matrix = diagonal_blocks(matrix, shape.heads)
        metrics[group] = Metric(matrix.to(dtype), method == "sparsegpt")
    return LayerMetrics(metrics, used)


def _inverse(upper: Tensor, group: str, shape: HeadShape) -> Tensor:
    """UᵀU [in, in], or the part of it that the group's metric holds, without making the rest."""
    if group == "down":
        return upper.square().sum(0)
    if group == "o":
        columns = upper.unflatten(1, (shape.heads, -1)).transpose(0, 1)
        return columns.mT @ columns
    return upper.T @ upper


def diagonal_blocks(matrix: Tensor, count: int) -> Tensor:
    """The diagonal blocks [count, n/count, n/count] of a matrix [n, n]."""
    return matrix.unflatten(0, (count, -1)).unflatten(2, (count, -1)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
