"""The measurements of `drot bench`: whether 2:4 is faster than dense, and what the rotation costs.

The three variants of variants.py run in turn in each case. A case runs one decoder layer or the whole model,
in one of two phases. A prefill of size n is one sequence of n tokens. A decode of size n is one new token for
each of n sequences.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from drot.checkpoint.load import load
from drot.checkpoint.opening import load_config
from drot.checkpoint.quantization_config import dense_linears_of, drot_config_of
from drot.core.checks import is_a
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.version import __version__
from drot.evaluation.cases import (
    ONE_SEQUENCE,
    SIZES,
    Case,
    check_arguments,
    check_compile,
    check_positions,
    within_positions,
)
from drot.evaluation.timing import Timing, interleaved, replayed
from drot.evaluation.variants import DENSE, SPARSE, layer_variants, model_variants, shape_config
from drot.machine.devices import dtype_name, is_gpu, parse_dtype, pick_device
from drot.machine.environment import machine_name
from drot.model.compiled import compile_step, compiled_settings
from drot.model.decoder import DecoderModel
from drot.model.families import family_of, layer_families
from drot.model.sizes import positions_of
from drot.sparse.linear import is_packed, packed_linears
from drot.sparse.packed import compress_model

#: tokens that a whole model generates for each sequence in a decode case
NEW_TOKENS = 32
#: fewest repetitions from which a verdict is given: fewer show nothing of the spread of the times
FEWEST_REPEATS = 3
#: a variant is 'as fast as dense' if its speedup differs from 1 by at most this much
EQUAL = 0.03

#: `layer` and `model` → the models of the variants, name → model
Variants = Mapping[Literal["layer", "model"], Mapping[str, PreTrainedModel]]

#: the end of the name of a variant with a compiled decode step
COMPILED = ", compiled"


@torch.no_grad()
def measure_speed(
    model: str | Path | None,
    shape: str | None = None,
    *,
    tokens: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    compile: bool = False,
    repeats: int = 10,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Times one decoder layer, and the whole of a checkpoint, dense against 2:4.

    Of a checkpoint whose layers are of several kinds, as attention and Mamba, or some of whose linears are
    dense, no layer stands for all others, and only the whole is timed.

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

    Raises UserError for an unknown shape, a wrong size, more tokens than the model has learned positions, a
    checkpoint that is not 2:4, or a decode step that cannot be compiled.

    Args:
        model: a 2:4 checkpoint to time, dense or packed; None with `shape`.
        shape: a name in SHAPES (variants.py), for random weights in the dimensions of that model.
        tokens: sizes of the prefill cases.
        batches: sizes of the decode cases. If only one of `tokens` and `batches` is given, the other phase
            is not measured. If neither is given, they are those of SIZES (cases.py), `within_positions`.
        compile: whether the decode of one sequence of a checkpoint has rows of a compiled step too: of dense
            and of the last variant.
        repeats: calls of each variant in each case.
        device: `auto`, `cpu` or `cuda[:N]`.
        dtype: dtype of the weights. `auto` is the checkpoint's own, or bfloat16 with `shape`.
        progress: receives the event `measure` after each case.
    """
    check_arguments(model, shape, tokens, batches, repeats)
    is_a("compile", compile, bool)
    target = pick_device(device)
    config = load_config(model) if model is not None else shape_config(str(shape))
    if tokens is None and batches is None:
        tokens, batches = within_positions(SIZES[target.type][0], config), SIZES[target.type][1]
    check_positions(tokens or (), config)
    if compile:
        check_compile(shape, batches or ())
    weights, variants = _variants(model, shape, dtype, target)
    sizes = {"prefill": tokens or (), "decode": batches or ()}
    with torch.cuda.device(target) if target.type == "cuda" else contextlib.nullcontext():
        rows = _measure_cases(variants, sizes, target, repeats, progress, compile=compile)
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


def _variants(
    model: str | Path | None, shape: str | None, dtype: str, device: torch.device
) -> tuple[torch.dtype, Variants]:
    """The dtype of the measured weights, and the variants of what is timed."""
    if shape is not None:
        weights = torch.bfloat16 if dtype == "auto" else parse_dtype(dtype)
        return weights, {"layer": layer_variants(shape_config(shape), dtype=weights, device=device)}
    assert model is not None
    loaded = load(model, device=device, dtype=dtype)
    held = drot_config_of(loaded.config) if is_packed(loaded) else None
    dense = dense_linears_of(model, loaded.config) if held is None else held.dense_linears
    models = model_variants(loaded, dense)
    kinds = set(layer_families(loaded.config, loaded.config.num_hidden_layers))
    if dense or len(kinds) > 1:
        return loaded.dtype, {"model": models}
    layer = layer_variants(models[SPARSE].config, dtype=loaded.dtype, device=device)
    return loaded.dtype, {"layer": {name: layer[name] for name in models}, "model": models}


