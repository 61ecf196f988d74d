"""The charts of one run, and of several runs over each other."""

from collections.abc import Callable, Sequence

from drot.reporting.drawing import Chart, bars, grid, lines
from drot.reporting.runs import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Figure, Measured, Run, final_error

#: a layer or a step of the training → a figure of a run
Curve = dict[int, float]

#: label → figure of a linear, for the output errors by layer
ERRORS: dict[str, Figure] = {
    "one shot, not rotated": ONE_SHOT_ERROR[0],
    "one shot, rotated": ONE_SHOT_ERROR[1],
    "as written": final_error,
}


def charts_of(run: Run) -> list[Chart]:
    """The charts of one run, without those that its manifest has no figures for."""
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
    return lines("training", title, "step of the training", curves, caption, ramp=True)


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
    return lines("entropy", "Entropy of the importance", "layer", series, caption)


def error_by_layer(run: Run) -> Chart | None:
    """The output errors of each layer, as means over its linears."""
    series = {label: values for label, figure in ERRORS.items() if (values := run.layer_means(figure))}
    if not series:
        return None
    caption = "The relative squared error of the linears' outputs, as the mean over a layer's linears."
    if written := series.get("as written"):
        worst = max(written, key=written.__getitem__)
        caption += f" As written, it is largest in layer {worst}: {written[worst]:.4f}."
    return lines("output-error", "Output error", "layer", series, caption)


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
    title = "Pruned importance, % of not rotated"
    return grid("pruned-importance", title, quotients, run.roles, caption)


def charts_of_several(runs: Sequence[Run], measured: Sequence[Sequence[Measured]]) -> list[Chart]:
    """The perplexities on each text, and the curves of CURVES. What no run has is left out."""
    charts = perplexity_charts(runs, measured)
    for name, (title, curve_of) in CURVES.items():
        series = {run.name: curve for run in runs if (curve := curve_of(run))}
        if series:
            means = [f"{run} {sum(curve.values()) / len(curve):.4g}" for run, curve in series.items()]
            caption = f"{title}. Mean over the layers: {', '.join(means)}."
            charts.append(lines(f"compare-{name}", title, "layer", series, caption))
    return charts


def perplexity_charts(runs: Sequence[Run], measured: Sequence[Sequence[Measured]]) -> list[Chart]:
    """For each text the perplexities of the runs, and of the dense model if there is one for all runs."""
    charts = []
    for number, (text, seqlen) in enumerate(dict.fromkeys((e.text, e.seqlen) for m in measured for e in m)):
        found = {
            run.name: entry
            for run, entries in zip(runs, measured, strict=True)
            for entry in entries
            if (entry.text, entry.seqlen) == (text, seqlen)
        }
        values = {name: entry.perplexity for name, entry in found.items() if entry.perplexity is not None}
        if not values:
            continue
        best = min(values, key=values.__getitem__)
        dense = {entry.dense for entry in found.values() if entry.dense is not None}
        shown = {"dense": next(iter(dense))} | values if len(dense) == 1 else values
        caption = f"The lowest perplexity of the pruned models is {values[best]:.3f}, of {best}."
        title = f"Perplexity on {text}, windows of {seqlen}"
        charts.append(bars(f"compare-perplexity-{number}", title, shown, "{:.3f}", caption))
    return charts


#: name of a chart → its title, and a function from a run to its figure by layer
CURVES: dict[str, tuple[str, Callable[[Run], Curve]]] = {
    "output-error": ("Output error, mean of a layer", lambda run: run.layer_means(final_error)),
    "importance": (
        "Pruned share of the importance",
        lambda run: run.layer_means(REMOVED_IMPORTANCE[run.rotated]),
    ),
}
