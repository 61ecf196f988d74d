"""The objective of one layer and its gradient in R1 and R2, without an autograd graph.

Entropy (paper, equations 5 and 8): Σ over linears, Σ over normalisation groups of H(P); rows where
the rotation acts on the right (q, k, gate, up), columns where it acts on the left (down), both for v
and o. Pruned importance: the right-hand side of the paper's equation 4 itself,
Σ over linears of out_features · (sum of the scores that the mask removes) / (sum of all at R = I).

Gradients, with dY and df from the fused ops and q = diag(RᵀMR):
right Y = W R: dR += Wᵀ dY + 2 (M R) diag(dq);  left Y = Rᵀ W: dR += W dYᵀ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drot import ops
from drot.architectures import INPUT_GROUPS, HeadShape
from drot.config import Sparsity
from drot.rotation.importance import LayerMetrics, Metric
from drot.surgery.rotate import LayerRotation, rotate_heads_left, rotate_heads_right

#: rows (columns for down_proj) of a weight that are rotated at a time, which bounds the memory
CHUNK = 8192


@dataclass
class _Sums:
    """What one evaluation adds up: loss, d loss/d R1, d loss/d R2."""

    loss: Tensor
    g1: Tensor
    g2: Tensor


class LayerObjective:
    """Value and gradient of the objective of one decoder layer.

    weights: role → folded, unrotated weight [out, in]; objective: `entropy` or `pruned`;
    product_dtype: dtype of the matrix products. Losses and sums are fp32 (fp64 for fp64 weights).
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
    ) -> None:
        self.shape = shape
        self.objective = objective
        self.sparsity = sparsity
        self.dtype = product_dtype
        self.work = torch.promote_types(product_dtype, torch.float32)
        self.metrics = {
            group: Metric(None if m.matrix is None else m.matrix.to(product_dtype), m.inverse)
            for group, m in metrics.metrics.items()
        }
        self.weights = {role: weight.to(product_dtype).contiguous() for role, weight in weights.items()}
        self.hidden_size = weights["q_proj"].shape[1]
        self.device = weights["q_proj"].device
        self._scale = dict.fromkeys(weights, 1.0)
        if objective == "pruned":
            self._scale = {role: self._normaliser(role) for role in weights}

    def identity(self) -> tuple[Tensor, Tensor]:
        """R1 [d, d] and R2 [kv, h, h] at the start."""
        kw = {"dtype": self.work, "device": self.device}
        r2 = torch.eye(self.shape.head_dim, **kw).repeat(self.shape.kv_heads, 1, 1)
        return torch.eye(self.hidden_size, **kw), r2

    def value_and_grad(self, r1: Tensor, r2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """loss (0-dim), d loss/d r1 [d, d], d loss/d r2 [kv, h, h], in the work dtype."""
        sums = _Sums(r1.new_zeros(()), torch.zeros_like(r1), torch.zeros_like(r2))
        for group in ("attention", "mlp"):
            self._right_group(group, r1, r2, sums)
        self._output_projection(r1, r2, sums)
        self._down_projection(r1, sums)
        return sums.loss, sums.g1, sums.g2

    def value(self, r1: Tensor, r2: Tensor) -> Tensor:
        """The loss alone."""
        return self.value_and_grad(r1, r2)[0]

    def _right_group(self, group: str, r1: Tensor, r2: Tensor, sums: "_Sums") -> None:
        """The linears behind one norm: Y = W R1, and for v_proj blockdiag(R2)ᵀ W R1."""
        metric, r1p, r2p = self.metrics[group], r1.to(self.dtype), r2.to(self.dtype)
        factor = dfactor = mr = None
        if metric.matrix is not None:
            mr = (metric.matrix @ r1p).to(self.work)
            factor = metric.factor((r1 * mr).sum(0))
            dfactor = torch.zeros_like(factor)
        for role in INPUT_GROUPS[group]:
            # v_proj's rows stay together: it is normalised by columns as well, and small
            rows = self.weights[role].shape[0] if role == "v_proj" else CHUNK
            for weight in self.weights[role].split(rows):
                z = y = weight @ r1p
                if role == "v_proj":
                    y = rotate_heads_left(z, r2p)
                value, dy, df = self._fused(role, y, factor)
                if role == "v_proj":
                    heads = (self.shape.kv_heads, self.shape.head_dim, -1)
                    sums.g2 += torch.bmm(z.reshape(heads), dy.reshape(heads).mT)
                    dy = rotate_heads_left(dy, r2p.mT)
                sums.loss += value
                sums.g1 += weight.T @ dy
                if dfactor is not None:
                    dfactor += df
        if mr is not None:
            sums.g1 += 2 * mr * metric.chain(dfactor, factor)

    def _output_projection(self, r1: Tensor, r2: Tensor, sums: "_Sums") -> None:
        """o_proj: Y = R1ᵀ W blockdiag(R2); of M only the diagonal head blocks [heads, h, h] count."""
        weight, metric, shape = self.weights["o_proj"], self.metrics["o"], self.shape
        r1p, r2p = r1.to(self.dtype), r2.to(self.dtype)
        grouped = (weight.shape[0], shape.kv_heads, shape.group, shape.head_dim)
        factor = mr = None
        if metric.matrix is not None:
            mr = (metric.matrix.unflatten(0, (shape.kv_heads, shape.group)) @ r2p[:, None]).to(self.work)
            factor = metric.factor((r2[:, None] * mr).sum(2).flatten())
        u = r1p.T @ weight
        value, dy, dfactor = self._fused("o_proj", rotate_heads_right(u, r2p, shape.group), factor)
        sums.loss += value
        sums.g1 += weight @ rotate_heads_right(dy, r2p.mT, shape.group).T
        sums.g2 += torch.einsum("dkgh,dkgj->khj", u.reshape(grouped), dy.reshape(grouped))
        if mr is not None:
            dq = metric.chain(dfactor, factor).reshape(shape.kv_heads, shape.group, 1, shape.head_dim)
            sums.g2 += (2 * mr * dq).sum(1)

    def _down_projection(self, r1: Tensor, sums: "_Sums") -> None:
        """down_proj: Y = R1ᵀ W, with a factor that no rotation changes."""
        weight, metric, r1p = self.weights["down_proj"], self.metrics["down"], r1.to(self.dtype)
        factor = None if metric.matrix is None else metric.factor(metric.matrix.to(self.work))
        # the smallest of a whole row cannot be found in parts of it
        whole_rows = self.objective == "pruned" and not self.sparsity.structured
        width = weight.shape[1] if whole_rows else CHUNK // max(self.sparsity.m, 1) * max(self.sparsity.m, 1)
        for start in range(0, weight.shape[1], width):
            part = slice(start, start + width)
            columns = weight[:, part]
            value, dy, _ = self._fused("down_proj", r1p.T @ columns, None if factor is None else factor[part])
            sums.loss += value
            sums.g1 += columns @ dy.T

    def _fused(self, role: str, y: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if self.objective == "entropy":
            rows = role != "down_proj"
            columns = role in ("v_proj", "o_proj", "down_proj")
            return ops.entropy_loss_and_grad(y, factor, rows=rows, columns=columns)
        prune, group = self._removed_per_group(y.shape[1])
        return ops.pruned_importance_and_grad(y, factor, prune=prune, group=group, scale=self._scale[role])

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
            r1, r2 = rotation.r1.to(r1), rotation.r2.to(r2)
        trained, self.objective = self.objective, "entropy"
        try:
            return float(self.value(r1, r2))
        finally:
            self.objective = trained
