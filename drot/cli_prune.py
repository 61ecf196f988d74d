"""`drot prune`: its options, and which of them go together."""

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from drot import config
from drot.cli_common import Dtype, Json, TextColumn, print_json, stdout_kept_for_the_result
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity
from drot.errors import UserError

PRUNING, ROTATION, CALIBRATION = PruningConfig(), RotationConfig(), CalibrationConfig()
#: of the fields of RotationConfig, those that say which matrices there are, trained or given
NOT_TRAINING = ("mode", "blocks", "down_basis")
#: and those that training alone reads
TRAINING = tuple(f.name for f in dataclasses.fields(RotationConfig) if f.name not in NOT_TRAINING)

#: options that are not called like their fields
OPTIONS = {"blocks": "--rotation block:N"}

#: what leaves options without effect: its words, whether a run is so, and the options by their fields.
#: This is a check of command lines, where such an option is a mistake; a program that varies one
#: setting of a recipe may leave the others as they are.
IDLE: tuple[tuple[str, Callable[[Recipe, bool], bool], tuple[str, ...]], ...] = (
    (
        "--rotation none",
        lambda recipe, given: recipe.rotation.mode == "none",
        (*TRAINING, "rotations", "save_rotations"),
    ),
    ("--rotations FILE", lambda recipe, given: given, (*TRAINING, "blocks")),
    (
        "--rotation other than shared",
        lambda recipe, given: recipe.rotation.mode != "shared",
        ("layers_per_step",),
    ),
    ("--layers-per-step", lambda recipe, given: recipe.rotation.layers_per_step is not None, ("early_stop",)),
    ("--optimizer paper", lambda recipe, given: recipe.rotation.optimizer == "paper", ("early_stop",)),
    (
        "--method other than sparsegpt",
        lambda recipe, given: recipe.pruning.method != "sparsegpt",
        ("damping", "block_size", "reference_compat"),
    ),
    ("a .txt file", lambda recipe, given: recipe.calibration.source.endswith(".txt"), ("text_column",)),
)


def choices(alias: Any) -> str:
    return ", ".join(typing.get_args(alias))


def optimizer_defaults(index: int) -> str:
    return ", ".join(f"{values[index]} for {name}" for name, values in config.OPTIMIZER_DEFAULTS.items())


