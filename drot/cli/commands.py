"""The commands of `drot`, each of which is imported when it runs, and how `--help` shows their options."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: Command → the first line of its help. Its function lies in the module of its name in drot/cli, which
#: `drot --help` does not import.
COMMANDS = {
    "prune": "Rotate and prune MODEL, and save the result as a Hugging Face folder.",
    "finetune": "Fine-tune the pruned model DIR by LoRA or in full. Its zeros stay zeros, and its format "
    "stays.",
    "eval": "Measure the perplexity of models, their agreement with a dense original, and accuracy in tasks.",
    "report": "Write a page with the figures of pruned models: what was lost, and what is unusual.",
    "sweep": "Prune a model with every recipe of a grid, and compare perplexity, entropy and time.",
    "convert": "Copy MODEL to a new folder with its 2:4 weights packed, or with its packed weights dense.",
    "export": "Write what DIR has beyond the dense MODEL as one small file, from which drot apply makes DIR "
    "again.",
    "apply": "Make the checkpoint from which ARTIFACT was exported, byte for byte, with the dense MODEL.",
    "bench": "Time 2:4 against dense weights, with and without rotations, in a decoder layer and a whole "
    "model.",
    "info": "Show the versions, backends and GPUs of this machine; or, with FOLDER, how that model was made.",
    "demo": "Prune a small model that comes with drot to 2:4, with and without DenoiseRotator, and compare.",
}
#: command → its module and function, where the names differ: `eval` is a function of Python
MODULES = {"eval": "evaluate"}


class Interrupted(Exception):
    """Ctrl-C in a command that can tell the user how to go on. The message says so in one line."""


class Command(TyperCommand):
    """A command whose `--help` shows no value beside an option that takes none, such as --resume.

    typer itself would show `--resume <bool>`.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        return without_flag_values(super().get_params(ctx))


class Group(TyperGroup):
    """The command `drot` itself, which lists all commands and imports the one that runs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_flag_values(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else imported(name), rest


def add_commands(app: typer.Typer) -> None:
    """Adds the name and the first line of the help of each command."""
    for name, first_line in COMMANDS.items():
        app.command(name, help=first_line)(lambda: None)


def imported(name: str) -> Any:
    """A command with its options."""
    function = MODULES.get(name, name)
    module = import_module(f"drot.cli.{function}")
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, cls=Command, epilog=module.EPILOG)(getattr(module, function))
    return typer.main.get_command(alone)


def without_flag_values(params: list[Any]) -> list[Any]:
    """`params`, in which the metavar of every option without a value is blank."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = " "
    return params
