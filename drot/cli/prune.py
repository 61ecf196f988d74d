"""The command `drot prune`: from its options to a run, and what is printed of the result."""

from pathlib import Path

import typer

from drot.cli import prune_options as options
from drot.cli.effects import check_effects, check_no_output
from drot.cli.options import Interrupted, Json, print_json, stdout_for_the_result
from drot.cli.recipe import (
    check_rotations_file,
    recipe_and_manifest,
    recipe_fields,
    tell_changes,
    tell_other_input,
)
from drot.cli.tables import print_line, print_manifest, saved_line
from drot.config import CalibrationConfig, PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.core.errors import UserError

PRUNE, ROTATE, CALIBRATE, RECOVER = PruningConfig(), RotationConfig(), CalibrationConfig(), RecoveryConfig()
EPILOG = "Example: drot prune meta-llama/Llama-3.1-8B --out llama-2of4 --calibration text.txt --format packed"


def prune(
    ctx: typer.Context,
    model: options.Model = None,
    *,
    recipe: options.Recipe = None,
    method: options.Method = PRUNE.method,
    sparsity: options.Sparsity = str(PRUNE.sparsity),
    sparsity_of: options.SparsityOf = None,
    keep: options.Keep = None,
    damping: options.Damping = PRUNE.damping,
    damping_average: options.DampingAverage = PRUNE.damping_average,
    block_size: options.BlockSize = PRUNE.block_size,
    quality: options.Quality = None,
    solve: options.Solve = None,
    target: options.Target = None,
    target_weight: options.TargetWeight = PRUNE.target_weight,
    recover: options.Recover = None,
    recover_epochs: options.RecoverEpochs = RECOVER.recover_epochs,
    recover_lr: options.RecoverLr = RECOVER.recover_lr,
    recover_batch: options.RecoverBatch = RECOVER.recover_batch,
    rotation: options.Rotation = ROTATE.mode,
    objective: options.Objective = ROTATE.objective,
    optimizer: options.Optimizer = ROTATE.optimizer,
    steps: options.Steps = ROTATE.steps,
    lr: options.Lr = ROTATE.lr,
    early_stop: options.EarlyStop = ROTATE.early_stop,
    training_tokens: options.TrainingTokens = ROTATE.training_tokens,
    hessians: options.Hessians = ROTATE.hessians,
    boundary: options.Boundary = ROTATE.boundary,
    layers_per_step: options.LayersPerStep = ROTATE.layers_per_step,
    product_dtype: options.ProductDtype = ROTATE.product_dtype,
    reference_compat: options.ReferenceCompat = ROTATE.reference_compat,
    rotations: options.Rotations = None,
    save_rotations_to: options.SaveRotationsTo = None,
    calibration: options.Calibration = CALIBRATE.source,
    nsamples: options.Nsamples = CALIBRATE.nsamples,
    seqlen: options.Seqlen = CALIBRATE.seqlen,
    seed: options.Seed = CALIBRATE.seed,
    text_column: options.TextColumn = CALIBRATE.text_column,
    out: options.Out = None,
    sensitivity: options.Sensitivity = False,
    format: options.Format = "dense",
    save_dtype: options.SaveDtype = "auto",
    as_json: Json = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    resume: options.Resume = False,
) -> None:
    """Rotate and prune MODEL, and save the result as a Hugging Face folder."""
    # The sources are compared by name. Older typers use click's ParameterSource and newer ones a copy of it,
    # and a member of one is never equal to a member of the other.
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    given = {name for name, source in sources.items() if source == "COMMANDLINE"}
    start, manifest = (Recipe(), None) if recipe is None else recipe_and_manifest(recipe)
    fields = recipe_fields({name: ctx.params[name] for name in given})
    changed = start.replace(**fields)
    if quality is not None:  # which sets what the options do not
        changed = changed.with_quality(quality).replace(**fields)
    # steps that the quality sets may be without effect
    without_options = start if "steps" in given else start.replace(steps=changed.rotation.steps)
    check_effects(
        changed,
        without_options,
        measures=sensitivity,
        rotations=rotations,
        save_rotations_to=save_rotations_to,
    )
    if recipe is not None:
        tell_changes(start, changed, recipe)
    if model is None:
        model = manifest.base_model if manifest else None
    if not model:
        raise UserError("MODEL is missing: name a model on the hub or a folder, or a checkpoint as `recipe`")
    label = changed.objective if changed.objective == "entropy" else "loss"
    if sensitivity:
        check_no_output(
            out=out,
            resume=resume,
            save_rotations_to=save_rotations_to,
            format=format != "dense",
            save_dtype=save_dtype != "auto",
            recover=changed.recovery.recover != start.recovery.recover,
        )
        from drot.cli.sensitivity import show_sensitivity

        show_sensitivity(model, changed, label, as_json, device=device, dtype=dtype, rotations=rotations)
        return
    if out is None:
        raise UserError("`out` is missing: name the folder to write, or use `sensitivity=True`")
    if manifest:
        format = format if "format" in given else manifest.format
        dtype = dtype if "dtype" in given else manifest.compute_dtype
        save_dtype = save_dtype if "save_dtype" in given else manifest.dtype
        check_rotations_file(manifest, rotations)
    from drot.cli.progress_bars import progress_bar
    from drot.pipeline import prune as pipeline

    shared = changed.rotation.mode == "shared"
    try:
        with stdout_for_the_result(), progress_bar(shared=shared, label=label) as progress:
            result = pipeline.prune(
                model,
                changed,
                out=out,
                device=device,
                dtype=dtype,
                save_dtype=save_dtype,
                rotations=rotations,
                save_rotations_to=save_rotations_to,
                format=format,
                resume=resume,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise Interrupted(how_to_go_on(out)) from None
    if manifest and changed.calibration == start.calibration:
        tell_other_input(manifest, result.manifest)
    if as_json:
        print_json({"out": str(out), **result.manifest.to_dict()})
    else:
        print_manifest(result.manifest)
        before = "was finished already: nothing to do"
        print_line(f"{out} {before}" if result.finished_before else saved_line(model, out))


def how_to_go_on(out: Path) -> str:
    """What the user of an interrupted run can do now."""
    from drot.checkpoint.resume import partial_folder

    folder = partial_folder(out)
    if not folder.exists():
        return "no layer was finished, and nothing is kept"
    return f"the finished layers lie in {folder}; to go on, give the same command with --resume"
