"""Weights of linears that are rotated at once: as one matrix each product, each score and each gradient."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drot.config import Sparsity
from drot.model.family import InputGroup, LinearSpec
from drot.rotation.importance import Metric

#: most bytes of the weights of experts that are rotated at once
STACK_BYTES = 1 << 29


@dataclass(frozen=True)
class Stack:
    """The linears of an input group, or of alike groups of several experts, of which a rotation acts on the
    input.

    groups: the group, or those of the experts.
    linears: those of the first group that are in the stack.
    sizes: the rows of each.
    weight: [Σ sizes, groups, in], folded weights, for `pruned` times their factors (output_weights.py). So
        the weights of the experts are one below the other for a product, and side by side for the scores,
        whose columns are independent.
    """

    groups: Sequence[InputGroup]
    linears: Sequence[LinearSpec]
    sizes: Sequence[int]
    weight: Tensor

    def rows(self, parts: Sequence[slice]) -> "Stack | None":
        """The stack with a part of the rows of each linear; None if no row is left."""
        wholes = self.weight.split(list(self.sizes))
        weights = [whole[part] for whole, part in zip(wholes, parts, strict=True)]
        kept = [i for i, weight in enumerate(weights) if len(weight)]
        if not kept:
            return None
        return Stack(
            self.groups,
            [self.linears[i] for i in kept],
            [len(weights[i]) for i in kept],
            torch.cat([weights[i] for i in kept]),
        )

    def to(self, device: torch.device) -> "Stack":
        return dataclasses.replace(self, weight=self.weight.to(device))


@dataclass(frozen=True)
class LeftRotated:
    """A linear of which R1 or nothing rotates the outputs, and R3 or nothing the input: down_proj.

    With R3, experts side by side are one linear with the blocks of all.

    weight: folded weight [d, ff], times its factor for `pruned`. Those of several experts lie side by side.
    column_scale: without R3 the column_scale [ff] of its scores, which no rotation changes; None for 1.
    metric: with R3 the diagonal blocks [ff/b, b, b] of M.
    by_r1: whether R1 rotates the outputs.
    experts: how many lie side by side.
    """

    weight: Tensor
    column_scale: Tensor | None
    metric: Metric | None
    sparsity: Sparsity
    by_r1: bool = True
    experts: int = 1

    def split(self, count: int) -> list["LeftRotated"]:
        """At most `count` parts, each of some of the experts."""
        if self.experts == 1:
            return [self]
        width = self.weight.shape[1] // self.experts
        counts = [len(part) for part in torch.arange(self.experts).tensor_split(min(count, self.experts))]
        sizes = [width * number for number in counts]
        scales = [None] * len(sizes) if self.column_scale is None else self.column_scale.split(sizes)
        metrics = [self.metric] * len(sizes)
        if self.metric is not None and (matrix := self.metric.matrix) is not None:
            of_experts = matrix.split([size // matrix.shape[-1] for size in sizes])
            metrics = [dataclasses.replace(self.metric, matrix=part) for part in of_experts]
        weights = self.weight.split(sizes, 1)
        return [
            dataclasses.replace(self, weight=weight, column_scale=scale, metric=metric, experts=number)
            for weight, scale, metric, number in zip(weights, scales, metrics, counts, strict=True)
        ]

    def to(self, device: torch.device) -> "LeftRotated":
        return dataclasses.replace(
            self,
            weight=self.weight.to(device),
            column_scale=None if self.column_scale is None else self.column_scale.to(device),
            metric=None if self.metric is None else self.metric.to(device),
        )


def by_rows(linear: LinearSpec) -> bool:
    """Whether R1 alone acts on the linear, and on its input."""
    return linear.input == "r1" and linear.output != "r2"


def side_by_side(metrics: list[Metric], dtype: torch.dtype) -> Metric:
    """The metric of R3, of one linear or of several experts side by side: blocks [n · in/b, b, b]."""
    matrices = [metric.matrix for metric in metrics if metric.matrix is not None]
    if len(matrices) < 2:
        return metrics[0].rounded(dtype)
    return dataclasses.replace(metrics[0], matrix=torch.cat(matrices)).rounded(dtype)


def left_rotated(
    weight: Tensor,
    metrics: list[Metric],
    sparsity: Sparsity,
    *,
    by_r1: bool,
    r3: Metric | None,
    loss_dtype: torch.dtype,
) -> LeftRotated:
    """The linear of one or several experts with the weights [experts, d, ff].

    metrics: of their inputs. r3: that of R3, of all experts, if it rotates the input.
    loss_dtype: dtype of column_scale.
    """
    experts, column_scale = len(weight), None
    if r3 is None and metrics[0].matrix is not None:
        diagonals = [metric.matrix for metric in metrics if metric.matrix is not None]
        diagonal = torch.cat(diagonals) if experts > 1 else diagonals[0]
        column_scale = metrics[0].column_scale(diagonal.to(loss_dtype))
    weight = weight.transpose(0, 1).flatten(1) if experts > 1 else weight[0]
    return LeftRotated(weight, column_scale, r3, sparsity, by_r1, experts)
