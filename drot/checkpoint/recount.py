"""The manifest of a checkpoint that another program saves again, as transformers' Trainer does."""

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from drot.checkpoint.integrity import LOADED_WEIGHTS
from drot.checkpoint.manifest import CheckpointManifest, Manifest
from drot.checkpoint.shards import shard_bytes, shard_names
from drot.checkpoint.source import Header, read_headers, shapes_of, weight_files
from drot.core.hashes import FileRecord
from drot.model.decoder import DecoderModel
from drot.model.families import family_of
from drot.model.family import Family
from drot.model.linear import Linear
from drot.model.stored import follow_files, packed_name, stored_name

logger = logging.getLogger("drot")


def recount(folder: Path, model: Any, manifest: CheckpointManifest, before: CheckpointManifest) -> None:
    """Corrects `manifest`, in place, if the weights saved in `folder` are not those of `before`.

    The zeros are counted in the files, and the evaluations, which measured other weights, are dropped. A
    warning says so. Nothing changes while the weights are those that `before` records, in whichever files.

    model: the model that was saved, of transformers.
    manifest: its `files` are those in `folder`.
    before: the manifest with which the model was loaded.
    """
    old, new = ({n: r for n, r in m.files.items() if LOADED_WEIGHTS.fullmatch(n)} for m in (before, manifest))
    if old == new:
        return
    headers = read_headers(weight_files(folder))
    if _same_in_shards(headers, family_of(model.config), old):
        return
    follow_files(model, shapes_of(headers))  # transformers may hold experts otherwise
    zeros, weights = _count(headers, DecoderModel(model))
    manifest.sparsity = sum(zeros.values()) / max(1, sum(weights.values()))
    manifest.evaluations, manifest.saved_again = [], True
    for layer in manifest.layers if isinstance(manifest, Manifest) else ():
        for role, linear in layer.linears.items():
            linear.sparsity = zeros[layer.layer, role] / weights[layer.layer, role]
    told = [f"{manifest.sparsity:.2%} of them are zero, and were {before.sparsity:.2%}"]
    told += ["the evaluations in drot.json are dropped: measure again with drot eval"] * bool(
        before.evaluations
    )
    if manifest.sparsity < before.sparsity:
        told.append("a Trainer keeps the zeros with the callback drot.KeepMask()")
    what = "other weights than those that drot wrote"
    if manifest.format != before.format:
        what = f"the weights in another format, {manifest.format} and not {before.format}"
    logger.warning("%s holds %s: %s", folder, what, "; ".join(told))


def _same_in_shards(
    headers: Mapping[str, Header], family: Family, recorded: Mapping[str, FileRecord]
) -> bool:
    """Whether the saved weights would be the files `recorded` if they lay in a shard for each layer."""
    layers: dict[int, dict[str, Path]] = defaultdict(dict)
    for name, header in headers.items():
        index = re.match(re.escape(family.in_files(family.layers)) + r"\.(\d+)\.", name)
        layers[int(index[1]) if index else len(recorded)][name] = header.file
    names = shard_names(len(layers))
    if set(names) != {name for name in recorded if name.endswith(".safetensors")}:
        return False
    for name, (_, places) in zip(names, sorted(layers.items()), strict=True):
        content = shard_bytes({tensor: _read(file, tensor) for tensor, file in places.items()})
        if hashlib.sha256(content).hexdigest() != recorded[name].sha256:
            return False
    return True


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


def _count(
    headers: Mapping[str, Header], model: DecoderModel
) -> tuple[dict[tuple[int, str], int], dict[tuple[int, str], int]]:
    """(layer, role) → the zeros and the weights of each linear in the files with `headers`."""
    zeros, weights = {}, {}
    of_tensor: dict[str, list[tuple[int, Linear]]] = defaultdict(list)
    for layer in model.layers:
        for linear in layer.linears.values():
            for name in (stored_name(layer, linear), packed_name(layer, linear)):
                of_tensor[name].append((layer.index, linear))
    for name in headers.keys() & of_tensor.keys():
        tensor = _read(headers[name].file, name)
        for index, linear in of_tensor[name]:
            if name.endswith(".values"):
                rows = linear.of_packed(tensor)
                left_out = rows.numel()  # zeros, as many as values
            else:
                alone = linear.spec.expert is not None and tensor.dim() == 2
                rows, left_out = tensor if alone else linear.of_all(tensor), 0
            zeros[index, linear.name] = int((rows == 0).sum()) + left_out
            weights[index, linear.name] = rows.numel() + left_out
    return zeros, weights
