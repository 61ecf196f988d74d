"""The charts of one run, and of several runs over each other."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drot.report.drawing import DEPTHS, LIGHT, SERIES, Chart, axes, legend, whole_steps
from drot.report.reading import (
    Figure,
    Run,
    final_error,
    layer_means,
    mean,
    one_shot,
    ratios,
    roles_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
#: most layers of a grid whose cells have room for a number
MOST_NUMBERED = 10
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


def charts_of_several(runs: Sequence[Run]) -> list[Chart]:
    """Charts with one curve for each run."""
    curves = {
        "training": ("Mean loss, as a share of the start", "step", {r.name: _mean_curve(r) for r in runs}),
        "entropy": (
            "Entropy after, as a share of before",
            "layer",
            {run.name: _entropy_share(run) for run in runs},
        ),
        "output-error": ("Output error, mean of a layer", "layer", _by_run(runs, final_error)),
        "importance": (
            "Pruned share of the importance",
            "layer",
            {
                run.name: layer_means(
                    run, one_shot("after" if run.rotated else "before", "removed_importance")
                )
                for run in runs
            },
        ),
        "recovery": (
            "Held-out error after recovery",
            "layer",
            {
                run.name: {
                    layer["layer"]: layer["recovery"]["error_after"]
                    for layer in run.layers
                    if layer.get("recovery")
                }
                for run in runs
            },
        ),
    }
    charts = []
    for name, (title, x, series) in curves.items():
        series = {run: values for run, values in series.items() if values}
        if series:
            charts.append(_lines(f"compare-{name}", title, x, series, _compared(title, series)))
    return charts


# ---- the charts of one run -----------------------------------------------------------------------------


def training(run: Run) -> Chart | None:
    """The loss of each training by step, as a share of its start."""
    curves: dict[str, Sequence[float]] = {
        f"layer {layer}": record["loss_curve"] for layer, record in run.trainings()
    }
    if shared := run.manifest.get("shared_rotation"):
        curves = {"all layers": shared["loss_curve"]}
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1 and curve[0] > 0}
    if not curves:
        return None
    ends = {name: curve[-1] / curve[0] for name, curve in curves.items()}
    best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    kind = "entropy" if run.recipe["rotation"]["objective"] == "entropy" else "pruned importance"
    with axes(260) as (figure, axis):
        for number, (name, curve) in enumerate(curves.items()):
            depth = DEPTHS[number * len(DEPTHS) // len(curves)]
            dash = SERIES[number % 4][1]
            axis.plot([loss / curve[0] for loss in curve], color=depth, linestyle=dash)
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
    lines = " A line is a layer, from dark (first) to light (last); numbers name some." * (len(curves) > 1)
    return Chart("training", which + lines, figure)


def entropy_by_step(run: Run) -> Chart | None:
    """The entropy of each layer by step of its training, as a share of its start."""
    curves: dict[str, list[list[float]]] = {
        f"layer {layer}": record.get("entropy_curve", []) for layer, record in run.trainings()
    }
    if shared := run.manifest.get("shared_rotation"):
        curves = {"all layers": shared.get("entropy_curve", [])}
    curves = {name: curve for name, curve in curves.items() if len(curve) > 2 and curve[0][1] > 0}
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
    lines = " A line is a layer, from dark (first) to light (last)." * (len(curves) > 1)
    return Chart("entropy-steps", which + lines, figure)


def entropy(run: Run) -> Chart | None:
    """The entropy of each layer before and after its training."""
    records = dict(run.trainings())
    if shared := run.manifest.get("shared_rotation"):
        records = {0: shared}
    series = {
        f"{when} the rotation": {layer: record[f"entropy_{when}"] for layer, record in records.items()}
        for when in ("before", "after")
        if all(f"entropy_{when}" in record for record in records.values())
    }
    if not records or len(series) < 2:
        return None
    if shared:
        return None  # one number, which the table has
    before, after = (sum(values.values()) for values in series.values())
    caption = f"The entropy of the importance, summed over the layers, changes by {after / before - 1:+.1%}."
    return _lines("entropy", "Entropy of the importance", "layer", series, caption)


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
    return _lines("output-error", "Output error", "layer", series, caption)


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
    return _grid("pruned-importance", "Pruned importance, % of not rotated", quotients, caption)


def error_grid(run: Run) -> Chart | None:
    """The one-shot output error after the rotation, as a share of before, by linear."""
    quotients = ratios(run, one_shot("after", "output_error"), one_shot("before", "output_error"))
    if not quotients:
        return None
    caption = (
        "The output error of one-shot pruning with the rotation, in per cent of the error without it; "
        f"{_extremes(quotients)}."
    )
    return _grid("one-shot-error", "One-shot output error, % of not rotated", quotients, caption)


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
    return _lines("recovery", "Held-out error of the layer's output", "layer", series, caption)


def seconds(run: Run) -> Chart | None:
    """The time of each phase."""
    values = {name: value for name, value in run.manifest["seconds"].items() if value > 0 and name != "total"}
    if not values:
        return None
    longest = max(values, key=values.__getitem__)
    caption = (
        f"{longest} takes longest, {values[longest]:.1f} of {run.manifest['seconds']['total']:.1f} s in all."
    )
    return _bars("seconds", "Seconds by phase", {"": values}, "{:.1f} s", caption)


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
        "The largest memory until the end of a phase. That of the process never falls; it includes what the "
        "process used before the run."
    )
    if "GPU" in values:
        caption += " That of the GPU is the largest that torch allocated in the phase."
    return _bars("memory", "Peak memory by phase, GiB", values, "{:.2f}", caption)


# ---- kinds of charts -----------------------------------------------------------------------------------


def _lines(name: str, title: str, x: str, series: Mapping[str, Mapping[int, float]], caption: str) -> Chart:
    """Lines through (x, y), each with a colour, a dash and a marker of its own."""
    with axes(280) as (figure, axis):
        for number, (label, values) in enumerate(series.items()):
            colour, dash, marker = SERIES[number % len(SERIES)]
            every = max(1, len(values) // 12)
            axis.plot(
                list(values), list(values.values()), color=colour, linestyle=dash, marker=marker,
                markevery=every, label=label,
            )  # fmt: skip
        axis.set(title=title, xlabel=x)
        axis.set_ylim(0, 1.08 * max(max(values.values()) for values in series.values()) or 1)
        whole_steps(axis.xaxis)
        legend(figure, axis)
    return Chart(name, caption, figure)


def _bars(name: str, title: str, groups: Mapping[str, Mapping[str, float]], text: str, caption: str) -> Chart:
    """Horizontal bars with their values. groups: label → name of a bar → value."""
    names = list(dict.fromkeys(bar for values in groups.values() for bar in values))
    with axes(60 + 26 * len(names) * len(groups)) as (figure, axis):
        height = 0.8 / len(groups)
        for number, (label, values) in enumerate(groups.items()):
            colour, hatch = (LIGHT["blue"], "") if number == 0 else (LIGHT["vermilion"], "///")
            places = [names.index(bar) + (number - (len(groups) - 1) / 2) * height for bar in values]
            bars = axis.barh(
                places, list(values.values()), height * 0.9, color=colour, hatch=hatch,
                edgecolor=LIGHT["paper"], label=label or None,
            )  # fmt: skip
            axis.bar_label(bars, [" " + text.format(value) for value in values.values()], fontsize=10)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.grid(visible=False, axis="y")
        axis.set(title=title)
        if len(groups) > 1:
            legend(figure, axis)
    return Chart(name, caption, figure)


def _grid(name: str, title: str, values: dict[tuple[int, str], float], caption: str) -> Chart:
    """Roles by layers, as colours of cividis, with per cents in the cells where there is room."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    layers, roles = sorted({layer for layer, _ in values}), roles_of(values)
    norm = Normalize(min(0.0, *values.values()), max(values.values()))
    with axes(250) as (figure, axis):
        axis.grid(visible=False)
        mesh = axis.pcolormesh(
            [[values.get((layer, role), float("nan")) for layer in layers] for role in roles],
            cmap="cividis", norm=norm, edgecolors=LIGHT["paper"], linewidth=0.5 if len(layers) < 30 else 0,
        )  # fmt: skip
        if len(layers) <= MOST_NUMBERED:
            for (layer, role), value in values.items():
                red, green, blue, _ = colormaps["cividis"](norm(value))
                bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                axis.text(
                    layers.index(layer) + 0.5, roles.index(role) + 0.5, f"{100 * value:.0f}", ha="center",
                    va="center", fontsize=9, color="#010101" if bright else "#fefefe",
                )  # fmt: skip
        else:
            bar = figure.colorbar(mesh, ax=axis, location="bottom", aspect=40)
            bar.ax.xaxis.set_major_formatter(lambda value, position: f"{100 * value:.0f}")
        _label_grid(axis, layers, roles)
        axis.set(title=title, xlabel="layer")
    return Chart(name, caption, figure)


