"""Opening of models: checkpoints that drot wrote and any other causal language model."""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drot.checkpoint.integrity import is_loaded, verified_while_loading
from drot.checkpoint.offload import load_by_layers
from drot.checkpoint.opening import (
    NO_MODEL,
    checked_headers,
    drop_prediction_layers,
    empty_model,
    load_config,
    multimodal_type,
    names_in_files,
    refuse_missing,
    refuse_not_finite,
    refuse_superfluous,
    silent_transformers,
)
from drot.checkpoint.quantised import dense_headers, is_quantised
from drot.checkpoint.quantization_config import quantization_config_of
from drot.checkpoint.source import (
    DENSE_DTYPES,
    gguf_file,
    model_folder,
    prediction_layers,
    read_headers,
    stored_state,
)
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.machine.devices import dtype_name, is_gpu, parse_dtype, pick_device
from drot.model.families import FAMILIES
from drot.sparse.linear import compresses, is_packed, packed_linears
from drot.sparse.packed import compress_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("drot")


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
        unless the environment has DROT_COMPRESS=0. On a CPU there is no such form, and the value has no
        effect.
    verify: whether to compare the weights and config.json with their hashes in drot.json.
    """
    is_a("compress", compress, bool, or_none=True)
    target = pick_device(device)
    model = load_model(path, dtype, verify=verify)
    packed = is_packed(model)
    model = model.to(target)  # type: ignore[arg-type]
    if packed and (compresses() if compress is None else compress):
        compress_model(model)
    elif packed and is_gpu(target):
        logger.warning(
            "%s is loaded without compressed weights: products of many tokens unpack the weight at each "
            "call, which is slower than a dense model", path,
        )  # fmt: skip
    return model


def load_model(
    path: str | Path, dtype: str | torch.dtype = "auto", *, verify: bool = True
) -> "PreTrainedModel":
    """The causal language model at `path`, a hub name or a folder, on the CPU and in eval mode.

    `path` may also name a GGUF file, as in FOLDER/NAME.gguf, whose weights transformers makes dense.

    Weights in FP8 and MXFP4 are made dense too, of the families that drot prunes.

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
    is_a("verify", verify, bool)
    if dtype != "auto":
        dtype = parse_dtype(dtype)
    config = load_config(path)
    from transformers import AutoModelForCausalLM

    from drot.checkpoint.hf_model import keep_files  # it imports transformers too

    folder, gguf = model_folder(path, weights=True), gguf_file(path)
    quantised = config.model_type in FAMILIES and gguf is None and is_quantised(folder)
    if quantised or (gguf is None and multimodal_type(folder) is not None):
        model = load_by_layers(path, dtype, verify=verify)
        keep_files(model, folder)
        return model
    headers = checked_headers(path, config, folder) if gguf is None else {}
    verified = verified_while_loading(folder) if verify and gguf is None else contextlib.nullcontext()
    with verified, silent_transformers(NO_MODEL.format(str(path)), config.to_dict()):
        if gguf is None and config.model_type in FAMILIES and not quantization_config_of(config):
            empty_model(path, config, folder, headers, config.dtype)  # else DrotQuantizer checks the tensors
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=None if gguf else config,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
            gguf_file=gguf,
        )
    model, report = loaded
    refuse_missing(path, model, report["missing_keys"])
    unexpected = set(report["unexpected_keys"])
    refuse_superfluous(path, model, unexpected - prediction_layers(config, unexpected))
    drop_prediction_layers(model.config)
    for name, tensor in model.state_dict().items():
        refuse_not_finite(path, name, tensor)
    for _, linear in packed_linears(model):
        linear.drop_compressed()  # the callers decide when the weights lie on a GPU
    if gguf is None:
        keep_files(model, folder)
    else:  # its weights are dense from here on, and transformers saves no model with the quantizer of GGUF
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model.eval().requires_grad_(False)


#: files of which most tokenizers have one
VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
#: tokens that a tokenizer without such a file has at least: the bytes
BYTES = 256


def has_tokenizer(path: str | Path) -> bool:
    """Whether `path` has a tokenizer: True for a hub name, and for a folder that holds a tokenizer's files.

    Without such files, transformers returns a tokenizer that does not belong to the model.
    """
    return not Path(path).is_dir() or any(Path(path).glob("*token*")) or any(Path(path).glob("vocab*"))


def warn_of_rounding(folder: str | Path, model: "PreTrainedModel") -> None:
    """Logs a warning if the files in `folder` hold numbers that `model` has in a dtype that rounds them.

    model: of these files. A tensor of another name than theirs counts as one in the dtype of the model, but
        not those with which a model reads images, which are copied.
    """
    names = names_in_files(Path(folder), model.config.model_type)
    files = [file for file in Path(folder).glob("*.safetensors") if is_loaded(file.name)]
    held = {name: tensor.dtype for name, tensor in stored_state(model).items()}
    found = set()
    for name, header in dense_headers(read_headers(files), Path(folder)).items():
        own = name if names is None else names.own(name)
        if own is None:
            continue
        dtype = held.get(own, model.dtype)
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

    folder, gguf = model_folder(path), gguf_file(path)
    lost = gguf is None and not any(any(folder.glob(name)) for name in VOCABULARIES)
    hint = ", which has no tokenizer.json: copy that of its base model into it" if lost else ""
    problem = f"cannot load a tokenizer from {str(path)!r}{hint}"
    with silent_transformers(problem):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf)
    if lost and len(tokenizer) < BYTES:  # of some classes, transformers makes an empty tokenizer
        raise UserError(problem)
    return tokenizer
