"""The tables of docs/reproduction.md, from the rows of results/reproduction/*.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fedsynth.reproduction.comparison import Line, format_number, lines
from fedsynth.reproduction.preset_files import preset, preset_names
from fedsynth.reproduction.presets import Cell, Preset, cell_words, dataset_of
from fedsynth.reproduction.rows import Rows
from fedsynth.reproduction.runs import changed_settings
from library import RESULTS
from library.rows import (
    NOTHING,
    READ,
    REPRODUCTION,
    Row,
    RowsError,
    by_key,
    case,
    percents,
    spread,
    table,
)

FOLDER = RESULTS / "reproduction"
CURVES = "fedprox:synthetic"
NETWORK_SEEDS = range(5)
AT = (20, 50, 100, 150, 200)
ACCURACIES = ("test_accuracy_pct", "best_test_accuracy_pct", "amp_pct")


def _rows() -> dict[str, dict[str, Any]]:
    READ.append(REPRODUCTION)
    return Rows(FOLDER).all()


def _finished() -> list[tuple[Preset, Line]]:
    """A line for each published number, and each curve, that a finished run speaks of; of runs
    with changed settings apart."""
    rows = _rows()
    changes = {json.dumps(row["changes"], sort_keys=True) for row in rows.values()}
    datasets = {dataset_of(row["cell"]["dataset"]) for row in rows.values()}
    seeds = sorted({row["seed"] for row in rows.values()})
    found = []
    for name in preset_names():
        one = preset(name)
        cells = [cell for cell in one.cells if dataset_of(cell.dataset) in datasets]
        for text in sorted(changes):
            changed = json.loads(text)
            made = lines(one, _may_have(cells, changed, rows), seeds, rows, changes=changed)
            found += [(one, line) for line in made if line.seeds or line.diverged]
    return found


def _may_have(
    cells: Sequence[Cell], changed: dict[str, Any], rows: dict[str, dict[str, Any]]
) -> Sequence[Cell]:
    """Of methods that ran so: others may have no setting of that name."""
    if not changed:
        return cells
    methods = {row["cell"]["method"] for row in rows.values() if row["changes"] == changed}
    return [cell for cell in cells if cell.method in methods]


def _changed(line: Line) -> str:
    """Returns the settings that differ from the preset's, in parentheses."""
    words = changed_settings(line.changes)
    return f" (`{words}`)" if words else ""


def _compared() -> str:
    """Published beside reproduced."""
    head = ["table", "cell", "metric", "published", "reproduced", "seeds"]
    body = [
        [
            f"`{one.name}`",
            f"{line.cell}{_changed(line)}{line.reduced}",
            line.number.label,
            format_number(line.number.value, line.number.std),
            format_number(line.mean, line.std),
            str(len(line.seeds)),
            line.verdict,
            f"{sum(line.seconds) / 3600:.2f}",
            ", ".join(line.commits),
        ]
        for one, line in _finished()
        if line.number.value is not None
    ]
    return table([*head, "verdict", "hours", "commit"], body)


def _curves() -> str:
    """FedProx's test accuracy by rounds: the paper has figures, and no numbers."""
    body = []
    rows = _rows()
    one = preset(CURVES)
    for cell in one.cells:
        mine = [
            row
            for row in rows.values()
            if row["preset"] == CURVES and row["cell"] == cell.columns() and not row["changes"]
        ]
        if mine:
            body.append([cell_words(cell, one), *_by_rounds(mine), str(len(mine))])
    rounds = [f"round {number}" for number in AT]
    return table(["", *rounds, "last 20 rounds", "their spread", "seeds"], body)


def _by_rounds(rows: Sequence[Row]) -> list[str]:
    """Mean accuracies at some rounds, over the last 20, and the standard deviation over these
    rounds, averaged over seeds."""
    curves = [row["curve"]["test_accuracy"] for row in rows]
    cells = []
    for number in AT:
        at = [100 * curve[number - 1] for curve in curves if len(curve) >= number]
        cells.append(f"{statistics.mean(at):.1f}" if at else NOTHING)
    ends = [[100 * value for value in curve[-20:]] for curve in curves]
    cells.append(f"{statistics.mean(map(statistics.mean, ends)):.1f}")
    cells.append(f"{statistics.mean(map(statistics.pstdev, ends)):.1f}")
    return cells


