"""The files of a model that somebody else may have written: where they lie, and what their headers say.

Nothing here runs code of the model, builds the model or reads its weights.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drot.checkpoint.integrity import CONFIG_FILE
from drot.config.recipe_file import MANIFEST
from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.core.hub import HUB_NAME, hub_access
from drot.core.reading import check_regular, check_schema, read_json
from drot.model.families import FAMILIES
from drot.model.schema import ModelConfig, RopeOfModel, WeightIndex

ADAPTER = "adapter_config.json"
WEIGHTS_FILE = "model.safetensors"
GGUF = ".gguf"
INDEX = WEIGHTS_FILE + ".index.json"
#: files of weights that Python opens by running what they hold
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
#: what is fetched from the hub before the weights: the config and the tokenizer
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
#: those of them that transformers reads whole, and the bytes of the largest; tokenizers have up to 40 MB
READ_BY_TRANSFORMERS = re.compile(
    r"(.*config|.*token.*|vocab.*|merges|chat_template.*|.*\.index)\.(json|txt|model|jinja)"
)
LARGEST_SMALL_FILE = 2**30
#: part of a tensor's name that holds the number of its decoder layer
LAYER_NUMBER = re.compile(r"(?:layers|(?:^|\.)h)\.(\d{1,9})\.")
#: the entries of a config with the number of layers for multi-token prediction; the first counts those behind
#: the decoder layers
PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
#: what the names of their tensors begin with in Qwen3-Next, Qwen3.5 and EXAONE, in ERNIE, and in MiMo
PREDICTION_PREFIXES = ("mtp.", "model.mtp_", "model.mtp.")
#: the dtypes in safetensors files that a dense weight may have
DENSE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of a tensor.

    dtype: in the names of the format, as in `F32`. start: its position in the file.
    """

    file: Path
    shape: list[int]
    dtype: str
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, if it is dense."""
        bits = re.search(r"\d+", self.dtype)  # BOOL has none
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


def model_folder(model: str | Path, *, weights: bool = False) -> Path:
    """The folder with the files of `model`: a local folder, or a name on the hub, whose files are fetched.

    Raises UserError if there is no such folder, and if the hub does not have the model or is not reached.

    weights: whether to fetch the weights too, and not only the config and the tokenizer.
    """
    if (gguf := gguf_file(model)) is not None:
        return _folder_of_gguf(str(model), gguf)
    folder = Path(model)
    try:
        if folder.is_dir():
            for file in folder.iterdir():
                if READ_BY_TRANSFORMERS.fullmatch(file.name):
                    check_regular(file, LARGEST_SMALL_FILE)
            return folder
        is_file = folder.exists()
    except OSError as error:  # a name that is too long, or a folder that must not be read
        raise UserError(f"cannot read {shortened(str(model))}: {error.strerror}") from None
    if is_file:
        raise UserError(f"{model} is a file: name the folder of the model that holds it")
    if isinstance(model, Path) or not HUB_NAME.fullmatch(model):
        raise UserError(f"there is no such folder: {str(model)!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    with hub_access(
        f"there is no folder {model}, and the model {model} cannot be read from the hub",
        "name a folder, or try again with a network",
    ):
        try:
            found = Path(snapshot_download(model, allow_patterns=SMALL_FILES))
            if weights:  # of the same revision, which is the name of the folder
                index = found / INDEX
                names = [WEIGHTS_FILE] if not index.exists() else _files_of(index)
                found = Path(snapshot_download(model, revision=found.name, allow_patterns=names))
        except RepositoryNotFoundError:
            raise UserError(
                f"there is no folder {model}, and the hub has no model {model} that this user may read: "
                "check the name, or log in with: hf auth login"
            ) from None
        return found


def recorded_name(model: str | Path) -> str:
    """The name of `model` for a manifest.

    A folder `models/llama` gets `./` in front: where it does not exist, it would be a name on the hub.
    """
    name = str(model)
    return f"./{name}" if HUB_NAME.fullmatch(name) and Path(name).exists() else name


def gguf_file(model: str | Path) -> str | None:
    """The name of the GGUF file that `model` names, as in FOLDER/NAME.gguf; None for another model."""
    file = Path(model)
    return file.name if file.suffix == GGUF and not os.path.isdir(file) else None


def _folder_of_gguf(model: str, name: str) -> Path:
    """The folder with the GGUF file `name`, which is fetched from the hub if there is no such file.

    Raises UserError as `model_folder`, and if a package is missing that transformers opens it with.
    """
    if missing := [each for each in ("gguf", "accelerate") if find_spec(each) is None]:
        raise UserError(f"{model} is a GGUF file: pip install {' '.join(missing)} to read it")
    if (file := Path(model)).is_file():
        return file.parent
    owner = model.removesuffix(f"/{name}")
    if file.parent.is_dir() or not HUB_NAME.fullmatch(owner):
        raise UserError(f"there is no such file: {model!r}")
    from huggingface_hub import hf_hub_download

    with hub_access(f"there is no file {model}, and {owner} cannot be read from the hub", "name a file"):
        return Path(hf_hub_download(owner, name)).parent


def read_config(folder: Path) -> dict[str, Any]:
    """config.json in `folder`, checked by its schema.

    Raises UserError if the file is missing or faulty, and if it would make transformers run code or read
    files from outside of the folder.
    """
    file = folder / CONFIG_FILE
    if not file.exists():
        raise UserError(f"{folder} holds no {CONFIG_FILE}{_instead(folder)}")
    config = read_json(file)
    check_schema(ModelConfig, config, str(file))
    # Qwen2 has an entry that says whether the window counts
    if config.get("sliding_window") == 0 and config.get("use_sliding_window") is not False:
        raise UserError(f"{file}: sliding_window must be at least 1, got 0: copy the file again")
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types is not None and layers is not None and len(types) != layers:
        raise UserError(
            f"{file}: layer_types must have a value for each of the {layers} layers of num_hidden_layers, "
            f"got {len(types)}: copy the file again"
        )
    if isinstance(text := config.get("text_config"), dict):  # of a model that reads more than text
        check_schema(ModelConfig, {"model_type": "", **text}, f"{file}: text_config")
    for key in ("rope_parameters", "rope_scaling"):
        # Gemma 3 and others have one set of entries for each kind of layer
        if not any(isinstance(value, dict) for value in (config.get(key) or {}).values()):
            check_schema(RopeOfModel, {key: config.get(key)}, str(file))
    for name, value in config.items():
        # transformers downloads a kernel whose name has a slash, and runs its code
        if name.endswith("attn_implementation") and isinstance(value, str) and not value.isidentifier():
            raise UserError(
                f"{file}: {name} is {shortened(value)}, the name of code on the hub, which drot does not "
                "run: remove the entry"
            )
    # in a checkpoint that drot wrote, the entry names no file, so that no other program opens it
    if (named := config.get("transformers_weights")) is not None and config["model_type"] != "drot":
        raise UserError(
            f"{file}: transformers_weights is {shortened(named)}; drot reads weights only from "
            f"{WEIGHTS_FILE} or the files of {INDEX}: rename the file and remove the entry"
        )
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder} holds an adapter next to a model, which transformers would load too: move {ADAPTER} "
            "out of the folder, or merge the adapter with peft"
        )
    return config


def _instead(folder: Path) -> str:
    """What a folder without config.json holds, and what to do."""
    if (folder / ADAPTER).exists():
        entries = read_json(folder / ADAPTER)
        base = entries.get("base_model_name_or_path") if isinstance(entries, dict) else None
        of = f" of {shortened(base)}" if isinstance(base, str) else ""
        if (folder / MANIFEST).exists():
            return (
                f" but {ADAPTER}, so it is an adapter (LoRA){of} that drot trained, and the two together are "
                "not sparse: repeat drot finetune without --keep-adapter, and name the folder that it writes"
            )
        return (
            f" but {ADAPTER}, so it is an adapter (LoRA){of}: merge it into its model with peft's "
            "merge_and_unload, save that model, and name its folder"
        )
    if files := sorted(folder.glob(f"*{GGUF}")):
        return _how_to_name(files[0])
    return ": name the folder of a model"


def _how_to_name(file: Path) -> str:
    """That a folder holds no more than a GGUF file, and what to do."""
    return f" but a GGUF file: add --gguf-file {file.name} to drot prune, or name {file}"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with the weights of the model in `folder`, in the order of their names.

    Raises UserError if there are none, if one is missing, and if one lies outside of the folder: by its name
    in the index, or by a link. A link into the cache of the hub is allowed in a folder of that cache.
    """
    if (folder / WEIGHTS_FILE).exists():
        names = [WEIGHTS_FILE]
    elif (folder / INDEX).exists():
        names = _files_of(folder / INDEX)
    elif files := sorted(folder.glob(f"*{GGUF}")):
        raise UserError(f"{folder} holds no {WEIGHTS_FILE}{_how_to_name(files[0])}")
    elif pickles := sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
        raise UserError(
            f"{folder} holds no {WEIGHTS_FILE}, but {pickles[0]}, a pickle, which can run code when it is "
            "opened: drot does not open it; save the model with safetensors"
        )
    else:
        raise UserError(
            f"{folder} holds no {WEIGHTS_FILE} and no {INDEX}: name a folder or a model on the hub with "
            "weights in safetensors"
        )
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append((folder.resolve().parents[1] / "blobs").resolve())
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "is missing"
            raise UserError(f"{file} {what}: copy the model again")
        if not any(file.resolve().is_relative_to(root) for root in allowed):
            raise UserError(
                f"{file} is a link to {file.resolve()}, outside of the folder of the model: copy the file "
                "into the folder"
            )
    return files


