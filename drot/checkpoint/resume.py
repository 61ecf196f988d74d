"""The finished parts of an unfinished run, with which `resume=True` continues an interrupted run."""

import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drot.checkpoint.manifest import write_json
from drot.errors import UserError

logger = logging.getLogger("drot")


def partial_folder(out: Path) -> Path:
    """The folder of the finished layers of an unfinished run that writes to `out`."""
    return out.with_name(out.name + ".partial")


def check_unfinished(out: Path, *, resume: bool) -> None:
    """Raises UserError if there is an unfinished run to `out` and `resume` is False.

    Logs a warning if `resume` is True and there is no unfinished run.
    """
    folder = partial_folder(out)
    if folder.exists() and not resume:
        raise UserError(f"{folder} holds an unfinished run: continue it with `resume=True` or remove it")
    if resume and not folder.exists():
        logger.warning("%s does not exist: nothing to resume, the run starts at the first layer", folder)


class RunState:
    """The finished parts of a run, which are saved in `<out>.partial` so that the run survives a crash.

    A part, such as a pruned layer, is one safetensors file with its tensors, and its record in the metadata.
    The folder is created with the first part; its run.json holds `identity`, the settings of the run. Raises
    UserError if the folder belongs to a run with another `identity`.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.folder = partial_folder(out)
        self._lock = threading.Lock()
        self.identity = json.loads(json.dumps(identity))  # with lists for tuples, as run.json will have
        run = self.folder / "run.json"
        if not run.exists():
            return
        try:
            before = json.loads(run.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(
                f"cannot resume {self.folder}: its run.json is broken; remove the folder"
            ) from None
        changed = [key for key in self.identity if before.get(key) != self.identity[key]]
        if changed:
            raise UserError(
                f"cannot resume {self.folder}: {', '.join(changed)} of this run differ from those of the "
                "unfinished run; repeat its settings or remove the folder"
            )

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, torch.Tensor], record: Any) -> None:
        """Writes the part `name` through a temporary file. Several threads may call it at the same time."""
        with self._lock:
            if not (self.folder / "run.json").exists():
                self.folder.mkdir(exist_ok=True)
                write_json(self.folder / "run.json", self.identity)
        file = self._file(name)
        part = file.with_suffix(".part")
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, part, metadata={"record": json.dumps(record)})
        os.replace(part, file)

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        """The tensors and the record of the part `name`; None if it is not finished yet."""
        file = self._file(name)
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            return tensors, json.loads(handle.metadata()["record"])

    def discard(self) -> None:
        """Deletes the folder. Called after the checkpoint was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
