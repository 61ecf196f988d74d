"""The dense model of an artifact, and hashes of its weights and of files."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from drot.checkpoint.load import load_config, load_model
from drot.errors import UserError
from drot.sparse.quantization_config import quantization_config_of


def load_source(name: str | Path) -> Any:
    """The dense model `name` in the dtype of its files, on the CPU. Raises UserError for a packed model."""
    if quantization_config_of(load_config(name)):
        raise UserError(f"{name} is quantised, packed or rotated: name the dense `model`")
    return load_model(name)


def weights_hash(model: Any) -> str:
    """The SHA-256 of a model's tensors, by their names; the files that hold them do not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as handle:
        return {"sha256": hashlib.file_digest(handle, "sha256").hexdigest(), "bytes": path.stat().st_size}
