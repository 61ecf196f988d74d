"""The objective of one layer and its gradient in R1 and R2, without an autograd graph.

Entropy (paper, equations 5 and 8): Σ over linears, Σ over normalisation groups of H(P); rows where
the rotation acts on the right (q, k, gate, up), columns where it acts on the left (down), both for v
and o. Pruned importance: the right-hand side of the paper's equation 4 itself,
Σ over linears of out_features · (sum of the scores that the mask removes) / (sum of all at R = I).

Gradients, with dY and df from the fused ops and q = diag(RᵀMR):
right Y = W R: dR += Wᵀ dY + 2 (M R) diag(dq);  left Y = Rᵀ W: dR += W dYᵀ.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drot import ops
from drot.architectures import INPUT_GROUPS, HeadShape
from drot.config import Sparsity
from drot.rotation.importance import LayerMetrics, Metric, diagonal_blocks
from drot.surgery.rotate import LayerRotation, rotate_left, rotate_right

#: rows (columns for down_proj) of a weight that are rotated at a time, which bounds the memory
CHUNK = 8192


@dataclass
class _Sums:
    """What one evaluation adds up: loss, d loss/d R1 [n, b, b], d loss/d R2 [kv, h, h]."""

    loss: Tensor
    g1: Tensor
    g2: Tensor


class _ColumnFactor:
    """The factor of the columns behind one input, q = diag(RᵀMR), and the way back to R."""

    def __init__(self, metric: Metric, blocks: Tensor, dtype: torch.dtype) -> None:
        self.metric = metric
        self.factor: Tensor | None = None
        self.gradient_in_factor: Tensor | None = None
        if metric.matrix is not None:
            self._product = (metric.matrix @ blocks.to(dtype)).to(blocks.dtype)
            self.factor = metric.factor((blocks * self._product).sum(1).flatten())
            self.gradient_in_factor = torch.zeros_like(self.factor)

    def add_gradient(self, gradient: Tensor) -> None:
        """Adds 2 (M R) diag(dq) to `gradient` [n, b, b]."""
        if self.factor is not None and self.gradient_in_factor is not None:
            dq = self.metric.chain(self.gradient_in_factor, self.factor)
            gradient += 2 * self._product * dq.reshape(len(gradient), 1, -1)


@dataclass(frozen=True)
class Down:
    """A down_proj whose output R1 rotates: weight [d, ff], its input's metric, and the factor of its loss."""

    weight: Tensor
    metric: Metric
    scale: float

    def to(self, device: torch.device, dtype: torch.dtype) -> "Down":
        return Down(self.weight.to(device, dtype), self.metric.to(device), self.scale)


