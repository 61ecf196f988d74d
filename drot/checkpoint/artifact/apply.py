"""`drot.apply_artifact`: a checkpoint from its artifact and the public dense model."""

import os
from pathlib import Path
from typing import Any

import torch

from drot.checkpoint.artifact.coding import decode
from drot.checkpoint.artifact.container import Reader
from drot.checkpoint.artifact.prediction import Prediction, open_source, predictions
from drot.checkpoint.artifact.tensors import at_positions, holds_weights, names_of_weight, numbered
from drot.checkpoint.save import check_output
from drot.checkpoint.source import DENSE_DTYPES, Header, tensors_of
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.core.files import new_folder
from drot.core.hashes import damage, parts_digest
from drot.core.lock import locked
from drot.model.decoder import DecoderModel
from drot.model.rotation import Bases


def apply_artifact(
    artifact: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes the checkpoint from which `artifact` was made to the folder `out`, byte for byte.

    The SHA-256 of every file is compared with the artifact's. Returns {"files": name → sha256 and bytes}.

    Raises UserError for another model than that of the artifact, for a damaged artifact, and if a file comes
    out different. `out` is then not written. While the call lasts, `out` is locked: another run that names it
    is refused.

    Args:
        artifact: a file that `export_artifact` wrote.
        out: the folder of the checkpoint, which must be new or empty.
        model: the dense model, a hub name or a folder. None takes the name in the artifact.
        progress: the callback for ProgressEvents.
    """
    is_a("artifact", artifact, str, Path)
    is_a("out", out, str, Path)
    is_a("model", model, str, Path, or_none=True)
    is_callable("progress", progress)
    out = Path(out)
    check_output(out)
    with locked(out), Reader(Path(artifact)) as reader:
        index = reader.index
        source = open_source(model or index.model)
        if parts_digest(source.parts_of_state()) != index.model_sha256:
            raise UserError(
                f"{model or index.model} has other weights than {index.model} had when {artifact} was "
                "made: name that model, in the same revision"
            )
        with new_folder(out) as part:
            write_checkpoint(reader, source, part, progress)
    return {"files": {name: record.model_dump() for name, record in index.files.items()}}


def write_checkpoint(reader: Reader, source: DecoderModel, folder: Path, progress: Progress) -> None:
    """Writes all files of the checkpoint to `folder`. Raises UserError unless they have the recorded hashes.

    source: the dense model.
    """
    index, config = reader.index, source.config
    weights = sum(record.bytes for name, record in index.files.items() if holds_weights(name))
    # four bytes in place of one, an untied head, and a rotation of each layer in fp32
    most = 8 * source.model.get_memory_footprint() + 4 * config.num_hidden_layers * config.hidden_size**2
    if weights > most + 2**20:
        raise reader.damaged(f"its weights have {weights} bytes, more than any checkpoint of this model")
    stored: dict[str, Header] = {}
    for name, record in index.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not holds_weights(name):
            file.write_bytes(reader.content(f"files/{name}"))
            continue
        header = reader.content(f"headers/{name}")
        try:
            stored |= tensors_of(header, file, record.bytes)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise reader.damaged(f"header of {name}: {error!r}") from None
        file.write_bytes(header)
        os.truncate(file, record.bytes)
    rotations = reader.rotations(source) if index.rotated else None
    bases = Bases(index.boundary, len(source.layers), index.layers_per_rotation or 1)
    for prediction in predictions(source, rotations, bases, "apply", progress):
        if names := names_of_weight(prediction.name, stored):
            _write_tensor(reader, prediction, names, stored)
    for name, record in index.files.items():
        if problem := damage(folder / name, record):
            raise UserError(
                f"{name} came out different from the file that {reader.path} stands for: it {problem}; the "
                "artifact is damaged, or fp64 results on this machine exceed the recorded tolerance; nothing "
                "was written"
            )


def _write_tensor(
    reader: Reader,
    prediction: Prediction,
    names: tuple[str, str | None],
    stored: dict[str, Header],
) -> None:
    weight, positions = names
    tolerance = reader.index.tolerances.get(prediction.name, 0.0)
    for number, first, rows in numbered(prediction):
        member = f"tensors/{prediction.name}/{number}"
        try:
            if positions is not None:
                data = reader.content(f"{member}/positions", rows.numel())
                held = stored[positions]
                _write_at(held.file, held.start + first * held.shape[1], data)
                chosen = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(len(rows), -1)
                rows = at_positions(rows, chosen)
            held = stored[weight]
            # `unsure` is the largest: two numbers of 8 bytes for each weight
            parts = reader.parts(member, ("mask", "difference", "unsure"), 16 * rows.numel())
            values = decode(parts, rows, tolerance, DENSE_DTYPES[held.dtype]).contiguous()
            row_bytes = values.nbytes // len(values)
            _write_at(held.file, held.start + first * row_bytes, values.view(torch.uint8).numpy().tobytes())
        except UserError:
            raise
        except (ValueError, RuntimeError, LookupError, TypeError, ArithmeticError) as error:
            raise reader.damaged(f"{weight}: {error}") from None


def _write_at(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(data)
