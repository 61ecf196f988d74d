"""The weights of the calibration tokens of a run, by a backward pass through the dense model."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from drot.calibration.lent import Lent
from drot.calibration.stream import CalibrationStream
from drot.calibration.token_weights import (
    TokenWeights,
    key_of,
    layer_gradients,
    loss_gradient,
    output_key,
)
from drot.checkpoint.resume import RunState
from drot.core.errors import UserError
from drot.machine.devices import free_memory, is_gpu
from drot.machine.memory import available_memory
from drot.machine.spool import Spool
from drot.machine.transfer import CopiesHome, on_device, pinned_bytes, return_pinned_memory
from drot.model.layer import DecoderLayer
from drot.pipeline.context import RunContext
from drot.pipeline.invariance import check_finite_outputs, check_outputs
from drot.pipeline.states import embed

#: the name of the part of a run's state that holds them
PART = "token_weights"
#: what the names of the weights of outputs begin with there
OUTPUTS = "outputs."
#: the share of the free main memory that the kept inputs of layers may take
KEPT_SHARE = 0.5


def weigh_tokens(run: RunContext, state: RunState | None) -> TokenWeights:
    """The weights of the calibration tokens, from `state` if an interrupted run has saved them there.

    A forward pass keeps the inputs of layers (`kept_layers`), and a backward pass goes back from layer to
    layer. Inputs that are not kept are computed again.

    Raises UserError for outputs of a layer or gradients that are not finite.
    """
    if saved := state.load(PART) if state else None:
        return _parted(saved[0])
    squares: dict[str, Tensor] = {}
    of_outputs: dict[str, Tensor] = {}
    with run.during("weigh"):
        stream = embed(run, run.tokens, state)
        layers, kept = run.model.layers, {}
        keep, room = _keeper(run, stream, state)
        first, step = kept_layers(len(layers), room)
    for layer in on_device(layers, run.device, run.home):
        with run.during("weigh", layer, announced=True):
            if layer.index >= first or layer.index % step == 0:
                kept[layer.index] = keep(stream)
            stream.advance(layer)
            _check(run, stream.hidden_states[:1].to(run.device), layer)
    with run.during("weigh"):
        own = run.tokens[run.ranks.rank :: run.ranks.size]
        norm, head = run.model.norm_and_head(run.device)
        with CopiesHome(run.device) as home:
            for batch, hidden in stream.loaded_batches():
                home.write(
                    stream.hidden_states[batch], loss_gradient(run.model, hidden, own[batch], norm, head)
                )
        del norm, head
    of_lent = None if stream.lent is None else stream.lent.fresh()
    starts = [*range(0, first, step), *([first] if first < len(layers) else [])]
    for start, stop in reversed([*itertools.pairwise([*starts, len(layers)])]):
        segment = layers[start:stop]
        inputs = [kept.pop(index) for index in range(start, stop) if index in kept]
        for layer in on_device(segment[len(inputs) - 1 : -1], run.device, run.home):
            with run.during("weigh", layer):
                inputs.append(keep(inputs[-1]))
                inputs[-1].advance(layer)
        for layer in on_device(segment[::-1], run.device, run.home):
            with run.during("weigh", layer):
                of_tokens, sums = _go_back(run, layer.index, inputs.pop(), stream, of_lent)
                squares |= of_tokens
                of_outputs |= sums
    with run.during("weigh"):
        weights = TokenWeights(_of_all_ranks(run, squares), _outputs_of_all_ranks(run, of_outputs))
        del stream, inputs
        if is_gpu(run.device):
            return_pinned_memory()
        if state is not None:
            outputs = {OUTPUTS + key: each for key, each in weights.outputs.items()}
            state.save(PART, {**weights.tensors, **outputs}, None)
    return weights


def _parted(saved: dict[str, Tensor]) -> TokenWeights:
    """The weights from the tensors of PART."""
    outputs = {key.removeprefix(OUTPUTS): each for key, each in saved.items() if key.startswith(OUTPUTS)}
    return TokenWeights({key: each for key, each in saved.items() if not key.startswith(OUTPUTS)}, outputs)


def kept_layers(count: int, room: int) -> tuple[int, int]:
    """From which of `count` layers on the inputs of all are kept, and after how many layers before it of one.

    The inputs of the last layers need no room any more when those before them are computed again.

    room: the most inputs that are kept at a time, if it is enough for every √count-th and those between two.
    """
    step = math.isqrt(count - 1) + 1
    if room >= count:
        return 0, step
    return count - max(0, room - -(-count // step)), step


def _keeper(
    run: RunContext, stream: CalibrationStream, state: RunState | None
) -> tuple[Callable[[CalibrationStream], CalibrationStream], int]:
    """A function that copies a stream to where copies have room, and how many have room there.

    That is the device, or main memory, or a file of a run with a `state`.
    """
    device, count, size = run.device, len(run.model.layers), max(stream.hidden_states.nbytes, 1)
    aside: Callable[[CalibrationStream], CalibrationStream] = CalibrationStream.copy
    on_gpu = 0
    if is_gpu(device):
        aside = CalibrationStream.offloaded_copy
        if stream.on_device:
            lent = 2 * size * run.sizes.lent // run.sizes.hidden  # and its gradient
            on_gpu = int(free_memory(device) - run.device_memory - lent) // size
    in_memory = pinned_bytes(size) if is_gpu(device) else size
    room = int(KEPT_SHARE * available_memory() / run.ranks.local_size) // in_memory
    if on_gpu >= count:
        return CalibrationStream.copy, on_gpu
    step = math.isqrt(count - 1) + 1
    if room < -(-count // step) + step and state is not None:
        empty = Spool(state.disk).empty
        return lambda kept: kept.copy(empty), 0
    return aside, room


def _go_back(
    run: RunContext, index: int, inputs: CalibrationStream, gradient: CalibrationStream, of_lent: Lent | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Replaces the gradient in the outputs of a layer by that in its inputs.

    Returns the squares of its groups and those of the outputs of its linears (`layer_gradients`), in main
    memory.

    inputs: of the layer. gradient: its hidden states are the gradient.
    of_lent: as in `layer_gradients`.
    """
    layer, found, sums = run.model.layers[index], dict[str, list[Tensor]](), dict[str, Tensor]()
    batches = zip(inputs.loaded_batches(), gradient.loaded(gradient.hidden_states), strict=True)
    with CopiesHome(run.device) as home:
        for (batch, hidden), of_outputs in batches:
            before, squares, of_linears = layer_gradients(
                layer,
                hidden,
                inputs.arguments(layer, batch),
                of_outputs,
                None if of_lent is None else of_lent.of(batch),
            )
            home.write(gradient.hidden_states[batch], before)
            for key, means in squares.items():
                found.setdefault(key, []).append(means)
            for key, added in of_linears.items():
                sums[key] = sums[key] + added if key in sums else added
    of_tokens = {key: torch.cat(parts).cpu() for key, parts in found.items()}
    return of_tokens, {key: each.cpu() for key, each in sums.items()}


