"""The dense model of an artifact."""

from pathlib import Path
from typing import Any

from drot.checkpoint.load import load_config, load_model
from drot.checkpoint.quantization_config import quantization_config_of
from drot.core.errors import UserError


def load_source(name: str | Path) -> Any:
    """The dense model `name` in the dtype of its files, on the CPU. Raises UserError for a packed model."""
    if quantization_config_of(load_config(name)):
        raise UserError(f"{name} is quantised, packed or rotated: name the dense `model`")
    return load_model(name)
