"""The measurements of `drot bench`: whether 2:4 is faster than dense, and what the rotation costs.

The three variants of drot/speed/variants.py run in turn in each case (drot/speed/cases.py).
"""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drot.checkpoint.load import load, load_config
from drot.checkpoint.quantization_config import dense_linears_of
from drot.checkpoint.size import size_text
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.version import __version__
from drot.machine.devices import dtype_name, parse_dtype, pick_device
from drot.machine.environment import machine_name
from drot.model.decoder import DecoderModel
from drot.sparse.linear import is_packed
from drot.speed.cases import NEW_TOKENS, Case, call_of, set_compressed
from drot.speed.rates import rows_of
from drot.speed.timing import interleaved
from drot.speed.variants import DENSE, SPARSE, layer_variants, model_variants, shape_config, stacked_variants

#: largest sizes of a prefill and a decode
LARGEST_TOKENS, LARGEST_BATCH = 1 << 17, 1 << 12
#: default sizes of a prefill and a decode
TOKENS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
#: default of `minutes` on a CPU
CPU_MINUTES = 3.0

#: `layer` and `model` → a function that makes the models of the variants, name → model
Makers = Mapping[str, Callable[[], Mapping[str, PreTrainedModel]]]


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
    check_arguments(model, shape, tokens, batches, repeats, minutes)
    started, target = time.perf_counter(), pick_device(device)
    if tokens is None and batches is None:
        tokens, batches = TOKENS, BATCHES
    config, weights, makers = _makers(model, shape, dtype, target)
    sizes = {"prefill": tokens or (), "decode": batches or ()}
    budget = Budget(started, 60 * _limit(minutes, target), config.num_hidden_layers)
    with torch.cuda.device(target) if target.type == "cuda" else contextlib.nullcontext():
        rows, left_out = _measure_cases(makers, sizes, target, repeats, budget, progress)
    return {
        "model": shape or str(model),
        "machine": machine_name(target),
        "dtype": dtype_name(weights),
        "repeats": repeats,
        "versions": {"drot": __version__, "torch": torch.__version__},
        "variants": {
            what: list(dict.fromkeys(row["variant"] for row in rows if row["what"] == what))
            for what in makers
        },
        "rows": rows,
        "left_out": left_out,
    }


def announcement(
    model: str | Path | None,
    shape: str | None = None,
    *,
    minutes: float | None = None,
    device: str | torch.device = "auto",
    dtype: str = "auto",
) -> str:
    """What `measure_speed` with these arguments is going to take, in one line: time, and memory of weights.

    The config of `model` is read, and no weights.
    """
    target = pick_device(device)
    config = shape_config(shape) if shape is not None else load_config(str(model))
    own = torch.bfloat16 if shape is not None else config.dtype or torch.float32
    weights = own if dtype == "auto" else parse_dtype(dtype)
    size = size_text(weight_numbers(config, stacked=shape is not None) * weights.itemsize)
    limit = _limit(minutes, target)
    time_ = f"at most {limit:g} minutes and one call more" if limit < math.inf else "no limit of time"
    loading = "" if shape is not None else "; loading them counts as time"
    return f"measuring with {time_}; the weights take about {size} of memory{loading}"


