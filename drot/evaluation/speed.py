"""The measurements of `drot bench`: whether 2:4 is faster than dense, and what the rotation costs.

The three variants of variants.py run in turn in each case of cases.py.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from drot.checkpoint.load import load
from drot.checkpoint.quantization_config import dense_linears_of
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.version import __version__
from drot.evaluation.cases import Case, call_of, rows_of, set_compressed
from drot.evaluation.timing import interleaved
from drot.evaluation.variants import SPARSE, layer_variants, model_variants, shape_config
from drot.machine.devices import dtype_name, is_gpu, parse_dtype, pick_device
from drot.machine.environment import machine_name
from drot.sparse.linear import is_packed

#: largest sizes of a prefill and a decode
LARGEST_TOKENS, LARGEST_BATCH = 1 << 17, 1 << 12
#: device type → default sizes of a prefill and of a decode; a CPU takes minutes for larger ones
SIZES = {"cpu": ((128,), (1, 8)), "cuda": ((128, 512, 2048, 8192), (1, 2, 4, 8, 16, 32))}

#: `layer` and `model` → the models of the variants, name → model
Variants = Mapping[Literal["layer", "model"], Mapping[str, PreTrainedModel]]


@torch.no_grad()
def measure_speed(
    model: str | Path | None,
    shape: str | None = None,
    *,
    tokens: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    repeats: int = 10,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Times one decoder layer, and the whole of a checkpoint, dense against 2:4.

    Returns, in plain JSON types, model, machine, dtype, repeats, versions, and
    variants: `layer` and `model` → the names of the variants that were timed.
    rows: a dict for each variant of each case, with these keys:
        what, phase, size: the case, see Case; variant: the name of the variant.
        milliseconds: the median time of a prefill, or of one token of a decode.
        p20, p80: the 20th and the 80th percentile of that time, in milliseconds.
        tokens_per_second: `size` tokens, divided by the median time.
        weight_bytes: the bytes of the layer's or the model's weights.
        speedup: the dense variant's time, divided by the time of this variant; None for dense.
        verdict: the speedup in words; None for dense.

    Raises UserError for an unknown shape, a wrong size, or a checkpoint that is not 2:4.

    Args:
        model: a 2:4 checkpoint to time, dense or packed; None with `shape`.
        shape: a name in SHAPES (variants.py), for random weights in the dimensions of that model.
        tokens: sizes of the prefill cases.
        batches: sizes of the decode cases. If only one of `tokens` and `batches` is given, the other phase
            is not measured. If neither is given, they are those of SIZES.
        repeats: calls of each variant in each case.
        device: `auto`, `cpu` or `cuda[:N]`.
        dtype: dtype of the weights. `auto` is the checkpoint's own, or bfloat16 with `shape`.
        progress: receives the event `measure` after each case.
    """
    check_arguments(model, shape, tokens, batches, repeats)
    target = pick_device(device)
    if tokens is None and batches is None:
        tokens, batches = SIZES[target.type]
    weights, variants = _variants(model, shape, dtype, target)
    sizes = {"prefill": tokens or (), "decode": batches or ()}
    with torch.cuda.device(target) if target.type == "cuda" else contextlib.nullcontext():
        rows = _measure_cases(variants, sizes, target, repeats, progress)
    return {
        "model": shape or str(model),
        "machine": machine_name(target),
        "dtype": dtype_name(weights),
        "repeats": repeats,
        "versions": {"drot": __version__, "torch": torch.__version__},
        "variants": {
            what: list(dict.fromkeys(row["variant"] for row in rows if row["what"] == what))
            for what in variants
        },
        "rows": rows,
    }


def check_arguments(
    model: object,
    shape: str | None,
    tokens: Sequence[int] | None,
    batches: Sequence[int] | None,
    repeats: int,
) -> None:
    """Raises UserError for arguments of `measure_speed` that mean nothing."""
    if (model is None) == (shape is None):
        raise UserError(
            f"name either a checkpoint or a `shape`; got {'neither' if model is None else 'both'}"
        )
    for name, sizes, largest in (("tokens", tokens, LARGEST_TOKENS), ("batches", batches, LARGEST_BATCH)):
        if sizes is not None and any(size < 1 for size in sizes):
            raise UserError(f"`{name}` must be whole numbers above 0; got {', '.join(map(str, sizes))}")
        if sizes is not None and max(sizes) > largest:
            raise UserError(f"`{name}` must be at most {largest}; got {max(sizes)}")
    if repeats < 1:
        raise UserError(f"`repeats` must be at least 1; got {repeats}")


def _variants(
    model: str | Path | None, shape: str | None, dtype: str, device: torch.device
) -> tuple[torch.dtype, Variants]:
    """The dtype of the measured weights; and `layer` and, for a checkpoint, `model` → its variants."""
    if shape is not None:
        weights = torch.bfloat16 if dtype == "auto" else parse_dtype(dtype)
        return weights, {"layer": layer_variants(shape_config(shape), dtype=weights, device=device)}
    assert model is not None
    loaded = load(model, device=device, dtype=dtype)
    models = model_variants(loaded, () if is_packed(loaded) else dense_linears_of(model, loaded.config))
    layer = layer_variants(models[SPARSE].config, dtype=loaded.dtype, device=device)
    return loaded.dtype, {"layer": layer, "model": models}


def _measure_cases(
    variants: Variants,
    sizes: Mapping[Any, Sequence[int]],
    device: torch.device,
    repeats: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """The rows of the cases: those of the layer first. sizes: phase → sizes."""
    cases = list(
        dict.fromkeys(Case(what, phase, n) for what in variants for phase in sizes for n in sizes[phase])
    )
    rows = []
    for number, case in enumerate(cases, 1):
        models = variants[case.what]
        for model in models.values():
            set_compressed(model, case.phase)
        calls = {name: call_of(model, case, device) for name, model in models.items()}
        timings = interleaved(calls, device=device, repeats=repeats, warmup=3 if is_gpu(device) else 1)
        rows += rows_of(case, timings, models, repeats)
        progress(ProgressEvent(phase="measure", step=number, steps=len(cases)))
    return rows
