"""The objective of one layer and its gradient in R1, R2 and R3, without an autograd graph.

Entropy (paper, equations 5 and 9): the entropies of the rows of q, k, gate and up, where a rotation acts on
the right, of the columns of down, where it acts on the left, and of the rows and columns of v and o, and of
down if R3 rotates its input.

Pruned importance (right-hand side of the paper's equation 4): the sum over the linears of the scores that the
mask removes, times what output_weights.py says of their rows.

The ops return dY and dcolumn_scale, from which dq follows, with q = diag(RᵀMR). The gradient in R is
Wᵀ dY + 2 (M R) diag(dq) for Y = W R, and W dYᵀ for Y = Rᵀ W.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.calibration.hessian import at_once
from drot.config import Sparsity
from drot.machine.products import product
from drot.machine.ranks import Ranks
from drot.model.family import InputGroup, LinearSpec, alike
from drot.model.rotation import rotate_left, rotate_right
from drot.model.sizes import HeadShape
from drot.rotation.gradient import Sums, left_factors, right_factors
from drot.rotation.importance import ColumnScales, Metric, diagonal_blocks, is_rotated
from drot.rotation.output_weights import OutputWeights
from drot.rotation.stack import (
    STACK_BYTES,
    LeftRotated,
    Stack,
    by_rows,
    left_rotated,
    side_by_side,
)
from drot.rotation.work import work_of_ranks


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
    metrics: name of an input group → the metric of its input.
    objective: `entropy` or `pruned`.
    sparsity: one for all linears, or name → sparsity. A linear whose name is missing is not pruned.
    product_dtype: dtype of the matrix products. Losses and gradients are fp32, or fp64 for fp64 products.
    blocks: the number of equal diagonal blocks of R1; 1 makes R1 dense.
    down_block: the size of the blocks of R3, for which `metrics` were made; None without R3.
    fixed_r1: whether R1 stays the identity.
    one_block: whether the layer has one block, so that no output is that of an attention before the MLP.
    keeps_ones: whether the training of R1 keeps R1 1 = 1.
    outputs: for `pruned`, name of a linear → how much each of its outputs counts [out]. Without any, a linear
        counts by its number of outputs.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        metrics: Mapping[str, Metric],
        groups: Sequence[InputGroup],
        shape: HeadShape,
        *,
        objective: str,
        sparsity: Sparsity | Mapping[str, Sparsity],
        product_dtype: torch.dtype = torch.float32,
        blocks: int = 1,
        down_block: int | None = None,
        fixed_r1: bool = False,
        one_block: bool = False,
        keeps_ones: bool = False,
        outputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.groups, self.shape, self.objective, self.blocks = groups, shape, objective, blocks
        self.down_block, self.fixed_r1, self.keeps_ones = down_block, fixed_r1, keeps_ones
        self.sparsity = dict.fromkeys(weights, sparsity) if isinstance(sparsity, Sparsity) else sparsity
        self.product_dtype = product_dtype
        self.loss_dtype = torch.promote_types(product_dtype, torch.float32)
        reads_r1 = next(linear.name for group in groups for linear in group.linears if linear.input == "r1")
        self.hidden_size, self.device = weights[reads_r1].shape[1], weights[reads_r1].device
        self._stacks: list[Stack] = []
        self.left_rotated: list[LeftRotated] = []
        #: places in `left_rotated` of the linears that this rank leaves to others (`share`)
        self._left_to_others: frozenset[int] = frozenset()
        self.own_left: list[LeftRotated] = []
        self.r2_metric: Metric | None = None
        pruned = [
            (linear, weights[linear.name], metrics[group.name])
            for group in groups
            for linear in group.linears
            if linear.name in self.sparsity
        ]
        self._output_weights = OutputWeights(outputs, pruned, shape) if objective == "pruned" else None
        attention_end = None if one_block else next((g for g in groups if g.writes_residual), None)
        for of_stack in self._stacked(weights):
            group, of_groups = of_stack[0], [metrics[group.name] for group in of_stack]
            places = [i for i, linear in enumerate(group.linears) if linear.name in self.sparsity]
            parts = [self._weighted(weights, of_stack, of_groups, place) for place in places]
            if group.input == "r2":
                self.r2_metric = of_groups[0].rounded(product_dtype)
            if group.input in (None, "r3"):
                left = group.linears[0].output == "r1"
                ends_attention = left and group.input is None and group is attention_end
                r3 = side_by_side(of_groups, product_dtype) if is_rotated(group, down_block) else None
                how: dict[str, Any] = {"by_r1": left, "r3": r3, "loss_dtype": self.loss_dtype}
                for place, part in zip(places, parts, strict=True):
                    found = left_rotated(part, of_groups, self.sparsity[group.linears[place].name], **how)
                    if ends_attention:
                        self.own_left.append(found)
                    elif left or r3 is not None:
                        self.left_rotated.append(found)
                continue
            sizes = [part.shape[1] for part in parts]
            weight = torch.cat(parts, 1).transpose(0, 1).contiguous()
            linears = [group.linears[place] for place in places]
            self._stacks.append(Stack(of_stack, linears, sizes, weight))
        of_r1 = [metrics[group.name] for stack in self._by_r1 for group in stack.groups]
        self.r1_metric = self._stacked_metric(of_r1)

    def _stacked(self, weights: Mapping[str, Tensor]) -> Iterator[list[InputGroup]]:
        """The groups with a linear that is pruned. Those of experts are together if they are pruned alike."""
        self.sparsity = {name: sparsity for name, sparsity in self.sparsity.items() if name in weights}

        def sparsities(group: InputGroup) -> list[Sparsity | None]:
            return [self.sparsity.get(linear.name) for linear in group.linears]

        for same in alike(self.groups):
            for wanted, run in itertools.groupby(same, sparsities):
                if any(sparsity is not None for sparsity in wanted):
                    found = list(run)
                    size = sum(weights[linear.name].numel() for linear in found[0].linears)
                    count = max(1, STACK_BYTES // (size * self.product_dtype.itemsize))
                    yield from (found[start : start + count] for start in range(0, len(found), count))

    def _weighted(
        self, weights: Mapping[str, Tensor], groups: Sequence[InputGroup], metrics: list[Metric], place: int
    ) -> Tensor:
        """The weights [groups, out, in] of the linears at `place` in their groups, in the products' dtype.

        For `pruned` they are multiplied by their factors.
        """
        found = [weights[group.linears[place].name] for group in groups]
        weight = (torch.stack(found) if len(found) > 1 else found[0][None]).to(self.loss_dtype)
        if self._output_weights is not None:
            weight = weight * self._output_weights.factors(groups[0].linears[place], weight, metrics)
        return weight.to(self.product_dtype)

    def _stacked_metric(self, metrics: list[Metric]) -> Metric:
        """The diagonal blocks of the metrics of inputs that R1 rotates, as ColumnScales takes them."""
        if not metrics or metrics[0].matrix is None:
            return Metric(None, False)
        matrices = [metric.matrix for metric in metrics if metric.matrix is not None]
        count, found = at_once(len(matrices[0])), []
        for start in range(0, len(matrices), count):
            some = matrices[start : start + count]
            blocks = diagonal_blocks(torch.stack(some) if len(some) > 1 else some[0][None], self.blocks)
            found.append(Metric(blocks, metrics[0].inverse).rounded(self.product_dtype))
        parts = [part.matrix.transpose(0, 1).flatten(1, 2) for part in found if part.matrix is not None]
        return Metric(torch.cat(parts, 1), found[0].inverse, found[0].factored)

    @property
    def _by_r1(self) -> list[Stack]:
        return [stack for stack in self._stacks if stack.groups[0].input == "r1"]

    @property
    def empty(self) -> bool:
        """Whether no linear is pruned, so that the loss is 0 for all rotations."""
        return not (self._stacks or self.left_rotated or self.own_left)

    def share(self, ranks: Ranks) -> "LayerObjective":
        """The part of the objective that this rank computes; loss and gradients are sums over the ranks.

        The rows of linears of which R1 alone rotates the input are independent, and go to the ranks in such
        numbers that all have the same work. Each other linear goes to one rank as a whole.
        """
        if ranks.size == 1:
            return self
        other = copy.copy(self)
        other.left_rotated = [part for each in self.left_rotated for part in each.split(ranks.size)]
        whole: dict[str | int, int] = {}
        divisible = 0
        for stack in self._stacks:
            for linear, size in zip(stack.linears, stack.sizes, strict=True):
                numel = size * stack.weight[0].numel()
                if by_rows(linear):
                    divisible += numel
                else:
                    whole[linear.name] = numel
        left = [*other.left_rotated, *self.own_left]
        whole |= {place: linear.weight.numel() for place, linear in enumerate(left)}
        owners, stops = work_of_ranks(whole, divisible, ranks.size)
        start, stop = stops[ranks.rank : ranks.rank + 2]
        count = len(other.left_rotated)
        other._left_to_others = frozenset(place for place in range(count) if owners[place] != ranks.rank)
        other.own_left = [
            each for place, each in enumerate(self.own_left, count) if owners[place] == ranks.rank
        ]

        def own_rows(linear: LinearSpec, size: int) -> slice:
            if by_rows(linear):
                return slice(round(start * size), round(stop * size))
            return slice(0, size if owners[linear.name] == ranks.rank else 0)

        shares = [stack.rows(list(map(own_rows, stack.linears, stack.sizes))) for stack in self._stacks]
        other._stacks = [stack for stack in shares if stack is not None]
        if (matrix := self.r1_metric.matrix) is not None:
            groups = [group for stack in self._by_r1 for group in stack.groups]
            kept = {group.name for stack in other._stacks for group in stack.groups}
            of_groups = zip(groups, matrix.unflatten(1, (len(groups), -1)).unbind(1), strict=True)
            parts = [part for group, part in of_groups if group.name in kept]
            other.r1_metric = (
                replace(self.r1_metric, matrix=torch.cat(parts, 1)) if parts else Metric(None, False)
            )
        return other

    def to(self, device: torch.device) -> "LayerObjective":
        """The objective on `device`; `self` if it is there."""
        if self.device == device:
            return self
        other = copy.copy(self)
        other.device = device
        other._stacks = [stack.to(device) for stack in self._stacks]
        other.r1_metric = self.r1_metric.to(device)
        other.r2_metric = None if self.r2_metric is None else self.r2_metric.to(device)
        other.left_rotated = [linear.to(device) for linear in self.left_rotated]
        other.own_left = [linear.to(device) for linear in self.own_left]
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
        for stack in self._stacks:
            if stack.groups[0].input == "r2":
                self._heads_group(stack, r2, r1_cast, r2_cast, sums)
        column_scales = ColumnScales(self.r1_metric, r1, r1_cast)
        gradients, start = [], 0
        for stack in self._by_r1:
            inputs = slice(start, start := start + len(stack.groups))
            gradients.append(self._r1_group(stack, column_scales.of_inputs(inputs), r1_cast, r2_cast, sums))
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
        self, stack: Stack, column_scale: Tensor | None, r1_cast: Tensor, r2_cast: Tensor, sums: Sums
    ) -> Tensor:
        """The linears that read the output of one norm: Y = W R1, and blockdiag(R2)ᵀ W R1 for v_proj.

        Neighbours of one sparsity are one Y. v_proj, which R2 rotates too, is its own. r1_cast and r2_cast
        are in the dtype of the products. Returns the gradient in column_scale [groups · in].
        """
        same = itertools.groupby(
            zip(stack.linears, stack.sizes, strict=True),
            lambda each: (each[0].output, self.sparsity[each[0].name]),
        )
        runs = [(output, sparsity, sum(size for _, size in run)) for (output, sparsity), run in same]
        sizes, experts = [size for *_, size in runs], len(stack.groups)
        rotated = rotate_right(stack.weight.flatten(0, 1), r1_cast).unflatten(0, (-1, experts))
        gradient = None
        for (output, sparsity, _), weight, u in zip(
            runs, stack.weight.split(sizes), rotated.split(sizes), strict=True
        ):
            by_r2 = output == "r2"
            y = rotate_left(r2_cast, u[:, 0]) if by_r2 else u.flatten(1)
            dy, dcolumn_scale = self._add_loss(
                sparsity, y, column_scale, sums, columns=by_r2, experts=experts
            )
            gradient = dcolumn_scale if gradient is None else gradient.add_(dcolumn_scale)
            if not sums.with_gradients:
                continue
            if by_r2:
                sums.add("r2", left_factors(u[:, 0], dy, len(r2_cast)))
                dy = rotate_left(r2_cast.mT, dy)
            dy = dy.reshape(-1, self.hidden_size)
            sums.add("r1", right_factors(weight.flatten(0, 1), dy, len(r1_cast)))
        assert gradient is not None
        return gradient

    def _heads_group(self, stack: Stack, r2: Tensor, r1_cast: Tensor, r2_cast: Tensor, sums: Sums) -> None:
        """o_proj: the blocks are the R2 of the KV head of each query head."""
        linear, weight = stack.linears[0], stack.weight[:, 0]
        metric, sparsity = self.r2_metric, self.sparsity[linear.name]
        assert metric is not None
        heads_r2_cast = r2_cast.repeat_interleave(self.shape.group, 0)
        heads_r2 = heads_r2_cast if metric.factored else r2.repeat_interleave(self.shape.group, 0)
        left = r1_cast if linear.output == "r1" else None
        gradient = self._add_on_both_sides(weight, metric, sparsity, heads_r2, heads_r2_cast, left, sums)
        if gradient is not None:
            sums.gradients["r2"] = gradient.unflatten(0, (-1, self.shape.group)).sum(1)

    def _add_down(self, r3: Tensor, r3_cast: Tensor, r1_cast: Tensor, sums: Sums) -> None:
        """The linears of `left_rotated`, each with its blocks of R3."""
        counts = [linear.weight.shape[1] // r3.shape[-1] for linear in self.left_rotated]
        gradients: list[Tensor | None] = []
        parts = zip(self.left_rotated, r3.split(counts), r3_cast.split(counts), strict=True)
        for place, (linear, blocks, cast) in enumerate(parts):
            if place in self._left_to_others:
                gradients.append(torch.zeros_like(blocks))
                continue
            assert linear.metric is not None
            of_linear = linear.weight, linear.metric, linear.sparsity
            left = r1_cast if linear.by_r1 else None
            found = self._add_on_both_sides(*of_linear, blocks, cast, left, sums, linear.experts)
            gradients.append(found)
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
        experts: int = 1,
    ) -> Tensor | None:
        """Y = R1ᵀ W blockdiag(blocks [n, b, b]), without R1 for None. Returns the gradient in `blocks`, if it
        is wanted. experts: how many lie side by side in W."""
        column_scales = ColumnScales(metric, blocks, blocks_cast)
        u = weight if r1_cast is None else rotate_left(r1_cast, weight)
        y = rotate_right(u, blocks_cast)
        columns = r1_cast is not None
        dy, dcolumn_scale = self._add_loss(
            sparsity, y, column_scales.of_inputs(slice(1)), sums, columns=columns, experts=experts
        )
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
        how: dict[str, Any] = {"rows": False, "columns": True, "experts": linear.experts}
        dy, _ = self._add_loss(linear.sparsity, y, linear.column_scale, sums, **how)
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
        experts: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Adds the loss of a rotated weight y to `sums`; returns dY and the gradient in column_scale.

        rows, columns: whether the input is rotated, and whether the outputs are. The entropy is that of the
            rows, of the columns, or of both.
        experts: how many weights lie side by side in y.
        """
        entropy = self.objective == "entropy"
        if experts > 1 and (rows if entropy else not sparsity.structured):  # a row is of one expert
            scales = [None] * experts if column_scale is None else column_scale.chunk(experts)
            parts = [
                self._add_loss(sparsity, part, scale, sums, rows=rows, columns=columns)
                for part, scale in zip(y.chunk(experts, 1), scales, strict=True)
            ]
            dys, gradients = zip(*parts, strict=True)
            return torch.cat(dys, 1), torch.cat(gradients)
        if entropy:
            found = ops.entropy_loss_and_grad(y, column_scale, rows=rows, columns=columns)
        else:
            prune, group = int(y.shape[1] * sparsity.ratio), 0
            if sparsity.structured:
                prune, group = sparsity.m - sparsity.n, sparsity.m
            found = ops.pruned_importance_and_grad(y, column_scale, prune=prune, group=group)
        loss, dy, dcolumn_scale = found
        sums.losses.append(loss)
        return dy, dcolumn_scale

    def entropy(self, *matrices: Tensor) -> float:
        """The entropy (paper, equation 9) for either objective. matrices: as in `identity`, of any dtype.

        For `pruned` it is that of weights times their factors, which cancel in all rows and columns but the
        columns of v_proj, whose heads have different factors.
        """
        objective, self.objective = self.objective, "entropy"
        try:
            return float(self.value(*(matrix.to(self.loss_dtype) for matrix in matrices)))
        finally:
            self.objective = objective
