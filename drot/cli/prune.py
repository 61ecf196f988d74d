"""The command `drot prune`: from its options to a run, and what is printed of the result."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from drot.cli.commands import Interrupted
from drot.cli.dry_run import show_needs
from drot.cli.effects import check_effects, check_no_output
from drot.cli.log import tell
from drot.cli.options import SOURCES, given_options, options_of
from drot.cli.output import judging, print_json, print_line, print_manifest, saved_line
from drot.cli.progress_bars import working
from drot.cli.ranks import checked_ranks, launch_if_asked
from drot.cli.recipe import AskedRecipe, asked_recipe, check_rotations_file, fit_recipe, run_settings
from drot.cli.sensitivity import show_sensitivity
from drot.config import Recipe
from drot.core.checks import counted
from drot.core.errors import UserError

if TYPE_CHECKING:
    from drot.checkpoint.manifest import Manifest

DEFAULT = Recipe()
#: the options that set fields of the recipe, by panel; what is named here differs from the field
SETTINGS = [
    *options_of(
        DEFAULT.pruning,
        "Pruning",
        sparsity={"metavar": "[2:4|4:8|N:M|RATIO]"},
        sparsity_of={"metavar": "PATTERN=[N:M|RATIO]"},
        keep={"metavar": "PATTERN"},
    ),
    *options_of(DEFAULT.recovery, "Recovery"),
    *options_of(
        DEFAULT.rotation,
        "Rotation",
        leave_out=("blocks",),  # part of --rotation
        mode={
            "name": "rotation",
            "metavar": "[stock|light|full|none|layer|shared|block:N]",
            "default": "full",
            "help": "stock: one rotation of the residual stream for the whole model. Saved dense, it loads "
            "without drot. light: the same, and R3, which rotates the input of down_proj in blocks. full: a "
            "rotation for each layer, and R3. none: no rotations. shared and layer: stock and full, with the "
            "R3 of --down-rotation. block:N: as layer, each rotation with N equal diagonal blocks.",
        },
        down_rotation={"metavar": "[auto|none|B]"},
    ),
    *options_of(
        DEFAULT.calibration,
        "Calibration",
        source={
            "name": "calibration",
            "metavar": "[c4|own|ORG/NAME|PATH]",
            "help": f"Text from which the Hessians are computed: {SOURCES} own: a text that MODEL "
            "writes first, as drot sample does. --method magnitude with --rotation none needs no text.",
        },
    ),
]
#: the parameters of the options that --help shows: those that people use first
FIRST = (
    "quality",
    "sparsity",
    "rotation",
    "calibration",
    "out",
    "dry_run",
    "fit",
    "format",
    "device",
    "resume",
)


def prune(
    ctx: typer.Context,
    model: str | None = None,
    gguf_file: str | None = None,
    recipe: Path | None = None,
    quality: str | None = None,
    rotations: Path | None = None,
    save_rotations_to: Path | None = None,
    out: Path | None = None,
    dry_run: bool = False,
    fit: str | None = None,
    sensitivity: bool = False,
    format: str = "dense",
    save_dtype: str = "auto",
    as_json: bool = False,
    device: str = "auto",
    gpus: int | None = None,
    dtype: str = "auto",
    resume: bool = False,
    **settings: Any,
) -> None:
    """Rotate and prune MODEL, and save the result as a Hugging Face folder.

    Example: drot prune meta-llama/Llama-3.1-8B --out llama-2of4 --calibration text.txt --format packed

    Arguments:
        model MODEL: Name on the Hugging Face hub, or a local folder. Default with --recipe DIR: the model
            from which DIR was made.
    Model:
        gguf_file NAME.gguf: Read this GGUF file of MODEL, whose weights become dense. transformers reads it,
            with the package gguf.
    Recipe:
        recipe [FILE|DIR]: Take the settings from this file, a recipe in YAML or JSON or the drot.json of a
            checkpoint, or from the folder of a checkpoint. Options next to it replace single settings.
        quality [fast|balanced|best]: How much to compute: fast solves for the kept weights; balanced also
            moves the mask, towards the dense model; best also trains the kept weights of all layers together.
            It sets --solve, --target, --recover and --distill-epochs. fast: pcg, self, none, 0. balanced:
            admm, dense, none, 0. best: admm, dense, none, 1. fast also sets --steps to 50, and to 100 with
            stock and light. balanced and best set --steps to its default. Default: balanced; with
            --rotation none, --optimizer paper or --reference-compat none of the three, but one shot as
            published.
    Pruning:
    Recovery:
    Rotation:
        rotations: Use the rotations in this file, which --save-rotations wrote, and train none.
        save_rotations_to: Also write the rotations to this file, for another sparsity or method.
    Calibration:
    Output:
        out: Folder to write. It must be new or empty. Not with --sensitivity.
        dry_run: Write nothing. Print every setting of the run, and the disk, memory and time that it needs.
        fit SIZE: Fit the run into this memory of the GPU, as in 24GB, by the estimate of --dry-run. As far as
            needed, --layers-per-step, --distill-epochs, --recover, --solve and --target change, unless this
            command line sets them. drot says which.
        sensitivity: Write no model. Print the output error of each linear at 2:4, 4:8, 50 % and the
            sparsities of this command line, for which the rotations are trained in the dense model.
        format:
        save_dtype:
        as_json:
    Run:
        device [auto|cpu|cuda|cuda:N]: Device to use. auto is the first GPU, or the CPU if there is no GPU.
        gpus N: Share the run between N GPUs of this machine, or with --device cpu N processes.
        dtype:
        resume: Continue an interrupted run with the same --out. A finished run is left as it is.
    """
    ranks = checked_ranks(gpus, device)
    given = given_options(ctx)
    asked = asked_recipe(recipe, given, quality)
    check_effects(asked, measures=sensitivity, rotations=rotations, save_rotations_to=save_rotations_to)
    named = _model(model, gguf_file, asked.manifest)
    if sensitivity:
        check_no_output(asked, given)
        show_sensitivity(named, asked.recipe, as_json, device=device, dtype=dtype, rotations=rotations)
        return
    check_rotations_file(asked.manifest, rotations)
    options: dict[str, Any] = {"device": device, "rotations": rotations}
    options |= run_settings(asked, given, format=format, dtype=dtype, save_dtype=save_dtype)
    asked = fit_recipe(asked, fit, named, given, gpus=ranks, **options)
    if dry_run:
        options |= {"out": out, "save_rotations_to": save_rotations_to, "resume": resume}
        show_needs(named, asked.recipe, as_json, gpus=ranks, **options)
        return
    if out is None:
        raise UserError("--out is missing: name the folder to write, or use --sensitivity or --dry-run")
    launch_if_asked(gpus, ctx.obj)
    _run(named, asked, out, as_json, save_rotations_to=save_rotations_to, resume=resume, **options)


def _model(name: str | None, gguf_file: str | None, manifest: dict[str, Any]) -> str:
    """The model to prune: the named one, or that from which the checkpoint of the recipe was made."""
    from drot.core.hub import HUB_NAME

    model = name or manifest.get("base_model")
    if not model:
        raise UserError("MODEL is missing: name a model on the hub or a folder, or a checkpoint as --recipe")
    if not name and not HUB_NAME.fullmatch(model) and not os.path.exists(model):
        raise UserError(f"there is no {model}, from which the checkpoint of --recipe was made: name MODEL")
    return str(model) if gguf_file is None else f"{model}/{gguf_file}"


def _run(model: str, asked: AskedRecipe, out: Path, as_json: bool, **options: Any) -> None:
    """Runs `drot.prune` with the options, and prints its result."""
    from drot.checkpoint.resume import finished_layers, partial_folder
    from drot.pipeline import prune as pipeline

    if options["resume"] and (count := finished_layers(out)):
        tell(f"drot: the interrupted run finished {counted(count, 'layer')}; those that are sound are kept")

    try:
        with working() as progress:
            result = pipeline.prune(model, asked.recipe, out=out, progress=progress, **options)
    except KeyboardInterrupt:
        folder = partial_folder(out)
        if not folder.exists():
            raise Interrupted("no layer was finished, and nothing is kept") from None
        raise Interrupted(
            f"what was finished lies in {folder}; to go on, give the same command with --resume"
        ) from None
    if as_json:
        print_json({"out": out, **result.manifest.to_dict()})
        return
    print_manifest(result.manifest)
    before = "was finished already: nothing to do"
    print_line(f"{out} {before}" if result.finished_before else saved_line(model, out))
    print_line("Next:")
    for command, what in next_commands(model, out, asked.recipe, result.manifest):
        print_line(f"  {command}  # {what}")


def next_commands(model: str, out: Path, recipe: Recipe, manifest: "Manifest") -> Iterator[tuple[str, str]]:
    """The commands that judge the checkpoint, and the one that makes it smaller; and what each is for.

    recipe: as it was asked for.
    """
    from drot.core.files import beside

    folder, packed = shlex.quote(str(out)), shlex.quote(str(beside(out, "-packed")))
    judge, text = judging(out, recipe.calibration, model)
    yield judge, f"what the pruning cost, on {text}"
    yield f"drot report {folder}", "charts of the run, and what is unusual"
    pruning = manifest.recipe.pruning
    sparsities = {str(pruning.sparsity_for(name)) for layer in manifest.layers for name in layer.linears}
    if manifest.format == "dense" and "2:4" in sparsities:
        yield f"drot convert {folder} --out {packed} --format packed", "2:4 weights in 9/16 of bf16's bytes"
    if manifest.format == "packed":
        yield f"drot serve {folder}", "an OpenAI-compatible server; drot chat talks to the model"
