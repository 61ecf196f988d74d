"""`drot.prune`: from a model and a recipe to a pruned model and its checkpoint."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot import checkpoint
from drot.calibration.data import load_calibration
from drot.config import CalibrationConfig, Recipe, Sparsity
from drot.errors import UserError
from drot.fits import check_recipe
from drot.progress import Progress, ProgressEvent, silent
from drot.rotation.artifact import save_rotations
from drot.run import PruningRun
from drot.sparse.packed import check_layout, check_packable, describe_layout, pack_model


@dataclass(frozen=True)
class PruneResult:
    """model: the pruned model, on the CPU unless it came on a GPU; manifest: what drot.json holds;
    out: where it was saved, None where it was not."""

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
    layout: str = "dense",
    resume: bool = False,
    progress: Progress = silent,
) -> PruneResult:
    """Rotates and prunes a causal language model (paper, algorithm 1).

    model: hub name, local folder, or a loaded model, which is then changed in place.
    calibration: token ids [nsamples, seqlen] in place of the recipe's text source.
    device: where a layer is worked on; the model itself stays where it was loaded. Several, as in
        `cuda:0,cuda:1`, train layers side by side (hessians="dense").
    dtype: of the weights; `auto` is the checkpoint's own on a GPU and float32 on a CPU.
    rotations: a file that save_rotations_to wrote: nothing is trained, its matrices are used.
    save_rotations_to: writes the rotations, for other sparsities and methods of the same model.
    layout: `dense`, or `packed` for values and positions of 2:4 weights; of the result and of `out`.
    out, resume: finished layers are kept in `<out>.partial`; resume=True goes on from there.

    Raises UserError for a mistake in the input and InvarianceError if a rotation changed the
    model's function; in both cases nothing is written to `out`.
    """
    recipe = recipe or Recipe()
    check_layout(layout, recipe.pruning.sparsity)
    out = None if out is None else Path(out)
    if out is not None:
        checkpoint.check_output(out)
        checkpoint.check_unfinished(out, resume=resume)
    elif resume:
        raise UserError("resume needs out: the folder of the run that was interrupted")
    if save_rotations_to is not None:
        if recipe.rotation.mode == "none":
            raise UserError(
                "there are no rotations to save: --save-rotations needs --rotation layer or shared"
            )
        if Path(save_rotations_to).exists():
            raise UserError(f"{save_rotations_to} exists: name another --save-rotations or remove it")
        checkpoint.check_writable(Path(save_rotations_to))
    devices = checkpoint.pick_devices(device)
    source = str(model) if isinstance(model, str | Path) else getattr(model.config, "_name_or_path", "")
    if isinstance(model, str | Path):
        _refuse_pruned(Path(model))
        if dtype == "auto" and devices[0].type == "cpu":
            dtype = torch.float32
        config = checkpoint.load_config(model)
        check_recipe(config, recipe, devices, rotations_given=rotations is not None)
        tokenizer = tokenizer or checkpoint.load_tokenizer(model)
        model = checkpoint.load_model(model, dtype)
    elif tokenizer is None and calibration is None:
        raise UserError("a loaded model needs tokenizer=..., or calibration=... with token ids")
    tokens = load_calibration(
        recipe.calibration.source if calibration is None else calibration,
        tokenizer,
        **_calibration_options(recipe.calibration),
    )
    if calibration is not None:
        recipe = dataclasses.replace(
            recipe,
            calibration=dataclasses.replace(
                recipe.calibration, source="tensor", nsamples=tokens.shape[0], seqlen=tokens.shape[1]
            ),
        )
    model.eval()  # a dropout would be calibrated along
    rotations = None if rotations is None else Path(rotations)
    run = PruningRun(model, recipe, tokens, devices, progress, rotations)
    if layout == "packed":
        check_packable(model)
    state = None
    if out is not None:
        state = checkpoint.RunState(out, run.identity(source))
    manifest = run.execute(state) | {"base_model": source}
    if layout == "packed":
        pack_model(model)
    manifest |= describe_layout(model)
    if save_rotations_to is not None:
        save_rotations(Path(save_rotations_to), run.rotations, run.identity(source))
    if out is not None and state is not None:
        progress(ProgressEvent(phase="save"))
        checkpoint.save_checkpoint(model, tokenizer, manifest, out)
        state.discard()
    return PruneResult(model, manifest, out)


def _refuse_pruned(folder: Path) -> None:
    """Raises UserError for a checkpoint of ours that has lost weights already."""
    if (folder / checkpoint.MANIFEST).exists():
        before = checkpoint.read_manifest(folder)
        if Sparsity.parse(before["recipe"]["pruning"]["sparsity"]).ratio > 0:
            raise UserError(f"{folder} was pruned already: prune its dense original, {before['base_model']}")


def _calibration_options(config: CalibrationConfig) -> dict[str, Any]:
    options = dataclasses.asdict(config)
    del options["source"]
    return options
