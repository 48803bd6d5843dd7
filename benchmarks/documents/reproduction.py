"""docs/reproduction.md, from the rows of results/reproduction/*.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from fedsynth.reproduction.comparison import Line, format_number, lines
from fedsynth.reproduction.preset_files import preset, preset_names
from fedsynth.reproduction.presets import Cell, Preset, cell_words, dataset_of
from fedsynth.reproduction.rows import Rows
from fedsynth.reproduction.runs import changed_settings
from library import RESULTS
from library.pivot import COUNT, Axis, Fields, Table, figure, text
from library.rows import READ, REPRODUCTION, Row, RowsError, case, number, percents

DOCUMENT = "docs/reproduction.md"
CURVES = "fedprox:synthetic"
AT = (20, 50, 100, 150, 200)
ACCURACIES = ("test_accuracy_pct", "best_test_accuracy_pct", "amp_pct")
NETWORKS: Fields = {
    "file": "networks_per_round",
    "key": "{dataset} M={networks}",
    "less": "{dataset} M=0",
    "seeds": range(5),
}


def _rows() -> dict[str, dict[str, Any]]:
    READ.append(REPRODUCTION)
    return Rows(RESULTS / "reproduction").all()


def _finished() -> list[tuple[Preset, Line]]:
    """A line for each published number, and each curve, of finished runs; runs with changed
    settings are apart."""
    rows = _rows()
    changes = {json.dumps(row["changes"], sort_keys=True) for row in rows.values()}
    datasets = {dataset_of(row["cell"]["dataset"]) for row in rows.values()}
    seeds = sorted({row["seed"] for row in rows.values()})
    found = []
    for name in preset_names():
        one = preset(name)
        cells = [cell for cell in one.cells if dataset_of(cell.dataset) in datasets]
        for change in sorted(changes):
            changed = json.loads(change)
            made = lines(one, _may_have(cells, changed, rows), seeds, rows, changes=changed)
            found += [(one, line) for line in made if line.seeds or line.diverged]
    return found


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
    words = changed_settings(line.changes)
    return f" (`{words}`)" if words else ""


def _columns(*titles: str) -> Axis:
    """Columns of texts that the rows' axis has made."""
    return [(title, text(title)) for title in titles]


def _texts(labels: tuple[str, ...], **texts: str) -> tuple[tuple[str, ...], Fields]:
    """A row of such texts."""
    return labels, {"records": [texts]}


def _compared() -> Axis:
    """Published beside reproduced numbers."""
    return [
        _texts(
            (f"`{one.name}`", f"{line.cell}{_changed(line)}{line.reduced}"),
            metric=line.number.label,
            published=format_number(line.number.value, line.number.std),
            reproduced=format_number(line.mean, line.std),
            seeds=str(len(line.seeds)),
            verdict=line.verdict,
            hours=f"{sum(line.seconds) / 3600:.2f}",
            commit=", ".join(line.commits),
        )
        for one, line in _finished()
        if line.number.value is not None
    ]


def _curves() -> Axis:
    """FedProx's cells with runs: the paper has figures, and no numbers."""
    one = preset(CURVES)
    rows = [row for row in _rows().values() if row["preset"] == CURVES and not row["changes"]]
    cells = [
        (cell_words(cell, one), [row for row in rows if row["cell"] == cell.columns()])
        for cell in one.cells
    ]
    return [(words, {"records": mine}) for words, mine in cells if mine]


def _at(row: Row, number: int) -> float | None:
    curve = row["curve"]["test_accuracy"]
    return curve[number - 1] if len(curve) >= number else None


def _last(row: Row, of: Any) -> float:
    return of([100 * value for value in row["curve"]["test_accuracy"][-20:]])  # type: ignore[no-any-return]


def _orders() -> Axis:
    """The methods' order, published and reproduced, where two or more of a setting are finished,
    in any precision."""
    groups: dict[tuple[str, str, str], list[tuple[str, float, float]]] = {}
    for one, line in _finished():
        mean = line.mean
        if line.number.value is None or mean is None or line.number.label not in ACCURACIES:
            continue
        cell = next(c for c in one.cells if cell_words(c, one) == line.cell)
        setting = line.cell.replace(cell.method, "", 1).split("; ")[0]  # then remarks on a number
        where = f"{' '.join(setting.split())}{_changed(line)}"
        key = f"`{one.name}`", where, line.number.label
        groups.setdefault(key, []).append((cell.method, line.number.value, mean))
    return [_order(key, methods) for key, methods in groups.items() if len(methods) > 1]


def _order(
    labels: tuple[str, ...], methods: Sequence[tuple[str, float, float]]
) -> tuple[tuple[str, ...], Fields]:
    pairs = [(a, b) for k, a in enumerate(methods) for b in methods[k + 1 :]]
    same = sum((a[1] - b[1]) * (a[2] - b[2]) > 0 for a, b in pairs)
    there, here = (
        " > ".join(one[0] for one in sorted(methods, key=lambda m: m[place], reverse=True))
        for place in (1, 2)
    )
    alike = f"{same} of {len(pairs)}"
    return _texts(labels, **dict(zip(ORDERS, (there, here, alike), strict=True)))


