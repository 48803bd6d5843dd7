"""The privacy report as one self-contained page: what the Markdown says, with plots; no script,
nothing loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fedsynth.privacy.plots import bar_plot, line_plot
from fedsynth.privacy.report_text import printable, render_markdown

CLIENT_LINES = 50  # with more clients, the plot shows the worst and the median alone
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2733;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1,h2{line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid #d5dce3;padding-bottom:.2rem}
table{border-collapse:collapse;font-size:.9rem;display:block;overflow-x:auto}
th,td{border:1px solid #d5dce3;padding:.25rem .5rem;text-align:left;vertical-align:top}th{background:#f1f4f7}
blockquote{margin:1rem 0;padding:.5rem 1rem;background:#fff4e5;border-left:4px solid #c2571a}
svg{max-width:100%;height:auto}figure{margin:1rem 0}figcaption{font-size:.9rem;color:#4b5966}
"""


def render_html(report: Mapping[str, Any]) -> str:
    """The page."""
    plots = _plots(report) if report["guarantee"] is not None else {}
    body = "\n".join(_to_html(render_markdown(report), plots))
    title = printable(f"Privacy budget report: {report['method']}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
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
    over_rounds = line_plot(
        [(f"{name} client", points) for name, points in spent],
        x="round",
        y=f"ε at {delta}",
        faint=faint,
    )
    shares = bar_plot(bars, y="ε of each release alone")
    return {
        "ε after each round (worst client)": _figure(
            over_rounds, f"ε spent after each round at {delta}; grey: every client"
        ),
        "The guarantee": _figure(
            shares,
            f"ε of each kind of release if it were the only one, at {delta}; they do not add up",
        ),
        "ε for other δ (worst client)": _figure(
            line_plot([("worst client", curve)], x="δ", y="ε", log_x=True), "ε(δ)"
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
