"""Distillation: the kept weights of all pruned layers are trained together towards the dense model.

The loss of a token is KL(dense ‖ pruned) of the next token, on sequences that the pruning has not read: on
those of the calibration the pruned model is much nearer to the dense model than on others. The run passes
them through the dense layers before these are pruned, so that the last hidden states give the logits, and no
dense model is in memory. The recovery (recover.py) trains one layer after the other towards the hidden states
of the dense model; here a layer is trained for what the model makes of its outputs in the end.

Where the memory does not suffice for more, only the inputs of the layers are kept for the backward pass,
which computes each layer again.
"""

import logging
import math
from typing import Any

import torch
from rich.filesize import decimal as size_text
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drot.calibration.stream import CalibrationStream
from drot.calibration.token_weights import LOGIT_TOKENS
from drot.checkpoint.records import DistillationRecord
from drot.checkpoint.resume import DISTILLED, RunState
from drot.config.settings import values_of
from drot.machine.devices import free_memory, is_gpu
from drot.machine.memory import available_memory
from drot.machine.ranks import CPU
from drot.model.decoder import DecoderModel
from drot.model.dtypes import stored_floats
from drot.model.layer import DecoderLayer
from drot.model.stored import load_stored, stored_tensors
from drot.pipeline.batches import DISTILL_HELD_OUT_SHARE, Batches, repeats, schedule
from drot.pipeline.context import RunContext
from drot.pipeline.kept_weights import KeptWeights
from drot.pipeline.memory import distillation_memory
from drot.pipeline.saved_layer import as_saved, dense_tensors, round_layer
from drot.pipeline.states import further_states
from drot.pipeline.steps import part_of
from drot.text.source import calibration_hash

logger = logging.getLogger("drot")

#: A training that raises the KL of the held-out sequences by more than this share is undone. A few sequences
#: say no more: one that raised it by 1.5 % on two sequences lowered a perplexity from 29.1 to 27.0.
HARM = 0.05
#: share of the free memory that a distillation may take by its estimate
USED_SHARE = 0.95


def lacking(run: RunContext) -> str | None:
    """What the training of all layers together lacks in memory, by its estimate; None if that suffices."""
    if (needed := _needed(run)) <= (free := _free(run)):
        return None
    where = f"memory of {run.device}" if is_gpu(run.device) else "main memory"
    return f"that takes about {size_text(needed)} of the {where}, and {size_text(free)} are free"


def distilled_part(layer: DecoderLayer) -> str:
    """The name of the part of a run's state that holds a layer after the distillation."""
    return f"{DISTILLED}_{part_of(layer)}"


def distill(
    run: RunContext,
    dense: CalibrationStream,
    bases: tuple[Tensor, Tensor] | None,
    state: RunState | None,
) -> DistillationRecord:
    """Trains the kept weights and the norms of all layers, and brings the layers into their saved form.

    The layers are the pruned ones, not packed; those of a skeleton are in `state`. Afterwards they are as
    `as_saved` leaves them, and `state` holds each as its `distilled_part`. What an interrupted run has
    trained with the same settings is not trained again.

    If the memory does not suffice, or the training does not help, the pruned weights stay as they are. A
    warning and the record say so.

    Args:
        dense: the last hidden states of `run.distill_tokens` in the dense model, in the original basis.
        bases: R1 [d, d] of the bases in which the first layer reads and the last one writes; None if the
            stream is not rotated.
        state: saves the layers and the record; None saves nothing.
    """
    with run.during("distill", announced=True):
        if state is not None:
            state.wait()  # a layer that is still being written must not change
            if (record := _restored(run, state)) is not None:
                return record
        record = _record_of_training(run, dense, bases, state)
        for layer in run.model.layers:
            if run.model.is_skeleton and not record.trained:
                _load(run, state, layer)
            as_saved(layer, run.save_dtype, run.dense_linears)
            if state is not None:
                state.save_later({distilled_part(layer): (stored_tensors(layer), None)})
            layer.to(run.home)
        if state is not None:
            state.save_later({DISTILLED: ({}, [_settings(run), record.model_dump()])})
    return record


def _settings(run: RunContext) -> dict[str, Any]:
    """What a distillation depends on beside the pruned layers, in plain JSON types."""
    assert run.distill_tokens is not None
    chosen = {
        key: value for key, value in values_of(run.recipe.recovery).items() if key.startswith("distill")
    }
    return {**chosen, "tokens": calibration_hash(run.distill_tokens)}


