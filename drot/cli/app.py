"""The command `drot`: its subcommands, its exit status, and how an error becomes one line.

Defaults come from drot/config.py, results go to stdout, progress to stderr. Exit status: 0; 2 for a mistake
of the user; 1 for a fault of drot (--debug shows the traceback); 130 after Ctrl-C.
"""

import re
import sys
import traceback
from typing import Annotated

import typer

from drot.cli import bench, convert, demo, evaluate, info, prune
from drot.cli.options import FLAG
from drot.errors import UserError
from drot.version import __version__

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command(epilog=prune.EPILOG)(prune.prune)
app.command(name="eval", epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command(epilog=convert.EPILOG)(convert.convert)
app.command(epilog=bench.EPILOG)(bench.bench)
app.command(epilog=info.EPILOG)(info.info)
app.command(epilog=demo.EPILOG)(demo.demo)

#: exit status after Ctrl-C
INTERRUPTED = 130
#: fields and arguments whose options have other names: `hessians` is --hessians, but `mode` is --rotation
OPTIONS = {
    "mode": "--rotation",
    "blocks": "--rotation block:N",
    "source": "--calibration",
    "save_rotations_to": "--save-rotations",
    "batches": "--batch",
}
#: `hessians`, `hessians="dense"`, `resume=True` or `layers_per_step=4` in the message of a UserError
FIELD = re.compile(r"`(\w+)(?:=(?:\"([^\"`]*)\"|(\w+)))?`")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"drot {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: drot demo")
def drot(
    debug: Annotated[
        bool, typer.Option("--debug", metavar=FLAG, help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar=FLAG, help="Show the version and exit.", callback=show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Rotate a language model so that pruning hurts it less, and prune it."""
    # `run` takes --debug out wherever it stands; it is declared here for --help


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit status."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"] or ["--help"]
    try:
        status = app(arguments, prog_name="drot", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED  # typer returns the same for Ctrl-C in a command
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
        return 2, in_options(str(error))
    # typer brings a copy of click, so its errors are recognised by their method
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        return 2, f"{format_message()} (drot --help lists the options)"
    return 1, f"{type(error).__name__}: {error}{'' if debug else ' (--debug shows where)'}"


def in_options(message: str) -> str:
    """A message of the library with its fields as options: `hessians="dense"` as --hessians dense."""

    def option(match: re.Match[str]) -> str:
        name, text, value = match.groups()
        flag = OPTIONS.get(name, "--" + name.replace("_", "-"))
        value = text if value is None else value
        return flag if value in (None, "True") else f"{flag} {value}"

    return FIELD.sub(option, message)


def main() -> None:
    """The console script `drot`."""
    sys.exit(run(sys.argv[1:]))
