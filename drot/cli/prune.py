"""The command `drot prune`: its options, and the recipe that they make."""

import dataclasses
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from drot import config
from drot.cli.effects import check_effects, check_no_output
from drot.cli.options import (
    CALIBRATION,
    COMPUTE_DTYPE,
    OUTPUT,
    PRUNING,
    RECOVERY,
    ROTATION,
    RUN,
    SEQLEN_DEFAULT,
    SOURCES,
    TEXT_COLUMN,
    Interrupted,
    Json,
    option,
    print_json,
    stdout_for_the_result,
)
from drot.cli.recipe import check_rotations_file, tell_changes, tell_other_input
from drot.cli.tables import print_line, print_manifest, saved_line
from drot.config import CalibrationConfig, PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.config.recipe_file import read_recipe
from drot.devices import DTYPES
from drot.errors import UserError

PRUNE, ROTATE, CALIBRATE, RECOVER = PruningConfig(), RotationConfig(), CalibrationConfig(), RecoveryConfig()
EPILOG = "Example: drot prune meta-llama/Llama-3.1-8B --out llama-2of4 --calibration text.txt --format packed"


def rotation_choices() -> list[str]:
    """The values of --rotation that the shell completes."""
    return [*typing.get_args(config.RotationMode), "block:2", "block:4", "block:8"]


def quality_values() -> str:
    """Text with the values that each quality sets."""
    return " ".join(f"{name}: {', '.join(values.values())}." for name, values in config.QUALITIES.items())


def optimizer_defaults(index: int) -> str:
    """Text with the default of each optimizer: the steps (index 0) or the learning rate (index 1)."""
    return ", ".join(f"{values[index]} for {name}" for name, values in config.OPTIMIZER_DEFAULTS.items())


def choices(alias: Any) -> tuple[str, ...]:
    """The values of the Literal type `alias` of drot/config."""
    return typing.get_args(alias)


