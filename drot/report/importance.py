"""The paper's Figure 2 for a linear: the importance of its weights before and after the rotation.

Heat map and 3-D surface of the means of blocks, and histograms of the kept and of the removed weights.
"""

import io
from typing import TYPE_CHECKING

import numpy as np

from drot.manifest.importance import HISTOGRAM_BINS, HISTOGRAM_LOG10
from drot.report.drawing import LIGHT, Chart, blank, legend
from drot.report.reading import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASES = ("before", "after")
#: colour of the text in an image, readable on white and on black
GREY = "#808080"
#: a histogram begins and ends with the first and the last bin that holds a larger share of the weights
SHOWN_SHARE = 1e-3
#: pixels of an inch of the surface in the page
SURFACE_DPI = 84


def bases_of(run: Run, linear: str) -> list[str]:
    """`before`, and `after` for a rotated run."""
    return [basis for basis in BASES if f"{linear}.map_{basis}" in run.figures]


def figure2(run: Run, linear: str) -> list[Chart]:
    """The heat maps and the histogram of a linear."""
    return [heat_map(run, linear), histogram(run, linear)]


def heat_map(run: Run, linear: str) -> Chart:
    """The maps before and after, with the same logarithmic colours."""
    from matplotlib.colors import LogNorm

    bases = bases_of(run, linear)
    maps = _maps(run, linear)
    low, high = _limits(maps)
    place = dict(left=0.06, right=0.99, top=0.9, bottom=0.27, wspace=0.06)
    with blank(225) as figure:
        panels = figure.subplots(1, len(bases), squeeze=False, gridspec_kw=place)[0]
        for panel, basis, values in zip(panels, bases, maps, strict=True):
            panel.grid(visible=False)
            image = panel.imshow(
                values.clip(low, high), cmap="viridis", norm=LogNorm(low, high), interpolation="none",
                aspect="auto",
            )  # fmt: skip
            panel.set(title=basis, xticks=[], yticks=[], xlabel="inputs")
            for spine in panel.spines.values():
                spine.set_visible(False)
        panels[0].set_ylabel("outputs")
        below = figure.add_axes((0.07, 0.12, 0.88, 0.04))
        ticks = list(np.geomspace(low, high, 5))
        bar = figure.colorbar(image, cax=below, orientation="horizontal", ticks=ticks)
        bar.ax.set_xticklabels([f"{tick:.2g}" for tick in ticks])
        bar.ax.minorticks_off()
    rows, columns = maps[0].shape
    caption = (
        f"Mean importance in {rows} × {columns} blocks of the weight; 1 is the mean before the rotation. "
        f"Largest block: {_listed(bases, [values.max() for values in maps], '{:.3g}')}."
    )
    return Chart(f"{_file_name(linear)}-map", caption, figure)


def surface(run: Run, linear: str) -> Chart:
    """The maps before and after as surfaces of the same height scale."""
    bases, maps = bases_of(run, linear), _maps(run, linear)
    caption = (
        f"The same blocks as surfaces; the height is the importance, up to {max(m.max() for m in maps):.3g}."
    )
    with blank(190) as figure:
        _draw_surfaces(figure, bases, maps)
    return Chart(f"{_file_name(linear)}-surface", caption, figure)


def surface_image(chart: Chart) -> bytes:
    """A surface as WebP with a transparent ground, which is a tenth of its SVG."""
    from PIL import Image

    png = io.BytesIO()
    chart.figure.savefig(png, format="png", dpi=SURFACE_DPI)
    webp = io.BytesIO()
    Image.open(png).save(webp, "webp", quality=55, alpha_quality=30, method=6)
    return webp.getvalue()


