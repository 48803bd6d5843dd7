"""A report's pages: Markdown from a template, one self-contained HTML page rendered from that
Markdown, and the short table for the terminal.

Reports are untrusted input: the Markdown is rendered with raw HTML off, and every text of a report
is escaped before it enters the template. The page loads nothing and has no script. Its style suits
screens (light and dark), phones and A4 paper, where wide tables are on landscape pages.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from fedsynth.privacy.audit import CAVEAT, down
from fedsynth.privacy.report.figures import Event, Report
from fedsynth.privacy.report.file import damage_as_error
from fedsynth.privacy.report.formatting import (
    BANDS,
    as_markdown,
    band,
    format_epsilon,
    format_odds,
    format_percent,
    format_rounds,
    printable,
)
from fedsynth.privacy.report.plots import Line, line_plot

RENDERERS = ("jinja2", "markdown-it-py")
"""The packages, other than fedsynth, whose versions determine how a page looks."""
FILES = {
    "model.safetensors": "the trained model",
    "synthetic.safetensors": "the synthetic examples of the last round",
    "artefacts.json": "the server's measurements of the uploads",
    "metrics.jsonl": "metrics of each round",
    "config.toml": "the settings",
    "README.md": "how to use these files",
}
"""Files whose hashes a report may hold, with descriptions."""


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # texts are escaped as Markdown, from which HTML is rendered
)
_TEMPLATES.globals |= {"bands": BANDS, "caveat": CAVEAT, "files": FILES}
_TEMPLATES.filters |= {
    "band": band,
    "down": down,
    "epsilon": format_epsilon,
    "g": "{:g}".format,
    "median": statistics.median,
    "odds": format_odds,
    "percent": format_percent,
    "rounds": format_rounds,
}
UNRENDERABLE = "the report is damaged and cannot be rendered"
STYLE: str = _TEMPLATES.get_template("style.css.j2").render()


def report_sentences(report: Mapping[str, Any]) -> Any:
    """Returns the template macros for a report's sentences; each is a function that returns plain
    text."""
    return _TEMPLATES.get_template("words.j2").make_module({"r": report})


def event_text(event: Event, planned_rounds: int, cap: float | None, *, simulated: bool) -> str:
    """Returns the sentence that describes an event."""
    macros: Any = _TEMPLATES.get_template("events.j2").module
    return str(macros.event(event, planned_rounds, cap, simulated))


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the table for the terminal: ε and δ first, or why there is no guarantee."""
    text = report_sentences(report)
    guarantee = report["guarantee"]
    rows = []
    if guarantee is not None:
        rows.append(("ε (worst client)", format_epsilon(guarantee["epsilon"])))
        rows.append(("δ", f"{guarantee['delta']:g}"))
    rows.append(("verdict", text.verdict()))
    if guarantee is None:
        rows += [("why", reason) for reason in report["verdict"]["reasons"]]
    rows += [
        ("mechanism", report["mechanism"]),
        ("protects", text.protects()),
        ("adjacency", text.adjacency()),
    ]
    releases = dict.fromkeys(map(text.release, report["ledger"]))
    rows += [("release", release) for release in releases]
    if guarantee is not None:
        rows.append(("budget", text.cap()))
    rows += [("warning", warning) for warning in text.warnings().splitlines() if warning.strip()]
    return rows


def render_markdown(report: Mapping[str, Any]) -> str:
    """Returns the whole report as Markdown: the summary page, then the datasheet.

    Raises:
        PrivacyError: it is damaged.
    """
    with damage_as_error(UNRENDERABLE):
        complete = Report.model_validate(report).to_json()
        text = _TEMPLATES.get_template("report.md.j2").render(r=as_markdown(complete))
    text = re.sub(r"[ 	]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render_html(report: Mapping[str, Any]) -> str:
    """Returns the HTML page: the content of the Markdown, with plots.

    Raises:
        PrivacyError: it is damaged.
    """
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_PageRenderer).enable("table")
    markdown = render_markdown(report)
    with damage_as_error(UNRENDERABLE):
        plots = _plots(report["guarantee"])
    title = printable(f"Privacy report: {report['run']['id'] or report['method']}")
    body = parser.render(markdown, {"plots": plots})
    return _TEMPLATES.get_template("page.html.j2").render(title=title, body=body)


class _PageRenderer(RendererHTML):
    """Renderer that puts plots below their headings and tables into scrollable boxes. The section
    of the ledger, whose table has the most columns, is printed on landscape pages."""

    def heading_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        if tokens[index].tag == "h1" and index > 0:
            return '<h1 class="next">'
        opened = self.renderToken(tokens, index, options, env)
        if tokens[index + 1].content != "Ledger":
            return opened
        env["across"] = True
        return f'<section class="across">{opened}'

    def heading_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        plot = env["plots"].get(tokens[index - 1].content, "")
        return f"{self.renderToken(tokens, index, options, env)}{plot}"

    def table_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return '<div class="scroll" tabindex="0" role="region" aria-label="table"><table>\n'

    def table_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        if env.pop("across", False):
            return "</table></div></section>\n"
        return "</table></div>\n"


def _plots(guarantee: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the plots, keyed by the heading that they follow."""
    if guarantee is None:
        return {}
    worst = [(row["round"], row["worst"]) for row in guarantee["epsilon_by_round"]]
    curve = [(point["delta"], point["epsilon"]) for point in guarantee["epsilon_of_delta"]]
    delta = f"δ = {guarantee['delta']:g}"
    return {
        "ε after each round (worst client)": _figure(
            line_plot([Line("worst client", worst)], x="round", y=f"ε at {delta}"),
            f"ε spent after each round at {delta}",
        ),
        "ε for other δ (worst client)": _figure(
            line_plot([Line("worst client", curve)], x="δ", y="ε", log_x=True), "ε(δ)"
        ),
    }


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def renderer_versions() -> dict[str, str]:
    """Returns the installed versions of the packages that render a report."""
    return {name: version(name) for name in RENDERERS}
