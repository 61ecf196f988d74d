"""The paper's three ablations, as tables of the rows that a sweep has.

They are those of the paper's sections 'Effectiveness of Entropy Reduction on Pruning Robustness',
'Hyperparameter Sensitivity Analysis' and 'Trade-off with Block Diagonal Orthogonal Matrices'. The columns of
the accuracy are left out if the grid has no tasks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drot.config.recipe import SECTION_OF
from drot.core.files import new_file
from drot.sweep.grid import Skipped
from drot.sweep.rows import Row, not_rotated, short_names

#: axis label → curve → value on the x axis, as text → figure
Panels = dict[str, dict[str, dict[str, float]]]
#: heading of the mean accuracy of all tasks, which the paper's tables give as zero-shot accuracy
ACCURACY = "mean accuracy (%)"
STAR = "\\* without the training of the rotation, which another cell did"


#: label of the x axis, headings and lines of a table as text, and the curves of its chart
Content = tuple[str, list[str], list[list[str]], Panels]


@dataclass(frozen=True)
class PaperTable:
    """A table, and the curves of its chart.

    name: name of the ablation, with a number from its second table on; names the files of the chart.
    title: title of the ablation.
    settings: the varied fields that all cells of the table have in common, with their values.
    x: label of the x axis.
    """

    name: str
    title: str
    settings: str
    x: str
    header: list[str]
    lines: list[list[str]]
    panels: Panels


def paper_tables(rows: Sequence[Row], fields: Sequence[str]) -> list[PaperTable]:
    """The tables for which there are rows: at least two values of each field of the ablation.

    Rows of a table differ in the fields of the ablation only; other rows make further tables.

    fields: the fields that the grid varies.
    """
    tables: list[PaperTable] = []
    for ablation, (title, own, content_of) in ABLATIONS.items():
        number = 0
        for group in _groups(rows, own):
            if any(len({str(row.cell.value(name)) for row in group}) < 2 for name in own):
                continue
            number += 1
            name = ablation if number == 1 else f"{ablation}-{number}"
            settings = group[0].cell.label(tuple(field for field in fields if field not in own))
            content = content_of(group, not_rotated(group[0], rows))
            tables.append(PaperTable(name, title, settings, *content))
    return tables


def _groups(rows: Sequence[Row], own: tuple[str, ...]) -> Iterator[list[Row]]:
    """The rotated rows that are equal but for the fields `own`, by which they are sorted."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        settings = row.cell.resolved.to_dict()
        for name in own:
            del settings[SECTION_OF[name]][name]
        if row.rotated:
            groups.setdefault(json.dumps(settings), []).append(row)
    for group in groups.values():
        yield sorted(group, key=lambda row: [_sortable(row.cell.value(name)) for name in own])


def _sortable(value: Any) -> tuple[int, list[float]]:
    """A key that puts numbers in their order, and lists behind them."""
    return (1, value) if isinstance(value, list) else (0, [value])


def _entropy_table(group: list[Row], plain: Row | None) -> Content:
    """Steps → entropy, time and measures. `plain`, the recipe without a rotation, is the row of step 0."""
    steps = {str(row.cell.value("steps")): row for row in group}
    entropies = {step: row.record["entropy_after"] for step, row in steps.items()}
    if plain is not None and "0" not in steps:
        steps = {"0": plain} | steps
        entropies = {"0": group[0].record["entropy_before"]} | entropies
    header = ["step", "entropy", "time (s)", *_measures(group[0])]
    lines = [
        [step, _number(entropies[step], 0), row.seconds, *_measures(row).values()]
        for step, row in steps.items()
    ]
    return "steps of the training", header, lines, _entropy_panel(entropies) | _panels(steps)


def _block_table(group: list[Row], plain: Row | None) -> Content:
    """Number of blocks → measures, time of a step and entropy."""
    blocks = {str(row.cell.value("blocks")): row for row in group}
    entropies = {name: row.record["entropy_after"] for name, row in blocks.items()}
    header = ["blocks", *_measures(group[0]), "time of a step (s)", "entropy"]
    lines = [
        [
            name,
            *_measures(row).values(),
            _number(row.record["seconds_per_step"], 4),
            _number(entropies[name], 0),
        ]
        for name, row in blocks.items()
    ]
    return "diagonal blocks of R1", header, lines, _panels(blocks) | _entropy_panel(entropies)


