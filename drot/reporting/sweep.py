"""`sweep`: runs the recipes of a grid on one model, and writes their figures side by side."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drot.checkpoint.opening import load_config
from drot.checkpoint.resume import read_journal
from drot.config import resolve
from drot.core.checks import is_a
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.files import WriteError, check_writable
from drot.core.lock import locked
from drot.machine.devices import pick_device
from drot.machine.products import without_autocast
from drot.model.families import family_of
from drot.model.sizes import positions_of
from drot.pipeline.validation import check_prunable, check_recipe, down_width
from drot.reporting.cells import CELLS, OWN_TEXTS, CellRunner
from drot.reporting.grid import Cell, Grid, Skipped, read_grid
from drot.reporting.rows import rows_of, write_csv

logger = logging.getLogger("drot")

#: what a sweep writes into its folder for readers
CSV = "sweep.csv"


@dataclass(frozen=True)
class SweepResult:
    """The result of `sweep`.

    rows: for each cell, in the order of the grid, the headings of sweep.csv → their values; None for a figure
        that the cell does not have.
    skipped: the combinations that were not run.
    fields: the fields that the grid varies.
    computed: number of cells that this call computed; the others were finished before.
    csv: the written file.
    """

    rows: list[dict[str, Any]]
    skipped: list[Skipped]
    fields: tuple[str, ...]
    computed: int
    csv: Path


@without_autocast()
def sweep(
    grid: str | Path,
    *,
    out: str | Path,
    model: str | Path | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress = silent,
) -> SweepResult:
    """Prunes a model with each recipe of a grid and measures the perplexity of each result, and its accuracy.

    Writes into `out`: sweep.csv, a row for each cell; cells/, the figures of each finished cell. Another call
    with the same `out` runs only the cells that are not finished: those whose recipe, model, calibration
    tokens, texts, tasks, window length or dtype of the computation is new. sweep.csv then holds the cells of
    the grid of that call.

    Raises UserError for a mistake in the input, for a folder `out` that is not of a sweep, and while another
    run writes to `out`. What a recipe refuses is not run and listed as skipped.

    Args:
        grid: a grid file (`read_grid`).
        out: the folder to write: new, empty, or of an earlier sweep.
        model: a name on the hub or a local folder; None is the model in the grid file.
        device: the device of the computation, as in `drot.prune`.
        dtype: dtype of the computation, as in `drot.prune`. Perplexities are measured in it too.
        progress: receives the events of the runs, and the event `sweep` when a cell begins.
    """
    content = read_grid(grid)
    is_a("out", out, str, Path)
    is_a("model", model, str, Path, or_none=True)
    model = content.asked.model if model is None else str(model)
    if not model:
        raise UserError(f"`model` is missing: name a model on the hub or a folder, here or in {grid}")
    out, target = Path(out), pick_device(device, kernels=True)
    _check_folder(out)
    cells, refused = _cells_for(model, content, target)
    skipped = content.skipped + refused
    if not cells:
        raise UserError(f"no cell of {grid} fits {model}: {skipped[-1].label}: {skipped[-1].reason}")
    with locked(out):
        runner = CellRunner(model, out, content, cells, device=target, dtype=dtype, progress=progress)
        rows, computed, left_out = _run_cells(runner, cells, content.fields)
        skipped += left_out
        if not rows:
            raise UserError(f"no cell of {grid} could be run: {skipped[-1].label}: {skipped[-1].reason}")
        write_csv(out / CSV, rows, skipped)
    return SweepResult(rows, skipped, content.fields, computed, out / CSV)


def _cells_for(model: str, grid: Grid, device: torch.device) -> tuple[list[Cell], list[Skipped]]:
    """The cells that fit the model, and those that do not."""
    config = load_config(model)
    check_prunable(config)
    cells, refused = [], []
    for cell in grid.cells:
        try:
            # a sweep that goes on elsewhere computes cells of another dtype again
            resolved = resolve(
                cell.recipe,
                positions=positions_of(config),
                device=device.type,
                down_width=down_width(config, cell.recipe.pruning),
                rotates_stream=family_of(config).rotates_stream,
            )
            check_recipe(config, resolved)
            cells.append(dataclasses.replace(cell, resolved=resolved))
        except UserError as error:
            refused.append(Skipped(cell.label(grid.fields), str(error).replace("`", "")))
    return cells, refused


def _run_cells(
    runner: CellRunner, cells: list[Cell], fields: tuple[str, ...]
) -> tuple[list[dict[str, Any]], int, list[Skipped]]:
    """The rows of all cells, how many of them were not finished before, and the cells without a row.

    Those are cells whose run is that of another one, and cells whose run ends in an error of the input, which
    do not end the sweep. Writes the CSV after each row.
    """
    keys: dict[str, Cell] = {}
    left_out: list[Skipped] = []
    for cell in cells:
        if (key := runner.key(cell)) in keys:
            reason = f"its run is that of {keys[key].label(fields)}"
            left_out.append(Skipped(cell.label(fields), reason, refused=False))
        else:
            keys[key] = cell
    finished: dict[str, tuple[Cell, dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    computed = 0
    for number, (key, cell) in enumerate(keys.items(), 1):
        record = read_journal(runner.out / CELLS / f"{key}.json")
        if record is None:
            runner.setup.progress(ProgressEvent(phase="sweep", step=number, steps=len(keys)))
            try:
                record = runner.run(cell, key)
            except WriteError:
                raise
            except (UserError, BrokenModelError) as error:
                left_out.append(Skipped(cell.label(fields), str(error).replace("`", "")))
                logger.warning("the cell %s ended: %s", cell.label(fields), error)
                continue
            computed += 1
        finished[key] = cell, record
        rows = rows_of(finished, runner.dense, fields)
        write_csv(runner.out / CSV, rows)
    return rows, computed, left_out


def _check_folder(out: Path) -> None:
    """Raises UserError unless `out` is new, empty, or the folder of a sweep."""
    check_writable(out)
    begun = out.is_dir() and all(each.name.startswith(OWN_TEXTS) for each in out.iterdir())
    if out.exists() and not begun and not (out / CELLS).is_dir():
        raise UserError(f"{out} exists and is not the folder of a sweep: name another `out` or remove it")
