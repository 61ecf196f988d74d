"""The command `drot run`: another Python program in a process that has imported drot."""

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer

from drot.core.checks import shortened
from drot.core.errors import UserError


def run(command: list[str]) -> None:
    """Run another Python program, which then opens the checkpoints of drot and finds its task for lm_eval.

    It is for programs that open a model with transformers and do not import drot.

    Example: drot run -- lm_eval --model hf --model_args pretrained=llama-2of4 --tasks drot_continuation

    Arguments:
        command COMMAND...: After -- the program and its arguments: a command that a Python package installed,
            such as lm_eval; a file, as in file.py or python file.py; or a module, as in -m package.module.
    """
    words = command[1:] if Path(command[0]).name in ("python", "python3") else command
    program = _program(words)
    try:
        status = program()
    except SystemExit as end:
        status = end.code
    except Exception:  # as Python itself shows it, since the program is not drot's
        traceback.print_exc()
        status = 1
    if isinstance(status, str):  # a message, as for sys.exit
        print(status, file=sys.stderr)
    raise typer.Exit(status if isinstance(status, int) else int(status is not None))


def _program(words: list[str]) -> Callable[[], Any]:
    """A function that runs the program in `words`, which sees them as its command line."""
    name, *rest = words or [""]
    if name == "-m" and rest:
        sys.argv, sys.path[0] = rest, os.getcwd()
        return lambda: _run_as_main(runpy.run_module, rest[0], alter_sys=True)
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"there is no file {shortened(name)}: name a Python program after --")
        sys.argv, sys.path[0] = words, str(Path(name).resolve().parent)
        return lambda: _run_as_main(runpy.run_path, name)
    found = entry_points(group="console_scripts", name=name)
    if not found:
        raise UserError(
            "drot run needs a command of a Python package, a file such as file.py, or -m MODULE after --; "
            f"got {shortened(name)}"
        )
    sys.argv = words
    started: Callable[[], Any] = next(iter(found)).load()
    return started


def _run_as_main(run_program: Callable[..., Any], name: str, **options: Any) -> None:
    """Returns no status: what runpy returns are the names of the program."""
    run_program(name, run_name="__main__", **options)
