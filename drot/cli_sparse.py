"""`drot convert | bench`: packed 2:4 weights and what they gain."""

from pathlib import Path
from typing import Annotated

import typer

from drot.cli_options import Json, print_json, stdout_kept_for_the_result


def convert(
    model: Annotated[str, typer.Argument(help="Hub name or local folder, pruned to 2:4.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist or be empty.")],
    layout: Annotated[
        str, typer.Option("--format", help="packed (values and positions, 9/16 of bf16) or dense.")
    ],
    as_json: Json = False,
) -> None:
    """Write MODEL's 2:4 weights packed, or packed ones dense; nothing else changes."""
    from drot import console
    from drot.sparse.convert import convert_checkpoint

    with stdout_kept_for_the_result():
        manifest = convert_checkpoint(model, out, layout)
    if as_json:
        print_json({"out": str(out), **manifest})
    else:
        console.say(f"Saved to {out}")
