"""The steps of a run over one layer, in the order in which `run.py` takes them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import LAYER_PART, RunState
from drot.machine.products import merging_dtype
from drot.model.layer import DecoderLayer
from drot.model.rotation import Boundary, LayerRotation
from drot.model.stored import stored_tensors
from drot.pipeline.context import RunContext
from drot.pipeline.invariance import ModelCheck
from drot.pipeline.layer import prune_layer
from drot.pipeline.objective import layer_objective
from drot.pipeline.recover import recover_layer
from drot.pipeline.saved_layer import as_saved, load_tensors, round_layer
from drot.pipeline.training import own_r3, train

#: End of the name of the part with what a run needs beside a finished layer: its rotation in fp64, unless it
#: was known before the pruning, and the maps of the importance of its weights.
RUN_SUFFIX = "_run"
#: prefixes of the names of their tensors
ROTATION_PREFIX, MAP_PREFIX = "drot.", "drot.figures."


@dataclass
class LayerWork:
    """One layer on its way through the steps.

    layer: the layer, on the first device of the run.
    stream: the inputs of the layer, computed by the pruned layers before it; at the end its outputs. Between
        the steps `merge` and `unrotate` they are in the basis of the layer, otherwise in the original basis,
        as they are all the time in a family whose stream cannot rotate.
    dense: the same in the dense model, whose outputs the step `prune` computes; None if the recipe does not
        use them.
    further: the same of the tokens of a training of all layers together, in the dense model; None without it.
    check: of the rotated model, which has passed the layers before this layer; None without rotations.
    rotation: on the device of the run, to which it is copied once.
    boundary: the boundary of the residual that the layer has to hold, or that inside of the layer.
    output_r1: R1 [d, d] of the basis in which the layer writes; None is the original basis.
    layer_pass: the pass of the tokens through the layer while it is pruned.
    record: the entry of the layer in the manifest.
    maps: `<name of a linear>.<map>` → the maps of the importance of its weights.
    restored: whether the layer was pruned before the run was interrupted.
    """

    layer: DecoderLayer
    stream: CalibrationStream
    dense: CalibrationStream | None
    further: CalibrationStream | None
    check: ModelCheck | None
    rotation: LayerRotation | None
    boundary: Boundary | None
    record: dict[str, Any]
    output_r1: Tensor | None = None
    layer_pass: LayerPass | None = None
    maps: dict[str, Tensor] = field(default_factory=dict)
    restored: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def streams(self) -> list[CalibrationStream]:
        return [self.stream, *self.of_dense_model]

    @property
    def of_dense_model(self) -> list[CalibrationStream]:
        return [stream for stream in (self.dense, self.further) if stream is not None]


def rotate(run: RunContext, work: LayerWork) -> None:
    """Trains the rotation for the Hessians of the layer's inputs."""
    index = work.layer.index
    with run.during("calibrate", work.layer, announced=True):
        first = work.stream.first_samples(len(run.training_tokens))
        objective, damping = layer_objective(work.layer, first, run.recipe)
    assert objective is not None
    (trained,), record = train(run, [objective], index, run.ranks)
    work.rotation = own_r3(run, {index: trained})[index]
    if run.bases.place == "inside":
        work.boundary = run.bases.held(index, {index: work.rotation})
    work.record["rotation"] = record | {"damping": damping}


def merge(run: RunContext, work: LayerWork) -> None:
    """Checks the rotation, and brings it into the weights of the layer, and the inputs into its basis.

    With a boundary, down_proj takes the basis of the next layer here, so that it is pruned in that basis.
    """
    assert work.rotation is not None
    error = _check(run, work)
    if "rotation" in work.record:
        work.record["rotation"]["invariance_error"] = error
    with run.during("merge", work.layer):
        dtype = merging_dtype(run.device)
        work.layer.rotate(work.rotation, work.boundary, dtype=dtype, ranks=run.ranks)
        _enter_basis(run, work)


def _check(run: RunContext, work: LayerWork) -> float:
    """The error of the layer's outputs on one sequence, which its rotation leaves as they are."""
    assert work.check is not None and work.rotation is not None
    with run.during("check", work.layer):
        return work.check.pass_through(work.layer, work.rotation, work.boundary)


def _enter_basis(run: RunContext, work: LayerWork) -> None:
    """Brings the inputs of the layer into its basis, if it has its own."""
    assert work.rotation is not None
    if not run.rotates_stream:
        return
    for stream in work.streams:
        stream.rotate(work.rotation.r1)
    work.output_r1 = work.rotation.r1 if work.boundary is None else work.boundary.next_r1


