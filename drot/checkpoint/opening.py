"""The first look at a model that is opened: its config, the headers of its files, and what is refused."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drot.checkpoint.quantised import dense_headers, formats_of
from drot.checkpoint.quantization_config import (
    STORED_DTYPES,
    drot_config_of,
    expect_stored,
    reads_quantised,
)
from drot.checkpoint.source import (
    DENSE_DTYPES,
    PREDICTION_LAYERS,
    PREDICTION_PREFIXES,
    Header,
    check_headers,
    check_layers,
    gguf_file,
    model_folder,
    prediction_layers,
    read_config,
    read_headers,
    shapes_of,
    stored_state,
    weight_files,
)
from drot.checkpoint.stored_config import MODEL_TYPE, StoredConfig, keep_bound_of_scores, restored
from drot.core.checks import counted, is_a, shortened
from drot.core.errors import UserError, quoted
from drot.core.reading import leaves
from drot.machine.finite import is_finite
from drot.model.dtypes import stored_dtype
from drot.model.families import FAMILIES
from drot.model.multimodal import MULTIMODAL, StoredNames, experts_in_files, language_config, stored_names
from drot.model.schema import MOST_LAYERS
from drot.model.stored import follow_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("drot")

#: the start of a message, which takes the name of a model
NO_MODEL = "cannot load a causal language model from {!r} (a hub name or a local folder)"


def load_config(path: str | Path) -> Any:
    """The config of the model at `path`, a hub name or a folder. Raises UserError if there is none.

    Of a model that reads images too, and whose language model drot prunes, it is that of the language model.
    Of a model that drot makes dense while it reads it, it is that of the dense model.
    """
    config = language_config(load_outer_config(path))
    if reads_quantised(config):
        del config.quantization_config
    return config


def load_outer_config(path: str | Path) -> Any:
    """The config of the model at `path`, also of one that reads images too. Raises as `load_config`."""
    is_a("model", path, str, Path)
    from transformers import AutoConfig, PreTrainedConfig

    folder, gguf = model_folder(path), gguf_file(path)
    entries = read_config(folder) if gguf is None else {}
    with silent_transformers(NO_MODEL.format(str(path)), entries):
        config: Any
        if entries.get("model_type") == MODEL_TYPE:
            # not by AutoConfig, from which drot's plugin for vLLM takes the families that it does not serve
            config = StoredConfig.from_pretrained(folder, name_or_path=str(folder))
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)
            keep_bound_of_scores(config)
        drot_config_of(config)  # checks the quantization_config of a checkpoint that drot wrote
        text = config.get_text_config()
        if not isinstance(text, PreTrainedConfig):
            raise UserError(
                f"{folder}/config.json: text_config must be the config of a model, got {shortened(text)}"
            )
        layers = getattr(text, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
        raise UserError(f"{folder}/config.json: a model must have at most {MOST_LAYERS} layers, got {layers}")
    return config


def checked_headers(path: str | Path, config: Any, folder: Path) -> dict[str, Header]:
    """Tensor → its header in the files of the model in `folder`, which are checked against its `config`.

    Raises UserError as `load_model` does. `empty_model` checks the single tensors, or transformers, when it
    loads a model that drot cannot prune.
    """
    headers = read_headers(weight_files(folder))
    if config.model_type in FAMILIES:
        headers = dense_headers(headers, folder)
    for format in formats_of(headers):
        logger.warning("%s is in %s: drot makes its weights dense while it reads them", path, format)
    unread = {name for name in headers if name.startswith(PREDICTION_PREFIXES)}
    if (names := names_in_files(folder, config.model_type)) is not None:
        headers = {own: each for name, each in headers.items() if (own := names.own(name)) is not None}
    unread |= prediction_layers(config, headers)
    headers = {name: header for name, header in headers.items() if name not in unread}
    if unread:
        logger.warning(
            "%s holds %d tensors for multi-token prediction: transformers does not load them, and drot saves "
            "the model without them",
            path, len(unread),
        )  # fmt: skip
    check_layers(config, headers, folder)
    return headers


def empty_model(
    path: str | Path, config: Any, folder: Path, headers: dict[str, Header], dtype: torch.dtype | None
) -> Any:
    """A model of `config` and `dtype` on the device `meta`, of a family that drot prunes.

    It holds the rotations and packed linears of a checkpoint that drot wrote. Raises UserError, as
    `load_model` does, if it has other tensors than the files in `folder`, of which `headers` are
    (`checked_headers`).
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    # transformers loads some tensors in fp32, such as the bias of a router; some versions build it in `dtype`
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if stored_dtype(model, name, model.dtype) != model.dtype:
            tensor.data = tensor.data.float()
    follow_files(model, shapes_of(headers), experts_in_files(multimodal_type(folder)))
    dtypes: Iterable[str] = DENSE_DTYPES
    if (held := drot_config_of(config)) is not None:
        expect_stored(model, held)
        dtypes = STORED_DTYPES
    check_headers(model, headers, dtypes)
    refuse_superfluous(path, model, headers.keys() - stored_state(model).keys())
    return model


