"""The tables of docs/fedstats.md."""

from __future__ import annotations

from library.pivot import Axis, Fields, Table, axis, cross, figure
from library.rows import STATISTICS_SEEDS

SEEDS = range(5)
DATASETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "emnist-letters": "EMNIST letters",
    "cifar10": "CIFAR-10",
}
ROWS = axis("dataset", DATASETS)
BUDGETS = {**{one: f"ε = {one}" for one in ("0.5", "1", "3", "10")}, "inf": "no privacy"}
NOISES = {"own": "own", "secure": "aggregated"}
CELLS: Fields = {
    "file": "fedstats_table",
    "key": "{dataset} eps={epsilon} {noise} alpha={alpha} K={clients}",
    "epsilon": "1",
    "noise": "own",
    "alpha": "0.5",
    "clients": 10,
    "seeds": STATISTICS_SEEDS,
    "expected": len(SEEDS),
}
STUDENTS: Fields = {**CELLS, "file": "fedstats_students", "seeds": SEEDS}
SOURCES = {
    "real": "the training images themselves (an upper bound, not private)",
    "small": "these as 14×14 pictures (CIFAR-10: 8×8), enlarged and sharpened as drawn ones are "
    "(not private)",
    "random": "random processes",
    "drawn": "drawn from small pictures (step 1)",
    "moved": "moved towards class means as well (steps 1 to 3)",
}
MAPS = (
    "whitened-scattering",
    "whitened-scattering+random-process",
    "mirrored-scattering+random-process",
)


def _held_out(key: str, seeds: int = 1, **fields: object) -> Fields:
    """The fields of runs on held-out training images."""
    return {"file": "fedstats_settings", "key": key, "seeds": range(seeds), **fields}


def _moments() -> Axis:
    """With released second moments and without; the latter runs belong to another table."""
    columns: list[tuple[str, Fields]] = []
    for one in ("1", "10"):
        without = f"{{dataset}} whitening yes own eps={one} rounds 32"
        columns.append((f"ε = {one}: no", {"key": without, "always": True}))
        columns.append((f"ε = {one}: yes", {"key": f"{{dataset}} second moments eps={one}"}))
    return columns


def _whitening() -> Axis:
    cases = (("own", "1"), ("secure", "1"), ("own", "10"))
    return [
        (
            f"{NOISES[noise]}, ε = {epsilon}: {white}",
            {"noise": noise, "epsilon": epsilon, "white": white},
        )
        for noise, epsilon in cases
        for white in ("no", "yes")
    ]


TABLES = {
    "fedstats-own": Table(ROWS, axis("epsilon", BUDGETS), CELLS),
    "fedstats-secure": Table(ROWS, axis("epsilon", BUDGETS)[:4], {**CELLS, "noise": "secure"}),
    "fedstats-skew": Table(ROWS, axis("alpha", ("0.01", "0.5", "100"), "Dir({})"), CELLS),
    "fedstats-clients": Table(ROWS, axis("clients", (3, 10, 50), "{} clients"), CELLS),
    "fedstats-cost": Table(
        ROWS,
        [
            ("MB that a client sends", figure("bytes", ".2f", 1e-7, seeds=[0])),
            # the least: other runs shared the processor
            ("seconds", figure("seconds", ".0f", of=min, seeds=SEEDS)),
        ],
        CELLS,
    ),
    "fedstats-features": Table(
        axis("map", {name: f"`{name}`" for name in MAPS}),
        ROWS,
        _held_out("{dataset} features {map}"),
    ),
    "fedstats-reach": Table(
        cross(ROWS, axis("noise", NOISES, "{} noise")),
        axis("reach", ("0.45", "0.9", "1.8")),
        _held_out("{dataset} logit noise {reach} {noise}"),
        corner="`logit_noise`",
        least=1,
    ),
    "fedstats-rounds": Table(
        ROWS,
        axis("rounds", (32, 64, 128)),
        _held_out("{dataset} rounds {rounds}", 3),
        corner="rounds",
        least=1,
    ),
    "fedstats-clip": Table(
        ROWS,
        axis("clip", ("0.3", "0.5", "0.7")),
        _held_out("{dataset} step clip {clip}"),
        corner="`step_clip`",
        least=1,
    ),
    "fedstats-whitening": Table(
        cross(ROWS, axis("rounds", (16, 32), "{} rounds")),
        _whitening(),
        _held_out("{dataset} whitening {white} {noise} eps={epsilon} rounds {rounds}"),
        least=1,
    ),
    "fedstats-second": Table(ROWS, _moments(), _held_out(""), corner="second moments", least=1),
    "fedstats-few-records": Table(
        axis("epsilon", ("1", "3"), "ε = {}"),
        [("1 round", {"rounds": 1}), *axis("rounds", (4, 32), "{} rounds")],
        _held_out("digits rounds {rounds} eps={epsilon}", 5, digits=1),
    ),
    "fedstats-students": Table(
        ROWS,
        axis(
            "value",
            {
                "accuracy": "classifier",
                "student_hard": "hard labels",
                "student_stored": "stored soft labels",
                "student_taught": "classifier labels copies",
            },
        ),
        STUDENTS,
    ),
    "fedstats-students-epsilon": Table(
        ROWS, axis("epsilon", BUDGETS), {**STUDENTS, "value": "student_taught"}, least=2
    ),
    "fedstats-diagnosis": Table(
        axis("source", SOURCES),
        [one for one in ROWS if one[0] != "EMNIST letters"],
        {"file": "student_images", "key": "{dataset} {source}", "seeds": [0]},
        corner="images",
    ),
}
