"""A chart of each of the paper's ablations."""

from collections.abc import Sequence
from pathlib import Path

from drot.core.files import writing
from drot.report.drawing import LIGHT, SERIES, Chart, axes, legend
from drot.sweep.tables import PaperTable

#: height of a panel in pixels
PANEL = 190


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
