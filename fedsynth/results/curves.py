"""Draws learning curves of finished runs: a metric against rounds, uploaded bytes, seconds or ε."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedsynth.errors import OutputError
from fedsynth.privacy.report.plots import COLOURS, Line, Points, line_plot
from fedsynth.results.finished import (
    SEEDS,
    Run,
    RunFolderError,
    by_seed,
    is_share,
    labels,
    value_at,
    words_of,
)


class Axis(NamedTuple):
    """A quantity on the x axis of a learning curve.

    Attributes:
        label: the axis label.
        key: the key of the quantity in a round's metrics.
        scale: the factor by which the values are multiplied.
        cumulative: whether the values of the rounds are added up.
    """

    label: str
    key: str
    scale: float = 1.0
    cumulative: bool = False


AXES: Mapping[str, Axis] = {
    "rounds": Axis("round", "round"),
    "bytes": Axis("uploads so far (MB)", "upload_bytes", 1e-6, cumulative=True),
    "seconds": Axis("seconds so far", "seconds", cumulative=True),
    "eps": Axis("ε spent", "epsilon"),
}
NEEDS_MATPLOTLIB = (
    "PNG plots need matplotlib: run pip install 'fedsynth[plots]', or write SVG or HTML"
)


def curve(run: Run, metric: str, axis: str) -> list[tuple[float, float]]:
    """Returns the points (x, y) of a run's learning curve, one for each round that has both values.

    Args:
        run: a finished run.
        metric: the dotted path of a number in the round's metrics, such as "test_accuracy" or
            "local.amp".
        axis: the quantity on the x axis, one of `AXES`.

    Raises:
        RunFolderError: no round has both values.
    """
    _, key, scale, cumulative = AXES[axis]
    points = []
    total = 0.0
    for row in run.rows:
        x, y = value_at(row, key), value_at(row, metric)
        if x is None:
            continue
        total = scale * x + total * cumulative
        if y is not None:
            points.append((total, y))
    if not points:
        raise RunFolderError(
            f"the run {run.name} has no round with both {metric} and {axis}. Private runs record "
            "no seconds, and runs without a privacy guarantee record no ε"
        )
    return points


def curves(
    runs: Sequence[Run],
    metric: str,
    axis: str,
    *,
    mean: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> list[Line]:
    """Returns a line for each run, or the mean line of each group of runs.

    With `mean`, runs that differ only in their seeds form a group. A band shows one sample standard
    deviation above and below the mean. Runs that lack the metric or the x values are left out, and
    `note` receives a message about each of them.

    Raises:
        RunFolderError: no run has any points.
    """
    drawn = []
    for run in runs:
        try:
            curve(run, metric, axis)
            drawn.append(run)
        except RunFolderError as error:
            note(f"left out: {error}")
    if not drawn:
        raise RunFolderError(f"none of these runs has both {metric} and {axis}")
    if not mean:
        named = zip(labels(drawn), drawn, strict=True)
        return [Line(name, curve(run, metric, axis)) for name, run in named]
    groups = by_seed(drawn)
    seedless = []
    for run, *_ in groups:
        settings = {key: value for key, value in run.settings.items() if key not in SEEDS}
        seedless.append(replace(run, settings=settings))
    return [
        _mean_line(name, [curve(run, metric, axis) for run in group])
        for name, group in zip(labels(seedless), groups, strict=True)
    ]


def _mean_line(name: str, lines: Sequence[Points]) -> Line:
    """Returns the mean of several lines.

    The n-th points of all lines are averaged. The mean ends where the shortest line ends.
    """
    if len(lines) == 1:
        return Line(name, lines[0])
    length = min(map(len, lines))
    values = np.array([line[:length] for line in lines])  # [runs, rounds, (x, y)]
    x, y = values.mean(axis=0).T
    std = values[:, :, 1].std(axis=0, ddof=1)
    band = np.stack([x, y - std, y + std], axis=1).tolist()
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    return Line(f"{name} (mean of {len(lines)} seeds, ± std)", points, band)


def curves_svg(lines: Sequence[Line], metric: str, axis: str) -> str:
    """Returns a plot of the lines as SVG text, for an HTML page."""
    share = is_share(metric)
    return line_plot(lines, x=AXES[axis].label, y=words_of(metric), from_zero=False, percent=share)


def write_png(path: Path, lines: Sequence[Line], metric: str, axis: str) -> None:
    """Writes a plot of the lines as a PNG file, with matplotlib.

    Raises:
        OutputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError:
        raise OutputError(NEEDS_MATPLOTLIB) from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel=AXES[axis].label, ylabel=words_of(metric))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        x, y = zip(*line.points, strict=True)
        axes.plot(x, y, "o-", ms=3, color=colour, label=line.name)
        if line.band:
            x, low, high = zip(*line.band, strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.18)
    axes.grid(alpha=0.3)
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
