"""The rows of a sweep, and its CSV file."""

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drot.core.files import new_file
from drot.evaluation.record import gap_closed
from drot.sweep.grid import Cell, Skipped

#: Figures of a cell (figures.py) that have a column of their own. None has the name of a recipe's field.
FIGURES = (
    "entropy_before",
    "entropy_after",
    "removed_importance_before",
    "removed_importance_after",
    "zeros",
    "seconds",
    "seconds_per_step",
    "trained_by",
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
    dense_accuracy: dict[str, float] = field(default_factory=dict)

    @property
    def rotated(self) -> bool:
        return self.cell.recipe.rotation.mode != "none"

    @property
    def trained_elsewhere(self) -> bool:
        """Whether another cell trained the rotations, so that `seconds` does not contain their training."""
        return self.record["trained_by"] not in (None, self.key)

    def perplexity(self, text: str) -> float | None:
        """The perplexity on a text; None if it is not finite."""
        value: float | None = self.record["perplexity"][text]
        return value

    def accuracy(self, task: str) -> float | None:
        """The accuracy in a task, in [0, 1]; None if the logits are not finite."""
        value: float | None = self.record["accuracy"][task]
        return value

    @property
    def mean_accuracy(self) -> float | None:
        """The mean accuracy of all tasks; None without tasks, and if the logits are not finite."""
        return _mean([self.accuracy(task) for task in self.dense_accuracy])

    @property
    def dense_mean_accuracy(self) -> float | None:
        """The mean accuracy of the dense model; None without tasks."""
        return _mean([*self.dense_accuracy.values()])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """Text → its name without the folder, or the whole of it where two texts have the same name."""
    names = {text: Path(text).name for text in texts}
    counts = Counter(names.values())
    return {text: name if counts[name] == 1 else text for text, name in names.items()}


def not_rotated(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the same recipe without a rotation; None without one, and for a row that is not rotated."""
    recipe = row.cell.recipe
    for other in rows:
        of_other = other.cell.recipe
        if row.rotated and not other.rotated and (
            (of_other.pruning, of_other.recovery, of_other.calibration)
            == (recipe.pruning, recipe.recovery, recipe.calibration)
        ):  # fmt: skip
            return other
    return None


def gap_closed_on(row: Row, rows: Sequence[Row], text: str) -> float | None:
    """The share of the damage that the rotation undoes, beside the row of `not_rotated`; None without it."""
    other = not_rotated(row, rows)
    plain = None if other is None else other.perplexity(text)
    return gap_closed(row.dense[text], plain, row.perplexity(text))


def columns(row: Row, rows: Sequence[Row], fields: Sequence[str]) -> dict[str, Any]:
    """Heading → value of a row, in plain types; None where there is no value."""
    found: dict[str, Any] = {"cell": row.key, **{name: row.cell.value(name) for name in fields}}
    for text, dense in row.dense.items():
        found |= {
            f"perplexity {text}": row.perplexity(text),
            f"dense {text}": dense,
            f"gap closed {text}": gap_closed_on(row, rows, text),
        }
    for task, accuracy in row.dense_accuracy.items():
        found |= {f"accuracy {task}": row.accuracy(task), f"dense accuracy {task}": accuracy}
    return found | {name: row.record[name] for name in FIGURES}


def write_csv(
    file: Path, fields: Sequence[str], rows: Sequence[Row], skipped: Sequence[Skipped] = ()
) -> None:
    """Writes a line for each row, and for each skipped combination, with the reason in the last column.

    Raises WriteError if writing fails. An empty field is a figure that the cell does not have.
    """
    content = [columns(row, rows, fields) for row in rows]
    headings = [*content[0], "skipped"]
    with new_file(file) as part, part.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, headings)
        writer.writeheader()
        writer.writerows(content)
        writer.writerows({"cell": f"({each.label})", "skipped": each.reason} for each in skipped)
