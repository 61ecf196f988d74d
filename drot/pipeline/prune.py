"""`drot.prune`, which makes a pruned model and its checkpoint from a model and a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.resume import RunState, check_unfinished
from drot.checkpoint.rotations import save_rotations
from drot.checkpoint.save import check_output, check_writable, save_checkpoint
from drot.config import Recipe
from drot.config.checks import is_a
from drot.errors import UserError
from drot.pipeline.prepare import prepare
from drot.pipeline.recover import check_sequences
from drot.pipeline.run import PruningRun
from drot.progress import Progress, ProgressEvent, silent
from drot.sparse.packed import check_format, check_packable, dense_linears, pack_model
from drot.sparse.quantization_config import format_of


@dataclass(frozen=True)
class PruneResult:
    """The result of `drot.prune`.

    model: the pruned model, on the device where it was loaded.
    manifest: the content of drot.json.
    out: the folder of the checkpoint; None if no checkpoint was written.
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

    Raises UserError for a mistake in the input, and InvarianceError if a rotation changed the model's
    outputs. In both cases nothing is written to `out`.

    Args:
        model: a name on the Hugging Face hub, a local folder, or a loaded model, which is changed in place.
        recipe: the settings of the run; None is `Recipe()`.
        out: the folder of the checkpoint, which must be new or empty. None writes no checkpoint.
        tokenizer: the tokenizer for the calibration text. A loaded model needs it, or `calibration`.
        calibration: token ids [nsamples, seqlen], which replace the calibration text of the recipe.
        device: the device of the computation, to which one layer at a time is moved. The model itself stays
            where it was loaded. With `hessians="dense"`, several devices, such as `cuda:0,cuda:1`, train
            layers in parallel.
        dtype: dtype of the weights. `auto` is the checkpoint's dtype on a GPU, and float32 on a CPU.
        rotations: a file written by `save_rotations_to`, whose rotations are used instead of training.
        save_rotations_to: a new file for the rotations, which other sparsities and methods can reuse.
        format: format of the weights in the result and in `out`: `dense`, or `packed`, which stores values
            and positions of 2:4 weights, and other weights dense.
        resume: continues an interrupted run, whose finished layers are in the folder `<out>.partial`.
        progress: the callback for ProgressEvents.
    """
    is_a("recipe", recipe, Recipe, or_none=True)
    for name, path in (("out", out), ("rotations", rotations), ("save_rotations_to", save_rotations_to)):
        is_a(name, path, str, Path, or_none=True)
    is_a("resume", resume, bool)
    recipe = recipe or Recipe()
    check_format(format, recipe.pruning)
    out = None if out is None else Path(out)
    if out is not None:
        check_output(out)
        check_unfinished(out, resume=resume)
    elif resume:
        raise UserError("`resume` needs `out`: name the `out` of the interrupted run")
    if save_rotations_to is not None:
        _check_rotations_output(Path(save_rotations_to), recipe)
    prepared = prepare(
        model,
        recipe,
        tokenizer=tokenizer,
        calibration=calibration,
        device=device,
        dtype=dtype,
        rotations_given=rotations is not None,
        format=format,
        progress=progress,
    )
    context, source = prepared.context, prepared.source
    model = context.model
    if recipe.recovery.recover == "block":
        check_sequences(len(context.tokens))
    if format == "packed":
        dense = dense_linears(model.config, recipe.pruning)
        check_packable(model, dense)
    run = PruningRun(context, Path(rotations) if rotations is not None else None)
    state = None if out is None else RunState(out, run.identity(source))
    manifest = run.execute(state) | {"base_model": source}
    if format == "packed":
        pack_model(model, dense)
    manifest |= format_of(model)
    if save_rotations_to is not None:
        save_rotations(Path(save_rotations_to), run.rotations, run.identity(source))
    if out is not None and state is not None:
        progress(ProgressEvent(phase="save"))
        save_checkpoint(model, prepared.tokenizer, manifest, out)
        state.discard()
    return PruneResult(model, manifest, out)


def _check_rotations_output(file: Path, recipe: Recipe) -> None:
    if recipe.rotation.mode == "none":
        raise UserError(
            '`save_rotations_to` needs `mode="layer"` or `mode="shared"`; got `mode="none"`, which trains no '
            "rotations"
        )
    check_writable(file)
    if file.exists():
        raise UserError(f"{file} exists: name another `save_rotations_to` or remove it")
