"""The measurements of `drot bench`: whether 2:4 is faster than dense, and what the rotation costs.

The three variants of drot/bench/variants.py run in turn in each case. A case runs one decoder layer or the
whole model, in one of two phases. A prefill of size n is one sequence of n tokens. A decode of size n is one
new token for each of n sequences.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from drot.architectures import architecture_of, decoder_layers, layer_linears, module_at
from drot.bench.timing import Timing, interleaved
from drot.bench.variants import (
    DENSE,
    SPARSE,
    layer_variants,
    model_variants,
    shape_config,
    stacked_variants,
)
from drot.checkpoint.load import load
from drot.checkpoint.manifest import dense_linears_of
from drot.devices import dtype_name, parse_dtype, pick_device
from drot.environment import machine_name
from drot.errors import UserError
from drot.progress import Progress, ProgressEvent, silent
from drot.sparse.linear import is_packed, packed_linears
from drot.sparse.packed import compress_model
from drot.version import __version__

#: largest sizes of a prefill and a decode
LARGEST_TOKENS, LARGEST_BATCH = 1 << 17, 1 << 12
#: default sizes of a prefill and a decode
TOKENS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
#: tokens that a whole model generates for each sequence in a decode case
NEW_TOKENS = 32
#: default of `minutes` on a CPU
CPU_MINUTES = 3.0
#: fewest repetitions from which a verdict is given: fewer show nothing of the spread of the times
FEWEST_REPEATS = 3
#: a variant is 'as fast as dense' if its speedup differs from 1 by at most this much
EQUAL = 0.03

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Case:
    """One measurement.

    what: the part that runs, one decoder layer or the whole model.
    phase: prefill or decode.
    size: the number of tokens of a prefill, or of sequences of a decode.
    position: the index of `size` in the caller's list of sizes. Cases with a low position are measured first.
    """

    what: Literal["layer", "model"]
    phase: Phase
    size: int
    position: int

    def __str__(self) -> str:
        return f"{self.what} {self.phase} {self.size}"


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
        milliseconds: the median time of a prefill, or of one token of a decode; p20, p80: its percentiles.
        tokens_per_second: `size` tokens over that time.
        bound: the use of the resource that usually limits the phase. In a prefill it is FLOP/s, where every
            variant counts the operations of the dense product; in a decode, bytes of weights read a second.
        weight_bytes: the bytes of the layer's or the model's weights.
        speedup: dense time over the variant's time; verdict: the same in words. Both None for dense.
    left_out: the names of the cases that were not measured, because they would have exceeded `minutes`.

    Raises UserError for an unknown shape, a wrong size, or a checkpoint that is not 2:4.

    Args:
        model: a 2:4 checkpoint to time, dense or packed; None with `shape`.
        shape: a name in SHAPES (drot/bench/variants.py), for random weights in the dimensions of that model.
        tokens: sizes of the prefill cases.
        batches: sizes of the decode cases. If only one of `tokens` and `batches` is given, the other phase
            is not measured. If neither is given, they are TOKENS and BATCHES.
        repeats: calls of each variant in each case.
        minutes: a case that is expected to end later than this after the call is left out. Exceeded at most
            by the time in which the weights are made or loaded, and by one call of a case. None is
            CPU_MINUTES on a CPU, and no limit on a GPU.
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
    """started: time.perf_counter() at the start. seconds: the time for all cases. layers: of the model."""

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
            _set_compressed(model, case.phase)
        calls = {name: _call(model, case, device) for name, model in models.items()}
        begin = time.perf_counter()
        if not expected and budget is not None:  # no case of this kind was measured: one call tells
            calls[DENSE]()
            seconds[case] = (time.perf_counter() - begin) * len(calls) * (repeats + warmup)
            if begin + seconds[case] > deadline:
                continue
        timings = interleaved(calls, device=device, repeats=repeats, warmup=warmup)
        rows[case] = _rows(case, timings, models, repeats)
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


# ---- the timed calls -----------------------------------------------------------------------------


def _set_compressed(model: nn.Module, phase: Phase) -> None:
    """Compresses the packed weights for a prefill, and drops their compressed form for a decode.

    Only products of many tokens use the compressed form, and it takes memory.
    """
    if phase == "prefill":
        compress_model(model)
    else:
        for _, linear in packed_linears(model):
            linear.drop_compressed()


def _call(model: Any, case: Case, device: torch.device) -> Callable[[], object]:
    """A function that runs the case: one forward pass, or NEW_TOKENS of them in a decode of a whole model."""
    shape = (1, case.size) if case.phase == "prefill" else (case.size, 1)
    if case.what == "layer":
        hidden = torch.randn(*shape, model.config.hidden_size, dtype=model.dtype, device=device)
        call = lambda: model.base_model(inputs_embeds=hidden, use_cache=False)  # noqa: E731
        return _captured(call) if device.type == "cuda" else call
    vocabulary = model.config.vocab_size
    if case.phase == "prefill":
        ids = torch.randint(vocabulary, shape, device=device)
        return lambda: model(ids, use_cache=False, logits_to_keep=1)
    prompt = torch.randint(vocabulary, (case.size, 1), device=device)
    options = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    if device.type == "cuda":  # with a static cache, transformers captures the step as a CUDA graph
        options["cache_implementation"] = "static"  # type: ignore[assignment]
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """`call` captured as a CUDA graph, so that the time does not include Python's launching of kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(kept: object = call) -> None:  # `kept` holds the input, which the graph reads, in memory
        graph.replay()

    return replay


