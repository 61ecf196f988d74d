"""The command `drot sweep`, and its table."""

from pathlib import Path
from typing import TYPE_CHECKING

from drot.checkpoint.tables import Table, number
from drot.cli.commands import Interrupted
from drot.cli.output import print_json, print_line, print_table
from drot.cli.progress_bars import working

if TYPE_CHECKING:
    from drot.reporting.sweep import SweepResult


def sweep(
    grid: Path,
    out: Path,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
) -> None:
    """Prune a model with every recipe of a grid, and compare perplexity, entropy and time.

    Example: drot sweep grid.yaml --out sweep

    Arguments:
        grid GRID.yaml: File with the keys model, base (the sections of a recipe), grid (lists of values for
            fields of a recipe, of which every combination is run), cells (a list of further combinations),
            texts (as --ppl of drot eval), tasks (as --tasks of drot eval), seqlen and text_column.
    Output:
        out: Folder to write: new, empty, or of an earlier sweep, whose finished cells are not run again.
        as_json:
    Run:
        model: Name on the hub or folder of the model. Default: model in GRID.yaml.
        device:
        dtype:
    """
    from drot.reporting import sweep as sweeping
    from drot.reporting.cells import CELLS

    try:
        with working() as progress:
            result = sweeping.sweep(
                grid,
                out=out,
                model=model,
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
                "cells": result.rows,
                "skipped": [
                    {"cell": each.label, "reason": each.reason, "refused": each.refused}
                    for each in result.skipped
                ],
                "computed": result.computed,
                "csv": result.csv,
            }
        )
    else:
        print_sweep(result)


def _short(heading: str) -> str:
    """The heading of a column, as in `gap closed /data/a.txt`, with the last part of a path alone."""
    measure, _, path = heading.partition("/")
    return measure + path.rpartition("/")[2] if measure.endswith((" ", ":")) else heading


def print_sweep(result: "SweepResult") -> None:
    """Prints a table with a row for each cell, the skipped combinations, and the written files."""
    forms = {"perplexity": ".3f", "dense": ".3f", "gap": ".0%", "accuracy": ".1%", "seconds": ".1f"}
    heads = {heading: _short(heading) for heading in result.rows[0]}
    if len(set(heads.values())) < len(heads):  # two texts whose files have one name
        heads = {heading: heading for heading in heads}
    rows = []
    for row in result.rows:
        cells = {field: str(row[field]) for field in result.fields}
        for heading, value in row.items():
            if (kind := heading.split()[0]) in forms:
                cells[heads[heading]] = number(value, forms[kind])
        rows.append(cells)
    print_table(Table("Sweep", rows), texts=0)
    for each in result.skipped:
        if each.refused:
            print_line(f"Not run: {each.label}: {each.reason}")
    if same := sum(not each.refused for each in result.skipped):
        print_line(f"{same} combinations are not run because their run is that of another cell")
    before = len(result.rows) - result.computed
    print_line(f"{result.computed} cells computed, {before} finished before")
    print_line(f"Wrote {result.csv}")
