"""The run over a model's layers: the paper's algorithm 1."""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.records import DistillationRecord
from drot.checkpoint.resume import RunState
from drot.machine.devices import free_memory
from drot.machine.transfer import on_device
from drot.model.rotation import LayerRotation, RotationsOfLayers
from drot.pipeline import steps
from drot.pipeline.context import RunContext
from drot.pipeline.distill import distill
from drot.pipeline.invariance import ModelCheck, check_outputs
from drot.pipeline.memory import further_bytes, pass_bytes
from drot.pipeline.rotation_files import GivenRotations
from drot.pipeline.states import embed, further_states
from drot.pipeline.steps import LayerWork
from drot.pipeline.training import saved_rotations, train_layers, train_shared
from drot.pipeline.weigh import weigh_tokens


class PruningRun:
    """One run of `drot.prune`, which changes its model in place: `execute`, and `rotate_ends` afterwards.

    Of a skeleton, a finished layer is dropped when it is saved. Afterwards the attributes hold the results:
        rotations: layer → its rotation; empty for a model that is not rotated.
        layers: the records of the layers.
        maps: `<full name of a linear>.<map>` → the maps of the importance of its weights.
        shared_record: the record of the training of a shared R1.
        logit_error: the relative error of the rotated model's logits before the pruning.
        untied: whether lm_head was tied to the embedding before.
        dense_states_on_device: whether the hidden states of the dense model lay on the device; None without
            them.
        distillation: the record of the training of all layers together; None without it.

    given: rotations from a file; None trains the rotations.
    """

    def __init__(self, context: RunContext, given: GivenRotations | None = None) -> None:
        self.context, self.given = context, given
        self.rotations: Mapping[int, LayerRotation] = {}
        self.layers: list[dict[str, Any]] = []
        self.maps: dict[str, Tensor] = {}
        self.shared_record: dict[str, Any] | None = None
        self.logit_error: float | None = None
        self.untied = False
        self.dense_states_on_device: bool | None = None
        self.distillation: DistillationRecord | None = None
        self._zeros = self._weights = 0

    @property
    def sparsity(self) -> float:
        """The share of zeros among the weights of the finished layers' linears, in [0, 1]."""
        return self._zeros / self._weights

    def execute(self, state: RunState | None) -> None:
        """Rotates and prunes the layers. `state` saves the finished layers; None saves nothing."""
        with contextlib.nullcontext() if state is None else state.saving():
            self._prune_layers(state)

    def _prune_layers(self, state: RunState | None) -> None:
        run, recipe = self.context, self.context.recipe
        if recipe.pruning.token_weights == "gradient":
            run.token_weights = weigh_tokens(run, state)
        else:
            with run.during("check"):
                check_outputs(run.model, run.tokens[:1], run.device)
        known, records = self.known_rotations(state)
        trained = RotationsOfLayers(partial(steps.load_rotation, run, state) if state else None)
        found = known or trained
        check = None
        if run.rotates:
            with run.during("check"):
                check = ModelCheck(run.model, run.tokens[:1], run.device, run.bases.place, run.ranks)
        with run.during("calibrate"):
            stream = embed(run, run.tokens, state)
            dense = self._dense_stream(stream) if recipe.needs_dense_states else None
            further = further_states(run, stream) if recipe.recovery.distill_epochs else None

        bases: list[Tensor] = []  # in which the first layer reads, and in which each layer writes
        for layer in on_device(run.model.layers, run.device, run.home):
            boundary = run.bases.merged(layer.index, known) if known else None
            record = {"layer": layer.index} | records.get(layer.index, {})
            given = known.get(layer.index)
            rotation = given and given.to(run.device)
            work = LayerWork(layer, stream, dense, further, check, rotation, boundary, record)
            if not (state and steps.restore(run, work, state)):
                if run.rotates and work.rotation is None:
                    steps.rotate(run, work)
                run.begin()
                if run.rotates:
                    steps.merge(run, work)
                steps.prune(run, work)
                if recipe.recovery.recover == "block":
                    steps.recover(run, work)
            steps.advance(run, work)
            if run.rotates:
                steps.unrotate(run, work)
            if work.rotation is not None and given is None:
                trained.keep(layer.index, work.rotation.to("cpu"))
            if work.rotation is not None and work.output_r1 is not None:
                bases = [*(bases[:1] or [work.rotation.r1]), work.output_r1]
            self._keep(work, found)
            if state and not work.restored:
                steps.save(run, work, state, known=given is not None)
        if check is not None:
            with run.during("check"):
                self.logit_error = check.logit_error(found[run.bases.layers - 1])
        if further is not None:
            del stream, dense, work
            self.distillation = distill(run, further, (bases[0], bases[1]) if bases else None, state)
        self.rotations = found
        if state is not None and self._trains_first and isinstance(known, RotationsOfLayers):
            # from now on rank 0 alone reads
            self.rotations = saved_rotations(run, state.loaded_alone) if run.ranks.first else {}

    def _dense_stream(self, stream: CalibrationStream) -> CalibrationStream:
        """A copy of the stream for the dense model, on the device if it has room, or where the stream is."""
        run = self.context
        if stream.empty is not None:
            self.dense_states_on_device = False
            return stream.copy()
        needed = run.device_memory + further_bytes(run.sizes, run.recipe, run.dtype)
        # the copy, what the layers lend in both, and what the passes of both keep
        numbers = run.sizes.hidden + 2 * run.sizes.lent
        needed += run.sizes.tokens * numbers * run.dtype.itemsize + 2 * pass_bytes(run.sizes, run.dtype)
        self.dense_states_on_device = needed <= free_memory(run.device)
        return stream.copy() if self.dense_states_on_device else stream.offloaded_copy()

    @property
    def _trains_first(self) -> bool:
        """Whether all rotations are trained before a layer is pruned."""
        run = self.context
        return self.given is None and run.rotates and run.recipe.rotation.hessians == "dense"

    def known_rotations(
        self, state: RunState | None
    ) -> tuple[Mapping[int, LayerRotation], Mapping[int, dict[str, Any]]]:
        """The rotations that are known before the pruning, and what their training adds to the records."""
        run = self.context
        if self.given is not None:
            return self.given.rotations, {}
        if not self._trains_first:
            return {}, {}
        if run.recipe.rotation.mode == "shared":
            rotations, self.shared_record = train_shared(run, state)
            return dict(enumerate(rotations)), {}
        trained, records = train_layers(run, state)
        return trained, {index: {"rotation": record} for index, record in records.items()}

    def _keep(self, work: LayerWork, rotations: Mapping[int, LayerRotation]) -> None:
        """Takes over the results of a layer. rotations: as in `steps.finish`."""
        zeros, weights = steps.finish(self.context, work, rotations)
        self._zeros, self._weights = self._zeros + zeros, self._weights + weights
        self.layers.append(work.record)
        for name, values in work.maps.items():
            linear, _, kind = name.rpartition(".")
            self.maps[f"{work.layer.linears[linear].full_name}.{kind}"] = values

    def rotate_ends(self) -> None:
        """Rotates the embedding and lm_head of a model that is rotated, which lie in memory (`in_memory`)."""
        run, rotations = self.context, self.rotations
        if not run.rotates_stream:
            return
        first, last = rotations[0].r1, rotations[run.bases.layers - 1].r1
        layers = range(len(run.model.image_writers) - 1)
        behind = (rotations[run.bases.writes_in(index)].r1 for index in layers)
        self.untied = run.model.rotate_ends(first, last, run.device, behind)
        if run.bases.place is None:  # the model keeps its stock architecture
            assert torch.equal(first, last)
