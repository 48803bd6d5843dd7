"""The documents' tables and sentences about methods' accuracy, from rows (see `tables.py`)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from library.compared import PERSONAL, TAKE_FEDAVGS_RATE
from library.fedaf import ALPHA, READING_SEEDS, READINGS
from library.rows import NOTHING, apart, by_key, lines, percents, spread, table

SEEDS = range(3)
MORE_SEEDS = range(5)
Row = Mapping[str, Any]


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
    """Held-out accuracy of each reading that is measured."""
    rows = by_key("feddm_readings")
    names = dict.fromkeys(key.rsplit(" seed=", 1)[0] for key in rows)
    body = []
    for name in names:
        made = percents(rows, name, range(2))
        body.append([name, spread(made, len(made)), str(len(made))])
    return table(["reading", "held-out accuracy", "seeds"], body)


# --- FedAF ---------------------------------------------------------------------------------------

FEDAF_ROWS = ("FedDM", "FedAF", "FedAF, τ = 4", "without CDC", "without LGKM", "γ = 0.5", "γ = 1")
FEDAF_TITLES = {"FedAF": "FedAF (γ = 0.9, τ = 1)"}


def _best(row: Row) -> float:
    return float(max(row["curve"]))


def _fedaf(alphas: Sequence[str]) -> str:
    rows = by_key("fedaf_table")
    head = [""]
    for alpha in alphas:
        head += [f"Dir({alpha}), last", "best", "last − FedDM's"]
    body = []
    for name in FEDAF_ROWS:
        cells = []
        for alpha in alphas:
            key = f"{name} alpha={alpha}"
            cells.append(spread(percents(rows, key, MORE_SEEDS), 5))
            cells.append(spread(percents(rows, key, MORE_SEEDS, _best), 5))
            cells.append(NOTHING if name == "FedDM" else _fedaf_ahead(rows, name, alpha))
        if set(cells) != {NOTHING}:
            body.append([FEDAF_TITLES.get(name, name), *cells])
    return table(head, body)


def _fedaf_ahead(rows: Mapping[str, Row], name: str, alpha: str) -> str:
    """Paired differences to FedDM."""
    keys = [f"{one} alpha={alpha}" for one in (name, "FedDM")]
    both = [seed for seed in MORE_SEEDS if all(f"{key} seed={seed}" in rows for key in keys)]
    own, feddm = (percents(rows, key, both) for key in keys)
    return apart(own, feddm, 5)


def _fedaf_domains() -> str:
    rows = by_key("fedaf_table")
    columns: dict[str, Callable[[Row], Any]] = {
        "test accuracy, last": lambda row: row["accuracy"],
        "best": _best,
        "average over domains, last": lambda row: row["domain_average"],
    }
    body = [
        [
            FEDAF_TITLES.get(name, name),
            *(spread(percents(rows, f"{name} domains", SEEDS, v), 3) for v in columns.values()),
        ]
        for name in FEDAF_ROWS
        if any(key.startswith(f"{name} domains") for key in rows)
    ]
    return table(["", *columns], body)


def _fedaf_readings(group: str) -> str:
    """Readings of one group on held-out images, with the seeds that are made."""
    rows = by_key("fedaf_readings")
    seeds = READING_SEEDS.get(group, (0, 1))
    body = []
    for name in READINGS[group]:
        key = f"{name}, Dir({ALPHA.get(group, 0.1)})"
        last, best = (
            spread(percents(rows, key, seeds, value), len(seeds))
            for value in (lambda row: row["accuracy"], _best)
        )
        if last != NOTHING:
            body.append([name, last, best])
    return table(["", "last", "best"], body)


# --- FedKF ---------------------------------------------------------------------------------------

GENERATOR_ROUNDS = (2, 5, 10, 25, 50)
FEDKF_ROWS = {"FedAvg": "FedAvg", "FedKF-": "FedKF⁻", "FedKF": "FedKF"}


def _fedkf(alphas: Sequence[str]) -> str:
    rows = by_key("fedkf_table")
    head = [""]
    for alpha in alphas:
        head += [f"Dir({alpha}) AMP", "FM", "WLP"]
    body = []
    for name, title in FEDKF_ROWS.items():
        for final in ("aca", "oca"):
            cells = [f"{title} ({final.upper()})"]
            for alpha in alphas:
                for figure, scale in (("amp", 1), ("fm", 10), ("wlp", 1)):
                    value = partial(_local, final=final, figure=figure, scale=scale)
                    found = percents(rows, f"{name} alpha={alpha}", MORE_SEEDS, value)
                    cells.append(spread(found, 5, 2 if figure == "amp" else 1))
            body.append(cells)
    return table(head, body)


def _fedkf_paper() -> str:
    """The paper's size, one seed: AMP, FM and WLP, and what the last round's generators made."""
    rows = by_key("fedkf_table")
    body = []
    for name, title in FEDKF_ROWS.items():
        found = rows.get(f"paper {name} alpha=0.1 seed=0")
        if found is None:
            continue
        for final in ("aca", "oca"):
            figures = (("amp", 1, 2), ("fm", 10, 1), ("wlp", 1, 1))
            cells = [
                f"{100 * _local(found, final, figure, scale):.{digits}f}"
                for figure, scale, digits in figures
            ]
            body.append([f"{title} ({final.upper()})", *cells])
    return table(["Dir(0.1), one seed", "AMP", "FM", "WLP"], body)


def _fedkf_long(alpha: str, seed: int) -> str:
    """One seed at two lengths: AMP after the last round, and the best of those measured."""
    rows = by_key("fedkf_table")
    body = []
    for name, title in FEDKF_ROWS.items():
        runs = [rows.get(f"{size}{name} alpha={alpha} seed={seed}") for size in ("", "long ")]
        if runs[1] is None:
            continue
        for final in ("aca", "oca"):
            cells = [f"{title} ({final.upper()})"]
            for run in runs:
                measured = [row for row in ([] if run is None else run["rows"]) if "models" in row]
                curve = [100 * row["models"][final]["local"]["amp"] for row in measured]
                cells += [f"{curve[-1]:.2f}", f"{max(curve):.2f}"] if curve else [NOTHING] * 2
            body.append(cells)
    head = ["50 rounds, rate 0.02: AMP, last", "best", "100 rounds, rate 0.01: AMP, last", "best"]
    return table([f"Dir({alpha}), seed {seed}", *head], body)


def _fedkf_generators(alphas: Sequence[str]) -> str:
    """Class entropy over log C of what clients' generators make, by round."""
    rows = by_key("fedkf_table")
    body = []
    for alpha in alphas:
        for name in ("FedKF-", "FedKF"):
            keys = [f"{name} alpha={alpha} seed={seed}" for seed in MORE_SEEDS]
            made = [rows[key]["rows"] for key in keys if key in rows]
            cells = []
            for number in GENERATOR_ROUNDS:
                at = [
                    row["generator"]["class_entropy_share"]
                    for run in made
                    for row in run
                    if row["round"] == number and "generator" in row
                ]
                cells.append(f"{statistics.mean(at):.2f}" if at else NOTHING)
            if set(cells) != {NOTHING}:
                body.append([f"{FEDKF_ROWS[name]}, Dir({alpha})", *cells])
    return table(["", *(f"round {number}" for number in GENERATOR_ROUNDS)], body)


