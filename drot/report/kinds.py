"""The kinds of charts of a report: lines, bars and grids.

name: of a chart's files. title: above it. caption: the chart in words.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drot.report.drawing import LIGHT, SERIES, Chart, axes, legend, whole_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: most layers of a grid whose cells have room for a number
MOST_NUMBERED = 10


def lines(name: str, title: str, x: str, series: Mapping[str, Mapping[int, float]], caption: str) -> Chart:
    """Lines through points, each with a colour, a dash and a marker of its own.

    x: the label of the x axis. series: label of a line → x → y.
    """
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


def bars(name: str, title: str, groups: Mapping[str, Mapping[str, float]], text: str, caption: str) -> Chart:
    """Horizontal bars with their values.

    groups: label of a colour → name of a bar → value. text: the format of a value, as in `{:.1f} s`.
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
            axis.bar_label(bars, [" " + text.format(value) for value in values.values()], fontsize=10)
        axis.set_yticks(range(len(names)), names)
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