def _orders() -> str:
    """The methods' order, published and reproduced, where two or more of a setting are finished,
    in whatever precision."""
    groups: dict[tuple[str, str, str], list[tuple[str, float, float]]] = {}
    for one, line in _finished():
        mean = line.mean
        if line.number.value is None or mean is None or line.number.label not in ACCURACIES:
            continue
        cell = next(c for c in one.cells if cell_words(c, one) == line.cell)
        setting = line.cell.replace(cell.method, "", 1).split("; ")[0]  # then remarks on a number
        key = one.name, f"{' '.join(setting.split())}{_changed(line)}", line.number.label
        groups.setdefault(key, []).append((cell.method, line.number.value, mean))
    body = []
    for (name, where, metric), methods in groups.items():
        if len(methods) > 1:
            pairs = [(a, b) for k, a in enumerate(methods) for b in methods[k + 1 :]]
            same = sum((a[1] - b[1]) * (a[2] - b[2]) > 0 for a, b in pairs)
            there = sorted(methods, key=lambda m: m[1], reverse=True)
            here = sorted(methods, key=lambda m: m[2], reverse=True)
            orders = [" > ".join(name for name, _, _ in one) for one in (there, here)]
            body.append([f"`{name}`", where, metric, *orders, f"{same} of {len(pairs)}"])
    head = ["table", "cell", "metric", "published order", "reproduced order", "pairs alike"]
    return table(head, body)


def _presets() -> str:
    """All tables: how many cells, how many can be run, how many are finished."""
    finished: dict[str, set[str]] = {}
    for one, line in _finished():
        if not line.changes:
            finished.setdefault(one.name, set()).add(line.cell)
    body = []
    for name in preset_names():
        one = preset(name)
        runnable = sum(not one.refusal(cell) for cell in one.cells)
        counts = [str(len(one.cells)), str(runnable), str(len(finished.get(name, ())))]
        body.append([f"`{name}`", one.source, one.title, *counts])
    return table(["preset", "source", "what it shows", "cells", "runnable", "finished"], body)


def _networks_per_round() -> str:
    """FedDM with M networks a round beside the literal loop, the same seeds in pairs."""
    rows = by_key("networks_per_round")
    body = []
    for dataset in ("mnist", "fashion-mnist"):
        literal = percents(rows, f"{dataset} M=0", NETWORK_SEEDS)
        for networks in (0, 5, 20, 50):
            name = f"{dataset} M={networks}"
            found = percents(rows, name, NETWORK_SEEDS)
            if not found:
                continue
            title = "a new network in every step" if networks == 0 else f"M = {networks}"
            # seeds are made from 0 on: what a row has of them is the first ones
            pairs = [one - other for one, other in zip(found, literal, strict=False)]
            difference = spread(pairs, len(NETWORK_SEEDS), 2, "+") if networks else ""
            body.append([dataset, title, spread(found, len(NETWORK_SEEDS)), difference])
    return table(["", "networks of a round", "accuracy", "− the first"], body)


def _first_rounds() -> list[str]:
    """Test accuracy of FedDM's two rounds at full size, in %."""
    whole = (row for row in _rows().values() if row["preset"] == "feddm:table2")
    (row,) = (row for row in whole if row["rounds"] == 2)
    return [f"{100 * value:.2f}" for value in row["curve"]["test_accuracy"]]


def _fifty_networks() -> list[str]:
    """By data set: how far apart the means of M = 50 and of the literal loop are, the standard
    error of that as if seeds were not paired, and in how many pairs M = 50 is behind."""
    rows = by_key("networks_per_round")
    found = []
    for dataset in ("mnist", "fashion-mnist"):
        few, literal = (percents(rows, f"{dataset} M={m}", NETWORK_SEEDS) for m in (50, 0))
        if not len(few) == len(literal) == len(NETWORK_SEEDS):
            raise RowsError("results/networks_per_round.jsonl lacks seeds of M = 50 or M = 0")
        error = math.sqrt((statistics.variance(few) + statistics.variance(literal)) / len(few))
        difference = statistics.mean(few) - statistics.mean(literal)
        behind = sum(one < other for one, other in zip(few, literal, strict=True))
        found += [f"{difference:+.2f}".replace("-", "−"), f"{error:.2f}", str(behind)]
    return found


