"""Writing checkpoints: whole or not at all."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from drot.checkpoint.manifest import MANIFEST, write_json
from drot.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_output(out: Path) -> None:
    """Raises UserError where `out` exists and holds something that saving would overwrite, or where
    nothing can be written beside it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: name another `out` or remove it")
    if out.is_symlink() or os.path.ismount(out):  # a folder is renamed to it in the end
        raise UserError(f"{out} is a link or a mount point: name a folder inside it ({out}/NAME)")
    if out.resolve() == Path.cwd():
        raise UserError(
            f"`out` must be a folder of its own, got the current one: name one inside it ({out}/NAME)"
        )
    check_writable(out)


def check_writable(file: Path) -> None:
    """Makes the folder that `file` is to lie in. Raises UserError where nothing can be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: {file.parent}") from None


def save_checkpoint(model: "PreTrainedModel", tokenizer: Any, manifest: dict[str, Any], out: Path) -> None:
    """Writes model, tokenizer and manifest (unless it is empty) beside `out` and renames the folder at the
    end, so that `out` either is not there or is complete. UserError where the disk does not take it."""
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name + ".", suffix=".part") as beside:
            part = Path(beside) / out.name  # made by mkdir: the one around it is for our eyes only
            part.mkdir()
            model.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            if manifest:
                write_json(part / MANIFEST, manifest)
            if out.exists():
                out.rmdir()  # empty, or check_output would have refused it
            os.replace(part, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {error}") from error
