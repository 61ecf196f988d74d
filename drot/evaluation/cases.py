"""The cases of `drot bench`, the calls that run them, and their rows: times, rates and verdicts.

A case runs one decoder layer or the whole model, in one of two phases. A prefill of size n is one sequence of
n tokens. A decode of size n is one new token for each of n sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from drot.evaluation.timing import Timing, replayed
from drot.evaluation.variants import DENSE
from drot.model.decoder import DecoderModel
from drot.model.families import family_of
from drot.sparse.linear import packed_linears
from drot.sparse.packed import compress_model

#: tokens that a whole model generates for each sequence in a decode case
NEW_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """One measurement. size: the number of tokens of a prefill, or of sequences of a decode."""

    what: Literal["layer", "model"]
    phase: Literal["prefill", "decode"]
    size: int

    def __str__(self) -> str:
        return f"{self.what} {self.phase} {self.size}"


def set_compressed(model: nn.Module, phase: str) -> None:
    """Compresses the packed weights of `model` for a prefill, and drops their compressed forms for a decode.

    Only products of many tokens use the compressed forms, which take memory.
    """
    if phase == "prefill":
        compress_model(model)
    else:
        for _, linear in packed_linears(model):
            linear.drop_compressed()


def call_of(model: Any, case: Case, device: torch.device) -> Callable[[], object]:
    """A function that runs the case: one forward pass, or NEW_TOKENS of them in a decode of a whole model."""
    shape = (1, case.size) if case.phase == "prefill" else (case.size, 1)
    if case.what == "layer":
        hidden = torch.randn(*shape, model.config.hidden_size, dtype=model.dtype, device=device)
        call = lambda: model.base_model(inputs_embeds=hidden, use_cache=False)  # noqa: E731
        # packed experts wait for the numbers of their tokens, so no variant of a mixture becomes a graph
        return call if family_of(model.config).experts is not None else replayed(call, device)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    if case.phase == "prefill":
        return lambda: model(ids, use_cache=False, logits_to_keep=1)
    options = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    if device.type == "cuda":  # with a static cache, transformers captures the step as a CUDA graph
        options["cache_implementation"] = "static"  # type: ignore[assignment]
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)


#: fewest repetitions from which a verdict is given: fewer show nothing of the spread of the times
FEWEST_REPEATS = 3
#: a variant is 'as fast as dense' if its speedup differs from 1 by at most this much
EQUAL = 0.03


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
    """Bytes of the weights of one decoder layer (`what` is "layer"), or of the whole model ("model")."""
    layers = DecoderModel(model).layer_modules
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
