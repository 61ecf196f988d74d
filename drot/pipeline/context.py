"""The state that all parts of one run share, and the training of rotations with it."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.architectures import architecture_of, decoder_layers, head_shape
from drot.config import Recipe
from drot.pipeline.memory import PeakMemory
from drot.progress import Progress, ProgressEvent
from drot.rotation.objective import LayerObjective
from drot.rotation.train import train_rotation
from drot.surgery.rotate import LayerRotation

#: the phases whose time and memory are measured
PHASES = ("check", "calibrate", "rotate", "prune", "recover")

#: The rotation of a layer and the record of its training.
Trained = tuple[LayerRotation, dict[str, Any]]


class RunContext:
    """The model and its parts, the recipe, the calibration tokens, the devices and the clocks of one run.

    Args:
        model: a causal language model that fits the recipe (validation.py).
        recipe: the settings of the run.
        tokens: calibration token ids [nsamples, seqlen].
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
        self.memory = PeakMemory(devices)

    def event(self, phase: str, index: int = 0, **fields: Any) -> None:
        """Reports a ProgressEvent for layer `index`."""
        self.progress(ProgressEvent(phase=phase, layer=index, layers=len(self.layers), **fields))

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """A context manager that measures the time and the memory of `phase`."""
        started = time.perf_counter()
        with self.memory.of(phase):
            yield
        self.seconds[phase] += time.perf_counter() - started

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

        with self.clock("rotate"):
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
        return [rotation.to("cpu") for rotation in rotations], dataclasses.asdict(record) | entropies
