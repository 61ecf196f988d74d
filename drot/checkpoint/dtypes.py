"""The dtype of saved weights: rounding to it."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.core.errors import UserError
from drot.machine.devices import dtype_name
from drot.machine.finite import is_finite
from drot.model.dtypes import stored_dtype, stored_floats


@torch.no_grad()
def cast_weights(model: PreTrainedModel, dtype: torch.dtype, field: str = "dtype") -> None:
    """Rounds the tensors of a model that files hold to their `stored_dtype`, in place.

    Sets the `dtype` of the config. Raises UserError as `rounded` does.

    field: the argument that chose `dtype`, for the error message.
    """
    for name, tensor in stored_floats(model):
        # on `meta` lies what is copied from the files, such as a projector that nothing rotates
        if not tensor.is_meta:
            tensor.data = rounded(name, tensor.data, stored_dtype(model, name, dtype), field)
    model.config.dtype = dtype


def rounded(name: str, tensor: Tensor, dtype: torch.dtype, field: str = "save_dtype") -> Tensor:
    """`tensor` in `dtype`; the tensor itself if it has that dtype.

    Raises UserError if a finite value becomes infinite, as in float16. name, field: for its message, the name
    of the tensor and the argument that chose `dtype`.
    """
    result = tensor.to(dtype)
    if result is not tensor and not is_finite(result) and is_finite(tensor):
        raise UserError(
            f"{name} has values above the largest {dtype_name(dtype)}, {torch.finfo(dtype).max:g}: use "
            f'`{field}="bfloat16"` or `{field}="float32"`'
        )
    return result
