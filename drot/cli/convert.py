"""`drot convert`: its options."""

import typing
from pathlib import Path
from typing import Annotated

import typer

from drot.cli.options import OUTPUT, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import say
from drot.config import WeightFormat

EPILOG = "Example: drot convert llama-2of4-dense --out llama-2of4-packed --format packed"


def convert(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name on the hub, or a local folder, pruned to 2:4.")
    ],
    out: Annotated[Path, option(OUTPUT, "Folder to write. It must be new or empty.")],
    format: Annotated[
        str,
        option(
            OUTPUT,
            "packed (2:4 values and positions, 9/16 of bf16) or dense.",
            choices=typing.get_args(WeightFormat),
        ),
    ],
    as_json: Json = False,
) -> None:
    """Write the 2:4 weights of MODEL packed, or its packed weights dense. Nothing else changes."""
    from drot.checkpoint.convert import convert_checkpoint

    with stdout_for_the_result():
        manifest = convert_checkpoint(model, out, format)
    if as_json:
        print_json({"out": str(out), **manifest})
    else:
        say(f"Saved to {out}")
