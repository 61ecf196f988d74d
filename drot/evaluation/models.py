"""The models of an evaluation: in memory, or read layer by layer where memory does not hold them."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from drot.checkpoint.load import load
from drot.checkpoint.offload import open_skeleton
from drot.checkpoint.opening import load_config
from drot.checkpoint.quantised import dense_headers
from drot.checkpoint.quantization_config import quantised_by
from drot.checkpoint.source import DENSE_DTYPES, gguf_file, model_folder, read_headers, weight_files
from drot.machine import devices
from drot.machine.devices import is_gpu, parse_dtype
from drot.machine.memory import available_memory
from drot.model.families import FAMILIES
from drot.model.layer import Weights
from drot.sparse.linear import compresses
from drot.sparse.packed import compress_model

logger = logging.getLogger("drot")

#: the largest share of the free memory that weights may take; the rest is for logits and activations
WEIGHTS_SHARE = 0.85


@dataclass(frozen=True)
class OpenModel:
    """A model in memory, or a skeleton whose `weights` are read layer by layer."""

    model: PreTrainedModel
    weights: Weights | None = None


def open_model(name: str | Path, dtype: str, *, streamed: bool) -> OpenModel:
    """The model `name` in `dtype` on the CPU. Raises UserError as `drot.load` and `open_skeleton` do."""
    if not streamed:
        # `move_models` compresses it, where a GPU has room for both forms
        return OpenModel(load(name, device="cpu", dtype=dtype, compress=False))
    model, weights, _ = open_skeleton(name, dtype)
    return OpenModel(model, weights)


def loaded_bytes(name: str | Path, dtype: str) -> int:
    """The bytes of the model's weights in `dtype`, or in the dtypes of its files for `auto`."""
    total = 0
    folder = model_folder(name, weights=True)
    for header in dense_headers(read_headers(weight_files(folder)), folder).values():
        cast = dtype != "auto" and header.dtype in DENSE_DTYPES
        total += math.prod(header.shape) * parse_dtype(dtype).itemsize if cast else header.nbytes
    return total


def must_stream(names: Sequence[str], dtype: str, device: torch.device) -> bool:
    """Whether models that are needed at the same time are larger than the memory; a warning says so.

    Models that drot cannot read layer by layer are not streamed: their family is unknown, or another program
    has quantised them, as GGUF files are.

    names: the models that are not in memory yet. dtype: as in `loaded_bytes`.
    """
    if any(gguf_file(name) for name in names):
        return False
    configs = [load_config(name) for name in names]
    if any(config.model_type not in FAMILIES or quantised_by(config) for config in configs):
        return False
    needed = sum(loaded_bytes(name, dtype) for name in names)
    for place in dict.fromkeys((torch.device("cpu"), device)):
        if needed > WEIGHTS_SHARE * (free := memory_left(place)):
            _warn_of_size(names[0], len(names) > 1, needed, place, free)
            return True
    return False


def memory_left(device: torch.device) -> int:
    """The bytes that are free: on a GPU with those that torch keeps for reuse, or of the main memory."""
    return devices.free_memory(device) if is_gpu(device) else available_memory()


def _warn_of_size(name: str, both: bool, needed: int, device: torch.device, free: int) -> None:
    logger.warning(
        "the weights of %s%s, %.1f GiB, do not fit on %s, which has %.1f GiB free: one decoder layer at a "
        "time is there, which is slower",
        name, " and of its original" if both else "", needed / 2**30, device, free / 2**30,
    )  # fmt: skip


def move_models(models: list[PreTrainedModel], name: str, device: torch.device) -> bool:
    """Moves loaded models, which are needed at the same time, to `device`; returns whether they are streamed.

    Models that do not fit on the device stay in main memory, and a warning says so.

    name: the name of the first model, for the warning.
    """
    moved = [model for model in models if next(model.parameters()).device != device]
    needed = sum(int(model.get_memory_footprint()) for model in moved)
    free = memory_left(device)
    stream = bool(moved) and needed > WEIGHTS_SHARE * free
    if stream:
        _warn_of_size(name, len(models) > 1, needed, device, free)
    for model in models:
        model.to(torch.device("cpu") if stream else device)  # type: ignore[arg-type]
        if not stream and compresses() and 2 * needed <= WEIGHTS_SHARE * free:
            compress_model(model)  # takes as many bytes as the packed weights
    return stream