def _check(run: RunContext, hidden_states: Tensor, layer: DecoderLayer) -> None:
    """Raises UserError if outputs of `layer` are not finite."""
    if run.dtype == torch.float16 and not bool(hidden_states.isfinite().all()):
        check_outputs(run.model, run.tokens[:1], run.device)  # names the layer if its weights are damaged
        raise UserError(
            f"layer {layer.index}: the model's outputs on the calibration text are too large for float16: "
            'use `dtype="bfloat16"` or `dtype="float32"`'
        )
    check_finite_outputs(hidden_states, layer)


def _of_all_ranks(run: RunContext, squares: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the tokens of all ranks, from the squares of this rank's sequences."""
    ranks, shape = run.ranks, run.tokens.shape
    found = {}
    if not all(bool(own.isfinite().all()) for own in squares.values()):
        check_outputs(run.model, run.tokens[:1], run.device)  # names the layer
        raise UserError(
            "the gradients that weight the calibration tokens must be finite, and are not: use "
            '`dtype="float32"` or `token_weights="equal"`'
        )
    for key in dict.fromkeys(key_of(layer, group) for layer in run.model.layers for group in layer.groups):
        own = squares.get(key, torch.zeros(0, shape[1]))
        whole = torch.zeros(shape, dtype=torch.float32, device=run.device)
        roots = own.sqrt()
        mean = ranks.total(float(roots.sum(dtype=torch.float64))) / whole.numel()
        # a mean of 0 is of outputs on which the loss does not depend
        roots = roots / mean if mean else torch.ones_like(roots)
        whole[ranks.rank :: ranks.size] = roots.to(run.device)
        ranks.add_(whole)
        found[key] = whole.half().cpu()
    return found


def _outputs_of_all_ranks(run: RunContext, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the outputs, from the sums of squares over the tokens of this rank."""
    sizes = {
        output_key(layer, linear.name): layer.shape_of(linear.spec)[0]
        for layer in run.model.layers
        for linear in layer.linears.values()
        if linear.spec.expert is None
    }
    parts = [sums.get(key, torch.zeros(size, dtype=torch.float32)) for key, size in sizes.items()]
    whole = torch.cat(parts).to(run.device)
    run.ranks.add_(whole)
    mean = whole.double().mean()
    if not mean:  # the loss does not depend on the model
        return {}
    parts = (whole / mean).float().cpu().split([*sizes.values()])
    return {key: part.clone() for key, part in zip(sizes, parts, strict=True)}