def prune(
    model: Annotated[str, typer.Argument(help="Hub name or local folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist or be empty.")],
    method: Annotated[str, typer.Option(help=f"One of {choices(config.Method)}.")] = PRUNING.method,
    sparsity: Annotated[str, typer.Option(help="A ratio such as 0.5, or n:m such as 2:4.")] = str(
        PRUNING.sparsity
    ),
    rotation: Annotated[
        str, typer.Option(help=f"One of {choices(config.RotationMode)}, or block:N (N equal blocks a layer).")
    ] = ROTATION.mode,
    objective: Annotated[
        str, typer.Option(help=f"One of {choices(config.Objective)} (pruned for n:m, else entropy).")
    ] = ROTATION.objective,
    optimizer: Annotated[str, typer.Option(help=f"One of {choices(config.Optimizer)}.")] = ROTATION.optimizer,
    steps: Annotated[
        int | None, typer.Option(help=f"Training steps a layer; default {optimizer_defaults(0)}.")
    ] = ROTATION.steps,
    lr: Annotated[
        float | None,
        typer.Option(
            help=f"Learning rate; default {optimizer_defaults(1)}, {config.SHARED_LR} for fast with shared."
        ),
    ] = ROTATION.lr,
    early_stop: Annotated[
        float, typer.Option(help="fast ends when the loss moves by less than this share a step; 0: never.")
    ] = ROTATION.early_stop,
    hessians: Annotated[
        str, typer.Option(help=f"Where training's Hessians come from: {choices(config.HessianSource)}.")
    ] = ROTATION.hessians,
    down_basis: Annotated[
        str,
        typer.Option(
            help=f"Layer in whose basis down_proj is pruned: {choices(config.DownBasis)}; with next the "
            "rotation between two layers acts on the residual alone."
        ),
    ] = ROTATION.down_basis,
    layers_per_step: Annotated[
        int | None, typer.Option(help="With shared, layers that a step looks at; default all.")
    ] = ROTATION.layers_per_step,
    product_dtype: Annotated[
        str, typer.Option(help=f"Of training's matrix products: {choices(config.ProductDtype)}.")
    ] = ROTATION.product_dtype,
    reference_compat: Annotated[
        bool, typer.Option("--reference-compat", help="SparseGPT's score as the paper's code computes it.")
    ] = ROTATION.reference_compat,
    damping: Annotated[
        float, typer.Option(help="Share of mean(diag H) added to the Hessian's diagonal.")
    ] = PRUNING.damping,
    block_size: Annotated[int, typer.Option(help="Columns SparseGPT solves at once.")] = PRUNING.block_size,
    calibration: Annotated[
        str, typer.Option(help="c4, wikitext2, or a .txt, .json, .jsonl or .parquet file.")
    ] = CALIBRATION.source,
    nsamples: Annotated[int, typer.Option(help="Calibration windows.")] = CALIBRATION.nsamples,
    seqlen: Annotated[int, typer.Option(help="Tokens in a calibration window.")] = CALIBRATION.seqlen,
    seed: Annotated[int, typer.Option(help="Of the draw of the windows.")] = CALIBRATION.seed,
    text_column: TextColumn = CALIBRATION.text_column,
    rotations: Annotated[
        Path | None, typer.Option(help="Use the rotations of this file; nothing is trained.")
    ] = None,
    save_rotations: Annotated[
        Path | None, typer.Option(help="Also write the rotations, for other sparsities and methods.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="As for eval; with --hessians dense also several, as in cuda:0,cuda:1."),
    ] = "auto",
    dtype: Dtype = "auto",
    layout: Annotated[
        str, typer.Option("--format", help="Of the saved weights: dense, or packed for 2:4.")
    ] = "dense",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")] = False,
    as_json: Json = False,
) -> None:
    """Rotate and prune MODEL, and save it as a Hugging Face folder."""
    mode, blocks = parse_rotation(rotation)
    recipe = Recipe(
        rotation=RotationConfig(
            mode=mode,
            blocks=blocks,
            objective=typing.cast(config.Objective, objective),
            optimizer=typing.cast(config.Optimizer, optimizer),
            steps=steps,
            lr=lr,
            early_stop=early_stop,
            hessians=typing.cast(config.HessianSource, hessians),
            down_basis=typing.cast(config.DownBasis, down_basis),
            layers_per_step=layers_per_step,
            product_dtype=typing.cast(config.ProductDtype, product_dtype),
            reference_compat=reference_compat,
        ),
        pruning=PruningConfig(
            method=typing.cast(config.Method, method),
            sparsity=Sparsity.parse(sparsity),
            damping=damping,
            block_size=block_size,
        ),
        calibration=CalibrationConfig(
            source=calibration, nsamples=nsamples, seqlen=seqlen, seed=seed, text_column=text_column
        ),
    )
    check_effects(recipe, rotations=rotations, save_rotations=save_rotations)
    from drot import console, pipeline

    label = recipe.objective if recipe.objective == "entropy" else "loss"
    with stdout_kept_for_the_result(), console.progress_bar(shared=mode == "shared", label=label) as progress:
        result = pipeline.prune(
            model,
            recipe,
            out=out,
            device=device,
            dtype=dtype,
            rotations=rotations,
            save_rotations_to=save_rotations,
            layout=layout,
            resume=resume,
            progress=progress,
        )
    if as_json:
        print_json({"out": str(out), **result.manifest})
    else:
        console.print_manifest(result.manifest)
        console.say(f"Saved to {out}")


def check_effects(recipe: Recipe, **files: Path | None) -> None:
    """Raises UserError that names every option which differs from its default and yet decides nothing.

    files: --rotations and --save-rotations by their parameters' names.
    """
    changed = {name for name, file in files.items() if file is not None}
    for part in (recipe.rotation, recipe.pruning, recipe.calibration):
        default = type(part)()
        fields = (field.name for field in dataclasses.fields(part))
        changed |= {name for name in fields if getattr(part, name) != getattr(default, name)}
    for words, applies, without_effect in IDLE:
        idle = [name for name in without_effect if name in changed]
        if idle and applies(recipe, files["rotations"] is not None):
            options = ", ".join(OPTIONS.get(name, "--" + name.replace("_", "-")) for name in idle)
            verb = "have" if len(idle) > 1 else "has"
            raise UserError(f"{options} {verb} no effect with {words}: leave one or the other out")


def parse_rotation(text: str) -> tuple[config.RotationMode, int]:
    """mode and blocks of `--rotation`; RotationConfig checks the mode's name."""
    if not text.startswith("block:"):
        return typing.cast(config.RotationMode, text), 1
    try:
        return "layer", int(text.removeprefix("block:"))
    except ValueError:
        raise UserError(f"--rotation block:N needs a whole number of blocks; got {text!r}") from None
