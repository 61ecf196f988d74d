"""The charts of several runs over each other: one curve for each run."""

from collections.abc import Callable, Mapping, Sequence

from drot.report.drawing import Chart
from drot.report.kinds import lines
from drot.report.reading import REMOVED_IMPORTANCE, Run, final_error

#: a layer or a step of the training → a figure of a run
Curve = dict[int, float]


def charts_of_several(runs: Sequence[Run]) -> list[Chart]:
    """The charts of CURVES. A run without figures for a curve is left out, and so is a chart without runs."""
    charts = []
    for name, (title, x, curve_of) in CURVES.items():
        series = {run.name: curve for run in runs if (curve := curve_of(run))}
        if series:
            charts.append(lines(f"compare-{name}", title, x, series, _compared(title, x, series)))
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
