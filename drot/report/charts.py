"""The charts of one run."""

from collections.abc import Mapping, Sequence

from drot.report.drawing import DEPTHS, SERIES, Chart, axes, whole_steps
from drot.report.kinds import bars, grid, lines
from drot.report.reading import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Figure, Run, final_error

#: points (step, value) of a training
Points = Sequence[Sequence[float]]
#: label → figure of a linear, for the output errors by layer
ERRORS: dict[str, Figure] = {
    "one shot, not rotated": ONE_SHOT_ERROR[0],
    "one shot, rotated": ONE_SHOT_ERROR[1],
    "as written": final_error,
}
KEY = " A line is a layer, from dark (first) to light (last)"


def charts_of(run: Run) -> list[Chart]:
    """The charts of one run, without those that its manifest has no figures for."""
    makers = (
        training,
        entropy_by_step,
        entropy,
        error_by_layer,
        importance_grid,
        error_grid,
        recovery,
        seconds,
        memory,
    )
    return [chart for maker in makers if (chart := maker(run)) is not None]


def training(run: Run) -> Chart | None:
    """The loss of each training by step, as a share of its start."""
    curves = {
        name: list(enumerate(record.loss_curve))
        for name, record in run.trainings.items()
        if len(record.loss_curve) > 1 and record.loss_curve[0] > 0
    }
    if not curves:
        return None
    ends = {name: curve[-1][1] / curve[0][1] for name, curve in curves.items()}
    best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    kind = "entropy" if run.recipe.rotation.objective == "entropy" else "pruned importance"
    which = (
        f"The {kind} falls to {ends[best]:.0%} of its start in {best}, where it falls most, and to "
        f"{ends[worst]:.0%} in {worst}, where it falls least."
        if len(curves) > 1
        else f"The {kind} falls to {ends[best]:.0%} of its start."
    )
    named = [best, worst, next(iter(curves)), list(curves)[-1]]
    key = f"{KEY}; numbers name some." * (len(curves) > 1)
    return _by_step("training", "Loss as a share of the start", curves, which + key, 260, named)


def entropy_by_step(run: Run) -> Chart | None:
    """The entropy of each layer by step of its training, as a share of its start."""
    curves = {
        name: record.entropy_curve
        for name, record in run.trainings.items()
        if len(record.entropy_curve) > 2 and record.entropy_curve[0][1] > 0
    }
    if not curves:
        return None
    ends = [curve[-1][1] / curve[0][1] for curve in curves.values()]
    which = f"The entropy ends at {min(ends):.0%} to {max(ends):.0%} of its start. It is not the objective."
    key = f"{KEY}." * (len(curves) > 1)
    return _by_step("entropy-steps", "Entropy as a share of the start", curves, which + key, 220, marker=".")


def _by_step(
    name: str,
    title: str,
    curves: Mapping[str, Points],
    caption: str,
    height: float,
    named: Sequence[str] = (),
    marker: str = "",
) -> Chart:
    """A line for each training, as shares of its first value. named: the lines with their names."""
    with axes(height) as (figure, axis):
        for number, (label, curve) in enumerate(curves.items()):
            shares = [value / curve[0][1] for _, value in curve]
            depth, dash = DEPTHS[number * len(DEPTHS) // len(curves)], SERIES[number % 4][1]
            axis.plot([step for step, _ in curve], shares, color=depth, linestyle=dash, marker=marker)
            if label in named:
                axis.annotate(
                    label.removeprefix("layer "), (curve[-1][0], shares[-1]), xytext=(4, -3),
                    textcoords="offset points", fontsize=10,
                )  # fmt: skip
        axis.set(title=title, xlabel="step of the training")
        whole_steps(axis.xaxis)
    return Chart(name, caption, figure)


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
    caption = (
        f"The mask removes {before:.1%} of a linear's importance without the rotation and {after:.1%} "
        f"with it, as means. A cell is the second in per cent of the first; {_extremes(quotients)}."
    )
    title = "Pruned importance, % of not rotated"
    return grid("pruned-importance", title, quotients, run.roles, caption)


def error_grid(run: Run) -> Chart | None:
    """The one-shot output error after the rotation, as a share of before, by linear."""
    quotients = run.ratios(*ONE_SHOT_ERROR)
    if not quotients:
        return None
    caption = (
        "The output error of one-shot pruning with the rotation, in per cent of the error without it; "
        f"{_extremes(quotients)}."
    )
    return grid("one-shot-error", "One-shot output error, % of not rotated", quotients, run.roles, caption)


def recovery(run: Run) -> Chart | None:
    """The held-out error of each layer before and after its recovery."""
    records = {layer.layer: layer.recovery for layer in run.manifest.layers if layer.recovery}
    if not records:
        return None
    series = {
        "before the recovery": {layer: record.error_before for layer, record in records.items()},
        "after the recovery": {layer: record.error_after for layer, record in records.items()},
    }
    idle = sum(record.best_epoch == 0 for record in records.values())
    changed = f"{len(records) - idle} of {len(records)} layers"
    caption = f"The error on held-out sequences. The recovery changed {changed}."
    return lines("recovery", "Held-out error of the layer's output", "layer", series, caption)


def seconds(run: Run) -> Chart | None:
    """The time of each phase."""
    values = {name: value for name, value in run.manifest.seconds.phases.items() if value > 0}
    if not values:
        return None
    longest = max(values, key=values.__getitem__)
    total = run.manifest.seconds.total
    caption = f"{longest} takes longest, {values[longest]:.1f} of {total:.1f} s in all."
    return bars("seconds", "Seconds by phase", {"": values}, "{:.1f} s", caption)


def memory(run: Run) -> Chart | None:
    """The peak memory of each phase."""
    peaks = run.manifest.peak_memory.items()
    values = {
        "process": {phase: peak.process / 2**30 for phase, peak in peaks},
        "GPU": {phase: peak.gpu / 2**30 for phase, peak in peaks if peak.gpu is not None},
    }
    values = {label: found for label, found in values.items() if found}
    if not values:
        return None
    caption = (
        "The largest memory until the end of a phase. The process's largest memory never falls, and includes "
        "what the process used before the run."
    )
    if "GPU" in values:
        caption += " The GPU's memory is the largest that torch allocated in the phase."
    return bars("memory", "Peak memory by phase, GiB", values, "{:.2f}", caption)


def _extremes(quotients: dict[tuple[int, str], float]) -> str:
    (low, low_role), (high, high_role) = (pick(quotients, key=quotients.__getitem__) for pick in (min, max))
    return (
        f"the least is {quotients[low, low_role]:.0%} in layer {low}, {low_role}, the most "
        f"{quotients[high, high_role]:.0%} in layer {high}, {high_role}"
    )
