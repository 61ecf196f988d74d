"""One run over a model's layers: rotations, pruning, merging."""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.calibration.data import calibration_hash
from drot.calibration.stream import CalibrationStream
from drot.checkpoint import RunState
from drot.config import Recipe
from drot.context import RunContext
from drot.dense_pass import train_each, train_shared
from drot.errors import UserError
from drot.invariance import check_layer, check_model
from drot.layers import layer_objective, prune_layer
from drot.manifest import manifest, zero_share
from drot.progress import Progress
from drot.rotation.artifact import load_rotations
from drot.surgery.residual import (
    RESIDUAL_ROTATION,
    add_residual_rotation,
    rotation_config,
    set_boundary,
)
from drot.surgery.rotate import LayerRotation, rotate_ends, rotate_layer


class PruningRun(RunContext):
    """One `drot.prune` of a loaded model. rotations: a file of them, which are used in place of training."""

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        tokens: Tensor,
        devices: list[torch.device],
        progress: Progress,
        rotations: Path | None = None,
    ) -> None:
        super().__init__(model, recipe, tokens, devices, progress, rotations_given=rotations is not None)
        self.rotations_file: dict[str, Any] | None = None
        self.given: list[LayerRotation] | None = None
        self.rotations: list[LayerRotation] = []
        self.shared_record: dict[str, Any] | None = None
        if rotations is not None:
            self._use_rotations(rotations)

    def _use_rotations(self, path: Path) -> None:
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
                if self.recipe.rotation.mode == "shared":
                    trained, self.shared_record = train_shared(self, state)
                else:
                    trained = train_each(self, state)
                rotations, records = [r for r, _ in trained], [record for _, record in trained]
            with self.clock("check"):
                error = check_model(
                    self.model,
                    self.arch,
                    self.shape,
                    self.tokens[:1],
                    self.device,
                    rotations,
                    self.recipe.rotation.down_basis,
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
            given = rotations[index] if rotations else None
            following = rotations[index + 1] if rotations and index + 1 < len(rotations) else None
            behind = following if self.down_in_next else None
            if saved is not None:
                rotation, record = self._restore(layer, saved)
            else:
                rotation, record = self._work_on(layer, index, stream, given, records[index], behind)
                if state:
                    state.save(f"layer_{index:05d}", _layer_tensors(layer, rotation), record)
            if rotation is not None:
                stream.rotate(rotation.r1)
            stream.advance(layer, index)
            if rotation is not None:
                stream.rotate((behind or rotation).r1.T)
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
        behind: LayerRotation | None,
    ) -> tuple[LayerRotation | None, dict[str, Any]]:
        """Rotates and prunes one layer in place, on the stream that passed the pruned ones before it.

        behind: the next layer's rotation where down_proj and the layer's output are in that basis.
        """
        started = time.perf_counter()
        record: dict[str, Any] = {"layer": index}
        if self.rotates:
            if rotation is None:
                self.event("calibrate", index)
                with self.clock("calibrate"):
                    objective, damping = layer_objective(
                        layer, index, stream, self.arch, self.shape, self.recipe
                    )
                found, trained = self.train([objective], index)
                rotation, trained = found[0], trained | {"damping": damping}
                with self.clock("check"):
                    trained["invariance_error"] = check_layer(
                        layer, index, _float_sample(stream), self.arch, self.shape, rotation
                    )
            if trained:
                record["rotation"] = trained
            on_device = rotation.to(self.device)
            after = behind.r1.to(self.device) if behind else None
            rotate_layer(layer, self.arch, self.shape, on_device, after)
            if after is not None:  # before the pruning, whose outputs then are what the next layer reads
                set_boundary(layer, on_device.r1, after, self.dtype, self.device, inside=self.arch)
            stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
            stream.rotate(rotation.r1)
        self.event("prune", index)
        with self.clock("prune"):
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
        if f"{RESIDUAL_ROTATION}.weight" in tensors:
            hidden = self.model.config.hidden_size
            add_residual_rotation(layer, hidden, dtype=self.dtype, device=self.device, inside=self.arch)
        layer.load_state_dict(tensors)
        return rotation, record

    # ---- the ends ------------------------------------------------------------------------------

    def _merge(self, rotations: list[LayerRotation]) -> None:
        """Merges neighbouring R1s into one matrix a boundary, and the ends into embedding and head."""
        rotate_ends(self.model, self.arch, rotations[0].r1, rotations[-1].r1)
        if self.recipe.rotation.mode == "shared":
            assert all(torch.equal(rotation.r1, rotations[0].r1) for rotation in rotations)
            return  # every boundary is the identity: a stock architecture
        if not self.down_in_next:  # else every layer got its boundary before it was pruned
            for before, after, layer in zip(rotations, rotations[1:], list(self.layers)[1:], strict=False):
                before_r1, after_r1 = before.r1.to(self.device), after.r1.to(self.device)
                set_boundary(layer, before_r1, after_r1, self.dtype, self.home)
        if rotated := rotation_config(self.layers):
            self.model.config.quantization_config = {"quant_method": "drot", **rotated}


def _layer_tensors(layer: nn.Module, rotation: LayerRotation | None) -> dict[str, Tensor]:
    tensors = dict(layer.state_dict())
    if rotation is not None:
        tensors |= {"drot.r1": rotation.r1, "drot.r2": rotation.r2}
    return tensors


def _float_sample(stream: CalibrationStream) -> CalibrationStream:
    sample = stream.narrow(1)
    sample.hidden_states = sample.hidden_states.float()
    return sample
