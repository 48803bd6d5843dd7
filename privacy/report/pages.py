"""Functions that render a privacy report as Markdown, as HTML and in the terminal.

The Markdown comes from a template, and the HTML page is rendered from the Markdown. Reports are
untrusted input. Therefore every text of a report is escaped before it enters the template, and raw
HTML in the Markdown is not rendered. The HTML page loads no other files and has no script. Its
style suits screens (light and dark), phones and A4 paper. On paper, wide tables are on landscape
pages.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from markdown_it import MarkdownIt

from fedsynth import formatting
from fedsynth.privacy.audit_bounds import CAVEAT, down
from fedsynth.privacy.report.figures import Event, Report
from fedsynth.privacy.report.file import damage_as_error
from fedsynth.privacy.report.plots import Line, line_plot, templates

if TYPE_CHECKING:
    from fedsynth.privacy.function_audit import FunctionAudit

BINS = 40  # of the scores in an audit's plot
# The packages other than fedsynth whose versions determine the content of a page.
RENDERERS = ("jinja2", "markdown-it-py")
# The files whose hashes a report may contain, each with a description.
FILES = {
    "model.safetensors": "the trained model",
    "synthetic.safetensors": "the synthetic examples of the last round",
    "artefacts.safetensors": "the server's measurements of the uploads",
    "metrics.jsonl": "metrics of each round",
    "summary.json": "the results of the run",
    "config.toml": "the settings",
    "README.md": "how to use these files",
    "values.csv": "the synthetic examples as a table",
    "croissant.json": "a description of these files for programs",
}


_TEMPLATES = templates(autoescape=False)  # texts are escaped as Markdown, then rendered as HTML
_TEMPLATES.globals |= {"bands": formatting.BANDS, "caveat": CAVEAT, "files": FILES}
_TEMPLATES.filters |= {
    "band": formatting.band,
    "down": down,
    "epsilon": formatting.format_epsilon,
    "g": "{:g}".format,
    "median": statistics.median,
    "odds": formatting.format_odds,
    "percent": formatting.format_percent,
    "rounds": formatting.format_rounds,
}
UNRENDERABLE = "the report is damaged and cannot be rendered"
STYLE: str = _TEMPLATES.get_template("style.css.j2").render()


def report_sentences(report: Mapping[str, Any]) -> Any:
    """Returns the Jinja macros that write the sentences of a report.

    Each macro is a function that returns plain text.
    """
    return _TEMPLATES.get_template("words.j2").make_module({"r": report})


def event_text(event: Event, planned_rounds: int, cap: float | None, *, simulated: bool) -> str:
    """Returns the sentence that describes an event of a run.

    Args:
        event: the event.
        planned_rounds: the number of rounds that the run planned.
        cap: the cap on ε. None if there is no cap.
        simulated: True if all clients ran in one process.
    """
    macros: Any = _TEMPLATES.get_template("events.j2").module
    return str(macros.event(event, planned_rounds, cap, simulated))


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows (name, text) of a report's summary in the terminal.

    The table begins with ε and δ if there is a guarantee. Otherwise it states the reasons why there
    is none.
    """
    text = report_sentences(report)
    guarantee = report["guarantee"]
    rows = []
    if guarantee is not None:
        rows.append((f"ε{text.worst_client()}", formatting.format_epsilon(guarantee["epsilon"])))
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
    """Renders the report as Markdown: a summary page followed by a datasheet.

    Raises:
        PrivacyError: the report is damaged.
    """
    with damage_as_error(UNRENDERABLE):
        complete = Report.model_validate(report).to_json()
        text = _TEMPLATES.get_template("report.md.j2").render(r=formatting.as_markdown(complete))
    text = re.sub(r"[ 	]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render_html(report: Mapping[str, Any]) -> str:
    """Renders the report as an HTML page, with the Markdown's content and plots.

    Raises:
        PrivacyError: the report is damaged.
    """
    markdown = render_markdown(report)
    with damage_as_error(UNRENDERABLE):
        plots = _plots(report["guarantee"])
    return _page(f"Privacy report: {report['run']['id'] or report['method']}", markdown, plots)


def render_audit(result: FunctionAudit) -> str:
    """Renders a function's audit as an HTML page, with a plot of each design's scores."""
    named = replace(result, name=formatting.as_markdown(result.name))
    markdown = _TEMPLATES.get_template("audit.md.j2").render(a=named)
    plots = {}
    for design in result.designs:
        middle = (design.present.mean() + design.absent.mean()) / 2
        scores = {"present canaries": design.present, "absent canaries": design.absent}
        together = np.concatenate(list(scores.values())) - middle
        edges = np.linspace(together.min(), together.max(), BINS + 1)
        lines = []
        for name, values in scores.items():
            shares = np.histogram(values - middle, edges)[0] / len(values)
            points = zip((edges[1:] + edges[:-1]) / 2, shares, strict=True)
            lines.append(Line(name, [(float(x), float(y)) for x, y in points]))
        plots[f"Scores: {design.name}"] = _figure(
            line_plot(lines, x="score, in deviations of the claimed noise", y="share of canaries"),
            "the further apart the two curves are, the larger is ε",
        )
    return _page(f"Audit of {result.name}", markdown, plots)


def _page(title: str, markdown: str, plots: Mapping[str, str]) -> str:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = _arranged(parser.render(markdown), plots)
    title = formatting.printable(title)
    return _TEMPLATES.get_template("page.html.j2").render(title=title, body=body)


def _arranged(body: str, plots: Mapping[str, str]) -> str:
    """Adds plots to an HTML page's body, makes its tables scrollable, and inserts page breaks.

    A plot is below the heading with its name. The table of the ledger has the most columns, so its
    section is printed on landscape pages. All texts in the body are escaped, so every tag in it
    comes from the template.
    """
    scroll = '<div class="scroll" tabindex="0" role="region" aria-label="table"><table>'
    body = body.replace("<table>", scroll).replace("</table>", "</table></div>")
    body = body.replace("<h1>Datasheet</h1>", '<h1 class="next">Datasheet</h1>')
    for heading, plot in plots.items():
        title = re.search(rf"<h2>{heading}( \(worst client\))?</h2>", body)
        if title is not None:
            body = f"{body[: title.end()]}\n{plot}{body[title.end() :]}"
    ledger = re.compile("<h2>Ledger</h2>.*?</table></div>", re.DOTALL)
    return ledger.sub(r'<section class="across">\g<0></section>', body)


def _plots(guarantee: Mapping[str, Any] | None) -> dict[str, str]:
    """Draws a report's plots.

    Returns:
        A mapping from headings to plots. Each plot belongs below its heading.
    """
    if guarantee is None:
        return {}
    worst = [(row["round"], row["worst"]) for row in guarantee["epsilon_by_round"]]
    curve = [(point["delta"], point["epsilon"]) for point in guarantee["epsilon_of_delta"]]
    delta = f"δ = {guarantee['delta']:g}"
    return {
        "ε after each round": _figure(
            line_plot([Line("ε", worst)], x="round", y=f"ε at {delta}"),
            f"ε spent after each round at {delta}",
        ),
        "ε for other δ": _figure(line_plot([Line("ε", curve)], x="δ", y="ε", log_x=True), "ε(δ)"),
    }


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def renderer_versions() -> dict[str, str]:
    """Returns the installed versions of the packages that render a report."""
    return dict(zip(RENDERERS, map(version, RENDERERS), strict=True))