def _rate_table(group: list[Row], plain: Row | None) -> Content:
    """Steps × learning rate → measures."""
    found = {(row.cell.value("steps"), row.cell.value("lr")): row for row in group}
    steps, rates = sorted({step for step, _ in found}), sorted({rate for _, rate in found}, reverse=True)
    measures = list(_measures(group[0]))
    header = ["steps", *(f"lr {rate:g}, {measure}" for rate in rates for measure in measures)]
    lines = []
    for step in steps:
        of_rates = [found.get((step, rate)) for rate in rates]
        cells = [_measures(row).values() if row else ["-"] * len(measures) for row in of_rates]
        lines.append([str(step), *(cell for each in cells for cell in each)])
    panels: Panels = {}
    for text, name in short_names(group[0].dense).items():
        curves = {
            f"lr {rate:g}": {str(s): found[s, rate].perplexity(text) for s in steps if (s, rate) in found}
            for rate in rates
        }
        dense = dict.fromkeys(map(str, steps), group[0].dense[text])
        panels[f"perplexity {name}"] = {rate: _known(curve) for rate, curve in curves.items()} | {
            "dense": dense
        }
    return "steps of the training", header, lines, panels


#: name of an ablation → its title, the fields whose values make its rows and columns, and its table
ABLATIONS = {
    "entropy": ("Entropy and pruning robustness", ("steps",), _entropy_table),
    "steps-lr": ("Steps and learning rate", ("steps", "lr"), _rate_table),
    "blocks": ("Block-diagonal rotations", ("blocks",), _block_table),
}


def _measures(row: Row) -> dict[str, str]:
    """Heading → perplexity of each text, and the mean accuracy."""
    names = short_names(row.dense)
    found = {f"perplexity {names[text]}": _number(row.perplexity(text), 3) for text in row.dense}
    if row.dense_accuracy:
        mean = row.mean_accuracy
        found[ACCURACY] = _number(None if mean is None else 100 * mean, 2)
    return found


def _panels(rows: Mapping[str, Row]) -> Panels:
    """A panel for each measure, with the figures of `rows`, x → row, and of the dense model."""
    first = next(iter(rows.values()))
    names = short_names(first.dense)
    panels: Panels = {
        f"perplexity {names[text]}": {
            "pruned": _known({x: row.perplexity(text) for x, row in rows.items()}),
            "dense": dict.fromkeys(rows, dense),
        }
        for text, dense in first.dense.items()
    }
    if (mean := first.dense_mean_accuracy) is not None:
        pruned = _known({x: row.mean_accuracy for x, row in rows.items()})
        panels["mean accuracy"] = {"pruned": pruned, "dense": dict.fromkeys(rows, mean)}
    return panels


def _entropy_panel(entropies: Mapping[str, float | None]) -> Panels:
    return {"entropy": {"entropy of a layer": _known(entropies)}}


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {x: value for x, value in figures.items() if value is not None}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def write_tables(
    file: Path, model: str, tables: Sequence[PaperTable], skipped: Sequence[Skipped], plots: Sequence[Path]
) -> None:
    """Writes the tables, with their charts, and the skipped combinations as Markdown.

    Raises WriteError if writing fails.
    """
    lines = [f"# The paper's ablations, for {model}", ""]
    images = {plot.stem: plot for plot in plots if plot.suffix == ".svg"}
    for title, own, _ in ABLATIONS.values():
        lines += [f"## {title}", ""]
        found = [table for table in tables if table.title == title]
        if not found:
            lines += [f"Not in this sweep: it needs at least two values of {' and of '.join(own)}.", ""]
        for table in found:
            lines += [table.settings, ""] if table.settings else []
            lines += [_line(table.header), _line(["---:"] * len(table.header)), *map(_line, table.lines), ""]
            if any(cell.endswith("*") for line in table.lines for cell in line):
                lines += [STAR, ""]
            if table.name in images:
                lines += [f"![{title}]({images[table.name].relative_to(file.parent).as_posix()})", ""]
    if skipped:
        lines += ["## Not run", "", *(f"- {each.label}: {each.reason}" for each in skipped), ""]
    with new_file(file) as part:
        part.write_text("\n".join(lines), encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
