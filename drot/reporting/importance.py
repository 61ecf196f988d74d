"""After the paper's Figure 2, for a linear: the importance of its weights before and after the rotation."""

from collections.abc import Sequence

import numpy as np

from drot.checkpoint.importance import HISTOGRAM_BINS, HISTOGRAM_LOG10
from drot.reporting.drawing import SERIES, Chart, axes, legend
from drot.reporting.runs import Importance, Run

#: a histogram begins and ends with the first and the last bin that holds a larger share of the weights
SHOWN_SHARE = 1e-3


def linear_charts(run: Run, linear: str) -> list[Chart]:
    """The heat map and the histogram of a linear."""
    found = run.importance(linear)
    return [heat_map(found), histogram(found)]


def heat_map(found: Sequence[Importance]) -> Chart:
    """The means of blocks before and after, with the same logarithmic colours."""
    from matplotlib.colors import LogNorm

    values = np.concatenate([each.means.ravel() for each in found])
    high = max(float(values.max()), 1e-3)
    low = min(max(float(np.quantile(values, 0.02)), high / 1000), high / 2)
    with axes(225, 1, len(found), squeeze=False) as (figure, grid):
        for panel, each in zip(grid[0], found, strict=True):
            panel.grid(visible=False)
            image = panel.imshow(
                each.means.clip(low, high), cmap="viridis", norm=LogNorm(low, high), interpolation="none",
                aspect="auto",
            )  # fmt: skip
            panel.set(title=each.basis, xticks=[], yticks=[], xlabel="inputs")
        grid[0, 0].set_ylabel("outputs")
        ticks = np.geomspace(image.norm.vmin, image.norm.vmax, 4)
        bar = figure.colorbar(image, ax=grid, location="bottom", aspect=40, ticks=ticks, format="%.2g")
        bar.minorticks_off()  # whose labels lie on each other where the range is less than a decade
    rows, columns = found[0].means.shape
    largest = [f"{each.means.max():.3g} {each.basis}" for each in found]
    caption = (
        f"Mean importance in {rows} × {columns} blocks of the weight; 1 is the mean before the rotation. "
        f"Largest block: {' and '.join(largest)}."
    )
    return Chart(caption, figure)


def histogram(found: Sequence[Importance]) -> Chart:
    """The shares of kept and of removed weights by importance, before and after."""
    edges = np.linspace(*HISTOGRAM_LOG10, HISTOGRAM_BINS + 1)
    share = sum(each.counts.sum(0) for each in found) / max(sum(each.counts.sum() for each in found), 1)
    used = np.flatnonzero(share > SHOWN_SHARE)
    shown = slice(max(used[0] - 1, 0) if len(used) else 0, used[-1] + 2 if len(used) else None)
    with axes(150 + 75 * len(found), len(found), sharex=True, sharey=True, squeeze=False) as (figure, grid):
        for panel, each in zip(grid[:, 0], found, strict=True):
            for counts, label, (colour, *_), fill in zip(
                each.counts, ("kept", "removed"), SERIES, (True, False), strict=False
            ):
                heights = counts[shown] / max(int(each.counts.sum()), 1)
                panel.stairs(
                    heights, edges[shown.start :][: len(heights) + 1], label=label, fill=fill, color=colour
                )
            panel.set_title(each.basis)
            panel.yaxis.set_major_formatter(lambda value, position: f"{100 * value:g}%")
        panel.xaxis.set_major_formatter(lambda value, position: f"{10.0**value:g}")
        panel.set_xlabel("importance of a weight (1: the mean before)")
        legend(figure, grid[0, 0])
    caption = "Share of the weights by importance: those that the smallest scores remove, and the kept."
    shares = [f"{each.removed:.1%} {each.basis}" for each in found if each.removed is not None]
    if len(shares) == len(found):
        caption += f" The removed weights hold {' and '.join(shares)} of the importance before."
    return Chart(caption, figure)
