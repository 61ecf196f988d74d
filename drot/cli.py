"""`drot prune | eval | convert | bench | info | demo`.

Defaults come from drot.config, results go to stdout, progress to stderr. Exit status: 0, 2 for the
user's mistake (one line that says what to do), 1 for a fault of ours (one line; --debug for the rest).
"""

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from drot.cli_common import Device, Dtype, Json, TextColumn, print_json, stdout_kept_for_the_result
from drot.cli_prune import prune
from drot.cli_sparse import bench, convert
from drot.config import CalibrationConfig
from drot.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: exit status after Ctrl-C
INTERRUPTED = 130
CALIBRATION = CalibrationConfig()
#: a demo is written for the eye; the checkpoint can be looked at afterwards
DEMO_OUT = Path("demo-output")


@app.callback()
def drot(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Rotate a language model so that pruning hurts it less, and prune it."""
    # `run` takes --debug out wherever it stands; it is declared here for --help


app.command()(prune)
app.command()(convert)
app.command()(bench)


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
    text_column: TextColumn = CALIBRATION.text_column,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure MODEL: perplexity (on wikitext2 where nothing is named) and zero-shot tasks."""
    from drot import console
    from drot.evaluation.measure import measure

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    with stdout_kept_for_the_result(), console.progress_bar() as progress:
        figures = measure(
            model,
            ppl=ppl or ([] if names else ["wikitext2"]),
            tasks=names,
            seqlen=seqlen,
            text_column=text_column,
            device=device,
            dtype=dtype,
            progress=progress,
        )
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

    if folder is not None and not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}: name the folder that drot prune wrote")
    data = collect() if folder is None else checkpoint.read_manifest(folder)
    if as_json:
        print_json(data)
    elif folder is None:
        console.print_environment(data)
    else:
        try:
            console.print_manifest(data)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{folder}/drot.json does not hold what drot wrote ({error!r}): was it edited?"
            ) from error


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


def run(arguments: list[str]) -> int:
    """Exit status of one command line."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"] or ["--help"]
    try:
        status = app(arguments, prog_name="drot", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED  # as typer itself returns for Ctrl-C in a command
    except Exception as error:
        status, message = describe(error, debug)
        if debug:
            traceback.print_exc()
        print(f"drot: {' '.join(message.split())}", file=sys.stderr)
        return status
    if status == INTERRUPTED:
        print("drot: interrupted", file=sys.stderr)
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
