"""`drot.apply_artifact`: a checkpoint from its artifact and the public dense model."""

import os
from pathlib import Path
from typing import Any

import torch

from drot.artifact.coding import decode
from drot.artifact.container import Reader, tensors_of
from drot.artifact.prediction import Prediction, load_source, predictions, reported
from drot.artifact.tensors import DTYPES, at_positions, holds_weights, numbered, stored_names
from drot.checkpoint.save import check_output
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.core.files import new_folder
from drot.core.hashes import damage, tensors_digest
from drot.core.lock import locked
from drot.model.families import head_shape


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
    out = Path(out)
    check_output(out)
    with locked(out), Reader(Path(artifact)) as reader:
        index = reader.index
        source = load_source(model or index.model)
        if tensors_digest(source.state_dict()) != index.model_sha256:
            raise UserError(
                f"{model or index.model} has other weights than {index.model} had when {artifact} was "
                "made: name that model, in the same revision"
            )
        with new_folder(out) as part:
            _write(reader, source, part, progress)
            for name, record in index.files.items():
                if problem := damage(part / name, record):
                    raise UserError(
                        f"{name} came out different from the file that {artifact} stands for: it {problem}; "
                        "the artifact is damaged, or fp64 results on this machine exceed the recorded "
                        "tolerance; nothing was written"
                    )
    return {"files": {name: record.model_dump() for name, record in index.files.items()}}


def _write(reader: Reader, source: Any, folder: Path, progress: Progress) -> None:
    """Writes all files of the checkpoint to `folder`."""
    index = reader.index
    stored: dict[str, tuple[Path, str, list[int], int]] = {}
    for name, record in index.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not holds_weights(file):
            file.write_bytes(reader.read(f"files/{name}"))
            continue
        header = reader.read(f"headers/{name}")
        try:
            tensors = tensors_of(header, record.bytes)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise reader.damaged(f"header of {name}: {error!r}") from None
        file.write_bytes(header)
        os.truncate(file, record.bytes)
        stored |= {tensor: (file, *place) for tensor, place in tensors.items()}
    config = source.config
    rotations = None
    if index.rotated:
        rotations = reader.rotations(config.num_hidden_layers, config.hidden_size, head_shape(config))
    found = predictions(source, rotations, index.boundary)
    for prediction in reported(found, "apply", config.num_hidden_layers, progress):
        if names := stored_names(prediction.name, stored):
            _write_tensor(reader, prediction, names, stored)


def _write_tensor(
    reader: Reader,
    prediction: Prediction,
    names: tuple[str, str | None],
    stored: dict[str, tuple[Path, str, list[int], int]],
) -> None:
    weight, positions = names
    tolerance = reader.index.tolerances.get(prediction.name, 0.0)
    for number, first, rows in numbered(prediction):
        member = f"tensors/{prediction.name}/{number}"
        try:
            if positions is not None:
                data = reader.read(f"{member}/positions")
                file, _, shape, offset = stored[positions]
                _write_at(file, offset + first * shape[1], data)
                chosen = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(len(rows), -1)
                rows = at_positions(rows, chosen)
            file, dtype, shape, offset = stored[weight]
            parts = reader.parts(member, ("mask", "difference", "unsure"))
            values = decode(parts, rows, tolerance, DTYPES[dtype]).contiguous()
            row_bytes = values.nbytes // len(values)
            _write_at(file, offset + first * row_bytes, values.view(torch.uint8).numpy().tobytes())
        except UserError:
            raise
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            raise reader.damaged(f"{weight}: {error}") from None


def _write_at(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(data)