class LayerObjective:
    """Value and gradient of the objective of one decoder layer.

    weights: role → folded, unrotated weight [out, in]; objective: `entropy` or `pruned`;
    product_dtype: dtype of the matrix products. Losses and sums are fp32 (fp64 for fp64 weights).
    R1 is block-diagonal with `blocks` equal blocks, held as a stack [blocks, b, b]; one is dense.

    downs: the down_projs that R1 rotates, at first the layer's own. Where they are pruned in the next
    layer's basis the caller puts that of the layer before in its place: none, one or two are summed.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        metrics: LayerMetrics,
        shape: HeadShape,
        *,
        objective: str,
        sparsity: Sparsity,
        product_dtype: torch.dtype = torch.float32,
        blocks: int = 1,
    ) -> None:
        self.shape = shape
        self.objective = objective
        self.sparsity = sparsity
        self.blocks = blocks
        self.dtype = product_dtype
        self.work = torch.promote_types(product_dtype, torch.float32)
        self.weights = {role: weight.to(product_dtype).contiguous() for role, weight in weights.items()}
        self.hidden_size = weights["q_proj"].shape[1]
        self.device = weights["q_proj"].device
        self.metrics = {}
        for group, metric in metrics.metrics.items():
            matrix = metric.matrix
            if matrix is not None:
                if group in ("attention", "mlp"):
                    matrix = diagonal_blocks(matrix, blocks)
                matrix = matrix.to(self.work if group == "down" else product_dtype).contiguous()
            self.metrics[group] = Metric(matrix, metric.inverse)
        self._scale = dict.fromkeys(weights, 1.0)
        if objective == "pruned":
            self._scale = {role: self._normaliser(role) for role in weights}
        self.downs = [
            Down(self.weights.pop("down_proj"), self.metrics.pop("down"), self._scale.pop("down_proj"))
        ]

    def to(self, device: torch.device) -> "LayerObjective":
        """This objective with its tensors on another device, in the dtype of the products; itself where
        they are so already."""
        if self.device == device and self.weights["q_proj"].dtype == self.dtype:
            return self
        return self._moved(device, self.dtype)

    def offload(self, dtype: torch.dtype) -> "LayerObjective":
        """This objective in main memory, its weights in `dtype` (the checkpoint's) if that is smaller;
        `to` brings it back."""
        smaller = dtype if dtype.itemsize < self.dtype.itemsize else self.dtype
        return self._moved(torch.device("cpu"), smaller)

    def _moved(self, device: torch.device, dtype: torch.dtype) -> "LayerObjective":
        other = copy.copy(self)
        other.device = device
        other.weights = {role: weight.to(device, dtype) for role, weight in self.weights.items()}
        other.metrics = {group: metric.to(device) for group, metric in self.metrics.items()}
        other.downs = [down.to(device, dtype) for down in self.downs]
        return other

    def identity(self) -> tuple[Tensor, Tensor]:
        """R1 [blocks, b, b] and R2 [kv, h, h] at the start."""
        kw: dict[str, Any] = {"dtype": self.work, "device": self.device}
        r1 = torch.eye(self.hidden_size // self.blocks, **kw).repeat(self.blocks, 1, 1)
        return r1, torch.eye(self.shape.head_dim, **kw).repeat(self.shape.kv_heads, 1, 1)

    def value_and_grad(self, r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """loss (0-dim), d loss/d r1 [blocks, b, b], d loss/d r2 [kv, h, h], in the work dtype."""
        sums = _Sums(r1.new_zeros(()), torch.zeros_like(r1), torch.zeros_like(r2))
        for group in ("attention", "mlp"):
            self._right_group(group, r1, r2, sums)
        self._output_projection(r1, r2, sums)
        for down in self.downs:
            self._down_projection(down, r1, sums)
        return sums.loss, sums.g1, sums.g2

    def value(self, r1: Tensor, r2: Tensor) -> Tensor:
        """The loss alone."""
        return self.value_and_grad(r1, r2)[0]

    def _right_group(self, group: str, r1: Tensor, r2: Tensor, sums: _Sums) -> None:
        """The linears behind one norm: Y = W R1, and for v_proj blockdiag(R2)ᵀ W R1."""
        column = _ColumnFactor(self.metrics[group], r1, self.dtype)
        r1p, r2p = r1.to(self.dtype), r2.to(self.dtype)
        for role in INPUT_GROUPS[group]:
            # v_proj's rows stay together: it is normalised by columns as well, and small
            rows = self.weights[role].shape[0] if role == "v_proj" else CHUNK
            for weight in self.weights[role].split(rows):
                z = y = rotate_right(weight, r1p)
                if role == "v_proj":
                    y = rotate_left(r2p, z)
                dy = self._fused(role, self._scale[role], y, column, sums)
                if role == "v_proj":
                    sums.g2 += _gradient_left(z, dy, len(r2))
                    dy = rotate_left(r2p.mT, dy)
                sums.g1 += _gradient_right(weight, dy, len(r1))
        column.add_gradient(sums.g1)

    def _output_projection(self, r1: Tensor, r2: Tensor, sums: _Sums) -> None:
        """o_proj: Y = R1ᵀ W blockdiag(R2); of M only the diagonal head blocks [heads, h, h] count."""
        weight, heads = self.weights["o_proj"], r2.repeat_interleave(self.shape.group, 0)
        column = _ColumnFactor(self.metrics["o"], heads, self.dtype)
        r1p, headsp = r1.to(self.dtype), heads.to(self.dtype)
        u = rotate_left(r1p, weight)
        dy = self._fused("o_proj", self._scale["o_proj"], rotate_right(u, headsp), column, sums)
        gradient = _gradient_right(u, dy, len(heads)).to(self.work)
        column.add_gradient(gradient)
        sums.g2 += gradient.unflatten(0, (-1, self.shape.group)).sum(1)
        sums.g1 += _gradient_left(weight, rotate_right(dy, headsp.mT), len(r1))

    def _down_projection(self, down: Down, r1: Tensor, sums: _Sums) -> None:
        """down_proj: Y = R1ᵀ W, with a factor that no rotation changes."""
        weight, metric, r1p = down.weight, down.metric, r1.to(self.dtype)
        factor = None if metric.matrix is None else metric.factor(metric.matrix)
        # the smallest of a whole row cannot be found in parts of it
        whole_rows = self.objective == "pruned" and not self.sparsity.structured
        width = weight.shape[1] if whole_rows else CHUNK // max(self.sparsity.m, 1) * max(self.sparsity.m, 1)
        for start in range(0, weight.shape[1], width):
            columns = weight[:, start : start + width]
            column = _ColumnFactor(Metric(None, False), r1, self.dtype)
            column.factor = None if factor is None else factor[start : start + width]
            dy = self._fused("down_proj", down.scale, rotate_left(r1p, columns), column, sums)
            sums.g1 += _gradient_left(columns, dy, len(r1))

    def _fused(self, role: str, scale: float, y: Tensor, column: _ColumnFactor, sums: _Sums) -> Tensor:
        """dY of one linear; adds its loss, and its gradient in the column factor."""
        if self.objective == "entropy":
            columns = role in ("v_proj", "o_proj", "down_proj")
            value, dy, df = ops.entropy_loss_and_grad(
                y, column.factor, rows=role != "down_proj", columns=columns
            )
        else:
            prune, group = self._removed_per_group(y.shape[1])
            value, dy, df = ops.pruned_importance_and_grad(
                y, column.factor, prune=prune, group=group, scale=scale
            )
        sums.loss += value
        if column.gradient_in_factor is not None:
            column.gradient_in_factor += df
        return dy

    def _removed_per_group(self, width: int) -> tuple[int, int]:
        if self.sparsity.structured:
            return self.sparsity.m - self.sparsity.n, self.sparsity.m
        return int(width * self.sparsity.ratio), 0

    def _normaliser(self, role: str) -> float:
        """out_features / Σ scores at R = I. It is a constant: with the current total in its place the
        training could win by inflating the total."""
        weight = self.weights[role].to(self.work)
        group = next(group for group, roles in INPUT_GROUPS.items() if role in roles)
        metric = self.metrics[group]
        squares = weight.square().sum(0)
        if metric.matrix is not None:
            diagonal = metric.matrix if group == "down" else metric.matrix.diagonal(dim1=-2, dim2=-1)
            squares = squares * metric.factor(diagonal.reshape(-1).to(self.work))
        total = float(squares.sum())
        return weight.shape[0] / total if total > 0 else 0.0

    def entropy(self, rotation: LayerRotation | None) -> float:
        """The paper's entropy of this layer (equation 8) under `rotation`, None for the identity,
        whatever the objective that is trained."""
        r1, r2 = self.identity()
        if rotation is not None:
            r1, r2 = diagonal_blocks(rotation.r1, self.blocks).to(r1), rotation.r2.to(r2)
        trained, self.objective = self.objective, "entropy"
        try:
            return float(self.value(r1, r2))
        finally:
            self.objective = trained


def _gradient_right(matrix: Tensor, dy: Tensor, count: int) -> Tensor:
    """d/dB [count, b, b] where Y [out, n] = matrix · blockdiag(B)."""
    if count == 1:
        return (matrix.T @ dy)[None]
    parts, dparts = (m.unflatten(1, (count, -1)).transpose(0, 1) for m in (matrix, dy))
    return torch.bmm(parts.mT, dparts)


def _gradient_left(matrix: Tensor, dy: Tensor, count: int) -> Tensor:
    """d/dB [count, b, b] where Y [n, in] = blockdiag(B)ᵀ · matrix."""
    if count == 1:
        return (matrix @ dy.T)[None]
    parts, dparts = (m.unflatten(0, (count, -1)) for m in (matrix, dy))
    return torch.bmm(parts, dparts.mT)