def _data_free(group: str) -> str:
    """Students without data: accuracy on held-out images, and what the generator made in the
    end.
    """
    made: dict[str, list[Row]] = {}
    for row in lines("generator_scale"):
        where, _, rest = row["key"].partition(": ")
        if where == group:
            made.setdefault(rest.rsplit(" seed=", 1)[0], []).append(row)
    body = []
    for name, rows in made.items():
        student = [100 * row["accuracy"] for row in rows]
        gap = [100 * (row["teacher"] - row["accuracy"]) for row in rows]
        classes, entropy = (
            statistics.mean(row[fact] for row in rows)
            for fact in ("classes", "class_entropy_share")
        )
        cells = [spread(student, len(rows), 1), spread(gap, len(rows), 1), f"{classes:.1f}"]
        body.append([name, *cells, f"{entropy:.2f}", str(len(rows))])
    head = ["", "student", "behind its teacher", "classes", "class entropy / log C", "seeds"]
    return table(head, body)


def _local(row: Row, final: str, figure: str, scale: float) -> float:
    """A figure of a final model on the clients' own test splits, in the last round."""
    number: float = row["rows"][-1]["models"][final]["local"][figure]
    return scale * number


# --- one shot ------------------------------------------------------------------------------------

DATASETS = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
PARTITIONS = ("Dir(0.5)", "Dir(0.1)", "2c/c", "heterogeneous")
LENGTHS = {"": "", " 200×30": ", 200 epochs"}
GENERATORS = [f"width {width}, rate {rate}" for width in (8, 64) for rate in ("0.001", "0.01")]
ONE_SHOT = {
    "clients": "FedAvg",
    "FedDF": "FedDF",
    "DENSE": "DENSE",
    "FedHydra": "FedHydra",
    "FedHydra (raw Ū_c)": "raw Ū_c",
    "FedHydra (Ū_r alone)": "Ū_r alone",
    "FedHydra (probabilities)": "probabilities",
    "FedHydra (AE)": "AE",
    "FedHydra (lessons of the average)": "lessons of the average",
    "FedHydra (DENSE's training)": "DENSE's training",
}
GENERATING = [name for name in ONE_SHOT if name not in ("clients", "FedDF")]
STRATIFYING = ("FedHydra (raw Ū_c)", "FedHydra", "FedHydra (Ū_r alone)", "FedHydra (AE)")
STRATA = {
    "30 steps, batch 32, rate 0.01": "rate 0.01",
    "30 steps, batch 32, rate 0.001": "rate 0.001",
    "15 steps, batch 8, rate 0.001": "15 steps, batch 8, rate 0.001",
}
PAIRS = (
    ("FedHydra", "DENSE"),
    ("FedHydra", "clients"),
    ("DENSE", "clients"),
    ("FedHydra", "FedHydra (raw Ū_c)"),
    ("FedHydra", "FedHydra (Ū_r alone)"),
    ("FedHydra", "FedHydra (AE)"),
    ("FedHydra", "FedHydra (lessons of the average)"),
    ("FedHydra (DENSE's training)", "DENSE"),
    ("FedHydra (DENSE's training)", "FedHydra"),
)


