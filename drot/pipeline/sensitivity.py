"""`drot.sensitivity`, which measures how much the output of each linear changes at each n:m or ratio."""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drot.calibration.hessian import InputHessian
from drot.calibration.stream import CalibrationStream, Reader
from drot.config import PruningConfig, Recipe, Sparsity
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.events import Progress, silent
from drot.machine.devices import dtype_name
from drot.machine.environment import device_name
from drot.machine.transfer import layers_on_device
from drot.model.families import INPUT_GROUPS, Architecture, layer_linears
from drot.model.rotate import LayerRotation, rotate_layer
from drot.pipeline.context import RunContext
from drot.pipeline.dense_pass import train_dense
from drot.pipeline.invariance import check_model
from drot.pipeline.prepare import prepare
from drot.pipeline.rotation_files import read_given
from drot.pruning import prune_weight
from drot.text.source import calibration_hash

#: the sparsities that are measured in addition to those of the recipe
SPARSITIES = tuple(map(Sparsity.parse, ("2:4", "4:8", "0.5")))


@dataclass(frozen=True, repr=False)
class SensitivityResult:
    """The result of `drot.sensitivity`. Its repr is one line.

    recipe: the recipe, whose rotations were used.
    errors: name of a linear → sparsity, as in `2:4` → relative output error. None where n:m does not divide
        the inputs of the linear.
    figures: further facts for `to_dict`.
    """

    recipe: Recipe
    errors: dict[str, dict[str, float | None]]
    figures: dict[str, Any]

    def __repr__(self) -> str:
        worst = "".join(f", largest={name} {error:.4f} at {at}" for name, at, error in self.largest(1))
        return (
            f"SensitivityResult(linears={len(self.errors)}, sparsities={', '.join(self.sparsities)}{worst})"
        )

    @property
    def sparsities(self) -> list[str]:
        """The sparsities that were measured."""
        return list(next(iter(self.errors.values())))

    def largest(self, count: int) -> list[tuple[str, str, float]]:
        """Name, sparsity and error of the linears whose error is largest at the recipe's own sparsity.

        Linears that the recipe keeps dense are left out.
        """
        own = [(name, str(self.recipe.pruning.sparsity_for(name))) for name in self.errors]
        found = [(name, text, self.errors[name].get(text)) for name, text in own]
        known = [(name, text, error) for name, text, error in found if error is not None]
        return sorted(known, key=lambda row: -row[2])[:count]

    def to_dict(self) -> dict[str, Any]:
        """All figures in plain JSON types."""
        return {"recipe": self.recipe.to_dict(), **self.figures, "errors": self.errors}


@torch.no_grad()
def sensitivity(
    model: str | Path | PreTrainedModel,
    recipe: Recipe | None = None,
    *,
    tokenizer: Any = None,
    calibration: Tensor | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    rotations: str | Path | None = None,
    progress: Progress = silent,
) -> SensitivityResult:
    """The relative output error of each linear at 2:4, 4:8, 50 % and the sparsities of the recipe.

    The error is tr((W - Ŵ) H (W - Ŵ)ᵀ) / tr(W H Wᵀ), where Ŵ is W pruned by the recipe's method. W is rotated
    and H is the Hessian of the rotated dense model, so each linear is pruned alone. The rotations are trained
    for the recipe's own sparsities, with `hessians="dense"`. Nothing is written. The model is not changed.

    Raises UserError for a mistake in the input.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model.
        recipe: the settings; None is `Recipe()`.
        tokenizer: the tokenizer for the calibration text. A loaded model needs it, or `calibration`.
        calibration: token ids [nsamples, seqlen], which replace the calibration text of the recipe.
        device: the device of the computation, as in `drot.prune`.
        dtype: dtype of the weights, as in `drot.prune`.
        rotations: a file written by `save_rotations_to` of `drot.prune`, whose rotations are used.
        progress: the callback for ProgressEvents.
    """
    is_a("recipe", recipe, Recipe, or_none=True)
    recipe = recipe or Recipe()
    if recipe.rotation.mode == "layer" and rotations is None:
        recipe = dataclasses.replace(recipe, rotation=dataclasses.replace(recipe.rotation, hessians="dense"))
    recipe = recipe.for_format("dense", rotations_given=rotations is not None)
    prepared = prepare(
        model,
        recipe,
        tokenizer=tokenizer,
        calibration=calibration,
        device=device,
        dtype=dtype,
        rotations_given=rotations is not None,
        measures=True,
        progress=progress,
    )
    run = prepared.context
    used = None if rotations is None else read_given(run, Path(rotations)).rotations
    error = None
    if run.rotates:
        if used is None:
            used = [rotation for rotation, _ in train_dense(run, None)[0]]
        with run.clock("check"):
            place = recipe.rotation.resolved_boundary
            error = check_model(run.model, run.arch, run.shape, run.tokens[:1], run.device, used, place)
    figures = {
        "base_model": prepared.source,
        "calibration": {"sha256": calibration_hash(run.tokens), "shape": list(run.tokens.shape)},
        "device": device_name(run.device),
        "dtype": dtype_name(run.dtype),
        "relative_logit_error": error,
    }
    return SensitivityResult(run.recipe, _errors(run, used), figures)


