"""The bytes of a checkpoint: of its weights on disk, and of the files that a run is going to write."""

import math
import shutil
from pathlib import Path

from rich.filesize import decimal as size_text

from drot.checkpoint.integrity import is_loaded
from drot.core.errors import UserError


def weight_file_bytes(folder: str | Path) -> int | None:
    """The bytes of the safetensors files in `folder` from which a model is loaded.

    None if it is no local folder, or has none.
    """
    files = (file for file in Path(folder).glob("*.safetensors") if is_loaded(file.name))
    return sum(file.stat().st_size for file in files) or None


def why_larger(source: str | Path, folder: Path) -> str:
    """What the weights in `folder` hold beside those of `source`, in words."""
    from drot.checkpoint.quantised import dense_headers, formats_of  # it imports torch
    from drot.checkpoint.source import DENSE_DTYPES, read_headers, weight_files

    before, after = (
        dense_headers(read_headers(weight_files(Path(each))), Path(each)) for each in (source, folder)
    )
    added = {
        name: math.prod(header.shape) * DENSE_DTYPES[header.dtype].itemsize
        for name, header in after.items()
        if name not in before and header.dtype in DENSE_DTYPES
    }
    kinds = {"rotations": "_rotation.weight", "lm_head, which was tied": "lm_head.weight"}
    found = [f"weights that were in {format}" for format in formats_of(before)]
    for kind, end in kinds.items():
        if size := sum(size for name, size in added.items() if name.endswith(end)):
            found.append(f"{kind}: {size_text(size)}")
    if not any(name.endswith(".values") for name in after):
        found.append("zeros take as many bytes as other weights")
    return "; ".join(found)


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