def _one_shot(dataset: str) -> str:
    rows = by_key("one_shot_table")
    body = []
    for where, (suffix, length) in itertools.product(PARTITIONS, LENGTHS.items()):
        cells = []
        for name in ONE_SHOT:
            of = name if name == "clients" else f"{name}{suffix}"
            found = percents(rows, f"{dataset}, {where}, {of},", MORE_SEEDS)
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


def _in_pairs(
    rows: Mapping[str, Row], prefix: str, pair: Sequence[str], suffix: str
) -> list[list[float]]:
    """The percentages of two methods in the seeds that both have."""
    names = [f"{prefix}{name if name == 'clients' else name + suffix}," for name in pair]
    both = [
        seed
        for seed in MORE_SEEDS
        if all(rows.get(f"{name} seed={seed}", {}).get("accuracy") for name in names)
    ]
    return [percents(rows, name, both) for name in names]


def _one_shot_generators() -> str:
    """What thirty steps make of DENSE's fresh generator."""
    rows = by_key("one_shot_table")
    body = []
    for name in GENERATORS:
        key = f"G: fashion-mnist, Dir(0.1), {name},"
        made = [rows[f"{key} seed={s}"] for s in MORE_SEEDS if f"{key} seed={s}" in rows]
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
                made = [rows[f"{key} seed={s}"] for s in MORE_SEEDS if f"{key} seed={s}" in rows]
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
                made = [rows[f"{key} seed={s}"] for s in MORE_SEEDS if f"{key} seed={s}" in rows]
                if made:
                    cells = [_asked(made, reading) for reading in STRATIFYING]
                    body.append([f"{title}, {where}", rate, str(len(made)), *cells])
    return table(["", "stratification", "seeds", *(ONE_SHOT[n] for n in STRATIFYING)], body)


