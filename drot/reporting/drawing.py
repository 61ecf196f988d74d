"""How charts look, and how they become inline SVG and files.

Charts are drawn in the light colours of COLOURS. In the page each of these colours becomes a CSS variable,
which the page sets for light and for dark. The colours of series follow Okabe and Ito, whose colours the
colour-blind can tell apart; every series also has a dash and a marker of its own.
"""

import base64
import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: CSS variable → colour in the light and in the dark. The light colours differ from each other.
COLOURS = {
    "ink": ("#1b1b1f", "#e6e6ea"),
    "muted": ("#5c6068", "#a7abb5"),
    "grid": ("#d8dbe0", "#3a3d44"),
    "paper": ("#fdfdfe", "#16171a"),
    "blue": ("#0072b2", "#56b4e9"),
    "vermilion": ("#d55e00", "#f0883e"),
    "green": ("#009e73", "#2fc49a"),
    "purple": ("#a64d82", "#cc79a7"),
    "orange": ("#b87a00", "#e69f00"),
    "black": ("#000000", "#ffffff"),
    # a ramp from the first to the last layer: parts of viridis that stand out on white and on black
    "depth0": ("#440154", "#35b779"),
    "depth1": ("#472d7b", "#4ac26d"),
    "depth2": ("#3b528b", "#6ece58"),
    "depth3": ("#2c728e", "#9bd93c"),
    "depth4": ("#21918c", "#c5e021"),
    "depth5": ("#28ae80", "#fde725"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
DEPTHS = [LIGHT[name] for name in LIGHT if name.startswith("depth")]
#: colour, dash and marker of the series of a chart, in this order
SERIES = (
    (LIGHT["blue"], "-", "o"),
    (LIGHT["vermilion"], "--", "s"),
    (LIGHT["green"], "-.", "^"),
    (LIGHT["purple"], ":", "D"),
    (LIGHT["orange"], (0, (5, 1, 1, 1, 1, 1)), "v"),
    (LIGHT["black"], (0, (1, 1)), "P"),
)
#: width in inches of a chart: 340 px, which fits a phone
WIDTH = 340 / 72
#: pixels of an inch of an image in the page
IMAGE_DPI = 84
PACKAGE = "matplotlib>=3.9,<4"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "drot",
    "text.parse_math": False,  # a $ in the name of a model is a $
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["muted"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "text.color": LIGHT["ink"],
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Chart:
    """One chart.

    name: of its files. caption: what is drawn, as text for everybody. figure: the drawing.
    as_image: the page holds it as WebP, for a drawing whose SVG is ten times larger.
    """

    name: str
    caption: str
    figure: "Figure"
    as_image: bool = False

    def svg(self) -> str:
        """The chart as an inline <svg>, with CSS variables for colours and with its text as text."""
        buffer = io.StringIO()
        with _style():
            self.figure.savefig(
                buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
            )
        return _for_the_page(buffer.getvalue())

    def webp(self) -> str:
        """The chart as a data URI, with a transparent ground."""
        webp = io.BytesIO()
        quality = {"quality": 55, "alpha_quality": 30, "method": 6}
        self.figure.savefig(webp, format="webp", dpi=IMAGE_DPI, pil_kwargs=quality)
        return data_uri(webp.getvalue(), "webp")

    def save(self, folder: Path) -> list[Path]:
        """Writes `<name>.svg` and `<name>.png`, on white; returns both. Equal runs give equal files."""
        dated = {"svg": {"Date": None}, "png": {"Software": None}}
        files = {kind: folder / f"{self.name}.{kind}" for kind in dated}
        with _style():
            for kind, file in files.items():
                self.figure.savefig(file, dpi=200, facecolor="white", metadata=dated[kind])
        return list(files.values())


#: pattern → replacement, for matplotlib's SVG in a page
_IN_THE_PAGE = (
    (r"^.*?(?=<svg)", ""),  # the XML declaration and the doctype
    (r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", ""),
    # the ids of groups, such as axes_1, would be in the page several times, and nothing refers to them
    (r'<g id="[^"]*"', "<g"),
    (r'(<svg [^>]*?)width="[^"]*"', r"\1"),
    (r'(<svg [^>]*?)height="[^"]*"', r"\1"),
    (r'version="1.1"|xmlns(:xlink)?="[^"]*"|transform="rotate\(-0 [^"]*"|xlink:(?=href)', ""),
    (r'<path d="[^"]*"\s+style="fill: none"/>', ""),  # invisible grounds
    (r"font-family: [^;\"]*;? ?| ?stroke-line(cap|join): (square|miter);?", ""),  # the page's own font
    (r"\s+", " "),
    (r"(?<=>) (?=<)", ""),
)


def _for_the_page(text: str) -> str:
    """matplotlib's SVG as an inline <svg>: smaller, and with CSS variables for the colours of COLOURS."""
    for pattern, replacement in _IN_THE_PAGE:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--{name})")
    # one decimal of a pixel; numbers outside of quotes are text
    text = re.sub(r'"[^"<>:]*"', lambda quoted: re.sub(r"(\.\d)\d+", r"\1", quoted[0]), text)
    text = re.sub(r"data:image/png;base64, ?([\w+/= ]+)", lambda image: _fewer_colours(image[1]), text)
    return text.strip().replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def _fewer_colours(encoded: str) -> str:
    """A PNG in base64 as the data URI of a PNG with 64 colours."""
    from PIL import Image

    smaller = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    image.convert("RGB").quantize(64).save(smaller, "png", optimize=True)
    return data_uri(smaller.getvalue(), "png")


@contextlib.contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


@contextlib.contextmanager
def blank(height: float, layout: Literal["constrained"] | None = None) -> Iterator["Figure"]:
    """A new figure in drot's style without axes, in which the block draws.

    height: in pixels. layout: None places no axes, and takes half of the time of the drawing.
    """
    from matplotlib.figure import Figure

    with _style():
        yield Figure(figsize=(WIDTH, height / 72), layout=layout)


@contextlib.contextmanager
def axes(height: float, rows: int = 1, **options: Any) -> Iterator[tuple["Figure", Any]]:
    """A new figure with axes in drot's style, in which the block draws. height: of the figure, in pixels."""
    with blank(height, "constrained") as figure:
        yield figure, figure.subplots(rows, 1, **options)


def installed() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def whole_steps(axis: Any) -> None:
    """Ticks of an axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def legend(figure: "Figure", axes: "Axes") -> None:
    """The legend above the axes, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 2 if max(map(len, labels)) < 22 else 1
        place = "outside upper left" if figure.get_layout_engine() else "upper left"
        figure.legend(handles, labels, loc=place, ncols=columns)


def data_uri(image: bytes, kind: str) -> str:
    """An image as the value of `src`. kind: `png` or `webp`."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
