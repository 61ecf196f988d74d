"""The dtypes of a model's weights, some of which transformers keeps in fp32."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drot.model.families import FAMILIES


def stored_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parameter or buffer `name` of a transformers model of `dtype`, in memory and in files.

    It is fp32 where transformers keeps fp32 in a model of 16 bits, as for the weight of a router.
    """
    family = FAMILIES.get(model.config.model_type)
    kept = (*model._get_dtype_plan(dtype), *(() if family is None else family.in_fp32))
    return torch.float32 if any(part in name for part in kept) else dtype


def stored_floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The name and the tensor of each parameter and buffer of floating point that the files of a model hold.

    The files hold no frequencies of RoPE, which transformers computes.
    """
    yield from ((name, tensor) for name, tensor in module.named_parameters() if tensor.is_floating_point())
    for path, part in module.named_modules():
        for name, tensor in part.named_buffers(recurse=False):
            if tensor.is_floating_point() and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, tensor


def main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of most of the floating-point values in `tensors`."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0]
