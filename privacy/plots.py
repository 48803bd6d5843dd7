"""Small plots as SVG text, for pages that must carry everything themselves.

Text and axes have the colour of the text around them (`currentColor`), and lines colours that are
legible on white and on a dark page; a line's dashes tell it from others in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Points = Sequence[tuple[float, float]]
COLOURS = ("#2f7fd1", "#d1602a", "#2e9461", "#9a66cc", "#a8821a", "#c4527f", "#3a8f9e", "#7a7f87")
DASHES = ("", "7 4", "2 3", "10 3 2 3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 76, 20, 16, 48
LEGEND = 18
FAINT = "#8a97a5"


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        name: in the legend.
        points: (x, y), by x.
        band: (x, low, high) around it, such as the range over seeds.
        colour: its number in `COLOURS` and `DASHES`; None: its place among the lines.
    """

    name: str
    points: Points
    band: Sequence[tuple[float, float, float]] = field(default=())
    colour: int | None = None


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
    """Lines through points, with a legend; empty without any point.

    Args:
        series: (name, points), or lines with bands.
        x, y: what the axes are of.
        log_x: a logarithmic x axis.
        faint: lines without a name, behind the others.
        from_zero: the y axis begins at 0; else near the smallest value.
        percent: y values are shares, which its axis shows in percent.
        first_broad: the first line is drawn broad and the others over it, so that each is seen
            where they coincide.
    """
    lines = [one if isinstance(one, Line) else Line(*one) for one in series]
    scale = _Scale.of(lines, faint, log_x=log_x, from_zero=from_zero)
    if scale is None:
        return ""
    above = LEGEND * len(lines)  # the legend stands over the axes
    parts = [f'<g transform="translate(0 {above})">', _axes(scale, x, y, percent)]
    parts += [_path([scale.at(p) for p in points], FAINT, 1, "", 0.55) for points in faint]
    kinds = [n if line.colour is None else line.colour for n, line in enumerate(lines)]
    for number, line in enumerate(lines):
        parts += _drawn(line, kinds[number], scale, broad=number == 0 and first_broad)
    parts.append("</g>")
    parts += [_legend(line.name, kinds[number], number) for number, line in enumerate(lines)]
    return _svg(parts, HEIGHT + above, f"{y} over {x}: {', '.join(one.name for one in lines)}")


def bar_plot(bars: Sequence[tuple[str, float]], *, y: str) -> str:
    """A horizontal bar for each (name, value ≥ 0), its value beside it."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    parts = []
    for number, (name, value) in enumerate(bars):
        top = 8 + 44 * number
        length = value / most * (WIDTH - 120)
        parts.append(f'<text x="4" y="{top + 12}">{escape(name)}</text>')
        parts.append(
            f'<rect x="4" y="{top + 18}" width="{length:.1f}" height="14" '
            f'fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{length + 10:.1f}" y="{top + 30}">{value:.4g}</text>')
    return _svg(parts, 16 + 44 * len(bars), y)


def standalone(svg: str) -> str:
    """A plot as a file of its own: black on white, whatever shows it."""
    start, sign, rest = svg.partition("</title>")
    return f'{start}{sign}<rect width="100%" height="100%" fill="#fff"/>{rest}\n'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`.

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
    """From values to places in the picture."""

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
        points = [p for line in lines for p in line.points]
        points += [p for some in faint for p in some]
        if not points:
            return None
        heights = [b for _, b in points]
        heights += [edge for line in lines for _, a, b in line.band for edge in (a, b)]
        xs = sorted({a for a, _ in points})
        scale = math.log10 if log_x else float
        left, right = scale(xs[0]), scale(xs[-1])
        if left == right:
            left, right = left - 0.5, right + 0.5
        top = max(heights)
        bottom = 0.0 if from_zero else min(heights)
        spare = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
        bottom = bottom if from_zero else max(bottom - spare, 0.0 if bottom >= 0 else -math.inf)
        return cls(left, right, bottom, top + spare, log_x, tuple(xs))

    def at(self, point: tuple[float, float]) -> tuple[float, float]:
        across = math.log10(point[0]) if self.log_x else float(point[0])
        share_x = (across - self.left) / (self.right - self.left)
        share_y = (point[1] - self.bottom) / (self.top - self.bottom)
        return (
            LEFT + share_x * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - share_y * (HEIGHT - TOP - BOTTOM),
        )

    def ticks_x(self) -> list[float]:
        whole = all(float(value).is_integer() for value in self.values_x)
        if len(self.values_x) <= 10 and (whole or self.log_x):
            return list(self.values_x)
        if self.log_x:
            last = len(self.values_x) - 1
            return [self.values_x[round(i * last / 7)] for i in range(8)]
        found = ticks(self.left, self.right, 8)
        return [value for value in found if not whole or value.is_integer()]


def _drawn(line: Line, number: int, scale: _Scale, *, broad: bool) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    parts = []
    if line.band:
        upper = [scale.at((a, high)) for a, _, high in line.band]
        lower = [scale.at((a, low)) for a, low, _ in line.band]
        around = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*upper, *reversed(lower)])
        parts.append(f'<polygon points="{around}" fill="{colour}" fill-opacity="0.18"/>')
    at = [scale.at(p) for p in line.points]
    dash = DASHES[number % len(DASHES)]
    parts.append(_path(at, colour, 6 if broad else 2, dash, 1))
    if len(at) <= 60:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in at]
    return parts


def _legend(name: str, kind: int, number: int) -> str:
    colour = COLOURS[kind % len(COLOURS)]
    dash = DASHES[kind % len(DASHES)]
    down = LEGEND * number + 10
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="M{LEFT} {down - 4}h34" stroke="{colour}" stroke-width="3"{dashes}/>'
        f'<text x="{LEFT + 42}" y="{down}">{escape(name)}</text>'
    )


def _axes(scale: _Scale, x: str, y: str, percent: bool) -> str:
    base = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    parts = []
    for value in ticks(scale.bottom, scale.top, 5):
        _, down = scale.at((scale.values_x[0], value))
        label = f"{100 * value:.4g} %" if percent else f"{value:.6g}"
        parts.append(
            f'<path d="M{LEFT} {down:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{label}</text>'
        )
    parts.append(f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="currentColor"/>')
    for value in scale.ticks_x():
        across, _ = scale.at((value, scale.bottom))
        parts.append(
            f'<text x="{across:.1f}" y="{base + 16}" text-anchor="middle">{value:.6g}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x)}</text>"
    )
    middle = (TOP + base) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y)}</text>"
    )
    return "".join(parts)


def _path(points: Points, colour: str, width: int, dash: str, opacity: float) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity:g}"{dashes}/>'
    )


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" fill="currentColor" '
        f'font-family="system-ui, sans-serif" font-size="12">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
