"""The handle to one linear of a decoder layer, and what it needs of its module."""

import copy
import itertools
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from drot.core.errors import UserError
from drot.model.family import Family, InputGroup, LinearSpec


def module_at(root: nn.Module, path: str) -> Any:
    """The submodule of `root` at a dotted path. Raises UserError if there is none."""
    try:
        return attrgetter(path)(root)
    except AttributeError:
        raise UserError(
            f"{type(root).__name__} has no module {path!r}, which drot/model/families.py lists: load the "
            "model again if it was changed after loading, or correct the entry of its model type"
        ) from None


class Linear:
    """One linear of a decoder layer: an nn.Linear, rows of a fused nn.Linear, or rows of an expert's weight.

    full_name: such as `layers.0.self_attn.q_proj`. rows: its rows of the module's or the expert's weight.
    """

    def __init__(
        self, layer: nn.Module, spec: LinearSpec, group: InputGroup, full_name: str, rows: slice
    ) -> None:
        self._layer, self.spec, self.group, self.full_name, self.rows = layer, spec, group, full_name, rows

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module_name(self) -> str:
        """The name of the module: that of the linear, or of the fused module, such as `qkv_proj`."""
        return self.spec.path.rpartition(".")[2]

    @property
    def module(self) -> Any:
        """The module that computes the linear now: an nn.Linear, or what replaced it."""
        return module_at(self._layer, self.spec.path)

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._layer.set_submodule(self.spec.path, module)

    @property
    def plain(self) -> nn.Linear:
        """The module, if it is a plain nn.Linear. Raises UserError otherwise."""
        if self.spec.expert is not None:
            raise UserError(
                f"{self.full_name} is a part of one tensor with all experts, and only a pruning run can "
                "train its weights"
            )
        if not isinstance(module := self.module, nn.Linear):
            raise UserError(
                f"{self.spec.path} must be a plain torch.nn.Linear, got {type(module).__name__}: "
                "load the model unquantised, without adapters"
            )
        return module

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]: the parameter, or a view of its rows."""
        return self.of_all(self.parameter)

    def of_all(self, parameter: Tensor) -> Tensor:
        """The weight [out, in] in a tensor of the shape of `parameter`, as a view."""
        if self.spec.expert is not None:
            return self._of_experts(parameter[self.spec.expert])
        return parameter if self.spec.part is None else parameter[self.rows]

    def of_packed(self, values: Tensor) -> Tensor:
        """The values [out, in/2] of this linear. values: of its packed module, [(experts,) out, in/2]."""
        return self.of_all(values) if self.spec.expert is None else values[self.spec.expert][self.rows]

    @property
    def of_experts(self) -> Tensor:
        """The weights [experts, out, in] of all experts, and of all linears in the parameter, as a view."""
        return self.parameter.mT if self.spec.transposed else self.parameter

    @property
    def is_dense(self) -> bool:
        """Whether nothing replaced its nn.Linear, or the parameter of all experts."""
        if self.spec.expert is None:
            return isinstance(self.module, nn.Linear)
        parent, _, name = self.spec.path.rpartition(".")
        return hasattr(module_at(self._layer, parent), name)

    def _of_experts(self, parameter: Tensor) -> Tensor:
        """The weights [..., out, in] in the parameters of some experts."""
        return (parameter.mT if self.spec.transposed else parameter)[..., self.rows, :]

    def weights_of(self, experts: slice | Tensor) -> Tensor:
        """The weights [experts, out, in] of this linear of some experts: a view for a slice, else a copy."""
        return self._of_experts(self.parameter[experts])

    def biases_of(self, experts: Tensor) -> Tensor | None:
        """The biases [experts, out] of this linear of some experts."""
        return self._biases[experts][:, self.rows] if self.spec.transposed else None

    @property
    def _biases(self) -> Tensor:
        biases: Tensor = module_at(self._layer, f"{self.spec.path}_bias")
        return biases

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that holds the weight, of several linears if they are slices of it."""
        if self.spec.expert is None:
            return cast(nn.Parameter, self.plain.weight)
        return cast(nn.Parameter, module_at(self._layer, self.spec.path))

    @property
    def bias(self) -> Tensor | None:
        if self.spec.expert is not None:
            if not self.spec.transposed:
                return None
            return self._biases[self.spec.expert, self.rows]
        bias = self.plain.bias
        return bias if self.spec.part is None or bias is None else bias[self.rows]


def copied(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A copy of a module on `device`, with floating-point parameters in `dtype`; None keeps theirs.

    Each tensor goes to the device as it is, and is cast there. The copy has the config of the module itself.
    """
    memo: dict[int, Any] = {
        id(part.config): part.config for part in module.modules() if hasattr(part, "config")
    }
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        moved = tensor.detach().to(device)
        if tensor.is_floating_point() and dtype is not None:
            moved = moved.to(dtype)
        if moved.data_ptr() == tensor.data_ptr():
            moved = moved.clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    return copy.deepcopy(module, memo)


def scale_of(norm: Any, family: Family) -> Tensor:
    """γ [d] of a norm, by which it multiplies, in fp64."""
    scale: Tensor = norm.weight.detach().double() + family.norm_offset
    return scale


def shift_of(norm: Any) -> Tensor | None:
    """β [d] of a norm, which it adds, in fp64; None if it adds nothing."""
    shift: Tensor | None = getattr(norm, "bias", None)
    return None if shift is None else shift.detach().double()


@torch.no_grad()
def reset_norm(norm: Any, family: Family) -> None:
    """Sets γ of a norm to 1 and β to 0, after they were folded into linears."""
    norm.weight.fill_(1.0 - family.norm_offset)
    if getattr(norm, "bias", None) is not None:
        norm.bias.zero_()