# ---- the figures ---------------------------------------------------------------------------------


def _rows(
    case: Case, timings: Mapping[str, Timing], models: Mapping[str, PreTrainedModel], repeats: int
) -> list[dict[str, Any]]:
    """The row of each variant of a case; `measure_speed` describes its keys."""
    steps = NEW_TOKENS if (case.what, case.phase) == ("model", "decode") else 1
    dense = models[DENSE]
    arch = architecture_of(dense.config)
    products = sum(
        linear.weight.numel()
        for layer in decoder_layers(dense, arch)
        for linear in layer_linears(layer, arch).values()
    )
    rows = []
    for variant, timing in timings.items():
        seconds = timing.median / steps
        weights = _weight_bytes(models[variant], case.what)
        speedup = timings[DENSE].median / timing.median
        if case.phase == "prefill":
            bound = 2 * products * case.size / seconds
        else:
            bound = _streamed_bytes(models[variant], case.what) / seconds
        rows.append(
            {
                "what": case.what,
                "phase": case.phase,
                "size": case.size,
                "variant": variant,
                "milliseconds": 1e3 * seconds,
                "p20": 1e3 * timing.p20 / steps,
                "p80": 1e3 * timing.p80 / steps,
                "tokens_per_second": case.size / seconds,
                "bound": bound,
                "weight_bytes": weights,
                "speedup": None if variant == DENSE else speedup,
                "verdict": None if variant == DENSE else verdict(timings[DENSE], timing, repeats),
            }
        )
    return rows


def verdict(dense: Timing, timing: Timing, repeats: int) -> str:
    """Whether `timing` is faster than, slower than or as fast as `dense`, or why that cannot be told.

    Faster or slower needs ranges from p20 to p80 that do not overlap.

    repeats: the number of calls behind each Timing.
    """
    if repeats < FEWEST_REPEATS:
        return "too few repeats"
    speedup = dense.median / timing.median
    if abs(speedup - 1) <= EQUAL:
        return "as fast as dense"
    if timing.p20 <= dense.p80 and dense.p20 <= timing.p80:
        return "too noisy to tell"
    return "faster than dense" if speedup > 1 else "slower than dense"


def _weight_bytes(model: PreTrainedModel, what: str) -> int:
    """Bytes of the weights of one decoder layer, or of the whole model.

    Layers that share their parameters (`stacked_variants`) count separately, as in a real model.
    """
    layers = decoder_layers(model, architecture_of(model.config))
    if what == "layer":
        return _bytes(layers[0])
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = (parameter.nbytes for parameter in model.parameters() if id(parameter) not in inside)
    return sum(map(_bytes, layers)) + sum(outside)


def _bytes(layer: nn.Module) -> int:
    """Bytes of a layer's parameters and of the compressed forms of its weights."""
    compressed = [linear.compressed for _, linear in packed_linears(layer)]
    tensors = [*layer.parameters(), *(tensor for tensor in compressed if tensor is not None)]
    return sum(tensor.nbytes for tensor in tensors)


def _streamed_bytes(model: PreTrainedModel, what: str) -> int:
    """Bytes of the weights that a decode step reads. An untied embedding does not count: a token reads one
    row of it."""
    arch = architecture_of(model.config)
    embedding, head = module_at(model, arch.embedding).weight, module_at(model, arch.lm_head).weight
    untied = what == "model" and embedding is not head
    return _weight_bytes(model, what) - (embedding.nbytes if untied else 0)