def weight_numbers(config: Any, *, stacked: bool) -> int:
    """About how many numbers the weights of all variants of the layer and of the model have.

    stacked: whether the layers of a model share the weights of one layer (`stacked_variants`).
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        whole = DecoderModel(AutoModelForCausalLM.from_config(config))
    layer = sum(parameter.numel() for parameter in whole.layers[0].module.parameters())
    outside = sum(parameter.numel() for parameter in whole.model.parameters()) - layer * len(whole.layers)
    variants = layer * (1 + 9 / 16) + config.hidden_size**2  # dense, packed, and R1
    return round(variants * (1 if stacked else 1 + len(whole.layers)) + outside)


def _limit(minutes: float | None, device: torch.device) -> float:
    """`minutes`, or its default on `device`."""
    if minutes is None:
        return CPU_MINUTES if device.type == "cpu" else math.inf
    return minutes


def check_arguments(
    model: object,
    shape: str | None,
    tokens: Sequence[int] | None,
    batches: Sequence[int] | None,
    repeats: int,
    minutes: float | None,
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
    if minutes is not None and not minutes >= 0:
        raise UserError(f"`minutes` must be at least 0; got {minutes:g}")
    if repeats < 1:
        raise UserError(f"`repeats` must be at least 1; got {repeats}")


def _makers(
    model: str | Path | None, shape: str | None, dtype: str, device: torch.device
) -> tuple[Any, torch.dtype, Makers]:
    """The config and the dtype of the measured model, and what makes its variants."""
    if shape is not None:
        config = shape_config(shape)
        weights = torch.bfloat16 if dtype == "auto" else parse_dtype(dtype)
    else:
        assert model is not None
        loaded = load(model, device=device, dtype=dtype)
        models = model_variants(loaded, () if is_packed(loaded) else dense_linears_of(model, loaded.config))
        config, weights = models[SPARSE].config, models[SPARSE].dtype
    of_layer = functools.cache(lambda: layer_variants(config, dtype=weights, device=device))
    of_model = functools.cache(lambda: stacked_variants(of_layer(), config) if shape else models)
    return config, weights, {"layer": of_layer, "model": of_model}


@dataclass
class Budget:
    """The time for all cases. Cases of the layer may take the first half, so that the model has some left.

    started: time.perf_counter() when the measurement began.
    limit: seconds from then to the end of the last case; infinity is no limit.
    layers: decoder layers of the model.
    seconds: the measured or estimated seconds of the cases so far.
    """

    started: float
    limit: float
    layers: int
    seconds: dict[Case, float] = field(default_factory=dict)

    def deadline(self, case: Case) -> float:
        return self.started + self.limit * (0.5 if case.what == "layer" else 1)

    def expected(self, case: Case) -> float:
        """The expected seconds of a case; 0 if nothing is known about it.

        The estimate comes from the last case with the same part and phase, or else from the case of a layer.
        """
        if case in self.seconds:
            return self.seconds[case]
        similar = [other for other in self.seconds if (other.what, other.phase) == (case.what, case.phase)]
        if similar:
            scale = case.size / similar[-1].size if case.phase == "prefill" else 1
            return self.seconds[similar[-1]] * scale
        if case.what == "layer":
            return 0.0
        of_layer = self.expected(replace(case, what="layer"))
        return of_layer * self.layers * (NEW_TOKENS if case.phase == "decode" else 1)


def _measure_cases(
    makers: Makers,
    sizes: Mapping[Any, Sequence[int]],
    device: torch.device,
    repeats: int,
    budget: Budget,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the measured cases, and the names of the cases that were left out.

    sizes: phase → sizes. Cases are measured in the order of the sizes, those of the layer first.
    """
    warmup = 3 if device.type == "cuda" else 1
    whats: tuple[Literal["layer", "model"], ...] = ("layer", "model")
    cases = list(
        dict.fromkeys(Case(what, phase, n) for what in whats for phase in sizes for n in sizes[phase])
    )
    ordered = sorted(cases, key=lambda case: (case.what, sizes[case.phase].index(case.size)))
    rows: dict[Case, list[dict[str, Any]]] = {}
    for number, case in enumerate(ordered, 1):
        expected, deadline = budget.expected(case), budget.deadline(case)
        if time.perf_counter() + expected > deadline:
            continue
        models = makers[case.what]()
        for model in models.values():
            set_compressed(model, case.phase)
        calls = {name: call_of(model, case, device) for name, model in models.items()}
        begin = time.perf_counter()
        if not expected and deadline < math.inf:  # no case of this kind was measured: estimate from one call
            calls[DENSE]()
            budget.seconds[case] = (time.perf_counter() - begin) * len(calls) * (repeats + warmup)
            if begin + budget.seconds[case] > deadline:
                continue
        timings = interleaved(calls, device=device, repeats=repeats, warmup=warmup)
        rows[case] = rows_of(case, timings, models, repeats)
        budget.seconds[case] = time.perf_counter() - begin
        progress(ProgressEvent(phase="measure", step=number, steps=len(ordered)))
    return (
        [row for case in cases for row in rows.get(case, [])],
        [str(case) for case in cases if case not in rows],
    )
