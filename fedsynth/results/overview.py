"""The results of finished runs as table rows, for the terminal and for a page, and the names and
formats of metrics."""

from __future__ import annotations

from collections.abc import Sequence

from fedsynth.privacy.report.formatting import format_epsilon
from fedsynth.results.folders import Run, value_at

NONE = "–"
_SHARES = ("accuracy", "amp", "wlp", "agreement", "share")
_COLUMNS = {
    "accuracy": "test_accuracy",
    "AMP": "local.amp",
    "WLP": "local.wlp",
    "as asked": "generator.agreement",
    "class entropy": "generator.class_entropy_share",
    "ε": "differential_privacy.epsilon",
    "rounds": "rounds",
    "MB up": "upload_bytes",
    "s": "seconds",
}
"""Headings, and the path of each value in a summary."""


def is_share(metric: str) -> bool:
    """Returns whether a metric is a share, shown in percent."""
    return metric.endswith(_SHARES)


def words_of(metric: str) -> str:
    """Returns a metric's name for an axis or a heading: "local.amp" becomes "local amp"."""
    return metric.replace("_", " ").replace(".", " ")


def percent(value: float | None) -> str:
    """Returns a share in percent; a dash for None."""
    return NONE if value is None else f"{100 * value:.2f} %"


def overview(runs: Sequence[Run]) -> list[list[str]]:
    """Returns the headings, then a row of values for each run, without columns in which no run has
    a value."""
    columns = []
    for heading, path in _COLUMNS.items():
        cells = [_shown(path, value_at(run.summary, path)) for run in runs]
        if any(cell != NONE for cell in cells):
            columns.append([heading, *cells])
    return [list(row) for row in zip(*columns, strict=True)] or [[] for _ in range(len(runs) + 1)]


def _shown(path: str, value: float | None) -> str:
    if value is None:
        return NONE
    if path == "differential_privacy.epsilon":
        return format_epsilon(value)
    if path == "generator.class_entropy_share":
        return f"{value:.2f}"
    if is_share(path):
        return percent(value)
    scale, digits = {"upload_bytes": (1e-6, 2), "seconds": (1.0, 1)}.get(path, (1.0, 0))
    return f"{scale * value:.{digits}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as lines of aligned columns, each as wide as its longest cell; nothing is
    cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
