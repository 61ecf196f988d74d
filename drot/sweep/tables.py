"""The paper's three ablations, as tables and charts of the rows that a sweep has.

They are those of the paper's sections 'Effectiveness of Entropy Reduction on Pruning Robustness',
'Hyperparameter Sensitivity Analysis' and 'Trade-off with Block Diagonal Orthogonal Matrices'.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drot.config.recipe import SECTION_OF
from drot.core.files import new_file, writing
from drot.manifest.tables import Table, number
from drot.reporting.drawing import LIGHT, SERIES, Chart, axes, legend
from drot.sweep.grid import Skipped
from drot.sweep.rows import Row, not_rotated, short_names

#: height of a panel of a chart in pixels
PANEL = 190
STAR = "\\* without the training of the rotation, which another cell did"
#: name of an ablation → its title, the x axis of its chart, and the fields whose values make its rows; the
#: first field is the x axis, and each value of the second is a curve
ABLATIONS = {
    "entropy": ("Entropy and pruning robustness", "steps of the training", ("steps",)),
    "steps-lr": ("Steps and learning rate", "steps of the training", ("steps", "lr")),
    "blocks": ("Block-diagonal rotations", "diagonal blocks of R1", ("blocks",)),
}


#: axis label → curve → value on the x axis, as text → figure
Panels = dict[str, dict[str, dict[str, float]]]


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
    table: Table
    panels: Panels


def paper_tables(rows: Sequence[Row], fields: Sequence[str]) -> list[PaperTable]:
    """The tables for which there are rows: at least two values of each field of the ablation.

    Rows of a table differ in the fields of the ablation only; other rows make further tables.

    fields: the fields that the grid varies.
    """
    tables: list[PaperTable] = []
    for name, (title, x, own) in ABLATIONS.items():
        groups = (group for group in _groups(rows, own) if all(_varies(group, field) for field in own))
        for count, group in enumerate(groups, 1):
            settings = group[0].cell.label(tuple(field for field in fields if field not in own))
            plain = not_rotated(group[0], rows) if own == ("steps",) else None
            content = _content(own, group, plain)
            tables.append(PaperTable(name if count == 1 else f"{name}-{count}", title, settings, x, *content))
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


def _varies(group: list[Row], field: str) -> bool:
    return len({str(row.cell.value(field)) for row in group}) > 1


def _sortable(value: Any) -> tuple[int, list[float]]:
    """A key that puts numbers in their order, and lists behind them."""
    return (1, value) if isinstance(value, list) else (0, [value])


def _content(own: tuple[str, ...], group: list[Row], plain: Row | None) -> tuple[Table, Panels]:
    """The table of a group, and the panels of its chart.

    plain: the recipe without a rotation, which is the row of step 0; None leaves this row out.
    """
    rows: list[dict[str, str]] = []
    panels: Panels = {}

    def add(keys: dict[str, str], row: Row, entropy: float | None) -> None:
        x, curve = keys[own[0]], ", ".join(f"{field} {keys[field]}" for field in own[1:]) or "pruned"
        measures = _measures(row)
        rows.append(
            keys
            | {name: number(value, form) for name, (value, _, form) in measures.items()}
            | {"entropy": number(entropy, ".0f"), "time (s)": row.seconds}
            | {"time of a step (s)": number(row.record["seconds_per_step"], ".4f")}
        )
        for name, (value, dense, _) in (measures | {"entropy": (entropy, None, "")}).items():
            for label, figure in ((curve, value), ("dense", dense)):
                if figure is not None:
                    panels.setdefault(name, {}).setdefault(label, {})[x] = figure

    if plain is not None and group[0].cell.value("steps") != 0:
        add({"steps": "0"}, plain, group[0].record["entropy_before"])
    for row in group:
        add({field: str(row.cell.value(field)) for field in own}, row, row.record["entropy_after"])
    return Table("", rows), panels


def _measures(row: Row) -> dict[str, tuple[float | None, float | None, str]]:
    """Perplexity of each text, and the mean accuracy: heading → figure, that of the dense model, format."""
    names = short_names(row.dense)
    found: dict[str, tuple[float | None, float | None, str]] = {
        f"perplexity {names[text]}": (row.perplexity(text), dense, ".3f") for text, dense in row.dense.items()
    }
    if row.dense_accuracy:
        found["mean accuracy"] = (row.mean_accuracy, row.dense_mean_accuracy, ".2%")
    return found


def chart_of(table: PaperTable) -> Chart:
    """The chart of a table: a panel for each of its figures. Values on the x axis are spaced evenly."""
    places = list(
        dict.fromkeys(x for panel in table.panels.values() for curve in panel.values() for x in curve)
    )
    with axes(PANEL * len(table.panels) + 40, len(table.panels), squeeze=False, sharex=True) as (
        figure,
        grid,
    ):
        panels = [row[0] for row in grid]
        for axis, (label, curves) in zip(panels, table.panels.items(), strict=True):
            for number, (name, curve) in enumerate(curves.items()):
                colour, dash, marker = SERIES[number % len(SERIES)]
                if name == "dense":
                    colour, dash, marker = LIGHT["muted"], (0, (1, 2)), ""
                x = [places.index(value) for value in curve]
                axis.plot(x, list(curve.values()), color=colour, linestyle=dash, marker=marker, label=name)
            axis.set(ylabel=label)
            axis.set_xticks(range(len(places)), places)
        panels[0].set_title(table.title)
        panels[-1].set_xlabel(table.x)
        legend(figure, max(panels, key=lambda axis: len(axis.lines)))
    caption = f"{table.title}: {', '.join(table.panels)} over the {table.x}."
    return Chart(table.name, caption, figure)


def save_charts(tables: Sequence[PaperTable], folder: Path) -> list[Path]:
    """Writes the chart of each table as .svg and .png; returns the files. Raises WriteError if that fails."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return [file for table in tables for file in chart_of(table).save(folder)]


def write_tables(
    file: Path, model: str, tables: Sequence[PaperTable], skipped: Sequence[Skipped], plots: Sequence[Path]
) -> None:
    """Writes the tables, with their charts, and the skipped combinations as Markdown.

    Raises WriteError if writing fails.
    """
    lines = [f"# The paper's ablations, for {model}", ""]
    images = {plot.stem: plot for plot in plots if plot.suffix == ".svg"}
    for title, _, own in ABLATIONS.values():
        lines += [f"## {title}", ""]
        found = [paper for paper in tables if paper.title == title]
        if not found:
            lines += [f"Not in this sweep: it needs at least two values of {' and of '.join(own)}.", ""]
        for paper in found:
            headings, cells = paper.table.headings, paper.table.cells
            lines += [paper.settings, ""] if paper.settings else []
            lines += [_line(headings), _line(["---:"] * len(headings)), *map(_line, cells), ""]
            if any(cell.endswith("*") for row in cells for cell in row):
                lines += [STAR, ""]
            if paper.name in images:
                lines += [f"![{title}]({images[paper.name].relative_to(file.parent).as_posix()})", ""]
    if skipped:
        lines += ["## Not run", "", *(f"- {each.label}: {each.reason}" for each in skipped), ""]
    with new_file(file) as part:
        part.write_text("\n".join(lines), encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
