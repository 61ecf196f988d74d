"""The command `drot demo`: its options and its table."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drot.cli.options import OUTPUT, Json, option, print_json, stdout_for_the_result
from drot.cli.tables import number_table, output, print_line

if TYPE_CHECKING:
    from drot.demo.demo import DemoResult

#: default folder of the demo's checkpoint
OUT = Path("demo-output")
EPILOG = "Example: drot demo --out demo-output && drot info demo-output"


def demo(
    out: Annotated[
        Path, option(OUTPUT, "Folder for the rotated and pruned model. It must be new or empty.")
    ] = OUT,
    as_json: Json = False,
) -> None:
    """Prune a small model that comes with drot to 2:4, with and without DenoiseRotator, and compare."""
    from drot.cli.progress_bars import progress_bar
    from drot.demo.demo import run_demo
    from drot.report.drawing import PACKAGE

    with stdout_for_the_result(), progress_bar() as progress:
        result = run_demo(out, progress=progress)
    if as_json:
        report = None if result.report is None else str(result.report)
        print_json(dataclasses.asdict(result) | {"out": str(out), "report": report})
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
    """Prints the table of the three models, and a sentence on what the figures mean."""
    table = number_table(
        *("model", "perplexity", "gap closed", "sparsity", "seconds"),
        title="tiny-llama on held-out Python source",
    )
    best = result.rows[-1]
    for row in result.rows:
        table.add_row(
            row.name,
            f"{row.perplexity:.3f}",
            "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
            f"{row.sparsity:.0%}",
            "-" if row.seconds is None else f"{row.seconds:.1f}",
            style="bold green" if row is best and result.rotation_helped else "",
        )
    output().print(table)
    output().print(result.sentence)
