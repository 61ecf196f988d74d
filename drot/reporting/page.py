"""The page: one HTML file that needs no other file and loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drot.core.version import __version__
from drot.manifest.tables import short
from drot.reporting import notes, tables
from drot.reporting.drawing import Chart
from drot.reporting.runs import Measured, Run

TEMPLATES = Path(__file__).parent / "templates"


def page(
    runs: Sequence[Run],
    measured: Sequence[Sequence[Measured]],
    charts: Sequence[Chart],
    linears: Mapping[str, Sequence[Chart]],
    about: str,
) -> str:
    """The HTML of a report.

    Names and texts from the manifests are escaped, and the page's policy lets the browser load nothing and
    run no script.

    Args:
        runs: the runs; several are compared.
        measured: the evaluations of each run.
        charts: the charts of the run, or of the comparison.
        linears: name of a linear → its charts, of one run. The page shows the first.
        about: sentences on the linears: why the first is shown, and which are left out; may be empty.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    manifest = runs[0].manifest
    lead = f"{short(manifest.base_model)}, pruned by drot {manifest.versions.get('drot')}"
    return environment.get_template("page.html").render(
        runs=[
            {
                "name": run.name,
                "summary": notes.summary(run, entries),
                "verdict": notes.verdict(run, entries, lines := notes.unusual(run, entries)),
                "unusual": lines,
                "tables": tables.run_tables(run),
            }
            for run, entries in zip(runs, measured, strict=True)
        ],
        lead=lead if len(runs) == 1 else ", ".join(run.name for run in runs),
        lost=tables.lost_table(runs[0], measured[0]) if len(runs) == 1 else None,
        compared=tables.comparison(runs, measured) if len(runs) > 1 else None,
        version=__version__,
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        charts=charts,
        linears=linears,
        about=about,
    )
