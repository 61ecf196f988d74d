"""The objective of one layer and its gradient in R1 and R2, without an autograd graph.

Entropy (paper, equations 5 and 8): Σ over linears, Σ over normalisation groups of H(P); rows where
the rotation acts on the right (q, k, gate, up), columns where it acts on the left (down), both for v
and o. Pruned importance: the right-hand side of the paper's equation 4 itself,
Σ over linears of out_features · (sum of the scores that the mask removes) / (sum of all at R = I).

Gradients, with dY and df from the fused ops and q = diag(RᵀMR):
right Y = W R: dR += Wᵀ dY + 2 (M R) diag(dq);  left Y = Rᵀ W: dR += W dYᵀ.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from drot import ops
from drot.architectures import HeadShape
from drot.config import Sparsity
from drot.rotation.importance import LayerMetrics
from drot.surgery.rotate import LayerRotation

#: rows (columns for down_proj) of a weight that are rotated at a time, which bounds the memory
CHUNK = 8192


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
        self.metrics = metrics.metrics
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
        g1, g2 = torch.zeros_like(r1), torch.zeros_like(r2)
        loss = r1.new_zeros(())
        r1p, r2p = r1.to(self.dtype), r2.to(self.dtype)
        for group, roles in (("attention", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            metric = self.metrics[group]
            factor = mr = dfactor = None
            if metric.matrix is not None:
                mr = metric.matrix.to(r1.dtype) @ r1 if self.dtype == self.work else (
                    metric.matrix.to(self.dtype) @ r1p
                ).to(self.work)
                factor = metric.factor((r1 * mr).sum(0))
                dfactor = torch.zeros_like(factor)
            for role in roles:
                for weight in self.weights[role].split(CHUNK) if role != "v_proj" else (self.weights[role],):
                    y = weight @ r1p
                    if role == "v_proj":
                        z = y.reshape(self.shape.kv_heads, self.shape.head_dim, -1)
                        y = torch.bmm(r2p.mT, z).reshape(y.shape)
                    value, dy, df = self._fused(role, y, factor)
                    if role == "v_proj":
                        dyb = dy.reshape(z.shape)
                        g2 += torch.bmm(z, dyb.mT)
                        dy = torch.bmm(r2p, dyb).reshape(dy.shape)
                    g1 += weight.T @ dy
                    loss = loss + value
                    if dfactor is not None:
                        dfactor += df
            if metric.matrix is not None:
                g1 += 2 * mr * metric.chain(dfactor, factor)
        loss = loss + self._output_projection(r1p, r2, r2p, g1, g2)
        for columns, factor in self._down_chunks():
            value, dy, _ = self._fused("down_proj", r1p.T @ columns, factor)
            g1 += columns @ dy.T
            loss = loss + value
        return loss, g1, g2

    def value(self, r1: Tensor, r2: Tensor) -> Tensor:
        return self.value_and_grad(r1, r2)[0]

    def _output_projection(self, r1p: Tensor, r2: Tensor, r2p: Tensor, g1: Tensor, g2: Tensor) -> Tensor:
        """o_proj: Y = R1ᵀ W blockdiag(R2); adds its gradients to g1 and g2, returns its loss."""
        weight, metric, shape = self.weights["o_proj"], self.metrics["o"], self.shape
        d, kv, group, h = weight.shape[0], shape.kv_heads, shape.group, shape.head_dim
        factor = mr = None
        if metric.matrix is not None:
            blocks = metric.matrix.to(self.work).reshape(kv, group, h, h)
            mr = blocks @ r2[:, None]
            factor = metric.factor((r2[:, None] * mr).sum(2)).reshape(-1)
        u = (r1p.T @ weight).reshape(d, kv, group, h)
        y = torch.einsum("dkgh,khj->dkgj", u, r2p).reshape(weight.shape)
        value, dy, dfactor = self._fused("o_proj", y, factor)
        dyb = dy.reshape(u.shape)
        g2 += torch.einsum("dkgh,dkgj->khj", u, dyb)
        if metric.matrix is not None:
            dq = metric.chain(dfactor, factor).reshape(kv, group, 1, h)
            g2 += (2 * mr * dq).sum(1)
        du = torch.einsum("dkgj,khj->dkgh", dyb, r2p).reshape(weight.shape)
        g1 += weight @ du.T
        return value

    def _down_chunks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        weight, metric = self.weights["down_proj"], self.metrics["down"]
        factor = None if metric.matrix is None else metric.factor(metric.matrix.to(self.work))
        if self.objective == "pruned" and not self.sparsity.structured:
            yield weight, factor  # the smallest of a whole row: rows cannot be cut
            return
        chunk = CHUNK // 32 * 32 if not self.sparsity.structured else CHUNK // self.sparsity.m * self.sparsity.m
        for start in range(0, weight.shape[1], chunk):
            part = slice(start, start + chunk)
            yield weight[:, part], None if factor is None else factor[part]

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
        group = {"o_proj": "o", "down_proj": "down", "gate_proj": "mlp", "up_proj": "mlp"}.get(role, "attention")
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
