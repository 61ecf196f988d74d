"""The file of a checkpoint with the importance of the weights, from which `drot report` draws."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from drot.core.errors import UserError

#: Not a safetensors file: engines such as vLLM load the tensors of every *.safetensors file in the folder.
FIGURES = "drot-figures.npz"
#: a histogram has HISTOGRAM_BINS equal bins of log10(importance) between these limits; an importance beyond
#: a limit counts in the outermost bin
HISTOGRAM_LOG10 = (-8.0, 4.0)
HISTOGRAM_BINS = 60


def save_figures(folder: Path, figures: Mapping[str, Tensor | np.ndarray]) -> None:
    """Writes `figures`, name → tensor on the CPU (pipeline/importance.py), compressed. An empty one writes no
    file."""
    if figures:
        # sorted and in C order, since the parts of a resumed run have them in another order
        arrays = {name: np.ascontiguousarray(figures[name]) for name in sorted(figures)}
        np.savez_compressed(folder / FIGURES, **arrays)  # type: ignore[arg-type]


def load_figures(folder: Path | str) -> dict[str, np.ndarray]:
    """The figures in the checkpoint `folder`; {} if it has none. Raises UserError for a broken file."""
    file = Path(folder) / FIGURES
    if not file.exists():
        return {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file} is not a complete npz file ({error}): copy the checkpoint again") from None
