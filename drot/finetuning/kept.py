"""The adapter of a training that is finished, kept beside `out` until the checkpoint there is whole."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from drot.config import FinetuneConfig
from drot.core.checks import path_exists
from drot.core.errors import UserError
from drot.core.files import WriteError, new_folder, write_json
from drot.core.hashes import tensors_digest
from drot.core.reading import read_json
from drot.text.source import calibration_hash

WEIGHTS, RECORD = "adapter.safetensors", "training.json"


@dataclass(frozen=True)
class Trained:
    """adapter: name of a parameter → LoRA's matrix, fp32. record: of the training, for the manifest."""

    adapter: dict[str, Tensor]
    record: dict[str, Any]


def kept_folder(out: Path) -> Path:
    """OUT.adapter, the folder in which the training for `out` is kept."""
    return out.with_name(out.name + ".adapter")


def identity_of(model: Any, config: FinetuneConfig, texts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """What a training depends on, in plain JSON types."""
    return {
        "model": tensors_digest(model.state_dict()),
        "config": json.loads(json.dumps(config.to_dict())),
        "texts": [calibration_hash(text) for text in texts],
    }


def keep(folder: Path, trained: Trained, identity: dict[str, Any]) -> None:
    """Writes a training to `folder`. Raises WriteError if writing fails, as on a full disk."""
    with new_folder(folder) as part:
        save_file(trained.adapter, part / WEIGHTS)
        write_json(part / RECORD, {"identity": identity, "record": trained.record})


def kept(folder: Path, identity: dict[str, Any]) -> Trained | None:
    """The training in `folder`; None without one.

    Raises UserError for a folder that holds another training, or that is not complete.
    """
    if not path_exists(folder):
        return None
    content = read_json(folder / RECORD)
    if content.get("identity") != identity:
        raise UserError(
            f"{folder} holds the adapter of a training with other settings, text or weights: repeat that "
            "command, remove the folder, or name another `out`"
        )
    return Trained(load_file(folder / WEIGHTS), content["record"])


@contextlib.contextmanager
def kept_until_written(folder: Path, trained: Trained, identity: dict[str, Any]) -> Iterator[None]:
    """Keeps the adapter of a training in `folder` until the block has written the checkpoint.

    Raises UserError that says where the adapter is, if the block raises WriteError.
    """
    if not trained.adapter:
        yield
        return
    if not folder.exists():
        keep(folder, trained, identity)
    try:
        yield
    except WriteError as error:
        raise UserError(
            f"{error}; the trained adapter is kept in {folder}: make room, and repeat the same call, which "
            "does not train again"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
