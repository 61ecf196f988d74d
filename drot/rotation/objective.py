"""The objective of one layer and its gradient in R1 and R2, without an autograd graph.

Entropy (paper, equations 5 and 8): the entropies of the rows of q, k, gate and up, where a rotation acts on
the right, of the columns of down, where it acts on the left, and of the rows and columns of v and o.

Pruned importance (right-hand side of the paper's equation 4), summed over the linears:
out_features · (sum of the scores that the mask removes) / (sum of all scores at R = I).

The ops return dY and dcolumn_scale, from which dq follows, with q = diag(RᵀMR). The gradient in R is
Wᵀ dY + 2 (M R) diag(dq) for Y = W R, and W dYᵀ for Y = Rᵀ W.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.architectures import INPUT_GROUPS, HeadShape
from drot.config import Sparsity
from drot.rotation.importance import LayerMetrics, Metric, diagonal_blocks
from drot.surgery.rotate import LayerRotation, rotate_left, rotate_right

#: Rows of a weight, or columns of down_proj, that are rotated at a time; limits the memory.
CHUNK = 8192


@dataclass
class _Sums:
    """Sums over the linears: the loss, d loss/d R1 [n, b, b] and d loss/d R2 [kv, h, h]."""

    loss: Tensor
    r1_gradient: Tensor
    r2_gradient: Tensor


class _ColumnScale:
    """The column_scale of the linears that read one input, and its gradient in the rotation R of that input.

    metric: the matrix M of the input, with column_scale q or 1/q for q = diag(RᵀMR).
    blocks: the diagonal blocks [n, b, b] of R.
    dtype: dtype of the product M R.
    """

    def __init__(self, metric: Metric, blocks: Tensor, dtype: torch.dtype) -> None:
        self.metric = metric
        self.value: Tensor | None = None
        self.gradient: Tensor | None = None
        if metric.matrix is not None:
            self._product = (metric.matrix @ blocks.to(dtype)).to(blocks.dtype)
            self.value = metric.column_scale((blocks * self._product).sum(1).flatten())
            self.gradient = torch.zeros_like(self.value)

    def add_gradient(self, rotation_gradient: Tensor) -> None:
        """Adds 2 (M R) diag(dq) to `rotation_gradient` [n, b, b]."""
        if self.value is not None and self.gradient is not None:
            dq = self.metric.gradient_in_q(self.gradient, self.value)
            rotation_gradient += 2 * self._product * dq.reshape(len(rotation_gradient), 1, -1)


@dataclass(frozen=True)
class DownProjection:
    """A down_proj whose output R1 rotates.

    Args:
        weight: folded weight [d, ff].
        metric: metric of its input.
        scale: factor of its loss, for `pruned`.
        sparsity: its n:m or ratio, for `pruned`.
    """

    weight: Tensor
    metric: Metric
    scale: float
    sparsity: Sparsity

    def to(self, device: torch.device, dtype: torch.dtype) -> "DownProjection":
        return DownProjection(
            self.weight.to(device, dtype), self.metric.to(device), self.scale, self.sparsity
        )


class LayerObjective:
    """The loss of one decoder layer and its gradients in R1 [blocks, b, b] and R2 [kv, h, h].

    The attribute `down_projections` lists the down_projs whose outputs R1 rotates. At first it holds the
    layer's down_proj. With boundary rotations on the residual, the caller replaces it by the down_proj of the
    layer before, by both, or by none.

    A linear that is not pruned adds nothing to the loss, the gradients and the entropy, for either objective.

    Args:
        weights: role → weight [out, in], folded and not rotated.
        metrics: metrics of the layer.
        shape: attention sizes of the model.
        objective: `entropy` or `pruned`.
        sparsity: n:m or ratio of the mask, for `pruned`: one for all linears, or role → sparsity. A linear
            whose role is missing is not pruned.
        product_dtype: dtype of the matrix products. Losses and gradients are fp32, or fp64 for fp64 products.
        blocks: the number of equal diagonal blocks of R1; 1 makes R1 dense.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        metrics: LayerMetrics,
        shape: HeadShape,
        *,
        objective: str,
        sparsity: Sparsity | Mapping[str, Sparsity],
        product_dtype: torch.dtype = torch.float32,
        blocks: int = 1,
    ) -> None:
        self.shape = shape
        self.objective = objective
        self.sparsity = dict.fromkeys(weights, sparsity) if isinstance(sparsity, Sparsity) else sparsity
        self.blocks = blocks
        self.product_dtype = product_dtype
        self.loss_dtype = torch.promote_types(product_dtype, torch.float32)
        pruned = {role: weight for role, weight in weights.items() if role in self.sparsity}
        self.weights = {role: weight.to(product_dtype).contiguous() for role, weight in pruned.items()}
        self._weights_dtype = product_dtype
        self.hidden_size = weights["q_proj"].shape[1]
        self.device = weights["q_proj"].device
        self.metrics = {}
        for group, metric in metrics.metrics.items():
            matrix = metric.matrix
            if matrix is not None:
                if group in ("attention", "mlp"):
                    matrix = diagonal_blocks(matrix, blocks)
                matrix = matrix.to(self.loss_dtype if group == "down" else product_dtype).contiguous()
            self.metrics[group] = Metric(matrix, metric.inverse)
        self._scales = {
            role: self._normaliser(role) if objective == "pruned" else 1.0 for role in self.weights
        }
        self.down_projections = []
        if "down_proj" in self.weights:
            weight, metric = self.weights.pop("down_proj"), self.metrics.pop("down")
            scale = self._scales.pop("down_proj")
            self.down_projections = [DownProjection(weight, metric, scale, self.sparsity["down_proj"])]

    @property
    def empty(self) -> bool:
        """Whether no linear is pruned, so that the loss is 0 for all rotations."""
        return not self.weights and not self.down_projections

    def to(self, device: torch.device) -> "LayerObjective":
        """The objective on `device`, with weights in the products' dtype; `self` if nothing has to change."""
        if self.device == device and self._weights_dtype == self.product_dtype:
            return self
        return self._moved(device, self.product_dtype)

    def offload(self, dtype: torch.dtype) -> "LayerObjective":
        """The objective in main memory, with weights in the smaller of `dtype` and the products' dtype.

        With the checkpoint's dtype, `to` restores the weights exactly.
        """
        smaller = dtype if dtype.itemsize < self.product_dtype.itemsize else self.product_dtype
        return self._moved(torch.device("cpu"), smaller)

    def _moved(self, device: torch.device, dtype: torch.dtype) -> "LayerObjective":
        other = copy.copy(self)
        other.device, other._weights_dtype = device, dtype
        other.weights = {role: weight.to(device, dtype) for role, weight in self.weights.items()}
        other.metrics = {group: metric.to(device) for group, metric in self.metrics.items()}
        other.down_projections = [down.to(device, dtype) for down in self.down_projections]
        return other

    def identity(self) -> tuple[Tensor, Tensor]:
        """The identity as R1 [blocks, b, b] and R2 [kv, h, h]."""
        options: dict[str, Any] = {"dtype": self.loss_dtype, "device": self.device}
        r1 = torch.eye(self.hidden_size // self.blocks, **options).repeat(self.blocks, 1, 1)
        return r1, torch.eye(self.shape.head_dim, **options).repeat(self.shape.kv_heads, 1, 1)

    def value_and_grad(self, r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss (0-dim), d loss/d r1 [blocks, b, b] and d loss/d r2 [kv, h, h], in fp32 or fp64."""
        sums = _Sums(r1.new_zeros(()), torch.zeros_like(r1), torch.zeros_like(r2))
        for group in ("attention", "mlp"):
            if any(role in self.weights for role in INPUT_GROUPS[group]):
                self._right_group(group, r1, r2, sums)
        if "o_proj" in self.weights:
            self._output_projection(r1, r2, sums)
        for down in self.down_projections:
            self._down_projection(down, r1, sums)
        return sums.loss, sums.r1_gradient, sums.r2_gradient

    def value(self, r1: Tensor, r2: Tensor) -> Tensor:
        """The loss (0-dim)."""
        return self.value_and_grad(r1, r2)[0]

    def _right_group(self, group: str, r1: Tensor, r2: Tensor, sums: _Sums) -> None:
        """The linears that read the output of one norm: Y = W R1, and blockdiag(R2)ᵀ W R1 for v_proj."""
        column_scale = _ColumnScale(self.metrics[group], r1, self.product_dtype)
        r1_cast, r2_cast = r1.to(self.product_dtype), r2.to(self.product_dtype)
        for role in INPUT_GROUPS[group]:
            if role not in self.weights:
                continue
            # v_proj is not split, because the entropy of its columns needs all rows; it is small
            rows = self.weights[role].shape[0] if role == "v_proj" else CHUNK
            for weight in self.weights[role].split(rows):
                u = y = rotate_right(weight, r1_cast)
                if role == "v_proj":
                    y = rotate_left(r2_cast, u)
                dy = self._add_loss(role, self._scales[role], self.sparsity[role], y, column_scale, sums)
                if role == "v_proj":
                    sums.r2_gradient += _gradient_left(u, dy, len(r2))
                    dy = rotate_left(r2_cast.mT, dy)
                sums.r1_gradient += _gradient_right(weight, dy, len(r1))
        column_scale.add_gradient(sums.r1_gradient)

    def _output_projection(self, r1: Tensor, r2: Tensor, sums: _Sums) -> None:
        """o_proj: Y = R1ᵀ W blockdiag(R2), with the R2 of its KV head for each query head."""
        weight, heads_r2 = self.weights["o_proj"], r2.repeat_interleave(self.shape.group, 0)
        column_scale = _ColumnScale(self.metrics["o"], heads_r2, self.product_dtype)
        r1_cast, heads_r2_cast = r1.to(self.product_dtype), heads_r2.to(self.product_dtype)
        u = rotate_left(r1_cast, weight)
        scale, sparsity = self._scales["o_proj"], self.sparsity["o_proj"]
        dy = self._add_loss("o_proj", scale, sparsity, rotate_right(u, heads_r2_cast), column_scale, sums)
        gradient = _gradient_right(u, dy, len(heads_r2)).to(self.loss_dtype)
        column_scale.add_gradient(gradient)
        sums.r2_gradient += gradient.unflatten(0, (-1, self.shape.group)).sum(1)
        sums.r1_gradient += _gradient_left(weight, rotate_right(dy, heads_r2_cast.mT), len(r1))

    def _down_projection(self, down: DownProjection, r1: Tensor, sums: _Sums) -> None:
        """down_proj: Y = R1ᵀ W, with a column_scale that does not depend on the rotations."""
        weight, metric, r1_cast = down.weight, down.metric, r1.to(self.product_dtype)
        constant_scale = None if metric.matrix is None else metric.column_scale(metric.matrix)
        # a ratio removes the smallest scores of whole rows, so the columns cannot be split then
        whole_rows = self.objective == "pruned" and not down.sparsity.structured
        width = weight.shape[1] if whole_rows else CHUNK // max(down.sparsity.m, 1) * max(down.sparsity.m, 1)
        for start in range(0, weight.shape[1], width):
            columns = weight[:, start : start + width]
            column_scale = _ColumnScale(Metric(None, False), r1, self.product_dtype)
            column_scale.value = None if constant_scale is None else constant_scale[start : start + width]
            y = rotate_left(r1_cast, columns)
            dy = self._add_loss("down_proj", down.scale, down.sparsity, y, column_scale, sums)
            sums.r1_gradient += _gradient_left(columns, dy, len(r1))

    def _add_loss(
        self,
        role: str,
        scale: float,
        sparsity: Sparsity,
        y: Tensor,
        column_scale: _ColumnScale,
        sums: _Sums,
    ) -> Tensor:
        """Adds the loss of a rotated weight y to `sums`, and its gradient to `column_scale`; returns dY.

        Args:
            role: role of the linear.
            scale: factor of the loss, for `pruned`.
            sparsity: n:m or ratio of the mask, for `pruned`.
            y: rotated weight, or some of its rows or columns.
            column_scale: column_scale of y.
            sums: sums of this evaluation.
        """
        if self.objective == "entropy":
            columns = role in ("v_proj", "o_proj", "down_proj")
            loss, dy, dcolumn_scale = ops.entropy_loss_and_grad(
                y, column_scale.value, rows=role != "down_proj", columns=columns
            )
        else:
            prune, group = _removed_per_group(sparsity, y.shape[1])
            loss, dy, dcolumn_scale = ops.pruned_importance_and_grad(
                y, column_scale.value, prune=prune, group=group, scale=scale
            )
        sums.loss += loss
        if column_scale.gradient is not None:
            column_scale.gradient += dcolumn_scale
        return dy

    def _normaliser(self, role: str) -> float:
        """out_features / (sum of the scores at R = I).

        The sum is not taken at the current R, because the training could then lower the loss by increasing
        the sum.
        """
        weight = self.weights[role].to(self.loss_dtype)
        group = next(group for group, roles in INPUT_GROUPS.items() if role in roles)
        metric = self.metrics[group]
        squares = weight.square().sum(0)
        if (diagonal := metric.diagonal) is not None:
            squares = squares * metric.column_scale(diagonal.to(self.loss_dtype))
        total = float(squares.sum())
        return weight.shape[0] / total if total > 0 else 0.0

    def entropy(self, rotation: LayerRotation | None) -> float:
        """The entropy (paper, equation 8) for either objective, under `rotation` (None: the identity)."""
        r1, r2 = self.identity()
        if rotation is not None:
            r1, r2 = diagonal_blocks(rotation.r1, self.blocks).to(r1), rotation.r2.to(r2)
        objective, self.objective = self.objective, "entropy"
        try:
            return float(self.value(r1, r2))
        finally:
            self.objective = objective


def _removed_per_group(sparsity: Sparsity, width: int) -> tuple[int, int]:
    """The arguments `prune` and `group` of the ops for a weight with `width` columns."""
    if sparsity.structured:
        return sparsity.m - sparsity.n, sparsity.m
    return int(width * sparsity.ratio), 0


def _gradient_right(matrix: Tensor, dy: Tensor, count: int) -> Tensor:
    """d loss/d B [count, b, b] for Y [out, n] = matrix · blockdiag(B)."""
    if count == 1:
        return (matrix.T @ dy)[None]
    parts, dparts = (tensor.unflatten(1, (count, -1)).transpose(0, 1) for tensor in (matrix, dy))
    return torch.bmm(parts.mT, dparts)


def _gradient_left(matrix: Tensor, dy: Tensor, count: int) -> Tensor:
    """d loss/d B [count, b, b] for Y [n, in] = blockdiag(B)ᵀ · matrix."""
    if count == 1:
        return (matrix @ dy.T)[None]
    parts, dparts = (tensor.unflatten(0, (count, -1)) for tensor in (matrix, dy))
    return torch.bmm(parts, dparts.mT)
