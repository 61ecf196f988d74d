"""`drot convert | bench`: packed 2:4 weights and what they gain."""

from pathlib import Path
from typing import Annotated

import typer

from drot.cli_common import Device, Dtype, Json, print_json, stdout_kept_for_the_result
from drot.errors import UserError


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
    from drot.convert import convert_checkpoint

    with stdout_kept_for_the_result():
        manifest = convert_checkpoint(model, out, layout)
    if as_json:
        print_json({"out": str(out), **manifest})
    else:
        console.say(f"Saved to {out}")


def bench(
    model: Annotated[str | None, typer.Argument(help="Hub name or local folder, pruned to 2:4.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="In place of MODEL, random weights in its dimensions: llama-3-8b, …")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Of a prefill, as in 128,2048; default, where --batch is not named, 128 to 8192."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Sequences of a decode, as in 1,8; default, where --tokens is not named, 1 to 32."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of every case; the median is shown.")] = 10,
    minutes: Annotated[
        float | None, typer.Option(help="Leave out what would end later; default 3 on a CPU.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Time 2:4 against dense, with and without rotations: one layer, and MODEL from end to end."""
    from drot import console
    from drot.console_speed import print_speed
    from drot.evaluation.speed import measure_speed

    with stdout_kept_for_the_result(), console.progress_bar() as progress:
        figures = measure_speed(
            model,
            shape,
            tokens=parse_sizes("--tokens", tokens),
            batches=parse_sizes("--batch", batch),
            repeats=repeats,
            minutes=minutes,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    if as_json:
        print_json(figures)
    else:
        print_speed(figures)


def parse_sizes(option: str, text: str | None) -> list[int] | None:
    """`1,8` as numbers; None where nothing was named."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} must be whole numbers separated by commas; got {text!r}") from None
