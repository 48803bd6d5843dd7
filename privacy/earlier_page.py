"""The page of reports of earlier versions, which have no `run`: `verify` makes it again, byte for
byte.

Nothing here changes any more: what a page says now is `report_html`'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fedsynth.privacy.report_text import printable, render_markdown

Points = Sequence[tuple[float, float]]
COLOURS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#7a4fa3", "#8a6d1d", "#555555")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 64, 16, 16, 48
FAINT = "#b8c4d0"

CLIENT_LINES = 50  # with more clients, the plot shows the worst and the median alone
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2733;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1,h2{line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid #d5dce3;padding-bottom:.2rem}
table{border-collapse:collapse;font-size:.9rem;display:block;overflow-x:auto}
th,td{border:1px solid #d5dce3;padding:.25rem .5rem;text-align:left;vertical-align:top}th{background:#f1f4f7}
blockquote{margin:1rem 0;padding:.5rem 1rem;background:#fff4e5;border-left:4px solid #c2571a}
svg{max-width:100%;height:auto}figure{margin:1rem 0}figcaption{font-size:.9rem;color:#4b5966}
"""


def render_earlier_html(report: Mapping[str, Any]) -> str:
    """The page."""
    plots = _plots(report) if report["guarantee"] is not None else {}
    body = "\n".join(_to_html(render_markdown(report), plots))
    title = printable(f"Privacy budget report: {report['method']}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _plots(report: Mapping[str, Any]) -> dict[str, str]:
    """Figures, by the heading that they stand under."""
    promise = report["guarantee"]
    rounds = promise["epsilon_by_round"]
    faint = []
    if len(promise["epsilon_by_client"]) <= CLIENT_LINES:
        faint = [
            [(row["round"], row["clients"][name]) for row in rounds]
            for name in promise["epsilon_by_client"]
        ]
    spent = [(name, [(row["round"], row[name]) for row in rounds]) for name in ("worst", "median")]
    curve = [(point["delta"], point["epsilon"]) for point in promise["epsilon_of_delta"]]
    bars = [
        (printable(f"{r['quantity']} ({r['mechanism']})"), r["epsilon"])
        for r in promise["epsilon_of_each_release_alone"]
    ]
    delta = f"δ = {promise['delta']:g}"
    over_rounds = _line_plot(
        [(f"{name} client", points) for name, points in spent],
        x="round",
        y=f"ε at {delta}",
        faint=faint,
    )
    shares = _bar_plot(bars, y="ε of each release alone")
    return {
        "ε after each round (worst client)": _figure(
            over_rounds, f"ε spent after each round at {delta}; grey: every client"
        ),
        "The guarantee": _figure(
            shares,
            f"ε of each kind of release if it were the only one, at {delta}; they do not add up",
        ),
        "ε for other δ (worst client)": _figure(
            _line_plot([("worst client", curve)], x="δ", y="ε", log_x=True), "ε(δ)"
        ),
    }


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _to_html(markdown: str, plots: Mapping[str, str]) -> Iterator[str]:
    """The few forms that `render_markdown` writes: headings, paragraphs, bullets, quotes, tables,
    bold."""
    block: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if block and _form(line) != _form(block[0]):
            yield _block(block)
            block = []
        if line.startswith("#"):
            level, text = len(line) - len(line.lstrip("#")), line.lstrip("# ")
            yield f"<h{level}>{escape(text)}</h{level}>" + plots.get(text, "")
        elif line:
            block.append(line)


def _form(line: str) -> str:
    return "text" if line[:1] not in ("-", "|", ">", "#", "") else line[:1]


def _block(lines: list[str]) -> str:
    form = _form(lines[0])
    if form == "|":
        head, _, *body = (
            [_inline(c) for c in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in lines
        )
        rows = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in body)
        return "<table><tr>" + "".join(f"<th>{c}</th>" for c in head) + f"</tr>{rows}</table>"
    if form == "-":
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    text = _inline(" ".join(line.lstrip("> ") for line in lines))
    return f"<blockquote>{text}</blockquote>" if form == ">" else f"<p>{text}</p>"


def _inline(text: str) -> str:
    plain = text.strip().replace("\\|", "|").replace("\\<", "<")
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(plain))


def _line_plot(
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
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{value:g}</text>"
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


def _bar_plot(bars: Sequence[tuple[str, float]], *, y: str) -> str:
    """A horizontal bar for each (name, value ≥ 0), its value beside it."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    parts = []
    for number, (name, value) in enumerate(bars):
        top = 8 + 44 * number
        length = value / most * (WIDTH - 120)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<text x="4" y="{top + 12}">{escape(name)}</text>')
        parts.append(
            f'<rect x="4" y="{top + 18}" width="{length:.1f}" height="14" fill="{colour}"/>'
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
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y)}</text>"
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
