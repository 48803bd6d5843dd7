"""The one-shot methods' table, FedHydra's readings, and what generators make."""

from __future__ import annotations

import statistics

from library.pivot import COUNT, Axis, Cell, Fields, Table, apart_of, axis, cross, figure
from library.rows import NOTHING

DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
PARTITIONS = axis("where", ("Dir(0.5)", "Dir(0.1)", "2c/c", "heterogeneous"))
LENGTHS = axis("suffix", {"": "", " 200×30": "200 epochs"})
TITLES = {
    "clients": "FedAvg",
    "FedDF": "FedDF",
    "DENSE": "DENSE",
    "FedHydra": "FedHydra",
    "DENSE (plain SGD)": "DENSE, plain SGD",
    "FedHydra (momentum)": "FedHydra, momentum",
    "FedHydra (AE)": "FedHydra, AE",
}
READINGS = ("raw Ū_c", "Ū_r alone", "probabilities", "AE", "lessons of the average")
PAIRS = (
    ("FedHydra", "DENSE"),
    ("FedHydra", "DENSE (plain SGD)"),
    ("FedHydra", "clients"),
    ("DENSE", "clients"),
    ("FedHydra", "FedHydra (momentum)"),
    ("FedHydra", "FedHydra (AE)"),
    ("DENSE (plain SGD)", "DENSE"),
)
ROWS: Fields = {"file": "one_shot_table", "seeds": range(5)}
ON_FASHION: Fields = {**ROWS, "dataset": "fashion-mnist", "where": "Dir(0.1)"}


def _key(name: str, suffix: str = "{suffix}") -> str:
    """The rows of a method; clients are the same at every length of the server's training."""
    return "{dataset}, {where}, " + name + ("" if name == "clients" else suffix) + ","


def _accuracy(dataset: str) -> Table:
    return Table(
        cross(PARTITIONS, LENGTHS),
        [
            (title, {"key": _key(name), "always": name == "clients"})
            for name, title in TITLES.items()
        ],
        {**ROWS, "dataset": dataset},
        corner=DATASETS[dataset],
        least=1,
    )


def _readings() -> Axis:
    """FedHydra's readings by the student's momentum; DENSE's training has momentum."""
    methods = {
        "the default": ("FedHydra", "FedHydra (momentum)"),
        **{name: (f"FedHydra ({name})", f"FedHydra ({name}, momentum)") for name in READINGS},
        "DENSE's training": ("", "FedHydra (DENSE's training)"),
    }
    return [(title, {"plain": plain, "heavy": heavy}) for title, (plain, heavy) in methods.items()]


def _compared(name: str, default: str, title: str) -> Axis:
    keys = {"key": _key(name, ""), "less": _key(default, "")}
    return [(title, {"key": keys["key"]}), ("− the default", {**keys, "show": apart_of})]


def _generated(cell: Cell) -> str:
    """Agreement, and class entropy over log C, of the images that taught the student."""
    if not cell.records:
        return NOTHING
    agreement, entropy = (
        statistics.mean(row["generator"][fact] for row in cell.records)
        for fact in ("agreement", "class_entropy_share")
    )
    return f"{100 * agreement:.0f} %, {entropy:.2f}"


def _asked(cell: Cell) -> str:
    """What P says of real images by one reading."""
    if not cell.records:
        return NOTHING
    read = [row[cell["reading"]] for row in cell.records]
    figures = ("right", "obeyed", "truth")
    means = [100 * statistics.mean(row[figure] for row in read) for figure in figures]
    return " / ".join(f"{mean:.1f}" for mean in means)


WHERE = cross(axis("dataset", DATASETS), PARTITIONS)
TABLES = {
    "one-shot-fashion-mnist": _accuracy("fashion-mnist"),
    "one-shot-mnist": _accuracy("mnist"),
    "one-shot-pairs": Table(
        cross(WHERE, LENGTHS),
        [
            (f"{TITLES[one]} − {TITLES[other]}", {"key": _key(one), "less": _key(other)})
            for one, other in PAIRS
        ],
        {**ROWS, "show": apart_of},
        least=1,
    ),
    "one-shot-readings": Table(
        _readings(),
        [
            *_compared("{plain}", "FedHydra", "plain SGD"),
            *_compared("{heavy}", "FedHydra (momentum)", "momentum 0.9"),
        ],
        ON_FASHION,
        corner="FedHydra",
    ),
    "one-shot-images": Table(
        WHERE,
        [
            (title, {"key": _key(name, "")})
            for name, title in TITLES.items()
            if name not in ("clients", "FedDF")
        ],
        {**ROWS, "show": _generated},
        least=1,
    ),
    "one-shot-generators": Table(
        cross(axis("width", (8, 64), "width {}"), axis("rate", ("0.001", "0.01"), "rate {}")),
        [
            ("asked class, entropy", {"show": _generated}),
            ("student", figure("accuracy", ".1f", 100)),
            ("seeds", COUNT),
        ],
        {**ON_FASHION, "key": "G: {dataset}, {where}, width {width}, rate {rate},"},
        corner="generator",
        least=1,
    ),
    "one-shot-strata": Table(
        cross(
            WHERE,
            axis(
                "strata",
                {
                    "30 steps, batch 32, rate 0.01": "rate 0.01",
                    "30 steps, batch 32, rate 0.001": "rate 0.001",
                    "15 steps, batch 8, rate 0.001": "15 steps, batch 8, rate 0.001",
                },
            ),
            join=None,
        ),
        [
            ("seeds", COUNT),
            *axis(
                "reading",
                {
                    "FedHydra (raw Ū_c)": "raw Ū_c",
                    "FedHydra": "FedHydra",
                    "FedHydra (Ū_r alone)": "Ū_r alone",
                    "FedHydra (AE)": "AE",
                },
            ),
        ],
        {**ROWS, "show": _asked, "key": "P: {dataset}, {where}, {strata},"},
        corner=("", "stratification"),
        least=1,
    ),
}
