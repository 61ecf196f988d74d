"""What a tensor-parallel rank of vLLM or SGLang holds of a linear and of R3. No engine is imported here."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drot.core.errors import UserError
from drot.machine.devices import check_gpu, is_gpu
from drot.model.block_rotation import BlockRotation

#: The inputs of a rank's linear must be a multiple of it, as the kernel for few tokens (csrc/ops/cuda/
#: sparse24_skinny.cuh) takes; with other inputs each product would unpack the weight.
INPUTS = 64
#: The outputs of a rank's linear must be a multiple of it, as cuSPARSELt takes.
OUTPUTS = 32

#: Eight bits of positions that are in order, for an engine that loads no file: random bits are not.
DUMMY_POSITIONS = 0b0100_0100
#: The part of a tensor in the files that a rank holds.
Part = Callable[[Tensor], Tensor]


def check_share(name: str, inputs: int, outputs: int) -> None:
    """Raises UserError if the kernels do not take these inputs or outputs of a packed linear of a rank.

    name: of the linear, for the message.
    """
    for what, size, multiple in (("inputs", inputs, INPUTS), ("outputs", outputs, OUTPUTS)):
        if size % multiple:
            raise UserError(
                f"{name}: the {what} of a packed linear on each tensor-parallel rank must be a "
                f"multiple of {multiple}, got {size}: take fewer ranks, or serve the dense checkpoint"
            )


def check_blocks(count: int, size: int, ranks: int) -> None:
    """Raises UserError if one of the `count` blocks of an R3 would straddle two ranks."""
    if count % ranks:
        raise UserError(
            f"the {count} blocks of down_rotation, of {size} columns each, cannot be divided among "
            f"{ranks} tensor-parallel ranks without cutting a block: choose another number of ranks"
        )


def own_parameter(empty: Tensor, part: Part) -> nn.Parameter:
    """The uninitialised parameter of a rank, for the tensor that `empty` is on the device `meta`.

    An engine sets the device while it builds a model, and its loaders call `weight_loader`.
    """
    device = torch.get_default_device()
    if is_gpu(device):
        check_gpu(device)  # of a dense checkpoint nothing else does
    data = torch.empty_like(part(empty), device=device, memory_format=torch.contiguous_format)
    parameter = nn.Parameter(data, requires_grad=False)

    def load(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(part(loaded))

    parameter.weight_loader = load  # type: ignore[attr-defined]
    if empty.dtype == torch.uint8:
        parameter.dummy_weight_value = DUMMY_POSITIONS  # type: ignore[attr-defined]
    return parameter


def keep_own_blocks(rotation: BlockRotation, rank: int, ranks: int) -> None:
    """Replaces the blocks of an R3 on the device `meta` by uninitialised ones, those of a rank.

    Raises UserError if a block would straddle two ranks.
    """
    count, size, _ = rotation.weight.shape
    check_blocks(count, size, ranks)
    rotation.weight = own_parameter(rotation.weight, lambda weight: weight.chunk(ranks)[rank])
