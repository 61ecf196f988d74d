"""`drot.prune`: from a model and a recipe to a pruned model and its checkpoint."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.calibration.data import load_calibration
from drot.checkpoint.load import load_config, load_model, load_tokenizer
from drot.checkpoint.manifest import MANIFEST, read_manifest
from drot.checkpoint.resume import RunState, check_unfinished
from drot.checkpoint.rotations import save_rotations
from drot.checkpoint.save import check_output, check_writable, save_checkpoint
from drot.config import CalibrationConfig, Recipe, Sparsity
from drot.devices import pick_devices
from drot.errors import UserError
from drot.pipeline.context import RunContext
from drot.pipeline.run import PruningRun
from drot.pipeline.validation import check_architecture, check_recipe, check_tokens
from drot.progress import Progress, ProgressEvent, silent
from drot.sparse.packed import check_format, check_packable, pack_model
from drot.sparse.quantization_config import format_of


@dataclass(frozen=True)
class PruneResult:
    """What `drot.prune` returns.

    model: the pruned model, on the device where it was loaded.
    manifest: the content of drot.json.
    out: the folder of the checkpoint; None where none was written.
    """

    model: PreTrainedModel
    manifest: dict[str, Any]
    out: Path | None


def prune(
    model: str | Path | PreTrainedModel,
    recipe: Recipe | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: Any = None,
    calibration: Tensor | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    rotations: str | Path | None = None,
    save_rotations_to: str | Path | None = None,
    format: str = "dense",
    resume: bool = False,
    progress: Progress = silent,
) -> PruneResult:
    """Rotates and prunes a causal language model (paper, algorithm 1).

    Raises UserError for a mistake in the input, and InvarianceError where a rotation changed the model's
    function. In both cases nothing is written to `out`.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model, which is changed in place.
        recipe: what is done to the model; None is `Recipe()`.
        out: the folder of the checkpoint. It must be new or empty.
        tokenizer: the tokenizer of a loaded model, to read calibration text.
        calibration: token ids [nsamples, seqlen], instead of the text that the recipe names.
        device: where layers are worked on, one at a time; the model itself stays where it was loaded.
            Several devices, as in `cuda:0,cuda:1`, train layers side by side, with `hessians="dense"`.
        dtype: dtype of the weights; `auto` is the checkpoint's own on a GPU and float32 on a CPU.
        rotations: a file that `save_rotations_to` wrote; its rotations are used and nothing is trained.
        save_rotations_to: a file for the rotations, to be reused with other sparsities and methods.
        format: `dense`, or `packed` for values and positions of 2:4 weights; of the result and of `out`.
        resume: goes on with an interrupted run, whose finished layers lie in the folder `<out>.partial`.
        progress: is called with a ProgressEvent now and then.
    """
    recipe = recipe or Recipe()
    check_format(format, recipe.pruning.sparsity)
    out = None if out is None else Path(out)
    if out is not None:
        check_output(out)
        check_unfinished(out, resume=resume)
    elif resume:
        raise UserError("`resume` needs `out`: the folder of the run that was interrupted")
    if save_rotations_to is not None:
        _check_rotations_output(Path(save_rotations_to), recipe)
    devices = pick_devices(device)
    given = rotations is not None
    if isinstance(model, str | Path):
        source = str(model)
        _refuse_pruned(Path(model))
        if dtype == "auto" and devices[0].type == "cpu":
            dtype = torch.float32
        check_recipe(load_config(model), recipe, devices, rotations_given=given)
        tokenizer = tokenizer or load_tokenizer(model)
        model = load_model(model, dtype)
    else:
        source = getattr(model.config, "_name_or_path", "")
        check_recipe(model.config, recipe, devices, rotations_given=given)
        if tokenizer is None and calibration is None:
            raise UserError("a loaded model needs `tokenizer`, or `calibration` with token ids")
    tokens, recipe = _calibration_tokens(calibration, tokenizer, recipe)
    check_tokens(tokens, model.config)
    check_architecture(model)
    if format == "packed":
        check_packable(model)
    model.eval()  # dropout would reach the Hessians
    context = RunContext(model, recipe, tokens, devices, progress)
    run = PruningRun(context, Path(rotations) if rotations is not None else None)
    state = None if out is None else RunState(out, run.identity(source))
    manifest = run.execute(state) | {"base_model": source}
    if format == "packed":
        pack_model(model)
    manifest |= format_of(model)
    if save_rotations_to is not None:
        save_rotations(Path(save_rotations_to), run.rotations, run.identity(source))
    if out is not None and state is not None:
        progress(ProgressEvent(phase="save"))
        save_checkpoint(model, tokenizer, manifest, out)
        state.discard()
    return PruneResult(model, manifest, out)


def _check_rotations_output(file: Path, recipe: Recipe) -> None:
    if recipe.rotation.mode == "none":
        raise UserError(
            'there are no rotations to save: `save_rotations_to` needs `mode="layer"` or `mode="shared"`'
        )
    if file.exists():
        raise UserError(f"{file} exists: name another `save_rotations_to` or remove it")
    check_writable(file)


def _calibration_tokens(calibration: Tensor | None, tokenizer: Any, recipe: Recipe) -> tuple[Tensor, Recipe]:
    """The calibration tokens, and the recipe as it is recorded: with the shape of tokens that were given."""
    options = {
        field.name: getattr(recipe.calibration, field.name)
        for field in dataclasses.fields(CalibrationConfig)
        if field.name != "source"
    }
    if calibration is None:
        return load_calibration(recipe.calibration.source, tokenizer, **options), recipe
    tokens = load_calibration(calibration, tokenizer, **options)
    nsamples, seqlen = tokens.shape
    given = dataclasses.replace(recipe.calibration, source="tensor", nsamples=nsamples, seqlen=seqlen)
    return tokens, dataclasses.replace(recipe, calibration=given)


def _refuse_pruned(folder: Path) -> None:
    """Raises UserError for a checkpoint that drot has pruned."""
    if (folder / MANIFEST).exists():
        before = read_manifest(folder)
        if Sparsity.parse(before["recipe"]["pruning"]["sparsity"]).ratio > 0:
            raise UserError(f"{folder} was pruned already: prune its dense original, {before['base_model']}")
