"""`report`: reads the runs, draws, and writes the page and the files of the charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drot.config import matches
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.files import check_writable, new_file, writing
from drot.reporting.charts import charts_of, charts_of_several
from drot.reporting.drawing import PACKAGE, Chart, installed
from drot.reporting.importance import linear_charts
from drot.reporting.runs import Run, measurements, read_runs

#: name of the page in the folder of a run, and of a comparison in the current folder
PAGE, COMPARISON = "report.html", "drot-report.html"
#: most linears in a page without a choice; each takes about 25 KB and a quarter of a second
MOST_LINEARS = 14


@dataclass(frozen=True)
class Report:
    """page: the written file. figures: the written files of the charts. linears: the linears in the page."""

    page: Path
    figures: list[Path]
    linears: list[str]


def report(
    folders: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    figures: str | Path | None = None,
    linears: Sequence[str] = (),
    progress: Progress = silent,
) -> Report:
    """Writes the page of one run, or of several runs side by side.

    Raises UserError for a folder that drot did not write, a pattern that matches no linear, a file that
    cannot be written, and if matplotlib is missing. An older page is replaced.

    Args:
        folders: folders that `drot.prune` wrote.
        out: the file of the page. None is `report.html` in the folder of a run, and `drot-report.html` in the
            current folder for several runs.
        figures: a folder for every chart as SVG and PNG; None writes none.
        linears: patterns of the linears to show, such as `layers.0.*` or `q_proj`. Without a pattern: all
            linears, or, if there are more than MOST_LINEARS, those of the layer where the rotation changes a
            linear most. Not for several runs.
        progress: receives the event `draw` after each linear.
    """
    if not installed():
        raise UserError(f"a report needs the package matplotlib: pip install '{PACKAGE}'")
    from drot.reporting.page import page  # needs jinja2

    if not folders:
        raise UserError("a report needs at least one folder that drot prune wrote, got none")
    paths = [Path(folder) for folder in folders]
    runs = read_runs(paths)
    if out is None:
        out = paths[0] / PAGE if len(runs) == 1 else Path(COMPARISON)
    out = Path(out)
    if out.is_dir():
        raise UserError(f"`out` must be a file, got the folder {out}: name a file in it ({out}/{PAGE})")
    check_writable(out)
    if len(runs) > 1 and linears:
        raise UserError("`linears` has no effect on a comparison: name one folder")
    chosen, about = _chosen(runs[0], linears) if len(runs) == 1 else ([], "")
    measured = [measurements(run, runs) for run in runs]
    drawn = charts_of(runs[0]) if len(runs) == 1 else charts_of_several(runs, measured)
    by_linear: dict[str, list[Chart]] = {}
    for step, linear in enumerate(chosen):
        progress(ProgressEvent(phase="draw", step=step, steps=len(chosen)))
        by_linear[linear] = linear_charts(runs[0], linear)
    html = page(runs, measured, drawn, by_linear, about)
    files = []
    if figures is not None:
        folder = Path(figures)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for charts in (drawn, *by_linear.values()):
                for chart in charts:
                    files += chart.save(folder)
    with new_file(out) as part:
        part.write_text(html, encoding="utf-8")
    return Report(out, files, chosen)


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
    best = [name for name in by_help if _layer(name) == _layer(by_help[0])]
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