ORDERS = ("published order", "reproduced order", "pairs alike")


def _presets() -> Axis:
    """All tables: how many cells, how many can be run, how many are finished."""
    finished: dict[str, set[str]] = {}
    for one, line in _finished():
        if not line.changes:
            finished.setdefault(one.name, set()).add(line.cell)
    made = []
    for name in preset_names():
        one = preset(name)
        runnable = sum(not one.refusal(cell) for cell in one.cells)
        counts = (len(one.cells), runnable, len(finished.get(name, ())))
        texts = dict(zip(("cells", "runnable", "finished"), map(str, counts), strict=True))
        made.append(_texts((f"`{name}`", one.source, one.title), **texts))
    return made


def _networks() -> Axis:
    """FedDM with M networks a round beside the literal loop."""
    return [
        (
            (dataset, f"M = {networks}" if networks else "a new network in every step"),
            {"dataset": dataset, "networks": networks},
        )
        for dataset in ("mnist", "fashion-mnist")
        for networks in (0, 5, 20, 50)
    ]


TABLES = {
    "reproduction": Table(
        _compared,
        _columns("metric", "published", "reproduced", "seeds", "verdict", "hours", "commit"),
        corner=("table", "cell"),
    ),
    "networks-per-round": Table(
        _networks(),
        [("accuracy", {"less": None}), ("− the first", {"sign": "+"})],
        NETWORKS,
        corner=("", "networks of a round"),
        least=1,
    ),
    "reproduction-curves": Table(
        _curves,
        [
            *(
                (f"round {number}", figure(partial(_at, number=number), ".1f", 100))
                for number in AT
            ),
            ("last 20 rounds", figure(partial(_last, of=statistics.mean), ".1f")),
            ("their spread", figure(partial(_last, of=statistics.pstdev), ".1f")),
            ("seeds", COUNT),
        ],
    ),
    "reproduction-orders": Table(_orders, _columns(*ORDERS), corner=("table", "cell", "metric")),
    "reproduction-presets": Table(
        _presets,
        _columns("cells", "runnable", "finished"),
        corner=("preset", "source", "what it shows"),
    ),
}


def _first_rounds() -> list[str]:
    """Test accuracy of FedDM's two rounds at full size, in %."""
    whole = (row for row in _rows().values() if row["preset"] == "feddm:table2")
    (row,) = (row for row in whole if row["rounds"] == 2)
    return [f"{100 * value:.2f}" for value in row["curve"]["test_accuracy"]]


def _fifty_networks() -> list[str]:
    """By data set: how far apart the means of M = 50 and of the literal loop are, the standard
    error of that as if seeds were not paired, and in how many pairs M = 50 is behind."""
    found = []
    for dataset in ("mnist", "fashion-mnist"):
        few, literal = (
            percents("networks_per_round", f"{dataset} M={m}", NETWORKS["seeds"]) for m in (50, 0)
        )
        if not len(few) == len(literal) == len(NETWORKS["seeds"]):
            raise RowsError("results/networks_per_round.jsonl lacks seeds of M = 50 or M = 0")
        error = math.sqrt((statistics.variance(few) + statistics.variance(literal)) / len(few))
        difference = statistics.mean(few) - statistics.mean(literal)
        behind = sum(one < other for one, other in zip(few, literal, strict=True))
        found += [number(difference, "+.2f"), f"{error:.2f}", str(behind)]
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


SENTENCES = [
    (
        DOCUMENT,
        "takes {} minutes in the literal loop, {} with M = 50 and {} with M = 20 ({} and {} times "
        "as fast)",
        _networks_time,
    ),
    (
        DOCUMENT,
        "On MNIST the means of M = 50 and the literal loop are {} apart, with a standard error of "
        "{}, and M = 50 is behind in {} pairs of five; on Fashion-MNIST {}, {} and {} of five",
        _fifty_networks,
    ),
    (
        DOCUMENT,
        "FedAvg's WLP swings from {} to {} in the last 20 rounds and the last is its best; over "
        "these 20, FedKF's mean WLP is {} (ACA) and {} (OCA) where FedAvg's is {} and {}",
        _worst_local,
    ),
    (DOCUMENT, "{} % after the first and {} % after the second", _first_rounds),
    (DOCUMENT, "{} to {} points over FedAvg's last model", _gain_of_few),
    (
        DOCUMENT,
        "over the last 20 rounds its mean WLP is {} (ACA) and {} (OCA), FedKF's {} and {}, "
        "FedAvg's {} and {}",
        _worst_local_of_few,
    ),
]
