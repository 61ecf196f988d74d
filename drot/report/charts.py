"""The charts of one run."""

from drot.report.drawing import DEPTHS, SERIES, Chart, axes, whole_steps
from drot.report.kinds import bars, grid, lines
from drot.report.reading import Figure, Run, final_error, layer_means, mean, one_shot, ratios

#: label → figure of a linear, for the output errors by layer
ERRORS: dict[str, Figure] = {
    "one shot, not rotated": one_shot("before", "output_error"),
    "one shot, rotated": one_shot("after", "output_error"),
    "as written": final_error,
}


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
    loss = run.curves("loss_curve")
    curves = {name: curve for name, curve in loss.items() if len(curve) > 1 and curve[0] > 0}
    if not curves:
        return None
    ends = {name: curve[-1] / curve[0] for name, curve in curves.items()}
    best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    kind = "entropy" if run.recipe["rotation"]["objective"] == "entropy" else "pruned importance"
    with axes(260) as (figure, axis):
        for number, (name, curve) in enumerate(curves.items()):
            depth = DEPTHS[number * len(DEPTHS) // len(curves)]
            dash = SERIES[number % 4][1]
            axis.plot([value / curve[0] for value in curve], color=depth, linestyle=dash)
            if name in (best, worst, next(iter(curves)), list(curves)[-1]):
                axis.annotate(
                    name.removeprefix("layer "),
                    (len(curve) - 1, ends[name]),
                    xytext=(4, -3),
                    textcoords="offset points",
                    fontsize=10,
                )
        axis.set(title="Loss as a share of the start", xlabel="step of the training")
        whole_steps(axis.xaxis)
    which = (
        f"The {kind} falls to {ends[best]:.0%} of its start in {best}, where it falls most, and to "
        f"{ends[worst]:.0%} in {worst}, where it falls least."
        if len(curves) > 1
        else f"The {kind} falls to {ends[best]:.0%} of its start."
    )
    key = " A line is a layer, from dark (first) to light (last); numbers name some." * (len(curves) > 1)
    return Chart("training", which + key, figure)


def entropy_by_step(run: Run) -> Chart | None:
    """The entropy of each layer by step of its training, as a share of its start."""
    entropies = run.curves("entropy_curve")
    curves = {name: curve for name, curve in entropies.items() if len(curve) > 2 and curve[0][1] > 0}
    if not curves:
        return None
    with axes(220) as (figure, axis):
        for number, curve in enumerate(curves.values()):
            axis.plot(
                [step for step, _ in curve],
                [value / curve[0][1] for _, value in curve],
                color=DEPTHS[number * len(DEPTHS) // len(curves)],
                linestyle=SERIES[number % 4][1],
                marker=".",
            )
        axis.set(title="Entropy as a share of the start", xlabel="step of the training")
        whole_steps(axis.xaxis)
    ends = [curve[-1][1] / curve[0][1] for curve in curves.values()]
    which = f"The entropy ends at {min(ends):.0%} to {max(ends):.0%} of its start. It is not the objective."
    key = " A line is a layer, from dark (first) to light (last)." * (len(curves) > 1)
    return Chart("entropy-steps", which + key, figure)


def entropy(run: Run) -> Chart | None:
    """The entropy of each layer before and after its training.

    A shared rotation has no such chart: it has one entropy before and one after, in the table.
    """
    records = dict(run.trainings())
    if run.manifest.get("shared_rotation"):
        return None
    series = {
        f"{when} the rotation": {layer: record[f"entropy_{when}"] for layer, record in records.items()}
        for when in ("before", "after")
        if all(f"entropy_{when}" in record for record in records.values())
    }
    if not records or len(series) < 2:
        return None
    before, after = (sum(values.values()) for values in series.values())
    caption = f"The entropy of the importance, summed over the layers, changes by {after / before - 1:+.1%}."
    return lines("entropy", "Entropy of the importance", "layer", series, caption)


def error_by_layer(run: Run) -> Chart | None:
    """The output errors of each layer, as means over its linears."""
    series = {label: layer_means(run, figure) for label, figure in ERRORS.items()}
    series = {label: values for label, values in series.items() if values}
    if not series:
        return None
    written = layer_means(run, final_error)
    worst = max(written, key=written.__getitem__) if written else None
    caption = "The relative squared error of the linears' outputs, as the mean over a layer's linears."
    if worst is not None:
        caption += f" As written, it is largest in layer {worst}: {written[worst]:.4f}."
    return lines("output-error", "Output error", "layer", series, caption)


def importance_grid(run: Run) -> Chart | None:
    """The pruned importance after the rotation, as a share of before, by linear."""
    quotients = ratios(run, one_shot("after", "removed_importance"), one_shot("before", "removed_importance"))
    means = [mean(run, one_shot(basis, "removed_importance")) for basis in ("before", "after")]
    if not quotients or None in means:
        return None
    caption = (
        f"The mask removes {means[0]:.1%} of a linear's importance without the rotation and {means[1]:.1%} "
        f"with it, as means. A cell is the second in per cent of the first; {_extremes(quotients)}."
    )
    return grid("pruned-importance", "Pruned importance, % of not rotated", quotients, caption)


def error_grid(run: Run) -> Chart | None:
    """The one-shot output error after the rotation, as a share of before, by linear."""
    quotients = ratios(run, one_shot("after", "output_error"), one_shot("before", "output_error"))
    if not quotients:
        return None
    caption = (
        "The output error of one-shot pruning with the rotation, in per cent of the error without it; "
        f"{_extremes(quotients)}."
    )
    return grid("one-shot-error", "One-shot output error, % of not rotated", quotients, caption)


def recovery(run: Run) -> Chart | None:
    """The held-out error of each layer before and after its recovery."""
    records = {layer["layer"]: layer["recovery"] for layer in run.layers if layer.get("recovery")}
    if not records:
        return None
    series = {
        f"{when} the recovery": {layer: record[f"error_{when}"] for layer, record in records.items()}
        for when in ("before", "after")
    }
    idle = sum(record["best_epoch"] == 0 for record in records.values())
    changed = f"{len(records) - idle} of {len(records)} layers"
    caption = f"The error on held-out sequences. The recovery changed {changed}."
    return lines("recovery", "Held-out error of the layer's output", "layer", series, caption)


def seconds(run: Run) -> Chart | None:
    """The time of each phase."""
    values = {name: value for name, value in run.manifest["seconds"].items() if value > 0 and name != "total"}
    if not values:
        return None
    longest = max(values, key=values.__getitem__)
    caption = (
        f"{longest} takes longest, {values[longest]:.1f} of {run.manifest['seconds']['total']:.1f} s in all."
    )
    return bars("seconds", "Seconds by phase", {"": values}, "{:.1f} s", caption)


def memory(run: Run) -> Chart | None:
    """The peak memory of each phase."""
    peaks = run.manifest.get("peak_memory") or {}
    kinds = {"process": "process", "gpu": "GPU"}
    values = {
        label: {phase: peak[kind] / 2**30 for phase, peak in peaks.items() if kind in peak}
        for kind, label in kinds.items()
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
