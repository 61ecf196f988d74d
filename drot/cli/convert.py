"""The command `drot convert`: its options."""

import typing
from pathlib import Path
from typing import Annotated

import typer

from drot.cli.options import OUTPUT, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import print_line, saved_line
from drot.config import WeightFormat

EPILOG = "Example: drot convert llama-2of4-dense --out llama-2of4-packed --format packed"


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model with 2:4 weights: a name on the Hugging Face hub, or a local folder.",
        ),
    ],
    out: Annotated[Path, option(OUTPUT, "Folder to write. It must be new or empty.")],
    format: Annotated[
        str,
        option(
            OUTPUT,
            "packed stores the values and positions of the 2:4 weights, in 9/16 of the bytes of bf16; dense "
            "stores all weights, with their zeros.",
            choices=typing.get_args(WeightFormat),
        ),
    ],
    as_json: Json = False,
) -> None:
    """Copy MODEL to a new folder with its 2:4 weights packed, or with its packed weights dense."""
    from drot.checkpoint.convert import convert_checkpoint
    from drot.checkpoint.size import weight_bytes

    with stdout_for_the_result():
        manifest = convert_checkpoint(model, out, format)
    if as_json:
        sizes = {"before": weight_bytes(model), "after": weight_bytes(out)}
        print_json({"out": str(out), "weight_bytes": sizes, **(manifest.to_dict() if manifest else {})})
    else:
        print_line(saved_line(model, out))
