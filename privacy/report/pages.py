"""A report's pages: Markdown from a template, one self-contained HTML page rendered from that
Markdown, and the short table for the terminal.

Reports are untrusted input: the Markdown is rendered with raw HTML off, and every text of a report
is escaped before it enters the template. The page loads nothing and has no script. Its style suits
screens (light and dark), phones and A4 paper, where wide tables are on landscape pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from fedsynth.privacy.audit import CAVEAT, down
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.report.figures import Event, Report
from fedsynth.privacy.report.file import HOSTILE
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
from fedsynth.privacy.report.plots import bar_plot, line_plot

RENDERERS = ("jinja2", "markdown-it-py")
"""The packages, other than fedsynth, whose versions determine how a page looks."""
FILES = {
    "model.safetensors": "the trained model",
    "synthetic.safetensors": "the synthetic examples sent last",
    "artefacts.json": "the server's measurements of the uploads",
    "metrics.jsonl": "metrics of each round",
    "config.toml": "the settings",
    "README.md": "how to use these files",
}
"""Files whose hashes a report may hold, with descriptions."""
BROAD_COLUMNS = 8
MAX_CLIENT_LINES = 50
"""With more clients, the plot shows only the worst and the median."""


def _environment() -> Environment:
    """Returns the templates' environment."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # texts are escaped as Markdown, from which HTML is rendered
    )
    environment.globals |= {"bands": BANDS, "caveat": CAVEAT, "files": FILES}
    environment.filters |= {
        "band": band,
        "down": down,
        "epsilon": format_epsilon,
        "g": lambda value: f"{value:g}",
        "lines": lambda text: [line for line in text.splitlines() if line.strip()],
        "median": statistics.median,
        "number": lambda value: "none" if value is None else f"{value:.6g}",
        "odds": format_odds,
        "percent": format_percent,
        "rounds": format_rounds,
    }
    return environment


_TEMPLATES = _environment()
STYLE: str = _TEMPLATES.get_template("style.css.j2").render()


