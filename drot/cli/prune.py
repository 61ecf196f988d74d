"""The command `drot prune`: from its options to a run, and what is printed of the result."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from drot.cli import prune_options as options
from drot.cli.commands import Interrupted
from drot.cli.effects import check_effects, check_no_output
from drot.cli.options import Json, print_json, stdout_for_the_result
from drot.cli.recipe import (
    asked_recipe,
    check_rotations_file,
    progress_of,
    run_settings,
    tell_other_input,
)
from drot.cli.settings import given_options, with_settings
from drot.cli.tables import print_line, print_manifest, saved_line
from drot.core.errors import UserError

EPILOG = "Example: drot prune meta-llama/Llama-3.1-8B --out llama-2of4 --calibration text.txt --format packed"


@with_settings(
    rotations=[*options.PRUNING_OPTIONS, *options.RECOVERY_OPTIONS, *options.ROTATION_OPTIONS],
    out=options.CALIBRATION_OPTIONS,
)
def prune(
    ctx: typer.Context,
    model: options.Model = None,
    *,
    recipe: options.RecipeFile = None,
    quality: options.Quality = None,
    rotations: options.Rotations = None,
    save_rotations_to: options.SaveRotationsTo = None,
    out: options.Out = None,
    dry_run: options.DryRun = False,
    sensitivity: options.Sensitivity = False,
    format: options.Format = "dense",
    save_dtype: options.SaveDtype = "auto",
    as_json: Json = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    resume: options.Resume = False,
    **settings: Any,
) -> None:
    """Rotate and prune MODEL, and save the result as a Hugging Face folder."""
    given = given_options(ctx)
    asked = asked_recipe(recipe, given, quality)
    check_effects(asked, measures=sensitivity, rotations=rotations, save_rotations_to=save_rotations_to)
    model = model or asked.manifest.get("base_model")
    if not model:
        raise UserError("MODEL is missing: name a model on the hub or a folder, or a checkpoint as --recipe")
    if sensitivity:
        check_no_output(asked, given)
        from drot.cli.sensitivity import show_sensitivity

        show_sensitivity(model, asked.recipe, as_json, device=device, dtype=dtype, rotations=rotations)
        return
    of_the_run = run_settings(asked, given, format=format, dtype=dtype, save_dtype=save_dtype)
    if dry_run:
        from drot.cli.dry_run import show_needs

        given_file = rotations is not None
        show_needs(model, asked.recipe, as_json, device=device, rotations_given=given_file, **of_the_run)
        return
    if out is None:
        raise UserError("--out is missing: name the folder to write, or use --sensitivity or --dry-run")
    check_rotations_file(asked.manifest, rotations)
    from drot.pipeline import prune as pipeline

    with told_how_to_go_on(out), stdout_for_the_result(), progress_of(asked.recipe) as progress:
        result = pipeline.prune(
            model,
            asked.recipe,
            out=out,
            device=device,
            rotations=rotations,
            save_rotations_to=save_rotations_to,
            resume=resume,
            progress=progress,
            **of_the_run,
        )
    if asked.manifest and asked.recipe.calibration == asked.start.calibration:
        tell_other_input(asked.manifest, result.manifest)
    if as_json:
        print_json({"out": str(out), **result.manifest.to_dict()})
    else:
        print_manifest(result.manifest)
        before = "was finished already: nothing to do"
        print_line(f"{out} {before}" if result.finished_before else saved_line(model, out))


@contextlib.contextmanager
def told_how_to_go_on(out: Path) -> Iterator[None]:
    """Turns Ctrl-C into an Interrupted that says what the user can do now."""
    try:
        yield
    except KeyboardInterrupt:
        from drot.checkpoint.resume import partial_folder

        folder = partial_folder(out)
        if not folder.exists():
            raise Interrupted("no layer was finished, and nothing is kept") from None
        raise Interrupted(
            f"the finished layers lie in {folder}; to go on, give the same command with --resume"
        ) from None
