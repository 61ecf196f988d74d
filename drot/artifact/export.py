"""`drot.export_artifact`: what a checkpoint has beyond the public dense model, as one file."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drot.artifact.coding import encode
from drot.artifact.container import FORMAT_VERSION, INDEX, Writer, header_bytes, tensors_of
from drot.artifact.prediction import Prediction, load_source, predictions, reported
from drot.artifact.tensors import DTYPES, at_positions, holds_weights, numbered, stored_names
from drot.checkpoint.load import load_config
from drot.checkpoint.quantization_config import boundary_of
from drot.checkpoint.rotations import load_rotations
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.core.files import check_writable, new_file
from drot.core.hashes import tensors_digest
from drot.machine.environment import versions
from drot.manifest.integrity import folder_records, verified_while_loading
from drot.manifest.manifest import Manifest, read_manifest
from drot.model.families import head_shape
from drot.model.rotation import LayerRotation

logger = logging.getLogger("drot")

#: suffixes of configs, tokenizers, manifests and model cards
TEXTS = (".json", ".md", ".txt", ".jinja", ".model")
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
    weight of the dense model. Returns {"bytes": size of `out`, "checkpoint_bytes": size of the checkpoint,
    "parts": what takes how many bytes}.

    Raises UserError for a checkpoint that drot did not make or whose weights are damaged, and for another
    model or other rotations than those of the checkpoint.

    Args:
        checkpoint: a folder that drot wrote, dense or packed.
        out: the file of the artifact, which must not exist.
        model: the dense model from which the checkpoint was made, a hub name or a folder. None takes the name
            in drot.json.
        rotations: the file that `save_rotations_to` wrote in the run. None for a model that is not rotated.
        progress: the callback for ProgressEvents.
    """
    folder, out = Path(checkpoint), Path(out)
    manifest = read_manifest(folder)
    if out.exists():
        raise UserError(f"{out} exists: name another `out` or remove it")
    check_writable(out)
    files = _files(folder, manifest)
    name = model or manifest.base_model
    if not name:
        raise UserError("drot.json names no model: name the dense model as `model`")
    source = load_source(name)
    given = _rotations_of(manifest, rotations, source)
    place = boundary_of(load_config(folder))
    headers = {name: header_bytes(path) for name, path in files.items() if holds_weights(path)}
    stored = {
        tensor: (files[file], dtype)
        for file, header in headers.items()
        for tensor, (dtype, _, _) in tensors_of(header, files[file].stat().st_size).items()
    }
    if given is not None:
        bits = max(SIGNIFICAND.get(dtype, 0) for _, dtype in stored.values()) + EXTRA_BITS
        given = [LayerRotation(round_bits(r.r1, bits), round_bits(r.r2, bits)) for r in given]
    tolerances: dict[str, float] = {}
    index = {
        "format_version": FORMAT_VERSION,
        "versions": versions(),
        "model": str(name),
        "model_sha256": tensors_digest(source.state_dict()),
        "rotated": given is not None,
        "boundary": place,
        "files": {file: record.model_dump() for file, record in folder_records(folder, files).items()},
    }
    # the hashes are compared before `part` gets the name `out`
    with new_file(out) as part, verified_while_loading(folder), Writer(part) as writer:
        for file, path in files.items():
            if file in headers:
                writer.add(f"headers/{file}", headers[file])
            else:
                writer.add(f"files/{file}", path.read_bytes())
        if given is not None:
            writer.add_rotations(given)
        left, layers = set(stored), source.config.num_hidden_layers
        for prediction in reported(predictions(source, given, place), "export", layers, progress):
            left -= set(_add(writer, prediction, stored, tolerances))
        if left:
            raise UserError(
                f"{folder}: {min(left)} is no tensor of {name}: name a folder that drot prune wrote"
            )
        writer.add(INDEX, json.dumps(index | {"tolerances": tolerances}).encode())
        parts = writer.sizes()
    size = sum(path.stat().st_size for path in files.values())
    return {"bytes": out.stat().st_size, "checkpoint_bytes": size, "parts": parts}


def _files(folder: Path, manifest: Manifest) -> dict[str, Path]:
    """Name → path of the files of a checkpoint that belong into its artifact.

    Other files are left out, with a warning: they might hold weights of the dense model.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if holds_weights(path) or path.suffix in TEXTS or name in manifest.files:
            files[name] = path
        else:
            logger.warning("%s is left out of the artifact: it is no part of the checkpoint", path)
    if not any(map(holds_weights, files.values())):
        raise UserError(f"{folder} holds no model.safetensors: name a folder that drot prune wrote")
    return files


def _rotations_of(manifest: Manifest, file: str | Path | None, source: Any) -> list[LayerRotation] | None:
    if manifest.recipe.rotation.mode == "none":
        if file is not None:
            raise UserError("this checkpoint is not rotated: leave out `rotations`")
        return None
    if file is None:
        raise UserError(
            "this checkpoint is rotated: name the file of its run as `rotations`, which `save_rotations_to` "
            "writes; repeat the run with it if there is none"
        )
    config = source.config
    return load_rotations(
        Path(file),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        shape=head_shape(config),
    )[0]


def round_bits(matrix: Tensor, bits: int) -> Tensor:
    """fp32 `matrix`, rounded to significands of `bits` bits, of which fp32 has 24."""
    matrix = matrix.float()
    if bits >= 24:
        return matrix
    drop = 24 - bits
    whole = matrix.view(torch.int32) + (1 << (drop - 1))
    return (whole & -(1 << drop)).view(torch.float32)


def _add(
    writer: Writer,
    prediction: Prediction,
    stored: dict[str, tuple[Path, str]],
    tolerances: dict[str, float],
) -> list[str]:
    """Adds the parts of one tensor; returns the names of the checkpoint's tensors that they stand for."""
    names = stored_names(prediction.name, stored)
    if names is None:
        return []
    weight, positions = names
    path, dtype = stored[weight]
    if dtype not in DTYPES:
        raise UserError(f"{path}: {weight} must be of dtype {', '.join(DTYPES)}, got {dtype}")
    tolerances[prediction.name] = prediction.tolerance
    changed = total = 0.0
    try:
        with safe_open(path, framework="pt") as handle:
            for number, first, rows in numbered(prediction):
                member = f"tensors/{prediction.name}/{number}"
                if positions is not None:
                    with safe_open(stored[positions][0], framework="pt") as other:
                        chosen = other.get_slice(positions)[first : first + len(rows)]
                    writer.add(f"{member}/positions", chosen.numpy().tobytes())
                    rows = at_positions(rows, chosen)
                actual = handle.get_slice(weight)[first : first + len(rows)]
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
    only_rotated = prediction.name.endswith(("embed_tokens.weight", "residual_rotation.weight"))
    if only_rotated and changed > LARGEST_CHANGE**2 * total:
        raise UserError(
            f"{weight} of {path.parent} does not fit: name the dense `model` and the `rotations` of the run "
            "that made the checkpoint"
        )
    return [name for name in names if name is not None]