def _complete(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report with all keys that the templates read."""
    return Report.model_validate(report).to_json()


def words(report: Mapping[str, Any]) -> Any:
    """Returns the template macros for a report's sentences; each is a function that returns plain
    text."""
    return _TEMPLATES.get_template("words.j2").make_module({"r": report})


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Returns the run's own warnings, and those that follow from the figures."""
    return [line for line in words(report).warnings().splitlines() if line.strip()]


def event_text(event: Event, planned_rounds: int, cap: float | None, *, simulated: bool) -> str:
    """Returns the sentence that describes an event."""
    report = {
        "guarantee": None,
        "unit": {"kind": "", "person": ""},
        "shares": 1,
        "min_clients": 0,
        "planned_rounds": planned_rounds,
        "epsilon_cap": cap,
        "simulated": simulated,
    }
    return str(words(report).event(event))


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the table for the terminal: ε and δ first, or why there is no guarantee."""
    text = words(report)
    promise = report["guarantee"]
    ledger = report["ledger"]
    rows = [("verdict", text.verdict())]
    if promise is None:
        rows += [("why", reason) for reason in report["verdict"]["reasons"]]
    else:
        spent = format_epsilon(promise["epsilon"])
        rows = [("ε (worst client)", spent), ("δ", f"{promise['delta']:g}"), *rows]
    rows += [
        ("mechanism", report["mechanism"]),
        ("protects", text.protects()),
        ("adjacency", text.adjacency()),
        ("sampling", _distinct(text.sampling(row) for row in ledger)),
        ("noise multiplier σ", _sigmas(ledger)),
        ("clip", _distinct(f"{row['sensitivity']:g} ({text.clipped(row)})" for row in ledger)),
        ("steps a round", _distinct(str(row["steps"]) for row in ledger)),
    ]
    if promise is not None:
        epsilons = promise["epsilon_by_client"].values()
        median = format_epsilon(statistics.median(epsilons))
        spread = f"min {format_epsilon(min(epsilons))}, median {median}"
        cap = report["epsilon_cap"]
        rows.append(("ε over clients", spread))
        rows.append(("budget", "no cap" if cap is None else f"cap {cap:g}"))
    return [*rows, *(("warning", warning) for warning in warnings(report))]


def _distinct(values: Any) -> str:
    return "; ".join(dict.fromkeys(values)) or "–"


def _sigmas(ledger: Sequence[Mapping[str, Any]]) -> str:
    """Returns σ of the releases; if there are several values, with the quantities of each."""
    quantities: dict[str, dict[str, None]] = {}
    for row in ledger:
        quantities.setdefault(f"{row['noise_multiplier']:.4g}", {})[row["quantity"]] = None
    if len(quantities) < 2:
        return "".join(quantities)
    return "; ".join(f"{sigma} ({', '.join(names)})" for sigma, names in quantities.items())


@contextmanager
def _sound() -> Iterator[None]:
    """Converts the exceptions that a damaged report may raise into PrivacyError."""
    try:
        yield
    except (*HOSTILE, TemplateError) as error:
        raise PrivacyError(
            f"the report is damaged and cannot be rendered ({error!r:.200})"
        ) from None


def render_markdown(report: Mapping[str, Any]) -> str:
    """Returns the whole report as Markdown: the summary page, then the datasheet.

    Raises:
        PrivacyError: it is damaged.
    """
    with _sound():
        text = _TEMPLATES.get_template("report.md.j2").render(r=as_markdown(_complete(report)))
    lines = [line.rstrip() for line in text.splitlines()]
    text_lines = [
        line for number, line in enumerate(lines) if line or (number and lines[number - 1])
    ]
    return "\n".join(text_lines).rstrip() + "\n"


def render_html(report: Mapping[str, Any]) -> str:
    """Returns the HTML page: the content of the Markdown, with plots.

    Raises:
        PrivacyError: it is damaged.
    """
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_PageRenderer).enable("table")
    with _sound():
        report = _complete(report)
        plots = _plots(report)
    body = parser.render(render_markdown(report), {"plots": plots})
    title = printable(f"Privacy report: {report['run']['id'] or report['method']}")
    return _TEMPLATES.get_template("page.html.j2").render(title=title, body=body)


class _PageRenderer(RendererHTML):
    """Renderer that puts plots below their headings, and tables into scrollable boxes; wide tables
    are printed on landscape pages."""

    def heading_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        if tokens[index].tag == "h1" and index > 0:
            return '<h1 class="next">'
        opened = self.renderToken(tokens, index, options, env)
        if not _broad_table(tokens, index + 3):
            return opened
        env["across"] = True  # the heading moves to the table's landscape page
        return f'<section class="across">{opened}'

    def heading_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        plot = env["plots"].get(tokens[index - 1].content, "")
        return f"{self.renderToken(tokens, index, options, env)}{plot}"

    def table_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return '<div class="scroll" tabindex="0" role="region" aria-label="table"><table>\n'

    def table_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return "</table></div>" + ("</section>\n" if env.pop("across", False) else "\n")


def _broad_table(tokens: Sequence[Token], index: int) -> bool:
    """Returns whether a table of many columns begins at this index."""
    if index >= len(tokens) or tokens[index].type != "table_open":
        return False
    row_end = next(n for n in range(index, len(tokens)) if tokens[n].type == "tr_close")
    columns = sum(token.type == "th_open" for token in tokens[index:row_end])
    return columns > BROAD_COLUMNS


def _plots(report: Mapping[str, Any]) -> dict[str, str]:
    """Returns the plots, keyed by the heading that they follow."""
    promise = report["guarantee"]
    if promise is None:
        return {}
    rounds = promise["epsilon_by_round"]
    faint = []
    if len(promise["epsilon_by_client"]) <= MAX_CLIENT_LINES:
        for name in promise["epsilon_by_client"]:
            faint.append([(row["round"], row["clients"][name]) for row in rounds])
    delta = f"δ = {promise['delta']:g}"
    worst = f"worst client ({printable(promise['worst_client'])})"
    over_rounds = line_plot(
        [
            (worst, [(row["round"], row["worst"]) for row in rounds]),
            ("median client", [(row["round"], row["median"]) for row in rounds]),
        ],
        x="round",
        y=f"ε at {delta}",
        faint=faint,
        first_broad=True,
    )
    kinds = [
        (printable(f"{kind['quantity']} ({kind['mechanism']})"), kind["epsilon"])
        for kind in promise["epsilon_of_each_release_alone"]
    ]
    curve = [(point["delta"], point["epsilon"]) for point in promise["epsilon_of_delta"]]
    return {
        "ε after each round (worst client)": _figure(
            over_rounds,
            f"ε spent after each round at {delta}; thick line: the worst client; dashed: the "
            "median; thin and grey: all clients",
        ),
        "The guarantee": _figure(
            bar_plot(kinds, y="ε of each release separately"),
            f"ε of each kind of release if it were the only one, at {delta}; these values do "
            "not add up to the total",
        ),
        "ε for other δ (worst client)": _figure(
            line_plot([("worst client", curve)], x="δ", y="ε", log_x=True), "ε(δ)"
        ),
    }


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def renderer_versions() -> dict[str, str]:
    """Returns the installed versions of the packages that render a report."""
    return {name: version(name) for name in RENDERERS}