def _draw_surfaces(figure: "Figure", bases: list[str], maps: list[np.ndarray]) -> None:
    from matplotlib.colors import LogNorm
    from mpl_toolkits.mplot3d import Axes3D  # registers the projection

    assert Axes3D.name == "3d"
    low, high = _limits(maps)
    top = max(values.max() for values in maps)
    for number, (basis, values) in enumerate(zip(bases, maps, strict=True), 1):
        width = 1 / len(bases)
        panel = figure.add_axes(((number - 1) * width, 0, width, 0.97), projection="3d")
        x, y = np.meshgrid(*(np.linspace(0, 1, size) for size in values.shape[::-1]))
        panel.plot_surface(
            x, y, values, rstride=1, cstride=1, cmap="viridis", norm=LogNorm(low, high), linewidth=0,
            antialiased=False,
        )  # fmt: skip
        panel.set(zlim=(0, top))
        panel.grid(visible=False)
        for axis in (panel.xaxis, panel.yaxis, panel.zaxis):
            axis.set_ticks([])
            axis.set_pane_color((0, 0, 0, 0))
            axis.line.set_color(GREY)
        panel.view_init(elev=32, azim=-58)
        panel.set_box_aspect((1, 1, 0.75), zoom=1.2)
        panel.set_title(basis, color=GREY, y=0.95)


def histogram(run: Run, linear: str) -> Chart:
    """The numbers of kept and of removed weights by importance, before and after."""
    from matplotlib.ticker import MaxNLocator

    bases = bases_of(run, linear)
    edges = np.linspace(*HISTOGRAM_LOG10, HISTOGRAM_BINS + 1)
    counts = [run.figures[f"{linear}.histogram_{basis}"] for basis in bases]
    share = sum(count.sum(0) for count in counts) / max(sum(count.sum() for count in counts), 1)
    used = np.flatnonzero(share > SHOWN_SHARE)
    shown = slice(max(used[0] - 1, 0) if len(used) else 0, used[-1] + 2 if len(used) else None)
    place = dict(left=0.12, right=0.98, top=0.83, bottom=0.17, hspace=0.3)
    with blank(150 + 75 * len(bases)) as figure:
        panels = figure.subplots(len(bases), 1, sharex=True, sharey=True, squeeze=False, gridspec_kw=place)
        for panel, basis, (kept, removed) in zip(panels[:, 0], bases, counts, strict=True):
            total = max(int(kept.sum() + removed.sum()), 1)
            for values, label, name, hatch in (
                (kept, "kept", "blue", ""),
                (removed, "removed", "vermilion", "////"),
            ):
                heights = values[shown] / total
                panel.stairs(
                    heights, edges[shown.start :][: len(heights) + 1], label=label, fill=True,
                    facecolor=LIGHT[name] if not hatch else "none", edgecolor=LIGHT[name], hatch=hatch,
                    alpha=None if hatch else 0.75, linewidth=1.2,
                )  # fmt: skip
            panel.set_title(basis)
            panel.grid(visible=False)
            panel.yaxis.set_major_formatter(lambda value, position: f"{100 * value:g}%")
        panels[-1, 0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        panels[-1, 0].xaxis.set_major_formatter(lambda value, position: f"{10.0**value:g}")
        panels[-1, 0].set_xlabel("importance of a weight (1: the mean before)")
        legend(figure, panels[0, 0])
    layer, role = place_of(run, linear)
    record = run.layers[layer]["linears"][role].get("one_shot", {})
    shares = [record.get(basis, {}).get("removed_importance") for basis in bases]
    caption = "Share of the weights by importance: those that the smallest scores remove, and the kept."
    if None not in shares:
        caption += f" The removed weights hold {_listed(bases, shares, '{:.1%}')} of the importance before."
    return Chart(f"{_file_name(linear)}-histogram", caption, figure)


def place_of(run: Run, linear: str) -> tuple[int, str]:
    """Layer and role of the linear named `layers.<i>.<…>.<role>`."""
    _, layer, *_, role = linear.split(".")
    return int(layer), role


def _maps(run: Run, linear: str) -> list[np.ndarray]:
    return [run.figures[f"{linear}.map_{basis}"].astype(np.float32) for basis in bases_of(run, linear)]


def _limits(maps: list[np.ndarray]) -> tuple[float, float]:
    """Limits of the colours: the largest mean of a block, and a thousandth of it or more."""
    values = np.concatenate([values.ravel() for values in maps])
    high = max(float(values.max()), 1e-3)
    low = float(np.quantile(values, 0.02))
    return min(max(low, high / 1000), high / 2), high


def _listed(bases: list[str], values: list[float], form: str) -> str:
    """'8.1 % before and 5.0 % after'."""
    return " and ".join(f"{form.format(value)} {basis}" for value, basis in zip(values, bases, strict=True))


def _file_name(linear: str) -> str:
    return linear.replace(".", "-")