def _asked(rows: Sequence[Row], reading: str) -> str:
    figures = ("right", "obeyed", "truth")
    means = [100 * statistics.mean(row[reading][figure] for row in rows) for figure in figures]
    return " / ".join(f"{mean:.1f}" for mean in means)


# --- all methods at one budget -------------------------------------------------------------------


def _compare(personal: bool) -> str:
    rows = by_key("compare")
    names = {key.rsplit(" seed=", 1)[0] for key in rows if " seed=" in key}
    reference = percents(rows, "fedavg", MORE_SEEDS)
    entries = []
    for name in names:
        if (name in PERSONAL) != personal:
            continue
        made = [rows[f"{name} seed={s}"] for s in MORE_SEEDS if f"{name} seed={s}" in rows]
        found = [100 * (row["local"]["amp"] if personal else row["accuracy"]) for row in made]
        mean = statistics.mean(found)
        size = statistics.mean(row["bytes"] for row in made) / 1e6
        seconds = statistics.mean(row["seconds"] for row in made)
        ahead = (
            f"{mean - statistics.mean(reference):+.1f}".replace("-", "−") if reference else NOTHING
        )
        cells = [name, spread(found, len(made)), str(len(made)), ahead, f"{size:.2f}"]
        if personal:
            cells.pop(3)
        entries.append((mean, [*cells, f"{seconds:.0f}", best_rate(rows, name)]))
    body = [cells for _, cells in sorted(entries, key=lambda entry: -entry[0])]
    head = ["method", "AMP" if personal else "accuracy", "seeds", "− FedAvg", "MB up", "seconds"]
    if personal:
        head.pop(3)
    return table([*head, "rate"], body)


def best_rate(rows: Mapping[str, Row], name: str) -> str:
    """The tuned rate of a method, or of the method whose rate it takes; – if none is tuned."""
    prefix = f"rate {'fedavg' if name in TAKE_FEDAVGS_RATE else name} "
    tried = {key.removeprefix(prefix): row for key, row in rows.items() if key.startswith(prefix)}
    if not tried:
        return NOTHING
    return max(tried, key=lambda rate: tried[rate]["accuracy"])


def _fedsum_open() -> str:
    """Accuracy by round, and what it took."""
    titles = {
        "feddm, rate 1, Dir(0.1)": "FedDM, image rate 1, Dir(0.1)",
        "feddm, rate 10, Dir(0.1)": "FedDM, image rate 10, Dir(0.1)",
        "fedsum, Dir(0.1)": "FedSum, Dir(0.1)",
        "fedsum, Dir(100)": "FedSum, Dir(100)",
        "fedsum with 50 images, Dir(0.1)": "FedSum, ipc 50, Dir(0.1)",
    }
    rows = by_key("fedsum_table")
    body = []
    for name, title in titles.items():
        row = rows.get(f"open: {name} seed=0")
        if row is not None:
            curve = [f"{100 * one:.1f}" for one in row["curve"]]
            megabytes = f"{row['bytes'] / 1e6:.1f}"
            body.append([title, *curve, f"{row['cpu_seconds'][-1]:.0f}", megabytes])
    rounds = [f"round {number}" for number in range(1, 6)]
    return table(["method", *rounds, "CPU seconds", "MB up"], body)


