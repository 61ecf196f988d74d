"""The file of a checkpoint with maps and histograms of the importance of its weights, for `drot report`."""

import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from drot.checkpoint.integrity import recorded_files
from drot.core.errors import UserError
from drot.core.hashes import damage

#: Not a safetensors file: engines such as vLLM load the tensors of every *.safetensors file in the folder.
IMPORTANCE_MAPS = "drot-figures.npz"
#: a histogram has HISTOGRAM_BINS equal bins of log10(importance) between these limits; an importance beyond
#: a limit counts in the outermost bin
HISTOGRAM_LOG10 = (-8.0, 4.0)
HISTOGRAM_BINS = 60
#: bytes of the largest array in the file: 32 x 32 means in fp16, or a histogram, with numpy's header
LARGEST_ARRAY = 4096
#: the name of an array, as in `layers.0.self_attn.q_proj.map_before`
NAME = re.compile(r"layers\.\d{1,9}\.[\w.]+\.(map|histogram)_(before|after)")


def save_importance_maps(folder: Path, maps: Mapping[str, Tensor | np.ndarray]) -> None:
    """Writes `maps`, name → array on the CPU, compressed. Without arrays no file is written.

    maps: `<linear>.map_<basis>`, fp16 [rows, columns], and `<linear>.histogram_<basis>`, int64
        [2, HISTOGRAM_BINS] (pipeline/importance.py). basis: `before` or `after` the rotation.
    """
    if maps:
        # sorted and in C order, since the parts of a resumed run have them in another order
        arrays = {name: np.ascontiguousarray(maps[name]) for name in sorted(maps)}
        np.savez_compressed(folder / IMPORTANCE_MAPS, **arrays)  # type: ignore[arg-type]


def load_importance_maps(folder: Path | str) -> dict[str, np.ndarray]:
    """The maps in the checkpoint `folder`; {} if it has none.

    Raises UserError for a broken file, and for another than the one whose hash is in drot.json.
    """
    file = Path(folder) / IMPORTANCE_MAPS
    if not os.path.exists(file):
        return {}
    record = recorded_files(Path(folder)).get(IMPORTANCE_MAPS)
    if problem := "is not in its list of files" if record is None else damage(file, record):
        raise UserError(f"{file} is not the file that drot.json describes: it {problem}; copy it again")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if any(member.file_size > LARGEST_ARRAY for member in arrays.zip.infolist()):
                raise ValueError("an array is too large")
            maps = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file} is not a complete npz file ({error}): copy the checkpoint again") from None
    for name, array in maps.items():
        kind = NAME.fullmatch(name)
        if kind is None or not _fits(kind[1], array):
            raise UserError(f"{file} holds {name!r}, which drot did not write: copy the checkpoint again")
    return maps


def _fits(kind: str, array: np.ndarray) -> bool:
    if kind == "map":
        return array.dtype == np.float16 and array.ndim == 2 and array.size > 0
    return array.dtype == np.int64 and array.shape == (2, HISTOGRAM_BINS)
