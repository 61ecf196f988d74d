"""`write_report`: reads the runs, draws, and writes the page and the files of the charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drot.config import matches
from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.core.files import check_writable, new_file, writing
from drot.report.charts import charts_of
from drot.report.comparison import charts_of_several
from drot.report.drawing import Chart, check_matplotlib
from drot.report.importance import linear_charts
from drot.report.reading import Run, read_runs

#: name of the page in the folder of a run, and of a comparison in the current folder
PAGE, COMPARISON = "report.html", "drot-report.html"
#: most linears in a page; each takes about 25 KB
MOST_LINEARS = 64


@dataclass(frozen=True)
class Report:
    """page: the written file. figures: the written files of the charts. linears: the linears in the page."""

    page: Path
    figures: list[Path]
    linears: list[str]


def write_report(
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
            linears, or, if there are more than MOST_LINEARS, those of the first, the middle and the last
            layer. Not for several runs.
        progress: receives the event `draw` after each linear.
    """
    check_matplotlib()
    from drot.report.page import page  # needs jinja2

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
    chosen, left_out = _chosen(runs[0], linears) if len(runs) == 1 else ([], "")
    drawn = charts_of(runs[0]) if len(runs) == 1 else charts_of_several(runs)
    by_linear: dict[str, list[Chart]] = {}
    for step, linear in enumerate(chosen):
        progress(ProgressEvent(phase="draw", step=step, steps=len(chosen)))
        by_linear[linear] = linear_charts(runs[0], linear)
    html = page(runs, drawn, by_linear, left_out)
    files = []
    if figures is not None:
        folder = Path(figures)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for chart in [*drawn, *(chart for charts in by_linear.values() for chart in charts)]:
                files += chart.save(folder)
    with new_file(out) as part:
        part.write_text(html, encoding="utf-8")
    return Report(out, files, chosen)


def _chosen(run: Run, patterns: Sequence[str]) -> tuple[list[str], str]:
    """The linears to show, and a sentence on those that are not shown."""
    everything = run.linears
    if patterns:
        for pattern in patterns:
            if not any(matches(pattern, name) for name in everything):
                known = f"such as {everything[0]}" if everything else "but the run recorded none"
                raise UserError(f"`linears` must match a linear, {known}; got {pattern!r}")
        return [name for name in everything if any(matches(p, name) for p in patterns)], ""
    if len(everything) <= MOST_LINEARS:
        return everything, ""
    layers = sorted({int(name.split(".")[1]) for name in everything})
    shown = {layers[0], layers[len(layers) // 2], layers[-1]}
    chosen = [name for name in everything if int(name.split(".")[1]) in shown]
    sentence = (
        f"Shown are the linears of layers {', '.join(map(str, sorted(shown)))} of {len(layers)}; "
        "drot report --linears PATTERN shows others."
    )
    return chosen, sentence
