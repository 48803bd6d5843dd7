"""The tables of `fashion_table.py` and `feddm_readings.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from library.rows import by_key, percents, spread, table

SEEDS = range(3)


def _first_table() -> str:
    rows = by_key("fashion_table")
    found = {name: percents(rows, name, SEEDS) for name in ("feddm", "real", "fedavg")}
    floats = sorted({rows[f"feddm seed={seed}"]["floats"] for seed in SEEDS})
    titles = {
        "feddm": ("FedDM", f"{floats[0]:,} – {floats[-1]:,}"),
        "real": ("REAL, FedDM's start images", "the same"),
        "fedavg": (
            "FedAvg, lr 0.01",
            f"{rows['fedavg seed=0']['floats']:,} (the network is narrow)",
        ),
    }
    body = [
        [title, spread(found[name], 3), _each(found[name]), size]
        for name, (title, size) in titles.items()
    ]
    for name in ("real", "fedavg"):
        ahead = [a - b for a, b in zip(found["feddm"], found[name], strict=True)]
        title = f"FedDM − {titles[name][0].split(',')[0]}"
        body.append([title, spread(ahead, 3), _each(ahead), ""])
    return table(["method", "accuracy", "each seed", "floats uploaded a round"], body)


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _fedavg_grid() -> list[str]:
    rows = by_key("fashion_table")
    rates = ("0.001", "0.01", "0.1")
    return [f"{100 * rows[f'tune fedavg lr={rate}']['accuracy']:.0f}" for rate in rates]


def _closest() -> list[str]:
    rows = by_key("fashion_table")
    one, other = (percents(rows, name, SEEDS) for name in ("feddm", "fedavg"))
    return [f"{min(a - b for a, b in zip(one, other, strict=True)):.2f}"]


def _feddm_readings() -> str:
    """Held-out accuracy of each measured reading, by seed, and less that of the defaults."""
    rows = by_key("feddm_readings")
    names = dict.fromkeys(["defaults", *(key.rsplit(" seed=", 1)[0] for key in rows)])
    defaults = percents(rows, "defaults", range(2))
    body = []
    for name in names:
        made = percents(rows, name, range(2))  # from seed 0 on
        pairs = zip(made, defaults, strict=False)
        less = ", ".join(f"{one - other:+.2f}".replace("-", "−") for one, other in pairs)
        body.append([name, _each(made), "" if name == "defaults" else less])
    return table(["reading", "held-out accuracy, each seed", "− defaults"], body)


TABLES: dict[str, Callable[[], str]] = {
    "fashion": _first_table,
    "feddm-readings": _feddm_readings,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (
        "docs/results.md",
        "training images at the same number of rounds ({}, {} and {} %)",
        _fedavg_grid,
    ),
    ("docs/results.md", "on one seed it comes within {} points", _closest),
]
