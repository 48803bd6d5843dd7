"""Small line plots as SVG text for self-contained HTML pages.

Labels and axes have the colour of the surrounding text (`currentColor`). Lines have colours that
are legible on white and on dark pages. Different dashes distinguish them in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Points = Sequence[tuple[float, float]]
COLOURS = ("#2f7fd1", "#d1602a", "#2e9461", "#9a66cc", "#a8821a", "#c4527f", "#3a8f9e", "#7a7f87")
DASHES = ("", "7 4", "2 3", "10 3 2 3")
# The width of the picture, the ends of both axes, and the space below the x axis, in pixels.
WIDTH, X_START, X_END, Y_END, Y_START, BOTTOM = 640, 76, 620, 16, 272, 48

LEGEND = 18
MAX_TICKS = 10


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        name: the name of the line in the legend.
        points: the points (x, y), sorted by x.
        band: points (x, low, high) of a shaded band around the line, such as the range over seeds.
        colour: the index of the line's colour in `COLOURS` and of its dash in `DASHES`. None uses
            the position of the line in the plot.
    """

    name: str
    points: Points
    band: Sequence[tuple[float, float, float]] = ()
    colour: int | None = None


def templates(*folders: Path, autoescape: bool = True) -> Environment:
    """Loads the templates in the given folders and in this package."""
    return Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent / "templates"]),
        undefined=StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
    )


_TEMPLATES = templates()


def line_plot(
    lines: Sequence[Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    from_zero: bool = True,
    percent: bool = False,
) -> str:
    """Draws several lines in one plot.

    Args:
        lines: the lines, which are drawn in this order.
        x, y: the labels of the axes.
        log_x: True uses a logarithmic x axis. All x must then be positive.
        from_zero: True lets the y axis begin at 0.
        percent: True labels the y axis in percent.

    Returns:
        The SVG text. It is empty if the lines have no points.
    """
    xs: set[float] = set()
    heights: list[float] = []
    for line in lines:
        for x_value, *values in (*line.points, *line.band):
            xs.add(x_value)
            heights += values
    if not xs:
        return ""
    axis_x = _x_axis(sorted(xs), log=log_x)
    axis_y = _y_axis(min(heights), max(heights), from_zero=from_zero)
    above = LEGEND * len(lines) + 4  # the legend is above the axes
    return _TEMPLATES.get_template("plot.svg.j2").render(
        title=f"{y} over {x}: {', '.join(line.name for line in lines)}",
        x=x,
        y=y,
        width=WIDTH,
        height=above + Y_START + BOTTOM,
        above=above,
        legend_height=LEGEND,
        axis_x=axis_x,
        axis_y=axis_y,
        percent=percent,
        lines=lines,
        colours=COLOURS,
        dashes=DASHES,
    )


def standalone(svg: str) -> str:
    """Adds a white background to a plot, for a separate SVG file."""
    return svg.replace("</title>", '</title><rect width="100%" height="100%" fill="#fff"/>') + "\n"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Chooses round numbers from `low` to `high` as axis labels.

    The distance between two labels is 1, 2 or 5 times a power of ten. There are roughly `about`
    labels.

    >>> ticks(0.0, 9.0, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass(frozen=True)
class _Axis:
    """An axis, which maps the values from `low` to `high` to pixel positions.

    On a logarithmic axis, `low` and `high` are the logarithms of the values.
    """

    low: float
    high: float
    first_pixel: int
    last_pixel: int
    ticks: Sequence[float]
    log: bool = False

    def pixel(self, value: float) -> float:
        if self.log:
            value = math.log10(value)
        share = (value - self.low) / (self.high - self.low)
        return round(self.first_pixel + share * (self.last_pixel - self.first_pixel), 1)


def _x_axis(values: Sequence[float], *, log: bool) -> _Axis:
    """Returns the x axis for sorted values.

    The labels are the values themselves if the axis is logarithmic or if there are only a few
    values, all of which are integers. Otherwise the labels are round numbers.
    """
    low, high = values[0], values[-1]
    if log:
        low, high = math.log10(low), math.log10(high)
    if low == high:
        low, high = low - 0.5, high + 0.5
    integral = all(float(value).is_integer() for value in values)
    labels = values
    if not log and (len(values) > MAX_TICKS or not integral):
        labels = [tick for tick in ticks(low, high, 8) if tick.is_integer() or not integral]
    return _Axis(low, high, X_START, X_END, labels, log)


def _y_axis(lowest: float, highest: float, *, from_zero: bool) -> _Axis:
    """Returns the y axis for a range of values, with some space above and below."""
    low = 0.0 if from_zero else lowest
    margin = 0.05 * (highest - low) or 0.05 * abs(highest) or 1.0
    high = highest + margin
    if not from_zero:
        low -= margin
        if lowest >= 0:
            low = max(low, 0.0)
    return _Axis(low, high, Y_START, Y_END, ticks(low, high, 5))
