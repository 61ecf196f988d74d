"""The paper's three ablations, as tables of the rows that a sweep has.

They are those of the paper's sections 'Effectiveness of Entropy Reduction on Pruning Robustness',
'Hyperparameter Sensitivity Analysis' and 'Trade-off with Block Diagonal Orthogonal Matrices'. The columns of
the accuracy are left out if the grid has no tasks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drot.config.recipe import SECTION_OF
from drot.core.files import new_file
from drot.sweep.grid import Skipped
from drot.sweep.rows import Row, not_rotated, short_names

#: axis label → curve → value on the x axis, as text → figure
Panels = dict[str, dict[str, dict[str, float]]]
#: name of an ablation → its title, and the fields whose values make its rows and columns
ABLATIONS = {
    "entropy": ("Entropy and pruning robustness", ("steps",)),
    "steps-lr": ("Steps and learning rate", ("steps", "lr")),
    "blocks": ("Block-diagonal rotations", ("blocks",)),
}
#: heading of the mean accuracy of all tasks, which the paper's tables give as zero-shot accuracy
ACCURACY = "mean accuracy (%)"
STAR = "\\* without the training of the rotation, which another cell did"


@dataclass(frozen=True)
class PaperTable:
    """A table, and the curves of its chart.

    Args:
        ablation: a name of ABLATIONS.
        number: 1 for the first table of the ablation; the next number for another.
        settings: the varied fields that all cells of the table have in common, with their values.
        x: label of the x axis.
        header: headings of the columns.
        lines: the cells of the table, as text.
        panels: the curves.
    """

    ablation: str
    number: int
    settings: str
    x: str
    header: list[str]
    lines: list[list[str]]
    panels: Panels = field(default_factory=dict)

    @property
    def title(self) -> str:
        return ABLATIONS[self.ablation][0]

    @property
    def name(self) -> str:
        """The name of the files of its chart."""
        return self.ablation if self.number == 1 else f"{self.ablation}-{self.number}"


def paper_tables(rows: Sequence[Row], fields: Sequence[str]) -> list[PaperTable]:
    """The tables for which there are rows: at least two values of each field of the ablation.

    Rows of a table differ in the fields of the ablation only; other rows make further tables.

    fields: the fields that the grid varies.
    """
    makers = {"entropy": _entropy_table, "steps-lr": _rate_table, "blocks": _block_table}
    tables: list[PaperTable] = []
    for ablation, (_, own) in ABLATIONS.items():
        number = 0
        for group in _groups(rows, own):
            if any(len({str(row.cell.value(name)) for row in group}) < 2 for name in own):
                continue
            number += 1
            others = tuple(name for name in fields if name not in own)
            x, header, lines, panels = makers[ablation](group, rows)
            settings = group[0].cell.label(others)
            tables.append(PaperTable(ablation, number, settings, x, header, lines, panels))
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


Made = tuple[str, list[str], list[list[str]], Panels]


def _entropy_table(group: list[Row], rows: Sequence[Row]) -> Made:
    """Steps → entropy, time and perplexity. The row of step 0 is the same recipe without a rotation."""
    texts = short_names(group[0].dense)
    tasks = [ACCURACY] if group[0].dense_accuracy else []
    header = ["step", "entropy", "time (s)", *(f"perplexity {name}" for name in texts.values()), *tasks]
    plain = not_rotated(group[0], rows)
    steps = {str(row.cell.value("steps")): row for row in group}
    entropies = {step: row.record["entropy_after"] for step, row in steps.items()}
    if plain is not None and "0" not in steps:
        steps = {"0": plain} | steps
        entropies = {"0": group[0].record["entropy_before"]} | entropies
    lines = [
        [
            step,
            _number(entropies[step], 0),
            _time(row),
            *(_number(row.perplexity(text), 3) for text in texts),
            *(_percent(row.mean_accuracy) for _ in tasks),
        ]
        for step, row in steps.items()
    ]
    panels = {"entropy": {"entropy of a layer": _known(entropies)}} | _perplexity_panels(steps)
    return "steps of the training", header, lines, panels


def _rate_table(group: list[Row], rows: Sequence[Row]) -> Made:
    """Steps × learning rate → perplexity."""
    texts = short_names(group[0].dense)
    rates = list(
        dict.fromkeys(row.cell.value("lr") for row in sorted(group, key=lambda r: -r.cell.value("lr")))
    )
    by_place = {(row.cell.value("steps"), row.cell.value("lr")): row for row in group}
    steps = sorted({step for step, _ in by_place})
    tasks = [ACCURACY] if group[0].dense_accuracy else []
    figures = [*(f"perplexity {name}" for name in texts.values()), *tasks]
    header = ["steps", *(f"lr {rate:g}, {figure}" for rate in rates for figure in figures)]
    lines = []
    for step in steps:
        lines.append([str(step)])
        for rate in rates:
            if (row := by_place.get((step, rate))) is None:
                lines[-1] += ["-"] * len(figures)
                continue
            lines[-1] += [_number(row.perplexity(text), 3) for text in texts]
            lines[-1] += [_percent(row.mean_accuracy) for _ in tasks]
    panels: Panels = {}
    for text, name in texts.items():
        curves = {
            f"lr {rate:g}": _known(
                {
                    str(step): row.perplexity(text) if (row := by_place.get((step, rate))) else None
                    for step in steps
                }
            )
            for rate in rates
        }
        panels[f"perplexity {name}"] = curves | {
            "dense": dict.fromkeys(map(str, steps), group[0].dense[text])
        }
    return "steps of the training", header, lines, panels


def _block_table(group: list[Row], rows: Sequence[Row]) -> Made:
    """Number of blocks → perplexity, time of a step and entropy."""
    texts = short_names(group[0].dense)
    tasks = [ACCURACY] if group[0].dense_accuracy else []
    perplexities = [f"perplexity {name}" for name in texts.values()]
    header = ["blocks", *perplexities, *tasks, "time of a step (s)", "entropy"]
    blocks = {str(row.cell.value("blocks")): row for row in group}
    entropies = {name: row.record["entropy_after"] for name, row in blocks.items()}
    lines = [
        [
            name,
            *(_number(row.perplexity(text), 3) for text in texts),
            *(_percent(row.mean_accuracy) for _ in tasks),
            _number(row.record["seconds_per_step"], 4),
            _number(entropies[name], 0),
        ]
        for name, row in blocks.items()
    ]
    panels = _perplexity_panels(blocks) | {"entropy": {"entropy of a layer": _known(entropies)}}
    return "diagonal blocks of R1", header, lines, panels


def _perplexity_panels(rows: dict[str, Row]) -> Panels:
    """A panel for each text, with the perplexity of `rows`, x → row, and of the dense model."""
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
        panels["mean accuracy"] = {
            "pruned": _known({x: row.mean_accuracy for x, row in rows.items()}),
            "dense": dict.fromkeys(rows, mean),
        }
    return panels


def _known(figures: dict[str, float | None]) -> dict[str, float]:
    return {x: value for x, value in figures.items() if value is not None}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _time(row: Row) -> str:
    return f"{row.record['seconds']:.1f}" + "*" * row.trained_elsewhere


def write_tables(
    file: Path, model: str, tables: Sequence[PaperTable], skipped: Sequence[Skipped], plots: Sequence[Path]
) -> None:
    """Writes the tables and the skipped combinations as Markdown. Raises WriteError if writing fails.

    Args:
        file: the file to write.
        model: the model of the sweep, for the title.
        tables: the tables.
        skipped: the combinations that were not run.
        plots: the files of the charts.
    """
    lines = [f"# The paper's ablations, for {model}", ""]
    images = {plot.stem: plot for plot in plots if plot.suffix == ".svg"}
    for ablation, (title, own) in ABLATIONS.items():
        lines += [f"## {title}", ""]
        found = [table for table in tables if table.ablation == ablation]
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
