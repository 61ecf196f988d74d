"""`drot bench`: is 2:4 faster than dense, and what does the rotation cost?

Three variants (drot/bench/variants.py) are timed in turn, one decoder layer and the whole model, in
prefill (one sequence of many tokens) and decode (one token of each of a batch of sequences).
"""

import contextlib
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
from drot.devices import dtype_name, parse_dtype, pick_device
from drot.environment import machine_name
from drot.errors import UserError
from drot.progress import Progress, ProgressEvent, silent
from drot.sparse.linear import packed_linears
from drot.sparse.packed import compress_model
from drot.version import __version__

#: tokens of a prefill, sequences of a decode
LARGEST_TOKENS, LARGEST_BATCH = 1 << 17, 1 << 12
TOKENS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
#: tokens that a whole model's decode makes
NEW_TOKENS = 32
#: by default, on a CPU: cases that would end later are left out
CPU_MINUTES = 3.0
#: medians closer than this are called equal
EQUAL = 0.03

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Case:
    """size: tokens of a prefill, sequences of a decode; rank: its place among the sizes of its kind."""

    what: Literal["layer", "model"]
    phase: Phase
    size: int
    rank: int

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
    """Times a layer and a whole model: those of the 2:4 checkpoint `model`, or random ones in the
    dimensions of `shape` (drot.sparse.variants.SHAPES).

    tokens, batches: sizes of prefill and decode; where one is named, only that is measured, else TOKENS
    and BATCHES. minutes: cases that would end later are left out and named; None is CPU_MINUTES on a CPU,
    else no limit.
    dtype: `auto` is the checkpoint's own, or bfloat16.

    Returns JSON types: model, machine, dtype, repeats, versions, variants, rows, left_out. A row holds
    what, phase, size, variant, milliseconds (of a forward pass, or of one decoded token) with p20 and
    p80, tokens_per_second, bound (prefill: FLOP/s, those of the dense product for every variant; decode:
    bytes/s of the weights), weight_bytes, and speedup and verdict against dense (None for dense itself).
    Raises UserError for an unknown shape or size and for a checkpoint that is not 2:4.
    """
    if (model is None) == (shape is None):
        raise UserError("name either a checkpoint or a `shape`")
    for name, sizes, most in (("tokens", tokens, LARGEST_TOKENS), ("batches", batches, LARGEST_BATCH)):
        if sizes is not None and any(size < 1 for size in sizes):
            raise UserError(f"`{name}` must be whole numbers above 0, got {', '.join(map(str, sizes))}")
        if sizes is not None and max(sizes) > most:
            raise UserError(f"`{name}` must be at most {most}, got {max(sizes)}")
    if minutes is not None and not minutes >= 0:
        raise UserError(f"`minutes` must not be below 0, got {minutes:g}")
    if repeats < 1:
        raise UserError(f"`repeats` must be at least 1, got {repeats}")
    place = pick_device(device)
    if tokens is None and batches is None:
        tokens, batches = TOKENS, BATCHES
    if minutes is None and place.type == "cpu":
        minutes = CPU_MINUTES
    if shape is not None:
        config = shape_config(shape)
        weights = torch.bfloat16 if dtype == "auto" else parse_dtype(dtype)
        layer = layer_variants(config, dtype=weights, device=place)
        whole = stacked_variants(layer, config)
    else:
        assert model is not None
        whole = model_variants(load(model, device=place, dtype=dtype))
        config, weights = whole[SPARSE].config, whole[SPARSE].dtype
        layer = layer_variants(config, dtype=weights, device=place)
    variants = {"layer": layer, "model": whole}
    cases = [
        Case(what, phase, size, rank)  # type: ignore[arg-type]
        for what in variants
        for phase, sizes in (("prefill", tokens or ()), ("decode", batches or ()))
        for rank, size in enumerate(sizes)
    ]
    with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
        rows, left_out = _measure_cases(cases, variants, place, repeats, minutes, progress)
    return {
        "model": shape or str(model),
        "machine": machine_name(place),
        "dtype": dtype_name(weights),
        "repeats": repeats,
        "versions": {"drot": __version__, "torch": torch.__version__},
        "variants": {what: list(models) for what, models in variants.items()},
        "rows": rows,
        "left_out": left_out,
    }