def prune(run: RunContext, work: LayerWork) -> None:
    """Prunes the linears of the layer, and solves for the weights that are kept."""
    with run.during("prune", work.layer, announced=True):
        copy = work.layer.copy() if work.of_dense_model else work.layer
        reserve = run.device_memory
        dense = None if work.dense is None else LayerPass(copy, work.dense, fixed=True, reserve=reserve)
        to_dense = run.recipe.pruning.target == "dense"
        work.layer_pass = LayerPass(work.layer, work.stream, reserve=reserve)
        work.record["linears"], work.maps = prune_layer(
            work.layer_pass,
            run.recipe,
            dense=dense if to_dense else None,
            rotation=work.rotation,
            output_r1=work.output_r1,
            save_dtype=run.save_dtype,
        )
        if dense is not None:
            dense.advance()
        if work.further is not None:
            work.further.advance(copy)


def recover(run: RunContext, work: LayerWork) -> None:
    """Trains the kept weights of the layer so that its outputs become those of the dense layer."""
    work.layer_pass = None  # the recovery changes the attention too
    index = work.layer.index

    def on_epoch(step: int, steps: int, loss: float) -> None:
        run.report("recover", index, done=step, total=steps, loss=loss)

    assert work.dense is not None
    with run.during("recover", work.layer):
        record = recover_layer(work.layer, work.stream, work.dense, run.recipe.recovery, on_epoch)
        round_layer(work.layer, run.save_dtype)
    work.record["recovery"] = record.model_dump()


def advance(run: RunContext, work: LayerWork) -> None:
    """Replaces the inputs of the layer by the outputs of the pruned layer."""
    with run.during("calibrate", work.layer):
        if work.layer_pass is None:
            work.stream.advance(work.layer)
        else:
            work.layer_pass.advance()
    work.layer_pass = None
    work.record.setdefault("seconds", time.perf_counter() - work.started)  # a restored layer has its own


def unrotate(run: RunContext, work: LayerWork) -> None:
    """Brings the outputs of the layer back into the original basis."""
    if work.output_r1 is None:
        return
    with run.during("merge", work.layer):
        for stream in work.streams:
            stream.rotate(work.output_r1.T)


def finish(run: RunContext, work: LayerWork, rotations: Mapping[int, LayerRotation]) -> tuple[int, int]:
    """Brings the layer into the form of the checkpoint. Returns the zeros and the weights of its linears.

    Linears that are trained after this are not packed yet.

    rotations: those of this layer and of the layers before it, for the boundary of the layer's input.
    """
    layer = work.layer
    boundary = run.bases.held(layer.index, rotations) if run.bases.place == "input" else None
    if boundary is not None and work.restored:
        layer.apply_boundary("input")
    elif boundary is not None:
        layer.hold(boundary, run.ranks)
    with run.during("save", layer):
        return as_saved(layer, run.save_dtype, run.dense_linears if work.further is None else None)


def save(run: RunContext, work: LayerWork, state: RunState, *, known: bool) -> None:
    """Saves the finished layer in a thread: its shard of the checkpoint, and what the run needs beside it.

    known: whether the rotation was known before the pruning, and needs no saving.
    """
    with run.during("save", work.layer):
        beside = {MAP_PREFIX + name: values for name, values in work.maps.items()}
        if work.rotation is not None and not known:
            beside |= work.rotation.named(ROTATION_PREFIX)
        name = part_of(work.layer)
        state.save_later({name: (stored_tensors(work.layer), work.record), name + RUN_SUFFIX: (beside, None)})


def load_rotation(run: RunContext, state: RunState, index: int) -> LayerRotation:
    """The rotation that `save` wrote of a layer, on rank 0."""
    assert run.ranks.first, "the other ranks need the rotations of two layers, which lie in memory"
    tensors = state.loaded_alone(part_of(run.model.layers[index]) + RUN_SUFFIX)
    return LayerRotation.from_tensors(tensors, ROTATION_PREFIX)


def restore(run: RunContext, work: LayerWork, state: RunState) -> bool:
    """Loads a finished layer, which `save` wrote, in place of the steps up to `merge` and `prune`.

    Returns whether there is one.
    """
    layer, name = work.layer, part_of(work.layer)
    shard, saved = state.load(name), state.load(name + RUN_SUFFIX)
    if shard is None or saved is None:
        return False
    run.begin()
    (tensors, work.record), (beside, _) = shard, saved
    work.restored = True
    work.maps = {
        name.removeprefix(MAP_PREFIX): values
        for name, values in beside.items()
        if name.startswith(MAP_PREFIX)
    }
    if run.rotates:
        if work.rotation is None:
            work.rotation = LayerRotation.from_tensors(beside, ROTATION_PREFIX).to(run.device)
        if run.bases.place == "inside":
            work.boundary = run.bases.held(layer.index, {layer.index: work.rotation})
        _check(run, work)
        with run.during("merge", layer):
            _enter_basis(run, work)
    if work.of_dense_model:
        with run.during("calibrate", layer):
            dense = layer.copy()
            if work.rotation is not None:
                dense.rotate(work.rotation, work.boundary, dtype=merging_dtype(run.device))
            for stream in work.of_dense_model:
                stream.advance(dense)
    load_tensors(layer, tensors, run.bases)
    return True


def part_of(layer: DecoderLayer) -> str:
    return f"{LAYER_PART}{layer.index:05d}"
