"""The measurements of `drot bench`: whether 2:4 is faster than dense, and what the rotation costs.

The three variants of drot/speed/variants.py run in turn in each case (drot/speed/cases.py).
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drot.checkpoint.load import load
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.version import __version__
from drot.machine.devices import dtype_name, parse_dtype, pick_device
from drot.machine.environment import machine_name
from drot.manifest.manifest import dense_linears_of
from drot.sparse.linear import is_packed
from drot.speed.cases import NEW_TOKENS, Case, call_of, set_compressed
from drot.speed.figures import rows_of
from drot.speed.timing import interleaved
from drot.speed.variants import DENSE, SPARSE, layer_variants, model_variants, shape_config, stacked_variants

#: largest sizes of a prefill and a decode
LARGEST_TOKENS, LARGEST_BATCH = 1 << 17, 1 << 12
#: default sizes of a prefill and a decode
TOKENS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
#: default of `minutes` on a CPU
CPU_MINUTES = 3.0


@torch.no_grad()
def measure_speed(
    model: str | Path | None,
    shape: str | None = None,
    *,
    tokens: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    repeats: int = 10,
    minutes: float | None = None,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Times one decoder layer and a whole model, dense against 2:4.

    Returns, in plain JSON types, model, machine, dtype, repeats, versions, and
    variants: `layer` and `model` → the names of the variants that were timed.
    rows: a dict for each variant of each case, with these keys:
        what, phase, size: the case, see Case; variant: the name of the variant.
        milliseconds: the median time of a prefill, or of one token of a decode.
        p20, p80: the 20th and the 80th percentile of that time, in milliseconds.
        tokens_per_second: `size` tokens, divided by the median time.
        bound: the use of the resource that usually limits the phase. In a prefill it is FLOP/s, where every
            variant counts the operations of the dense product; in a decode, bytes of weights read a second.
        weight_bytes: the bytes of the layer's or the model's weights.
        speedup: the dense variant's time, divided by the time of this variant; None for dense.
        verdict: the speedup in words; None for dense.
    left_out: the names of the cases that were not measured, because they would have exceeded `minutes`.

    Raises UserError for an unknown shape, a wrong size, or a checkpoint that is not 2:4.

    Args:
        model: a 2:4 checkpoint to time, dense or packed; None with `shape`.
        shape: a name in SHAPES (drot/speed/variants.py), for random weights in the dimensions of that model.
        tokens: sizes of the prefill cases.
        batches: sizes of the decode cases. If only one of `tokens` and `batches` is given, the other phase
            is not measured. If neither is given, they are TOKENS and BATCHES.
        repeats: calls of each variant in each case.
        minutes: a case is left out if it is expected to end more than this time after the start. The limit
            is exceeded at most by the time in which the weights are made or loaded, and by one call of a
            case. None is CPU_MINUTES on a CPU, and no limit on a GPU.
        device: `auto`, `cpu` or `cuda[:N]`.
        dtype: dtype of the weights. `auto` is the checkpoint's own, or bfloat16 with `shape`.
        progress: receives the event `measure` after each case.
    """
    if (model is None) == (shape is None):
        raise UserError(
            f"name either a checkpoint or a `shape`; got {'neither' if model is None else 'both'}"
        )
    for name, sizes, largest in (("tokens", tokens, LARGEST_TOKENS), ("batches", batches, LARGEST_BATCH)):
        if sizes is not None and any(size < 1 for size in sizes):
            raise UserError(f"`{name}` must be whole numbers above 0; got {', '.join(map(str, sizes))}")
        if sizes is not None and max(sizes) > largest:
            raise UserError(f"`{name}` must be at most {largest}; got {max(sizes)}")
    if minutes is not None and not minutes >= 0:
        raise UserError(f"`minutes` must be at least 0; got {minutes:g}")
    if repeats < 1:
        raise UserError(f"`repeats` must be at least 1; got {repeats}")
    started = time.perf_counter()
    target = pick_device(device)
    if tokens is None and batches is None:
        tokens, batches = TOKENS, BATCHES
    if minutes is None and target.type == "cpu":
        minutes = CPU_MINUTES
    if shape is not None:
        config = shape_config(shape)
        weights = torch.bfloat16 if dtype == "auto" else parse_dtype(dtype)
        of_layer = functools.cache(lambda: layer_variants(config, dtype=weights, device=target))
        of_model: Callable[[], dict[str, PreTrainedModel]] = functools.cache(
            lambda: stacked_variants(of_layer(), config)
        )
    else:
        assert model is not None
        loaded = load(model, device=target, dtype=dtype)
        packed = is_packed(loaded)
        models = model_variants(loaded, () if packed else dense_linears_of(model, loaded.config))
        config, weights = models[SPARSE].config, models[SPARSE].dtype
        of_layer = functools.cache(lambda: layer_variants(config, dtype=weights, device=target))
        of_model = lambda: models  # noqa: E731
    variants: dict[str, Callable[[], Mapping[str, PreTrainedModel]]] = {"layer": of_layer, "model": of_model}
    cases = [
        Case(what, phase, size, position)  # type: ignore[arg-type]
        for what in variants
        for phase, sizes in (("prefill", tokens or ()), ("decode", batches or ()))
        for position, size in enumerate(sizes)
    ]
    with torch.cuda.device(target) if target.type == "cuda" else contextlib.nullcontext():
        rows, left_out = _measure_cases(
            cases,
            variants,
            target,
            repeats,
            None if minutes is None else _Budget(started, 60 * minutes, config.num_hidden_layers),
            progress,
        )
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
        "left_out": left_out,
    }


