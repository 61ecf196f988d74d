"""The kinds of charts of a report: lines, bands, bars and grids.

name: of a chart's files. title: above it. caption: the chart in words.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from drot.reporting.drawing import DEPTHS, LIGHT, SERIES, Chart, axes, legend, whole_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: most layers of a grid whose cells have room for a number
MOST_NUMBERED = 10


def lines(
    name: str,
    title: str,
    x: str,
    series: Mapping[str, Mapping[int, float]],
    caption: str,
    *,
    named: Sequence[str] | None = None,
) -> Chart:
    """Lines through points, each with a colour, a dash and a marker of its own, and a legend.

    A line is wider than those that are drawn over it, so that both are seen where they coincide.

    x: the label of the x axis. series: label of a line → x → y.
    named: the lines that have their names at their ends; their colours then go from dark to light, in place
        of a legend. None draws a legend.
    """
    with axes(280 if named is None else 240) as (figure, axis):
        for number, (label, values) in enumerate(series.items()):
            colour, dash, marker = SERIES[number % len(SERIES)]
            width = 1.6 + max(0, min(len(series), 4) - 1 - number)
            if named is not None:
                colour, marker, width = DEPTHS[number * len(DEPTHS) // len(series)], "", 1.6
            axis.plot(
                list(values), list(values.values()), color=colour, linestyle=dash, marker=marker,
                markevery=max(1, len(values) // 12), markersize=3.5 + width / 2, linewidth=width, label=label,
            )  # fmt: skip
            if named is not None and label in named:
                _name_end(axis, label, values)
        axis.set(title=title, xlabel=x)
        whole_steps(axis.xaxis)
        if named is None:
            axis.set_ylim(0, 1.08 * max(max(values.values()) for values in series.values()) or 1)
            legend(figure, axis)
    return Chart(name, caption, figure)


def band(
    name: str,
    title: str,
    x: str,
    series: Mapping[str, Mapping[int, float]],
    caption: str,
    *,
    named: Sequence[str],
) -> Chart:
    """Many lines as two bands, of all of them and of their middle half, with the line of their median.

    A line that ends early keeps its last value. named: lines that are drawn too, with their names.
    """
    places = sorted({place for values in series.values() for place in values})
    rows = [np.interp(places, list(values), list(values.values())) for values in series.values()]
    low, first, middle, third, high = np.quantile(rows, (0, 0.25, 0.5, 0.75, 1), axis=0)
    with axes(240) as (figure, axis):
        axis.fill_between(places, low, high, color=LIGHT["blue"], alpha=0.15, linewidth=0)
        axis.fill_between(places, first, third, color=LIGHT["blue"], alpha=0.35, linewidth=0)
        axis.plot(places, middle, color=LIGHT["blue"])
        for label in dict.fromkeys(named):
            values = series[label]
            axis.plot(
                list(values), list(values.values()), color=LIGHT["vermilion"], linestyle="--", linewidth=1
            )
            _name_end(axis, label, values)
        axis.set(title=title, xlabel=x)
        whole_steps(axis.xaxis)
    return Chart(name, caption, figure)


def _name_end(axis: "Axes", label: str, values: Mapping[int, float]) -> None:
    """Writes the number of a layer at the end of its line."""
    axis.annotate(
        label.removeprefix("layer "), list(values.items())[-1], xytext=(4, -3), textcoords="offset points",
        fontsize=10,
    )  # fmt: skip


def bars(
    name: str,
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    text: str,
    caption: str,
    *,
    best: str = "",
) -> Chart:
    """Horizontal bars with their values.

    groups: label of a colour → name of a bar → value. text: the format of a value, as in `{:.1f} s`.
    best: the bar whose value and name are bold.
    """
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
            shown = axis.bar_label(bars, [" " + text.format(value) for value in values.values()], fontsize=10)
            for bar, label in zip(values, shown, strict=True):
                label.set_fontweight("bold" if bar == best else "normal")
        axis.set_yticks(range(len(names)), names)
        for bar, label in zip(names, axis.get_yticklabels(), strict=True):
            label.set_fontweight("bold" if bar == best else "normal")
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.grid(visible=False, axis="y")
        axis.set(title=title)
        if len(groups) > 1:
            legend(figure, axis)
    return Chart(name, caption, figure)


def grid(
    name: str, title: str, values: Mapping[tuple[int, str], float], roles: Sequence[str], caption: str
) -> Chart:
    """Roles by layers, as colours of the colormap cividis, with per cents in the cells where there is room.

    values: (layer, role) → share; 1 is shown as 100. roles: in the order of the rows.
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    layers = sorted({layer for layer, _ in values})
    roles = [role for role in roles if any(role == other for _, other in values)]
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
    """Labels the cells of a grid: at most about 8 layers below it, and every role at its left."""
    every = max(1, len(layers) // 8)
    axis.set_xticks([i + 0.5 for i in range(0, len(layers), every)], [str(i) for i in layers[::every]])
    axis.set_yticks([i + 0.5 for i in range(len(roles))], [role.removesuffix("_proj") for role in roles])
    axis.invert_yaxis()
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
