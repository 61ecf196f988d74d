"""Merging rotations into the weights of a layer and of the model's ends.

Orientation: W is [out, in], the residual stream is a row vector h, rotated as h R1. In a layer in
basis R1: q, k, v, gate, up ← W R1; o, down ← R1ᵀ W; v ← R2ᵀ v per KV head; o ← o R2 per query head
with the R2 of its KV head; biases of o and down ← b R1, bias of v ← b R2. The R1 of down may be the
next layer's. All products are made in fp64 from the unfolded weights and rounded once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import Architecture, HeadShape, layer_linears, module_at
from drot.surgery.fold_norm import fold, norm_scale, reset_norm


@dataclass(frozen=True)
class LayerRotation:
    """The orthogonal matrices of one layer: r1 [d, d], r2 [kv_heads, head_dim, head_dim]."""

    r1: Tensor
    r2: Tensor

    def to(self, device: torch.device | str) -> "LayerRotation":
        return LayerRotation(self.r1.to(device), self.r2.to(device))


def folded_weights(
    layer: nn.Module, arch: Architecture, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Role → weight [out, in] with the norm in front of it folded in."""
    scale = _input_scales(layer, arch)
    return {
        role: fold(linear.weight.detach(), scale.get(role)).to(dtype)
        for role, linear in layer_linears(layer, arch).items()
    }


def _input_scales(layer: nn.Module, arch: Architecture) -> dict[str, Tensor]:
    attention = norm_scale(module_at(layer, arch.attention_norm), arch.norm_offset)
    mlp = norm_scale(module_at(layer, arch.mlp_norm), arch.norm_offset)
    return dict(q_proj=attention, k_proj=attention, v_proj=attention, gate_proj=mlp, up_proj=mlp)


def rotate_right(matrix: Tensor, blocks: Tensor) -> Tensor:
    """matrix [out, n·b] · blockdiag(blocks [n, b, b])."""
    if len(blocks) == 1:
        return matrix @ blocks[0]
    parts = matrix.unflatten(1, (len(blocks), -1)).transpose(0, 1)
    return torch.bmm(parts, blocks).transpose(0, 1).flatten(1)


def rotate_left(blocks: Tensor, matrix: Tensor) -> Tensor:
    """blockdiag(blocks [n, b, b])ᵀ · matrix [n·b, in]."""
    if len(blocks) == 1:
        return blocks[0].T @ matrix
    return torch.bmm(blocks.mT, matrix.unflatten(0, (len(blocks), -1))).flatten(0, 1)


@torch.no_grad()
def rotate_layer(
    layer: nn.Module,
    arch: Architecture,
    shape: HeadShape,
    rotation: LayerRotation,
    down: Tensor | None = None,
) -> None:
    """Folds both norms and merges r1 and r2 into the seven linears, in place.

    down: the R1 [d, d] that down_proj and its bias take where that is another layer's
    (surgery/residual.py rotates the residual to it); None is the layer's own.
    """
    linears = layer_linears(layer, arch)
    weights = folded_weights(layer, arch, torch.float64)
    device = weights["q_proj"].device
    r1, r2 = rotation.r1.to(device).double(), rotation.r2.to(device).double()
    for role in ("q_proj", "k_proj", "gate_proj", "up_proj"):
        weights[role] = weights[role] @ r1
    weights["v_proj"] = rotate_left(r2, weights["v_proj"] @ r1)
    weights["o_proj"] = rotate_right(r1.T @ weights["o_proj"], r2.repeat_interleave(shape.group, 0))
    down_r1 = r1 if down is None else down.to(device).double()
    weights["down_proj"] = down_r1.T @ weights["down_proj"]
    for role, weight in weights.items():
        linears[role].weight.copy_(weight)
    if (bias := linears["v_proj"].bias) is not None:
        bias.copy_(rotate_left(r2, bias.double()[:, None])[:, 0])
    for role, left in (("o_proj", r1), ("down_proj", down_r1)):
        if (bias := linears[role].bias) is not None:
            bias.copy_(bias.double() @ left)
    for path in (arch.attention_norm, arch.mlp_norm):
        reset_norm(module_at(layer, path), arch.norm_offset)


@torch.no_grad()
def rotate_ends(model: Any, arch: Architecture, first: Tensor, last: Tensor) -> None:
    """Merges the first R1 [d, d] into the embedding, the final norm and the last R1 into lm_head.

    logits = norm(h)·diag(γ)·Wᵀ and h = h'·lastᵀ, so lm_head ← W diag(γ) last. Tied weights are
    untied, since the two ends are now different matrices; the model's config says so afterwards.
    """
    embedding, head = module_at(model, arch.embedding), module_at(model, arch.lm_head)
    norm = module_at(model, arch.final_norm)
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    scale = norm_scale(norm, arch.norm_offset)
    for rows in _row_chunks(head.weight):
        rows.copy_(fold(rows, scale) @ last.to(rows.device).double())
    reset_norm(norm, arch.norm_offset)
    for rows in _row_chunks(embedding.weight):
        rows.copy_(rows.double() @ first.to(rows.device).double())


def _row_chunks(weight: Tensor, rows: int = 16384) -> tuple[Tensor, ...]:
    """Views of a vocabulary-sized matrix, so that its fp64 copy never exists as a whole."""
    return weight.detach().split(rows)
