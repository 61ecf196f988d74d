"""Tuning ahead of time: which algorithm a GPU takes for the products of a packed checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from drot._C import tuning_cache_file
from drot.checkpoint.load import load
from drot.checkpoint.opening import load_config
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.evaluation.cases import LARGEST_TOKENS, check_positions, check_sizes, within_positions
from drot.machine.devices import is_gpu, pick_device
from drot.machine.environment import machine_name
from drot.sparse.linear import is_packed
from drot.sparse.packed import compress_model

#: The numbers of tokens that are tuned by default, for a model with learned positions at most their number.
#: Numbers up to the same power of two share a choice, and up to 16 tokens there is one algorithm alone.
TUNED_TOKENS = tuple(2**power for power in range(5, 14))
#: the start of the keys of products in the tuning cache, csrc/ops/cuda/sparse24_linear.cu
PRODUCT = "sparse24_linear of drot "


@torch.no_grad()
def tune(
    model: str | Path,
    *,
    tokens: Sequence[int] | None = None,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Runs the packed checkpoint `model` once for each number of tokens, so that its products are measured.

    Returns, in plain JSON types, model and machine, and
    products: the measured products, each with its algorithm, as the tuning cache has gained them. Products
        that it held before are not measured again, and neither are those with one algorithm.
    tuning_cache: the file of the cache; None where nothing is kept, or on a CPU.

    A CPU has one algorithm for each product, so that there is nothing to choose, and the model is not loaded.
    Raises UserError as `drot.load` does, for a checkpoint that is not packed, for numbers of tokens that mean
    nothing or are more than the model has learned positions, and if the tuning cache cannot be kept.

    tokens: tokens of the products. Each stands for all numbers up to the next power of two. None is
        TUNED_TOKENS, `within_positions`.
    """
    check_sizes("tokens", tokens, LARGEST_TOKENS)
    target = pick_device(device)
    result: dict[str, Any] = {
        "model": str(model),
        "machine": machine_name(target),
        "products": {},
        "tuning_cache": None,
    }
    if not is_gpu(target):
        return result
    file = tuning_cache_file()
    if not file:
        raise UserError("the tuning cache has no folder: name one in DROT_CACHE")
    config = load_config(model)
    tokens = within_positions(TUNED_TOKENS, config) if tokens is None else tokens
    check_positions(tokens, config)
    loaded: Any = load(model, device=target, dtype=dtype)
    if not is_packed(loaded):
        raise UserError(f'{model} is not packed: write it with `format="packed"`, or with drot convert')
    before = _products(file)
    compress_model(loaded)
    for number, size in enumerate(tokens, 1):
        ids = torch.randint(loaded.config.vocab_size, (1, size), device=loaded.device)
        loaded(ids, use_cache=False, logits_to_keep=1)
        progress(ProgressEvent(phase="measure", step=number, steps=len(tokens)))
    gained = {key: choice for key, choice in _products(file).items() if before.get(key) != choice}
    return result | {"products": gained, "tuning_cache": file}


def _products(file: str) -> dict[str, str]:
    """Product → its algorithm, of the lines of the tuning cache that are those of products."""
    if not Path(file).is_file():
        return {}
    lines = (line.partition("\t") for line in Path(file).read_text(encoding="utf-8").splitlines())
    return {key: choice for key, _, choice in lines if key.startswith(PRODUCT)}
