"""The run over a model's layers: the paper's algorithm 1."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import RunState
from drot.machine.transfer import on_device
from drot.model.rotation import LayerRotation
from drot.pipeline import steps
from drot.pipeline.context import RunContext
from drot.pipeline.invariance import check_model, check_outputs
from drot.pipeline.rotation_files import GivenRotations
from drot.pipeline.steps import LayerWork
from drot.pipeline.training import train_layers, train_shared


class PruningRun:
    """One run of `drot.prune` on a loaded model, which is changed in place.

    Afterwards the attributes hold the results:
        rotations: layer → its rotation; empty for a model that is not rotated.
        layers: the records of the layers.
        maps: `<full name of a linear>.<map>` → the maps of the importance of its weights.
        shared_record: the record of the training of a shared R1.
        logit_error: the relative error of the rotated model's logits before the pruning.
        untied: whether lm_head was tied to the embedding before.

    given: rotations from a file; None trains the rotations.
    """

    def __init__(self, context: RunContext, given: GivenRotations | None = None) -> None:
        self.context, self.given = context, given
        self.rotations: dict[int, LayerRotation] = {}
        self.layers: list[dict[str, Any]] = []
        self.maps: dict[str, Tensor] = {}
        self.shared_record: dict[str, Any] | None = None
        self.logit_error: float | None = None
        self.untied = False

    def execute(self, state: RunState | None) -> None:
        """Rotates and prunes the model. `state` saves the finished layers; None saves nothing."""
        run, recipe = self.context, self.context.recipe
        known, records = self._known_rotations(state)
        with run.during("check"):
            self._check(known)
        with run.during("calibrate"):
            stream = CalibrationStream.embed(run.model, run.tokens, run.device)
            needs_dense = recipe.pruning.target == "dense" or recipe.recovery.recover == "block"
            dense = stream.offloaded_copy() if needs_dense else None

        for layer in on_device(run.model.layers, run.device, run.home):
            boundary = run.bases.held(layer.index, known) if known and run.bases.place == "residual" else None
            record = {"layer": layer.index} | records.get(layer.index, {})
            work = LayerWork(layer, stream, dense, known.get(layer.index), boundary, record)
            if dense is not None:
                steps.dense_pass(run, work)
            if (saved := state.load(steps.part_of(layer)) if state else None) is not None:
                steps.restore(run, work, saved)
                steps.advance(run, work)
            else:
                if run.rotates:
                    if work.rotation is None:
                        steps.calibrate(run, work)
                        steps.rotate(run, work)
                    steps.merge(run, work)
                steps.prune(run, work)
                if recipe.recovery.recover == "block":
                    steps.recover(run, work)
                steps.advance(run, work)
                if state:
                    steps.save(run, work, state)
            if run.rotates:
                steps.unrotate(run, work)
            if dense is not None and work.dense_outputs is not None:
                dense.hidden_states = work.dense_outputs
            self._keep(work)
        if run.rotates:
            self._finish()

    def _known_rotations(
        self, state: RunState | None
    ) -> tuple[Mapping[int, LayerRotation], Mapping[int, dict[str, Any]]]:
        """The rotations that are known before the pruning, and what their training adds to the records."""
        run = self.context
        if self.given is not None:
            return dict(enumerate(self.given.rotations)), {}
        if not run.rotates or run.recipe.rotation.hessians != "dense":
            return {}, {}
        if run.recipe.rotation.mode == "shared":
            rotations, self.shared_record = train_shared(run, state)
            return dict(enumerate(rotations)), {}
        trained = dict(enumerate(train_layers(run, state)))
        records = {index: {"rotation": record} for index, (_, record) in trained.items()}
        return {index: rotation for index, (rotation, _) in trained.items()}, records

    def _check(self, known: Mapping[int, LayerRotation]) -> None:
        """Proves on one sequence that rotations leave the logits as they are, and that outputs are finite."""
        run = self.context
        if run.rotates:
            rotations = list(known.values()) or None
            self.logit_error = check_model(run.model, run.tokens[:1], run.device, run.bases, rotations)
        else:
            check_outputs(run.model, run.tokens[:1], run.device)

    def _keep(self, work: LayerWork) -> None:
        self.layers.append(work.record)
        if work.rotation is not None:
            self.rotations[work.layer.index] = work.rotation
        for name, values in work.maps.items():
            linear, _, kind = name.partition(".")
            self.maps[f"{work.layer.linears[linear].full_name}.{kind}"] = values

    def _finish(self) -> None:
        """Rotates the embedding and lm_head, and adds the boundaries of layers' inputs."""
        run, rotations = self.context, self.rotations
        self.untied = run.model.rotate_ends(rotations[0].r1, rotations[run.bases.layers - 1].r1)
        if run.bases.place is None:  # the model keeps its stock architecture
            assert all(torch.equal(rotation.r1, rotations[0].r1) for rotation in rotations.values())
        if run.bases.place == "input":
            for layer in run.model.layers:
                if (boundary := run.bases.held(layer.index, rotations)) is not None:
                    layer.hold(boundary)