def _errors(run: RunContext, rotations: list[LayerRotation] | None) -> dict[str, dict[str, float | None]]:
    """SensitivityResult.errors, from one pass of the dense model.

    rotations: the rotation of each layer; None for a model that is not rotated.
    """
    stream = CalibrationStream.embed(run.model, run.arch, run.tokens, run.device)
    sparsities = measured_sparsities(run.recipe.pruning)
    errors: dict[str, dict[str, float | None]] = {}
    for index, layer in layers_on_device(list(run.layers), run.device, run.model_device):
        run.event("sensitivity", index)
        with run.clock("prune"):
            rotated, inputs = _rotated(run, index, layer, stream, rotations)
            errors |= _output_errors(rotated, index, inputs, run.arch, run.recipe, sparsities)
        stream.advance(layer, index)
    return errors


def measured_sparsities(pruning: PruningConfig) -> list[Sparsity]:
    """SPARSITIES and the recipe's sparsities."""
    return [sparsity for sparsity in dict.fromkeys([*SPARSITIES, *pruning.sparsities]) if sparsity.ratio > 0]


def _rotated(
    run: RunContext,
    index: int,
    layer: nn.Module,
    stream: CalibrationStream,
    rotations: list[LayerRotation] | None,
) -> tuple[nn.Module, CalibrationStream]:
    """A rotated copy of the layer, and a rotated copy of the layer's inputs.

    Without rotations, `layer` and `stream` themselves.

    Args:
        run: the state of the run.
        index: number of the layer.
        layer: the decoder layer.
        stream: inputs of the layer in the dense model.
        rotations: the rotation of each layer; None for a model that is not rotated.
    """
    if rotations is None:
        return layer, stream
    rotation, boundary = rotations[index], run.residual_boundary(rotations, index)
    layer = copy.deepcopy(layer)
    rotate_layer(layer, run.arch, run.shape, rotation.to(run.device), boundary)
    stream = CalibrationStream(stream.hidden_states.clone(), stream.layer_kwargs)
    stream.rotate(rotation.r1)
    return layer, stream


@torch.no_grad()
def _output_errors(
    layer: nn.Module,
    index: int,
    stream: CalibrationStream,
    arch: Architecture,
    recipe: Recipe,
    sparsities: list[Sparsity],
) -> dict[str, dict[str, float | None]]:
    """The relative output error of each linear of a layer, pruned alone. No weight is changed.

    Returns name of a linear → sparsity, as in `2:4` → error. The error is None where n:m does not divide the
    inputs of the linear.

    Args:
        layer: a decoder layer.
        index: number of the layer.
        stream: inputs of the layer.
        arch: family of the model.
        recipe: the settings of the run. Its `sparsity`, `keep` and `sparsity_of` are not used.
        sparsities: the sparsities to prune to.
    """
    linears, names = layer_linears(layer, arch), arch.linear_names(index)
    readers: dict[str, Reader] = {group: (linears[roles[0]], None) for group, roles in INPUT_GROUPS.items()}
    hessians = stream.hessians(layer, index, readers)
    errors: dict[str, dict[str, float | None]] = {name: {} for name in names.values()}
    for group, roles in INPUT_GROUPS.items():
        hessian = InputHessian(hessians.pop(group), recipe.damping, recipe.damping_average)
        for role in roles:
            weight, of_linear, total = linears[role].weight, errors[names[role]], None
            for sparsity in sparsities:
                of_linear[str(sparsity)] = None
                if sparsity.structured and weight.shape[1] % sparsity.m:
                    continue
                alone = dataclasses.replace(recipe.pruning, sparsity=sparsity, keep=(), sparsity_of=())
                try:
                    outcome = prune_weight(weight, hessian, alone, recipe.solve, total=total)
                except UserError as error:
                    raise UserError(f"layer {index}, {role}: {error}") from None
                of_linear[str(sparsity)], total = outcome.output_error, outcome.energy
    return errors
