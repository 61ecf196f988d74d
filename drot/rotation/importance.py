"""Importance scores of rotated weights (paper, appendix A), and the matrices from which they are computed.

The scores are s_ij = Y_ij² · column_scale_j, where Y is the rotated weight. With q = diag(RᵀMR), column_scale
is 1 (magnitude), q for M = H (Wanda) or 1/q for M = H⁻¹ (SparseGPT). The full product RᵀMR is not needed,
because q is the column sum of R ∘ (M R), and of (U R) ∘ (U R) for M = UᵀU.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from drot import ops
from drot.calibration.cholesky import cholesky_
from drot.calibration.hessian import HessianFactor, InputHessian, at_once, diagonal_of, factorize
from drot.config import WITHOUT_HESSIAN, Method
from drot.machine.products import add_product
from drot.model.family import InputGroup, alike
from drot.model.sizes import HeadShape

#: The smallest share of the largest element of M's diagonal that is added to the diagonal, where M has no
#: Cholesky factor without it. In 16 bits rounding would hide a smaller q.
RESOLUTION = 2.0**-20


@dataclass(frozen=True)
class Metric:
    """The matrix M of one input group, from which the column_scale of its linears is computed.

    matrix: M [in, in] for an input that R1 rotates; its diagonal blocks [heads, h, h] for R2 and [in/b, b, b]
        for R3; its diagonal [in] for an input that is not rotated. None if column_scale is 1.
    inverse: whether column_scale is 1/q (True) or q (False), with q = diag(RᵀMR).
    factored: whether `matrix` holds U with M = UᵀU instead of M. Then q is ‖U R‖² by columns.
    """

    matrix: Tensor | None
    inverse: bool
    factored: bool = False

    def rounded(self, dtype: torch.dtype) -> "Metric":
        """The metric with a matrix in `dtype`; in 16 bits with a factor of M.

        Where M is ill-conditioned, its rounding to 16 bits can make a small q negative. With the rounded
        factor q stays above 0.
        """
        if self.matrix is None:
            return self
        if dtype.itemsize > 2 or self.matrix.dim() == 1:
            return Metric(self.matrix.to(dtype).contiguous(), self.inverse)
        return Metric(upper_factor(self.matrix).to(dtype), self.inverse, factored=True)

    def column_scale(self, q: Tensor) -> Tensor:
        # of a singular M, rounding makes some q negative
        return q.reciprocal() if self.inverse else q.clamp_min(0)

    @property
    def diagonal(self) -> Tensor | None:
        """diag(M) [in], which is q for R = I; None if column_scale is 1."""
        if self.matrix is None or self.matrix.dim() == 1:
            return self.matrix
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(-1)

    def to(self, device: torch.device) -> "Metric":
        matrix = None if self.matrix is None else self.matrix.to(device)
        return Metric(matrix, self.inverse, self.factored)


class ColumnScales:
    """The column_scale of each of the inputs that one rotation R rotates, and the gradients of R in them.

    metric: the matrices M of the inputs, or their factors U, one below the other in the blocks of R:
        [n, inputs · b, b]. column_scale is q or 1/q for q = diag(RᵀMR).
    blocks: the diagonal blocks [n, b, b] of R.
    rounded: `blocks` in the dtype of the metric's matrix.
    """

    def __init__(self, metric: Metric, blocks: Tensor, rounded: Tensor) -> None:
        self.metric = metric
        if metric.matrix is None:
            return
        self._product = (metric.matrix @ rounded).unflatten(1, (-1, blocks.shape[-1]))
        if metric.factored:
            values = ops.column_scale(self._product.flatten(0, 1), metric.inverse)
            self._values = values.unflatten(0, self._product.shape[:2])
        else:
            self._values = metric.column_scale((blocks[:, None] * self._product).sum(2))

    def of_inputs(self, which: slice) -> Tensor | None:
        """column_scale [inputs · in] of some of the inputs; None if it is 1."""
        return None if self.metric.matrix is None else self._values[:, which].transpose(0, 1).flatten()

    def add_gradient(self, rotation_gradient: Tensor, gradients: list[Tensor]) -> None:
        """Adds 2 (M R) diag(dq) of all inputs to `rotation_gradient` [n, b, b].

        gradients: d loss/d column_scale [inputs · in], the inputs in parts. May be called once.
        """
        if self.metric.matrix is None:
            return
        every = torch.cat(gradients) if len(gradients) > 1 else gradients[0]
        dq = every.view(self._values.shape[1], len(rotation_gradient), -1).transpose(0, 1)
        if self.metric.factored:
            product, values, gradient = (t.flatten(0, 1) for t in (self._product, self._values, dq))
            scaled = ops.column_scale_backward(product, values, gradient, self.metric.inverse)
            scaled = scaled.unflatten(0, self._product.shape[:2]).flatten(1, 2)
            add_product(rotation_gradient, self.metric.matrix.mT, scaled, alpha=2)
            return
        dq = -dq * self._values.square() if self.metric.inverse else dq
        rotation_gradient.add_(self._product.mul_(dq[:, :, None]).sum(1), alpha=2)


def upper_factor(matrix: Tensor) -> Tensor:
    """U [..., n, n] in fp64, upper triangular with M = UᵀU, for positive semi-definite M [..., n, n].

    If M has no such factor, as where it is singular, RESOLUTION of its largest diagonal element is added to
    its diagonal, and 10 times as much until it has: 1.
    """
    largest = diagonal_of(matrix).amax(-1).double()
    largest = torch.where(largest == 0, 1, largest)
    added = torch.zeros_like(largest)
    while True:
        lower = matrix.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        diagonal_of(lower).add_((added * largest)[..., None])
        # products take one batch dimension
        each = lower if lower.dim() < 3 else lower.flatten(0, -3)
        found = cholesky_(each).view(added.shape) | (added > 1)
        if found.all():
            return lower.tril().mT
        added = torch.where(found, added, torch.where(added > 0, 10 * added, RESOLUTION))


def layer_metrics(
    method: str,
    hessians: dict[str, Tensor],
    groups: Collection[InputGroup],
    shape: HeadShape,
    *,
    damping: float,
    average: str = "mean",
    reference_compat: bool = False,
    unrotated: bool = True,
    down_block: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Metric], dict[str, float]]:
    """Name of an input group → Metric, and → damping of the inverted Hessian, of one layer.

    method: `magnitude`, `wanda` or `sparsegpt`.
    hessians: name of an input group → H [in, in]; not used by `magnitude`.
    damping: what is added to the diagonal before the inversion, in units of `damping_unit` for `average`.
    reference_compat: adds the absolute damping to the inverse too, as the paper's code does.
    down_block: the size of the blocks of R3; None without R3.
    unrotated: False omits the metrics of inputs that are not rotated, and so the inversion of the largest
        Hessian. The entropy does not depend on them, because it normalises each column of these linears.
    """
    assert method in get_args(Method), f"{method} has no metric"
    metrics: dict[str, Metric] = {}
    dampings: dict[str, float] = {}
    for same in alike(groups):
        rotated = is_rotated(same[0], down_block)
        if method in WITHOUT_HESSIAN or not (rotated or unrotated):
            metrics |= {group.name: Metric(None, False) for group in same}
            continue
        size = len(hessians[same[0].name])
        count, several = at_once(size), same[0].expert is not None
        blocks = {"r2": shape.heads, "r3": size // (down_block or 1)}.get(same[0].input or "")
        for start in range(0, len(same), count):
            names = [group.name for group in same[start : start + count]]
            matrix = torch.stack([hessians[name] for name in names]) if several else hessians[names[0]]
            if method == "sparsegpt":
                factor = factorize(matrix, damping, average)
                of_each = factor.damping.tolist() if isinstance(factor.damping, Tensor) else [factor.damping]
                dampings |= dict(zip(names, of_each, strict=True))
                matrix = _inverse(factor, blocks) if rotated else factor.inverse_diagonal
                if reference_compat:
                    diagonal = diagonal_of(matrix) if rotated else matrix
                    unit = factor.unit.view(-1, *[1] * (diagonal.dim() - 1)) if several else factor.unit
                    diagonal.add_(damping * unit)
            elif not rotated:
                matrix = diagonal_of(matrix).clone()
            elif blocks is not None:
                matrix = diagonal_blocks(matrix, blocks)
            matrix = matrix.to(dtype)
            for name, each in zip(names, matrix.unbind() if several else [matrix], strict=True):
                metrics[name] = Metric(each, method == "sparsegpt")
    return metrics, dampings


def column_scale(
    method: str, hessian: InputHessian, *, damping: float, reference_compat: bool
) -> Tensor | None:
    """The column_scale [..., in] of weights whose inputs have the Hessian `hessian`; None if it is 1.

    method, damping, reference_compat: as in `layer_metrics`.
    """
    if method in WITHOUT_HESSIAN:
        return None
    if method == "wanda":
        return diagonal_of(hessian.matrix)
    diagonal = hessian.factor.inverse_diagonal
    return 1.0 / (diagonal + damping * hessian.factor.unit[..., None] if reference_compat else diagonal)


def is_rotated(group: InputGroup, down_block: int | None) -> bool:
    """Whether a rotation acts on the input of `group`, where R3 has blocks of `down_block`, or is None."""
    return group.input is not None and (group.input != "r3" or down_block is not None)


def _inverse(factor: HessianFactor, blocks: int | None) -> Tensor:
    """H⁻¹ = UᵀU: its diagonal blocks [..., blocks, b, b], or all of it [..., in, in] for None."""
    hinv = factor.hinv
    if blocks is None:
        return hinv.mT @ hinv
    columns = hinv.unflatten(-1, (blocks, -1)).transpose(-3, -2)
    return columns.mT @ columns


def diagonal_blocks(matrix: Tensor, count: int) -> Tensor:
    """The diagonal blocks [..., count, n/count, n/count] of matrices [..., n, n]."""
    parts = matrix.unflatten(-1, (count, -1)).unflatten(-3, (count, -1))
    return parts.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
