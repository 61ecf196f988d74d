"""R3, the rotation of the input of down_proj in diagonal blocks, as the module that applies it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from drot.machine.devices import has_kernels
from drot.model.family import Family
from drot.ops.swiglu_rotate import swiglu_rotate

#: Name of the module in an MLP, or in the module of all experts, that holds R3.
DOWN_ROTATION = "down_rotation"
#: The modules of SiLU, also the one of transformers, for which the product with the gate, and R3, are one op.
SILU = (nn.SiLU, SiLUActivation)
#: the dtypes of drot's ops for parts of a layer
ONE_OP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: the activation of a family that calls it as a function
SILU_FUNCTION = nn.SiLU()


def activation_of(mlp: nn.Module, family: Family) -> Any:
    """What acts on the outputs of the gate of an MLP."""
    return SILU_FUNCTION if family.activation is None else getattr(mlp, family.activation)


class BlockRotation(nn.Module):
    """R3 = blockdiag(weight [n, b, b]), which rotates the gated activation of an MLP. It is frozen.

    In a module of all experts, each of them has an equal part of the blocks, one after the other.
    """

    def __init__(self, blocks: int, size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        weight = torch.empty(blocks, size, size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """gate, up [..., n·b] -> (activation(gate) · up) R3 [..., n·b]."""
        return gated_activation(gate, up, activation, self.weight)

    def of_experts(self, gate: Tensor, up: Tensor, ends: Tensor) -> Tensor:
        """`forward` with SiLU for gate and up [rows, n], where expert e has the rows up to ends[e]: int32."""
        needs_gradient = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
        if not needs_gradient and _is_one_op(gate, up, self.weight):
            return swiglu_rotate(gate, up, self.weight, ends)
        return torch.cat(
            [
                gated_activation(gates, ups, SILU_FUNCTION, self._blocks_of(expert, gate.shape[-1]))
                for expert, (gates, ups) in rows_of(ends, gate, up)
            ]
        )

    def of_expert(self, x: Tensor, expert: int) -> Tensor:
        """The inputs of down_proj x [..., in] of one expert, rotated by its blocks."""
        return _rotated(x, self._blocks_of(expert, x.shape[-1]))

    def _blocks_of(self, expert: int, width: int) -> Tensor:
        count = width // self.weight.shape[-1]
        return self.weight[expert * count : (expert + 1) * count]

    def extra_repr(self) -> str:
        return f"blocks={len(self.weight)}, size={self.weight.shape[-1]}"


def gated_activation(
    gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], rotation: Tensor | None = None
) -> Tensor:
    """activation(gate) · up [..., n], rotated by the blocks [n/b, b, b] of `rotation` if there is one.

    In one pass over memory where the activation is SiLU.
    """
    if isinstance(activation, SILU) and _is_one_op(gate, up, rotation):
        return swiglu_rotate(gate, up, rotation)
    product = activation(gate) * up
    return product if rotation is None else _rotated(product, rotation)


def rows_of(ends: Tensor, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The experts that have rows, or all if none has, and their rows of each tensor.

    Expert e has the rows up to ends[e].
    """
    numbers = ends.diff(prepend=ends.new_zeros(1)).tolist()
    for expert, rows in enumerate(zip(*(tensor.split(numbers) for tensor in tensors), strict=True)):
        if numbers[expert] or not any(numbers):
            yield expert, rows


def _is_one_op(gate: Tensor, *others: Tensor | None) -> bool:
    """Whether `swiglu_rotate` takes these tensors."""
    alike = all(other is None or other.dtype == gate.dtype for other in others)
    return alike and gate.dtype in ONE_OP_DTYPES and has_kernels(gate.device)


def _rotated(x: Tensor, blocks: Tensor) -> Tensor:
    """x [..., n·b] · blockdiag(blocks [n, b, b])."""
    return torch.einsum("...ni,nij->...nj", x.unflatten(-1, (len(blocks), -1)), blocks).flatten(-2)