def _restored(run: RunContext, state: RunState) -> DistillationRecord | None:
    """Brings the layers into their saved form, as an interrupted run has trained them.

    None if no run has, or with other settings, or if a layer is damaged.
    """
    saved = state.load(DISTILLED)
    if saved is None or saved[1][0] != _settings(run):
        return None
    for check in (True, False):  # all must be whole before one is loaded
        for layer in run.model.layers:
            part = state.load(distilled_part(layer))
            if part is None:
                return None
            if not check:
                layer.module.to_empty(device=run.device)
                load_stored(layer, dense_tensors(layer, part[0]))
                as_saved(layer, run.save_dtype, run.dense_linears)
                layer.to(run.home)
    return DistillationRecord(**saved[1][1])


def _record_of_training(
    run: RunContext, dense: CalibrationStream, bases: tuple[Tensor, Tensor] | None, state: RunState | None
) -> DistillationRecord:
    """Trains, if the memory suffices. A model in memory has its pruned weights again if that does not help.

    A skeleton does not: the caller reads its pruned layers again.
    """
    free, layers = _free(run), run.model.layers
    if reason := lacking(run):
        record = DistillationRecord(left_out=reason)
    else:
        # of a model in memory; those of a skeleton are in `state`
        copies = [] if run.model.is_skeleton else [KeptWeights([layer]).state(CPU) for layer in layers]

        def trained(*, keeps: bool) -> DistillationRecord:
            """`_train`, which a GPU with too little memory ends without an error of the run."""
            try:
                for layer in layers:
                    _load(run, state, layer)
                return _train(run, dense, bases, keeps=keeps)
            except torch.OutOfMemoryError:
                if run.ranks.size > 1:  # the others are in a sum that this rank will not join
                    raise
                return DistillationRecord(left_out=f"the memory of {run.device} did not suffice")

        def as_pruned() -> None:
            for layer, weights in zip(layers, copies, strict=False):
                KeptWeights([layer]).load(weights)

        # where a rank lacks memory in the training, the others would wait for it
        keeps = run.ranks.size == 1 and _needed(run, keeps=True) <= free
        record = trained(keeps=keeps)
        if keeps and record.left_out:
            as_pruned()
            record = trained(keeps=False)
        if not record.trained:
            as_pruned()
    if record.left_out:
        logger.warning("the kept weights are not trained towards the dense model: %s", record.left_out)
    return record


def _free(run: RunContext) -> int:
    """The bytes that a distillation may take on the device, on the rank that has the least."""
    on_gpu = is_gpu(run.device)
    free = free_memory(run.device) if on_gpu else available_memory() // run.ranks.local_size
    there = (
        tensor for layer in run.model.layers for tensor in layer.tensors() if tensor.device == run.device
    )
    return int(USED_SHARE * min(run.ranks.each(free + sum(tensor.nbytes for tensor in there))))


def _needed(run: RunContext, *, keeps: bool = False) -> int:
    sizes, copies = run.new_sizes(), 0
    if not (run.model.is_skeleton or is_gpu(run.device)):  # of the pruned weights
        copies = sum(tensor.nbytes for layer in run.model.layers for tensor in layer.tensors())
    return copies + distillation_memory(sizes, run.recipe, run.dtype, keeps=keeps)


def _load(run: RunContext, state: RunState | None, layer: DecoderLayer) -> None:
    """Brings a pruned layer to the device of the run, in the dtypes of its computation."""
    if run.model.is_skeleton:
        assert state is not None, "a skeleton's layers are in the state of the run"
        layer.module.to_empty(device=run.device)
        load_stored(layer, state.loaded(part_of(layer), run.device))
    layer.module.to(run.device).requires_grad_(False)
    for name, tensor in stored_floats(layer.module):
        tensor.data = tensor.data.to(layer.stored_dtype(layer.prefix + name, run.dtype))


