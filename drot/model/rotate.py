"""Merging rotations into the weights of a layer, of the embedding and of lm_head.

W is [out, in]. The residual stream is a row vector h; rotated it is h R1. The weights of a layer change to:

- q, k, v, gate, up: W R1
- o, down: R1ᵀ W, and their biases b R1
- v: also R2ᵀ W in each KV head, and its bias b R2
- o: also W R2 in each query head, with the R2 of its KV head

down takes the R1 of the next layer if the layer holds a rotation of the residual (boundary.py). The products
are computed in fp64 from the original weights and rounded once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drot.model.boundary import BoundaryRotation, set_boundary
from drot.model.families import Architecture, HeadShape, layer_linears, module_at
from drot.model.fold_norm import fold, norm_scale, reset_norm


@dataclass(frozen=True)
class LayerRotation:
    """The orthogonal matrices of one layer: r1 [d, d] and r2 [kv_heads, head_dim, head_dim]."""

    r1: Tensor
    r2: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "LayerRotation":
        return LayerRotation(self.r1.to(device, dtype), self.r2.to(device, dtype))

    @property
    def inverse(self) -> "LayerRotation":
        """The rotation that undoes this rotation."""
        return LayerRotation(self.r1.mT, self.r2.mT)


def folded_weights(
    layer: nn.Module, arch: Architecture, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Role → weight [out, in], with the weight of the norm in front of the linear folded in."""
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

    def parts(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (len(blocks), -1)).transpose(0, 1)

    if matrix.dtype.itemsize > 2:  # a CPU may round a product into the parts of a matrix differently
        return torch.bmm(parts(matrix), blocks).transpose(0, 1).flatten(1)
    result = matrix.new_empty(matrix.shape)
    torch.bmm(parts(matrix), blocks, out=parts(result))  # saves the copy that `flatten` makes
    return result


def rotate_left(blocks: Tensor, matrix: Tensor) -> Tensor:
    """blockdiag(blocks [n, b, b])ᵀ · matrix [n·b, in]."""
    if len(blocks) == 1:
        return blocks[0].T @ matrix
    return torch.bmm(blocks.mT, matrix.unflatten(0, (len(blocks), -1))).flatten(0, 1)


def rotated_weight(
    role: str, weight: Tensor, rotation: LayerRotation, shape: HeadShape, down_r1: Tensor | None = None
) -> Tensor:
    """The rotated weight [out, in] of one linear, in the dtype of its arguments.

    Args:
        role: role of the linear.
        weight: folded weight [out, in].
        rotation: R1 and R2 of the layer.
        shape: attention sizes of the model.
        down_r1: the matrix [d, d] that down_proj takes in place of R1; None is R1.
    """
    r1, r2 = rotation.r1, rotation.r2
    if role == "v_proj":
        return rotate_left(r2, weight @ r1)
    if role == "o_proj":
        return rotate_right(r1.T @ weight, r2.repeat_interleave(shape.group, 0))
    if role == "down_proj":
        return (r1 if down_r1 is None else down_r1).T @ weight
    return weight @ r1


def rotated_hessian(group: str, hessian: Tensor, rotation: LayerRotation, shape: HeadShape) -> Tensor:
    """The Hessian [in, in] of an input group after the rotation of its inputs, in the dtype of its arguments.

    The result is RᵀHR, with R = R1 for the groups `attention` and `mlp` and R = blockdiag(R2) for `o`. The
    input of `down` is not rotated.
    """
    if group == "down":
        return hessian
    blocks = rotation.r2.repeat_interleave(shape.group, 0) if group == "o" else rotation.r1[None]
    return rotate_left(blocks, rotate_right(hessian, blocks))


@torch.no_grad()
def rotate_layer(
    layer: nn.Module,
    arch: Architecture,
    shape: HeadShape,
    rotation: LayerRotation,
    boundary: BoundaryRotation | None = None,
) -> None:
    """Folds both norms and merges R1 and R2 into the seven linears of a layer, in place.

    Args:
        layer: a decoder layer.
        arch: family of the model.
        shape: attention sizes of the model.
        rotation: R1 and R2 of the layer.
        boundary: a rotation of the residual, which is added to the layer; down_proj then takes next_r1.
            With None down_proj takes R1.
    """
    assert boundary is None or boundary.place == "residual", "the next layer holds a rotation of its input"
    linears = layer_linears(layer, arch)
    weights = folded_weights(layer, arch, torch.float64)
    device = weights["q_proj"].device
    rotation = rotation.to(device, torch.float64)
    r1, r2 = rotation.r1, rotation.r2
    down_r1 = r1 if boundary is None else boundary.next_r1.to(device).double()
    for role, weight in weights.items():
        linears[role].weight.copy_(rotated_weight(role, weight, rotation, shape, down_r1))
    if (bias := linears["v_proj"].bias) is not None:
        bias.copy_(rotate_left(r2, bias.double()[:, None])[:, 0])
    for role, output_r1 in (("o_proj", r1), ("down_proj", down_r1)):
        if (bias := linears[role].bias) is not None:
            bias.copy_(bias.double() @ output_r1)
    for path in (arch.attention_norm, arch.mlp_norm):
        reset_norm(module_at(layer, path), arch.norm_offset)
    if boundary is not None:
        set_boundary(layer, arch, boundary.to(device))


@torch.no_grad()
def rotate_ends(model: Any, arch: Architecture, first_r1: Tensor, last_r1: Tensor) -> bool:
    """embedding ← W first_r1 and lm_head ← W diag(γ) last_r1, with γ the weight of the final norm, in place.

    Returns whether lm_head was tied to the embedding before.

    first_r1 [d, d] is the R1 of the first layer, last_r1 [d, d] of the last layer. Tied weights are untied,
    also in the model's config, because embedding and lm_head become different matrices.
    """
    embedding, head = module_at(model, arch.embedding), module_at(model, arch.lm_head)
    norm = module_at(model, arch.final_norm)
    tied = head.weight is embedding.weight
    if tied:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    scale = norm_scale(norm, arch.norm_offset)
    for rows in _row_chunks(head.weight):
        rows.copy_(fold(rows, scale) @ last_r1.to(rows.device).double())
    reset_norm(norm, arch.norm_offset)
    for rows in _row_chunks(embedding.weight):
        rows.copy_(rows.double() @ first_r1.to(rows.device).double())
    return tied


def _row_chunks(weight: Tensor, rows: int = 16384) -> tuple[Tensor, ...]:
    """Views of the rows of a weight, so that only a part of it is copied to fp64 at a time."""
    return weight.detach().split(rows)
