"""The command `drot bench`: its options and its table."""

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from drot.cli.options import Device, Dtype, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import number_table, output, print_line, scaled, three_digits
from drot.core.errors import UserError

EPILOG = "Example: drot bench --shape llama-3-8b --batch 1,8"
CASES = "Cases"


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model with 2:4 weights: a name on the Hugging Face hub, or a local folder.",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        option(
            CASES,
            "Instead of MODEL: time random weights in the dimensions of a known model, such as llama-3-8b.",
            metavar="NAME",
            autocompletion=lambda: _shapes(),
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        option(
            CASES,
            "Time a prefill of one sequence, for each of these numbers of tokens, as in 128,2048. Without "
            "--tokens and --batch: 128 to 8192 tokens.",
        ),
    ] = None,
    batches: Annotated[
        str | None,
        option(
            CASES,
            "Time the decoding of one token per sequence, for each of these numbers of sequences, as in 1,8. "
            "Without --tokens and --batch: 1 to 32 sequences.",
            "--batch",
        ),
    ] = None,
    repeats: Annotated[
        int,
        option(
            CASES,
            "Repetitions of each case. The table shows the median, and below 3 repetitions no verdict.",
        ),
    ] = 10,
    minutes: Annotated[
        float | None,
        option(
            CASES,
            "Leave out the cases that would end later than this after the start. Making or loading the "
            "weights counts. Default: 3 on a CPU, no limit on a GPU.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Time 2:4 against dense weights, with and without rotations, in a decoder layer and a whole model.

    The column 'rate' is the FLOP/s of a prefill, counted as dense, or the weight bytes/s of a decode.
    """
    from drot.cli.progress_bars import progress_bar
    from drot.speed.speed import measure_speed

    with stdout_for_the_result(), progress_bar() as progress:
        figures = measure_speed(
            model,
            shape,
            tokens=parse_sizes("--tokens", tokens),
            batches=parse_sizes("--batch", batches),
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
    from drot.speed.variants import SHAPES

    return list(SHAPES)


def parse_sizes(option: str, text: str | None) -> list[int] | None:
    """The numbers in the value `text` of an option, such as `1,8`; None if the option was not given."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} must be whole numbers separated by commas; got {text!r}") from None


def print_speed(data: dict[str, Any]) -> None:
    """Prints a row for each variant of each case, and the names of the cases that were left out."""
    title = f"{data['model']}, {data['dtype']}, {data['machine']}, medians of {data['repeats']}"
    table = number_table(
        *("case", "weights", "ms", "tokens/s", "rate", "MiB"),
        texts=2, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("against dense", no_wrap=True)
    for row in data["rows"]:
        variants = data["variants"][row["what"]]
        table.add_row(
            f"{row['what']} {row['phase']} {row['size']}" if row["variant"] == variants[0] else "",
            row["variant"],
            three_digits(row["milliseconds"]),
            three_digits(row["tokens_per_second"]),
            scaled(row["bound"], "B/s" if row["phase"] == "decode" else "FLOP/s"),
            three_digits(row["weight_bytes"] / 2**20),
            "" if row["speedup"] is None else f"{row['speedup']:.2f} x, {row['verdict']}",
            end_section=row["variant"] == variants[-1],
        )
    if data["rows"]:
        output().print(table)
    if data["left_out"]:
        print_line(
            "Left out to end in time (allow more --minutes, or fewer or smaller --tokens, --batch or "
            f"--repeats): {', '.join(data['left_out'])}"
        )
