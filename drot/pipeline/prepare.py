"""The beginning of a run: loads the model and the calibration tokens, and checks them against the recipe."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load_config, load_model, load_tokenizer
from drot.config import CalibrationConfig, Recipe
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent
from drot.machine.devices import computing_dtype, parse_dtype, pick_devices, product_dtype
from drot.manifest.manifest import MANIFEST, read_manifest
from drot.model.families import positions_of
from drot.pipeline.context import RunContext
from drot.pipeline.validation import check_architecture, check_recipe, check_seqlen, check_tokens
from drot.text.source import load_calibration

#: `source` in the manifest of a run that was given token ids in place of a text
GIVEN_TOKENS = "tensor"


@dataclass(frozen=True)
class Prepared:
    """The model and all else that a run starts with.

    context: the state of the run.
    source: name or folder of the model.
    tokenizer: the tokenizer; None without one.
    save_dtype: dtype of the weights in the result.
    """

    context: RunContext
    source: str
    tokenizer: Any
    save_dtype: torch.dtype


def prepare(
    model: str | Path | PreTrainedModel,
    recipe: Recipe,
    *,
    tokenizer: Any,
    calibration: Tensor | None,
    device: str | torch.device,
    dtype: str | torch.dtype,
    save_dtype: str | torch.dtype = "auto",
    rotations_given: bool,
    format: str = "dense",
    measures: bool = False,
    progress: Progress,
) -> Prepared:
    """Loads the model and the calibration tokens. Raises UserError for what does not fit.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model.
        recipe: the settings of the run.
        tokenizer: the tokenizer for the calibration text; None loads the model's own.
        calibration: token ids [nsamples, seqlen], which replace the calibration text of the recipe.
        device: the device or devices of the computation.
        dtype: dtype of the computation. `auto` is the checkpoint's dtype on a GPU, and float32 on a CPU.
        save_dtype: dtype of the weights in the result. `auto` is the dtype of the model before the run.
        rotations_given: whether the rotations are loaded from a file instead of trained.
        format: format of the weights in the result.
        measures: whether the run measures output errors, so that it reads calibration text in any case.
        progress: the callback for ProgressEvents.
    """
    is_a("model", model, str, Path, PreTrainedModel)
    is_a("calibration", calibration, Tensor, or_none=True)
    is_a("device", device, str, torch.device)
    is_a("dtype", dtype, str, torch.dtype)
    is_a("save_dtype", save_dtype, str, torch.dtype)
    devices = pick_devices(device)
    recipe = recipe_on(recipe, devices[0])
    if isinstance(dtype, str) and dtype != "auto":
        dtype = parse_dtype(dtype)  # a mistake is found before the text is read
    if isinstance(save_dtype, str) and save_dtype != "auto":
        save_dtype = parse_dtype(save_dtype, "save_dtype")
    if isinstance(model, str | Path):
        source = str(model)
        config = load_config(model)
        _refuse_pruned(Path(model))
        check_recipe(config, recipe, devices, rotations_given=rotations_given, format=format)
        tokenizer = tokenizer or load_tokenizer(model)
    else:
        source, config = getattr(model.config, "_name_or_path", ""), model.config
        check_recipe(config, recipe, devices, rotations_given=rotations_given, format=format)
        if tokenizer is None and calibration is None and (measures or recipe.reads_calibration):
            raise UserError("a loaded model needs `tokenizer`, or token ids as `calibration`; got neither")
    if calibration is None and not recipe.reads_calibration and not measures:
        tokens = torch.empty(0, 1, dtype=torch.long)  # no sequences
    else:
        tokens, recipe = _calibration_tokens(calibration, tokenizer, recipe, config, progress)
    check_tokens(tokens, config)
    if isinstance(model, str | Path):  # after the text, in which a mistake is found sooner
        progress(ProgressEvent(phase="load"))
        dtype, own = computing_dtype(dtype, devices[0]), config.dtype
        model = load_model(model, "auto" if own is None else dtype)
        if own is None:  # config.json of an old checkpoint names no dtype
            own = model.dtype
            if dtype != "auto":
                cast_weights(model, parse_dtype(dtype) if isinstance(dtype, str) else dtype)
    else:
        own = model.dtype
    check_architecture(model)
    model.eval()  # dropout would change the Hessians
    return Prepared(
        RunContext(model, recipe, tokens, devices, progress),
        source,
        tokenizer,
        own if isinstance(save_dtype, str) else save_dtype,
    )


def recipe_on(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the dtype in which rotations are trained on `device`; unchanged if it rotates nothing.

    The manifest records this recipe, and the identity of an unfinished run holds it, so that a run is not
    continued in another dtype on another device.
    """
    if recipe.rotation.mode == "none":
        return recipe
    trained_in = product_dtype(recipe.rotation.product_dtype, device)
    return dataclasses.replace(
        recipe, rotation=dataclasses.replace(recipe.rotation, product_dtype=trained_in)
    )


def _calibration_tokens(
    calibration: Tensor | None, tokenizer: Any, recipe: Recipe, config: Any, progress: Progress
) -> tuple[Tensor, Recipe]:
    """The calibration tokens [nsamples, seqlen], and the recipe with the shape of the tokens.

    Args:
        calibration: token ids, which replace the calibration text of the recipe.
        tokenizer: the tokenizer of the model.
        recipe: the settings of the run.
        config: the config of the model.
        progress: the callback for ProgressEvents.
    """
    seqlen = recipe.calibration.resolved_seqlen(positions_of(config))
    recipe = dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, seqlen=seqlen))
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
        check_seqlen(seqlen, config)  # before the text is tokenised, which may take a minute
        tokens = load_calibration(recipe.calibration.source, tokenizer, **options, progress=progress)
        return tokens, recipe
    tokens = load_calibration(calibration, tokenizer, **options)
    nsamples, seqlen = tokens.shape
    given = dataclasses.replace(recipe.calibration, source=GIVEN_TOKENS, nsamples=nsamples, seqlen=seqlen)
    return tokens, dataclasses.replace(recipe, calibration=given)


def _refuse_pruned(folder: Path) -> None:
    """Raises UserError for a checkpoint that was pruned by drot."""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if any(sparsity.ratio > 0 for sparsity in manifest.recipe.pruning.sparsities):
            raise UserError(f"{folder} was pruned already: prune its dense original, {manifest.base_model}")
