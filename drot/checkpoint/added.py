"""What a rotation adds to the bytes of a checkpoint."""

import math
from pathlib import Path

from drot.checkpoint.source import DENSE_DTYPES, read_headers
from drot.model.boundary import DOWN_ROTATION, ROTATION_MODULE


def added_bytes(folder: Path, *, untied: bool) -> tuple[int, int]:
    """The bytes of lm_head, if it was `untied` by a rotation, and of the rotations in a checkpoint."""
    head = rotations = 0
    for name, header in read_headers(sorted(folder.glob("*.safetensors"))).items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in ("lm_head", ROTATION_MODULE, DOWN_ROTATION):
            size = math.prod(header.shape) * DENSE_DTYPES[header.dtype].itemsize
            head += size * (untied and module == "lm_head")
            rotations += size * (module != "lm_head")
    return head, rotations