@torch.enable_grad()  # the caller may have turned gradients off
def _train(
    run: RunContext, dense: CalibrationStream, bases: tuple[Tensor, Tensor] | None, *, keeps: bool
) -> DistillationRecord:
    """The training of all layers, which lie on the device of the run.

    keeps: whether the layers keep what the backward pass needs; otherwise it computes each layer again.
    """
    settings, ranks = run.recipe.recovery, run.ranks
    model, layers = run.model, run.model.layers
    inputs = further_states(run, dense)
    if bases is not None:
        inputs.rotate(bases[0])
    norm, head = model.norm_and_head(run.device)
    back = None if bases is None else bases[1].T.to(run.device, run.dtype)
    length = inputs.hidden_states.shape[1]

    def outputs(sequences: Tensor) -> Tensor:
        hidden, lent = inputs.batch(sequences), dict[str, Any]()
        for layer in layers:
            kwargs = inputs.arguments(layer, sequences, lent)
            if keeps:
                hidden = layer(hidden, kwargs)
            else:
                hidden = checkpoint(layer, hidden, kwargs, use_reentrant=False, preserve_rng_state=False)
        return hidden if back is None else hidden @ back

    @torch.no_grad()
    def held_out() -> float:
        lost = sum(
            divergence(model, outputs(part), dense.batch(part), norm, head)[0] for part in batches.held_out()
        )
        return ranks.total(lost) / (batches.held_out_count * length)

    weights = KeptWeights(layers, ranks)
    batches = Batches(
        len(inputs.hidden_states), settings.distill_batch, ranks, seed=0, share=DISTILL_HELD_OUT_SHARE
    )
    assert run.distill_tokens is not None
    passes = settings.distill_epochs * repeats(settings.distill_nsamples, len(run.distill_tokens))
    steps = passes * batches.steps
    before, step, diverged = held_out(), 0, False
    with weights.running():
        for _ in range(passes):
            total = 0.0
            for batch, own, _ in batches.epoch():
                weights.rate = settings.distill_lr * schedule(step, steps)
                found = outputs(batch)
                lost, gradient = divergence(model, found.detach(), dense.batch(batch), norm, head)
                found.backward(gradient if own else torch.zeros_like(gradient))
                total += lost if own else 0.0
                step += 1
                shown = lost / (len(batch) * length)
                run.report("distill", done=step, total=steps, loss=shown)
            if diverged := not math.isfinite(ranks.total(total)):
                break
    after = math.nan
    if not diverged:
        for layer in layers:
            round_layer(layer, run.save_dtype)
        after = held_out()
    helps = after <= (1 + HARM) * before  # not if it is NaN
    if not helps:
        logger.warning(
            "the distillation raised the loss on held-out sequences, %.4f before and %.4f after: the "
            "weights stay as they were pruned. A lower `distill_lr` may help", before, after,
        )  # fmt: skip
    kl_before, kl_after = (value if math.isfinite(value) else None for value in (before, after))
    return DistillationRecord(kl_before=kl_before, kl_after=kl_after, passes=passes, trained=helps)


def divergence(
    model: DecoderModel, hidden: Tensor, wanted: Tensor, norm: Any, head: Any
) -> tuple[float, Tensor]:
    """Σ KL(dense ‖ pruned) of the next token over all tokens, and its gradient in `hidden`.

    The sum, and not the mean, whose gradients fp16 could not hold. Adam does not see the difference.

    Args:
        hidden: the outputs of the last pruned layer [sequences, seqlen, d], in the original basis.
        wanted: those of the last dense layer.
        norm, head: the last norm and the head of `model`, on the device of `hidden`.
    """
    gradient, total = torch.empty_like(hidden), torch.zeros((), dtype=torch.float64, device=hidden.device)
    parts = (values.flatten(0, 1).split(LOGIT_TOKENS) for values in (hidden, wanted, gradient))
    for found, dense, of_part in zip(*parts, strict=True):
        with torch.no_grad():
            target = _log_probabilities(model, dense, norm, head)
        own = found.detach().requires_grad_()
        with torch.enable_grad():
            lost = F.kl_div(
                _log_probabilities(model, own, norm, head), target, reduction="sum", log_target=True
            )
        (found_gradient,) = torch.autograd.grad(lost, own)
        of_part.copy_(found_gradient)
        total += lost.detach()
    return float(total), gradient


def _log_probabilities(model: DecoderModel, hidden: Tensor, norm: Any, head: Any) -> Tensor:
    """The log of the probabilities of the next token [tokens, vocabulary], in fp32 at least."""
    logits = model.logits_of(head(norm(hidden[None]))[0])
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