@dataclass(frozen=True)
class _Budget:
    """The time for all cases.

    started: time.perf_counter() when the measurement began.
    seconds: the time from then to the end of the last case.
    layers: the number of decoder layers of the model, for the estimate of a case (`_expected`).
    """

    started: float
    seconds: float
    layers: int


def _measure_cases(
    cases: Sequence[Case],
    variants: Mapping[str, Callable[[], Mapping[str, PreTrainedModel]]],
    device: torch.device,
    repeats: int,
    budget: _Budget | None,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the measured cases, and the names of the cases that were left out.

    Cases of the layer come before cases of the model, each in the order of their positions. The layer may
    use the first half of the budget, so that some time is left for the model.

    Args:
        cases: the cases to measure.
        variants: `layer` and `model` → a function that makes the variants, called when the first case needs
            them.
        device: the device of the variants.
        repeats: calls of each variant in each case.
        budget: the time for all cases; None is no limit.
        progress: receives the event `measure` after each case.
    """
    warmup = 3 if device.type == "cuda" else 1
    parts = list(variants)
    ordered = sorted(cases, key=lambda case: (parts.index(case.what), case.position))
    seconds: dict[Case, float] = {}
    rows: dict[Case, list[dict[str, Any]]] = {}
    for number, case in enumerate(ordered):
        begin, expected, deadline = time.perf_counter(), 0.0, math.inf
        if budget is not None:
            expected = _expected(case, seconds, budget.layers)
            deadline = budget.started + budget.seconds * (parts.index(case.what) + 1) / len(parts)
        if begin + expected > deadline:
            continue
        models = variants[case.what]()
        for model in models.values():
            set_compressed(model, case.phase)
        calls = {name: call_of(model, case, device) for name, model in models.items()}
        begin = time.perf_counter()
        if not expected and budget is not None:  # no case of this kind was measured: estimate from one call
            calls[DENSE]()
            seconds[case] = (time.perf_counter() - begin) * len(calls) * (repeats + warmup)
            if begin + seconds[case] > deadline:
                continue
        timings = interleaved(calls, device=device, repeats=repeats, warmup=warmup)
        rows[case] = rows_of(case, timings, models, repeats)
        seconds[case] = time.perf_counter() - begin
        progress(ProgressEvent(phase="measure", step=number + 1, steps=len(ordered)))
    return (
        [row for case in cases for row in rows.get(case, [])],
        [str(case) for case in cases if case not in rows],
    )


def _expected(case: Case, seconds: Mapping[Case, float], layers: int) -> float:
    """The expected seconds of a case of a model with `layers` layers; 0 if nothing is known about it.

    seconds: the seconds of the cases that were measured. The estimate comes from the last case with the same
    part and phase, or else from the case of a single layer.
    """
    if case in seconds:
        return seconds[case]
    similar = [other for other in seconds if (other.what, other.phase) == (case.what, case.phase)]
    if similar:
        return seconds[similar[-1]] * (case.size / similar[-1].size if case.phase == "prefill" else 1)
    if case.what == "layer":
        return 0.0
    of_layer = _expected(replace(case, what="layer"), seconds, layers)
    return of_layer * layers * (NEW_TOKENS if case.phase == "decode" else 1)
