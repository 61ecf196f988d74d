"""One run over a model's layers: rotations, pruning, merging."""

import dataclasses
import hashlib
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.architectures import (
    architecture_of,
    decoder_layers,
    head_shape,
    validate_model,
)
from drot.calibration.data import calibration_hash
from drot.calibration.stream import CalibrationStream
from drot.checkpoint import RunState
from drot.config import Recipe
from drot.errors import UserError
from drot.fits import check_recipe, check_tokens
from drot.invariance import check_layer, check_model
from drot.layers import layer_objective, prune_layer
from drot.manifest import manifest, zero_share
from drot.progress import Progress, ProgressEvent
from drot.rotation.apart import train_apart
from drot.rotation.artifact import load_rotations, rotation_tensors, rotations_from
from drot.rotation.objective import LayerObjective
from drot.rotation.train import train_rotation
from drot.surgery.residual import set_boundary
from drot.surgery.rotate import LayerRotation, rotate_ends, rotate_layer

#: a layer's rotation and the record of its training
Trained = tuple[LayerRotation, dict[str, Any]]


class PruningRun:
    """The state that the steps of one `drot.prune` share. Work is done on the first of the devices; the
    others train rotations of further layers."""

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        tokens: Tensor,
        devices: list[torch.device],
        progress: Progress,
    ) -> None:
        self.model, self.recipe, self.tokens = model, recipe, tokens
        self.devices, self.device, self.progress = devices, devices[0], progress
        self.arch = architecture_of(model.config)
        self.layers = decoder_layers(model, self.arch)
        check_recipe(model.config, recipe, devices)
        check_tokens(tokens, model.config)
        validate_model(model, self.arch)
        self.shape = head_shape(model.config)
        self.home = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.rotations_file: dict[str, Any] | None = None
        self.rotates = recipe.rotation.mode != "none"
        self.given: list[LayerRotation] | None = None
        self.rotations: list[LayerRotation] = []
        self.shared_record: dict[str, Any] | None = None
        self.seconds = dict.fromkeys(("check", "calibrate", "rotate", "prune"), 0.0)

    def use_rotations(self, path: Path) -> None:
        """Takes the rotations of a file in place of training."""
        if not self.rotates:
            raise UserError("rotations from a file need --rotation layer or shared; got none")
        self.given, record = load_rotations(
            path, layers=len(self.layers), hidden_size=self.model.config.hidden_size, shape=self.shape
        )
        equal = all(torch.equal(rotation.r1, self.given[0].r1) for rotation in self.given)
        if self.recipe.rotation.mode == "shared" and not equal:
            raise UserError(f"{path} holds a rotation for each layer: use it with --rotation layer")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.rotations_file = {"file": path.name, "sha256": digest, "trained_with": record}

    def identity(self, source: str) -> dict[str, Any]:
        """What must be equal for a run to be resumed."""
        return {
            "model": source,
            "recipe": self.recipe.to_dict(),
            "rotations": self.rotations_file and self.rotations_file["sha256"],
            "calibration": calibration_hash(self.tokens),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": len(self.layers),
        }

    def execute(self, state: RunState | None) -> dict[str, Any]:
        """Prunes the model in place and returns its manifest."""
        started = time.perf_counter()
        rotations = self.given
        records: list[dict[str, Any]] = [{} for _ in self.layers]
        error = None
        if self.rotates:
            if rotations is None and self._needs_dense_pass:
                trained = self._train_on_dense(state)
                rotations, records = [r for r, _ in trained], [record for _, record in trained]
            with _Clock(self.seconds, "check"):
                error = check_model(
                    self.model, self.arch, self.shape, self.tokens[:1], self.device, rotations
                )
        layers, self.rotations = self._prune_layers(state, rotations, records)
        if self.rotates:
            self._merge(self.rotations)
        return manifest(
            self.recipe,
            self.tokens,
            self.device,
            self.dtype,
            relative_logit_error=error,
            sparsity=zero_share(self.layers, self.arch),
            shared_rotation=self.shared_record,
            rotations_file=self.rotations_file,
            seconds={**self.seconds, "total": time.perf_counter() - started},
            layers=layers,
        )

    @property
    def _needs_dense_pass(self) -> bool:
        rotation = self.recipe.rotation
        return rotation.mode == "shared" or rotation.hessians == "dense"

    def _event(self, phase: str, index: int = 0, **rest: Any) -> None:
        self.progress(ProgressEvent(phase=phase, layer=index, layers=len(self.layers), **rest))

    # ---- rotations from one pass of the dense model -------------------------------------------

    def _train_on_dense(self, state: RunState | None) -> list[Trained]:
        """Rotations of all layers from the Hessians of the dense model, before anything is pruned."""
        return (
            self._train_shared(state) if self.recipe.rotation.mode == "shared" else self._train_apart(state)
        )

    def _dense_objectives(
        self, done: Collection[int] = ()
    ) -> Iterator[tuple[int, LayerObjective, dict[str, float]]]:
        """Index, objective and dampings of one layer after the other, as the dense model feeds them;
        those that are `done` are passed through only."""
        stream = CalibrationStream.embed(self.model, self.arch, self.tokens, self.device)
        for index, layer in enumerate(self.layers):
            layer.to(self.device)
            self._event("calibrate", index)
            with _Clock(self.seconds, "calibrate"):
                if index not in done:
                    found = layer_objective(layer, index, stream, self.arch, self.shape, self.recipe)
                stream.advance(layer, index)
            layer.to(self.home)
            if index not in done:
                yield index, *found

    def _train_shared(self, state: RunState | None) -> list[Trained]:
        """One R1 for the sum of all layers."""
        saved = state.load("rotations") if state else None
        if saved is not None:
            tensors, (records, self.shared_record) = saved
            return list(zip(rotations_from(tensors, len(self.layers)), records, strict=True))
        wait = self.recipe.rotation.layers_per_step is not None
        objectives, records = [], []
        for _, objective, damping in self._dense_objectives():
            objectives.append(objective.waiting(self.dtype) if wait else objective)
            records.append({"damping": damping})
        try:
            rotations, self.shared_record = self._train(objectives, 0)
        except torch.OutOfMemoryError as fault:
            raise UserError(
                f"{len(objectives)} layers at once do not fit in the memory of {self.device}: "
                "--layers-per-step 4 keeps the others in main memory"
            ) from fault
        if state:
            state.save("rotations", rotation_tensors(rotations), [records, self.shared_record])
        return list(zip(rotations, records, strict=True))

    def _train_apart(self, state: RunState | None) -> list[Trained]:
        """A rotation a layer, each trained on the next device that is free."""
        done, dampings = {}, {}
        for index in range(len(self.layers)):
            if saved := state.load(f"rotation_{index:05d}") if state else None:
                done[index] = rotations_from(saved[0], 1)[0], saved[1]
        if len(done) == len(self.layers):
            return list(done.values())

        def objectives() -> Iterator[tuple[int, LayerObjective]]:
            for index, objective, damping in self._dense_objectives(done):
                dampings[index] = damping
                yield index, objective

        def train(index: int, objective: LayerObjective) -> Trained:
            (rotation,), record = self._train([objective], index)
            record["damping"] = dampings[index]
            if state:
                state.save(f"rotation_{index:05d}", rotation_tensors([rotation]), record)
            return rotation, record

        trained = done | train_apart(objectives(), train, self.devices)
        return [trained[index] for index in range(len(self.layers))]

    def _train(
        self, objectives: list[LayerObjective], index: int
    ) -> tuple[list[LayerRotation], dict[str, Any]]:
        """Trains where the first objective lies; the rotations wait in main memory, as those of a file
        or of an interrupted run do: in fp64 they are larger than the layers."""
        device = objectives[0].device if len(self.devices) > 1 else self.device

        def on_step(step: int, steps: int, loss: float) -> None:
            if len(self.devices) == 1:  # one bar cannot follow several layers
                self._event("rotate", index, step=step, steps=steps, loss=loss)

        with _Clock(self.seconds, "rotate"):
            rotations, record = train_rotation(objectives, self.recipe.rotation, on_step, device)
            if len(self.devices) > 1:
                done = len(record.loss_curve) - 1
                self._event("rotate", index, step=done, steps=done, loss=record.loss_after)
            entropies = {}
            for name, rotation in (("before", None), ("after", rotations)):
                entropies[f"entropy_{name}"] = sum(
                    objective.on(device).entropy(rotation[i] if rotation else None)
                    for i, objective in enumerate(objectives)
                ) / len(objectives)
        return [rotation.to("cpu") for rotation in rotations], dataclasses.asdict(record) | entropies

    # ---- the pruning pass ----------------------------------------------------------------------

    def _prune_layers(
        self,
        state: RunState | None,
        rotations: list[LayerRotation] | None,
        records: list[dict[str, Any]],
    ) -> tuple[list[dict[str, Any]], list[LayerRotation]]:
        stream = CalibrationStream.embed(self.model, self.arch, self.tokens, self.device)
        figures, used = [], []
        for index, layer in enumerate(self.layers):
            layer.to(self.device)
            saved = state.load(f"layer_{index:05d}") if state else None
            if saved is not None:
                rotation, record = self._restore(layer, saved)
            else:
                given = rotations[index] if rotations else None
                rotation, record = self._work_on(layer, index, stream, given, records[index])
                if state:
                    state.save(f"layer_{index:05d}", _layer_tensors(layer, rotation), record)
            if rotation is not None:
                stream.rotate(rotation.r1)
            stream.advance(layer, index)
            if rotation is not None:
                stream.rotate(rotation.r1.T)
                used.append(rotation)
            layer.to(self.home)
            figures.append(record)
        return figures, used

    def _work_on(
        self,
        layer: nn.Module,
        index: int,
        stream: CalibrationStream,
        rotation: LayerRotation | None,
        trained: dict[str, Any],
    ) -> tuple[LayerRotation | None, dict[str, Any]]:
        """Rotates and prunes one layer in place, on the stream that passed the pruned ones before it."""
        started = time.perf_counter()
        record: dict[str, Any] = {"layer": index}
        if self.rotates:
            if rotation is None:
                self._event("calibrate", index)
                with _Clock(self.seconds, "calibrate"):
                    objective, damping = layer_objective(
                        layer, index, stream, self.arch, self.shape, self.recipe
                    )
                found, trained = self._train([objective], index)
                rotation, trained = found[0], trained | {"damping": damping}
                with _Clock(self.seconds, "check"):
                    trained["invariance_error"] = check_layer(
                        layer, index, _float_sample(stream), self.arch, self.shape, rotation
                    )
            if trained:
                record["rotation"] = trained
            rotate_layer(layer, self.arch, self.shape, rotation.to(self.device))
            stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
            stream.rotate(rotation.r1)
        self._event("prune", index)
        with _Clock(self.seconds, "prune"):
            record["linears"] = prune_layer(layer, index, stream, self.arch, self.recipe.pruning)
        record["seconds"] = time.perf_counter() - started
        return rotation, record

    def _restore(
        self, layer: nn.Module, saved: tuple[dict[str, Tensor], dict[str, Any]]
    ) -> tuple[LayerRotation | None, dict[str, Any]]:
        tensors, record = saved
        rotation = None
        if self.rotates:
            rotation = LayerRotation(tensors.pop("drot.r1"), tensors.pop("drot.r2"))
        layer.load_state_dict(tensors)
        return rotation, record

    # ---- the ends ------------------------------------------------------------------------------

    def _merge(self, rotations: list[LayerRotation]) -> None:
        """Merges neighbouring R1s into one matrix a boundary, and the ends into embedding and head."""
        rotate_ends(self.model, self.arch, rotations[0].r1, rotations[-1].r1)
        if self.recipe.rotation.mode == "shared":
            assert all(torch.equal(rotation.r1, rotations[0].r1) for rotation in rotations)
            return  # every boundary is the identity: a stock architecture
        for before, after, layer in zip(rotations, rotations[1:], list(self.layers)[1:], strict=False):
            before_r1, after_r1 = before.r1.to(self.device), after.r1.to(self.device)
            set_boundary(layer, before_r1, after_r1, self.dtype, self.home)
        self.model.config.quantization_config = {"quant_method": "drot", "residual_rotation": True}


def _layer_tensors(layer: nn.Module, rotation: LayerRotation | None) -> dict[str, Tensor]:
    tensors = dict(layer.state_dict())
    if rotation is not None:
        tensors |= {"drot.r1": rotation.r1, "drot.r2": rotation.r2}
    return tensors


def _float_sample(stream: CalibrationStream) -> CalibrationStream:
    sample = stream.narrow(1)
    sample.hidden_states = sample.hidden_states.float()
    return sample


class _Clock:
    """Adds the seconds of a `with` block to one of the run's totals."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._seconds[self._phase] += time.perf_counter() - self._started
