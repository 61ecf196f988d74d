"""One product for all packed linears that read the same input, q, k and v, gate and up; and one for
down_proj with the rotated residual that its result is added to.

A product of a few tokens is over so soon that its start counts, on a CPU too. transformers' layers call
the linears one after the other, so the first makes the whole product and the others hand out their
columns of it. What is saved has the names and shapes of the separate linears.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.architectures import INPUT_GROUPS, architecture_of, decoder_layers, module_at
from drot.errors import UserError
from drot.ops import sparse24_linear
from drot.sparse.linear import SparseLinear
from drot.surgery.residual import rotates_beside_mlp


class FusedLinear(SparseLinear):
    """In the place of the first of several linears: makes the product of all and returns its own part.

    values, positions and bias are theirs, one below the other; sizes: the outputs of each.
    """

    def __init__(self, linears: list[SparseLinear]) -> None:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        super().__init__(
            torch.cat([linear.values.detach() for linear in linears]),
            torch.cat([linear.positions.detach() for linear in linears]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )
        self.sizes = [linear.out_features for linear in linears]
        #: an input and the parts of its product, until the last of them is asked for
        self.waiting: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sizes[0]]; the parts of the others wait for their calls."""
        parts = super().forward(x).split(self.sizes, -1)
        self.waiting = (x, parts)
        return parts[0]

    def part(self, x: Tensor, index: int) -> Tensor:
        """[..., sizes[index]] of the product of x; made by itself where another thread's x waits."""
        source, parts = self.waiting
        if source is not x:
            return sparse24_linear(x, **self.rows(index))
        if index == len(self.sizes) - 1:
            self.waiting = (None, ())  # it would hold memory until the next forward pass
        return parts[index]

    def rows(self, index: int) -> dict[str, Tensor]:
        """values, positions and, where there is one, bias of one of the linears, as views."""
        return {
            name: parameter.detach().split(self.sizes)[index] for name, parameter in self.named_parameters()
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self.rows(0).items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _load_into(self.rows(0), state_dict, prefix, *rest)
        if self.keeps_layout:
            self.compress()


class FusedPart(nn.Module):
    """In the place of another of these linears: returns its part of the product that was just made."""

    def __init__(self, whole: FusedLinear, index: int) -> None:
        super().__init__()
        self.whole = (whole,)  # in a tuple, so that it is no submodule a second time
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sizes[index]]."""
        return self.whole[0].part(x, self.index)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        rows = self.whole[0].rows(self.index)
        destination.update({prefix + name: tensor for name, tensor in rows.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _load_into(self.whole[0].rows(self.index), state_dict, prefix, *rest)
        if self.whole[0].keeps_layout:
            self.whole[0].compress()


class FusedRotation(nn.Module):
    """In the place of a rotation beside the MLP (drot/surgery/residual.py): makes down_proj's product and
    includes r Q in it. q is Q [d, d] as the product wants it; what is saved is the linear's Qᵀ."""

    makes_down_proj = True

    def __init__(self, rotation: nn.Linear, down: "DeferredLinear") -> None:
        super().__init__()
        self.q = nn.Parameter(rotation.weight.detach().T.contiguous(), requires_grad=False)
        self.down = (down,)  # in a tuple, so that it is no submodule a second time

    def forward(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [..., d] and the input x [..., in] of down_proj -> residual · Q + x Wᵀ + b [..., d]."""
        (down,) = self.down
        weight = (down.values, down.positions, down.bias)
        return sparse24_linear(x, *weight, residual, self.q, compressed=down.compressed)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.q.detach().T.contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _load_into({"weight": self.q.detach().T}, state_dict, prefix, *rest)


@torch.no_grad()
def _load_into(
    views: dict[str, Tensor],
    state_dict: Any,
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """What nn.Module._load_from_state_dict does, for tensors that are views of others."""
    for name, view in views.items():
        given = state_dict.get(prefix + name)
        if given is None:
            missing.append(prefix + name)
        elif given.shape != view.shape:
            errors.append(f"{prefix}{name} must be {list(view.shape)}, got {list(given.shape)}")
        else:
            view.copy_(given)
    unexpected += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in views]


class DeferredLinear(SparseLinear):
    """down_proj before a FusedRotation, which makes its product: hands its input on."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] as it is."""
        return x


@torch.no_grad()
def fuse(model: PreTrainedModel) -> None:
    """Fuses q, k, v and gate, up of every decoder layer of a packed model, in place, and rotations beside
    the MLP with down_proj.

    Raises UserError for a model that is not packed.
    """
    for layer, path in _rotated_downs(model):
        down = module_at(layer, path)
        if isinstance(down, SparseLinear) and isinstance(layer.residual_rotation, nn.Linear):
            deferred = DeferredLinear(down.values, down.positions, down.bias)
            layer.set_submodule(path, deferred)
            layer.residual_rotation = FusedRotation(layer.residual_rotation, deferred)
    for layer, paths in _groups(model):
        linears = [module_at(layer, path) for path in paths]
        if isinstance(linears[0], FusedLinear):
            continue
        if not all(isinstance(linear, SparseLinear) for linear in linears):
            raise UserError("fuse needs a packed model: drot convert MODEL --out DIR --format packed")
        whole = FusedLinear(linears)
        layer.set_submodule(paths[0], whole)
        for index, path in enumerate(paths[1:], 1):
            layer.set_submodule(path, FusedPart(whole, index))


def unfuse(model: PreTrainedModel) -> None:
    """Undoes `fuse`, in place; nothing where the model is not fused."""
    for layer, paths in _groups(model):
        whole = module_at(layer, paths[0])
        if isinstance(whole, FusedLinear):
            for index, path in enumerate(paths):
                layer.set_submodule(path, SparseLinear(**whole.rows(index)))
    unfuse_rotations(model)


def unfuse_rotations(model: PreTrainedModel) -> None:
    """The part of `unfuse` that parts rotations and down_proj."""
    for layer, path in _rotated_downs(model):
        down, fused = module_at(layer, path), layer.residual_rotation
        if isinstance(fused, FusedRotation):
            size = fused.q.shape[0]
            rotation = nn.Linear(size, size, bias=False, device="meta")
            rotation.weight = nn.Parameter(fused.q.detach().T.contiguous(), requires_grad=False)
            layer.set_submodule(path, SparseLinear(down.values, down.positions, down.bias))
            layer.residual_rotation = rotation


def _rotated_downs(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """Each decoder layer that rotates the residual beside its MLP, with the path of its down_proj."""
    arch = architecture_of(model.config)
    layers = (layer for layer in decoder_layers(model, arch) if rotates_beside_mlp(layer))
    return [(layer, dict(arch.linears)["down_proj"]) for layer in layers]


def _groups(model: PreTrainedModel) -> list[tuple[nn.Module, list[str]]]:
    """Each decoder layer with the paths of linears that share an input."""
    arch = architecture_of(model.config)
    paths = dict(arch.linears)
    groups = [[paths[role] for role in roles] for roles in INPUT_GROUPS.values() if len(roles) > 1]
    return [(layer, group) for layer in decoder_layers(model, arch) for group in groups]