def _fedsum_digits() -> str:
    """Mean over seeds, by round."""
    titles = {
        "feddm, Dir(0.05)": "FedDM, Dir(0.05)",
        "feddm, Dir(100)": "FedDM, Dir(100)",
        "fedsum, Dir(0.05)": "FedSum, Dir(0.05)",
        "fedsum, Dir(100)": "FedSum, Dir(100)",
        "fedsum with 50 images, Dir(0.05)": "FedSum, ipc 50, Dir(0.05)",
    }
    rows = by_key("fedsum_table")
    body = []
    for name, title in titles.items():
        made = [rows[key] for s in SEEDS if (key := f"digits: {name} seed={s}") in rows]
        if made:
            curves = [[100 * row["curve"][number] for row in made] for number in range(3)]
            seconds = statistics.mean(row["cpu_seconds"][-1] for row in made)
            size = statistics.mean(row["bytes"] for row in made) / 1e6
            cells = [spread(curve, 3, 1) for curve in curves]
            body.append([title, *cells, f"{seconds:.1f}", f"{size:.2f}"])
    return table(["method", "round 1", "round 2", "round 3", "CPU seconds", "MB up"], body)


def _prior() -> str:
    """Held-out accuracy of a linear classifier by feature map."""
    rows = by_key_of_maps()
    body = [
        [f"`{name}`", str(row["dimension"]), f"{100 * row['accuracy']:.1f}"]
        for name, row in sorted(rows.items(), key=lambda item: float(item[1]["accuracy"]))
    ]
    return table(["features", "dimension", "held-out accuracy"], body)


def by_key_of_maps() -> dict[str, Row]:
    """Rows of `random_process_prior.py`, whose keys are the maps' names."""
    return {row["key"]: row for row in lines("random_process_prior")}


def _fedsum_private() -> str:
    """Beside FedDM's `features` at the same preset."""
    rows = lines("fedsum_table")  # runs with the same seed differ by their noise
    published = by_key("dp_utility")
    body = []
    for epsilon in ("1", "10"):
        cells = [spread(percents(published, f"fashion-mnist features, ε = {epsilon}", SEEDS), 3, 1)]
        for kind in ("own", "secure"):
            name = f"private: fedsum, ε = {epsilon}, {kind} noise seed=0 "
            made = [100 * row["accuracy"] for row in rows if row["key"].startswith(name)]
            cells.append(spread(made, len(made), 1))
        body.append([epsilon, *cells])
    return table(["ε", "FedDM, `features`", "FedSum, own noise", "FedSum, aggregated"], body)


TABLES: dict[str, Callable[[], str]] = {
    "random-process": _prior,
    "fedsum-digits": _fedsum_digits,
    "fedsum-open": _fedsum_open,
    "fedsum-private": _fedsum_private,
    "fashion": _first_table,
    "feddm-readings": _feddm_readings,
    "fedaf": partial(_fedaf, ("0.1", "0.02")),
    "fedaf-domains": _fedaf_domains,
    **{f"fedaf-{group}": partial(_fedaf_readings, group) for group in READINGS},
    "fedkf": partial(_fedkf, ("0.1", "0.01")),
    "fedkf-paper": _fedkf_paper,
    "fedkf-long": partial(_fedkf_long, "0.1", 3),
    "fedkf-generators": partial(_fedkf_generators, ("0.1", "0.01")),
    "data-free-scale": partial(_data_free, "scale"),
    "data-free-table": partial(_data_free, "table"),
    "one-shot-fashion-mnist": partial(_one_shot, "fashion-mnist"),
    "one-shot-mnist": partial(_one_shot, "mnist"),
    "one-shot-pairs": _one_shot_pairs,
    "one-shot-images": _one_shot_images,
    "one-shot-generators": _one_shot_generators,
    "one-shot-strata": _strata,
    "compare": partial(_compare, personal=False),
    "compare-personal": partial(_compare, personal=True),
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (
        "docs/results.md",
        "training images at the same number of rounds ({}, {} and {} %)",
        _fedavg_grid,
    ),
    ("docs/results.md", "on one seed it comes within {} points", _closest),
]
