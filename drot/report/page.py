"""The page: one HTML file that needs no other file and loads nothing."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drot.core.version import __version__
from drot.report import notes, tables
from drot.report.charts import charts_of
from drot.report.comparison import charts_of_several
from drot.report.drawing import COLOURS, Chart, data_uri
from drot.report.evaluations import measurements
from drot.report.importance import figure2, surface, surface_image
from drot.report.reading import Run

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Picture:
    """A chart in the page, as an inline `svg` or as an `image`, a data URI; the other is empty."""

    caption: str
    svg: str
    image: str


def page(runs: Sequence[Run], drawn: Sequence[Chart], linears: dict[str, list[Chart]], left_out: str) -> str:
    """The HTML of a report.

    Names and texts from the manifests are escaped, and the page's policy lets the browser load nothing and
    run no script but the page's own.

    Args:
        runs: the runs; several are compared.
        drawn: the charts of the run, or of the comparison.
        linears: name of a linear → its charts, of one run.
        left_out: a sentence on linears that are not shown; may be empty.
    """
    everyone = list(runs)
    measured = [measurements(run, everyone) for run in runs]
    words = [
        {
            "name": run.name if len(runs) > 1 else "",
            "summary": notes.summary(run, entries),
            "unusual": notes.unusual(run, entries),
        }
        for run, entries in zip(runs, measured, strict=True)
    ]
    context: dict[str, Any] = {"words": words, "lost": None, "compared": None, "tables": []}
    if len(runs) == 1:
        (run,) = runs
        context["title"] = f"{run.name}: report of a pruned model"
        base = str(run.manifest["base_model"])
        base = Path(base).name if Path(base).is_absolute() else base  # the table has the path
        context["lead"] = f"{base}, pruned by drot {run.manifest['versions']['drot']}"
        context["lost"] = tables.lost_table(run, measured[0])
        makers = (tables.layer_table, tables.linear_table, tables.recipe_table, tables.machine_table)
        context["tables"] = [maker(run) for maker in makers]
    else:
        context["title"] = f"Comparison of {len(runs)} pruned models"
        context["lead"] = ", ".join(run.name for run in runs)
        context["compared"] = tables.comparison(runs, measured)
        for run in runs:
            for table in (tables.recipe_table(run), tables.machine_table(run)):
                context["tables"].append(
                    tables.Table(f"{run.name}: {table.caption}", table.headings, table.rows)
                )
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        **context,
        version=__version__,
        colours=COLOURS,
        rules=notes.RULES_IN_WORDS,
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=Markup(f"'sha256-{digest}'"),
        charts=[inline(chart) for chart in drawn],
        linears=[
            {"name": name, "charts": [inline(chart) for chart in drawings]}
            for name, drawings in linears.items()
        ],
        left_out=left_out,
    )


def inline(chart: Chart) -> Picture:
    """A chart for the page: as SVG, or as an image for a surface, whose SVG is large."""
    if chart.name.endswith("-surface"):
        return Picture(chart.caption, "", data_uri(surface_image(chart), "webp"))
    return Picture(chart.caption, Markup(chart.svg()), "")


def charts_for(runs: Sequence[Run]) -> list[Chart]:
    """The charts of one run, or of several over each other."""
    return charts_of(runs[0]) if len(runs) == 1 else charts_of_several(runs)


def linear_charts(run: Run, linear: str) -> list[Chart]:
    """The charts of one linear."""
    heat, counts = figure2(run, linear)
    return [heat, surface(run, linear), counts]
