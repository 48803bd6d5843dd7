"""FedDM on Fashion-MNIST: the first table of docs/results.md, and readings of its paper."""

from __future__ import annotations

from library.pivot import Axis, Cell, Table, each_of
from library.rows import by_key, number, percents

SEEDS = range(3)


def _floats(cell: Cell) -> str:
    sizes = sorted({row["floats"] for row in cell.records})
    return str(cell["floats"].format(f"{sizes[0]:,}", f"{sizes[-1]:,}"))


def _readings() -> Axis:
    names = dict.fromkeys(["defaults", *(key.rsplit(" seed=")[0] for key in by_key(READINGS))])
    return [(name, {"key": name}) for name in names]


READINGS = "feddm_readings"
TABLES = {
    "fashion": Table(
        [
            ("FedDM", {"key": "feddm", "floats": "{{}} – {{}}"}),
            ("REAL, FedDM's start images", {"key": "real", "floats": "as FedDM"}),
            ("FedAvg, lr 0.01", {"key": "fedavg", "floats": "{{}} (the network is narrow)"}),
            ("FedDM − REAL", {"key": "feddm", "less": "real", "floats": ""}),
            ("FedDM − FedAvg", {"key": "feddm", "less": "fedavg", "floats": ""}),
        ],
        [
            ("accuracy", {}),
            ("each seed", {"show": each_of}),
            ("floats uploaded per round", {"show": _floats}),
        ],
        {"file": "fashion_table", "seeds": SEEDS},
        corner="method",
    ),
    "feddm-readings": Table(
        _readings,
        [
            ("held-out accuracy, each seed", {"show": each_of}),
            ("− defaults", {"show": each_of, "less": "defaults", "form": "+.2f"}),
        ],
        {"file": READINGS, "seeds": range(2)},
        corner="variant",
    ),
}


def _fedavg_grid() -> list[str]:
    rows = by_key("fashion_table")
    rates = ("0.001", "0.01", "0.1")
    return [f"{100 * rows[f'tune fedavg lr={rate}']['accuracy']:.0f}" for rate in rates]


def _closest() -> list[str]:
    feddm, fedavg = (percents("fashion_table", name, SEEDS) for name in ("feddm", "fedavg"))
    return [number(min(a - b for a, b in zip(feddm, fedavg, strict=True)), ".2f")]


SENTENCES = [
    ("docs/results.md", "on held-out images ({}, {} and {} %)", _fedavg_grid),
    ("docs/results.md", "on one seed it comes within {} points", _closest),
]
