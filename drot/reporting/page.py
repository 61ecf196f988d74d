"""The page: one HTML file that needs no other file and loads nothing."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drot.core.version import __version__
from drot.manifest.tables import short
from drot.reporting import notes, tables
from drot.reporting.drawing import COLOURS, Chart
from drot.reporting.evaluations import Measured
from drot.reporting.reading import Run

TEMPLATES = Path(__file__).parent / "templates"


def page(
    runs: Sequence[Run],
    measured: Sequence[Sequence[Measured]],
    perplexities: Sequence[Chart],
    charts: Sequence[Chart],
    linears: Mapping[str, Sequence[Chart]],
    about: str,
) -> str:
    """The HTML of a report.

    Names and texts from the manifests are escaped, and the page's policy lets the browser load nothing and
    run no script but the page's own.

    Args:
        runs: the runs; several are compared.
        measured: the evaluations of each run.
        perplexities: the charts with which a comparison begins; none for one run.
        charts: the charts of the run, or of the comparison.
        linears: name of a linear → its charts, of one run. The page shows the first.
        about: sentences on the linears: why the first is shown, and which are left out; may be empty.
    """
    unusual = [notes.unusual(run, entries) for run, entries in zip(runs, measured, strict=True)]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        runs=[
            {
                "name": run.name,
                "summary": notes.summary(run, entries),
                "verdict": notes.verdict(run, entries, lines),
                "unusual": lines,
                "tables": tables.run_tables(run),
            }
            for run, entries, lines in zip(runs, measured, unusual, strict=True)
        ],
        lead=_lead(runs),
        lost=tables.lost_table(runs[0], measured[0]) if len(runs) == 1 else None,
        compared=tables.comparison(runs, measured) if len(runs) > 1 else None,
        version=__version__,
        colours=COLOURS,
        rules=list(notes.RULES),
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=Markup(f"'sha256-{digest}'"),
        perplexities=perplexities,
        charts=charts,
        linears=linears,
        about=about,
    )


def _lead(runs: Sequence[Run]) -> str:
    """The line below the title."""
    if len(runs) > 1:
        return ", ".join(run.name for run in runs)
    manifest = runs[0].manifest
    return f"{short(manifest.base_model)}, pruned by drot {manifest.versions.get('drot')}"
