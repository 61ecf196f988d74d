"""A checkpoint that reads images too, with a pruned language model in place of its own."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drot.checkpoint.integrity import CONFIG_FILE
from drot.checkpoint.manifest import MANIFEST
from drot.checkpoint.pieces import PieceReader
from drot.checkpoint.quantised import Quantised, dense_headers
from drot.checkpoint.source import (
    DENSE_DTYPES,
    INDEX,
    PREDICTION_LAYERS,
    PREDICTION_PREFIXES,
    SMALL_FILES,
    Header,
    read_headers,
    weight_files,
)
from drot.checkpoint.stored_config import restored, write_stored_form
from drot.model.multimodal import StoredNames


def kept_bytes(
    tensors: Mapping[str, Header | Tensor], names: StoredNames, rotated: torch.dtype | None
) -> int:
    """The bytes that a checkpoint has beside its language model, in a model that reads images too.

    tensors: of the model before the run, by the `names` in its files.
    rotated: the dtype in which the linears are saved that write images into a rotated stream; None without a
        rotation, which leaves them as they are.
    """
    return sum(
        each.nbytes
        if rotated is None or names.own(name) is None
        else math.prod(each.shape) * rotated.itemsize
        for name, each in tensors.items()
        if not names.is_text(name)
    )


@dataclass(frozen=True)
class MultimodalFolder:
    """The model in `folder` that reads images too, from which a language model was opened."""

    folder: Path
    names: StoredNames

    def _kept(self) -> dict[str, Header]:
        """The tensors that are no part of the language model, and not for multi-token prediction."""
        headers = dense_headers(read_headers(weight_files(self.folder)), self.folder)
        return {
            name: each
            for name, each in headers.items()
            if not (self.names.is_text(name) or name.startswith(PREDICTION_PREFIXES))
        }

    def kept_bytes(self, rotated: torch.dtype | None) -> int:
        """As the function, of the tensors that `complete` writes beside the language model."""
        return kept_bytes(self._kept(), self.names, rotated)

    def complete(self, out: Path, file: Path, config: Any) -> None:
        """Makes `out`, where the language model is written, the checkpoint of the whole model.

        What the language model does not replace is copied byte for byte: tensors to `file`, small files, and
        the entries of config.json. Quantised tensors are made dense.

        file: the tensors outside of the decoder layers. config: of the language model.
        """
        tensors = {self.names.stored(name): tensor for name, tensor in load_file(file).items()}
        for name, header in self._kept().items():
            if name in tensors:  # the projector, which R1 rotates
                continue
            if isinstance(header, Quantised):
                tensors[name] = torch.empty(header.shape, dtype=DENSE_DTYPES[header.dtype])
                header.read(PieceReader(), tensors[name], 0)
                continue
            with safe_open(header.file, framework="pt") as handle:
                tensors[name] = handle.get_tensor(name)
        part = file.with_suffix(".part")
        save_file(tensors, part, {"format": "pt"})
        part.replace(file)
        self._write_config(out / CONFIG_FILE, config)
        for pattern in SMALL_FILES:
            for small in self.folder.glob(pattern):
                if small.name not in (INDEX, MANIFEST) and not (out / small.name).exists():
                    shutil.copyfile(small, out / small.name)

    def _write_config(self, file: Path, config: Any) -> None:
        """Writes the config of the whole model over that of its language model, which `file` holds."""
        entries = restored(json.loads((self.folder / CONFIG_FILE).read_text(encoding="utf-8")))
        written = json.loads(file.read_text(encoding="utf-8"))
        text = entries.get("text_config", {})  # Qwen2.5-VL was published without
        for part in (entries, text):
            if part is entries or "dtype" in part or "torch_dtype" in part:
                part.pop("torch_dtype", None)
                part["dtype"] = written["dtype"]
            if not config.tie_word_embeddings:
                part["tie_word_embeddings"] = False
            part |= {entry: 0 for entry in PREDICTION_LAYERS if part.get(entry)}
        for part in (entries, text):
            part.pop("quantization_config", None)
            part.pop("auto_map", None)  # of code, which drot does not copy
            part.pop("tie_embedding", None)  # an older name of LFM2's
        if (entry := written.get("quantization_config")) is not None:
            entries["quantization_config"] = entry
            if text:  # so that a class for text alone is refused too, which reads these entries
                text["quantization_config"] = entry
        file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if entry is not None:
            write_stored_form(file)
