"""`drot.export_artifact`: what a checkpoint has beyond the public dense model, as one file."""

import json
import logging
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drot.checkpoint.artifact.apply import write_checkpoint
from drot.checkpoint.artifact.coding import encode
from drot.checkpoint.artifact.container import ARTIFACT_INDEX, ARTIFACT_VERSION, Reader, Writer
from drot.checkpoint.artifact.prediction import Prediction, open_source, predictions
from drot.checkpoint.artifact.rotations import rotations_in
from drot.checkpoint.artifact.tensors import (
    at_positions,
    holds_rotations,
    holds_weights,
    names_of_weight,
    numbered,
    read_dense,
)
from drot.checkpoint.card import CARD
from drot.checkpoint.importance import IMPORTANCE_MAPS
from drot.checkpoint.integrity import (
    check_config_file,
    files_in,
    folder_records,
    is_loaded,
    verified_while_loading,
)
from drot.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from drot.checkpoint.opening import load_config
from drot.checkpoint.quantization_config import STORED_DTYPES, drot_config_of
from drot.checkpoint.resume import OWN_TEXT
from drot.checkpoint.rotations import open_rotations
from drot.checkpoint.source import SMALL_FILES, Header, header_bytes, read_headers
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.core.files import check_writable, new_file
from drot.core.hashes import parts_digest
from drot.core.lock import locked
from drot.core.reading import check_regular
from drot.machine.environment import versions
from drot.machine.spool import Spool
from drot.model.block_rotation import DOWN_ROTATION
from drot.model.boundary import ROTATION_MODULE
from drot.model.decoder import DecoderModel
from drot.model.rotation import Bases, LayerRotation

logger = logging.getLogger("drot")

#: the files beside the weights that an artifact may hold
WITHOUT_WEIGHTS = (*SMALL_FILES, CARD, IMPORTANCE_MAPS, OWN_TEXT)
#: bits of the significand
SIGNIFICAND = {"BF16": 8, "F16": 11, "F32": 24}
#: Bits of the significand of a rotation beyond those of the weights. More bits make the rotations larger and
#: the differences smaller.
EXTRA_BITS = 8
#: Embedding, lm_head and boundary rotations are only rotated. They may differ from their predictions by this
#: share of the prediction's norm; a wrong rotation differs by about 1.4 times the norm.
LARGEST_CHANGE = 0.05


