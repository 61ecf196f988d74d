"""Parsing of the arguments `device` and `dtype`, which have the same values everywhere in drot."""

import torch

from drot.config.rotation import ProductDtype
from drot.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str, field: str = "dtype") -> torch.dtype:
    """The torch dtype named `float32`, `bfloat16` or `float16`. Raises UserError for another name.

    field: the argument that holds `name`, for the error message.
    """
    if name not in DTYPES:
        raise UserError(f"`{field}` must be auto or one of {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]


def computing_dtype(dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """The dtype in which `drot prune` and `drot eval` compute on `device`.

    `auto` is `float32` on a CPU, which computes faster and more exactly in it than in the 16-bit dtypes. On a
    GPU `auto` stays `auto`, the checkpoint's own. Any other dtype is returned as it is.
    """
    return "float32" if dtype == "auto" and device.type == "cpu" else dtype


def product_dtype(name: ProductDtype, device: torch.device) -> ProductDtype:
    """The name of the dtype in which rotations are trained on `device`.

    `auto` is `bfloat16` on a GPU, whose tensor cores multiply in it, and `float32` on a CPU. Any other name
    is returned as it is.
    """
    return name if name != "auto" else "float32" if device.type == "cpu" else "bfloat16"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in manifests and messages: `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def pick_device(name: str | torch.device) -> torch.device:
    """The device named `cpu`, `cuda` or `cuda:N`. `auto` is the first GPU, or the CPU without a GPU.

    Raises UserError for another name and for a GPU that torch does not find.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"`device` must be auto, cpu or cuda[:N]; got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"`device` must be auto, cpu or cuda[:N]; got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f'`device` is {name!r}, but torch finds no GPU: use `device="cpu"`')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"`device` must be at most cuda:{last}, the last GPU that torch finds; got {name!r}")
    return device


def pick_devices(names: str | torch.device) -> list[torch.device]:
    """The devices in a list separated by commas, such as `cuda:0,cuda:1`.

    Raises UserError for a list with both a GPU and the CPU, and as `pick_device` does.
    """
    if isinstance(names, torch.device):
        return [pick_device(names)]
    devices = [pick_device(name.strip()) for name in names.split(",")]
    if len({device.type for device in devices}) > 1:
        raise UserError(f"`device` must name either GPUs or the CPU, not both; got {names!r}")
    return devices
