"""Whether tensors hold NaN or infinity."""

import math

from torch import Tensor

from drot.core.errors import UserError


def is_finite(tensor: Tensor) -> bool:
    """Whether `tensor` holds neither NaN nor Inf. No tensor of its size is made, as `torch.isfinite` does."""
    # the smallest and the largest element are NaN if an element is
    return tensor.numel() == 0 or all(math.isfinite(float(bound)) for bound in tensor.aminmax())


def check_finite(tensor: Tensor, name: str) -> None:
    """Raises UserError if `tensor` holds NaN or Inf, for which scores have no order."""
    if not is_finite(tensor):
        raise UserError(
            f"{name} must be finite, got NaN or Inf in a tensor of shape {list(tensor.shape)}: "
            "check the checkpoint, or load the model in bfloat16 or float32"
        )
