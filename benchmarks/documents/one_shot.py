"""The one-shot methods' tables in docs/results.md, and variants of FedHydra."""

from __future__ import annotations

from library.pivot import Axis, Fields, Table, axis, cross, paired_of

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
VARIANTS = ("raw Ū_c", "Ū_r alone", "probabilities", "AE", "lessons of the average")
ROWS: Fields = {"file": "one_shot_table", "seeds": range(5)}


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
        min_cells=1,
    )


def _variants() -> Axis:
    """FedHydra's default and its variants on Fashion-MNIST at Dir(0.1)."""
    names = {"default": "FedHydra", **{name: f"FedHydra ({name})" for name in VARIANTS}}
    return [(title, {"key": _key(name, "")}) for title, name in names.items()]


TABLES = {
    "one-shot-fashion-mnist": _accuracy("fashion-mnist"),
    "one-shot-mnist": _accuracy("mnist"),
    "one-shot-variants": Table(
        _variants(),
        [("accuracy", {}), ("− default", {"less": _key("FedHydra", ""), "show": paired_of})],
        {**ROWS, "dataset": "fashion-mnist", "where": "Dir(0.1)"},
        corner="FedHydra",
    ),
}
