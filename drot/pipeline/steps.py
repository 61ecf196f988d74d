"""The steps of a run over one layer, in the order in which `run.py` takes them."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drot.calibration.dense_reference import DenseReference
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import RunState
from drot.model.boundary import ROTATION_MODULE
from drot.model.layer import DecoderLayer
from drot.model.rotation import Boundary, LayerRotation
from drot.pipeline.context import RunContext
from drot.pipeline.events import Advanced
from drot.pipeline.invariance import check_layer
from drot.pipeline.layer import prune_layer
from drot.pipeline.objective import layer_objective
from drot.pipeline.recover import recover_layer
from drot.pipeline.training import train
from drot.rotation.objective import LayerObjective

#: prefixes of the names of R1 and R2 and of the maps of importance in the part of a finished layer
ROTATION_PREFIX, MAP_PREFIX = "drot.", "drot.figures."


@dataclass
class LayerWork:
    """One layer on its way through the steps.

    layer: the layer, on the first device of the run.
    stream: the inputs of the layer, computed by the pruned layers before it; at the end its outputs. Between
        the steps `merge` and `unrotate` they are in the basis of the layer, otherwise in the original basis.
    dense: the inputs of the layer in the dense model, in main memory; None if the recipe does not use them.
    dense_outputs: the outputs [nsamples, seqlen, d] of the dense layer on `dense`.
    boundary: the boundary of the residual that the layer has to hold.
    output_r1: R1 [d, d] of the basis in which the layer writes.
    objective: the objective of the rotation, until it is trained.
    layer_pass: the pass of the tokens through the layer while it is pruned.
    record: the entry of the layer in the manifest.
    maps: `<name of a linear>.<map>` → the maps of the importance of its weights.
    """

    layer: DecoderLayer
    stream: CalibrationStream
    dense: CalibrationStream | None
    rotation: LayerRotation | None
    boundary: Boundary | None
    record: dict[str, Any]
    dense_outputs: Tensor | None = None
    output_r1: Tensor | None = None
    objective: LayerObjective | None = None
    layer_pass: LayerPass | None = None
    maps: dict[str, Tensor] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)


def calibrate(run: RunContext, work: LayerWork) -> None:
    """Computes the Hessians of the layer's inputs, and from them the objective of its rotation."""
    with run.during("calibrate", work.layer, announced=True):
        first = work.stream.first_samples(len(run.training_tokens))
        work.objective, work.record["damping"] = layer_objective(work.layer, first, run.recipe)


def rotate(run: RunContext, work: LayerWork) -> None:
    """Trains R1 and R2, and checks on one sequence that they leave the outputs of the layer as they are."""
    assert work.objective is not None
    (work.rotation,), record = train(run, [work.objective], work.layer.index)
    work.objective = None
    with run.during("check", work.layer):
        sample = work.stream.first_samples(1)
        sample.hidden_states = sample.hidden_states.to(torch.float32, copy=True)
        error = check_layer(work.layer, sample, work.rotation)
    work.record["rotation"] = record | {"damping": work.record.pop("damping"), "invariance_error": error}


def merge(run: RunContext, work: LayerWork) -> None:
    """Brings the rotation into the weights of the layer, and its inputs into the basis of the layer.

    With a boundary, down_proj takes the basis of the next layer here, so that it is pruned in that basis.
    """
    assert work.rotation is not None
    with run.during("merge", work.layer):
        work.layer.rotate(work.rotation.to(run.device), work.boundary)
        work.stream.rotate(work.rotation.r1)
    work.output_r1 = work.rotation.r1 if work.boundary is None else work.boundary.next_r1


def dense_pass(run: RunContext, work: LayerWork) -> None:
    """Computes the outputs of the layer in the dense model, while the layer is dense."""
    assert work.dense is not None
    with run.during("calibrate", work.layer):
        work.dense_outputs = work.dense.outputs(work.layer)


def prune(run: RunContext, work: LayerWork) -> None:
    """Prunes the linears of the layer, and solves for the weights that are kept."""
    with run.during("prune", work.layer, announced=True):
        reference = None
        if run.recipe.pruning.target == "dense":
            assert work.dense is not None
            inputs = work.dense.offloaded_copy()
            if work.rotation is not None:
                inputs.rotate(work.rotation.r1)
            reference = DenseReference(LayerPass(work.layer.copy(), inputs))
        work.layer_pass = LayerPass(work.layer, work.stream)
        work.record["linears"], work.maps = prune_layer(
            work.layer_pass,
            run.recipe,
            dense=reference,
            rotation=work.rotation,
            output_r1=None if work.boundary is None else work.output_r1,
        )


def recover(run: RunContext, work: LayerWork) -> None:
    """Trains the kept weights of the layer so that its outputs become those of the dense layer."""
    work.layer_pass = None  # the recovery changes the attention too
    index = work.layer.index

    def on_epoch(step: int, steps: int, loss: float) -> None:
        run.emit(Advanced(step="recover", layer=index, done=step, total=steps, loss=loss))

    assert work.dense_outputs is not None
    outputs = CalibrationStream(work.dense_outputs, work.stream.layer_kwargs, run.device)
    targets = outputs.offloaded_copy()
    if work.output_r1 is not None:
        targets.rotate(work.output_r1)
    with run.during("recover", work.layer):
        record = recover_layer(work.layer, work.stream, targets, run.recipe.recovery, on_epoch)
    work.record["recovery"] = dataclasses.asdict(record)


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
    assert work.output_r1 is not None
    with run.during("merge", work.layer):
        work.stream.rotate(work.output_r1.T)


def save(run: RunContext, work: LayerWork, state: RunState) -> None:
    """Saves the finished layer, its rotation and its maps as a part of the unfinished run."""
    with run.during("save", work.layer):
        tensors = dict(work.layer.module.state_dict())
        tensors |= {MAP_PREFIX + name: values for name, values in work.maps.items()}
        if work.rotation is not None:
            tensors |= work.rotation.tensors(ROTATION_PREFIX)
        state.save(part_of(work.layer), tensors, work.record)


def restore(run: RunContext, work: LayerWork, saved: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """Loads a finished layer, which `save` wrote, in place of the steps up to `merge` and `prune`."""
    tensors, work.record = saved
    work.maps = {
        name.removeprefix(MAP_PREFIX): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(MAP_PREFIX)
    }
    if run.rotates:
        work.rotation = LayerRotation.from_tensors(tensors, ROTATION_PREFIX)
        for name in ("r1", "r2"):
            del tensors[ROTATION_PREFIX + name]
        work.output_r1 = work.rotation.r1 if work.boundary is None else work.boundary.next_r1
    layer = work.layer
    if f"{ROTATION_MODULE}.weight" in tensors:
        layer.expect_boundary("residual")
    layer.module.load_state_dict(tensors)
    if work.rotation is not None:
        with run.during("merge", layer):
            work.stream.rotate(work.rotation.r1)


def part_of(layer: DecoderLayer) -> str:
    return f"layer_{layer.index:05d}"
