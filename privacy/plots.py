"""Small plots as SVG text, for pages that must carry everything themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Points = Sequence[tuple[float, float]]
COLOURS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#7a4fa3", "#8a6d1d", "#555555")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 64, 16, 16, 48
FAINT = "#b8c4d0"


def line_plot(
    series: Sequence[tuple[str, Points]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    faint: Sequence[Points] = (),
) -> str:
    """Lines through the points of each (name, points), with a legend; `faint` lines have no name. y
    starts at 0."""
    everything = [point for points in [*(p for _, p in series), *faint] for point in points]
    if not everything:
        return ""
    above = 16 * len(series)  # the legend stands over the axes
    scale = math.log10 if log_x else float
    xs = [scale(a) for a, _ in everything]
    low = min(xs)
    high = max(xs)
    top = max(b for _, b in everything) or 1.0
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    top *= 1.05

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (scale(point[0]) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - point[1] / top * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [f'<g transform="translate(0 {above})">', _axes(x, y, top)]
    for value in (
        sorted({a for a, _ in everything})
        if len({a for a, _ in everything}) <= 12
        else _few(everything)
    ):
        across, _ = at((value, 0.0))
        parts.append(
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        )
    parts += [_line([at(p) for p in points], FAINT, 1) for points in faint]
    for number, (name, points) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_line([at(p) for p in points], colour, 2))
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in map(at, points)
        ]
        parts.append(
            f'<text x="{LEFT}" y="{16 * number + 10 - above}" fill="{colour}">{escape(name)}</text>'
        )
    return _svg([*parts, "</g>"], HEIGHT + above, f"{y} over {x}")


def bar_plot(bars: Sequence[tuple[str, float]], *, y: str) -> str:
    """A horizontal bar for each (name, value ≥ 0), its value beside it."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    parts = []
    for number, (name, value) in enumerate(bars):
        top = 8 + 44 * number
        length = value / most * (WIDTH - 120)
        parts.append(f'<text x="4" y="{top + 12}">{escape(name)}</text>')
        parts.append(
            f'<rect x="4" y="{top + 18}" width="{length:.1f}" height="14" fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{length + 10:.1f}" y="{top + 30}">{value:.4g}</text>')
    return _svg(parts, 16 + 44 * len(bars), y)


def _few(points: Points) -> list[float]:
    xs = sorted({a for a, _ in points})
    return [xs[round(i * (len(xs) - 1) / 7)] for i in range(8)]


def _axes(x: str, y: str, top: float) -> str:
    base = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    parts = [f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="#444"/>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        down = base - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<path d="M{LEFT} {down:.1f}H{right}" stroke="#e4e8ec"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{share * top:.3g}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
    )
    middle = (TOP + base) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )
    return "".join(parts)


def _line(points: Points, colour: str, width: int) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        f"{style}><title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
