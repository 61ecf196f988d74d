"""Training of the rotations of all layers from one pass of the dense model, before anything is pruned."""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import RunState
from drot.checkpoint.rotations import rotation_tensors, rotations_from
from drot.core.errors import UserError
from drot.machine.transfer import layers_on_device
from drot.pipeline.context import RunContext, Trained
from drot.pipeline.objective import layer_objective
from drot.pipeline.parallel import train_in_parallel
from drot.rotation.objective import DownProjection, LayerObjective


def train_dense(run: RunContext, state: RunState | None) -> tuple[list[Trained], dict[str, Any] | None]:
    """The rotations of all layers with their records, and with `mode="shared"` the record of the training."""
    if run.recipe.rotation.mode == "shared":
        return train_shared(run, state)
    return train_layers(run, state), None


def train_shared(run: RunContext, state: RunState | None) -> tuple[list[Trained], dict[str, Any]]:
    """Trains one R1 for all layers (`mode="shared"`).

    Returns the rotation and the dampings of each layer, and the record of the training. They are loaded
    instead if an interrupted run has saved them in `state`.
    """
    saved = state.load("rotations") if state else None
    if saved is not None:
        tensors, (records, record) = saved
        return list(zip(rotations_from(tensors, len(run.layers)), records, strict=True)), record
    offload = run.recipe.rotation.layers_per_step > 0
    objectives, records = [], []
    for _, objective, damping in _objectives(run):
        objectives.append(objective.offload(run.dtype) if offload else objective)
        records.append({"damping": damping})
    try:
        rotations, record = run.train(objectives, 0)
    except torch.OutOfMemoryError as fault:
        raise UserError(
            f"{len(objectives)} layers do not fit in the memory of {run.device} at once: "
            "use `layers_per_step=4`, which keeps the other layers in main memory"
        ) from fault
    if state:
        state.save("rotations", rotation_tensors(rotations), [records, record])
    return list(zip(rotations, records, strict=True)), record


def train_layers(run: RunContext, state: RunState | None) -> list[Trained]:
    """Trains the rotation of each layer on the next free device (`hessians="dense"`).

    Rotations are loaded instead if an interrupted run has saved them in `state`.
    """
    done, dampings = {}, {}
    for index in range(len(run.layers)):
        if saved := state.load(f"rotation_{index:05d}") if state else None:
            done[index] = rotations_from(saved[0], 1)[0], saved[1]
    if len(done) == len(run.layers):
        return list(done.values())

    def objectives() -> Iterator[tuple[int, LayerObjective]]:
        for index, objective, damping in _objectives(run, done):
            dampings[index] = damping
            yield index, objective

    def train(index: int, objective: LayerObjective) -> Trained:
        (rotation,), record = run.train([objective], index)
        record["damping"] = dampings[index]
        if state:
            state.save(f"rotation_{index:05d}", rotation_tensors([rotation]), record)
        return rotation, record

    trained = done | train_in_parallel(objectives(), train, run.devices)
    return [trained[index] for index in range(len(run.layers))]


def _objectives(
    run: RunContext, done: Collection[int] = ()
) -> Iterator[tuple[int, LayerObjective, dict[str, float]]]:
    """Yields index, objective and dampings of each layer, with the Hessians of the dense model.

    Layers in `done` are not yielded.
    """
    stream = CalibrationStream.embed(run.model, run.arch, run.training_tokens, run.device)
    on_residual, last = run.recipe.rotation.boundary == "residual", len(run.layers) - 1
    previous_down: list[
        DownProjection
    ] = []  # down_proj of the layer before, if its output is rotated by this layer's R1
    for index, layer in layers_on_device(list(run.layers), run.device, run.model_device):
        run.event("calibrate", index)
        down_takes_next_r1 = on_residual and index < last
        with run.clock("calibrate"):
            if index not in done or (down_takes_next_r1 and index + 1 not in done):
                objective, damping = layer_objective(
                    layer, index, stream, run.arch, run.shape, run.recipe, advance=True
                )
                if on_residual:  # each down_proj is trained with the layer whose R1 it takes
                    down = objective.down_projections
                    objective.down_projections = previous_down + ([] if down_takes_next_r1 else down)
                    previous_down = down if down_takes_next_r1 else []
            else:
                stream.advance(layer, index)
        if index not in done:
            yield index, objective, damping
