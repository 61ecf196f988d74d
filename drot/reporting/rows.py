"""The rows of a sweep: their columns, and the CSV file."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drot.checkpoint.manifest import Manifest
from drot.checkpoint.tables import gap_closed
from drot.config import resolve
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


@dataclass(frozen=True)
class Row:
    """A finished cell.

    key: name of the cell. cell: its recipe. record: its figures, as they were written.
    dense: text → perplexity of the dense model.
    dense_accuracy: task → accuracy of the dense model, in [0, 1]; empty if the sweep has no tasks.
    """

    key: str
    cell: Cell
    record: dict[str, Any]
    dense: dict[str, float]
    dense_accuracy: dict[str, float]

    @property
    def rotated(self) -> bool:
        return self.cell.recipe.rotation.mode != "none"

    def perplexity(self, text: str) -> float | None:
        """The perplexity on a text; None if it is not finite."""
        value: float | None = self.record["perplexity"][text]
        return value


def not_rotated(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the same recipe without a rotation; None without one, and for a row that is not rotated.

    The run is the same, and not what the grid says: one cell may name a solver that another leaves open.
    """
    if not row.rotated:
        return None
    own = row.cell.recipe.replace(mode="none", blocks=1, down_rotation="auto")
    wanted = effective(resolve(own))
    return next((other for other in rows if effective(other.cell.resolved) == wanted), None)


def row_gap_closed(row: Row, rows: Sequence[Row], text: str) -> float | None:
    """The share of the damage on a text that the rotation undoes, against the row of `not_rotated`."""
    plain = not_rotated(row, rows)
    baseline = None if plain is None else plain.perplexity(text)
    return gap_closed(row.dense[text], baseline, row.perplexity(text))


def columns(row: Row, rows: Sequence[Row], fields: Sequence[str]) -> dict[str, Any]:
    """Heading → value of a row, in plain types; None where there is no value."""
    found: dict[str, Any] = {"cell": row.key, **{name: row.cell.value(name) for name in fields}}
    for text, dense in row.dense.items():
        found |= {
            f"perplexity {text}": row.perplexity(text),
            f"dense {text}": dense,
            f"gap closed {text}": row_gap_closed(row, rows, text),
        }
    for task, dense in row.dense_accuracy.items():
        found |= {f"accuracy {task}": row.record["accuracy"][task], f"dense accuracy {task}": dense}
    return found | {name: row.record[name] for name in COLUMNS}


def write_csv(
    file: Path, fields: Sequence[str], rows: Sequence[Row], skipped: Sequence[Skipped] = ()
) -> None:
    """Writes a line for each row, and for each skipped combination, with the reason in the last column.

    Raises WriteError if writing fails. An empty field is a figure that the cell does not have.
    """
    content = [columns(row, rows, fields) for row in rows]
    with new_file(file) as part, part.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, [*content[0], "skipped"])
        writer.writeheader()
        writer.writerows(content)
        writer.writerows({"cell": f"({each.label})", "skipped": each.reason} for each in skipped)