def _measure_cases(
    variants: Variants,
    sizes: Mapping[Any, Sequence[int]],
    device: torch.device,
    repeats: int,
    progress: Progress,
    *,
    compile: bool,
) -> list[dict[str, Any]]:
    """The rows of the cases: those of the layer first.

    sizes: phase → sizes.
    compile: as of `measure_speed`.
    """
    cases = list(
        dict.fromkeys(Case(what, phase, n) for what in variants for phase in sizes for n in sizes[phase])
    )
    rows = []
    compiled = with_compiled(variants["model"]) if compile else {}
    for number, case in enumerate(cases, 1):
        models = compiled if compile and case == ONE_SEQUENCE else variants[case.what]
        for model in models.values():
            set_compressed(model, case.phase)
        calls = {
            name: call_of(model, case, device, compiled=name.endswith(COMPILED))
            for name, model in models.items()
        }
        timings = interleaved(calls, device=device, repeats=repeats, warmup=3 if is_gpu(device) else 1)
        rows += rows_of(case, timings, models, repeats)
        progress(ProgressEvent(phase="measure", step=number, steps=len(cases)))
    return rows


# ---- a case --------------------------------------------------------------------------------------------


def with_compiled(models: Mapping[str, PreTrainedModel]) -> dict[str, PreTrainedModel]:
    """`models`, and the dense one and the last one of them with a compiled decode step.

    transformers keeps a compiled step in its model, so these two are copies, which share all modules.
    """
    found = dict(models)
    for name in (DENSE, list(models)[-1]):
        found[name + COMPILED] = model = copy.copy(models[name])
        compile_step(model, cuda_graph=is_gpu(model.device))
    return found


def set_compressed(model: nn.Module, phase: str) -> None:
    """Compresses the packed weights of `model` for a prefill, and drops their compressed forms for a decode.

    Only products of many tokens use the compressed forms, which take memory.
    """
    if phase == "prefill":
        compress_model(model)
    else:
        for _, linear in packed_linears(model):
            linear.drop_compressed()


def call_of(model: Any, case: Case, device: torch.device, *, compiled: bool = False) -> Callable[[], object]:
    """A function that runs the case: one forward pass, or NEW_TOKENS of them in a decode of a whole model.

    Of a layer it runs the layer alone. Masks, the angles of RoPE and the last norm are made once a pass.

    compiled: whether `model` is one of `with_compiled`, whose step is compiled.
    """
    shape = (1, case.size) if case.phase == "prefill" else (case.size, 1)
    if case.what == "layer":
        hidden = torch.randn(*shape, model.config.hidden_size, dtype=model.dtype, device=device)
        decoder = DecoderModel(model)
        # the arguments of a layer do not depend on the tokens, nor on how many sequences there are
        tokens = torch.zeros(1, shape[1], dtype=torch.long)
        _, (arguments,) = decoder.record(tokens, lambda sizes, dtype: torch.empty(*sizes, dtype=dtype))
        call = partial(decoder.layers[0], hidden, arguments)
        # some experts wait for the numbers of their tokens, so no variant of a mixture becomes a graph
        return call if family_of(model.config).experts is not None else replayed(call, device)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    if case.phase == "prefill":
        return lambda: model(ids, use_cache=False, logits_to_keep=1)
    options: dict[str, Any] = dict(
        min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    if compiled:
        options |= compiled_settings(1 + NEW_TOKENS, positions_of(model.config), cuda_graph=is_gpu(device))
    elif device.type == "cuda":  # with a static cache, transformers captures the step as a CUDA graph
        options["cache_implementation"] = "static"
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def rows_of(
    case: Case, timings: Mapping[str, Timing], models: Mapping[str, PreTrainedModel], repeats: int
) -> list[dict[str, Any]]:
    """The row of each variant of a case. `measure_speed` describes the keys of a row.

    timings, models: name of a variant → its times, and its model.
    repeats: the number of calls behind each Timing.
    """
    steps = NEW_TOKENS if (case.what, case.phase) == ("model", "decode") else 1
    dense = timings[DENSE]
    rows = []
    for variant, timing in timings.items():
        seconds, model = timing.median / steps, models[variant]
        compared = variant != DENSE
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
                "weight_bytes": weight_bytes(model, case.what),
                "speedup": dense.median / timing.median if compared else None,
                "verdict": verdict(dense, timing, repeats) if compared else None,
            }
        )
    return rows


def verdict(dense: Timing, timing: Timing, repeats: int) -> str:
    """Whether `timing` is faster than, slower than or as fast as `dense`, or why that cannot be told.

    Faster or slower needs ranges from p20 to p80 that do not overlap.
    """
    if repeats < FEWEST_REPEATS:
        return "too few repeats"
    speedup = dense.median / timing.median
    if abs(speedup - 1) <= EQUAL:
        return "as fast as dense"
    if timing.p20 <= dense.p80 and dense.p20 <= timing.p80:
        return "too noisy to tell"
    return "faster than dense" if speedup > 1 else "slower than dense"


def weight_bytes(model: PreTrainedModel, what: str) -> int:
    """Bytes of the weights of one decoder layer (`what` is "layer"), or of the whole model ("model").

    The compressed forms of packed weights are counted too.
    """
    module = DecoderModel(model).layer_modules[0] if what == "layer" else model
    compressed = [linear.compressed for _, linear in packed_linears(module)]
    tensors = [*module.parameters(), *(tensor for tensor in compressed if tensor is not None)]
    return sum(tensor.nbytes for tensor in tensors)
