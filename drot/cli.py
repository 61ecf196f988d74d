"""`drot prune | eval | convert | bench | info | demo`.

Defaults come from drot.config, results go to stdout, progress to stderr. Exit status: 0, 2 for the
user's mistake (one line that says what to do), 1 for a fault of ours (one line; --debug for the rest).
"""

import dataclasses
import sys
import traceback
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from drot import cli_sparse, config
from drot.cli_options import Device, Dtype, Json, print_json, stdout_kept_for_the_result
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity
from drot.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

PRUNING, ROTATION, CALIBRATION = PruningConfig(), RotationConfig(), CalibrationConfig()
#: a demo is written for the eye; the checkpoint can be looked at afterwards
DEMO_OUT = Path("demo-output")


def choices(alias: Any) -> str:
    return ", ".join(typing.get_args(alias))


def optimizer_defaults(index: int) -> str:
    return ", ".join(f"{values[index]} for {name}" for name, values in config.OPTIMIZER_DEFAULTS.items())


@app.callback()
def drot(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Rotate a language model so that pruning hurts it less, and prune it."""
    # `run` takes --debug out wherever it stands; it is declared here for --help


@app.command()
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
        float, typer.Option(help="fast ends when a step lowers the loss by less than this share; 0: never.")
    ] = ROTATION.early_stop,
    hessians: Annotated[
        str, typer.Option(help=f"Where training's Hessians come from: {choices(config.HessianSource)}.")
    ] = ROTATION.hessians,
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
    text_column: Annotated[
        str, typer.Option(help="Column of json, jsonl and parquet files.")
    ] = CALIBRATION.text_column,
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
    from drot import console, pipeline

    with stdout_kept_for_the_result(), console.progress_bar(shared=mode == "shared") as progress:
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


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Hub name or local folder, dense or pruned by drot.")],
    ppl: Annotated[
        list[str] | None,
        typer.Option(help="Perplexity on wikitext2 (test split) or on a text file; may be repeated."),
    ] = None,
    seqlen: Annotated[int, typer.Option(help="Tokens in a window.")] = CALIBRATION.seqlen,
    tasks: Annotated[
        str, typer.Option(help="Zero-shot tasks of lm_eval, comma-separated: piqa,winogrande,…")
    ] = "",
    text_column: Annotated[
        str, typer.Option(help="Column of json, jsonl and parquet files.")
    ] = CALIBRATION.text_column,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure MODEL: perplexity (on wikitext2 where nothing is named) and zero-shot tasks."""
    from drot import checkpoint, console
    from drot.evaluation.perplexity import load_eval_tokens, perplexity

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    sources = ppl or ([] if names else ["wikitext2"])
    figures: dict[str, Any] = {"model": model, "seqlen": seqlen, "perplexity": {}, "tasks": {}}
    with stdout_kept_for_the_result(), console.progress_bar() as progress:
        tokenizer = checkpoint.load_tokenizer(model)
        texts = {source: load_eval_tokens(source, tokenizer, text_column) for source in sources}
        loaded = checkpoint.load(model, device=device, dtype=dtype, compress=True)
        for source, tokens in texts.items():
            figures["perplexity"][source] = perplexity(loaded, tokens, seqlen=seqlen, progress=progress)
        if names:
            from drot.evaluation.zeroshot import zero_shot

            figures["tasks"] = zero_shot(loaded, tokenizer, names)
    if as_json:
        print_json(figures)
    else:
        console.print_figures(figures)


@app.command()
def info(
    folder: Annotated[Path | None, typer.Argument(help="A checkpoint of drot prune.")] = None,
    as_json: Json = False,
) -> None:
    """Versions, backends and GPU; or, for a checkpoint, what was done to it."""
    from drot import checkpoint, console
    from drot.info import collect

    data = collect() if folder is None else checkpoint.read_manifest(folder)
    if as_json:
        print_json(data)
    elif folder is None:
        console.print_environment(data)
    else:
        console.print_manifest(data)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the rotated and pruned model is saved.")] = DEMO_OUT,
    as_json: Json = False,
) -> None:
    """Prune the model that comes with drot to 2:4, with and without DenoiseRotator."""
    from drot import console
    from drot.demo import run_demo

    with stdout_kept_for_the_result(), console.progress_bar() as progress:
        result = run_demo(out, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(result) | {"out": str(out)})
    else:
        console.print_demo(result)
        console.say(f"Saved to {out}")
    if not result.rotation_helped:
        raise typer.Exit(1)


def parse_rotation(text: str) -> tuple[config.RotationMode, int]:
    """mode and blocks of `--rotation`; RotationConfig checks the mode's name."""
    if not text.startswith("block:"):
        return typing.cast(config.RotationMode, text), 1
    try:
        return "layer", int(text.removeprefix("block:"))
    except ValueError:
        raise UserError(f"--rotation block:N needs a whole number of blocks; got {text!r}") from None


app.command()(cli_sparse.convert)
app.command()(cli_sparse.bench)


def run(arguments: list[str]) -> int:
    """Exit status of one command line."""
    debug = "--debug" in arguments
    try:
        return app([a for a in arguments if a != "--debug"], prog_name="drot", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        print("drot: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        status, message = describe(error, debug)
        if debug:
            traceback.print_exc()
        print(f"drot: {' '.join(message.split())}", file=sys.stderr)
        return status


def describe(error: Exception, debug: bool) -> tuple[int, str]:
    """Exit status and message of an error."""
    if isinstance(error, UserError):
        return 2, str(error)
    # typer carries its own copy of click, so click's errors are known by what they can do
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        return 2, f"{format_message()} (drot --help lists the options)"
    return 1, f"{type(error).__name__}: {error}{'' if debug else ' (--debug shows where)'}"


def main() -> None:
    """The console script `drot`."""
    sys.exit(run(sys.argv[1:]))
