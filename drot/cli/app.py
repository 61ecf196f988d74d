"""The command `drot`: its subcommands, its exit status, and its error messages of one line.

Results go to stdout, progress and errors to stderr. The exit status is 0 for success, 1 for a fault of drot
(--debug shows the traceback) or a model without a finite loss, 2 for a mistake of the user, and 130 after
Ctrl-C.
"""

import errno
import sys
import traceback
from typing import Annotated

import typer

from drot.cli.commands import Group, Interrupted, add_commands
from drot.cli.safe_text import safe_log_messages, visible
from drot.core.checks import shortened
from drot.core.errors import BrokenModelError, UserError
from drot.core.version import __version__

app = typer.Typer(cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich")
add_commands(app)

#: exit status after Ctrl-C
INTERRUPTED = 130


def show_version(given: bool) -> None:
    """Prints the version and exits if --version was given."""
    if given:
        print(f"drot {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: drot demo")
def drot(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback if an error occurs.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Rotate a language model so that pruning hurts it less, and prune it."""
    # --debug is declared here for --help only: `run` removes it from any place of the command line


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit status."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"] or ["--help"]
    try:
        with safe_log_messages():
            status = app(arguments, prog_name="drot", standalone_mode=False) or 0
    except Interrupted as stop:
        print(f"drot: interrupted: {visible(str(stop))}", file=sys.stderr)
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED  # typer itself returns 130 for Ctrl-C inside a command
    except Exception as error:
        status, message = describe(error, debug, command=next(iter(arguments)))
        if debug:
            print("\n".join(map(visible, traceback.format_exc().splitlines())), file=sys.stderr)
        print(f"drot: {visible(' '.join(message.split()))}", file=sys.stderr)
        return status
    if status == INTERRUPTED:
        print("drot: interrupted", file=sys.stderr)
    return status


def describe(error: Exception, debug: bool, command: str = "") -> tuple[int, str]:
    """The exit status and the message of an exception in a command."""
    if isinstance(error, UserError | BrokenModelError):
        from drot.cli.messages import flags_of, in_options

        return 2 if isinstance(error, UserError) else 1, in_options(str(error), flags_of(command).get)
    # a usage error is recognised by its method: typer contains its own copy of click's exception classes
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        return 2, f"{format_message()} (drot --help lists the options)"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of any option or argument
        return 2, f"the name {shortened(error.filename)} is too long for a file: shorten it"
    return 1, f"{type(error).__name__}: {error}{'' if debug else ' (--debug shows where)'}"


def main() -> None:
    """The console script `drot`."""
    sys.exit(run(sys.argv[1:]))
