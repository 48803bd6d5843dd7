"""The privacy report as one self-contained page: what the Markdown says, with plots; no script,
nothing loaded from elsewhere.

It is made for a screen, light or dark, for a phone, and for A4: broad tables stand on pages across.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fedsynth.privacy.figures import printable
from fedsynth.privacy.plots import bar_plot, line_plot
from fedsynth.privacy.report_text import DATASHEET, render_markdown

CLIENT_LINES = 50  # with more clients, the plot shows the worst and the median alone
BROAD = 8  # columns of a table that stands on a page across
COLOURS = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#4b5966;--page:#fff;--edge:#c3ccd5;--head:#eef2f6;
--note:#fff4e5;--mark:#b5490c;--link:#1f5fa8}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9ee;--soft:#a9b4bf;--page:#14181d;--edge:#46515c;
--head:#222a32;--note:#33261a;--mark:#f0945a;--link:#7db4f0}}
"""
BASE = """
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:62rem;
margin:2rem auto;padding:0 1rem;overflow-wrap:break-word}
h1,h2,h3{line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid var(--edge);padding-bottom:.2rem}
a{color:var(--link)}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem}
th,td{border:1px solid var(--edge);padding:.25rem .5rem;text-align:left;vertical-align:top}
th{background:var(--head)}
code{font-size:.9em}
blockquote{margin:1rem 0;padding:.5rem 1rem;background:var(--note);border-left:4px solid var(--mark)}
svg,img{max-width:100%;height:auto}figure{margin:1rem 0}
figcaption{font-size:.9rem;color:var(--soft)}
"""
PRINT = """
@page{size:A4;margin:10mm 14mm}
@page across{size:A4 landscape}
@media print{
:root{color-scheme:light;--ink:#000;--soft:#333;--page:#fff;--edge:#999;--head:#eee;--note:#f6f6f6;
--mark:#b5490c;--link:#000}
body{font-size:9pt;line-height:1.3;max-width:none;margin:0;padding:0}
h1{font-size:16pt;margin:0 0 2mm}h2{font-size:11pt;margin:2.4mm 0 1mm}
p,ul,blockquote{margin:1.2mm 0}.scroll{overflow:visible;margin:1.5mm 0}
table{font-size:8.5pt;width:100%}th,td{padding:.5mm 1.2mm}td{overflow-wrap:anywhere}
code{font-size:.88em}td code{font-size:6pt;white-space:nowrap}figcaption{font-size:8pt}
h1,h2,h3{break-after:avoid}tr,figure,svg,blockquote{break-inside:avoid}thead{display:table-header-group}
.across{page:across}.across table{font-size:8pt}
.next{break-before:page}
svg{max-height:75mm}
}
"""
OWN = """
td:last-child{overflow-wrap:anywhere}
.broad td{min-width:3.5rem}
@media (max-width:40rem){figure{overflow-x:auto}svg{min-width:32rem}svg text{font-size:13px}
body{margin:1rem auto}th,td{overflow-wrap:anywhere;min-width:4.5rem}.broad td{min-width:5rem}}
@media print{.broad td{min-width:0}}
"""
STYLE = COLOURS + BASE + PRINT + OWN


def render_html(report: Mapping[str, Any]) -> str:
    """Returns the page."""
    plots = _plots(report) if report["guarantee"] is not None else {}
    body = "\n".join(_with_headings(_to_html(render_markdown(report), plots)))
    run = report["run"]["id"]
    title = printable(f"Privacy report: {run or report['method']}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n<main>\n{body}\n"
        "</main></body></html>\n"
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
    worst = [(row["round"], row["worst"]) for row in rounds]
    median = [(row["round"], row["median"]) for row in rounds]
    curve = [(point["delta"], point["epsilon"]) for point in promise["epsilon_of_delta"]]
    bars = [
        (printable(f"{r['quantity']} ({r['mechanism']})"), r["epsilon"])
        for r in promise["epsilon_of_each_release_alone"]
    ]
    delta = f"δ = {promise['delta']:g}"
    whose = printable(promise["worst_client"])
    over_rounds = line_plot(
        [(f"worst client ({whose})", worst), ("median client", median)],
        x="round",
        y=f"ε at {delta}",
        faint=faint,
        first_broad=True,
    )
    shares = bar_plot(bars, y="ε of each release alone")
    return {
        "ε after each round (worst client)": _figure(
            over_rounds,
            f"ε spent after each round at {delta}; broad: the worst client, dashed: the median, "
            "thin and grey: every client",
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
    bold, code."""
    block: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if block and _form(line) != _form(block[0]):
            yield _block(block)
            block = []
        if line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            text = line.lstrip("# ")
            new_page = ' class="next"' if line == f"# {DATASHEET}" else ""
            yield f"<h{level}{new_page}>{escape(text)}</h{level}>" + plots.get(text, "")
        elif line:
            block.append(line)


def _with_headings(pieces: Iterator[str]) -> list[str]:
    """A table that is printed on a page across takes its heading along."""
    found: list[str] = []
    for piece in pieces:
        if piece.startswith('<div class="scroll broad"'):
            heading = found.pop() if found and found[-1].startswith("<h") else ""
            piece = f'<section class="across">{heading}{piece}</section>'
        found.append(piece)
    return found


def _form(line: str) -> str:
    return "text" if line[:1] not in ("-", "|", ">", "#", "") else line[:1]


def _block(lines: list[str]) -> str:
    form = _form(lines[0])
    if form == "|":
        return _table([_cells(line) for line in lines])
    if form == "-":
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    text = _inline(" ".join(line.lstrip("> ") for line in lines))
    return f"<blockquote>{text}</blockquote>" if form == ">" else f"<p>{text}</p>"


def _cells(line: str) -> list[str]:
    return [_inline(cell) for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def _table(rows: list[list[str]]) -> str:
    """The first row is the head; each row's first cell is a heading of the row."""
    head, _, *body = rows
    kind = "scroll broad" if len(head) > BROAD else "scroll"
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>"
        for row in body
    )
    name = re.sub(r"<[^>]*>", "", head[0])
    return (
        f'<div class="{kind}" tabindex="0" role="region" aria-label="table: {name}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _inline(text: str) -> str:
    plain = escape(text.strip().replace("\\|", "|").replace("\\<", "<"))
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", plain)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", bold)