def _measure_cases(
    cases: Sequence[Case],
    variants: Mapping[str, Mapping[str, PreTrainedModel]],
    device: torch.device,
    repeats: int,
    minutes: float | None,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Small sizes come first, and each of layer and model has its share of the time."""
    started = time.perf_counter()
    parts = list(variants)
    ordered = sorted(cases, key=lambda case: (parts.index(case.what), case.rank))
    seconds: dict[Case, float] = {}
    rows: dict[Case, list[dict[str, Any]]] = {}
    for number, case in enumerate(ordered):
        begin = time.perf_counter()
        models = variants[case.what]
        if minutes is not None:
            expected = _expected(case, seconds, models[DENSE].config.num_hidden_layers)
            until = started + 60 * minutes * (parts.index(case.what) + 1) / len(parts)
            if expected and begin + expected > until:
                continue
        for model in models.values():
            _set_compressed(model, case.phase)
        calls = {name: _call(model, case, device) for name, model in models.items()}
        warmup = 3 if device.type == "cuda" else 1
        timings = interleaved(calls, device=device, repeats=repeats, warmup=warmup)
        rows[case] = _rows(case, timings, models)
        seconds[case] = time.perf_counter() - begin
        progress(ProgressEvent(phase="measure", step=number + 1, steps=len(ordered)))
    return (
        [row for case in cases for row in rows.get(case, [])],
        [str(case) for case in cases if case not in rows],
    )


def _expected(case: Case, seconds: Mapping[Case, float], layers: int) -> float:
    """Seconds that a case will take, from those that the next smaller one of its kind took, else from those
    of a single layer; 0 where there is neither, and it is measured to know."""
    if case in seconds:
        return seconds[case]
    kind = [other for other in seconds if (other.what, other.phase) == (case.what, case.phase)]
    if kind:
        return seconds[kind[-1]] * (case.size / kind[-1].size if case.phase == "prefill" else 1)
    if case.what == "layer":
        return 0.0
    of_layer = _expected(replace(case, what="layer"), seconds, layers)
    return of_layer * layers * (NEW_TOKENS if case.phase == "decode" else 1)


# ---- what is timed -------------------------------------------------------------------------------


def _set_compressed(model: nn.Module, phase: Phase) -> None:
    """Keeps cuSPARSELt's compressed weights for a prefill only: they cost memory, and only products of many
    tokens use them."""
    if phase == "prefill":
        compress_model(model)
    else:
        for _, linear in packed_linears(model):
            linear.drop_compressed()


def _call(model: Any, case: Case, device: torch.device) -> Callable[[], object]:
    """One forward pass; for a whole model's decode, NEW_TOKENS of them."""
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
    if device.type == "cuda":  # transformers then makes a CUDA graph of the step
        options["cache_implementation"] = "static"  # type: ignore[assignment]
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, so that a layer is timed and not Python's launching of its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(kept: object = call) -> None:  # with the call its input lives, which the graph reads
        graph.replay()

    return replay


# ---- what is told --------------------------------------------------------------------------------


def _rows(
    case: Case, timings: Mapping[str, Timing], models: Mapping[str, PreTrainedModel]
) -> list[dict[str, Any]]:
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
                "verdict": None if variant == DENSE else verdict(timings[DENSE], timing),
            }
        )
    return rows


def verdict(dense: Timing, timing: Timing) -> str:
    """What two timings mean in words: more is said only where most runs of both agree."""
    speedup = dense.median / timing.median
    if abs(speedup - 1) <= EQUAL:
        return "as fast as dense"
    if timing.p20 <= dense.p80 and dense.p20 <= timing.p80:
        return "too noisy to tell"
    return "faster than dense" if speedup > 1 else "slower than dense"


def _weight_bytes(model: PreTrainedModel, what: str) -> int:
    """Bytes of the weights: of one decoder layer, or of the whole model, whose layers count one by one."""
    layers = decoder_layers(model, architecture_of(model.config))
    if what == "layer":
        return _bytes(layers[0])
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = (parameter.nbytes for parameter in model.parameters() if id(parameter) not in inside)
    return sum(map(_bytes, layers)) + sum(outside)


def _bytes(layer: nn.Module) -> int:
    compressed = [linear.compressed for _, linear in packed_linears(layer)]
    tensors = [*layer.parameters(), *(tensor for tensor in compressed if tensor is not None)]
    return sum(tensor.nbytes for tensor in tensors)


def _streamed_bytes(model: PreTrainedModel, what: str) -> int:
    """Bytes of weights read per decoded token. An untied embedding is excluded: a token reads one row."""
    arch = architecture_of(model.config)
    embedding, head = module_at(model, arch.embedding).weight, module_at(model, arch.lm_head).weight
    apart = what == "model" and embedding is not head
    return _weight_bytes(model, what) - (embedding.nbytes if apart else 0)