def _files_of(index: Path) -> list[str]:
    """The names of the files in an index of weights."""
    content = read_json(index)
    check_schema(WeightIndex, content, str(index))
    return sorted(set(content["weight_map"].values()))


def read_headers(files: Iterable[str | os.PathLike[str]]) -> dict[str, Header]:
    """Tensor → its header in the safetensors `files`. Raises UserError for a file that is not complete."""
    found: dict[str, Header] = {}
    for file in files:
        try:
            # for "pt" the file would be mapped as writable, which counts as memory of the process
            with safe_open(file, framework="np") as handle:  # it checks the file
                names = handle.keys()
            path = Path(file)
            tensors = tensors_of(header_bytes(path), path, path.stat().st_size)
            found |= {name: tensors[name] for name in names}
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is not a complete safetensors file ({quoted(error)}): copy it again"
            ) from None
    return found


def shapes_of(headers: Mapping[str, Header]) -> dict[str, list[int]]:
    """The shapes of tensors by their names."""
    return {name: header.shape for name, header in headers.items()}


def header_bytes(file: Path) -> bytes:
    """The first bytes of a safetensors file, up to the first tensor."""
    with file.open("rb") as handle:
        start = handle.read(8)
        return start + handle.read(struct.unpack("<Q", start)[0])


