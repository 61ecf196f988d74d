"""The beginning of a run: loads the model and the calibration tokens, and checks them against the recipe."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.calibration.data import load_calibration
from drot.checkpoint.load import load_config, load_model, load_tokenizer
from drot.checkpoint.manifest import MANIFEST, patterns_of, read_manifest
from drot.config import CalibrationConfig, Recipe
from drot.devices import pick_devices
from drot.errors import UserError
from drot.pipeline.context import RunContext
from drot.pipeline.validation import check_architecture, check_recipe, check_tokens
from drot.progress import Progress

#: `source` in the manifest of a run that was given token ids in place of a text
GIVEN_TOKENS = "tensor"


@dataclass(frozen=True)
class Prepared:
    """context: the state of the run. source: name or folder of the model. tokenizer: None without one."""

    context: RunContext
    source: str
    tokenizer: Any


def prepare(
    model: str | Path | PreTrainedModel,
    recipe: Recipe,
    *,
    tokenizer: Any,
    calibration: Tensor | None,
    device: str | torch.device,
    dtype: str | torch.dtype,
    rotations_given: bool,
    format: str = "dense",
    progress: Progress,
) -> Prepared:
    """Loads the model and the calibration tokens. Raises UserError for what does not fit.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model.
        recipe: the settings of the run.
        tokenizer: the tokenizer for the calibration text; None loads the model's own.
        calibration: token ids [nsamples, seqlen], which replace the calibration text of the recipe.
        device: the device or devices of the computation.
        dtype: dtype of the weights. `auto` is the checkpoint's dtype on a GPU, and float32 on a CPU.
        rotations_given: whether the rotations are loaded from a file instead of trained.
        format: format of the weights in the result.
        progress: the callback for ProgressEvents.
    """
    devices = pick_devices(device)
    if isinstance(model, str | Path):
        source = str(model)
        _refuse_pruned(Path(model))
        if dtype == "auto" and devices[0].type == "cpu":
            dtype = torch.float32
        check_recipe(load_config(model), recipe, devices, rotations_given=rotations_given, format=format)
        tokenizer = tokenizer or load_tokenizer(model)
        model = load_model(model, dtype)
    else:
        source = getattr(model.config, "_name_or_path", "")
        check_recipe(model.config, recipe, devices, rotations_given=rotations_given, format=format)
        if tokenizer is None and calibration is None:
            raise UserError("a loaded model needs `tokenizer`, or token ids as `calibration`; got neither")
    tokens, recipe = _calibration_tokens(calibration, tokenizer, recipe)
    check_tokens(tokens, model.config)
    check_architecture(model)
    model.eval()  # dropout would change the Hessians
    return Prepared(RunContext(model, recipe, tokens, devices, progress), source, tokenizer)


def _calibration_tokens(calibration: Tensor | None, tokenizer: Any, recipe: Recipe) -> tuple[Tensor, Recipe]:
    """The calibration tokens, and the recipe, with the shape of `calibration` if that is given."""
    options = {
        field.name: getattr(recipe.calibration, field.name)
        for field in dataclasses.fields(CalibrationConfig)
        if field.name != "source"
    }
    if calibration is None and recipe.calibration.source == GIVEN_TOKENS:
        raise UserError(
            "the run of this recipe was calibrated on token ids that a Python program gave: name a text as "
            "`source`, or give the token ids as `calibration`"
        )
    if calibration is None:
        return load_calibration(recipe.calibration.source, tokenizer, **options), recipe
    tokens = load_calibration(calibration, tokenizer, **options)
    nsamples, seqlen = tokens.shape
    config = dataclasses.replace(recipe.calibration, source=GIVEN_TOKENS, nsamples=nsamples, seqlen=seqlen)
    return tokens, dataclasses.replace(recipe, calibration=config)


def _refuse_pruned(folder: Path) -> None:
    """Raises UserError for a checkpoint that was pruned by drot."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if any(sparsity.ratio > 0 for sparsity in patterns_of(manifest).sparsities):
            original = manifest["base_model"]
            raise UserError(f"{folder} was pruned already: prune its dense original, {original}")