def prune(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Name on the Hugging Face hub, or a local folder. Default with --recipe DIR: the model from "
            "which DIR was made.",
            show_default=False,
        ),
    ] = None,
    *,
    recipe: Annotated[
        Path | None,
        option(
            PRUNING,
            "Take the settings from this file, a recipe in YAML or JSON or the drot.json of a checkpoint, or "
            "from the folder of a checkpoint. Options beside it replace single settings.",
            metavar="[FILE|DIR]",
        ),
    ] = None,
    method: Annotated[
        str,
        option(
            PRUNING,
            "How the weights to remove are chosen. sparsegpt also updates the weights that it keeps.",
            choices=choices(config.Method),
        ),
    ] = PRUNE.method,
    sparsity: Annotated[
        str,
        option(
            PRUNING,
            "n:m (2:4 keeps 2 of every 4 neighbouring weights), or the share of weights to remove (0.5).",
            metavar="[n:m|RATIO]",
            autocompletion=lambda: ["2:4", "4:8", "0.5"],
        ),
    ] = str(PRUNE.sparsity),
    sparsity_of: Annotated[
        list[str] | None,
        option(
            PRUNING,
            "Another sparsity for the linears that match a pattern, as in down_proj=4:8 or "
            "'layers.0.self_attn.*=0.5'. It may be given several times; the last match is used.",
            metavar="PATTERN=[n:m|RATIO]",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        option(
            PRUNING,
            "Leave the linears that match this pattern dense, as in 'layers.0.*' or down_proj. It may be "
            "given several times, and goes before --sparsity-of.",
            metavar="PATTERN",
        ),
    ] = None,
    damping: Annotated[
        float | None,
        option(
            PRUNING,
            "Share of mean(diag H) that is added to the diagonal of H before it is inverted. The larger the "
            f"share is, the less the result depends on the calibration text. Default: {config.DAMPING:g}; "
            f"{config.PUBLISHED_DAMPING:g}, as in SparseGPT, with --rotation none, --optimizer paper or "
            "--reference-compat.",
        ),
    ] = PRUNE.damping,
    block_size: Annotated[
        int,
        option(
            PRUNING,
            "SparseGPT only: columns to prune before the columns right of them are updated, rounded to a "
            "multiple of m in n:m.",
        ),
    ] = PRUNE.block_size,
    quality: Annotated[
        str | None,
        option(
            PRUNING,
            f"Sets --solve, --target and --recover. {quality_values()}",
            choices=tuple(config.QUALITIES),
        ),
    ] = None,
    solve: Annotated[
        str | None,
        option(
            PRUNING,
            "How the kept weights are computed. none: as --method leaves them. sparsegpt: by SparseGPT's "
            "sweep. pcg: with the smallest error of the outputs, by conjugate gradients. admm: the same, and "
            "the mask moves too. auto: admm, but none with --rotation none, --optimizer paper or "
            "--reference-compat, which reproduce published methods. Default: by --quality, or auto.",
            choices=choices(config.Solver),
        ),
    ] = None,
    target: Annotated[
        str | None,
        option(
            PRUNING,
            "Outputs that a linear should have. self: its dense outputs on its inputs in the pruned model. "
            "dense: nearer to its outputs in the dense model. auto: dense, but self where --solve auto is "
            "none. Default: by --quality, or auto.",
            choices=choices(config.Target),
        ),
    ] = None,
    target_weight: Annotated[
        float,
        option(PRUNING, "With --target dense: the share of the way from self to the dense model, up to 1."),
    ] = PRUNE.target_weight,
    recover: Annotated[
        str | None,
        option(
            RECOVERY,
            "block: train the kept weights of each pruned layer to have the dense model's outputs. none: "
            "train no weights. Default: by --quality, or none.",
            choices=choices(config.Recovery),
        ),
    ] = None,
    recover_epochs: Annotated[
        int,
        option(
            RECOVERY,
            "Passes over the calibration sequences. Fewer if the error on held-out sequences does not fall.",
        ),
    ] = RECOVER.recover_epochs,
    recover_lr: Annotated[
        float, option(RECOVERY, "Largest learning rate, as a share of a matrix's root mean square.")
    ] = RECOVER.recover_lr,
    recover_batch: Annotated[int, option(RECOVERY, "Sequences in one step.")] = RECOVER.recover_batch,
    rotation: Annotated[
        str,
        option(
            ROTATION,
            "Rotations of the residual stream. layer: one for each layer. shared: one for the whole model, "
            "which loads without drot if it is saved dense. block:N: one for each layer, with N equal "
            "diagonal blocks.",
            metavar="[none|layer|shared|block:N]",
            autocompletion=rotation_choices,
        ),
    ] = ROTATE.mode,
    objective: Annotated[
        str,
        option(
            ROTATION,
            "What the training minimises. pruned: the importance of the weights to remove. entropy: the "
            "paper's, which prunes better with --reference-compat if --method is sparsegpt. auto: pruned.",
            choices=choices(config.Objective),
        ),
    ] = ROTATE.objective,
    optimizer: Annotated[
        str,
        option(
            ROTATION,
            "Optimizer of the training. fast: spectral steps in so(n). paper: Adam through QR.",
            choices=choices(config.Optimizer),
        ),
    ] = ROTATE.optimizer,
    steps: Annotated[
        int | None, option(ROTATION, f"Training steps for each layer. Default: {optimizer_defaults(0)}.")
    ] = ROTATE.steps,
    lr: Annotated[
        float | None,
        option(
            ROTATION,
            f"Learning rate; of fast the angle of a step in radians. Default: {optimizer_defaults(1)}.",
        ),
    ] = ROTATE.lr,
    early_stop: Annotated[
        float,
        option(
            ROTATION,
            "fast stops when the loss changes by less than this share in a step. 0 never stops early.",
        ),
    ] = ROTATE.early_stop,
    hessians: Annotated[
        str,
        option(
            ROTATION,
            "The layer inputs from which the training computes its Hessians. sequential: inputs that went "
            "through the pruned layers before. dense: inputs in the dense model, so that layers train "
            "independently of each other. auto: dense with --boundary residual or --rotation shared, "
            "otherwise sequential.",
            choices=choices(config.HessianSource),
        ),
    ] = ROTATE.hessians,
    boundary: Annotated[
        str,
        option(
            ROTATION,
            "Where the rotation between two layers acts. input: on the input of the later layer. residual: "
            "beside the MLP of the earlier layer, where a packed model computes it together with down_proj; "
            "needs --hessians dense or --rotations. auto: residual with --format packed and one rotation a "
            "layer, unless --hessians is sequential; otherwise input.",
            choices=choices(config.Boundary),
        ),
    ] = ROTATE.boundary,
    layers_per_step: Annotated[
        int | None,
        option(
            ROTATION,
            "With --rotation shared: the number of layers in the loss of one step. The other layers are "
            "offloaded to main memory. Default: all layers.",
        ),
    ] = ROTATE.layers_per_step,
    product_dtype: Annotated[
        str,
        option(
            ROTATION,
            "Dtype of the matrix products of the training. auto is bfloat16 on a GPU, and float32 on a CPU.",
            choices=choices(config.ProductDtype),
        ),
    ] = ROTATE.product_dtype,
    reference_compat: Annotated[
        bool,
        option(
            ROTATION,
            "Compute SparseGPT's score as the paper's code does, which adds the damping twice.",
            "--reference-compat",
        ),
    ] = ROTATE.reference_compat,
    rotations: Annotated[
        Path | None,
        option(ROTATION, "Use the rotations in this file, which --save-rotations wrote, and train none."),
    ] = None,
    save_rotations_to: Annotated[
        Path | None,
        option(
            ROTATION,
            "Also write the rotations to this file, to use them again with another sparsity or method.",
            "--save-rotations",
        ),
    ] = None,
    calibration: Annotated[
        str,
        option(
            CALIBRATION,
            f"Text from which the Hessians are computed: {SOURCES} --method magnitude with --rotation none "
            "needs no text.",
            metavar="[c4|ORG/NAME|PATH]",
        ),
    ] = CALIBRATE.source,
    nsamples: Annotated[
        int, option(CALIBRATION, "Number of sequences to cut from the text.")
    ] = CALIBRATE.nsamples,
    seqlen: Annotated[
        int | None, option(CALIBRATION, f"Tokens in a sequence. {SEQLEN_DEFAULT}")
    ] = CALIBRATE.seqlen,
    seed: Annotated[
        int, option(CALIBRATION, "Random seed of the positions at which sequences are cut.")
    ] = CALIBRATE.seed,
    text_column: Annotated[str, option(CALIBRATION, TEXT_COLUMN)] = CALIBRATE.text_column,
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Folder to write. It must be new or empty. Its disk needs space for the checkpoint and, while "
            "the run lasts, for OUT.partial: the finished layers in --dtype, and 8 bytes for each number of "
            "a rotation. Not with --sensitivity.",
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        option(
            OUTPUT,
            "Write no model. Print the output error of each linear at 2:4, 4:8, 50 % and the sparsities of "
            "this command line, which helps to choose --keep and --sparsity-of. The rotations are trained "
            "for the sparsities of this command line, in the dense model.",
            "--sensitivity",
        ),
    ] = False,
    format: Annotated[
        str,
        option(
            OUTPUT,
            "Format of the saved weights. packed stores the values and positions of 2:4 weights, in 9/16 of "
            "the bytes of bf16; dense stores all weights, with their zeros.",
            choices=choices(config.WeightFormat),
        ),
    ] = "dense",
    save_dtype: Annotated[
        str,
        option(
            OUTPUT,
            "Dtype of the saved weights. auto is the dtype of MODEL.",
            choices=["auto", *DTYPES],
        ),
    ] = "auto",
    as_json: Json = False,
    device: Annotated[
        str,
        option(
            RUN,
            "Device to use. auto is the first GPU, or the CPU if there is no GPU. With --hessians dense also "
            "several GPUs, as in cuda:0,cuda:1.",
            metavar="[auto|cpu|cuda:N]",
            autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0,cuda:1"],
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        option(
            RUN,
            COMPUTE_DTYPE,
            choices=["auto", *DTYPES],
        ),
    ] = "auto",
    resume: Annotated[
        bool,
        option(
            RUN,
            "Continue an interrupted run with the same --out. A finished run is left as it is.",
            "--resume",
        ),
    ] = False,
) -> None:
    """Rotate and prune MODEL, and save the result as a Hugging Face folder."""
    # by its name: typer's copy of the enumeration and click's, which older typers use, are not the same type
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    given = {name for name, source in sources.items() if source == "COMMANDLINE"}
    start, manifest = (Recipe(), {}) if recipe is None else read_recipe(recipe)
    changed = start if quality is None else start.with_quality(quality)
    changed = changed.replace(**recipe_fields({name: ctx.params[name] for name in given}))
    check_effects(
        changed, start, measures=sensitivity, rotations=rotations, save_rotations_to=save_rotations_to
    )
    if recipe is not None:
        tell_changes(start, changed, recipe)
    if model is None:
        model = manifest.get("base_model")
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
        format = format if "format" in given else manifest.get("format", format)
        if "dtype" not in given:  # a manifest without compute_dtype is older: both dtypes were the same
            dtype = manifest.get("compute_dtype", manifest.get("dtype", dtype))
        save_dtype = save_dtype if "save_dtype" in given else manifest.get("dtype", save_dtype)
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
        print_json({"out": str(out), **result.manifest})
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


def recipe_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Field of the recipe → value, for the options that were `given` on the command line, name → value."""
    fields = {f.name for part in (ROTATE, PRUNE, RECOVER, CALIBRATE) for f in dataclasses.fields(part)}
    out = {name: value for name, value in given.items() if name in fields}
    out |= {name: tuple(out[name]) for name in ("keep", "sparsity_of") if name in out}
    if "rotation" in given:
        out["mode"], out["blocks"] = parse_rotation(given["rotation"])
    if "calibration" in given:
        out["source"] = given["calibration"]
    return out


def parse_rotation(text: str) -> tuple[config.RotationMode, int]:
    """`mode` and `blocks` of RotationConfig for a value of --rotation."""
    if text in choices(config.RotationMode):
        return typing.cast(config.RotationMode, text), 1
    name, _, blocks = text.partition(":")
    if name != "block":
        expected = ", ".join(choices(config.RotationMode))
        raise UserError(f"--rotation must be one of {expected}, block:N; got {text!r}")
    try:
        return "layer", int(blocks)
    except ValueError:
        raise UserError(
            f"--rotation block:N needs a whole number of blocks, as in block:4; got {text!r}"
        ) from None
