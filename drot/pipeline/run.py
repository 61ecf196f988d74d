"""The run over a model's layers, which trains rotations, merges them and prunes."""

import copy
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drot.calibration.dense_reference import DenseReference
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.resume import RunState
from drot.machine.devices import dtype_name
from drot.machine.environment import device_name, machine, versions
from drot.machine.transfer import layers_on_device
from drot.manifest.manifest import FORMAT_VERSION, zero_share
from drot.model.boundary import BoundaryRotation, rotated_layers, set_boundary
from drot.model.families import positions_of
from drot.model.rotate import LayerRotation, rotate_ends, rotate_layer
from drot.pipeline import work
from drot.pipeline.context import RunContext
from drot.pipeline.dense_pass import train_dense
from drot.pipeline.finished_layer import layer_tensors, restore_layer
from drot.pipeline.invariance import check_layer, check_model, check_outputs
from drot.pipeline.layer import prune_layer
from drot.pipeline.objective import layer_objective
from drot.pipeline.recover import held_out_sequences, recover_layer
from drot.pipeline.rotation_files import GivenRotations
from drot.sparse.quantization_config import describe_model
from drot.text.source import calibration_hash


@dataclass
class _DenseStates:
    """The inputs and the outputs [nsamples, seqlen, d] of a layer in the dense model, in main memory."""

    inputs: CalibrationStream
    outputs: Tensor


