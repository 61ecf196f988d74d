"""The objective of one layer and its gradient in R1, R2 and R3, without an autograd graph.

Entropy (paper, equations 5 and 9): the entropies of the rows of q, k, gate and up, where a rotation acts on
the right, of the columns of down, where it acts on the left, and of the rows and columns of v and o, and of
down if R3 rotates its input.

Pruned importance (right-hand side of the paper's equation 4), summed over the linears:
out_features · (sum of the scores that the mask removes) / (sum of all scores at R = I).

The ops return dY and dcolumn_scale, from which dq follows, with q = diag(RᵀMR). The gradient in R is
Wᵀ dY + 2 (M R) diag(dq) for Y = W R, and W dYᵀ for Y = Rᵀ W.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.config import Sparsity
from drot.machine.products import product
from drot.machine.ranks import Ranks
from drot.model.family import InputGroup, LinearSpec
from drot.model.rotation import LayerRotation, rotate_left, rotate_right
from drot.model.sizes import HeadShape
from drot.rotation.gradient import Sums, left_factors, right_factors
from drot.rotation.importance import ColumnScales, LayerMetrics, Metric, diagonal_blocks
from drot.rotation.work import work_of_ranks


@dataclass(frozen=True)
class LeftRotated:
    """A linear of which R1 or nothing rotates the outputs, and R3 or nothing the input: down_proj.

    weight: folded weight [d, ff], times `factor`.
    column_scale: without R3 the column_scale [ff] of its scores, which no rotation changes; None for 1.
    metric: with R3 the diagonal blocks [ff/b, b, b] of M.
    by_r1: whether R1 rotates the outputs.
    """

    weight: Tensor
    column_scale: Tensor | None
    metric: Metric | None
    sparsity: Sparsity
    factor: float
    by_r1: bool = True


class LayerObjective:
    """The loss of one decoder layer and its gradients in R1 [blocks, b, b], R2 [kv, h, h] and R3.

    The attribute `left_rotated` lists the linears of the type LeftRotated. At first it holds the layer's own.
    With boundaries of the residual, the caller replaces it by those of the layer before, by both, or by none.
    R3 [n · ff/b, b, b] has the blocks of all n linears of this list, in its order. There is no R3 without
    `down_block`, or if the list is empty.

    `own_left` lists those that R1 of this layer alone rotates in any case: o_proj without R2.

    A linear that is not pruned adds nothing to the loss, the gradients and the entropy, for either objective,
    and neither does a linear that no rotation changes.

    weights: name of a linear → weight [out, in], folded and not rotated.
    objective: `entropy` or `pruned`.
    sparsity: one for all linears, or name → sparsity. A linear whose name is missing is not pruned.
    product_dtype: dtype of the matrix products. Losses and gradients are fp32, or fp64 for fp64 products.
    blocks: the number of equal diagonal blocks of R1; 1 makes R1 dense.
    down_block: the size of the blocks of R3, for which `metrics` were made; None without R3.
    fixed_r1: whether R1 stays the identity.
    keeps_ones: whether the training of R1 keeps R1 1 = 1.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        metrics: LayerMetrics,
        groups: Sequence[InputGroup],
        shape: HeadShape,
        *,
        objective: str,
        sparsity: Sparsity | Mapping[str, Sparsity],
        product_dtype: torch.dtype = torch.float32,
        blocks: int = 1,
        down_block: int | None = None,
        fixed_r1: bool = False,
        keeps_ones: bool = False,
    ) -> None:
        self.groups, self.shape, self.objective, self.blocks = groups, shape, objective, blocks
        self.down_block, self.fixed_r1, self.keeps_ones = down_block, fixed_r1, keeps_ones
        self.sparsity = dict.fromkeys(weights, sparsity) if isinstance(sparsity, Sparsity) else sparsity
        self.product_dtype = product_dtype
        self.loss_dtype = torch.promote_types(product_dtype, torch.float32)
        self._weights_dtype = product_dtype
        by_r1 = next(linear.name for group in groups for linear in group.linears if linear.input == "r1")
        self.hidden_size, self.device = weights[by_r1].shape[1], weights[by_r1].device
        self.weights: dict[str, Tensor] = {}
        self._stacks: dict[str, Tensor] = {}
        #: name of a linear → the factor that its weight contains (_factor)
        self._factors: dict[str, float] = {}
        self.left_rotated: list[LeftRotated] = []
        #: places in `left_rotated` of the linears that this rank leaves to others (`share`)
        self._left_to_others: frozenset[int] = frozenset()
        self.own_left: list[LeftRotated] = []
        self.r2_metric: Metric | None = None
        attention_end = next((group for group in groups if group.writes_residual), None)
        for group in groups:
            parts: dict[str, Tensor] = {}
            for name in self._pruned(group, weights):
                weight, metric = weights[name].to(self.loss_dtype), metrics.metrics[group.name]
                self._factors[name] = _factor(weight, metric) if objective == "pruned" else 1.0
                parts[name] = (weight * self._factors[name]).to(product_dtype)
                if group.input == "r2":
                    self.r2_metric = metric.rounded(product_dtype)
            if group.input is None and group is attention_end:
                self.own_left += [
                    self._left_rotated(name, part, metrics.metrics[group.name], True, rotated=False)
                    for name, part in parts.items()
                ]
            elif group.input in (None, "r3"):
                left = group.linears[0].output == "r1"
                self.left_rotated += [
                    self._left_rotated(name, part, metrics.metrics[group.name], left)
                    for name, part in parts.items()
                    if left or down_block
                ]
            elif parts:
                sizes = [len(part) for part in parts.values()]
                self._keep(group, torch.cat(list(parts.values())), sizes, list(parts))
        self._by_r1 = [group for group in groups if group.input == "r1" and group.name in self._stacks]
        self.r1_metric = self._stacked_metric([metrics.metrics[group.name] for group in self._by_r1])

    def _pruned(self, group: InputGroup, weights: Mapping[str, Tensor]) -> list[str]:
        names = (linear.name for linear in group.linears)
        return [name for name in names if name in self.sparsity and name in weights]

    def _left_rotated(
        self, name: str, weight: Tensor, metric: Metric, by_r1: bool, *, rotated: bool = True
    ) -> LeftRotated:
        """rotated: whether R3 rotates the input, if there is one."""
        column_scale = of_r3 = None
        if self.down_block and rotated:
            of_r3 = metric.rounded(self.product_dtype)
        elif metric.matrix is not None:
            column_scale = metric.column_scale(metric.matrix.to(self.loss_dtype))
        factor = self._factors.pop(name)
        return LeftRotated(weight, column_scale, of_r3, self.sparsity[name], factor, by_r1)

    def _stacked_metric(self, metrics: list[Metric]) -> Metric:
        """The diagonal blocks of the metrics of inputs that R1 rotates, as ColumnScales takes them."""
        if not metrics or metrics[0].matrix is None:
            return Metric(None, False)
        parts = [
            Metric(diagonal_blocks(metric.matrix, self.blocks), metric.inverse).rounded(self.product_dtype)
            for metric in metrics
            if metric.matrix is not None
        ]
        stack = torch.cat([part.matrix for part in parts if part.matrix is not None], 1)
        return Metric(stack, parts[0].inverse, parts[0].factored)

    def _keep(self, group: InputGroup, stack: Tensor, sizes: list[int], names: list[str]) -> None:
        """Keeps the weights of an input group as one matrix [Σ sizes, in], which one product rotates."""
        self._stacks[group.name] = stack
        self.weights |= dict(zip(names, stack.split(sizes), strict=True))

    @property
    def empty(self) -> bool:
        """Whether no linear is pruned, so that the loss is 0 for all rotations."""
        return not (self.weights or self.left_rotated or self.own_left)

    def share(self, ranks: Ranks) -> "LayerObjective":
        """The part of the objective that this rank computes; loss and gradients are sums over the ranks.

        The rows of linears of which R1 alone rotates the input are independent, and go to the ranks in such
        numbers that all have the same work. Each other linear goes to one rank as a whole.
        """
        if ranks.size == 1:
            return self
        other = copy.copy(self)
        by_rows = [
            linear.name
            for group in self._by_r1
            for linear in group.linears
            if linear.output != "r2" and linear.name in self.weights
        ]
        whole: dict[str | int, int] = {
            name: weight.numel() for name, weight in self.weights.items() if name not in by_rows
        }
        left = [*self.left_rotated, *self.own_left]
        whole |= {place: linear.weight.numel() for place, linear in enumerate(left)}
        owners, stops = work_of_ranks(whole, sum(self.weights[name].numel() for name in by_rows), ranks.size)
        start, stop = stops[ranks.rank : ranks.rank + 2]
        other._left_to_others = frozenset(
            place for place in range(len(self.left_rotated)) if owners[place] != ranks.rank
        )
        other.own_left = [
            linear
            for place, linear in enumerate(self.own_left, len(self.left_rotated))
            if owners[place] == ranks.rank
        ]
        other.weights, other._stacks = {}, {}
        for group in self.groups:
            parts: dict[str, Tensor] = {}
            for name in self._pruned(group, self.weights):
                weight = self.weights[name]
                if name in by_rows:
                    weight = weight[round(start * len(weight)) : round(stop * len(weight))]
                elif owners[name] != ranks.rank:
                    continue
                if len(weight):
                    parts[name] = weight
            if parts and group.name in self._stacks:
                stack = torch.cat(list(parts.values()))
                other._keep(group, stack, [len(part) for part in parts.values()], list(parts))
        other._by_r1 = [group for group in self._by_r1 if group.name in other._stacks]
        if (matrix := self.r1_metric.matrix) is not None and other._by_r1:
            of_groups = matrix.unflatten(1, (len(self._by_r1), -1))
            kept = torch.cat([of_groups[:, self._by_r1.index(group)] for group in other._by_r1], 1)
            other.r1_metric = replace(self.r1_metric, matrix=kept)
        elif matrix is not None:
            other.r1_metric = Metric(None, False)
        return other

    def to(self, device: torch.device) -> "LayerObjective":
        """The objective on `device`, with weights in the products' dtype; `self` if nothing has to change."""
        if self.device == device and self._weights_dtype == self.product_dtype:
            return self
        return self._moved(device, self.product_dtype)

    def offload(self, dtype: torch.dtype) -> "LayerObjective":
        """The objective in main memory, with weights in the smaller of `dtype` and the products' dtype.

        With the checkpoint's dtype, `to` restores the weights exactly: they are kept without their factor.
        """
        smaller = dtype if dtype.itemsize < self.product_dtype.itemsize else self.product_dtype
        return self._moved(torch.device("cpu"), smaller)

    def _moved(self, device: torch.device, dtype: torch.dtype) -> "LayerObjective":
        """The objective on `device`, with weights in `dtype`.

        Weights in the products' dtype contain their factors; weights in a smaller dtype do not.
        """
        other = copy.copy(self)
        other.device, other._weights_dtype = device, dtype
        other.weights, other._stacks = {}, {}
        power = (dtype == self.product_dtype) - (self._weights_dtype == self.product_dtype)

        def moved(stack: Tensor, sizes: list[int], factors: list[float]) -> Tensor:
            if power == 0:
                return stack.to(device, dtype)
            wide = stack.to(device, self.loss_dtype, copy=True)
            for part, factor in zip(wide.split(sizes), factors, strict=True):
                part.mul_(factor**power)
            return wide.to(dtype)

        for group in self.groups:
            if group.name in self._stacks:
                names = self._pruned(group, self.weights)
                sizes = [len(self.weights[name]) for name in names]
                stack = moved(self._stacks[group.name], sizes, [self._factors[name] for name in names])
                other._keep(group, stack, sizes, names)
        other.r1_metric = self.r1_metric.to(device)
        other.r2_metric = None if self.r2_metric is None else self.r2_metric.to(device)

        def moved_left(linear: LeftRotated) -> LeftRotated:
            weight = moved(linear.weight, [len(linear.weight)], [linear.factor])
            scale = None if linear.column_scale is None else linear.column_scale.to(device)
            metric = None if linear.metric is None else linear.metric.to(device)
            return dataclasses.replace(linear, weight=weight, column_scale=scale, metric=metric)

        other.left_rotated, other.own_left = (
            [moved_left(linear) for linear in linears] for linears in (self.left_rotated, self.own_left)
        )
        return other

    def identity(self) -> tuple[Tensor, ...]:
        """The identity as R1 [blocks, b, b] and as the matrices of `own_identity`."""
        r1 = torch.eye(self.hidden_size // self.blocks, dtype=self.loss_dtype, device=self.device)
        return r1.repeat(self.blocks, 1, 1), *self.own_identity()

    def own_identity(self) -> tuple[Tensor, ...]:
        """The identity as R2 [kv, h, h] and, if there is one, as R3 [n · ff/b, b, b]."""
        options: dict[str, Any] = {"dtype": self.loss_dtype, "device": self.device}
        r2 = torch.eye(self.shape.head_dim, **options).repeat(self.shape.kv_heads, 1, 1)
        if not self.down_block or not self.left_rotated:
            return (r2,)
        columns = sum(linear.weight.shape[1] for linear in self.left_rotated)
        return r2, torch.eye(self.down_block, **options).repeat(columns // self.down_block, 1, 1)

    def value_and_grad(
        self, *matrices: Tensor, rounded: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """The loss (0-dim) and its gradient in each of the matrices of `identity`, in fp32 or fp64.

        rounded: the matrices in the dtype of the products, from a caller that has them; None computes them.
        """
        sums = self._evaluate(matrices, rounded, Sums(self.loss_dtype))
        gradients = (
            sums.gradients[name] if name in sums.gradients else torch.zeros_like(matrix)
            for name, matrix in zip(("r1", "r2", "r3"), matrices, strict=False)
        )
        return sums.loss(), *gradients

    def value(self, *matrices: Tensor) -> Tensor:
        return self._evaluate(matrices, None, Sums(self.loss_dtype, with_gradients=False)).loss()

    def _evaluate(self, matrices: Sequence[Tensor], rounded: Sequence[Tensor] | None, sums: Sums) -> Sums:
        """Adds all linears to `sums`, and returns it.

        The linear whose input R2 rotates comes first: its gradient of R2 is a sum over the query heads of a
        KV head, to which the product of v_proj is then added.
        """
        casts = rounded or [each.to(self.product_dtype) for each in matrices]
        (r1, r2), (r1_cast, r2_cast) = matrices[:2], casts[:2]
        for group in self.groups:
            if group.input == "r2" and group.name in self._stacks:
                self._heads_group(group.linears[0], r2, r1_cast, r2_cast, sums)
        column_scales = ColumnScales(self.r1_metric, r1, r1_cast)
        gradients = [
            self._r1_group(group, column_scales.of_input(index), r1_cast, r2_cast, sums)
            for index, group in enumerate(self._by_r1)
        ]
        if sums.with_gradients and gradients:
            column_scales.add_gradient(sums.gradients["r1"], gradients)
        with_r3 = len(matrices) > 2
        if with_r3:
            self._add_down(matrices[2], casts[2], r1_cast, sums)
        left = [] if with_r3 else enumerate(self.left_rotated)
        own = (linear for place, linear in left if place not in self._left_to_others)
        for linear in (*self.own_left, *own):
            self._add_left_rotated(linear, r1_cast, sums)
        if not sums.losses:
            sums.losses.append(r1.new_zeros(()))
        return sums

    def _r1_group(
        self, group: InputGroup, column_scale: Tensor | None, r1_cast: Tensor, r2_cast: Tensor, sums: Sums
    ) -> Tensor:
        """The linears that read the output of one norm: Y = W R1, and blockdiag(R2)ᵀ W R1 for v_proj.

        Neighbours of one sparsity are one Y. v_proj, which R2 rotates too, is its own. r1_cast and r2_cast
        are in the dtype of the products. Returns the gradient in column_scale [in].
        """
        pruned = [linear for linear in group.linears if linear.name in self.weights]
        alike = itertools.groupby(pruned, lambda linear: (linear.output, self.sparsity[linear.name]))
        runs = [list(run) for _, run in alike]
        stack = self._stacks[group.name]
        sizes = [sum(len(self.weights[linear.name]) for linear in run) for run in runs]
        rotated = rotate_right(stack, r1_cast)
        gradient = None
        for run, weight, u in zip(runs, stack.split(sizes), rotated.split(sizes), strict=True):
            by_r2 = run[0].output == "r2"
            y = rotate_left(r2_cast, u) if by_r2 else u
            sparsity = self.sparsity[run[0].name]
            dy, dcolumn_scale = self._add_loss(sparsity, y, column_scale, sums, columns=by_r2)
            gradient = dcolumn_scale if gradient is None else gradient.add_(dcolumn_scale)
            if not sums.with_gradients:
                continue
            if by_r2:
                sums.add("r2", left_factors(u, dy, len(r2_cast)))
                dy = rotate_left(r2_cast.mT, dy)
            sums.add("r1", right_factors(weight, dy, len(r1_cast)))
        assert gradient is not None
        return gradient

    def _heads_group(
        self, linear: LinearSpec, r2: Tensor, r1_cast: Tensor, r2_cast: Tensor, sums: Sums
    ) -> None:
        """o_proj: the blocks are the R2 of the KV head of each query head."""
        weight, metric, sparsity = self.weights[linear.name], self.r2_metric, self.sparsity[linear.name]
        assert metric is not None
        heads_r2_cast = r2_cast.repeat_interleave(self.shape.group, 0)
        heads_r2 = heads_r2_cast if metric.factored else r2.repeat_interleave(self.shape.group, 0)
        left = r1_cast if linear.output == "r1" else None
        gradient = self._add_on_both_sides(weight, metric, sparsity, heads_r2, heads_r2_cast, left, sums)
        if gradient is not None:
            sums.gradients["r2"] = gradient.unflatten(0, (-1, self.shape.group)).sum(1)

    def _add_down(self, r3: Tensor, r3_cast: Tensor, r1_cast: Tensor, sums: Sums) -> None:
        """The linears of `left_rotated`, each with its blocks of R3."""
        count = len(self.left_rotated)
        gradients: list[Tensor | None] = []
        parts = zip(self.left_rotated, r3.chunk(count), r3_cast.chunk(count), strict=True)
        for place, (linear, blocks, cast) in enumerate(parts):
            if place in self._left_to_others:
                gradients.append(torch.zeros_like(blocks))
                continue
            assert linear.metric is not None
            of_linear = linear.weight, linear.metric, linear.sparsity
            left = r1_cast if linear.by_r1 else None
            gradients.append(self._add_on_both_sides(*of_linear, blocks, cast, left, sums))
        if sums.with_gradients:
            sums.gradients["r3"] = torch.cat([each for each in gradients if each is not None])

    def _add_on_both_sides(
        self,
        weight: Tensor,
        metric: Metric,
        sparsity: Sparsity,
        blocks: Tensor,
        blocks_cast: Tensor,
        r1_cast: Tensor | None,
        sums: Sums,
    ) -> Tensor | None:
        """Y = R1ᵀ W blockdiag(blocks [n, b, b]), without R1 for None. Returns the gradient in `blocks`, if it
        is wanted."""
        column_scales = ColumnScales(metric, blocks, blocks_cast)
        u = weight if r1_cast is None else rotate_left(r1_cast, weight)
        y = rotate_right(u, blocks_cast)
        columns = r1_cast is not None
        dy, dcolumn_scale = self._add_loss(sparsity, y, column_scales.of_input(0), sums, columns=columns)
        if not sums.with_gradients:
            return None
        gradient = product(*right_factors(u, dy, len(blocks_cast)), self.loss_dtype)
        column_scales.add_gradient(gradient, [dcolumn_scale])
        if r1_cast is not None:
            sums.add("r1", left_factors(weight, rotate_right(dy, blocks_cast.mT), len(r1_cast)))
        return gradient

    def _add_left_rotated(self, linear: LeftRotated, r1_cast: Tensor, sums: Sums) -> None:
        """down_proj without R3: Y = R1ᵀ W, with a column_scale that does not depend on the rotations."""
        y = rotate_left(r1_cast, linear.weight)
        dy, _ = self._add_loss(linear.sparsity, y, linear.column_scale, sums, rows=False, columns=True)
        if sums.with_gradients:
            sums.add("r1", left_factors(linear.weight, dy, len(r1_cast)))

    def _add_loss(
        self,
        sparsity: Sparsity,
        y: Tensor,
        column_scale: Tensor | None,
        sums: Sums,
        *,
        rows: bool = True,
        columns: bool,
    ) -> tuple[Tensor, Tensor]:
        """Adds the loss of a rotated weight y to `sums`; returns dY and the gradient in column_scale.

        rows, columns: whether the input is rotated, and whether the outputs are. The entropy is that of the
            rows, of the columns, or of both.
        """
        if self.objective == "entropy":
            found = ops.entropy_loss_and_grad(y, column_scale, rows=rows, columns=columns)
        else:
            prune, group = int(y.shape[1] * sparsity.ratio), 0
            if sparsity.structured:
                prune, group = sparsity.m - sparsity.n, sparsity.m
            found = ops.pruned_importance_and_grad(y, column_scale, prune=prune, group=group)
        loss, dy, dcolumn_scale = found
        sums.losses.append(loss)
        return dy, dcolumn_scale

    def entropy(self, rotation: LayerRotation | None) -> float:
        """The entropy (paper, equation 9) for either objective, under `rotation` (None: the identity)."""
        matrices = self.identity()
        if rotation is not None:
            r1, *own = rotation.matrices.values()
            blocks = (diagonal_blocks(r1, self.blocks), *own)
            matrices = tuple(each.to(like) for each, like in zip(blocks, matrices, strict=True))
        return self.entropy_at(*matrices)

    def entropy_at(self, *matrices: Tensor) -> float:
        """The entropy (paper, equation 9) for either objective, for the matrices of `identity`."""
        objective, self.objective = self.objective, "entropy"
        try:
            return float(self.value(*matrices))
        finally:
            self.objective = objective


def _factor(weight: Tensor, metric: Metric) -> float:
    """√(out_features / (sum of the scores at R = I)), the factor of a weight [out, in] for `pruned`.

    A factor of the weight, not of the loss: so linears with different factors share one op. The sum is not
    taken at the current R, because the training could then lower the loss by increasing the sum.
    """
    squares = weight.square().sum(0)
    if (diagonal := metric.diagonal) is not None:
        squares = squares * metric.column_scale(diagonal.to(squares))
    total = float(squares.sum())
    return math.sqrt(weight.shape[0] / total) if total > 0 else 1.0
