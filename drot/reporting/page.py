"""The page: one HTML file that needs no other file and loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drot.checkpoint.tables import short
from drot.core.version import __version__
from drot.reporting import notes, tables
from drot.reporting.drawing import Chart
from drot.reporting.runs import Run, measurements

TEMPLATES = Path(__file__).parent / "templates"


def page(run: Run, charts: Sequence[Chart], linears: Mapping[str, Sequence[Chart]], about: str) -> str:
    """The HTML of the report on a run.

    Names and texts from the manifest are escaped, and the page's policy lets the browser load nothing and run
    no script.

    Args:
        run: the run.
        charts: its charts.
        linears: name of a linear → its charts. The page shows the first.
        about: a sentence on the linears; may be empty.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    measured = measurements(run)
    unusual = notes.unusual(run, measured)
    return environment.get_template("page.html").render(
        name=run.name,
        lead=f"{short(run.manifest.base_model)}, pruned by drot {run.manifest.versions.get('drot')}",
        summary=notes.summary(run, measured),
        verdict=notes.verdict(run, measured, unusual),
        unusual=unusual,
        lost=tables.lost_table(run, measured),
        tables=tables.run_tables(run),
        version=__version__,
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        charts=charts,
        linears=linears,
        about=about,
    )
