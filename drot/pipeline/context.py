"""The state that all parts of one run share, and the training of rotations with it."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.config import Recipe
from drot.core.events import Progress, ProgressEvent
from drot.machine.devices import dtype_name
from drot.machine.memory import PeakMemory
from drot.model.boundary import BoundaryRotation
from drot.model.families import architecture_of, decoder_layers, head_shape, layer_linears
from drot.model.rotate import LayerRotation
from drot.pipeline import work
from drot.pipeline.work import Sizes
from drot.rotation.objective import LayerObjective
from drot.rotation.train import train_rotation

#: The phases whose time is measured. `load` is the model and the text, `merge` brings the rotations into the
#: weights and the hidden states, and `save` writes the finished layers and the checkpoint.
PHASES = ("load", "check", "calibrate", "rotate", "merge", "prune", "recover", "save")

#: The rotation of a layer and the record of its training.
Trained = tuple[LayerRotation, dict[str, Any]]


class RunContext:
    """The model and its parts, the recipe, the calibration tokens, the devices and the clocks of one run.

    Args:
        model: a causal language model that fits the recipe (validation.py).
        recipe: the settings of the run.
        tokens: calibration token ids [nsamples, seqlen]. The attribute `training_tokens` holds the first of
            them, with which rotations are trained.
        devices: the devices; rotations are trained on all of them in parallel, the rest runs on the first.
        progress: the callback for ProgressEvents.
    """

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
        self.shape = head_shape(model.config)
        self.model_device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.rotates = recipe.rotation.mode != "none"
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.work: dict[str, dict[str, float]] = {}
        self.memory = PeakMemory(devices)
        linears = layer_linears(self.layers[0], self.arch)
        shapes = {role: (linear.out_features, linear.in_features) for role, linear in linears.items()}
        self.sizes = Sizes(shapes, self.shape, tokens=tokens.numel(), seqlen=tokens.shape[1])
        count = recipe.training_nsamples(len(tokens), tokens.shape[1], hidden_size=shapes["q_proj"][1])
        self.training_tokens = tokens[:count]
        self._lock = threading.Lock()
        #: phase → the number of threads in it, and the time at which the first of them began
        self._running: dict[str, tuple[int, float]] = {}

    def event(self, phase: str, index: int = 0, **fields: Any) -> None:
        """Reports a ProgressEvent for layer `index`."""
        self.progress(ProgressEvent(phase=phase, layer=index, layers=len(self.layers), **fields))

    @contextlib.contextmanager
    def clock(self, phase: str, device: torch.device | None = None) -> Iterator[None]:
        """A context manager that measures the time and the memory of `phase`.

        Time in which several threads are in the phase counts once. On a GPU the phase ends when the work
        that it queued is done.

        device: the device of the phase; None is the first device of the run.
        """
        device = device or self.device
        with self._lock:
            threads, started = self._running.get(phase, (0, time.perf_counter()))
            self._running[phase] = (threads + 1, started)
        try:
            with self.memory.of(phase):
                yield
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        finally:
            with self._lock:
                threads, started = self._running.pop(phase)
                if threads > 1:
                    self._running[phase] = (threads - 1, started)
                else:
                    self.seconds[phase] += time.perf_counter() - started

    def count(self, phase: str, amount: float, unit: torch.dtype | str) -> None:
        """Adds to the work of `phase`, which the manifest records.

        unit: `bytes`, or the dtype of floating-point operations (drot/pipeline/work.py).
        """
        name = unit if isinstance(unit, str) else dtype_name(unit)
        with self._lock:
            of_phase = self.work.setdefault(phase, {})
            of_phase[name] = of_phase.get(name, 0.0) + amount

    def count_calibration(self, index: int, *, advance: bool) -> None:
        """Counts the work of the objective of layer `index`: a forward pass, Hessians and factorisations.

        advance: whether the stream goes on to the outputs of the layer.
        """
        groups = work.trained_groups(self.recipe, self.pruned_roles(index))
        sizes = dataclasses.replace(self.sizes, tokens=self.training_tokens.numel())
        self.count("calibrate", work.hessians(sizes, groups), self.dtype)
        if advance:
            self.count("calibrate", work.rest_of_forward(sizes, groups), self.dtype)
        self.count("calibrate", work.metrics(sizes, self.recipe, groups), torch.float32)

    def pruned_roles(self, index: int) -> list[str]:
        """The linears of layer `index` that the recipe prunes."""
        names = self.arch.linear_names(index)
        return [role for role, name in names.items() if self.recipe.pruning.sparsity_for(name).ratio > 0]

    def residual_boundary(self, rotations: list[LayerRotation], index: int) -> BoundaryRotation | None:
        """The rotation of the residual that layer `index` has to hold; None if it holds no such rotation.

        rotations: the rotation of each layer.
        """
        place = self.recipe.rotation.resolved_boundary
        if place != "residual" or index + 1 == len(rotations):
            return None
        return BoundaryRotation(place, rotations[index].r1, rotations[index + 1].r1)

    def times(self, total: float) -> dict[str, Any]:
        """The entries of the manifest about time and memory.

        total: seconds of the whole run.
        """
        return {
            "seconds": {**self.seconds, "total": total},
            "peak_memory": self.memory.peaks,
        }

    def train(
        self, objectives: list[LayerObjective], index: int
    ) -> tuple[list[LayerRotation], dict[str, Any]]:
        """The trained rotation of each objective, and the record of the training.

        With several devices the training runs on the device of the objectives. The rotations are returned in
        main memory, because in fp64 they are larger than a layer.

        objectives: one objective, or the objectives of all layers, which then share R1.
        index: the layer for progress reports.
        """
        device = objectives[0].device if len(self.devices) > 1 else self.device

        def on_step(step: int, steps: int, loss: float) -> None:
            if len(self.devices) == 1:  # a progress bar shows the steps of one layer only
                self.event("rotate", index, step=step, steps=steps, loss=loss)

        with self.clock("rotate", device):
            rotations, record = train_rotation(objectives, self.recipe.rotation, on_step, device)
            if len(self.devices) > 1:
                last = len(record.loss_curve) - 1
                self.event("rotate", index, step=last, steps=last, loss=record.loss_after)
            entropies = {}
            for name, used in (("before", [None] * len(objectives)), ("after", rotations)):
                entropies[f"entropy_{name}"] = sum(
                    objective.to(device).entropy(rotation)
                    for objective, rotation in zip(objectives, used, strict=True)
                ) / len(objectives)
        # in the manifest the curve begins at R = I and holds the entropy of the rotations that are kept
        known = {
            0: entropies["entropy_before"],
            **{int(step): value for step, value in record.entropy_curve},
            record.best_step: entropies["entropy_after"],
        }
        record = dataclasses.replace(record, entropy_curve=[list(point) for point in sorted(known.items())])
        layers = [index] if len(objectives) == 1 else range(len(objectives))
        roles = [self.pruned_roles(layer) for layer in layers]
        steps = len(record.loss_curve) - 1
        flops = work.rotate(self.sizes, self.recipe, roles, steps)
        self.count("rotate", flops, objectives[0].product_dtype)
        figures = dataclasses.asdict(record) | entropies | {"nsamples": len(self.training_tokens)}
        return [rotation.to("cpu") for rotation in rotations], figures
