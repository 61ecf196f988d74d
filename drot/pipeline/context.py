"""What the steps of one run share: the model and its parts, the recipe, devices, clocks and the training
of a rotation."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.architectures import architecture_of, decoder_layers, head_shape
from drot.config import Recipe
from drot.progress import Progress, ProgressEvent
from drot.rotation.objective import LayerObjective
from drot.rotation.train import train_rotation
from drot.surgery.rotate import LayerRotation

#: a layer's rotation and the record of its training
Trained = tuple[LayerRotation, dict[str, Any]]


class RunContext:
    """The first device does all the work; the others train rotations of further layers.

    Args:
        model: a causal language model that fits the recipe (validation.py).
        recipe: what is done to it.
        tokens: calibration token ids [nsamples, seqlen].
        devices: at least one; several train layers side by side.
        progress: is called with every ProgressEvent.
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
        self.home = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.rotates = recipe.rotation.mode != "none"
        self.seconds = dict.fromkeys(("check", "calibrate", "rotate", "prune"), 0.0)

    def event(self, phase: str, index: int = 0, **rest: Any) -> None:
        self.progress(ProgressEvent(phase=phase, layer=index, layers=len(self.layers), **rest))

    def clock(self, phase: str) -> "Clock":
        return Clock(self.seconds, phase)

    def train(
        self, objectives: list[LayerObjective], index: int
    ) -> tuple[list[LayerRotation], dict[str, Any]]:
        """The trained rotations, in main memory, and the record of the training.

        The training runs on the device of the first objective. In fp64 the rotations are larger than the
        layers, so they are kept in main memory, like the rotations of a file or of an interrupted run.
        """
        device = objectives[0].device if len(self.devices) > 1 else self.device

        def on_step(step: int, steps: int, loss: float) -> None:
            if len(self.devices) == 1:  # one bar cannot follow several layers
                self.event("rotate", index, step=step, steps=steps, loss=loss)

        with self.clock("rotate"):
            rotations, record = train_rotation(objectives, self.recipe.rotation, on_step, device)
            if len(self.devices) > 1:
                done = len(record.loss_curve) - 1
                self.event("rotate", index, step=done, steps=done, loss=record.loss_after)
            entropies = {}
            for name, rotation in (("before", None), ("after", rotations)):
                entropies[f"entropy_{name}"] = sum(
                    objective.to(device).entropy(rotation[i] if rotation else None)
                    for i, objective in enumerate(objectives)
                ) / len(objectives)
        return [rotation.to("cpu") for rotation in rotations], dataclasses.asdict(record) | entropies


class Clock:
    """Adds the seconds of a `with` block to one of the run's totals."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._seconds[self._phase] += time.perf_counter() - self._started
