"""The one-shot methods' tables in docs/results.md, and variants of FedHydra."""

from __future__ import annotations

from library.pivot import Axis, Fields, Table, apart_of, axis, cross

DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
PARTITIONS = axis("where", ("Dir(0.5)", "Dir(0.1)", "2c/c", "heterogeneous"))
LENGTHS = axis("suffix", {"": "", " 200×30": "200 epochs"})
TITLES = {
    "clients": "FedAvg",
    "FedDF": "FedDF",
    "DENSE": "DENSE",
    "FedHydra": "FedHydra",
    "FedHydra (momentum)": "FedHydra, momentum",
    "FedHydra (AE)": "FedHydra, AE",
}
READINGS = ("raw Ū_c", "Ū_r alone", "probabilities", "AE", "lessons of the average")
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


TABLES = {
    "one-shot-fashion-mnist": _accuracy("fashion-mnist"),
    "one-shot-mnist": _accuracy("mnist"),
    "one-shot-readings": Table(
        _readings(),
        [
            *_compared("{plain}", "FedHydra", "plain SGD"),
            *_compared("{heavy}", "FedHydra (momentum)", "momentum 0.9"),
        ],
        ON_FASHION,
        corner="FedHydra",
    ),
}
