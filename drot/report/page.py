"""The page: one HTML file that needs no other file and loads nothing."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drot.core.version import __version__
from drot.report import notes, tables
from drot.report.drawing import COLOURS, Chart
from drot.report.evaluations import Measured, measurements
from drot.report.reading import Run

TEMPLATES = Path(__file__).parent / "templates"


def page(
    runs: Sequence[Run], charts: Sequence[Chart], linears: Mapping[str, Sequence[Chart]], left_out: str
) -> str:
    """The HTML of a report.

    Names and texts from the manifests are escaped, and the page's policy lets the browser load nothing and
    run no script but the page's own.

    Args:
        runs: the runs; several are compared.
        charts: the charts of the run, or of the comparison.
        linears: name of a linear → its charts, of one run.
        left_out: a sentence on linears that are not shown; may be empty.
    """
    measured = [measurements(run, list(runs)) for run in runs]
    words = [
        {
            "name": run.name if len(runs) > 1 else "",
            "summary": notes.summary(run, entries),
            "unusual": notes.unusual(run, entries),
        }
        for run, entries in zip(runs, measured, strict=True)
    ]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        **(_of_one(runs[0], measured[0]) if len(runs) == 1 else _of_several(runs, measured)),
        words=words,
        version=__version__,
        colours=COLOURS,
        rules=list(notes.RULES),
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=Markup(f"'sha256-{digest}'"),
        charts=charts,
        linears=linears,
        left_out=left_out,
    )


def _of_one(run: Run, measured: list[Measured]) -> dict[str, Any]:
    """The title and the tables of a page on one run."""
    base = run.manifest.base_model
    base = Path(base).name if Path(base).is_absolute() else base  # the table has the path
    makers = (tables.layer_table, tables.linear_table, tables.recipe_table, tables.machine_table)
    return {
        "title": f"{run.name}: report of a pruned model",
        "lead": f"{base}, pruned by drot {run.manifest.versions.get('drot')}",
        "lost": tables.lost_table(run, measured),
        "compared": None,
        "tables": [maker(run) for maker in makers],
    }


def _of_several(runs: Sequence[Run], measured: list[list[Measured]]) -> dict[str, Any]:
    """The title and the tables of a page that compares runs."""
    found = [(run, maker(run)) for run in runs for maker in (tables.recipe_table, tables.machine_table)]
    return {
        "title": f"Comparison of {len(runs)} pruned models",
        "lead": ", ".join(run.name for run in runs),
        "lost": None,
        "compared": tables.comparison(runs, measured),
        "tables": [replace(table, caption=f"{run.name}: {table.caption}") for run, table in found],
    }
