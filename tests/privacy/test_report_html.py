"""The HTML report: self-contained, says what the Markdown says, draws what the JSON holds."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plots import bar_plot, line_plot
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import build_report, render_html
from fedsynth.privacy.report_inputs import ReportContext
from fedsynth.privacy.report_text import up


def report(unaccounted: str | None = None) -> dict[str, object]:
    ledgers = {f"client-{k:03d}": Ledger(f"client-{k:03d}") for k in range(3)}
    for k, ledger in enumerate(ledgers.values()):
        for number in range(1, 4 - k):
            ledger.charge(
                Release(
                    number,
                    "sums <b>",
                    "features",
                    "u | v",
                    5.0,
                    2.0,
                    1.0,
                    "full",
                    4,
                    10,
                    unaccounted,
                )
            )
            ledger.charge(
                Release(
                    number, "counts", "features", "1", 9.0, 1.0, 1.0, "full", 1, 10, unaccounted
                )
            )
    return build_report(
        ReportContext("feddm", "features", 1e-5, 1000, None, 3, 3, {"x": "<script>"}),
        [one.history() for one in ledgers.values()],
    )


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_loads_nothing() -> None:
    made = report()
    page = render_html(made)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(
        r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\(", page
    )
    text = " ".join(parser.text)
    guarantee: dict[str, object] = made["guarantee"]  # type: ignore[assignment]
    assert f"ε = {up(guarantee['epsilon'])}" in text  # type: ignore[arg-type]
    for heading in (
        "The guarantee",
        "Trust model",
        "Ledger",
        "Accountant",
        "Not covered",
        "Provenance",
    ):
        assert heading in text
    assert "sums <b>" in text  # escaped in the page, and so text
    assert "u | v" in text
    assert page.count("<svg") == 3


def test_plots_are_valid_svg_with_the_points_where_they_belong() -> None:
    svg = ElementTree.fromstring(
        line_plot(
            [("a", [(1, 2.0), (2, 4.0), (3, 4.0)])], x="round", y="ε", faint=[[(1, 1.0), (3, 2.0)]]
        )
    )
    lines = [e for e in svg.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2
    points = [tuple(map(float, p.split(","))) for p in lines[1].attrib["points"].split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x2 - x1 == x3 - x2 > 0
    assert y1 > y2 == y3  # down is larger
    log = ElementTree.fromstring(
        line_plot([("a", [(1e-6, 1.0), (1e-5, 1.0), (1e-4, 1.0)])], x="δ", y="ε", log_x=True)
    )
    across = [
        float(p.split(",")[0])
        for e in log.iter()
        if e.tag.endswith("polyline")
        for p in e.attrib["points"].split()
    ]
    assert abs((across[1] - across[0]) - (across[2] - across[1])) < 0.2
    bars = ElementTree.fromstring(bar_plot([("a", 1.0), ("b", 4.0)], y="ε"))
    widths = [float(e.attrib["width"]) for e in bars.iter() if e.tag.endswith("rect")]
    assert widths[1] == 4 * widths[0]
    assert line_plot([("a", [(1, 0.0)])], x="round", y="ε").startswith("<svg")
    assert line_plot([], x="round", y="ε") == ""


def test_without_a_guarantee_there_is_no_plot_and_no_epsilon() -> None:
    page = render_html(report("as printed"))
    assert "<svg" not in page
    assert "ε =" not in page
    assert "no differential privacy guarantee" in page