def export_artifact(
    checkpoint: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    rotations: str | Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes the file `out`, from which `apply_artifact` makes the checkpoint again, byte for byte.

    The file holds rotations, masks and, for kept weights that pruning has changed, the change. It holds no
    weight of the dense model. The checkpoint is made from it once, in a temporary folder beside `out`, and
    its hashes are compared. Returns {"bytes": size of `out`, "checkpoint_bytes": size of the checkpoint}.

    Raises UserError for a checkpoint that drot did not make or whose weights are damaged, and for another
    model or other rotations than those of the checkpoint.

    Args:
        checkpoint: a folder that drot wrote, dense or packed.
        out: the file of the artifact, which must not exist.
        model: the dense model from which the checkpoint was made, a hub name or a folder. None takes the name
            in drot.json.
        rotations: the file that `save_rotations_to` wrote in the run. None computes the rotations from the
            checkpoint and the dense model; their rounding makes the artifact larger.
        progress: the callback for ProgressEvents.
    """
    is_a("checkpoint", checkpoint, str, Path)
    is_a("out", out, str, Path)
    is_a("model", model, str, Path, or_none=True)
    is_a("rotations", rotations, str, Path, or_none=True)
    is_callable("progress", progress)
    folder, out = Path(checkpoint), Path(out)
    manifest = read_manifest(folder)
    if manifest.is_adapter:
        raise UserError(
            f"{folder} holds an adapter, and the sparse weights lie in {manifest.finetune[-1].start}: name "
            "that folder, or the folder of a fine-tuning without `keep_adapter`"
        )
    if out.exists():
        raise UserError(f"{out} exists: name another `out` or remove it")
    check_writable(out)
    files = _files(folder, manifest)
    check_config_file(folder)  # the others are compared while they are read, which takes longer
    name = manifest.dense_model(model)
    source = open_source(name)
    held, layers = drot_config_of(load_config(folder)), len(source.layers)
    bases = Bases(None, layers) if held is None else held.bases(layers)
    stored = read_headers(path for name, path in files.items() if holds_weights(name))
    # of weights and config.json, the hashes in the manifest are compared while they are read
    known = {name: record for name, record in manifest.files.items() if is_loaded(name)}
    records = folder_records(folder, files, known=known)
    index = {
        "format_version": ARTIFACT_VERSION,
        "versions": versions(),
        "model": name,
        "model_sha256": parts_digest(source.parts_of_state()),
        "rotated": manifest.recipe.rotation.mode != "none",
        "boundary": bases.place,
        "layers_per_rotation": bases.sharing if bases.sharing > 1 else None,
        "down_rotation": manifest.recipe.rotation.down_block,
        "files": {file: record.model_dump() for file, record in records.items()},
    }
    # the hashes are compared before `part` gets the name `out`
    with locked(out), new_file(out) as part:
        with verified_while_loading(folder), Writer(part) as writer:
            given = _rotations_of(manifest, rotations, source, stored, bases, Spool(out.parent))
            for file, path in files.items():
                if holds_weights(file):
                    writer.add(f"headers/{file}", header_bytes(path))
                else:
                    writer.add(f"files/{file}", path.read_bytes())
            if given is not None:
                writer.add_rotations(given.values())
            tensors = predictions(source, given, bases, "export", progress)
            tolerances = _add_all(writer, tensors, stored)
            writer.add(ARTIFACT_INDEX, json.dumps(index | {"tolerances": tolerances}).encode())
        # makes the checkpoint once; raises UserError if a hash differs
        with tempfile.TemporaryDirectory(".part", f"{out.name}.", out.parent) as made, Reader(part) as reader:
            write_checkpoint(reader, source, Path(made) / out.name, progress)
    size = sum(path.stat().st_size for path in files.values())
    return {"bytes": out.stat().st_size, "checkpoint_bytes": size}


def _files(folder: Path, manifest: Manifest) -> dict[str, Path]:
    """Name → path of the files of a checkpoint that belong into its artifact.

    Other files are left out, with a warning: they might hold weights of the dense model.
    """
    files = {}
    for name in sorted(files_in(folder) | manifest.files.keys()):
        known = holds_weights(name) or any(fnmatch(name, pattern) for pattern in WITHOUT_WEIGHTS)
        known = known or ("/" not in name and holds_rotations(folder / name))
        if (name in manifest.files and known) or name == MANIFEST:
            check_regular(folder / name)
            files[name] = folder / name
        else:
            logger.warning("%s is left out of the artifact: it is no part of the checkpoint", folder / name)
    if not any(map(holds_weights, files)):
        raise UserError(f"{folder} holds no model.safetensors: name a folder that drot prune wrote")
    return files


def _rotations_of(
    manifest: Manifest,
    file: str | Path | None,
    source: DecoderModel,
    stored: dict[str, Header],
    bases: Bases,
    spool: Spool,
) -> dict[int, LayerRotation] | None:
    """Layer → the rounded rotation of the checkpoint, fp32; None if it is not rotated."""
    if manifest.recipe.rotation.mode == "none":
        if file is not None:
            raise UserError("this checkpoint is not rotated: leave out `rotations`")
        return None
    bits = max(SIGNIFICAND.get(header.dtype, 0) for header in stored.values()) + EXTRA_BITS
    found: Iterable[LayerRotation]
    if file is None:
        r3 = manifest.recipe.rotation.down_block is not None
        found = rotations_in(lambda name: read_dense(name, stored), source, bases, r3=r3)
    else:
        found = open_rotations(Path(file), source)[0].values()

    def rounded(matrix: Tensor) -> Tensor:
        return spool.empty(matrix.shape, torch.float32).copy_(round_bits(matrix, bits))

    return {index: rotation.map(rounded) for index, rotation in enumerate(found)}


def round_bits(matrix: Tensor, bits: int) -> Tensor:
    """fp32 `matrix`, rounded to significands of `bits` bits, of which fp32 has 24."""
    matrix = matrix.float()
    if bits >= 24:
        return matrix
    drop = 24 - bits
    whole = matrix.view(torch.int32) + (1 << (drop - 1))
    return (whole & -(1 << drop)).view(torch.float32)


def _add_all(writer: Writer, found: Iterable[Prediction], stored: dict[str, Header]) -> dict[str, float]:
    """Adds the parts of all tensors; returns the tolerance of each.

    Raises UserError for a tensor of the checkpoint that the dense model does not have.
    """
    left, tolerances = set(stored), dict[str, float]()
    for prediction in found:
        if names := names_of_weight(prediction.name, stored):
            left -= set(names)
            tolerances[prediction.name] = prediction.tolerance
            _add(writer, prediction, names, stored)
    if left:
        folder = stored[name := min(left)].file.parent
        raise UserError(f"{folder}: {name} is no tensor of `model`: name a folder that drot prune wrote")
    return tolerances


def _add(
    writer: Writer,
    prediction: Prediction,
    names: tuple[str, str | None],
    stored: dict[str, Header],
) -> None:
    """Adds the parts of one tensor. names: of the checkpoint's tensors that they stand for."""
    weight, positions = names
    path, dtype = stored[weight].file, stored[weight].dtype
    if dtype not in STORED_DTYPES:
        raise UserError(f"{path}: {weight} must be of dtype {', '.join(STORED_DTYPES)}, got {dtype}")
    changed = total = 0.0
    try:
        with safe_open(path, framework="pt") as handle:
            for number, first, rows in numbered(prediction):
                member = f"tensors/{prediction.name}/{number}"
                if positions is not None:
                    with safe_open(stored[positions].file, framework="pt") as other:
                        chosen = other.get_slice(positions)[first : first + len(rows)]
                    writer.add(f"{member}/positions", chosen.numpy().tobytes())
                    try:
                        rows = at_positions(rows, chosen)
                    except ValueError as error:
                        raise UserError(
                            f"{path}: {positions} is damaged or does not fit `model` ({error}): name the "
                            "dense model of the checkpoint, or copy the checkpoint again"
                        ) from None
                whole = handle.get_slice(weight)
                actual = whole[first : first + len(rows)] if whole.get_shape() else whole[...].reshape(1)
                if actual.shape != rows.shape:
                    raise UserError(
                        f"{path}: {weight} must be {list(rows.shape)} by the `model`, got "
                        f"{list(actual.shape)}: name the dense model of the checkpoint"
                    )
                changed += float((actual.double() - rows).square().sum())
                total += float(rows.square().sum())
                for part, data in encode(actual, rows, prediction.tolerance).items():
                    writer.add(f"{member}/{part}", data)
    except SafetensorError as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}): copy it again") from None
    only_rotated = prediction.name.endswith(
        tuple(f"{module}.weight" for module in ("embed_tokens", "lm_head", ROTATION_MODULE, DOWN_ROTATION))
    )
    if only_rotated and changed > LARGEST_CHANGE**2 * total:
        raise UserError(
            f"{weight} of {path.parent} does not fit: name the dense `model` and the `rotations` of the run "
            "that made the checkpoint"
        )
