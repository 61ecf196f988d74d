"""Rotations of all layers from one pass of the dense model, before anything is pruned."""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import RunState
from drot.checkpoint.rotations import rotation_tensors, rotations_from
from drot.errors import UserError
from drot.pipeline.context import RunContext, Trained
from drot.pipeline.layer import layer_objective
from drot.pipeline.parallel import train_in_parallel
from drot.rotation.objective import Down, LayerObjective


def train_shared(run: RunContext, state: RunState | None) -> tuple[list[Trained], dict[str, Any]]:
    """One R1 for the sum of all layers: each layer's rotation with its dampings, and the record of the
    training."""
    saved = state.load("rotations") if state else None
    if saved is not None:
        tensors, (records, record) = saved
        return list(zip(rotations_from(tensors, len(run.layers)), records, strict=True)), record
    offload = run.recipe.rotation.layers_per_step is not None
    objectives, records = [], []
    for _, objective, damping in _objectives(run):
        objectives.append(objective.offload(run.dtype) if offload else objective)
        records.append({"damping": damping})
    try:
        rotations, record = run.train(objectives, 0)
    except torch.OutOfMemoryError as fault:
        raise UserError(
            f"{len(objectives)} layers at once do not fit in the memory of {run.device}: "
            "`layers_per_step=4` keeps the others in main memory"
        ) from fault
    if state:
        state.save("rotations", rotation_tensors(rotations), [records, record])
    return list(zip(rotations, records, strict=True)), record


def train_each(run: RunContext, state: RunState | None) -> list[Trained]:
    """A rotation a layer, each trained on the next device that is free."""
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
    """Index, objective and dampings of one layer after the other, on inputs that passed the dense model.
    A layer in `done` is not yielded; the stream only passes it."""
    stream = CalibrationStream.embed(run.model, run.arch, run.tokens, run.device)
    on_residual, last = run.recipe.rotation.boundary == "residual", len(run.layers) - 1
    previous: list[Down] = []  # down_proj of the layer before, where it takes the R1 of this layer
    for index, layer in enumerate(run.layers):
        layer.to(run.device)
        run.event("calibrate", index)
        leaves_down = on_residual and index < last
        with run.clock("calibrate"):
            if index not in done or (leaves_down and index + 1 not in done):
                objective, damping = layer_objective(layer, index, stream, run.arch, run.shape, run.recipe)
                if on_residual:  # each down_proj is trained with the layer whose R1 it takes
                    own = objective.downs
                    objective.downs = previous if leaves_down else [*previous, *own]
                    previous = own if leaves_down else []
            stream.advance(layer, index)
        layer.to(run.home)
        if index not in done:
            yield index, objective, damping
