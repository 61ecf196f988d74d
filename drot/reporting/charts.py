"""The charts of one run, and of several runs over each other."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from drot.reporting.drawing import Chart
from drot.reporting.evaluations import Measured
from drot.reporting.kinds import band, bars, grid, lines
from drot.reporting.reading import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Figure, Run, final_error

#: a layer or a step of the training → a figure of a run
Curve = dict[int, float]

STEP = "step of the training"
#: label → figure of a linear, for the output errors by layer
ERRORS: dict[str, Figure] = {
    "one shot, not rotated": ONE_SHOT_ERROR[0],
    "one shot, rotated": ONE_SHOT_ERROR[1],
    "as written": final_error,
}
KEY = " A line is a layer, from dark (first) to light (last)"
BAND = " The bands hold all layers and the middle half of them, the line is their median"
#: most layers that are drawn as lines; more are drawn as a band
MOST_LINES = 10
#: peaks of memory that differ by less than this share are equal
EQUAL_PEAKS = 0.02


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
    curves = _shares({name: enumerate(record.loss_curve) for name, record in run.trainings.items()}, 2)
    if not curves:
        return None
    ends = {name: list(curve.values())[-1] for name, curve in curves.items()}
    best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    kind = "entropy" if run.recipe.rotation.objective == "entropy" else "pruned importance"
    caption = f"The {kind} falls to {ends[best]:.0%} of its start."
    if len(curves) > 1:
        caption = (
            f"The {kind} falls to {ends[best]:.0%} of its start in {best}, where it falls most, and to "
            f"{ends[worst]:.0%} in {worst}, where it falls least.{_key(curves)}."
        )
    named = [best, worst, next(iter(curves)), list(curves)[-1]]
    return _by_step("training", "Loss as a share of the start", curves, caption, named)


def entropy_by_step(run: Run) -> Chart | None:
    """The entropy of each layer by step of its training, as a share of its start."""
    curves = _shares({name: record.entropy_curve for name, record in run.trainings.items()}, 3)
    if not curves:
        return None
    ends = [list(curve.values())[-1] for curve in curves.values()]
    caption = f"The entropy ends at {min(ends):.0%} to {max(ends):.0%} of its start. It is not the objective."
    caption += f"{_key(curves)}." * (len(curves) > 1)
    return _by_step("entropy-steps", "Entropy as a share of the start", curves, caption, ())


def _by_step(name: str, title: str, curves: Mapping[str, Curve], caption: str, named: Sequence[str]) -> Chart:
    """A curve for each layer, or a band of many curves. named: the curves that are named."""
    if len(curves) > MOST_LINES:
        return band(name, title, STEP, curves, caption, named=named[:2])
    return lines(name, title, STEP, curves, caption, named=named)


def _key(curves: Mapping[str, Curve]) -> str:
    return BAND if len(curves) > MOST_LINES else KEY


def _shares(curves: Mapping[str, Iterable[Sequence[float]]], fewest: int) -> dict[str, dict[int, float]]:
    """The curves of at least `fewest` points (step, value), as shares of their first values."""
    points = {name: {int(step): value for step, value in curve} for name, curve in curves.items()}
    first = {name: next(iter(curve.values()), 0.0) for name, curve in points.items()}
    return {
        name: {step: value / first[name] for step, value in curve.items()}
        for name, curve in points.items()
        if len(curve) >= fewest and first[name] > 0
    }


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
    """The peak memory of each phase; None if all phases have the same, which the summary names."""
    found = run.manifest.peak_memory
    peaks = [(phase, found[phase]) for phase in run.manifest.seconds.phases if phase in found]
    values = {
        "process": {phase: peak.process / 2**30 for phase, peak in peaks},
        "GPU": {phase: peak.gpu / 2**30 for phase, peak in peaks if peak.gpu is not None},
    }
    values = {label: found for label, found in values.items() if found}
    if all(min(found.values()) > (1 - EQUAL_PEAKS) * max(found.values()) for found in values.values()):
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


# ---- several runs over each other ---------------------------------------------------------------------


def charts_of_several(runs: Sequence[Run]) -> list[Chart]:
    """The charts of CURVES. A run without figures for a curve is left out, and so is a chart without runs."""
    charts = []
    for name, (title, x, curve_of) in CURVES.items():
        series = {run.name: curve for run in runs if (curve := curve_of(run))}
        if series:
            charts.append(lines(f"compare-{name}", title, x, series, _compared(title, x, series)))
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
        name = f"compare-perplexity-{number}"
        charts.append(bars(name, title, {"": shown}, "{:.3f}", caption, best=best))
    return charts


def _mean_loss(run: Run) -> Curve:
    """Step → mean loss of the trainings, as a share of the start. A training that ended keeps its loss."""
    curves = [record.loss_curve for record in run.trainings.values() if record.loss_curve[0] > 0]
    steps = max(map(len, curves), default=0)
    return {step: _mean_share(curves, step) for step in range(steps)}


def _mean_share(curves: list[list[float]], step: int) -> float:
    return sum(curve[min(step, len(curve) - 1)] / curve[0] for curve in curves) / len(curves)


def _entropy_share(run: Run) -> Curve:
    trained = {layer: record for layer, record in run.rotations.items() if record.entropy_before}
    return {layer: record.entropy_after / record.entropy_before for layer, record in trained.items()}


def _output_error(run: Run) -> Curve:
    return run.layer_means(final_error)


def _pruned_importance(run: Run) -> Curve:
    return run.layer_means(REMOVED_IMPORTANCE[run.rotated])


def _recovered_error(run: Run) -> Curve:
    return {layer.layer: layer.recovery.error_after for layer in run.manifest.layers if layer.recovery}


#: name of a chart → its title, its x axis, and the curve of a run
CURVES: dict[str, tuple[str, str, Callable[[Run], Curve]]] = {
    "training": ("Mean loss, as a share of the start", "step", _mean_loss),
    "entropy": ("Entropy after, as a share of before", "layer", _entropy_share),
    "output-error": ("Output error, mean of a layer", "layer", _output_error),
    "importance": ("Pruned share of the importance", "layer", _pruned_importance),
    "recovery": ("Held-out error after recovery", "layer", _recovered_error),
}


def _compared(title: str, x: str, series: Mapping[str, Curve]) -> str:
    """The caption: the last value of each curve over steps, or the mean of each curve over layers."""
    parts = []
    for name, curve in series.items():
        values = list(curve.values())
        value = values[-1] if x == "step" else sum(values) / len(values)
        parts.append(f"{name} {value:.4g}")
    what = "At the last step" if x == "step" else "Mean over the layers"
    return f"{title}. {what}: {', '.join(parts)}."
