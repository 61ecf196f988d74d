"""The paper's Figure 2 for a linear: the importance of its weights before and after the rotation.

Heat map and 3-D surface of the means of blocks, and histograms of the kept and of the removed weights.
"""

from collections.abc import Sequence

import numpy as np

from drot.manifest.importance import HISTOGRAM_BINS, HISTOGRAM_LOG10
from drot.reporting.drawing import LIGHT, Chart, blank, legend
from drot.reporting.reading import Importance, Run

#: colour of the text in an image, readable on white and on black
GREY = "#808080"
#: a histogram begins and ends with the first and the last bin that holds a larger share of the weights
SHOWN_SHARE = 1e-3


def linear_charts(run: Run, linear: str) -> list[Chart]:
    """The heat map, the surface and the histogram of a linear."""
    found, name = run.importance(linear), linear.replace(".", "-")
    return [heat_map(name, found), surface(name, found), histogram(name, found)]


def heat_map(name: str, found: Sequence[Importance]) -> Chart:
    """The maps before and after, with the same logarithmic colours."""
    from matplotlib.colors import LogNorm

    low, high = _limits(found)
    place = dict(left=0.06, right=0.99, top=0.9, bottom=0.27, wspace=0.06)
    with blank(225) as figure:
        panels = figure.subplots(1, len(found), squeeze=False, gridspec_kw=place)[0]
        for panel, each in zip(panels, found, strict=True):
            panel.grid(visible=False)
            image = panel.imshow(
                each.means.clip(low, high), cmap="viridis", norm=LogNorm(low, high), interpolation="none",
                aspect="auto",
            )  # fmt: skip
            panel.set(title=each.basis, xticks=[], yticks=[], xlabel="inputs")
            for spine in panel.spines.values():
                spine.set_visible(False)
        panels[0].set_ylabel("outputs")
        below = figure.add_axes((0.07, 0.12, 0.88, 0.04))
        ticks = list(np.geomspace(low, high, 5))
        bar = figure.colorbar(image, cax=below, orientation="horizontal", ticks=ticks)
        bar.ax.set_xticklabels([f"{tick:.2g}" for tick in ticks])
        bar.ax.minorticks_off()
    rows, columns = found[0].means.shape
    largest = [f"{each.means.max():.3g} {each.basis}" for each in found]
    caption = (
        f"Mean importance in {rows} × {columns} blocks of the weight; 1 is the mean before the rotation. "
        f"Largest block: {' and '.join(largest)}."
    )
    return Chart(f"{name}-map", caption, figure)


def surface(name: str, found: Sequence[Importance]) -> Chart:
    """The maps before and after as surfaces of the same height scale, whose axes have names."""
    from matplotlib.colors import LogNorm
    from mpl_toolkits.mplot3d import Axes3D  # registers the projection

    assert Axes3D.name == "3d"
    low, high = _limits(found)
    top, width = max(each.means.max() for each in found), 1 / len(found)
    with blank(190) as figure:
        for number, each in enumerate(found):
            panel = figure.add_axes((number * width, 0, width, 0.97), projection="3d")
            x, y = np.meshgrid(*(np.linspace(0, 1, size) for size in each.means.shape[::-1]))
            panel.plot_surface(
                x, y, each.means, rstride=1, cstride=1, cmap="viridis", norm=LogNorm(low, high), linewidth=0,
                antialiased=False,
            )  # fmt: skip
            panel.set(zlim=(0, top), xticks=[], yticks=[], zticks=[0, top])
            panel.grid(visible=False)
            panel.zaxis.set_ticklabels(["0", f"{top:.2g}"])
            names = {panel.xaxis: "inputs", panel.yaxis: "outputs", panel.zaxis: ""}
            for axis, label in names.items():
                axis.set_pane_color((0, 0, 0, 0))
                axis.line.set_color(GREY)
                axis.labelpad = -14
                axis.set_label_text(label, color=GREY, fontsize=9)
            panel.tick_params("z", colors=GREY, labelsize=9, pad=-3)
            panel.view_init(elev=32, azim=-58)
            panel.set_box_aspect((1, 1, 0.75), zoom=1.1)
            panel.set_title(each.basis, color=GREY, y=0.95)
    caption = f"The same blocks as surfaces; the height is the mean importance of a block, up to {top:.3g}."
    return Chart(f"{name}-surface", caption, figure, as_image=True)


def histogram(name: str, found: Sequence[Importance]) -> Chart:
    """The numbers of kept and of removed weights by importance, before and after."""
    from matplotlib.ticker import MaxNLocator

    edges = np.linspace(*HISTOGRAM_LOG10, HISTOGRAM_BINS + 1)
    counts = [each.counts for each in found]
    share = sum(count.sum(0) for count in counts) / max(sum(count.sum() for count in counts), 1)
    used = np.flatnonzero(share > SHOWN_SHARE)
    shown = slice(max(used[0] - 1, 0) if len(used) else 0, used[-1] + 2 if len(used) else None)
    place = dict(left=0.12, right=0.98, top=0.83, bottom=0.17, hspace=0.3)
    with blank(150 + 75 * len(found)) as figure:
        panels = figure.subplots(len(found), 1, sharex=True, sharey=True, squeeze=False, gridspec_kw=place)
        for panel, each in zip(panels[:, 0], found, strict=True):
            kept, removed = each.counts
            total = max(int(kept.sum() + removed.sum()), 1)
            for values, label, colour, hatch in (
                (kept, "kept", "blue", ""),
                (removed, "removed", "vermilion", "////"),
            ):
                heights = values[shown] / total
                panel.stairs(
                    heights, edges[shown.start :][: len(heights) + 1], label=label, fill=True,
                    facecolor=LIGHT[colour] if not hatch else "none", edgecolor=LIGHT[colour], hatch=hatch,
                    alpha=None if hatch else 0.75, linewidth=1.2,
                )  # fmt: skip
            panel.set_title(each.basis)
            panel.grid(visible=False)
            panel.yaxis.set_major_formatter(lambda value, position: f"{100 * value:g}%")
        panels[-1, 0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        panels[-1, 0].xaxis.set_major_formatter(lambda value, position: f"{10.0**value:g}")
        panels[-1, 0].set_xlabel("importance of a weight (1: the mean before)")
        legend(figure, panels[0, 0])
    caption = "Share of the weights by importance: those that the smallest scores remove, and the kept."
    shares = [f"{each.removed:.1%} {each.basis}" for each in found if each.removed is not None]
    if len(shares) == len(found):
        caption += f" The removed weights hold {' and '.join(shares)} of the importance before."
    return Chart(f"{name}-histogram", caption, figure)


def _limits(found: Sequence[Importance]) -> tuple[float, float]:
    """Limits of the colours: the largest mean of a block, and a thousandth of it or more."""
    values = np.concatenate([each.means.ravel() for each in found])
    high = max(float(values.max()), 1e-3)
    low = float(np.quantile(values, 0.02))
    return min(max(low, high / 1000), high / 2), high
