"""The command `drot sweep`, and its table."""

from pathlib import Path
from typing import TYPE_CHECKING

from drot.checkpoint.tables import Table, number, text_names
from drot.cli.commands import Interrupted
from drot.cli.output import print_json, print_line, print_table
from drot.cli.progress_bars import working
from drot.core.checks import counted

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
            f"{out} keeps {counted(done, 'finished cell')}; to go on, give the same command"
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


def _table(result: "SweepResult") -> Table:
    """A row for the dense model and one for each cell. A text has one column, with the gap closed."""
    first = result.rows[0]
    names = text_names([heading.partition(" ")[2] for heading in first if heading.startswith("perplexity ")])
    found = [heading.partition(" ")[2] for heading in first if heading.startswith("accuracy ")]
    tasks = {task: ":".join(names.get(part, part) for part in task.split(":", 1)) for task in found}
    fields = result.fields or ("cell",)
    rows = [
        dict.fromkeys(fields, "")
        | {names[text]: number(first[f"dense {text}"], ".3f") for text in names}
        | {name: number(first[f"dense accuracy {task}"], ".1%") for task, name in tasks.items()}
    ]
    rows[0][fields[0]] = "(dense)"
    for row in result.rows:
        cells = {field: "" if row[field] is None else str(row[field]) for field in fields}
        for text, name in names.items():
            gap = row[f"gap closed {text}"]
            cells[name] = number(row[f"perplexity {text}"], ".3f") + ("" if gap is None else f" ({gap:.0%})")
        cells |= {name: number(row[f"accuracy {task}"], ".1%") for task, name in tasks.items()}
        rows.append(cells | {"seconds": number(row["seconds"], ".1f")})
    accuracies = ", accuracy in each task" if tasks else ""
    return Table(f"Sweep: perplexity on each text (gap closed){accuracies}", rows)


def print_sweep(result: "SweepResult") -> None:
    """Prints a table with a row for each cell, the skipped combinations, and the written files."""
    print_table(_table(result), texts=len(result.fields or ("cell",)))
    for each in result.skipped:
        if each.refused:
            print_line(f"Not run: {each.label}: {each.reason}")
    if same := sum(not each.refused for each in result.skipped):
        print_line(f"drot left out {counted(same, 'combination')}: another cell does the same run")
    before = len(result.rows) - result.computed
    print_line(f"{counted(result.computed, 'cell')} computed, {before} finished before")
    print_line(f"Wrote {result.csv}")
