"""The finished parts of an unfinished run, from which an interrupted run goes on."""

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
    """Where the finished layers of an unfinished run to `out` lie."""
    return out.with_name(out.name + ".partial")


def check_unfinished(out: Path, *, resume: bool) -> None:
    """Raises UserError where a run to `out` was cut off and is not to be resumed; notes where there is
    none to resume."""
    folder = partial_folder(out)
    if folder.exists() and not resume:
        raise UserError(f"{folder} holds an unfinished run: continue it with `resume=True` or remove it")
    if resume and not folder.exists():
        logger.warning("%s is not there: nothing to resume, the run starts at the first layer", folder)


class RunState:
    """The finished layers of a run that is under way, in `<out>.partial`, so that it survives a crash.

    A layer is one safetensors file: its state dict, its rotation, and its record in the metadata. The
    folder is made with the first of them. Raises UserError where it belongs to another run.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.folder = partial_folder(out)
        self._lock = threading.Lock()
        self.identity = json.loads(json.dumps(identity))  # as it will be read: tuples are lists there
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
                f"cannot resume {self.folder}: {', '.join(changed)} differ from that run; "
                "repeat its options or remove the folder"
            )

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, torch.Tensor], record: Any) -> None:
        """Writes a part, whole or not at all; may be called by several threads."""
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
        """Tensors and record, or None where that part is not done yet."""
        file = self._file(name)
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            return tensors, json.loads(handle.metadata()["record"])

    def discard(self) -> None:
        """Called when the checkpoint is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
