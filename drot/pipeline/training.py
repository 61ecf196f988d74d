"""The training of rotations in a run: of one layer, of all from the dense model, or of one shared R1."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drot.checkpoint.resume import RunState
from drot.core.errors import UserError
from drot.machine.devices import free_memory, is_gpu
from drot.machine.ranks import ALONE, CPU, Ranks
from drot.machine.transfer import on_device
from drot.model.rotation import LayerRotation, RotationsOfLayers
from drot.pipeline.context import RunContext
from drot.pipeline.memory import training_memory
from drot.pipeline.objective import layer_objective
from drot.pipeline.states import embed
from drot.rotation.objective import LayerObjective
from drot.rotation.stack import LeftRotated
from drot.rotation.train import train_rotation

#: of the names of the tensors of a saved rotation
PREFIX = "layers.0."


def train(
    run: RunContext, objectives: list[LayerObjective], index: int | None, ranks: Ranks
) -> tuple[list[LayerRotation], dict[str, Any]]:
    """The trained rotation of each objective, on the device of the run, and the record of the training.

    objectives: one objective, or the objectives of all layers, which then share R1.
    index: the layer; None for all layers.
    ranks: those that train these objectives together.
    """

    def on_step(step: int, steps: int, loss: float) -> None:
        run.report("rotate", index, done=step, total=steps, loss=loss)

    layer = None if index is None else run.model.layers[index]
    with run.during("rotate", layer):
        rotations, figures = train_rotation(objectives, run.recipe.rotation, on_step, run.device, ranks)
    return rotations, {**figures, "nsamples": len(run.training_tokens)}


def own_r3(run: RunContext, trained: Mapping[int, LayerRotation]) -> dict[int, LayerRotation]:
    """The trained rotations, each with the R3 of the layer's own down_proj, of each of its experts.

    An R3 is trained in the objective of the layer in whose basis down_proj writes. It is the identity for a
    down_proj that stays dense.
    """
    block = run.recipe.rotation.down_block
    if block is None:
        return dict(trained)
    layers = run.model.layers
    found = {
        index: torch.eye(block, dtype=torch.float64, device=rotation.r1.device).repeat(
            layers[index].down_inputs() // block, 1, 1
        )
        for index, rotation in trained.items()
    }
    for index, rotation in trained.items():
        owners = [
            layer
            for layer in layers[max(index - 1, 0) : index + 1]
            if run.bases.writes_in(layer.index) == index
        ]
        start = 0  # of the next linear in the trained R3, which has those that are pruned alone
        for layer in owners:
            stop = 0  # of a linear in the R3 of its layer
            for linear in layer.downs:
                count = layer.shape_of(linear.spec)[1] // block
                stop += count
                if not run.recipe.pruning.keeps(linear.full_name) and rotation.r3 is not None:
                    if layer.index in found:
                        found[layer.index][stop - count : stop] = rotation.r3[start : start + count]
                    start += count
    return {index: dataclasses.replace(rotation, r3=found[index]) for index, rotation in trained.items()}


def train_shared(run: RunContext, state: RunState | None) -> tuple[list[LayerRotation], dict[str, Any]]:
    """The rotation of each layer, which all share one R1 (`mode="shared"`), and the record of their training.

    They are loaded instead if an interrupted run has saved them in `state`.
    """
    if saved := state.load("rotations") if state else None:
        tensors, record = saved
        loaded = [LayerRotation.from_tensors(tensors, f"layers.{i}.") for i in range(run.bases.layers)]
        return [dataclasses.replace(rotation, r1=loaded[0].r1) for rotation in loaded], record
    offload = run.recipe.rotation.layers_per_step > 0
    objectives, dampings = [], []
    try:
        for _, objective, damping in _objectives(run, state):
            assert objective is not None, "every rank needs every objective"
            objectives.append(objective.to(CPU) if offload else objective)
            dampings.append(damping)
        trained, record = train(run, objectives, None, run.ranks)
    except torch.OutOfMemoryError as fault:
        if offload:  # one layer alone does not fit
            raise
        raise UserError(
            f"{run.bases.layers} layers do not fit in the memory of {run.device} at once: "
            "use `layers_per_step=4`, which keeps the other layers in main memory"
        ) from fault
    rotations = list(own_r3(run, {index: each.to("cpu") for index, each in enumerate(trained)}).values())
    record["damping"] = dampings
    if state:
        tensors = {}
        for index, rotation in enumerate(rotations):
            tensors |= rotation.tensors(f"layers.{index}.")
        state.save("rotations", tensors, record)
    return rotations, record


def train_layers(
    run: RunContext, state: RunState | None
) -> tuple[RotationsOfLayers, dict[int, dict[str, Any]]]:
    """Trains the rotation of each layer, each on one rank (`hessians="dense"`); the records by layer.

    Layers that share an R1 are trained together. The Hessians are those of the dense model, from one pass
    before anything is pruned. Rotations are saved in `state` as they were trained (`own_r3`), in a thread,
    while the next ones are trained. When they are needed, they are loaded from it onto the device of the run.
    Without `state`, all rotations stay in memory. Those that an interrupted run has saved are not trained
    again.
    """
    done: dict[int, dict[str, Any]] = {}
    trained: dict[int, LayerRotation] = {}
    keeps = torch.device("cpu" if state is None or run.ranks.first else "meta")
    for index in range(run.bases.layers):
        if saved := state.load(_part_of(index)) if state else None:
            done[index] = saved[1]

    def train_each(batch: Sequence[Mapping[int, tuple[LayerObjective | None, dict[str, float]]]]) -> None:
        """Trains one R1 on each rank at the same time, and keeps the results of all.

        batch: the layers of each R1.
        """
        own: dict[int, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        if run.ranks.rank < len(batch):
            layers = batch[run.ranks.rank]
            objectives = [objective for objective, _ in layers.values() if objective is not None]
            rotations, record = train(run, objectives, min(layers), ALONE)
            for rotation, (index, (_, damping)) in zip(rotations, layers.items(), strict=True):
                own[index] = rotation.named(PREFIX), record | {"damping": damping}
        parts = {}
        for rank, layers in enumerate(batch):
            for index in layers:
                tensors, done[index] = run.ranks.on_rank(rank, partial(own.__getitem__, index), keeps)
                if state is None:
                    trained[index] = LayerRotation.from_tensors(tensors, PREFIX).to("cpu")
                elif run.ranks.first:  # the other ranks keep none
                    parts[_part_of(index)] = tensors, done[index]
        if state is not None:
            state.save_later(parts)

    if len(done) < run.bases.layers:
        segments = {run.bases.segment(index) for index in range(run.bases.layers) if index not in done}
        for index in [index for index in done if run.bases.segment(index) in segments]:
            del done[index]  # a run that was killed had saved only some of the layers that share an R1
        batch: list[dict[int, tuple[LayerObjective | None, dict[str, float]]]] = []
        layers: dict[int, tuple[LayerObjective | None, dict[str, float]]] = {}
        for index, objective, damping in _objectives(run, state, done, divided=True):
            layers[index] = objective if len(batch) == run.ranks.rank else None, damping
            if run.bases.ends_segment(index):
                batch, layers = [*batch, layers], {}
            if len(batch) == run.ranks.size:
                train_each(batch)
                batch = []
        train_each(batch)

    if state is None:
        rotations = _with_own_r3(run, trained)
    else:
        rotations = saved_rotations(
            run, partial(state.loaded, device=run.device), partial(state.read_ahead, device=run.device)
        )
    return rotations, dict(sorted(done.items()))


def saved_rotations(
    run: RunContext,
    loaded: Callable[[str], dict[str, Tensor]],
    read_ahead: Callable[[str], None] = lambda name: None,
) -> RotationsOfLayers:
    """The rotations that `train_layers` saved.

    loaded: gives the tensors of a part. read_ahead: gets the name of the part that is needed after it.
    """

    def load(index: int) -> LayerRotation:
        tensors = loaded(_part_of(index))
        read_ahead(_part_of(index + 1))
        return LayerRotation.from_tensors(tensors, PREFIX)

    return _with_own_r3(run, RotationsOfLayers(load, range(run.bases.layers)))


def _with_own_r3(run: RunContext, trained: Mapping[int, LayerRotation]) -> RotationsOfLayers:
    def own(index: int) -> LayerRotation:
        needed = sorted({index, run.bases.writes_in(index)})
        return own_r3(run, {each: trained[each] for each in needed})[index]

    return RotationsOfLayers(own, range(run.bases.layers))


def _part_of(index: int) -> str:
    return f"rotation_{index:05d}"


def layers_ahead(run: RunContext) -> int:
    """How many layers a GPU gets while the ranks train: those of the next batch, as far as it has room."""
    if run.ranks.size == 1 or not is_gpu(run.device):
        return 1
    needed = max(run.device_memory, training_memory(run.sizes, run.recipe))
    more = int((free_memory(run.device) - needed) // (run.sizes.layer_weights * run.dtype.itemsize))
    return max(1, min(run.ranks.size, 1 + more))


def _objectives(
    run: RunContext, state: RunState | None, done: Collection[int] = (), *, divided: bool = False
) -> Iterator[tuple[int, LayerObjective | None, dict[str, float]]]:
    """Yields index, objective and dampings of each layer that is not in `done`, from the dense model.

    divided: whether each rank needs the objectives of every n-th of the R1 of these layers, and gets None for
        the other layers.
    """
    yielded = 0  # R1
    stream = embed(run, run.training_tokens, state)
    before: list[LeftRotated] = []  # of the layer before, if this layer's R1 rotates their outputs
    ahead = layers_ahead(run) if divided else 1
    for layer in on_device(run.model.layers, run.device, run.home, ahead=ahead):
        index, writes_next = layer.index, run.bases.writes_next(layer.index)
        with run.during("calibrate", layer, announced=True):
            needed = index not in done or (writes_next and index + 1 not in done)
            if needed:
                residual = run.bases.place == "residual"  # an objective has a part of the layer before
                mine = not divided or residual or yielded % run.ranks.size == run.ranks.rank
                objective, damping = layer_objective(layer, stream, run.recipe, advance=True, own=mine)
                if residual:
                    assert objective is not None
                    # each down_proj is trained with the layer whose R1 it takes
                    own = objective.left_rotated
                    objective.left_rotated = before + ([] if writes_next else own)
                    before = own if writes_next else []
            else:
                stream.advance(layer)
        if index not in done:
            yielded += run.bases.ends_segment(index)
            yield index, objective, damping
