"""The tables of `one_shot_table.py`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from library.rows import NOTHING, Row, apart, by_key, percents, spread, table

SEEDS = range(5)
DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
PARTITIONS = ("Dir(0.5)", "Dir(0.1)", "2c/c", "heterogeneous")
LENGTHS = {"": "", " 200×30": ", 200 epochs"}
GENERATORS = [f"width {width}, rate {rate}" for width in (8, 64) for rate in ("0.001", "0.01")]
ONE_SHOT = {
    "clients": "FedAvg",
    "FedDF": "FedDF",
    "DENSE": "DENSE",
    "FedHydra": "FedHydra",
    "DENSE (plain SGD)": "DENSE, plain SGD",
    "FedHydra (momentum)": "FedHydra, momentum",
    "FedHydra (AE)": "FedHydra, AE",
}
GENERATING = [name for name in ONE_SHOT if name not in ("clients", "FedDF")]
READINGS = ("raw Ū_c", "Ū_r alone", "probabilities", "AE", "lessons of the average")
STRATIFYING = {
    "FedHydra (raw Ū_c)": "raw Ū_c",
    "FedHydra": "FedHydra",
    "FedHydra (Ū_r alone)": "Ū_r alone",
    "FedHydra (AE)": "AE",
}
STRATA = {
    "30 steps, batch 32, rate 0.01": "rate 0.01",
    "30 steps, batch 32, rate 0.001": "rate 0.001",
    "15 steps, batch 8, rate 0.001": "15 steps, batch 8, rate 0.001",
}
PAIRS = (
    ("FedHydra", "DENSE"),
    ("FedHydra", "DENSE (plain SGD)"),
    ("FedHydra", "clients"),
    ("DENSE", "clients"),
    ("FedHydra", "FedHydra (momentum)"),
    ("FedHydra", "FedHydra (AE)"),
    ("DENSE (plain SGD)", "DENSE"),
)


def _one_shot(dataset: str) -> str:
    rows = by_key("one_shot_table")
    body = []
    for where, (suffix, length) in itertools.product(PARTITIONS, LENGTHS.items()):
        cells = []
        for name in ONE_SHOT:
            of = name if name == "clients" else f"{name}{suffix}"
            found = percents(rows, f"{dataset}, {where}, {of},", SEEDS)
            cells.append(spread(found, 5))
        if set(cells[1:]) != {NOTHING}:  # beside FedAvg, which has no epochs on the server
            body.append([f"{where}{length}", *cells])
    return table([DATASETS[dataset], *ONE_SHOT.values()], body)


def _one_shot_pairs() -> str:
    rows = by_key("one_shot_table")
    body = []
    for dataset, title in DATASETS.items():
        for where, (suffix, length) in itertools.product(PARTITIONS, LENGTHS.items()):
            cells = []
            for pair in PAIRS:
                one, other = _in_pairs(rows, f"{dataset}, {where}, ", pair, suffix)
                cells.append(apart(one, other, 5))
            if set(cells) != {NOTHING}:
                body.append([f"{title}, {where}{length}", *cells])
    head = [f"{ONE_SHOT[one]} − {ONE_SHOT[other]}" for one, other in PAIRS]
    return table(["", *head], body)


def _readings() -> str:
    """FedHydra's readings beside the default, by the student's momentum; DENSE's training is with
    momentum."""
    rows = by_key("one_shot_table")
    where = "fashion-mnist, Dir(0.1), "
    defaults = "FedHydra", "FedHydra (momentum)"
    methods = {
        "the default": defaults,
        **{name: (f"FedHydra ({name})", f"FedHydra ({name}, momentum)") for name in READINGS},
        "DENSE's training": ("", "FedHydra (DENSE's training)"),
    }
    body = []
    for title, names in methods.items():
        cells = [title]
        for name, default in zip(names, defaults, strict=True):
            one, other = _in_pairs(rows, where, (name, default), "")
            apart_from = "" if name == default else apart(one, other, 5)
            cells += [spread(percents(rows, f"{where}{name},", SEEDS), 5), apart_from]
        body.append(cells)
    head = ["FedHydra", "plain SGD", "− the default", "momentum 0.9", "− the default"]
    return table(head, body)


def _in_pairs(
    rows: Mapping[str, Row], prefix: str, pair: Sequence[str], suffix: str
) -> list[list[float]]:
    """The percentages of two methods in the seeds that both have."""
    names = [f"{prefix}{name if name == 'clients' else name + suffix}," for name in pair]
    both = [
        seed
        for seed in SEEDS
        if all(rows.get(f"{name} seed={seed}", {}).get("accuracy") for name in names)
    ]
    return [percents(rows, name, both) for name in names]


def _one_shot_generators() -> str:
    """What thirty steps make of DENSE's fresh generator."""
    rows = by_key("one_shot_table")
    body = []
    for name in GENERATORS:
        key = f"G: fashion-mnist, Dir(0.1), {name},"
        made = [rows[f"{key} seed={s}"] for s in SEEDS if f"{key} seed={s}" in rows]
        if made:
            accuracy = statistics.mean(100 * row["accuracy"] for row in made)
            body.append([name, _generated(made), f"{accuracy:.1f}", str(len(made))])
    return table(["generator", "asked class, entropy", "student", "seeds"], body)


def _one_shot_images() -> str:
    """Agreement, and class entropy over log C, of the images that taught the student."""
    rows = by_key("one_shot_table")
    body = []
    for dataset, title in DATASETS.items():
        for where in PARTITIONS:
            cells = [f"{title}, {where}"]
            for name in GENERATING:
                key = f"{dataset}, {where}, {name},"
                made = [rows[f"{key} seed={s}"] for s in SEEDS if f"{key} seed={s}" in rows]
                cells.append(_generated(made))
            if set(cells[1:]) != {NOTHING}:
                body.append(cells)
    return table(["", *(ONE_SHOT[name] for name in GENERATING)], body)


def _generated(rows: Sequence[Row]) -> str:
    if not rows:
        return NOTHING
    agreement, entropy = (
        statistics.mean(row["generator"][fact] for row in rows)
        for fact in ("agreement", "class_entropy_share")
    )
    return f"{100 * agreement:.0f} %, {entropy:.2f}"


def _strata() -> str:
    """What P says of real images, by reading and stratification."""
    rows = by_key("one_shot_table")
    body = []
    for dataset, title in DATASETS.items():
        for where in PARTITIONS:
            for strata, rate in STRATA.items():
                key = f"P: {dataset}, {where}, {strata},"
                made = [rows[f"{key} seed={s}"] for s in SEEDS if f"{key} seed={s}" in rows]
                if made:
                    cells = [_asked(made, reading) for reading in STRATIFYING]
                    body.append([f"{title}, {where}", rate, str(len(made)), *cells])
    return table(["", "stratification", "seeds", *STRATIFYING.values()], body)


def _asked(rows: Sequence[Row], reading: str) -> str:
    figures = ("right", "obeyed", "truth")
    means = [100 * statistics.mean(row[reading][figure] for row in rows) for figure in figures]
    return " / ".join(f"{mean:.1f}" for mean in means)


TABLES: dict[str, Callable[[], str]] = {
    "one-shot-fashion-mnist": partial(_one_shot, "fashion-mnist"),
    "one-shot-mnist": partial(_one_shot, "mnist"),
    "one-shot-pairs": _one_shot_pairs,
    "one-shot-readings": _readings,
    "one-shot-images": _one_shot_images,
    "one-shot-generators": _one_shot_generators,
    "one-shot-strata": _strata,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
