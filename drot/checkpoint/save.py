"""Writing of checkpoints. A folder is complete or does not exist."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from drot.checkpoint.manifest import MANIFEST, write_json
from drot.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Bytes of the longest name of a file or folder to write. File systems allow 255, and the longest suffix,
#: that of the temporary folder of tempfile, takes 14.
LONGEST_NAME = 240


def check_output(out: Path) -> None:
    """Raises UserError if `out` holds files already, and as `check_writable` does."""
    check_writable(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: name another `out` or remove it")
    if out.is_symlink() or os.path.ismount(out):  # save_checkpoint could not rename a folder to it
        raise UserError(f"{out} is a link or a mount point: name a folder inside it ({out}/NAME)")
    if out.resolve() == Path.cwd():
        raise UserError(
            f"`out` must not be the current folder, got {out}: name a folder inside it ({out}/NAME)"
        )


def check_writable(file: Path) -> None:
    """Creates the parent folder of a file or folder to write.

    Raises UserError if nothing can be written there, and for a name that is too long.
    """
    if (length := len(os.fsencode(file.name))) > LONGEST_NAME:
        raise UserError(
            f"cannot write {file.name[:20]}...: a name must have at most {LONGEST_NAME} bytes, got {length}: "
            "shorten it"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: {file.parent}") from None


def save_checkpoint(model: "PreTrainedModel", tokenizer: Any, manifest: dict[str, Any], out: Path) -> None:
    """Writes the model, the tokenizer and the manifest to a temporary folder and renames it to `out`.

    So `out` is complete if it exists. A tokenizer of None and an empty manifest are not written. Raises
    UserError if writing fails, as on a full disk.
    """
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name + ".", suffix=".part") as beside:
            # renamed to `out`: unlike the temporary folder around it, it has the permissions of the umask
            part = Path(beside) / out.name
            part.mkdir()
            model.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            if manifest:
                write_json(part / MANIFEST, manifest)
            if out.exists():
                out.rmdir()  # check_output made sure that it is empty
            os.replace(part, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {error}") from error
