"""`report`: reads a run, draws, and writes the page: one HTML file that needs no other and loads nothing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from drot.checkpoint.integrity import REPORT
from drot.checkpoint.tables import short
from drot.config import matches
from drot.core.checks import is_a, is_callable
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.files import check_writable, new_file
from drot.core.version import __version__
from drot.reporting import notes, tables
from drot.reporting.charts import charts_of, linear_charts
from drot.reporting.drawing import PACKAGE, Chart, installed
from drot.reporting.runs import Run, measurements, read_run

#: most linears in a page without a choice; each takes about 60 KB and a quarter of a second
MOST_LINEARS = 14
TEMPLATES = Path(__file__).parent / "templates"
#: an option of the command line
OPTION = re.compile(r"--[a-z][a-z-]*")


@dataclass(frozen=True)
class Report:
    """page: the written file. linears: the linears in the page."""

    page: Path
    linears: list[str]


def report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    linears: Sequence[str] = (),
    progress: Progress = silent,
) -> Report:
    """Writes the page of a run.

    Raises UserError for a folder that drot did not write, a pattern that matches no linear, a file that
    cannot be written, and if matplotlib is missing. An older page is replaced.

    Args:
        folder: a folder that `drot.prune` wrote.
        out: the file of the page, whose name ends in .html. None is `report.html` in the folder.
        linears: patterns of the linears to show, such as `layers.0.*` or `q_proj`. Without a pattern: all
            linears, or, if there are more than MOST_LINEARS, as many of the layer where the rotation changes
            a linear most.
        progress: receives the event `draw` after each linear.
    """
    if not installed():
        raise UserError(f"a report needs the package matplotlib: pip install '{PACKAGE}'")
    is_a("out", out, str, Path, or_none=True)
    is_a("linears", linears, list, tuple)
    for pattern in linears:
        is_a("linears", pattern, str)
    is_callable("progress", progress)
    run = read_run(folder)
    out = Path(folder) / REPORT if out is None else Path(out)
    if out.is_dir():
        raise UserError(f"`out` must be a file, got the folder {out}: name a file in it ({out}/{REPORT})")
    if out.suffix not in (".html", ".htm"):
        raise UserError(
            f"`out` must be an HTML file, as in {REPORT}, which a browser can print as PDF; got {out}"
        )
    check_writable(out)
    chosen, about = _chosen(run, linears)
    by_linear: dict[str, list[Chart]] = {}
    for step, linear in enumerate(chosen):
        progress(ProgressEvent(phase="draw", step=step, steps=len(chosen)))
        by_linear[linear] = linear_charts(run, linear)
    html = _page(run, by_linear, about)
    with new_file(out) as part:
        part.write_text(html, encoding="utf-8")
    return Report(out, chosen)


def _chosen(run: Run, patterns: Sequence[str]) -> tuple[list[str], str]:
    """The linears to show, the one that the rotation changes most first, and a sentence on the choice."""
    everything = run.linears
    for pattern in patterns:
        if not any(matches(pattern, name) for name in everything):
            known = f"such as {everything[0]}" if everything else "but the run recorded none"
            raise UserError(f"`linears` must match a linear, {known}; got {pattern!r}")
    chosen = [name for name in everything if any(matches(p, name) for p in patterns or "*")]
    by_help = sorted(chosen, key=lambda name: _change(run, name))
    if patterns or len(chosen) <= MOST_LINEARS:
        first = by_help[:1]
        return [*first, *(name for name in chosen if name not in first)], ""
    best = [name for name in by_help if _layer(name) == _layer(by_help[0])][:MOST_LINEARS]
    return best, (
        f"Shown is layer {_layer(best[0])} of {len(run.manifest.layers)}, with the linear where the rotation "
        "does best; drot report --linears PATTERN shows others, and --linears '*' all."
    )


def _layer(linear: str) -> int:
    return int(linear.split(".")[1])


def _change(run: Run, linear: str) -> float:
    """The pruned importance of a linear after the rotation as a share of before; 1 if it is not known."""
    found = [each.removed for each in run.importance(linear)]
    return found[1] / found[0] if len(found) == 2 and found[0] and found[1] is not None else 1.0


def _unbroken(text: str) -> Markup:
    """The text with its options, such as --linears, in spans in which no line ends."""
    return Markup(OPTION.sub(r'<span class="option">\g<0></span>', str(escape(text))))


def _page(run: Run, linears: Mapping[str, Sequence[Chart]], about: str) -> str:
    """The HTML of the report on a run.

    Names and texts from the manifest are escaped, and the page's policy lets the browser load nothing and run
    no script.

    linears: name of a linear → its charts. The page shows the first.
    about: a sentence on the linears; may be empty.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["unbroken"] = _unbroken
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
        charts=charts_of(run),
        linears=linears,
        about=about,
    )
