"""The objective of one layer and its gradient in R1 and R2, without an autograd graph.

Entropy (paper, equations 5 and 8): the entropies of the rows of q, k, gate and up, where a rotation acts on
the right, of the columns of down, where it acts on the left, and of the rows and columns of v and o.

Pruned importance (right-hand side of the paper's equation 4), summed over the linears:
out_features · (sum of the scores that the mask removes) / (sum of all scores at R = I).

The ops return dY and dcolumn_scale, from which dq follows, with q = diag(RᵀMR). The gradient in R is
Wᵀ dY + 2 (M R) diag(dq) for Y = W R, and W dYᵀ for Y = Rᵀ W.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.architectures import INPUT_GROUPS, HeadShape
from drot.config import Sparsity
from drot.products import add_product, product
from drot.rotation.importance import LayerMetrics, Metric, diagonal_blocks
from drot.surgery.rotate import LayerRotation, rotate_left, rotate_right


class _Sums:
    """The sums over the linears: the loss, d loss/d R1 [n, b, b] and d loss/d R2 [kv, h, h].

    dtype: dtype of the sums.
    with_gradients: whether the gradients are summed; without them their products are not computed.
    """

    def __init__(self, dtype: torch.dtype, *, with_gradients: bool = True) -> None:
        self.dtype, self.with_gradients = dtype, with_gradients
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}

    def loss(self) -> Tensor:
        """The sum of the losses (0-dim)."""
        if self.losses[0].device.type == "cpu":  # one after the other: the bits of earlier versions
            return functools.reduce(torch.add, self.losses)
        return torch.stack(self.losses).sum()

    def add(self, name: str, factors: tuple[Tensor, Tensor]) -> None:
        """Adds the product of two factors to the gradient `r1` or `r2`, in the dtype of the sums."""
        if name in self.gradients:
            add_product(self.gradients[name], *factors)
        else:
            self.gradients[name] = product(*factors, self.dtype)


class _ColumnScale:
    """The column_scale of the linears that read one input, and its gradient in the rotation R of that input.

    metric: the matrix M of the input, or its factor U, with column_scale q or 1/q for q = diag(RᵀMR).
    blocks: the diagonal blocks [n, b, b] of R.
    rounded: `blocks` in the dtype of the metric's matrix.
    """

    def __init__(self, metric: Metric, blocks: Tensor, rounded: Tensor) -> None:
        self.metric = metric
        self.value: Tensor | None = None
        self.gradient: Tensor | None = None
        if metric.matrix is None:
            return
        self._product = metric.matrix @ rounded
        if metric.factored:
            norms = torch.linalg.vector_norm(self._product, dim=1, dtype=torch.float32).flatten()
            self.value = norms.pow(-2) if metric.inverse else norms.square()
        else:
            self.value = metric.column_scale((blocks * self._product).sum(1).flatten())

    def add(self, gradient: Tensor) -> None:
        """Adds the gradient in column_scale of one linear."""
        if self.value is not None:
            self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def add_gradient(self, rotation_gradient: Tensor) -> None:
        """Adds 2 (M R) diag(dq) to `rotation_gradient` [n, b, b]."""
        if self.value is None or self.gradient is None:
            return
        assert self.metric.matrix is not None
        dq = self.gradient * self.value.square() if self.metric.inverse else self.gradient
        dq, sign = dq.reshape(len(rotation_gradient), 1, -1), -1.0 if self.metric.inverse else 1.0
        if self.metric.factored:
            scaled = torch.mul(self._product, dq, out=torch.empty_like(self._product))
            add_product(rotation_gradient, self.metric.matrix.mT, scaled, alpha=2 * sign)
        else:
            rotation_gradient.addcmul_(self._product, dq, value=2 * sign)


@dataclass(frozen=True)
class DownProjection:
    """A down_proj whose output R1 rotates.

    Args:
        weight: folded weight [d, ff].
        column_scale: the column_scale [ff] of its scores, which no rotation changes; None for 1.
        scale: factor of its loss, for `pruned`.
        sparsity: its n:m or ratio, for `pruned`.
    """

    weight: Tensor
    column_scale: Tensor | None
    scale: float
    sparsity: Sparsity

    def to(self, device: torch.device, dtype: torch.dtype) -> "DownProjection":
        column_scale = None if self.column_scale is None else self.column_scale.to(device)
        return DownProjection(self.weight.to(device, dtype), column_scale, self.scale, self.sparsity)


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
        self._weights_dtype = product_dtype
        self.hidden_size = weights["q_proj"].shape[1]
        self.device = weights["q_proj"].device
        self.weights: dict[str, Tensor] = {}
        self._stacks: dict[str, Tensor] = {}
        for group, roles in INPUT_GROUPS.items():
            parts = {role: weights[role].to(product_dtype) for role in roles if role in self.sparsity}
            if parts:
                self._keep(
                    group, torch.cat(list(parts.values())), list(map(len, parts.values())), list(parts)
                )
        self.metrics: dict[str, Metric] = {}
        for group, metric in metrics.metrics.items():
            if metric.matrix is not None and group in ("attention", "mlp"):
                metric = Metric(diagonal_blocks(metric.matrix, blocks), metric.inverse)
            self.metrics[group] = metric.rounded(self.loss_dtype if group == "down" else product_dtype)
        self._scales = {
            role: self._normaliser(role) if objective == "pruned" else 1.0 for role in self.weights
        }
        self.down_projections = []
        if "down_proj" in self.weights:
            weight, metric = self.weights.pop("down_proj"), self.metrics.pop("down")
            column_scale = None if metric.matrix is None else metric.column_scale(metric.matrix)
            scale = self._scales.pop("down_proj")
            down = DownProjection(weight, column_scale, scale, self.sparsity["down_proj"])
            self.down_projections = [down]
            del self._stacks["down"]

    def _keep(self, group: str, stack: Tensor, sizes: list[int], roles: list[str]) -> None:
        """Keeps the weights of an input group as one matrix, so that one product rotates all of them.

        Args:
            group: the input group.
            stack: the weights [Σ sizes, in], one below the other.
            sizes: rows of each weight.
            roles: role of each weight.
        """
        self._stacks[group] = stack
        self.weights |= dict(zip(roles, stack.split(sizes), strict=True))

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
        other.weights, other._stacks = {}, {}
        for group, stack in self._stacks.items():
            roles = [role for role in INPUT_GROUPS[group] if role in self.weights]
            other._keep(group, stack.to(device, dtype), [len(self.weights[role]) for role in roles], roles)
        other.metrics = {group: metric.to(device) for group, metric in self.metrics.items()}
        other.down_projections = [down.to(device, dtype) for down in self.down_projections]
        return other

    def identity(self) -> tuple[Tensor, Tensor]:
        """The identity as R1 [blocks, b, b] and R2 [kv, h, h]."""
        options: dict[str, Any] = {"dtype": self.loss_dtype, "device": self.device}
        r1 = torch.eye(self.hidden_size // self.blocks, **options).repeat(self.blocks, 1, 1)
        return r1, torch.eye(self.shape.head_dim, **options).repeat(self.shape.kv_heads, 1, 1)

    def value_and_grad(
        self, r1: Tensor, r2: Tensor, rounded: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss (0-dim), d loss/d r1 [blocks, b, b] and d loss/d r2 [kv, h, h], in fp32 or fp64.

        rounded: r1 and r2 in the dtype of the products, from a caller that has them; None computes them.
        """
        if rounded is None:
            rounded = r1.to(self.product_dtype), r2.to(self.product_dtype)
        sums = self._evaluate(r1, r2, rounded, _Sums(self.loss_dtype))
        r1_gradient, r2_gradient = (
            sums.gradients[name] if name in sums.gradients else torch.zeros_like(matrix)
            for name, matrix in (("r1", r1), ("r2", r2))
        )
        return sums.loss(), r1_gradient, r2_gradient

    def value(self, r1: Tensor, r2: Tensor) -> Tensor:
        """The loss (0-dim)."""
        rounded = r1.to(self.product_dtype), r2.to(self.product_dtype)
        return self._evaluate(r1, r2, rounded, _Sums(self.loss_dtype, with_gradients=False)).loss()

    def _evaluate(self, r1: Tensor, r2: Tensor, rounded: tuple[Tensor, Tensor], sums: _Sums) -> _Sums:
        """Adds all linears to `sums`, and returns it."""
        for group in ("attention", "mlp"):
            if group in self._stacks:
                self._right_group(group, r1, *rounded, sums)
        if "o_proj" in self.weights:
            self._output_projection(r2, *rounded, sums)
        for down in self.down_projections:
            self._down_projection(down, rounded[0], sums)
        if not sums.losses:
            sums.losses.append(r1.new_zeros(()))
        return sums

    def _right_group(self, group: str, r1: Tensor, r1_cast: Tensor, r2_cast: Tensor, sums: _Sums) -> None:
        """The linears that read the output of one norm: Y = W R1, and blockdiag(R2)ᵀ W R1 for v_proj.

        Args:
            group: the input group.
            r1: R1 [n, b, b].
            r1_cast: R1 in the dtype of the products.
            r2_cast: R2 [kv, h, h] in the dtype of the products.
            sums: sums of this evaluation.
        """
        column_scale = _ColumnScale(self.metrics[group], r1, r1_cast)
        roles = [role for role in INPUT_GROUPS[group] if role in self.weights]
        rotated = rotate_right(self._stacks[group], r1_cast)
        for role, u in zip(roles, rotated.split([len(self.weights[role]) for role in roles]), strict=True):
            y = rotate_left(r2_cast, u) if role == "v_proj" else u
            scale, sparsity = self._scales[role], self.sparsity[role]
            dy, dcolumn_scale = self._add_loss(role, scale, sparsity, y, column_scale.value, sums)
            if not sums.with_gradients:
                continue
            column_scale.add(dcolumn_scale)
            if role == "v_proj":
                sums.add("r2", _left_factors(u, dy, len(r2_cast)))
                dy = rotate_left(r2_cast.mT, dy)
            sums.add("r1", _right_factors(self.weights[role], dy, len(r1)))
        if sums.with_gradients:
            column_scale.add_gradient(sums.gradients["r1"])

    def _output_projection(self, r2: Tensor, r1_cast: Tensor, r2_cast: Tensor, sums: _Sums) -> None:
        """o_proj: Y = R1ᵀ W blockdiag(R2), with the R2 of its KV head for each query head."""
        weight = self.weights["o_proj"]
        heads_r2_cast = r2_cast.repeat_interleave(self.shape.group, 0)
        heads_r2 = heads_r2_cast if self.metrics["o"].factored else r2.repeat_interleave(self.shape.group, 0)
        column_scale = _ColumnScale(self.metrics["o"], heads_r2, heads_r2_cast)
        u = rotate_left(r1_cast, weight)
        scale, sparsity = self._scales["o_proj"], self.sparsity["o_proj"]
        y = rotate_right(u, heads_r2_cast)
        dy, dcolumn_scale = self._add_loss("o_proj", scale, sparsity, y, column_scale.value, sums)
        if not sums.with_gradients:
            return
        column_scale.add(dcolumn_scale)
        gradient = product(*_right_factors(u, dy, len(heads_r2_cast)), self.loss_dtype)
        column_scale.add_gradient(gradient)
        gradient = gradient.unflatten(0, (-1, self.shape.group)).sum(1)
        sums.gradients["r2"] = sums.gradients["r2"] + gradient if "r2" in sums.gradients else gradient
        sums.add("r1", _left_factors(weight, rotate_right(dy, heads_r2_cast.mT), len(r1_cast)))

    def _down_projection(self, down: DownProjection, r1_cast: Tensor, sums: _Sums) -> None:
        """down_proj: Y = R1ᵀ W, with a column_scale that does not depend on the rotations."""
        y = rotate_left(r1_cast, down.weight)
        dy, _ = self._add_loss("down_proj", down.scale, down.sparsity, y, down.column_scale, sums)
        if sums.with_gradients:
            sums.add("r1", _left_factors(down.weight, dy, len(r1_cast)))

    def _add_loss(
        self,
        role: str,
        scale: float,
        sparsity: Sparsity,
        y: Tensor,
        column_scale: Tensor | None,
        sums: _Sums,
    ) -> tuple[Tensor, Tensor]:
        """Adds the loss of a rotated weight y to `sums`; returns dY and the gradient in column_scale.

        Args:
            role: role of the linear.
            scale: factor of the loss, for `pruned`.
            sparsity: n:m or ratio of the mask, for `pruned`.
            y: rotated weight [out, in].
            column_scale: column_scale [in] of y; None for 1.
            sums: sums of this evaluation.
        """
        if self.objective == "entropy":
            columns = role in ("v_proj", "o_proj", "down_proj")
            loss, dy, dcolumn_scale = ops.entropy_loss_and_grad(
                y, column_scale, rows=role != "down_proj", columns=columns
            )
        else:
            prune, group = _removed_per_group(sparsity, y.shape[1])
            loss, dy, dcolumn_scale = ops.pruned_importance_and_grad(
                y, column_scale, prune=prune, group=group, scale=scale
            )
        sums.losses.append(loss)
        return dy, dcolumn_scale

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
        return self.entropy_at(r1, r2)

    def entropy_at(self, r1: Tensor, r2: Tensor) -> float:
        """The entropy (paper, equation 8) for either objective, for r1 [blocks, b, b] and r2 [kv, h, h]."""
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


def _right_factors(matrix: Tensor, dy: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The factors of d loss/d B [count, b, b] for Y [out, n] = matrix · blockdiag(B)."""
    parts, dparts = (tensor.unflatten(1, (count, -1)).transpose(0, 1) for tensor in (matrix, dy))
    return parts.mT, dparts


def _left_factors(matrix: Tensor, dy: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The factors of d loss/d B [count, b, b] for Y [n, in] = blockdiag(B)ᵀ · matrix."""
    parts, dparts = (tensor.unflatten(0, (count, -1)) for tensor in (matrix, dy))
    return parts, dparts.mT