class PruningRun:
    """One run of `drot.prune` on a loaded model.

    Afterwards `rotations` holds the rotations of the layers, and `figures` the tensors of the plots
    (manifest/importance.py).

    context: the state of the run.
    given: rotations from a file; None trains the rotations.
    """

    def __init__(self, context: RunContext, given: GivenRotations | None = None) -> None:
        self.context = context
        self.given = given
        self.rotations: list[LayerRotation] = []
        self.shared_record: dict[str, Any] | None = None
        self.figures: dict[str, Tensor] = {}

    def execute(self, state: RunState | None) -> dict[str, Any]:
        """Rotates and prunes the model in place. Returns the entries of its manifest that are known then.

        state: the saved parts of the run; None saves nothing.
        """
        run = self.context
        rotations = None if self.given is None else self.given.rotations
        records: list[dict[str, Any]] = [{} for _ in run.layers]
        error = None
        if run.rotates:
            if rotations is None and run.recipe.rotation.resolved_hessians == "dense":
                trained, self.shared_record = train_dense(run, state)
                rotations = [rotation for rotation, _ in trained]
                records = [record for _, record in trained]
                if self.shared_record is not None:
                    self.shared_record["damping"] = [record["damping"] for record in records]
                    records = [{} for _ in records]
            with run.clock("check"):
                place = run.recipe.rotation.resolved_boundary
                error = check_model(
                    run.model, run.arch, run.shape, run.tokens[:1], run.device, rotations, place
                )
        else:
            with run.clock("check"):
                check_outputs(run.model, run.arch, run.tokens[:1], run.device)
        layers, self.rotations = self._prune_layers(state, rotations, records)
        untied = self._finish_rotation(self.rotations) if run.rotates else False
        return {
            "format_version": FORMAT_VERSION,
            "recipe": run.recipe.to_dict(),
            "calibration": {"sha256": calibration_hash(run.tokens), "shape": list(run.tokens.shape)},
            "positions": positions_of(run.model.config),
            "layers": layers,
            "shared_rotation": self.shared_record,
            "rotations_file": None if self.given is None else self.given.entry,
            "untied_lm_head": untied,
            "relative_logit_error": error,
            "sparsity": zero_share(run.layers, run.arch),
            "versions": versions(),
            "device": device_name(run.device),
            "machine": machine(run.device),
            "compute_dtype": dtype_name(run.dtype),
            "dtype": dtype_name(run.dtype),
        }

    # ---- the pruning pass ----------------------------------------------------------------------

    def _prune_layers(
        self,
        state: RunState | None,
        rotations: list[LayerRotation] | None,
        records: list[dict[str, Any]],
    ) -> tuple[list[dict[str, Any]], list[LayerRotation]]:
        """Rotates and prunes all layers. Returns their records for the manifest, and their rotations.

        state: saves each finished layer, and loads the finished layers of an interrupted run. None saves and
            loads nothing.
        rotations: the rotation of each layer; None if layers are not rotated, or train their rotations here.
        records: the record of the training of each rotation; {} for a rotation that is not trained yet.
        """
        run = self.context
        needs_dense = run.recipe.target == "dense" or run.recipe.recovery.recover == "block"
        with run.clock("calibrate"):
            stream = CalibrationStream.embed(run.model, run.arch, run.tokens, run.device)
            dense_stream = stream.offloaded_copy() if needs_dense else None
        layer_records, used_rotations = [], []
        for index, layer in layers_on_device(list(run.layers), run.device, run.model_device):
            rotation = rotations[index] if rotations else None
            boundary = None if rotations is None else run.residual_boundary(rotations, index)
            dense = None
            if dense_stream is not None:  # while the layer is dense
                with run.clock("calibrate"):
                    dense = _DenseStates(dense_stream, dense_stream.outputs(layer, index))
                    run.count("calibrate", work.forward(run.sizes), run.dtype)
            saved = state.load(f"layer_{index:05d}") if state else None
            if saved is not None:
                rotation, record, figures = restore_layer(run, layer, saved)
                if rotation is not None:
                    with run.clock("merge"):
                        stream.rotate(rotation.r1)
                with run.clock("calibrate"):
                    stream.advance(layer, index)
                    run.count("calibrate", work.forward(run.sizes), run.dtype)
            else:
                rotation, record, figures = self._rotate_and_prune(
                    layer, index, stream, dense, rotation, records[index], boundary
                )
                if state:
                    with run.clock("save"):
                        tensors = layer_tensors(layer, rotation, figures)
                        state.save(f"layer_{index:05d}", tensors, record)
                        run.count("save", sum(tensor.nbytes for tensor in tensors.values()), "bytes")
            names = run.arch.linear_names(index)
            for key, values in figures.items():
                role, _, kind = key.partition(".")
                self.figures[f"{names[role]}.{kind}"] = values
            if dense is not None:
                dense.inputs.hidden_states = dense.outputs
            if rotation is not None:
                with run.clock("merge"):
                    output_r1 = rotation.r1 if boundary is None else boundary.next_r1
                    stream.rotate(output_r1.T)
                used_rotations.append(rotation)
            layer_records.append(record)
        return layer_records, used_rotations

    def _rotate_and_prune(
        self,
        layer: nn.Module,
        index: int,
        stream: CalibrationStream,
        dense: "_DenseStates | None",
        rotation: LayerRotation | None,
        trained: dict[str, Any],
        boundary: BoundaryRotation | None,
    ) -> tuple[LayerRotation | None, dict[str, Any], dict[str, Tensor]]:
        """Rotates, prunes and recovers a layer in place; returns its rotation, its record and its figures.

        Args:
            layer: the decoder layer, on the first device of the run.
            index: number of the layer.
            stream: inputs of the layer in the original basis, computed by the pruned layers before it.
                Afterwards it is the output of the layer, in the basis of the layer's outputs.
            dense: the layer's inputs and outputs in the dense model; None if the recipe does not use them.
            rotation: rotation of the layer; None trains it here.
            trained: the record of the rotation's training; {} if the rotation is not trained yet.
            boundary: the rotation of the residual that the layer has to hold; None for no such rotation.
        """
        run, started = self.context, time.perf_counter()
        record: dict[str, Any] = {"layer": index}
        if run.rotates:
            if rotation is None:
                rotation, trained = self._train(layer, index, stream)
            if trained:
                record["rotation"] = trained
            # with a boundary, down_proj takes next_r1 here, so that it is pruned in that basis
            with run.clock("merge"):
                rotate_layer(layer, run.arch, run.shape, rotation.to(run.device), boundary)
                stream.rotate(rotation.r1)
        run.event("prune", index)
        with run.clock("prune"):
            reference = None
            if dense is not None and run.recipe.target == "dense":
                inputs = dense.inputs.offloaded_copy()
                if rotation is not None:
                    inputs.rotate(rotation.r1)
                reference = DenseReference(LayerPass(copy.deepcopy(layer), inputs, index, run.arch))
            layer_pass = LayerPass(layer, stream, index, run.arch)
            record["linears"], figures = prune_layer(
                layer_pass, run.shape, run.recipe, dense=reference, rotation=rotation, boundary=boundary
            )
            del reference
        iterations = {role: figure.get("admm_iterations", 0) for role, figure in record["linears"].items()}
        roles = run.pruned_roles(index)
        groups = work.groups_of(roles)
        to_dense = groups if run.recipe.target == "dense" else ()
        run.count("prune", work.hessians(run.sizes, groups, to_dense), run.dtype)
        run.count("prune", work.prune(run.sizes, run.recipe, roles, iterations), torch.float32)
        if dense is not None and run.recipe.recovery.recover == "block":
            del layer_pass  # the recovery changes the attention too
            outputs = CalibrationStream(dense.outputs, stream.layer_kwargs, run.device)
            targets = outputs.offloaded_copy()
            if rotation is not None:
                targets.rotate(rotation.r1 if boundary is None else boundary.next_r1)
            record["recovery"] = self._recover(layer, index, stream, targets)
            with run.clock("calibrate"):
                stream.advance(layer, index)
                run.count("calibrate", work.forward(run.sizes), run.dtype)
        else:
            with run.clock("calibrate"):
                layer_pass.advance()
                run.count("calibrate", work.rest_of_forward(run.sizes, groups), run.dtype)
        record["seconds"] = time.perf_counter() - started
        return rotation, record, figures

    def _recover(
        self, layer: nn.Module, index: int, stream: CalibrationStream, targets: CalibrationStream
    ) -> dict[str, Any]:
        """Trains the kept weights of one layer; returns the record for the manifest."""
        run = self.context

        def on_epoch(step: int, steps: int, loss: float) -> None:
            run.event("recover", index, step=step, steps=steps, loss=loss)

        with run.clock("recover"):
            record = recover_layer(layer, index, stream, targets, run.arch, run.recipe.recovery, on_epoch)
        held_out = held_out_sequences(len(stream.hidden_states))
        flops = work.recover(run.sizes, len(record.train_curve), held_out)
        run.count("recover", flops, run.dtype)
        return dataclasses.asdict(record)

    def _train(
        self, layer: nn.Module, index: int, stream: CalibrationStream
    ) -> tuple[LayerRotation, dict[str, Any]]:
        """Trains the rotation of one layer and checks it on one sequence; returns it and its record."""
        run = self.context
        run.event("calibrate", index)
        with run.clock("calibrate"):
            first = stream.first_samples(len(run.training_tokens))
            objective, damping = layer_objective(layer, index, first, run.arch, run.shape, run.recipe)
            run.count_calibration(index, advance=False)
        (rotation,), trained = run.train([objective], index)
        with run.clock("check"):
            sample = stream.first_samples(1)
            sample.hidden_states = sample.hidden_states.to(torch.float32, copy=True)
            error = check_layer(layer, index, sample, run.arch, run.shape, rotation)
        return rotation, trained | {"damping": damping, "invariance_error": error}

    # ---- after the layers ----------------------------------------------------------------------

    def _finish_rotation(self, rotations: list[LayerRotation]) -> bool:
        """Rotates the embedding and lm_head, and adds boundary rotations of the input to the layers.

        Boundary rotations of the residual are in the layers already: `_rotate_and_prune` added them.

        Returns whether lm_head was tied to the embedding before.
        """
        run = self.context
        untied = rotate_ends(run.model, run.arch, rotations[0].r1, rotations[-1].r1)
        place = run.recipe.rotation.resolved_boundary
        if run.recipe.rotation.mode == "shared":
            # all boundary rotations are the identity, so the model keeps its stock architecture
            assert all(torch.equal(rotation.r1, rotations[0].r1) for rotation in rotations)
        elif place == "input":
            holders = rotated_layers(run.layers, place)
            for holder, rotation, next_rotation in zip(holders, rotations, rotations[1:], strict=False):
                boundary = BoundaryRotation(place, rotation.r1, next_rotation.r1)
                set_boundary(holder, run.arch, boundary.to(run.device))
        describe_model(run.model)
        return untied
