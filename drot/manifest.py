"""The manifest of a run, what `drot.json` holds."""

import platform
from typing import Any

import torch
from torch import Tensor, nn

from drot.architectures import Architecture, layer_linears
from drot.calibration.data import calibration_hash
from drot.checkpoint import FORMAT_VERSION
from drot.config import Recipe
from drot.version import __version__


def manifest(
    recipe: Recipe, tokens: Tensor, device: torch.device, dtype: torch.dtype, **figures: Any
) -> dict[str, Any]:
    """Plain JSON types: what was asked for and where it ran, then the `figures` of the run."""
    import transformers

    return {
        "format_version": FORMAT_VERSION,
        "versions": {
            "drot": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "recipe": recipe.to_dict(),
        "calibration": {"sha256": calibration_hash(tokens), "shape": list(tokens.shape)},
        **figures,
    }


def zero_share(layers: nn.ModuleList, arch: Architecture) -> float:
    """Zeros among the weights of the linears that were pruned."""
    zeros = total = 0
    for layer in layers:
        for linear in layer_linears(layer, arch).values():
            zeros += int((linear.weight == 0).sum())
            total += linear.weight.numel()
    return zeros / total