def _label_grid(axis: "Axes", layers: list[int], roles: list[str]) -> None:
    every = max(1, len(layers) // 8)
    axis.set_xticks([i + 0.5 for i in range(0, len(layers), every)], [str(i) for i in layers[::every]])
    axis.set_yticks([i + 0.5 for i in range(len(roles))], [role.removesuffix("_proj") for role in roles])
    axis.invert_yaxis()
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


# ---- figures and words -----------------------------------------------------------------------------------


def _extremes(quotients: dict[tuple[int, str], float]) -> str:
    (low, low_role), (high, high_role) = (pick(quotients, key=quotients.__getitem__) for pick in (min, max))
    return (
        f"the least is {quotients[low, low_role]:.0%} in layer {low}, {low_role}, the most "
        f"{quotients[high, high_role]:.0%} in layer {high}, {high_role}"
    )


def _compared(title: str, series: Mapping[str, Mapping[int, float]]) -> str:
    """The last value of each curve of a comparison, or the mean over the layers."""
    parts = []
    for name, values in series.items():
        numbers = list(values.values())
        value = numbers[-1] if title.startswith("Mean loss") else sum(numbers) / len(numbers)
        parts.append(f"{name} {value:.4g}")
    what = "At the last step" if title.startswith("Mean loss") else "Mean over the layers"
    return f"{title}. {what}: {', '.join(parts)}."


def _mean_curve(run: Run) -> dict[int, float]:
    """Step → mean loss of the trainings as a share of the start; a training that ended keeps its loss."""
    curves: list[list[float]] = [record["loss_curve"] for _, record in run.trainings()]
    if shared := run.manifest.get("shared_rotation"):
        curves = [shared["loss_curve"]]
    curves = [curve for curve in curves if curve and curve[0] > 0]
    steps = max(map(len, curves), default=0)
    return {step: _at(curves, step) for step in range(steps)}


def _at(curves: list[list[float]], step: int) -> float:
    return sum(curve[min(step, len(curve) - 1)] / curve[0] for curve in curves) / len(curves)


def _entropy_share(run: Run) -> dict[int, float]:
    return {
        layer: record["entropy_after"] / record["entropy_before"]
        for layer, record in run.trainings()
        if record.get("entropy_before")
    }


def _by_run(runs: Sequence[Run], figure: Figure) -> dict[str, dict[int, float]]:
    return {run.name: layer_means(run, figure) for run in runs}
