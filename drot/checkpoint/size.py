"""The bytes of a checkpoint: of its weights on disk, and of the files that a run is going to write."""

import shutil
from pathlib import Path

from drot.checkpoint.integrity import is_loaded
from drot.core.errors import UserError


def weight_bytes(folder: str | Path) -> int | None:
    """The bytes of the safetensors files in `folder` from which a model is loaded.

    None if it is no local folder, or has none.
    """
    files = (file for file in Path(folder).glob("*.safetensors") if is_loaded(file.name))
    return sum(file.stat().st_size for file in files) or None


def size_text(count: float) -> str:
    """A number of bytes with its unit: 16.9 MB, and 2.5 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def check_space(out: Path, checkpoint: int, beside: int = 0, written: int = 0) -> None:
    """Raises UserError if the disk of `out` has less space than a run is going to write to it.

    checkpoint: bytes of the checkpoint in `out`.
    beside: bytes of what lies beside `out` until the checkpoint is complete, such as rotations and maps.
    written: bytes that an interrupted run has written already.
    """
    free, needed = shutil.disk_usage(out.resolve().parent).free, max(0, checkpoint + beside - written)
    if free < needed:
        raise UserError(
            f"{out} needs {size_text(needed)} of free space, {size_text(checkpoint)} for the checkpoint and "
            f"{size_text(beside)} for what is kept until it is complete; its disk has "
            f"{size_text(free)}: make room, or name a folder on another disk as `out`"
        )
