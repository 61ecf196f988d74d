"""The rows of a sweep, and its CSV file."""

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drot.core.files import new_file
from drot.evaluation.gap import gap_closed
from drot.sweep.grid import Cell, Skipped

#: columns that follow the perplexities and accuracies. None has the name of a recipe's field.
COLUMNS = (
    *("entropy_before", "entropy_after", "removed_importance_before", "removed_importance_after"),
    *("zeros", "seconds", "seconds_per_step", "trained_by"),
)


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

    @property
    def seconds(self) -> str:
        """The time of the run; with a star if another cell trained the rotations."""
        elsewhere = self.record["trained_by"] not in (None, self.key)
        return f"{self.record['seconds']:.1f}" + "*" * elsewhere

    def perplexity(self, text: str) -> float | None:
        """The perplexity on a text; None if it is not finite."""
        value: float | None = self.record["perplexity"][text]
        return value

    @property
    def mean_accuracy(self) -> float | None:
        """The mean accuracy of all tasks; None without tasks, and if the logits are not finite."""
        values = self.record["accuracy"].values()
        return statistics.fmean(values) if values and None not in values else None

    @property
    def dense_mean_accuracy(self) -> float | None:
        return statistics.fmean(self.dense_accuracy.values()) if self.dense_accuracy else None


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """Text → its name without the folder, or the whole of it where two texts have the same name."""
    names = {text: Path(text).name for text in texts}
    counts = Counter(names.values())
    return {text: name if counts[name] == 1 else text for text, name in names.items()}


def not_rotated(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the same recipe without a rotation; None without one, and for a row that is not rotated."""
    own = row.cell.recipe
    for other in rows:
        recipe = other.cell.recipe
        same = (recipe.pruning, recipe.recovery, recipe.calibration) == (
            own.pruning, own.recovery, own.calibration,
        )  # fmt: skip
        if row.rotated and not other.rotated and same:
            return other
    return None


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
