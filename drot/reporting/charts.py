"""The charts of a run."""

from drot.reporting.drawing import Chart, grid, lines
from drot.reporting.runs import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Figure, Run, final_error

#: label → figure of a linear, for the output errors by layer
ERRORS: dict[str, Figure] = {
    "one shot, not rotated": ONE_SHOT_ERROR[0],
    "one shot, rotated": ONE_SHOT_ERROR[1],
    "as written": final_error,
}


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
    if written := series.get("as written"):
        worst = max(written, key=written.__getitem__)
        caption += f" As written, it is largest in layer {worst}: {written[worst]:.4f}."
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
    title = "Pruned importance, % of not rotated"
    return grid(title, quotients, run.roles, caption)