def tensors_of(header: bytes, file: Path, size: int) -> dict[str, Header]:
    """Name → header of each tensor of a `file` that begins with the bytes `header`.

    Raises ValueError, LookupError, TypeError, AttributeError or RecursionError for the header of another file
    than of one of `size` bytes.
    """
    entries = json.loads(header[8:])
    entries.pop("__metadata__", None)
    places = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
    end = 0
    for first, last in places:
        if first != end or last < first:
            raise ValueError(f"a tensor begins at byte {first}, where {end} was expected")
        end = last
    if len(header) + end != size:
        raise ValueError(f"the tensors end at byte {len(header) + end} of {size}")
    return {
        name: Header(file, entry["shape"], entry["dtype"], len(header) + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def prediction_layers(config: Any, names: Iterable[str]) -> set[str]:
    """Those of `names` that are of layers for multi-token prediction, behind or beside the decoder layers.

    transformers does not load them with the model.
    """
    names = set(names)
    beside = {name for name in names if name.startswith(PREDICTION_PREFIXES)}
    first = getattr(config, "num_hidden_layers", None)
    count = getattr(config, PREDICTION_LAYERS[0], None)
    if not isinstance(first, int) or not isinstance(count, int):
        return beside
    behind = range(first, first + count)
    return beside | {
        name for name in names if (match := LAYER_NUMBER.search(name)) and int(match[1]) in behind
    }


def check_layers(config: Any, headers: dict[str, Header], folder: Path) -> None:
    """Raises UserError unless the weights hold the layers of a model of `config`.

    This is checked before the model is built, which takes minutes with 10⁹ layers. Models of families that
    drot does not prune may have layers of other kinds too. They are refused only if there are fewer tensors
    than layers.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    numbers = [int(match[1]) for name in headers if (match := LAYER_NUMBER.search(name))]
    held = max(numbers, default=-1) + 1
    if layers > len(headers) or (config.model_type in FAMILIES and layers != held):
        raise UserError(
            f"{folder}: num_hidden_layers of {CONFIG_FILE} is {layers}, but the weights hold {held} layers: "
            f"{CONFIG_FILE} was edited or is of another model; copy it again"
        )


def stored_state(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model by their names in published files, which may hold each expert by itself.

    Of a model that drot cannot prune, they are the names under which transformers would save them. These are
    others than the published ones for a dense layer of Kimi Linear.
    """
    from transformers.core_model_loading import revert_weight_conversion

    from drot.model.decoder import DecoderModel  # imports transformers
    from drot.model.stored import stored_tensors

    if model.config.model_type not in FAMILIES:
        found: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
        return found
    decoder = DecoderModel(model)
    family, state = decoder.family, model.state_dict()
    inside = f"{family.layers}."
    found = {family.in_files(name): each for name, each in state.items() if not name.startswith(inside)}
    for layer in decoder.layers:
        found |= stored_tensors(layer)
    return found


def check_headers(model: Any, headers: dict[str, Header], dtypes: Iterable[str]) -> None:
    """Checks `headers` against the tensors of an empty model, whose weights may be of `dtypes`.

    Raises UserError that names the first tensor with another shape or dtype, with both shapes, and the first
    that is missing. A missing tensor outside of the base model is no error: lm_head may be tied to the
    embedding, and any other head may not be trained yet. transformers itself would initialise some of these
    tensors at random and cast others.
    """
    own = prefix = f"{model.base_model_prefix}."
    if model.config.model_type in FAMILIES:
        prefix = FAMILIES[model.config.model_type].in_files(prefix)
    own_names = {name for name in model.state_dict() if name.startswith(own)}
    without_head = not any(name.startswith(prefix) for name in headers)  # a saved base model has no prefix
    for key, tensor in stored_state(model).items():
        header = headers.get(key.removeprefix(prefix) if without_head else key)
        if header is None and not key.startswith(prefix):
            continue
        if header is None and prefix != own and (named := headers.keys() & own_names):
            raise UserError(
                f"the tensors have other names than published, as {min(named)}, and {key} is missing: open "
                "the model with transformers and save it again"
            )
        if header is None:
            raise UserError(f"{key} is missing from the checkpoint: convert or copy the checkpoint again")
        if header.shape != list(tensor.shape):
            raise UserError(
                f"{key} must be {list(tensor.shape)} by the model's config, got {header.shape} in "
                f"{header.file.name}: convert or copy the checkpoint again"
            )
        kinds = ("U8",) if tensor.dtype == torch.uint8 else tuple(dtypes)
        if header.dtype not in kinds:
            raise UserError(
                f"{key} must be of dtype {' or '.join(kinds)}, got {header.dtype}: "
                "convert or copy the checkpoint again"
            )
