"""The dtype of a model's weights: rounding to it, before the model is saved."""

import torch
from transformers import PreTrainedModel

from drot.core.errors import UserError
from drot.machine.devices import dtype_name
from drot.machine.finite import is_finite


@torch.no_grad()
def cast_weights(model: PreTrainedModel, dtype: torch.dtype, field: str = "dtype") -> None:
    """Rounds every parameter to `dtype`, in place, and sets the config's `dtype`.

    Buffers, such as the frequencies of RoPE, keep their dtype.

    Raises UserError that names the parameter if a finite value becomes infinite, as in float16.

    field: the argument that chose `dtype`, for the error message.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype == dtype:
            continue
        rounded = parameter.data.to(dtype)
        if not is_finite(rounded) and is_finite(parameter.data):
            raise UserError(
                f"{name} has values above the largest {dtype_name(dtype)}, {torch.finfo(dtype).max:g}: use "
                f'`{field}="bfloat16"` or `{field}="float32"`'
            )
        parameter.data = rounded
    model.config.dtype = dtype
