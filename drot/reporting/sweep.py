"""`sweep`: runs the recipes of a grid on one model, and writes their figures side by side."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.dtypes import cast_weights
from drot.checkpoint.load import load, load_tokenizer
from drot.checkpoint.opening import load_config
from drot.checkpoint.resume import read_journal
from drot.config import CalibrationConfig, ResolvedRecipe, default_seqlen, resolve
from drot.core.checks import is_a
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.files import check_writable, write_json, writing
from drot.core.hashes import json_digest, weights_record, with_digest
from drot.core.lock import locked
from drot.evaluation import choices
from drot.evaluation.perplexity import check_logits, load_eval_tokens, perplexities
from drot.evaluation.predictions import check_windows, predict
from drot.evaluation.tasks import load_tasks, run_tasks
from drot.machine.devices import computing_dtype, dtype_name, pick_device
from drot.machine.environment import machine_name, versions
from drot.model.families import family_of
from drot.model.sizes import positions_of
from drot.pipeline.prune import prune
from drot.pipeline.validation import check_config, check_recipe, check_seqlen, down_width
from drot.reporting.grid import Cell, Grid, Skipped, effective, read_grid
from drot.reporting.rows import Row, run_columns, write_csv
from drot.text.source import calibration_hash, load_calibration

logger = logging.getLogger("drot")

#: what a sweep writes into its folder for readers
CSV = "sweep.csv"
#: what it keeps there: the figures of the dense model and of cells
DENSE, CELLS = "dense.json", "cells"
#: digits of the SHA-256 that names a cell
KEY_DIGITS = 16

#: `perplexity`: text → perplexity; `accuracy`: task → accuracy in [0, 1]; None if it is not finite
Measured = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class SweepResult:
    """The result of `sweep`.

    rows: the cells with their figures, in the order of the grid.
    skipped: the combinations that were not run.
    fields: the fields that the grid varies.
    computed: number of cells that this call computed; the others were finished before.
    csv: the written file.
    """

    rows: list[Row]
    skipped: list[Skipped]
    fields: tuple[str, ...]
    computed: int
    csv: Path


def sweep(
    grid: str | Path,
    *,
    out: str | Path,
    model: str | Path | None = None,
    device: str | torch.device = "auto",
    dtype: str = "auto",
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
    out, target = Path(out), pick_device(device)
    _check_folder(out)
    cells, refused = _cells_for(model, content, target)
    skipped = content.skipped + refused
    if not cells:
        raise UserError(f"no cell of {grid} fits {model}: {skipped[-1].label}: {skipped[-1].reason}")
    with locked(out):
        runner = CellRunner(model, out, content, cells, device=target, dtype=dtype, progress=progress)
        rows, computed = _run_cells(runner, cells, content.fields)
        write_csv(out / CSV, content.fields, rows, skipped)
    return SweepResult(rows, skipped, content.fields, computed, out / CSV)


def _cells_for(model: str, grid: Grid, device: torch.device) -> tuple[list[Cell], list[Skipped]]:
    """The cells that fit the model, and those that do not."""
    config = load_config(model)
    check_config(config)
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
            cells.append(Cell(cell.recipe, resolved))
        except UserError as error:
            refused.append(Skipped(cell.label(grid.fields), str(error)))
    return cells, refused


def _run_cells(runner: "CellRunner", cells: list[Cell], fields: tuple[str, ...]) -> tuple[list[Row], int]:
    """The rows of all cells, and how many of them were not finished before. Writes the CSV after each row."""
    keys = {runner.key(cell): cell for cell in cells}
    rows: list[Row] = []
    computed = 0
    for number, (key, cell) in enumerate(keys.items(), 1):
        record = read_journal(runner.out / CELLS / f"{key}.json")
        if record is None:
            runner.progress(ProgressEvent(phase="sweep", step=number, steps=len(keys)))
            record = runner.run(cell, key)
            computed += 1
        rows.append(Row(key, cell, record, runner.dense["perplexity"], runner.dense["accuracy"]))
        write_csv(runner.out / CSV, fields, rows)
    return rows, computed


def _check_folder(out: Path) -> None:
    """Raises UserError unless `out` is new, empty, or the folder of a sweep."""
    check_writable(out)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / CELLS).is_dir())):
        raise UserError(f"{out} exists and is not the folder of a sweep: name another `out` or remove it")


# ---- the runs of the cells, and what all cells share -----------------------------------------------------


class CellRunner:
    """Prunes and measures the cells of one sweep.

    It reads the texts, the tasks and the calibration tokens of all cells, and measures the dense model unless
    an earlier call with the same folder did.
    """

    def __init__(
        self,
        model: str,
        out: Path,
        grid: Grid,
        cells: Sequence[Cell],
        *,
        device: torch.device,
        dtype: str,
        progress: Progress,
    ) -> None:
        self.model, self.out = model, out
        self.device, self.progress = device, progress
        self.dtype = str(computing_dtype(dtype, device))
        self.tokenizer, self.config = load_tokenizer(model), load_config(model)
        self.seqlen = (
            default_seqlen(positions_of(self.config)) if grid.asked.seqlen is None else grid.asked.seqlen
        )
        self.texts: dict[str, Tensor] = {}
        for source in grid.asked.texts:
            tokens = load_eval_tokens(source, self.tokenizer, grid.asked.text_column, progress)
            check_windows(tokens, self.config.get_text_config(), self.seqlen)
            self.texts[source] = tokens
        of_lm_eval = [task for task in grid.asked.tasks if task != choices.OWN]
        self.tasks = load_tasks(of_lm_eval) if of_lm_eval else None
        self.own_tasks = choices.task_names(grid.asked.tasks, self.texts)
        self.calibration: dict[CalibrationConfig, Tensor] = {}
        for recipe in (cell.resolved for cell in cells):
            if recipe.reads_calibration and recipe.calibration not in self.calibration:
                check_seqlen(recipe.calibration.seqlen, self.config)
                tokens = load_calibration(recipe.calibration, self.tokenizer, progress)
                self.calibration[recipe.calibration] = tokens
        #: what the figures of every cell depend on besides its recipe
        self.identity: dict[str, Any] = {}
        self.dense = self._measure_dense()

    def _measure_dense(self) -> Any:
        """The figures of the dense model as in `_measure`, none of which is None."""
        self.progress(ProgressEvent(phase="load"))
        model = load(self.model, device="cpu", dtype=self.dtype)
        self.identity = {
            "weights": weights_record(model.state_dict()),
            "dtype": dtype_name(model.dtype),
            "seqlen": self.seqlen,
            "texts": {source: calibration_hash(tokens) for source, tokens in self.texts.items()},
        }
        if names := self._task_names():
            self.identity["tasks"] = names
        before = read_journal(self.out / DENSE)
        if before is not None and before["identity"] == self.identity:
            return before
        measured = {"identity": self.identity, **self._measure(model, may_be_broken=False)}
        with writing(self.out):
            (self.out / CELLS).mkdir(parents=True, exist_ok=True)
        write_json(self.out / DENSE, with_digest(measured))
        return measured

    def key(self, cell: Cell) -> str:
        """The name of a cell: a hash of all that its figures depend on."""
        settings = effective(cell.resolved) | {"calibration": self._calibration_hash(cell.resolved)}
        return json_digest([settings, self.identity])[:KEY_DIGITS]

    def run(self, cell: Cell, key: str) -> dict[str, Any]:
        """Prunes and measures the cell of the name `key`; writes its record and returns it."""
        result = prune(
            self.model,
            cell.recipe,
            tokenizer=self.tokenizer,
            device=self.device,
            dtype=self.dtype,
            progress=self.progress,
            calibration=self.calibration.get(cell.resolved.calibration),
        )
        if self.dtype != "auto":  # the result has the dtype of the checkpoint
            cast_weights(result.model, getattr(torch, self.dtype))
        record = {
            "recipe": cell.resolved.to_dict(),
            "identity": self.identity,
            "calibration": self._calibration_hash(cell.resolved),
            **self._measure(result.model, may_be_broken=True),
            **run_columns(result.manifest),
            "machine": machine_name(self.device),
            "versions": versions(),
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))
        write_json(self.out / CELLS / f"{key}.json", with_digest(plain))
        return plain

    def _calibration_hash(self, recipe: ResolvedRecipe) -> str | None:
        tokens = self.calibration.get(recipe.calibration) if recipe.reads_calibration else None
        return None if tokens is None else calibration_hash(tokens)

    def _task_names(self) -> list[str]:
        return [*self.own_tasks, *(self.tasks.tasks if self.tasks else ())]

    def _measure(self, model: PreTrainedModel, *, may_be_broken: bool) -> Measured:
        """The figures of a model. A model without a finite loss is an error unless it `may_be_broken`."""
        perplexity: dict[str, float | None] = dict.fromkeys(self.texts)
        accuracy: dict[str, float | None] = dict.fromkeys(self._task_names())
        try:
            perplexity |= perplexities(
                model,
                self.texts,
                seqlen=self.seqlen,
                device=self.device,
                name=self.model,
                progress=self.progress,
            )
            if self.own_tasks:
                streamed = None if model.device == self.device else self.device
                scores = choices.scores(
                    self.texts, lambda tokens, length: predict(model, tokens, length, streamed)
                )
                accuracy |= {name: score.accuracy for name, score in scores.items()}
            if self.tasks is not None:
                if model.device != self.device:
                    raise UserError(f"tasks need the whole of {self.model} on {self.device}: it does not fit")
                check_logits(model)
                scores = run_tasks(model, self.tokenizer, self.tasks)
                accuracy |= {name: score.accuracy for name, score in scores.items()}
        except BrokenModelError as error:
            if not may_be_broken:
                raise
            logger.warning("a cell has no figures: %s", error)
        return {"perplexity": perplexity, "accuracy": accuracy}
