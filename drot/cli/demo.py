"""The command `drot demo`, and its table."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from drot.cli.output import output, print_json, print_line, print_table
from drot.cli.progress_bars import working
from drot.manifest.tables import Table, number

if TYPE_CHECKING:
    from drot.sweep.demo import DemoResult


def demo(out: Path = Path("demo-output"), as_json: bool = False) -> None:
    """Prune a small model that comes with drot to 2:4, without and with solver and rotation, and compare.

    Example: drot demo --out demo-output && drot info demo-output

    Output:
        out:
        as_json:
    """
    from drot.reporting.drawing import PACKAGE
    from drot.sweep.demo import run_demo

    with working() as progress:
        result = run_demo(out, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(result) | {"out": out})
    else:
        print_demo(result)
        print_line(f"Saved to {out}")
        if result.report is None:
            print_line(f"The report is left out: it needs matplotlib (pip install '{PACKAGE}')")
        else:
            print_line(f"Open {result.report} for charts of the run")
    if not result.rotation_helped:
        raise typer.Exit(1)


def print_demo(result: "DemoResult") -> None:
    """Prints the table of the four models, and a sentence on what the figures mean."""
    rows = [
        {
            "model": row.name,
            "perplexity": f"{row.perplexity:.3f}",
            "gap closed": number(row.gap_closed, ".0%"),
            "sparsity": f"{row.sparsity:.0%}",
            "seconds": number(row.seconds, ".1f"),
        }
        for row in result.rows
    ]
    print_table(Table("tiny-llama on held-out Python source", rows))
    output().print(result.sentence)
