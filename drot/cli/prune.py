"""`drot prune`: its options, and which of them go together."""

import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from drot import config
from drot.cli.options import (
    CALIBRATION,
    FLAG,
    OUTPUT,
    PRUNING,
    ROTATION,
    RUN,
    Dtype,
    Json,
    TextColumn,
    option,
    print_json,
    stdout_for_the_result,
)
from drot.cli.tables import print_manifest, say
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity
from drot.errors import UserError

PRUNE, ROTATE, CALIBRATE = PruningConfig(), RotationConfig(), CalibrationConfig()
#: fields of RotationConfig that say which matrices there are, trained or given
NOT_TRAINING = ("mode", "blocks", "boundary")
#: fields of RotationConfig that only the training reads
TRAINING = tuple(f.name for f in dataclasses.fields(RotationConfig) if f.name not in NOT_TRAINING)

#: What makes options idle: the condition in words, the condition, and the fields of the idle options.
#: An idle option is a mistake on a command line. A program that varies one setting of a recipe may leave
#: the others as they are, so Recipe itself does not refuse it.
IDLE: tuple[tuple[str, Callable[[Recipe, bool], bool], tuple[str, ...]], ...] = (
    (
        "--rotation none",
        lambda recipe, given: recipe.rotation.mode == "none",
        (*TRAINING, "rotations", "save_rotations_to"),
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

EPILOG = "Example: drot prune meta-llama/Llama-3.1-8B --out llama-2of4 --calibration text.txt --format packed"


def rotation_choices() -> list[str]:
    """What the shell offers for --rotation."""
    return [*typing.get_args(config.RotationMode), "block:2", "block:4", "block:8"]


def optimizer_defaults(index: int) -> str:
    return ", ".join(f"{values[index]} for {name}" for name, values in config.OPTIMIZER_DEFAULTS.items())


def choices(alias: Any) -> tuple[str, ...]:
    """The values of a Literal of drot/config.py."""
    return typing.get_args(alias)


def prune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name on the Hugging Face hub, or a local folder.")
    ],
    *,
    method: Annotated[str, option(PRUNING, "Pruning method.", choices=choices(config.Method))] = PRUNE.method,
    sparsity: Annotated[
        str,
        option(
            PRUNING,
            "Ratio of weights to remove (0.5), or n:m (2:4 keeps 2 of every 4 neighbours).",
            autocompletion=lambda: ["2:4", "4:8", "0.5"],
        ),
    ] = str(PRUNE.sparsity),
    damping: Annotated[
        float, option(PRUNING, "SparseGPT: share of mean(diag H) that is added to the diagonal of H.")
    ] = PRUNE.damping,
    block_size: Annotated[
        int, option(PRUNING, "SparseGPT: columns that are solved before their error reaches the rest.")
    ] = PRUNE.block_size,
    rotation: Annotated[
        str,
        option(
            ROTATION,
            "Rotations of the residual stream: none; layer (each layer its own); shared (one for the whole "
            "model, a stock checkpoint); block:N (each layer its own, of N equal diagonal blocks).",
            metavar="[none|layer|shared|block:N]",
            autocompletion=rotation_choices,
        ),
    ] = ROTATE.mode,
    objective: Annotated[
        str,
        option(
            ROTATION,
            "What the training minimises: pruned (the importance that the mask removes), entropy (the "
            "paper), or auto (pruned for n:m, entropy for a ratio).",
            choices=choices(config.Objective),
        ),
    ] = ROTATE.objective,
    optimizer: Annotated[
        str,
        option(
            ROTATION,
            "fast (Adam in the tangent space of SO(n)) or paper (Adam through QR).",
            choices=choices(config.Optimizer),
        ),
    ] = ROTATE.optimizer,
    steps: Annotated[
        int | None, option(ROTATION, f"Training steps a layer. Default: {optimizer_defaults(0)}.")
    ] = ROTATE.steps,
    lr: Annotated[
        float | None,
        option(
            ROTATION,
            f"Learning rate. Default: {optimizer_defaults(1)}, {config.SHARED_LR} for fast with shared.",
        ),
    ] = ROTATE.lr,
    early_stop: Annotated[
        float,
        option(ROTATION, "fast stops when the loss moves by less than this share a step; 0: never early."),
    ] = ROTATE.early_stop,
    hessians: Annotated[
        str,
        option(
            ROTATION,
            "Hessians of the training: sequential (inputs that passed the pruned layers) or dense (inputs of "
            "the dense model, so that layers train independently).",
            choices=choices(config.HessianSource),
        ),
    ] = ROTATE.hessians,
    boundary: Annotated[
        str,
        option(
            ROTATION,
            "Where the rotation between two layers acts: input (of the next layer) or residual (beside the "
            "MLP, where a packed model adds it to down_proj's product; needs dense Hessians).",
            choices=choices(config.BoundaryPlace),
        ),
    ] = ROTATE.boundary,
    layers_per_step: Annotated[
        int | None,
        option(ROTATION, "shared: layers that a training step looks at; the others wait in main memory."),
    ] = ROTATE.layers_per_step,
    product_dtype: Annotated[
        str,
        option(ROTATION, "Dtype of the training's matrix products.", choices=choices(config.ProductDtype)),
    ] = ROTATE.product_dtype,
    reference_compat: Annotated[
        bool,
        option(
            ROTATION,
            "Compute SparseGPT's score as the paper's code does.",
            "--reference-compat",
            metavar=FLAG,
        ),
    ] = ROTATE.reference_compat,
    rotations: Annotated[
        Path | None, option(ROTATION, "Use the rotations of this file and train nothing.")
    ] = None,
    save_rotations_to: Annotated[
        Path | None,
        option(
            ROTATION,
            "Also write the rotations, for other sparsities and methods.",
            "--save-rotations",
        ),
    ] = None,
    calibration: Annotated[
        str,
        option(
            CALIBRATION,
            "Text for the Hessians: c4, wikitext2, or a .txt, .json, .jsonl or .parquet file.",
            metavar="[c4|wikitext2|PATH]",
        ),
    ] = CALIBRATE.source,
    nsamples: Annotated[int, option(CALIBRATION, "Calibration windows.")] = CALIBRATE.nsamples,
    seqlen: Annotated[int, option(CALIBRATION, "Tokens in a calibration window.")] = CALIBRATE.seqlen,
    seed: Annotated[int, option(CALIBRATION, "Random seed for sampling windows.")] = CALIBRATE.seed,
    text_column: TextColumn = CALIBRATE.text_column,
    out: Annotated[Path, option(OUTPUT, "Folder to write. It must be new or empty.")],
    format: Annotated[
        str,
        option(
            OUTPUT,
            "Saved weights: dense, or packed (2:4 values and positions, 9/16 of bf16).",
            choices=choices(config.WeightFormat),
        ),
    ] = "dense",
    as_json: Json = False,
    device: Annotated[
        str,
        option(
            RUN,
            "auto is the first GPU, or the CPU. With dense Hessians also several GPUs, as in cuda:0,cuda:1.",
            metavar="[auto|cpu|cuda:N]",
            autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0,cuda:1"],
        ),
    ] = "auto",
    dtype: Dtype = "auto",
    resume: Annotated[bool, option(RUN, "Go on with an interrupted run.", "--resume", metavar=FLAG)] = False,
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
            boundary=typing.cast(config.BoundaryPlace, boundary),
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
    check_effects(recipe, rotations=rotations, save_rotations_to=save_rotations_to)
    from drot.cli.progress_bars import progress_bar
    from drot.pipeline import prune as pipeline

    label = recipe.objective if recipe.objective == "entropy" else "loss"
    with stdout_for_the_result(), progress_bar(shared=mode == "shared", label=label) as progress:
        result = pipeline.prune(
            model,
            recipe,
            out=out,
            device=device,
            dtype=dtype,
            rotations=rotations,
            save_rotations_to=save_rotations_to,
            format=format,
            resume=resume,
            progress=progress,
        )
    if as_json:
        print_json({"out": str(out), **result.manifest})
    else:
        print_manifest(result.manifest)
        say(f"Saved to {out}")


def check_effects(recipe: Recipe, **files: Path | None) -> None:
    """Raises UserError that names every option which differs from its default and yet has no effect.

    files: `rotations` and `save_rotations_to`.
    """
    changed = {name for name, file in files.items() if file is not None}
    for part in (recipe.rotation, recipe.pruning, recipe.calibration):
        default = type(part)()
        fields = (field.name for field in dataclasses.fields(part))
        changed |= {name for name in fields if getattr(part, name) != getattr(default, name)}
    for words, applies, without_effect in IDLE:
        idle = [name for name in without_effect if name in changed]
        if idle and applies(recipe, files["rotations"] is not None):
            verb = "have" if len(idle) > 1 else "has"
            options = ", ".join(f"`{name}`" for name in idle)
            raise UserError(f"{options} {verb} no effect with {words}: leave one or the other out")


def parse_rotation(text: str) -> tuple[config.RotationMode, int]:
    """mode and blocks of `--rotation`; RotationConfig checks the mode's name."""
    if not text.startswith("block:"):
        return typing.cast(config.RotationMode, text), 1
    try:
        return "layer", int(text.removeprefix("block:"))
    except ValueError:
        raise UserError(f"--rotation block:N needs a whole number of blocks; got {text!r}") from None
