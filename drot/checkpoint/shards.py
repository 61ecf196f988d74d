"""A checkpoint with a shard for each decoder layer, which a run writes when the layer is finished."""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save, save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from drot.checkpoint.integrity import CONFIG_FILE
from drot.checkpoint.multimodal import MultimodalFolder
from drot.checkpoint.source import Header, read_headers
from drot.checkpoint.stored_config import MODEL_TYPE
from drot.core.hashes import FileRecord, file_record
from drot.model.decoder import DecoderModel
from drot.model.layer import DecoderLayer
from drot.model.stored import stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("drot")

#: of a safetensors file, which transformers demands
METADATA = {"format": "pt"}


def shard_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of the file that `save_shard` writes."""
    return save(_writable(tensors), METADATA)


def save_shard(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes `tensors` to `file`."""
    save_file(_writable(tensors), file, METADATA)


def _writable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: contiguous, in main memory."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def save_layers(
    layers: Iterable[DecoderLayer], folder: Path, change: Callable[[DecoderLayer], None] = lambda layer: None
) -> dict[Path, FileRecord]:
    """Writes each layer to `folder`, after `change`; returns the hashes, as `save_in_shards` takes them."""
    written = {}
    for layer in layers:
        change(layer)
        file = folder / f"layer_{layer.index:05d}.safetensors"
        save_shard(stored_tensors(layer), file)
        written[file] = file_record(file)
    return written


def save_in_shards(
    model: "PreTrainedModel", folder: Path, written: Mapping[Path, FileRecord]
) -> dict[str, FileRecord]:
    """Writes what `save_pretrained` writes to `folder`, with a shard for each layer and a last for the rest.

    The rest is the embedding, the last norm and the head; of a model that reads images too, all else as well
    (`MultimodalFolder`).

    written: the shards of all layers with their hashes, which are in `folder` or get a second name there.

    Returns the hashes that are known, by the names of the shards in `folder`.
    """
    decoder = DecoderModel(model)
    *names, last_name = shard_names(len(decoder.layers) + 1)
    in_layers = [stored_tensors(layer) for layer in decoder.layers]
    weight_map = {tensor: name for name, own in zip(names, in_layers, strict=True) for tensor in own}
    published = model.config.architectures
    rest = dict(decoder.state_of_ends())
    model.save_pretrained(folder, state_dict=rest, max_shard_size="1000TB")  # in one file
    _name_as_published(folder / CONFIG_FILE, model, published)
    last = folder / last_name
    (folder / SAFE_WEIGHTS_NAME).rename(last)
    multimodal: MultimodalFolder | None = getattr(model, "drot_multimodal", None)
    if multimodal is not None:
        multimodal.complete(folder, last, model.config)
    in_last = read_headers([last])  # without a tied head
    weight_map |= dict.fromkeys(in_last, last.name)
    # after save_pretrained, which deletes shards that it finds
    for file, name in zip(written, names, strict=True):
        if file.parent == folder:
            file.rename(folder / name)
        else:
            _link(file, folder / name)
    parts: list[Mapping[str, Tensor | Header]] = [*in_layers, in_last]
    saved = [each for part in parts for each in part.values()]
    sizes = {
        "total_parameters": sum(math.prod(each.shape) for each in saved),
        "total_size": sum(each.nbytes for each in saved),
    }
    index = {"metadata": sizes, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
    return dict(zip(names, written.values(), strict=True))


def _name_as_published(file: Path, model: Any, architectures: list[str] | None) -> None:
    """Corrects the config.json that transformers wrote for a model.

    It names the files with code of the original, which drot neither runs nor copies. And it names the class
    that transformers has for a family, which may be of another family: EXAONE's is that of LLaMA, whose
    tensors have other names in files.

    architectures: those that the config named before.
    """
    entries = json.loads(file.read_text(encoding="utf-8"))
    code = entries.pop("auto_map", None)
    shared = entries["model_type"] != MODEL_TYPE and model.config_class.model_type != model.config.model_type
    if shared and architectures:
        entries["architectures"] = architectures
    if code or shared:
        file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def shard_names(count: int) -> list[str]:
    """The names of the shards of a checkpoint, as transformers gives them."""
    stem, suffix = SAFE_WEIGHTS_NAME.split(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def _link(file: Path, name: Path) -> None:
    """Gives `file` the second name `name`, without a copy where the file system can."""
    try:
        os.link(file, name)
    except OSError as error:
        logger.info("%s is copied, since it cannot be linked: %s", file, error.strerror)
        shutil.copyfile(file, name)
