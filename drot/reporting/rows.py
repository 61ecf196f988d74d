"""The rows of a sweep: their columns, and the CSV file."""

import csv
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drot.checkpoint.manifest import Manifest
from drot.checkpoint.tables import gap_closed
from drot.config import ONE_SHOT, RecoveryConfig, RotationConfig, resolve
from drot.core.files import new_file
from drot.reporting.grid import Cell, Skipped, effective
from drot.reporting.runs import REMOVED_IMPORTANCE, Run

#: columns that follow the perplexities and accuracies. None has the name of a recipe's field.
COLUMNS = (
    *("entropy_before", "entropy_after", "removed_importance_before", "removed_importance_after"),
    *("zeros", "seconds", "seconds_per_step"),
)


def run_columns(manifest: Manifest) -> dict[str, float | None]:
    """Heading → value. A value that the run did not record, or that is not finite, is None.

    zeros: share of zeros in the linears of the decoder layers.
    seconds: time of the run, without the loading of the model and the text.
    seconds_per_step: time of a training step of the rotation.
    entropy_before, entropy_after: entropy of a layer before and after its training, mean over the layers.
    removed_importance_before, removed_importance_after: share of the importance of a linear's weights that
        pruning in one shot removes, before and after the rotation, mean over the pruned linears.
    """
    run = Run("", manifest, {})
    trained = list(run.trainings.values())
    steps = sum(len(record.loss_curve) - 1 for record in trained)
    removed_before, removed_after = map(run.mean, REMOVED_IMPORTANCE)
    columns = {
        "zeros": manifest.sparsity,
        "seconds": manifest.seconds.total - manifest.seconds.phases.get("load", 0.0),
        "seconds_per_step": manifest.seconds.phases["rotate"] / steps if steps else None,
        "entropy_before": statistics.fmean(r.entropy_before for r in trained) if trained else None,
        "entropy_after": statistics.fmean(r.entropy_after for r in trained) if trained else None,
        "removed_importance_before": removed_before,
        "removed_importance_after": removed_after,
    }
    return {
        name: None if value is None or not math.isfinite(value) else value for name, value in columns.items()
    }


def rows_of(
    finished: Mapping[str, tuple[Cell, dict[str, Any]]], dense: dict[str, Any], fields: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each finished cell: heading → value, in plain types; None where there is no value.

    The gap closed is the share of the rise in perplexity on a text by the pruning method alone (no rotation,
    no solver, no training) that the cell undoes. It is None for the method alone, and without its cell.

    finished: name of a cell → the cell, and its figures as they were written.
    dense: the figures of the dense model.
    fields: the fields of a recipe that the rows show.
    """
    perplexities = {str(effective(cell.resolved)): record["perplexity"] for cell, record in finished.values()}
    rows = []
    for key, (cell, record) in finished.items():
        row = {"cell": key, **{name: cell.value(name) for name in fields}}
        method = _method_alone(cell)
        baseline = {} if method == str(effective(cell.resolved)) else perplexities.get(method, {})
        for text, of_dense in dense["perplexity"].items():
            found = record["perplexity"][text]
            row |= {
                f"perplexity {text}": found,
                f"dense {text}": of_dense,
                f"gap closed {text}": gap_closed(of_dense, baseline.get(text), found),
            }
        for task, of_dense in dense["accuracy"].items():
            row |= {f"accuracy {task}": record["accuracy"][task], f"dense accuracy {task}": of_dense}
        rows.append(row | {name: record[name] for name in COLUMNS})
    return rows


def _method_alone(cell: Cell) -> str:
    """The settings of the run of the pruning method alone in place of a cell: in one shot, not rotated.

    It has what the cell says of the method, the sparsity and the calibration.
    """
    compat = cell.recipe.rotation.reference_compat  # it changes the scores of the method too
    own = dataclasses.replace(
        cell.recipe,
        rotation=RotationConfig(mode="none", reference_compat=compat),
        recovery=RecoveryConfig(),
    )
    seqlen = cell.resolved.calibration.seqlen  # it depends on the model
    return str(effective(resolve(own.replace(**ONE_SHOT, seqlen=seqlen))))


def write_csv(file: Path, rows: Sequence[dict[str, Any]], skipped: Sequence[Skipped] = ()) -> None:
    """Writes a line for each row, and for each skipped combination, with the reason in the last column.

    Raises WriteError if writing fails. An empty field is a figure that the cell does not have.
    """
    with new_file(file) as part, part.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*rows[0], "skipped"])
        writer.writeheader()
        writer.writerows(rows)
        writer.writerows({"cell": f"({each.label})", "skipped": each.reason} for each in skipped)
