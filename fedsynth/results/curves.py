"""Learning curves of finished runs: a metric per round against rounds, bytes, seconds or ε."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsynth.errors import OutputError
from fedsynth.privacy.report.plots import COLOURS, Line, line_plot
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

AXES: Mapping[str, str] = {
    "rounds": "round",
    "bytes": "uploads so far (MB)",
    "seconds": "seconds so far",
    "eps": "ε spent",
}
"""The possible x axes of a curve, and their labels."""
NEEDS_MATPLOTLIB = "a PNG needs matplotlib: pip install 'fedsynth[plots]' (SVG and HTML do not)"


def curve(run: Run, metric: str, axis: str) -> list[tuple[float, float]]:
    """Returns (x, y) of each round that has both.

    Args:
        run: a finished run.
        metric: a number in the round's metrics, by its dotted path: "test_accuracy", "local.amp".
        axis: one of `AXES`.

    Raises:
        RunFolderError: no round has both.
    """
    points = []
    total = 0.0
    for row in run.rows:
        if axis in ("rounds", "eps"):
            across = value_at(row, "round" if axis == "rounds" else "epsilon")
        else:
            key, unit = ("upload_bytes", 1e-6) if axis == "bytes" else ("seconds", 1.0)
            across = value_at(row, key)
            if across is not None:
                across = total = total + across * unit
        value = value_at(row, metric)
        if across is not None and value is not None:
            points.append((across, value))
    if not points:
        raise RunFolderError(f"the run {run.name} {_why_none(run, metric, axis)}")
    return points


def _why_none(run: Run, metric: str, axis: str) -> str:
    if not any(value_at(row, metric) is not None for row in run.rows):
        return f"has no {metric} in its rounds"
    if axis == "seconds" and run.private:
        return (
            "records no seconds, because with differential privacy the time may reveal "
            "information about the data"
        )
    if axis == "eps":
        return "has no ε: it had no differential privacy, or no guarantee"
    return f"has no {AXES[axis]} in its rounds"


def curves(
    runs: Sequence[Run],
    metric: str,
    axis: str,
    *,
    mean: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> list[Line]:
    """Returns a line for each run or, with `mean`, one for each group of runs that differ only in
    seeds: their mean, with a band of one sample standard deviation on both sides.

    Runs without such points are left out and reported to `note`.

    Raises:
        RunFolderError: no run has any points.
    """
    kept_runs = []
    for number, run in enumerate(runs):
        try:
            curve(run, metric, axis)
            kept_runs.append(run)
        except RunFolderError as error:
            if number == len(runs) - 1 and not kept_runs:
                raise
            note(f"left out: {error}")
    if not mean:
        names = labels(kept_runs)
        return [
            Line(name, curve(run, metric, axis)) for run, name in zip(kept_runs, names, strict=True)
        ]
    groups = by_seed(kept_runs)
    unseeded = []
    for run, *_ in groups:
        settings = {key: value for key, value in run.settings.items() if key not in SEEDS}
        unseeded.append(replace(run, settings=settings))
    return [
        _mean_line(name, [curve(run, metric, axis) for run in group])
        for name, group in zip(labels(unseeded), groups, strict=True)
    ]


def _mean_line(name: str, lines: Sequence[Sequence[tuple[float, float]]]) -> Line:
    """Averages by position: the n-th points of all runs, until the shortest run ends."""
    points, band = [], []
    for pairs in zip(*lines, strict=False):
        across = statistics.fmean(a for a, _ in pairs)
        heights = [b for _, b in pairs]
        middle = statistics.fmean(heights)
        spread = statistics.stdev(heights) if len(heights) > 1 else 0.0
        points.append((across, middle))
        band.append((across, middle - spread, middle + spread))
    if len(lines) == 1:
        return Line(name, points)
    return Line(f"{name} (mean of {len(lines)} seeds, ± std)", points, band)


def curves_svg(lines: Sequence[Line], metric: str, axis: str) -> str:
    """Returns the plot as SVG, for a page."""
    share = is_share(metric)
    return line_plot(lines, x=AXES[axis], y=words_of(metric), from_zero=False, percent=share)


def write_png(path: Path, lines: Sequence[Line], metric: str, axis: str) -> None:
    """Writes the plot as a PNG file, with matplotlib.

    Raises:
        OutputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise OutputError(NEEDS_MATPLOTLIB) from None
    scale = 100.0 if is_share(metric) else 1.0
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        xs = [a for a, _ in line.points]
        axes.plot(
            xs, [scale * b for _, b in line.points], "o-", ms=3, color=colour, label=line.name
        )
        if line.band:
            low = [scale * a for _, a, _ in line.band]
            high = [scale * b for _, _, b in line.band]
            axes.fill_between(xs, low, high, color=colour, alpha=0.18)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(words_of(metric) + (" (%)" if is_share(metric) else ""))
    axes.grid(alpha=0.3)
    if axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
