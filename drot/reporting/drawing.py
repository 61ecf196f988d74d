"""How charts look, and the kinds of charts: lines and grids.

The colours of series follow Okabe and Ito, whose colours the colour-blind can tell apart; every series also
has a dash and a marker of its own.
"""

import base64
import contextlib
import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: colour, dash and marker of the series of a chart, in this order
SERIES = (
    ("#0072b2", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#009e73", "-.", "^"),
    ("#a64d82", ":", "D"),
    ("#b87a00", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#000000", (0, (1, 1)), "P"),
)
#: inches of the width of a chart: 340 px, which fits a phone
WIDTH = 340 / 72
PACKAGE = "matplotlib>=3.9,<4"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "drot",
    "text.parse_math": False,  # a $ in the name of a model is a $
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#d8dbe0",
    "lines.markersize": 4.5,
    "legend.frameon": False,
}


def installed() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Chart:
    """One chart. caption: what is drawn, as text for everybody. figure: the drawing."""

    caption: str
    figure: "Figure"

    def uri(self) -> str:
        """The chart as the value of `src`: an SVG on white, with its text as text."""
        from matplotlib import rc_context

        svg = io.BytesIO()
        with rc_context(STYLE):
            self.figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}"


@contextlib.contextmanager
def axes(height: float, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple["Figure", Any]]:
    """A new figure with axes in drot's style, in which the block draws. height: of the figure, in pixels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height / 72), layout="constrained")
        yield figure, figure.subplots(rows, columns, **options)


def lines(
    title: str,
    x: str,
    series: Mapping[str, Mapping[int, float]],
    caption: str,
    *,
    ramp: bool = False,
) -> Chart:
    """Lines through points, each with a colour, a dash and a marker of its own, and a legend.

    x: the label of the x axis. series: label of a line → x → y.
    ramp: whether the colours go from dark to light, in place of a legend, for many lines.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    with axes(280) as (figure, axis):
        for number, (label, values) in enumerate(series.items()):
            colour, dash, marker = SERIES[number % len(SERIES)]
            if ramp:
                colour, dash, marker = colormaps["viridis"](0.85 * number / len(series)), "-", ""
            axis.plot(
                list(values), list(values.values()), color=colour, linestyle=dash, marker=marker,
                markevery=max(1, len(values) // 12), label=label,
            )  # fmt: skip
        axis.set(title=title, xlabel=x)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        if not ramp:
            axis.set_ylim(0, 1.08 * max(max(values.values()) for values in series.values()) or 1)
            legend(figure, axis)
    return Chart(caption, figure)


def grid(title: str, values: Mapping[tuple[int, str], float], roles: Sequence[str], caption: str) -> Chart:
    """Roles by layers, as colours of the colormap cividis with a bar in per cent.

    values: (layer, role) → share; 1 is shown as 100. roles: in the order of the rows.
    """
    found = [layer for layer, _ in values]
    layers = range(min(found), max(found) + 1)  # a layer without values is a gap
    roles = [role for role in roles if any(role == other for _, other in values)]
    cells = [[values.get((layer, role), float("nan")) for layer in layers] for role in roles]
    with axes(250) as (figure, axis):
        axis.grid(visible=False)
        edges = (layers[0] - 0.5, layers[-1] + 0.5, len(roles) - 0.5, -0.5)
        image = axis.imshow(cells, cmap="cividis", aspect="auto", interpolation="none", extent=edges)
        axis.set_yticks(range(len(roles)), [role.removesuffix("_proj") for role in roles])
        axis.set(title=title, xlabel="layer")
        bar = figure.colorbar(image, ax=axis, location="bottom", aspect=40)
        bar.ax.xaxis.set_major_formatter(lambda value, position: f"{100 * value:.0f}")
    return Chart(caption, figure)


def legend(figure: "Figure", axes: "Axes") -> None:
    """The legend above the axes, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2 if max(map(len, labels)) < 22 else 1)
