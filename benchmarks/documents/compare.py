"""All methods at one budget."""

from __future__ import annotations

import statistics

from library.compared import PERSONAL, TAKE_FEDAVGS_RATE
from library.pivot import Axis, Cell, Table, figure
from library.rows import NOTHING, by_key, by_seed, names, number, percents

SEEDS = range(5)


def _methods() -> Axis:
    """The methods with a global model that have finished rows, the best first."""
    of = [name for name in names("compare") if name not in PERSONAL]
    rows_by_method = {name: list(by_seed("compare", name, SEEDS).values()) for name in of}
    ranked = sorted(
        filter(rows_by_method.get, of),
        key=lambda name: -statistics.mean(percents("compare", name, SEEDS)),
    )
    return [(name, {"name": name, "records": rows_by_method[name]}) for name in ranked]


def _ahead(cell: Cell) -> str:
    """Returns the means' difference to FedAvg."""
    reference = percents("compare", "fedavg", SEEDS)
    if not reference:
        return NOTHING
    return number(statistics.mean(cell.values) - statistics.mean(reference), "+.1f")


def _best_rate(cell: Cell) -> str:
    """Returns the tuned rate of a method, or of the method whose rate it takes."""
    name = cell["name"]
    prefix = f"rate {'fedavg' if name in TAKE_FEDAVGS_RATE else name} "
    rows = by_key("compare")
    tried = [key for key in rows if key.startswith(prefix)]
    best = max(tried, key=lambda key: rows[key]["accuracy"], default=NOTHING)
    return best.removeprefix(prefix)


def _personal() -> list[str]:
    """Returns mean and standard deviation of the AMP of SOLO and FedBN."""
    amps = [percents("compare", name, SEEDS, "local.amp") for name in ("solo", "fedbn")]
    return [f"{of(amp):.2f}" for amp in amps for of in (statistics.mean, statistics.stdev)]


TABLES = {
    "compare": Table(
        _methods,
        [
            ("accuracy", {}),
            ("− FedAvg", {"show": _ahead}),
            ("MB", figure("bytes", ".2f", 1e-6)),
            ("rate", {"show": _best_rate}),
        ],
        corner="method",
    ),
}
SENTENCES = [
    ("docs/results.md", "an AMP of {} ± {} (SOLO) and {} ± {} (FedBN)", _personal),
]
