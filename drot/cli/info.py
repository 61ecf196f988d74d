"""The command `drot info`: its options and the table of the machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from drot.cli.options import Json, print_json
from drot.cli.tables import output, print_manifest
from drot.config.checks import path_exists
from drot.errors import UserError

EPILOG = "Example: drot info llama-2of4"


def info(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="A checkpoint that drot wrote.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the versions, backends and GPUs of this machine; or, with FOLDER, how that model was made."""
    if folder is None:
        from drot.environment import collect

        data = collect()
        if as_json:
            print_json(data)
        else:
            print_environment(data)
        return
    from drot.checkpoint.manifest import read_manifest

    if not path_exists(folder) or not folder.is_dir():
        reason = "is a file" if path_exists(folder) else "does not exist"
        raise UserError(f"{folder} {reason}: name the folder that drot prune wrote")
    data = read_manifest(folder, recipe_needed=False)
    if as_json:
        print_json(data)
        return
    print_manifest(data)


def print_environment(data: dict[str, Any]) -> None:
    """Prints one line for each key of `drot.environment.collect` that has a value."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in data.items():
        if value is not None and (fact := _fact(value)):
            table.add_row(key.replace("_", " "), fact)
    output().print(table)


def _fact(value: Any) -> str:
    """A JSON value as text; None and [] in a dict are left out."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(fact)}" for key, fact in value.items() if fact not in (None, []))
    if isinstance(value, list):
        return "; ".join(map(_fact, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
