"""Opening of models: checkpoints that drot wrote and any other causal language model."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from drot.checkpoint.integrity import is_loaded, verified_while_loading
from drot.checkpoint.keep import keep_files
from drot.devices import parse_dtype, pick_device
from drot.errors import UserError
from drot.sparse.fused import fuse
from drot.sparse.linear import is_packed
from drot.sparse.packed import compress_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("drot")


def load(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    compress: bool = False,
    verify: bool = True,
) -> "PreTrainedModel":
    """The model at `path`, which drot saved or any other, on `device` and in eval mode.

    A packed model is fused (drot/sparse/fused.py). Raises UserError as `load_model` does.

    path: a name on the Hugging Face hub or a local folder.
    device: `auto`, `cpu` or `cuda[:N]`.
    dtype: `auto`, the checkpoint's own, or `float32`, `bfloat16` or `float16`.
    compress: whether a GPU keeps the compressed form of packed weights beside the packed form. Products of
        many tokens (prefill, perplexity) are then faster, and the weights take about twice the memory.
    verify: whether to compare the weights and config.json of a folder with their hashes in drot.json.
    """
    target = pick_device(device)
    model = load_model(path, dtype, verify=verify)
    if is_packed(model):
        fuse(model)
    model = model.to(target)  # type: ignore[arg-type]
    if compress:
        compress_model(model)
    return model


def load_config(path: str | Path) -> Any:
    """The config of the model at `path`, a hub name or a folder. Raises UserError if there is none."""
    from transformers import AutoConfig

    with _one_line(f"cannot load a causal language model from {str(path)!r} (a hub name or a local folder)"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def load_model(
    path: str | Path, dtype: str | torch.dtype = "auto", *, verify: bool = True
) -> "PreTrainedModel":
    """The causal language model at `path`, a hub name or a folder, on the CPU and in eval mode.

    Raises UserError if there is no such model or dtype, or if the files of the model are truncated, lack a
    tensor or hold a tensor of a layer that the model does not have. transformers itself would initialise a
    missing tensor at random and ignore a superfluous one. With `verify`, raises UserError too if the weights
    or config.json of a folder differ from their hashes in drot.json (drot/checkpoint/integrity.py).
    """
    with verified_while_loading(path) if verify else contextlib.nullcontext():
        return _load_model(path, dtype)


def _load_model(path: str | Path, dtype: str | torch.dtype) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    if isinstance(dtype, str) and dtype != "auto":
        dtype = parse_dtype(dtype)
    with _one_line(f"cannot load a causal language model from {str(path)!r} (a hub name or a local folder)"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{path} lacks {len(missing)} tensors of a {type(model).__name__}, the first is {missing[0]}: "
            "the checkpoint is incomplete or of another architecture; copy it again"
        )
    unused = sorted(key for key in report["unexpected_keys"] if ".layers." in key)
    # old checkpoints hold RoPE's frequencies, inv_freq, which transformers computes
    if unused := [key for key in unused if not key.endswith(".inv_freq")]:
        raise UserError(
            f"{path} holds {len(unused)} tensors that a model of its config.json does not have, the first is "
            f"{unused[0]}: config.json was edited or is of another model; copy it again"
        )
    keep_files(model, path)
    return model.eval().requires_grad_(False)


def has_tokenizer(path: str | Path) -> bool:
    """Whether `path` has a tokenizer: True for a hub name, and for a folder that holds a tokenizer's files.

    Without such files, transformers returns a tokenizer that does not belong to the model.
    """
    return not Path(path).is_dir() or any(Path(path).glob("*token*")) or any(Path(path).glob("vocab*"))


def wider_dtypes(folder: str | Path, dtype: torch.dtype) -> list[str]:
    """The floating-point dtypes in a folder's safetensors files that `dtype` cannot represent exactly.

    The dtypes have the names of the safetensors format, as in `F32`.
    """
    found = set()
    for file in filter(lambda file: is_loaded(file.name), Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            found |= {handle.get_slice(key).get_dtype() for key in handle.keys()}  # noqa: SIM118
    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return sorted(name for name in found & known.keys() if torch.promote_types(known[name], dtype) != dtype)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of the model at `path`, a hub name or a folder. Raises UserError if there is none."""
    from transformers import AutoTokenizer

    with _one_line(f"cannot load a tokenizer from {str(path)!r}"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


@contextlib.contextmanager
def _one_line(problem: str) -> Iterator[None]:
    """Turns any exception of transformers or safetensors into a UserError of one line.

    The line is `problem` and the first line of the exception. A UserError of drot's own quantizer and an
    OutOfMemoryError pass unchanged.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a faulty config.json makes transformers raise exceptions of many classes
        lines = str(error).strip().splitlines()
        raise UserError(f"{problem}: {lines[0] if lines else type(error).__name__}") from error


def check_files(model: "PreTrainedModel", files: Sequence[str]) -> None:
    """Checks the headers of safetensors `files` against the tensors of an empty model without its head.

    Raises UserError that names the file or the tensor, for a truncated file, a missing tensor, or a wrong
    shape or dtype. transformers itself would initialise some of these tensors at random and cast others.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118
                    tensor = handle.get_slice(key)
                    found[key] = tensor.get_shape(), tensor.get_dtype()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a complete safetensors file ({error}): copy it again") from None
    for key, tensor in model.state_dict().items():
        if not key.startswith(f"{model.base_model_prefix}."):
            continue  # lm_head may be tied to the embedding, and any other head may not be trained yet
        if key not in found:
            raise UserError(f"{key} is missing from the checkpoint: convert or copy the checkpoint again")
        shape, dtype = found[key]
        if shape != list(tensor.shape):
            raise UserError(
                f"{key} must be {list(tensor.shape)} by the model's config, got {shape}: "
                "convert or copy the checkpoint again"
            )
        kinds = ("U8",) if tensor.dtype == torch.uint8 else ("BF16", "F16", "F32")
        if dtype not in kinds:
            raise UserError(
                f"{key} must be of dtype {' or '.join(kinds)}, got {dtype}: "
                "convert or copy the checkpoint again"
            )
