"""`drot bench`: its options and its table."""

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from drot.cli.options import Device, Dtype, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import output, say
from drot.errors import UserError

EPILOG = "Example: drot bench --shape llama-3-8b --batch 1,8"
CASES = "Cases"


def bench(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name on the hub, or a local folder, pruned to 2:4.")
    ] = None,
    shape: Annotated[
        str | None,
        option(
            CASES,
            "Time random weights in the dimensions of a known model, instead of MODEL.",
            metavar="NAME",
            autocompletion=lambda: _shapes(),
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        option(CASES, "Tokens of a prefill, as in 128,2048. Default without --batch: 128 to 8192."),
    ] = None,
    batch: Annotated[
        str | None,
        option(CASES, "Sequences of a decode, as in 1,8. Default without --tokens: 1 to 32."),
    ] = None,
    repeats: Annotated[int, option(CASES, "Repetitions of each case; the median is shown.")] = 10,
    minutes: Annotated[
        float | None,
        option(CASES, "Leave out cases that would end later. Default: 3 on a CPU, no limit on a GPU."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Time 2:4 against dense, with and without rotations: one decoder layer, and the whole model."""
    from drot.bench.speed import measure_speed
    from drot.cli.progress_bars import progress_bar

    with stdout_for_the_result(), progress_bar() as progress:
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


def _shapes() -> list[str]:
    from drot.bench.variants import SHAPES

    return list(SHAPES)


def parse_sizes(option: str, text: str | None) -> list[int] | None:
    """`1,8` as numbers; None where nothing was named."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} must be whole numbers separated by commas; got {text!r}") from None


def print_speed(data: dict[str, Any]) -> None:
    """`drot bench`: a row for every variant of every case, and what was left out."""
    title = f"{data['model']}, {data['dtype']}, {data['machine']}, medians of {data['repeats']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("case", "weights", "ms", "tokens/s", "bound", "MiB", "against dense"):
        is_text = heading in ("case", "weights", "against dense")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in data["rows"]:
        variants = data["variants"][row["what"]]
        table.add_row(
            f"{row['what']} {row['phase']} {row['size']}" if row["variant"] == variants[0] else "",
            row["variant"],
            _three_digits(row["milliseconds"]),
            _three_digits(row["tokens_per_second"]),
            _bound(row),
            _three_digits(row["weight_bytes"] / 2**20),
            "" if row["speedup"] is None else f"{row['speedup']:.2f} x, {row['verdict']}",
            end_section=row["variant"] == variants[-1],
        )
    output().print(table)
    if data["left_out"]:
        options = "--tokens, --batch, --repeats, --minutes"
        say(f"Left out to end in time ({options}): {', '.join(data['left_out'])}")


def _bound(row: dict[str, Any]) -> str:
    if row["phase"] == "decode":
        return f"{_three_digits(row['bound'] / 1e9)} GB/s"
    scale, unit = (1e12, "TFLOP/s") if row["bound"] >= 1e12 else (1e9, "GFLOP/s")
    return f"{_three_digits(row['bound'] / scale)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
