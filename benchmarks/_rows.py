"""The rows in benchmarks/results/, and a table of some of them."""

import csv
import textwrap
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
#: columns that say where a row comes from, and not what it measures
ORIGIN = ("date", "commit", "machine", "torch", "transformers")

Row = dict[str, str]


def read(name: str, *measured: str) -> list[Row]:
    """The rows of results/`name`.csv; of rows that differ only in `measured` and their origin, the last.

    Rows of a CPU with AMX are not those of other CPUs.
    """
    with (FOLDER / "results" / f"{name}.csv").open(newline="") as file:
        last: dict[tuple[object, ...], Row] = {}
        for row in csv.DictReader(file):
            case = [value for key, value in row.items() if key not in (*ORIGIN, *measured)]
            last["AMX" in row.get("machine", ""), *case] = row
    return list(last.values())


def table(head: Iterable[str], body: Iterable[Iterable[object]], used: Iterable[Row]) -> str:
    """A table in markdown, and a line with the commits and the machines of the rows that it shows."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    text = "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
    used = list(used)
    commits = [
        f"{date}: {', '.join(sorted({row['commit'].rstrip('+') for row in used if row['date'] == date}))}"
        for date in sorted({row["date"] for row in used})
    ]
    machines = sorted({row["machine"] for row in used if "machine" in row})
    origin = textwrap.fill(f"Rows of {'; '.join(commits + machines)}.", 110)
    return f"{text}\n\n{origin}\n"
