"""Small plots as SVG text, for self-contained pages.

Text and axes have the colour of the surrounding text (`currentColor`). Lines have colours that are
legible on white and on dark pages, and dashes that distinguish them in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Points = Sequence[tuple[float, float]]
COLOURS = ("#2f7fd1", "#d1602a", "#2e9461", "#9a66cc", "#a8821a", "#c4527f", "#3a8f9e", "#7a7f87")
DASHES = ("", "7 4", "2 3", "10 3 2 3")
WIDTH, LEFT, RIGHT, TOP, BASE, BOTTOM = 640, 76, 620, 16, 272, 48
"""Pixels: the picture's width, the axes' edges in it, and the space below the x axis."""
LEGEND = 18
MAX_LEGEND = 78
"""The number of a legend's characters that fit the width."""
MAX_DOTS = 60


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        name: the name in the legend.
        points: (x, y), sorted by x.
        band: (x, low, high) around the line, such as the range over seeds.
        colour: its index in `COLOURS` and `DASHES`; None: its position among the lines.
    """

    name: str
    points: Points
    band: Sequence[tuple[float, float, float]] = ()
    colour: int | None = None


def svg_templates(folder: Path) -> Environment:
    """Returns the templates of a folder, with autoescaping."""
    return Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent / "templates"]),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


_TEMPLATES = svg_templates(Path(__file__).parent / "templates")


def line_plot(
    series: Sequence[tuple[str, Points] | Line],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    faint: Sequence[Points] = (),
    from_zero: bool = True,
    percent: bool = False,
    first_broad: bool = False,
) -> str:
    """Draws lines through points, with a legend above them.

    Args:
        series: (name, points), or lines with bands.
        x, y: titles of the axes.
        log_x: a logarithmic x axis.
        faint: lines without a name, behind the others.
        from_zero: the y axis begins at 0; otherwise near the smallest value.
        percent: y values are shares, which its axis shows in percent.
        first_broad: the first line is drawn broad and the others over it, so that each is visible
            where they coincide.

    Returns:
        The SVG text; empty without any point.
    """
    lines = [curve if isinstance(curve, Line) else Line(*curve) for curve in series]
    scale = _Scale.of(lines, faint, log_x=log_x, from_zero=from_zero)
    if scale is None:
        return ""
    above = LEGEND * len(lines) + 4  # the legend is above the axes
    drawn = [_drawn(line, n, scale, first_broad) for n, line in enumerate(lines)]
    values_y = ticks(scale.bottom, scale.top, 5)
    unit = (100, " %") if percent else (1, "")
    return _TEMPLATES.get_template("plot.svg.j2").render(
        title=f"{y} over {x}: {', '.join(line.name for line in lines)}",
        x=x,
        y=y,
        width=WIDTH,
        height=above + BASE + BOTTOM,
        above=above,
        left=LEFT,
        right=RIGHT,
        top=TOP,
        base=BASE,
        lines=drawn,
        faint=[_path(map(scale.at, points)) for points in faint],
        ticks_x=[(scale.at((a, scale.bottom))[0], f"{a:.6g}") for a in scale.ticks_x()],
        ticks_y=[
            (scale.at((scale.values_x[0], b))[1], f"{unit[0] * b:.6g}{unit[1]}") for b in values_y
        ],
    )


def bar_plot(bars: Sequence[tuple[str, float]], *, y: str) -> str:
    """Draws a horizontal bar for each (name, value ≥ 0), followed by its value."""
    longest = max((value for _, value in bars), default=0.0) or 1.0
    drawn = [
        {
            "name": name,
            "value": f"{value:.4g}",
            "top": 8 + 44 * number,
            "length": round(value / longest * (WIDTH - 120), 1),
            "colour": COLOURS[number % len(COLOURS)],
        }
        for number, (name, value) in enumerate(bars)
    ]
    height = 16 + 44 * len(bars)
    template = _TEMPLATES.get_template("bars.svg.j2")
    return template.render(title=y, width=WIDTH, height=height, bars=drawn)


def standalone(svg: str) -> str:
    """Returns a plot for a separate file: always black on white."""
    start, sign, rest = svg.partition("</title>")
    return f'{start}{sign}<rect width="100%" height="100%" fill="#fff"/>{rest}\n'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Returns round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`.

    >>> ticks(0.0, 9.0, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass(frozen=True)
class _Scale:
    """Maps values to positions in the picture."""

    left: float
    right: float
    bottom: float
    top: float
    log_x: bool
    values_x: tuple[float, ...]

    @classmethod
    def of(
        cls, lines: Sequence[Line], faint: Sequence[Points], *, log_x: bool, from_zero: bool
    ) -> _Scale | None:
        xs: set[float] = set()
        heights: list[float] = []
        for points in (*(line.points for line in lines), *faint):
            xs.update(a for a, _ in points)
            heights.extend(b for _, b in points)
        if not xs:
            return None
        for line in lines:
            for _, low, high in line.band:
                heights += [low, high]
        scale = math.log10 if log_x else float
        left, right = scale(min(xs)), scale(max(xs))
        if left == right:
            left, right = left - 0.5, right + 0.5
        top = max(heights)
        lowest = min(heights)
        bottom = 0.0 if from_zero else lowest
        spare = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
        if not from_zero:
            bottom = max(lowest - spare, 0.0 if lowest >= 0 else -math.inf)
        return cls(left, right, bottom, top + spare, log_x, tuple(sorted(xs)))

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        """Returns a point's position, in pixels."""
        across = math.log10(point[0]) if self.log_x else float(point[0])
        share_x = (across - self.left) / (self.right - self.left)
        share_y = (point[1] - self.bottom) / (self.top - self.bottom)
        return round(LEFT + share_x * (RIGHT - LEFT), 1), round(BASE - share_y * (BASE - TOP), 1)

    def ticks_x(self) -> list[float]:
        """Returns the values that the x axis labels."""
        integral = all(float(value).is_integer() for value in self.values_x)
        if len(self.values_x) <= 10 and (integral or self.log_x):
            return list(self.values_x)
        if self.log_x:
            last = len(self.values_x) - 1
            return [self.values_x[round(i * last / 7)] for i in range(8)]
        positions = ticks(self.left, self.right, 8)
        return [value for value in positions if not integral or value.is_integer()]


def _drawn(line: Line, number: int, scale: _Scale, first_broad: bool) -> dict[str, Any]:
    """Returns the template's variables for a line."""
    kind = number if line.colour is None else line.colour
    dots = [scale.at(point) for point in line.points]
    upper = [scale.at((a, high)) for a, _, high in line.band]
    lower = [scale.at((a, low)) for a, low, _ in line.band]
    short = len(line.name) <= MAX_LEGEND
    return {
        "name": line.name if short else f"{line.name[: MAX_LEGEND - 1]}…",
        "legend": LEGEND * number + 16,
        "colour": COLOURS[kind % len(COLOURS)],
        "dash": DASHES[kind % len(DASHES)],
        "width": 6 if number == 0 and first_broad else 2,
        "points": _path(dots),
        "band": _path([*upper, *reversed(lower)]),
        "dots": dots if len(dots) <= MAX_DOTS else [],
    }


def _path(points: Any) -> str:
    return " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
