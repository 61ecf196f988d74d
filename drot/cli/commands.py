"""The commands of `drot`, each of which is imported when it runs, and how `--help` shows their options."""

from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

#: command → its module in drot/cli and the function there
COMMANDS = {
    "prune": "prune",
    "finetune": "finetune",
    "eval": "evaluate",
    "compare": "compare",
    "report": "report",
    "sweep": "sweep",
    "sample": "sample",
    "convert": "convert",
    "export": "export",
    "apply": "apply",
    "bench": "bench",
    "tune": "tune",
    "serve": "serve",
    "chat": "chat",
    "run": "run",
    "info": "info",
    "demo": "demo",
}
#: the commands that show no progress
WITHOUT_PROGRESS = ("serve", "chat", "run", "info")


def without_flag_values(params: list[Any]) -> list[Any]:
    """`params`, whose options without a value have a blank metavar: typer would show `--resume <bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = " "
    return params


class Interrupted(Exception):
    """Ctrl-C in a command that can tell the user how to go on. The message says so in one line."""


class Group(TyperGroup):
    """The command `drot` itself, which lists all commands and imports the one that runs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_flag_values(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else imported(name), rest


def add_commands(app: typer.Typer) -> None:
    """Adds the name of each command and the first line of its help, without an import of the command."""
    for name, function in COMMANDS.items():
        text = (Path(__file__).parent / f"{function}.py").read_text(encoding="utf-8")
        _, _, help = text.partition(f"\ndef {function}(")[2].partition('"""')
        app.command(name, help=help.partition("\n")[0])(lambda: None)


def imported(name: str) -> Any:
    """A command with its options."""
    from drot.cli.options import command_of

    function = COMMANDS[name]
    module = import_module(f"drot.cli.{function}")
    settings, first = getattr(module, "SETTINGS", ()), getattr(module, "FIRST", ())
    progress = name not in WITHOUT_PROGRESS
    return command_of(name, getattr(module, function), settings, first, progress)


def flags_of(command: str) -> dict[str, str]:
    """Field or argument → its option, for the options of a command and those of `drot prune`."""
    from drot.cli.messages import FLAGS, FLAGS_OF_COMMANDS

    known = [imported(name) for name in ("prune", command) if name in COMMANDS]
    options = (param for each in known for param in each.params if param.param_type_name == "option")
    return {option.name: option.opts[0] for option in options} | FLAGS | FLAGS_OF_COMMANDS.get(command, {})
