"""The charts of a run and, after the paper's Figure 2, those of a linear."""

import re
import statistics
from collections.abc import Sequence

import numpy as np

from drot.checkpoint.importance import HISTOGRAM_BINS, HISTOGRAM_LOG10
from drot.reporting.drawing import SERIES, Chart, axes, grid, legend, lines
from drot.reporting.runs import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Importance, LinearFigure, Run, final_error

#: label → figure of a linear, for the output errors by layer
ERRORS: dict[str, LinearFigure] = {
    "one shot, not rotated": ONE_SHOT_ERROR[0],
    "one shot, rotated": ONE_SHOT_ERROR[1],
    "as pruned": final_error,
}
#: what begins the name of an expert's linear, and of the same linear of all experts
EXPERT, EXPERTS = re.compile(r"experts\.\d+\."), "experts.*."
#: a histogram begins and ends with the first and the last bin that holds a larger share of the weights
SHOWN_SHARE = 1e-3


def charts_of(run: Run) -> list[Chart]:
    """The charts of a run, without those that its manifest has no figures for."""
    makers = (training, entropy, error_by_layer, importance_grid)
    return [chart for maker in makers if (chart := maker(run)) is not None]


def training(run: Run) -> Chart | None:
    """The loss of each training by step, as a share of its start."""
    losses = {name: record.loss_curve for name, record in run.trainings.items()}
    curves = {
        name: {step: value / curve[0] for step, value in enumerate(curve)}
        for name, curve in losses.items()
        if len(curve) > 1 and curve[0] > 0
    }
    if not curves:
        return None
    ends = {name: list(curve.values())[-1] for name, curve in curves.items()}
    best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    kind = "entropy" if run.recipe.rotation.objective == "entropy" else "pruned importance"
    caption = f"The {kind} falls to {ends[best]:.0%} of its start."
    if len(curves) > 1:
        caption = (
            f"The {kind} falls to {ends[best]:.0%} of its start in {best}, where it falls most, and to "
            f"{ends[worst]:.0%} in {worst}, where it falls least. A line is a layer, from dark (first) to "
            "light (last)."
        )
    title = "Loss as a share of the start"
    return lines(title, "step of the training", curves, caption, ramp=True)


def entropy(run: Run) -> Chart | None:
    """The entropy of each layer before and after its training.

    A shared rotation has no such chart: it has one entropy before and one after, in the table.
    """
    if not run.rotations:
        return None
    before = {layer: record.entropy_before for layer, record in run.rotations.items()}
    after = {layer: record.entropy_after for layer, record in run.rotations.items()}
    change = sum(after.values()) / sum(before.values()) - 1 if any(before.values()) else 0.0
    caption = f"The entropy of the importance, summed over the layers, changes by {change:+.1%}."
    series = {"before the rotation": before, "after the rotation": after}
    return lines("Entropy of the importance", "layer", series, caption)


def error_by_layer(run: Run) -> Chart | None:
    """The output errors of each layer, as means over its linears."""
    series = {label: values for label, figure in ERRORS.items() if (values := run.layer_means(figure))}
    if not series:
        return None
    caption = "The relative squared error of the linears' outputs, as the mean over a layer's linears."
    if pruned := series.get("as pruned"):
        worst = max(pruned, key=pruned.__getitem__)
        caption += f" As pruned, it is largest in layer {worst}: {pruned[worst]:.4f}."
    return lines("Output error", "layer", series, caption)


def importance_grid(run: Run) -> Chart | None:
    """The pruned importance after the rotation, as a share of before, by linear."""
    quotients = run.ratios(*REMOVED_IMPORTANCE)
    before, after = map(run.mean, REMOVED_IMPORTANCE)
    if not quotients:
        return None
    (low, low_role), (high, high_role) = (pick(quotients, key=quotients.__getitem__) for pick in (min, max))
    caption = (
        f"The mask removes {before:.1%} of a linear's importance without the rotation and {after:.1%} "
        f"with it, as means. A cell is the second in per cent of the first; the least is "
        f"{quotients[low, low_role]:.0%} in layer {low}, {low_role}, the most "
        f"{quotients[high, high_role]:.0%} in layer {high}, {high_role}."
    )
    cells: dict[tuple[int, str], list[float]] = {}
    for (layer, role), value in quotients.items():
        cells.setdefault((layer, EXPERT.sub(EXPERTS, role)), []).append(value)
    if len(cells) < len(quotients):
        caption += " A cell of experts is their mean."
    roles = list(dict.fromkeys(EXPERT.sub(EXPERTS, role) for role in run.roles))
    means = {cell: statistics.fmean(found) for cell, found in cells.items()}
    return grid("Pruned importance, % of not rotated", means, roles, caption)


# ---- the charts of a linear ----------------------------------------------------------------------------


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
    with axes(225, 1, len(found), squeeze=False) as (figure, panels):
        for panel, each in zip(panels[0], found, strict=True):
            panel.grid(visible=False)
            image = panel.imshow(
                each.means.clip(low, high), cmap="viridis", norm=LogNorm(low, high), interpolation="none",
                aspect="auto",
            )  # fmt: skip
            panel.set(title=each.basis, xticks=[], yticks=[], xlabel="inputs")
        panels[0, 0].set_ylabel("outputs")
        ticks = np.geomspace(image.norm.vmin, image.norm.vmax, 4)
        bar = figure.colorbar(image, ax=panels, location="bottom", aspect=40, ticks=ticks, format="%.2g")
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
    with axes(150 + 75 * len(found), len(found), sharex=True, sharey=True, squeeze=False) as (figure, panels):
        for panel, each in zip(panels[:, 0], found, strict=True):
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
        legend(figure, panels[0, 0])
    caption = "Share of the weights by importance: those that the smallest scores remove, and the kept."
    shares = [f"{each.removed:.1%} {each.basis}" for each in found if each.removed is not None]
    if len(shares) == len(found):
        caption += f" The removed weights hold {' and '.join(shares)} of the importance before."
    return Chart(caption, figure)