def multimodal_type(folder: Path) -> str | None:
    """The type of the model in `folder` if it reads images too and drot prunes its language model."""
    model_type = restored(read_config(folder))["model_type"]
    return model_type if model_type in MULTIMODAL else None


def refuse_multimodal(path: str | Path, instead: str) -> None:
    """Raises UserError for a model that reads images too. instead: what the user can do."""
    if gguf_file(path) is None and multimodal_type(model_folder(path)) is not None:
        raise UserError(
            f"{path} is a model that reads images too, which drot prunes and evaluates: {instead}"
        )


def names_in_files(folder: Path, model_type: str) -> StoredNames | None:
    """How the files in `folder` name the tensors of a language model; None if they hold no more than it.

    model_type: of the language model. Raises UserError as `stored_names`.
    """
    if multimodal_type(folder) is None or model_type not in FAMILIES:
        return None
    return stored_names(read_headers(weight_files(folder)), model_type)


def refuse_missing(path: str | Path, model: "PreTrainedModel", names: Iterable[str]) -> None:
    """Raises UserError if there are `names`, of tensors that the files of `model` lack."""
    if missing := sorted(names):
        raise UserError(
            f"{path} lacks {counted(len(missing), 'tensor')} of a {type(model).__name__}, the first is "
            f"{missing[0]}: the checkpoint is incomplete or of another architecture; copy it again"
        )


def drop_prediction_layers(config: Any) -> None:
    """Makes the config of a loaded model say that it has no layers for multi-token prediction."""
    for entry in PREDICTION_LAYERS:
        if getattr(config, entry, 0):
            setattr(config, entry, 0)


def refuse_superfluous(path: str | Path, model: Any, names: Iterable[str]) -> None:
    """Raises UserError if one of `names`, of tensors that `model` does not have, is of a decoder layer.

    Some models name tensors that their published files hold and they do not read: Gemma 4 E2B those of the
    keys and values that its last layers borrow.
    """
    # old checkpoints hold RoPE's frequencies, inv_freq, which transformers computes
    unread = [r"\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]
    of_layers = (name for name in names if ".layers." in name or ".h." in name)
    if unused := sorted(name for name in of_layers if not any(re.search(one, name) for one in unread)):
        raise UserError(
            f"{path} holds {counted(len(unused), 'tensor')} that a model of its config.json does not have, "
            f"the first is {unused[0]}: config.json was edited or is of another model; copy it again"
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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings. A verbosity that the user has chosen stays."""
    from transformers.utils import logging as its_logging

    before = its_logging.get_verbosity()
    if before == logging.WARNING:  # the default
        its_logging.set_verbosity_error()
    try:
        yield
    finally:
        its_logging.set_verbosity(before)


@contextlib.contextmanager
def silent_transformers(problem: str, entries: dict[str, Any] | None = None) -> Iterator[None]:
    """As `quiet_transformers`, and turns any exception into a UserError of one line.

    The line is `problem` and the message of the exception. A UserError of drot's own quantizer and an
    OutOfMemoryError pass unchanged.

    entries: the entries of config.json. If one of them is the key of a KeyError, the line names it.
    """
    try:
        with quiet_transformers():
            yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a faulty config.json makes transformers raise exceptions of many classes
        reason = quoted(error)
        if "trust_remote_code" in str(error):  # transformers advises to let the code run
            reason = "it brings its own code, which drot never runs: name a model that transformers has"
        if isinstance(error, KeyError) and error.args:
            named = [name for name, value in leaves(entries or {}) if value == error.args[0]]
            if named:
                reason = f"config.json: {named[0]} is {error.args[0]!r}, which transformers does not have"
        raise UserError(f"{problem}: {reason}") from error
