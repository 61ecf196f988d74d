"""The command `drot`: its subcommands, its exit status, and its error messages of one line.

Results go to stdout, progress and errors to stderr. The exit status is 0 for success, 1 for a fault of drot
(--debug shows the traceback), a model without a finite loss or one that fails `drot eval --fail-above`, 2 for
a mistake of the user, 130 after Ctrl-C, 141 where stdout was closed, as by `| head`, and 143 after SIGTERM.
"""

import errno
import io
import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer

from drot.cli.commands import COMMANDS, Group, Interrupted, add_commands, flags_of, imported
from drot.cli.log import FORMS, Form, tell
from drot.cli.safe_text import safe_log_messages, visible
from drot.core import torchrun
from drot.core.checks import shortened
from drot.core.errors import BrokenModelError, ToldElsewhere, UserError
from drot.core.version import __version__

app = typer.Typer(cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich")
add_commands(app)

#: commands that several ranks share
RUNS_ON_RANKS = ("prune", "finetune", "run")
#: exit status after Ctrl-C
INTERRUPTED = 130
#: exit status where the program that reads stdout has ended
CLOSED = 128 + signal.SIGPIPE
#: exit status after SIGTERM, which `kill`, `docker stop` and job schedulers send
TERMINATED = 128 + signal.SIGTERM


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
    # in front of --


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit status."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    arguments = [*(a for a in own if a != "--debug"), *arguments[len(own) :]] or ["--help"]
    Form.choose(FORMS[0])
    try:
        with safe_log_messages(lambda text: _in_options(text, arguments[0])):
            _check_ranks(arguments[0])
            status = app(arguments, prog_name="drot", standalone_mode=False, obj=arguments) or 0
    except Interrupted as stop:
        tell(f"drot: interrupted: {visible(str(stop))}")
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED  # typer itself returns 130 for Ctrl-C inside a command
    except ToldElsewhere:
        return 2
    except SystemExit:  # of typer and rich, which cannot write to stdout
        return CLOSED
    except Exception as error:
        status, message = describe(error, debug, command=next(iter(arguments)))
        if debug:
            tell("\n".join(map(visible, traceback.format_exc().splitlines())))
        line = f"drot: {visible(' '.join(message.split()))}"
        tell(line)
        if torchrun.rank() and (notes := getattr(error, "__notes__", None)):
            # the rank that alone met the error, and whose `tell` is silent
            print(line.replace("drot:", f"drot: {notes[-1]}:", 1), file=sys.__stderr__)
        return status
    if status == INTERRUPTED:
        tell("drot: interrupted")
    return status


def _check_ranks(command: str) -> None:
    """Raises UserError for several ranks of a command that does not share its work."""
    if torchrun.world_size() > 1 and command in COMMANDS and command not in RUNS_ON_RANKS:
        raise UserError(f"`drot {command}` runs in one process: start it without torchrun")


def describe(error: Exception, debug: bool, command: str = "") -> tuple[int, str]:
    """The exit status and the message of an exception in a command."""
    if isinstance(error, UserError | BrokenModelError):
        return 2 if isinstance(error, UserError) else 1, _in_options(str(error), command)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        cure = "give --fit, as in --fit 24GB, or lower --nsamples or --seqlen"
        if command != "prune":
            cure = "use another device, or a smaller batch or length"
        return 2, f"the device has too little memory: {cure} ({error})"
    # a usage error is recognised by its method: typer contains its own copy of click's exception classes
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        cause: Any = error.__cause__  # pydantic's, whose message does not say what came
        got = f"; got {shortened(cause.errors()[0]['input'])}" if hasattr(cause, "errors") else ""
        listed = "options" if command in COMMANDS else "commands"
        return 2, f"{format_message()}{got} ({_help_line(error, command)} lists the {listed})"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of any option or argument
        return 2, f"the name {shortened(error.filename)} is too long for a file: shorten it"
    return 1, f"{type(error).__name__}: {error}{'' if debug else ' (--debug shows where)'}"


def _in_options(text: str, command: str) -> str:
    """A text of the library in the words of a command."""
    from drot.cli.messages import in_options

    return in_options(text, flags_of(command).get)


def _help_line(error: Any, command: str) -> str:
    """The command line whose help shows the option of a usage error, as in `drot prune --help`."""
    if command not in COMMANDS:
        return "drot --help"
    typed, param = getattr(error, "option_name", None), getattr(error, "param", None)
    return f"drot {command} {imported(command).help_option(typed or (param and param.opts[0]))}"


def main() -> None:
    """The console script `drot`."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows its escape
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    terminated = []

    def end(number: int, frame: object) -> None:  # as Ctrl-C does, so that a run says how to go on
        terminated.append(number)
        if torchrun.world_size() > 1:  # torchrun repeats the signal
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    if torchrun.rank():  # rank 0 speaks for all
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    status = run(sys.argv[1:])
    sys.exit(TERMINATED if terminated and status == INTERRUPTED else status)
