"""The table of `drot bench`."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from drot.console import output, say


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
