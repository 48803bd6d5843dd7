"""The pictures of docs/fedstats.md, from the committed rows of fedstats_table.py.

    python benchmarks/fedstats_plots.py [--out docs/images]

`fedstats-epsilon.svg`: test accuracy by ε, a panel a data set, with every client's own noise and
with aggregated noise, without privacy, and what papers report of central generators and classifiers
at ε = 1. `fedstats-clients.svg`: by the skew of labels and by the number of clients, at ε = 1 with
own noise. Points are means over the seeds that there are, bars one sample standard deviation. Needs
the package's extra `plots`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from documents.fedstats import DATASETS
from library.machine import plain_options
from library.rows import STATISTICS_SEEDS, percents

DOCS = Path(__file__).resolve().parent.parent / "docs" / "images"
EPSILONS = ("0.5", "1", "3", "10")
ALPHAS = ("0.01", "0.5", "100")
CLIENTS = ("3", "10", "50")
REPORTED = {
    "mnist": {"DP-FETA": 95.6, "FETA-Pro": 97.1, "DPDM": 89.2},
    "fashion-mnist": {"DP-FETA": 81.7, "FETA-Pro": 82.3, "DPDM": 76.4},
    "cifar10": {"DP-FETA": 35.1, "DP-RandP": 72.3},
}
"""Test accuracy in % at ε = 1 by the papers, all central: DP-RandP (arXiv 2306.06076) a classifier,
the others classifiers trained on generated images alone."""
COLOURS = {"own": "#1f5fa8", "secure": "#c2571a"}
SETS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#7b3f98")
MARKS = ("*", "X", "D")


def values(dataset: str, epsilon: str, noise: str, alpha: str, clients: int) -> list[float]:
    """Accuracies in %, of each seed that there is."""
    name = f"{dataset} eps={epsilon} {noise} alpha={alpha} K={clients}"
    return percents("fedstats_table", name, STATISTICS_SEEDS)


def line(axes: Any, points: dict[float, list[float]], label: str, colour: str) -> None:
    """Means with bars, of those points that have values."""
    there = {x: found for x, found in points.items() if found}
    deviations = [statistics.stdev(found) if len(found) > 1 else 0.0 for found in there.values()]
    means = [statistics.mean(found) for found in there.values()]
    style = {"fmt": "o-", "ms": 4, "capsize": 2, "color": colour, "label": label}
    axes.errorbar(list(there), means, deviations, **style)


def by_epsilon(figure: Any) -> None:
    """Draws a panel for each data set."""
    figure.set_size_inches(9.0, 6.4)
    for place, (dataset, name) in enumerate(DATASETS.items(), start=1):
        axes = figure.add_subplot(2, 2, place)
        for noise, label in (("own", "every client's own noise"), ("secure", "aggregated noise")):
            points = {float(e): values(dataset, e, noise, "0.5", 10) for e in EPSILONS}
            line(axes, points, label, COLOURS[noise])
        free = statistics.mean(values(dataset, "inf", "own", "0.5", 10))
        axes.axhline(free, ls="--", lw=1, color="#444444", label="no privacy")
        for mark, (paper, value) in zip(MARKS, REPORTED.get(dataset, {}).items(), strict=False):
            axes.plot([1.0], [value], mark, ms=7, color="#6a6a6a", label=f"{paper}, central")
        axes.set_xlim(0.4, 12.5)
        finish(axes, EPSILONS, name, "ε")


def by_clients(figure: Any) -> None:
    """Draws two panels: α, and K."""
    figure.set_size_inches(9.0, 3.6)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for (dataset, name), colour in zip(DATASETS.items(), SETS, strict=True):
        skews = {float(a): values(dataset, "1", "own", a, 10) for a in ALPHAS}
        line(left, skews, name, colour)
        counts = {float(k): values(dataset, "1", "own", "0.5", int(k)) for k in CLIENTS}
        line(right, counts, name, colour)
    finish(left, ALPHAS, "by skew, ten clients", "α of Dir(α): small is skewed")
    finish(right, CLIENTS, "by clients, Dir(0.5)", "clients, who share the same data")


def finish(axes: Any, ticks: Sequence[str], title: str, across: str) -> None:
    """Labels the axes."""
    axes.set_xscale("log")
    axes.set_xticks([float(tick) for tick in ticks], ticks)
    axes.set_xticks([], minor=True)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(across)
    axes.set_ylabel("test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures")
    options = parser.parse_args()
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        parser.exit(1, "error: the pictures need matplotlib: pip install 'fedsynth[plots]'\n")
    # the same rows give the same bytes: no date, and names of parts that are not drawn by chance
    with mpl.rc_context({"svg.hashsalt": "fedstats", "svg.fonttype": "none"}):
        for name, draw in (("epsilon", by_epsilon), ("clients", by_clients)):
            figure = Figure(layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure)
            path = options.out / f"fedstats-{name}.svg"
            figure.savefig(path, format="svg", metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main()
