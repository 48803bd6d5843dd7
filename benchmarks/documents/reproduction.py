"""docs/reproduction.md, from the rows of results/reproduction/*.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from fedsynth.reproduction.comparison import Line, format_number, lines
from fedsynth.reproduction.presets import Cell, Preset, cell_words, dataset_of, preset, preset_names
from fedsynth.reproduction.rows import Rows
from fedsynth.reproduction.runs import changed_settings
from library import RESULTS, pivot
from library.pivot import Axis, Table, axis, text
from library.rows import READ, REPRODUCTION, Row, RowsError, case, number, percents

DOCUMENT = "docs/reproduction.md"
CURVES = "fedprox:synthetic"
METHODS = {"fedavg": "FedAvg", "fedprox (mu = 0)": "μ = 0", "fedprox": "μ = 1"}
MARKS = {"above": " ↑", "below": " ↓"}
NETWORK_SEEDS = range(5)


def _rows() -> dict[str, dict[str, Any]]:
    READ.append(REPRODUCTION)
    return Rows(RESULTS / "reproduction").all()


def _finished() -> list[tuple[Preset, Line]]:
    """A line for each published number, and each curve, of finished runs; runs with changed
    settings have separate lines."""
    rows = _rows()
    changes = {json.dumps(row["changes"], sort_keys=True) for row in rows.values()}
    datasets = {dataset_of(row["cell"]["dataset"]) for row in rows.values()}
    seeds = sorted({row["seed"] for row in rows.values()})
    entries = []
    for name in preset_names():
        table = preset(name)
        cells = [cell for cell in table.cells if dataset_of(cell.dataset) in datasets]
        for change in sorted(changes):
            changed = json.loads(change)
            table_lines = lines(
                table, _may_have(cells, changed, rows), seeds, rows, changes=changed
            )
            entries += [(table, line) for line in table_lines if line.runs]
    return entries


def _may_have(
    cells: Sequence[Cell], changed: dict[str, Any], rows: dict[str, dict[str, Any]]
) -> Sequence[Cell]:
    """The cells of methods that ran with these changes: others may not have the setting."""
    if not changed:
        return cells
    methods = {row["cell"]["method"] for row in rows.values() if row["changes"] == changed}
    return [cell for cell in cells if cell.method in methods]


def _changed(line: Line) -> str:
    """Returns the settings that differ from the preset's, in parentheses."""
    settings = changed_settings(line.changes)
    return f" (`{settings}`)" if settings else ""


def _compared(column: str, *names: str) -> Axis:
    """Published and reproduced numbers of some presets, with a row for each cell.

    Args:
        column: the column of the cells that, with the method, tells them apart.
        names: of the presets.
    """
    entries: dict[tuple[str, str], dict[str, str]] = {}
    for table, line in _finished():
        if table.name in names and line.number.value is not None:
            cell = next(c for c in table.cells if cell_words(c, table) == line.cell)
            labels = getattr(cell, column), f"{cell.method}{_changed(line)}{line.reduced_precision}"
            texts = entries.setdefault(labels, {})
            reproduced = f"{format_number(*line.spread)}{MARKS.get(line.verdict, '')}"
            texts[f"{line.number.label} here"] = reproduced
            texts[line.number.label] = format_number(line.number.value, line.number.std)
    order = list(dict.fromkeys(place for place, _ in entries))
    grouped = sorted(entries.items(), key=lambda entry: order.index(entry[0][0]))
    return [(labels, {"records": [texts]}) for labels, texts in grouped]


def _curves() -> Axis:
    """FedProx's data sets and shares of stragglers; the paper prints no numbers."""
    entries: dict[tuple[str, str], dict[str, list[Row]]] = {}
    rows = [row for row in _rows().values() if row["preset"] == CURVES and not row["changes"]]
    for cell in preset(CURVES).cells:
        runs: list[Row] = [row for row in rows if row["cell"] == cell.columns()]
        labels = (cell.dataset, cell.note.removesuffix(" stragglers"))
        entries.setdefault(labels, {})[cell.method] = runs
    return [(labels, {"runs": runs}) for labels, runs in entries.items()]


def _end(cell: pivot.Cell) -> str:
    """Returns the mean and the standard deviation over the last 20 rounds."""
    (row,) = cell.records
    last = [100 * value for value in row["curve"]["test_accuracy"][-20:]]
    return f"{statistics.mean(last):.1f} ± {statistics.pstdev(last):.1f}"


TABLES = {
    "reproduction-accuracy": Table(
        partial(_compared, "dataset", "feddm:table2", "fedhydra:table1"),
        [
            ("published", text("test_accuracy_pct")),
            ("here", text("test_accuracy_pct here")),
        ],
        corner=("data", "method"),
    ),
    "reproduction-fedkf": Table(
        partial(_compared, "partition", "fedkf:table5", "fedkf:table12"),
        [
            column
            for metric, title in (("amp_pct", "AMP"), ("fm", "FM"), ("wlp_pct", "WLP"))
            for column in ((f"{title}, paper", text(metric)), ("here", text(f"{metric} here")))
        ],
        corner=("partition", "method"),
    ),
    "reproduction-curves": Table(
        _curves,
        axis("method", METHODS),
        {"records": lambda cell: cell["runs"][cell["method"]], "show": _end},
        corner=("data", "stragglers"),
    ),
}


def _fifty_networks() -> list[str]:
    """By data set: the difference of the means of M = 50 and of the literal loop, the standard
    error of that as if seeds were not paired, and in how many pairs M = 50 is behind."""
    entries = []
    for dataset in ("mnist", "fashion-mnist"):
        few, literal = (
            percents("networks_per_round", f"{dataset} M={m}", NETWORK_SEEDS) for m in (50, 0)
        )
        if not len(few) == len(literal) == len(NETWORK_SEEDS):
            raise RowsError("results/networks_per_round.jsonl lacks seeds of M = 50 or M = 0")
        error = math.sqrt((statistics.variance(few) + statistics.variance(literal)) / len(few))
        difference = statistics.mean(few) - statistics.mean(literal)
        behind = sum(a < b for a, b in zip(few, literal, strict=True))
        entries += [number(difference, "+.2f"), f"{error:.2f}", str(behind)]
    return entries


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


SENTENCES = [
    (
        DOCUMENT,
        "takes {} minutes in the literal loop, {} with M = 50 and {} with M = 20 ({} and {} times "
        "as fast)",
        _networks_time,
    ),
    (
        DOCUMENT,
        "M = 50 changes accuracy by {} points on MNIST (standard error {}; lower in {} of five "
        "pairs) and by {} on Fashion-MNIST ({}; {} of five)",
        _fifty_networks,
    ),
    (
        DOCUMENT,
        "FedAvg's WLP varies from {} to {} over the last 20 rounds and is highest in the last one; "
        "over these rounds, FedKF's mean WLP is {} (ACA) and {} (OCA), FedAvg's {} and {}",
        _worst_local,
    ),
    (DOCUMENT, "{} to {} points over FedAvg's last model", _gain_of_few),
]
