"""Opening of models: checkpoints that drot wrote and any other causal language model."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drot.checkpoint.integrity import is_loaded, verified_while_loading
from drot.checkpoint.quantization_config import boundary_of, quantization_config_of
from drot.checkpoint.source import (
    DENSE_DTYPES,
    PREDICTION_LAYERS,
    Header,
    check_headers,
    check_layers,
    gguf_file,
    model_folder,
    prediction_layers,
    read_config,
    read_headers,
    stored_state,
    weight_files,
)
from drot.checkpoint.stored_config import restored
from drot.core.checks import is_a, shortened
from drot.core.errors import UserError, quoted
from drot.machine.devices import dtype_name, is_gpu, parse_dtype, pick_device
from drot.machine.finite import is_finite
from drot.model.families import FAMILIES
from drot.model.schema import MOST_LAYERS
from drot.model.whole import WHOLE_MODELS, StoredNames, language_config, stored_names
from drot.sparse.linear import is_packed, packed_linears
from drot.sparse.packed import compress_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("drot")

#: the start of a message, which takes the name of a model
NO_MODEL = "cannot load a causal language model from {!r} (a hub name or a local folder)"
#: what it means that a GPU keeps no compressed form
UNCOMPRESSED = "products of many tokens unpack the weight at each call, which is slower than a dense model"


def load(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    compress: bool | None = None,
    verify: bool = True,
) -> "PreTrainedModel":
    """The model at `path`, which drot saved or any other, on `device` and in eval mode.

    Raises UserError as `load_model` does.

    path: a name on the Hugging Face hub or a local folder.
    device: `auto`, `cpu` or `cuda[:N]`.
    dtype: `auto`, the checkpoint's own, or `float32`, `bfloat16` or `float16`.
    compress: whether a GPU keeps the compressed form of packed weights, cuSPARSELt's own, beside the packed
        form. Without it, a product of many tokens (prefill, perplexity) unpacks the weight at each call and
        is slower than a dense product; with it, the packed weights take about twice the memory. None is True
        on a GPU. On a CPU there is no such form, and the value has no effect.
    verify: whether to compare the weights and config.json with their hashes in drot.json.
    """
    is_a("device", device, str, torch.device)
    target = pick_device(device)
    model = load_model(path, dtype, verify=verify)
    packed = is_packed(model)
    model = model.to(target)  # type: ignore[arg-type]
    if packed and compress is not False:
        compress_model(model)
    elif packed and is_gpu(target):
        logger.warning("%s is loaded without compressed weights: %s", path, UNCOMPRESSED)
    return model


def load_config(path: str | Path) -> Any:
    """The config of the model at `path`, a hub name or a folder. Raises UserError if there is none.

    Of a model that reads images too, and whose language model drot prunes, it is that of the language model.
    """
    return language_config(load_whole_config(path))


def load_whole_config(path: str | Path) -> Any:
    """The config of the model at `path`, also of one that reads images too. Raises as `load_config`."""
    is_a("model", path, str, Path)
    from transformers import AutoConfig, PreTrainedConfig

    folder, gguf = model_folder(path), gguf_file(path)
    entries = read_config(folder) if gguf is None else {}
    with silent_transformers(NO_MODEL.format(str(path)), entries):
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)
        boundary_of(config)  # checks the quantization_config of a checkpoint that drot wrote
        text = config.get_text_config()
        if not isinstance(text, PreTrainedConfig):
            raise UserError(
                f"{folder}/config.json: text_config must be the config of a model, got {shortened(text)}"
            )
        layers = getattr(text, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
        raise UserError(f"{folder}/config.json: a model must have at most {MOST_LAYERS} layers, got {layers}")
    return config


def load_model(
    path: str | Path, dtype: str | torch.dtype = "auto", *, verify: bool = True
) -> "PreTrainedModel":
    """The causal language model at `path`, a hub name or a folder, on the CPU and in eval mode.

    `path` may also name a GGUF file, as in FOLDER/NAME.gguf, whose weights transformers makes dense.

    A packed model is fused (drot/sparse/fused.py). Code that the model brings along is not run, and neither
    are pickles.

    Raises UserError

    - if there is no such model or dtype,
    - if a file of the model is truncated or lies outside of its folder,
    - if the weights lack a tensor, where transformers would draw it at random, hold a tensor of a layer that
      the model does not have, or a tensor of another shape than config.json says,
    - for a weight that is NaN or infinite,
    - with `verify`, if the weights or config.json differ from their hashes in drot.json.
    """
    is_a("model", path, str, Path)
    is_a("dtype", dtype, str, torch.dtype)
    if dtype != "auto":
        dtype = parse_dtype(dtype)
    config = load_config(path)
    from transformers import AutoModelForCausalLM

    from drot.checkpoint.hf_model import keep_files  # it imports transformers too

    folder, gguf = model_folder(path, weights=True), gguf_file(path)
    if gguf is None:
        checked_headers(path, config, folder)
    if gguf is None and whole_type(folder) is not None:
        from drot.checkpoint.offload import load_whole  # it imports this module

        model = load_whole(path, dtype, verify=verify)
        keep_files(model, folder)
        return model
    verified = verified_while_loading(folder) if verify and gguf is None else contextlib.nullcontext()
    with verified, silent_transformers(NO_MODEL.format(str(path)), config.to_dict()):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
            gguf_file=gguf,
        )
    model, report = loaded
    refuse_missing(path, model, report["missing_keys"])
    unexpected = set(report["unexpected_keys"])
    refuse_superfluous(path, unexpected - prediction_layers(config, unexpected))
    drop_prediction_layers(model.config)
    for name, tensor in model.state_dict().items():
        refuse_not_finite(path, name, tensor)
    for _, linear in packed_linears(model):
        linear.drop_compressed()  # the callers decide when the weights lie on a GPU
    if gguf is None:
        keep_files(model, folder)
    else:  # its weights are dense from here on, and transformers saves no model with the quantizer of GGUF
        model.hf_quantizer, model.is_quantized = None, False
    return model.eval().requires_grad_(False)


def checked_headers(path: str | Path, config: Any, folder: Path) -> dict[str, Header]:
    """Tensor → its header in the files of the model in `folder`, which are checked against its `config`.

    Raises UserError as `load_model` does. The tensors of a model that drot cannot prune are checked when
    transformers loads it.
    """
    from transformers import AutoModelForCausalLM

    headers = read_headers(weight_files(folder))
    if (names := names_in_files(folder, config.model_type)) is not None:
        headers = {own: each for name, each in headers.items() if (own := names.own(name)) is not None}
    unread = prediction_layers(config, headers)
    headers = {name: header for name, header in headers.items() if name not in unread}
    if unread:
        logger.warning(
            "%s holds %d tensors for multi-token prediction: transformers does not load them, and drot saves "
            "the model without them",
            path, len(unread),
        )  # fmt: skip
    check_layers(config, headers, folder)
    with silent_transformers(NO_MODEL.format(str(path)), config.to_dict()):
        if config.model_type in FAMILIES and not quantization_config_of(config):
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            check_headers(empty, headers)
            refuse_superfluous(path, headers.keys() - stored_state(empty).keys())
    return headers


def whole_type(folder: Path) -> str | None:
    """The type of the model in `folder` if it reads images too and drot prunes its language model."""
    model_type = restored(read_config(folder))["model_type"]
    return model_type if model_type in WHOLE_MODELS else None


def refuse_whole(path: str | Path, instead: str) -> None:
    """Raises UserError for a model that reads images too. instead: what the user can do."""
    if gguf_file(path) is None and whole_type(model_folder(path)) is not None:
        raise UserError(
            f"{path} is a model that reads images too, which drot prunes and evaluates: {instead}"
        )


def names_in_files(folder: Path, model_type: str) -> StoredNames | None:
    """How the files in `folder` name the tensors of a language model; None if they hold no more than it.

    model_type: of the language model. Raises UserError as `stored_names`.
    """
    if whole_type(folder) is None or model_type not in FAMILIES:
        return None
    return stored_names(read_headers(weight_files(folder)), model_type)


def refuse_missing(path: str | Path, model: "PreTrainedModel", names: Iterable[str]) -> None:
    """Raises UserError if there are `names`, of tensors that the files of `model` lack."""
    if missing := sorted(names):
        raise UserError(
            f"{path} lacks {len(missing)} tensors of a {type(model).__name__}, the first is {missing[0]}: "
            "the checkpoint is incomplete or of another architecture; copy it again"
        )


def drop_prediction_layers(config: Any) -> None:
    """Makes the config of a loaded model say that it has no layers for multi-token prediction."""
    if getattr(config, PREDICTION_LAYERS, 0):
        setattr(config, PREDICTION_LAYERS, 0)


def refuse_superfluous(path: str | Path, names: Any) -> None:
    """Raises UserError if one of `names`, of tensors that a model does not have, is of a decoder layer."""
    # old checkpoints hold RoPE's frequencies, inv_freq, which transformers computes
    if unused := sorted(name for name in names if ".layers." in name and not name.endswith(".inv_freq")):
        raise UserError(
            f"{path} holds {len(unused)} tensors that a model of its config.json does not have, the first is "
            f"{unused[0]}: config.json was edited or is of another model; copy it again"
        )


@torch.no_grad()
def refuse_not_finite(path: str | Path, name: str, tensor: torch.Tensor) -> None:
    """Raises UserError if the weight `name` holds NaN or infinity."""
    # a meta tensor is offloaded to disk
    if tensor.is_floating_point() and not tensor.is_meta and not is_finite(tensor):
        narrow = ', or choose another `dtype` than "float16"' if tensor.dtype == torch.float16 else ""
        raise UserError(
            f"{path}: {name} must hold finite numbers, got NaN or infinity: copy the model again{narrow}"
        )


def has_tokenizer(path: str | Path) -> bool:
    """Whether `path` has a tokenizer: True for a hub name, and for a folder that holds a tokenizer's files.

    Without such files, transformers returns a tokenizer that does not belong to the model.
    """
    return not Path(path).is_dir() or any(Path(path).glob("*token*")) or any(Path(path).glob("vocab*"))


def warn_of_rounding(folder: str | Path, model: "PreTrainedModel") -> None:
    """Logs a warning if the files in `folder` hold numbers that `model` has in a dtype that rounds them.

    model: of these files. A tensor of another name than theirs counts as one in the dtype of the model.
    """
    files = [file for file in Path(folder).glob("*.safetensors") if is_loaded(file.name)]
    held = {name: tensor.dtype for name, tensor in stored_state(model).items()}
    found = set()
    for name, header in read_headers(files).items():
        dtype = held.get(name, model.dtype)
        if header.dtype in DENSE_DTYPES and torch.promote_types(DENSE_DTYPES[header.dtype], dtype) != dtype:
            found.add(header.dtype)
    if found:
        logger.warning(
            "%s holds tensors of %s, but the dtype in its config.json is %s: they are rounded to %s",
            folder, ", ".join(sorted(found)), dtype_name(model.dtype), dtype_name(model.dtype),
        )  # fmt: skip


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of the model at `path`, a hub name or a folder. Raises UserError if there is none."""
    is_a("model", path, str, Path)
    if not has_tokenizer(path):
        raise UserError(f"{path} holds no tokenizer: copy the tokenizer's files of its base model into it")
    from transformers import AutoTokenizer

    folder = model_folder(path)
    with silent_transformers(f"cannot load a tokenizer from {str(path)!r}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf_file(path))


@contextlib.contextmanager
def silent_transformers(problem: str, entries: dict[str, Any] | None = None) -> Iterator[None]:
    """Silences transformers' warnings, and turns any exception into a UserError of one line.

    The line is `problem` and the message of the exception. A UserError of drot's own quantizer and an
    OutOfMemoryError pass unchanged. A verbosity that the user has chosen stays.

    entries: the entries of config.json. If one of them is the key of a KeyError, the line names it.
    """
    from transformers.utils import logging as its_logging

    before = its_logging.get_verbosity()
    if before == logging.WARNING:  # the default
        its_logging.set_verbosity_error()
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a faulty config.json makes transformers raise exceptions of many classes
        reason = quoted(error)
        if "trust_remote_code" in str(error):  # transformers advises to let the code run
            reason = "it brings its own code, which drot never runs: name a model that transformers has"
        if isinstance(error, KeyError) and error.args:
            named = [name for name, value in _leaves(entries or {}) if value == error.args[0]]
            if named:
                reason = f"config.json: {named[0]} is {error.args[0]!r}, which transformers does not have"
        raise UserError(f"{problem}: {reason}") from error
    finally:
        its_logging.set_verbosity(before)


def _leaves(entries: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of each entry, and of each entry of its objects."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value