def _networks_time() -> list[str]:
    """Minutes of a client's round at the paper's size, and how much faster M networks are."""
    row = case("networks_time", "a client's round, MNIST, ConvNet-128")
    minutes = [row["seconds a round"][name] / 60 for name in ("literal", "M = 50", "M = 20")]
    ratios = [row["ratio"][name] for name in ("M = 50", "M = 20")]
    return [*(f"{value:.1f}" for value in minutes), *(f"{value:.1f}" for value in ratios)]


def _table5(alpha: str) -> list[Row]:
    """FedKF's Table V at this skew, the paper's settings."""
    return [
        row
        for row in _rows().values()
        if row["preset"] == "fedkf:table5" and row["cell"]["partition"] == f"dirichlet({alpha})"
        if not row["changes"]
    ]


def _last_local(alpha: str) -> dict[tuple[str, str], list[float]]:
    """WLP of Table V over the last 20 rounds, in %, by method and final model."""
    return {
        (row["cell"]["method"], model): [
            100 * value for value in row["curve"][f"models.{model}.local.wlp"][-20:]
        ]
        for row in _table5(alpha)
        for model in ("aca", "oca")
        if f"models.{model}.local.wlp" in row["curve"]
    }


def _means(last: dict[tuple[str, str], list[float]], *methods: str) -> list[float]:
    # the cell that a run was made for names its row
    return [statistics.mean(last[method, model]) for method in methods for model in ("aca", "oca")]


def _worst_local() -> list[str]:
    """At Dir(0.1): FedAvg's swings, and FedKF's and FedAvg's means."""
    last = _last_local("0.1")
    swings = last["fedavg", "aca"]
    means = _means(last, "fedkf (oca)", "fedavg")
    return [f"{value:.0f}" for value in (min(swings), max(swings), *means)]


def _worst_local_of_few() -> list[str]:
    """At Dir(0.01): the means of FedKF⁻, FedKF and FedAvg."""
    means = _means(_last_local("0.01"), "fedkf- (oca)", "fedkf (oca)", "fedavg")
    return [f"{value:.0f}" for value in means]


def _gain_of_few() -> list[str]:
    """At Dir(0.01): AMP of FedKF⁻ and FedKF, the least and the most, less that of FedAvg."""
    amp = {
        (row["cell"]["method"], model): 100 * row["curve"][f"models.{model}.local.amp"][-1]
        for row in _table5("0.01")
        for model in ("aca", "oca")
        if f"models.{model}.local.amp" in row["curve"]
    }
    beyond = [
        value - amp["fedavg", "aca"] for (method, _), value in amp.items() if method != "fedavg"
    ]
    return [f"{value:.0f}" for value in (min(beyond), max(beyond))]


TABLES: dict[str, Callable[[], str]] = {
    "reproduction": _compared,
    "networks-per-round": _networks_per_round,
    "reproduction-curves": _curves,
    "reproduction-orders": _orders,
    "reproduction-presets": _presets,
}
SENTENCES: list[tuple[str, str, Callable[[], Sequence[str]]]] = [
    (
        "docs/reproduction.md",
        "takes {} minutes in the literal loop, {} with M = 50 and {} with M = 20 ({} and {} times "
        "as fast)",
        _networks_time,
    ),
    (
        "docs/reproduction.md",
        "On MNIST the means of M = 50 and the literal loop are {} apart, with a standard error of "
        "{}, and M = 50 is behind in {} pairs of five; on Fashion-MNIST {}, {} and {} of five",
        _fifty_networks,
    ),
    (
        "docs/reproduction.md",
        "FedAvg's WLP swings from {} to {} in the last 20 rounds and the last is its best; over "
        "these 20, FedKF's mean WLP is {} (ACA) and {} (OCA) where FedAvg's is {} and {}",
        _worst_local,
    ),
    ("docs/reproduction.md", "{} % after the first and {} % after the second", _first_rounds),
    ("docs/reproduction.md", "{} to {} points over FedAvg's last model", _gain_of_few),
    (
        "docs/reproduction.md",
        "over the last 20 rounds its mean WLP is {} (ACA) and {} (OCA), FedKF's {} and {}, "
        "FedAvg's {} and {}",
        _worst_local_of_few,
    ),
]
