"""The rows of `drot bench`: times, rates and verdicts of the variants of a case."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from drot.model.decoder import DecoderModel
from drot.sparse.linear import packed_linears
from drot.speed.cases import NEW_TOKENS, Case
from drot.speed.timing import Timing
from drot.speed.variants import DENSE

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
    products = sum(
        linear.weight.numel()
        for layer in DecoderModel(models[DENSE]).layers
        for linear in layer.linears.values()
    )
    rows = []
    for variant, timing in timings.items():
        seconds, model = timing.median / steps, models[variant]
        work = 2 * products * case.size if case.phase == "prefill" else streamed_bytes(model, case.what)
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
                "bound": work / seconds,
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

    Layers that share their parameters (`stacked_variants`) count separately, as in a real model.
    """
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


def streamed_bytes(model: PreTrainedModel, what: str) -> int:
    """Bytes of the weights that a decode step reads, of which an untied embedding gives one row a token."""
    decoder = DecoderModel(model)
    embedding, head = decoder.embedding.weight, decoder.head.weight
    untied = what == "model" and embedding is not head
    return weight_bytes(model, what) - (embedding.nbytes if untied else 0)
