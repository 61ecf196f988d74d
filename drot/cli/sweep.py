"""The command `drot sweep`: its options and its table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from drot.cli.commands import Interrupted
from drot.cli.options import (
    COMPUTE_DTYPE,
    OUTPUT,
    RUN,
    Device,
    Json,
    option,
    print_json,
    stdout_for_the_result,
)
from drot.cli.tables import output, print_line
from drot.core.errors import UserError
from drot.machine.devices import DTYPES

if TYPE_CHECKING:
    from drot.sweep.sweep import SweepResult

EPILOG = "Example: drot sweep grid.yaml --out sweep"


def sweep(
    grid: Annotated[
        Path,
        typer.Argument(
            metavar="GRID.yaml",
            help="File with the keys model, base (the sections of a recipe), grid (lists of values for "
            "fields of a recipe, of which every combination is run), cells (a list of further combinations), "
            "texts (as --ppl of drot eval), tasks (as --tasks of drot eval), seqlen and text_column.",
        ),
    ],
    out: Annotated[
        Path | None,
        option(
            OUTPUT,
            "Folder to write: new, empty, or of an earlier sweep, whose finished cells are not run again.",
        ),
    ] = None,
    model: Annotated[
        str | None, option(RUN, "Name on the hub or folder of the model. Default: model in GRID.yaml.")
    ] = None,
    keep_models: Annotated[
        bool, option(OUTPUT, "Keep the pruned model of each cell, in OUT/models.", "--keep-models")
    ] = False,
    device: Device = "auto",
    dtype: Annotated[str, option(RUN, COMPUTE_DTYPE, choices=["auto", *DTYPES])] = "auto",
    as_json: Json = False,
) -> None:
    """Prune a model with every recipe of a grid, and compare perplexity, entropy and time."""
    if out is None:
        raise UserError("`out` is missing: name the folder to write")
    from drot.cli.progress_bars import progress_bar
    from drot.sweep import sweep as sweeping
    from drot.sweep.rows import columns
    from drot.sweep.runner import CELLS

    try:
        with stdout_for_the_result(), progress_bar() as progress:
            result = sweeping.sweep(
                grid,
                out=out,
                model=model,
                keep_models=keep_models,
                device=device,
                dtype=dtype,
                progress=progress,
            )
    except KeyboardInterrupt:
        done = len(list((out / CELLS).glob("*.json")))
        raise Interrupted(
            f"{done} finished cells are kept in {out}; to go on, give the same command"
        ) from None
    if as_json:
        print_json(
            {
                "cells": [columns(row, result.rows, result.fields) for row in result.rows],
                "skipped": [
                    {"cell": each.label, "reason": each.reason, "refused": each.refused}
                    for each in result.skipped
                ],
                "computed": result.computed,
                "csv": str(result.csv),
                "tables": str(result.tables),
                "plots": [str(plot) for plot in result.plots],
            }
        )
    else:
        print_sweep(result)


def print_sweep(result: "SweepResult") -> None:
    """Prints a table with a row for each cell, the skipped combinations, and the written files."""
    from drot.sweep.rows import row_gap_closed, short_names

    table = Table(title="Sweep", title_justify="left")
    texts = result.rows[0].dense
    names = short_names(texts)
    for field in result.fields:
        table.add_column(field, justify="right")
    for text, dense in texts.items():
        table.add_column(f"perplexity on {names[text]} (dense {dense:.3f})", justify="right")
        table.add_column("gap closed", justify="right")
    if result.rows[0].dense_accuracy:
        table.add_column(f"mean accuracy (dense {result.rows[0].dense_mean_accuracy:.1%})", justify="right")
    table.add_column("seconds", justify="right")
    for row in result.rows:
        cells = [str(row.cell.value(field)) for field in result.fields]
        for text in texts:
            value, gap = row.perplexity(text), row_gap_closed(row, result.rows, text)
            cells += ["not finite" if value is None else f"{value:.3f}", "-" if gap is None else f"{gap:.0%}"]
        if row.dense_accuracy:
            cells.append("not finite" if row.mean_accuracy is None else f"{row.mean_accuracy:.1%}")
        table.add_row(*cells, row.seconds)
    output().print(table)
    if any(row.seconds.endswith("*") for row in result.rows):
        print_line("* without the training of the rotation, which another cell did")
    for each in result.skipped:
        if each.refused:
            print_line(f"Not run: {each.label}: {each.reason.replace('`', '')}")
    if same := sum(not each.refused for each in result.skipped):
        print_line(f"{same} combinations are not run because their run is that of another cell")
    before = len(result.rows) - result.computed
    print_line(f"{result.computed} cells computed, {before} finished before")
    plots = f" and {len(result.plots)} files in {result.plots[0].parent}" if result.plots else ""
    print_line(f"Wrote {result.csv}, {result.tables}{plots}")
