"""The tables of docs/fedstats.md."""

from __future__ import annotations

from library.pivot import Fields, Table, axis
from library.rows import STATISTICS_SEEDS, by_seed, number

SEEDS = range(5)
DATASETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "emnist-letters": "EMNIST letters",
    "cifar10": "CIFAR-10",
}
ROWS = axis("dataset", DATASETS)
BUDGETS = {
    **{epsilon: f"ε = {epsilon}" for epsilon in ("0.5", "1", "3", "10")},
    "inf": "no privacy",
}
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
TABLES = {
    "fedstats-own": Table(ROWS, axis("epsilon", BUDGETS), CELLS),
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
        {**CELLS, "file": "fedstats_students", "seeds": SEEDS},
    ),
}


def _cost() -> list[str]:
    """The least and the most that a client sends, and that a run takes, at ε = 1."""
    sent = []
    seconds = []
    for dataset in DATASETS:
        runs = by_seed("fedstats_table", f"{dataset} eps=1 own alpha=0.5 K=10", SEEDS)
        sent.append(runs[0]["bytes"] / 10 / 1e6)
        seconds.append(min(run["seconds"] for run in runs.values()))  # other work shared the CPU
    return [
        *(number(size, ".1f") for size in (min(sent), max(sent))),
        *(number(time, ".0f") for time in (min(seconds), max(seconds))),
    ]


SENTENCES = [
    (
        "docs/fedstats.md",
        "A client sends {} to {} MB in a run. A run takes {} to {} seconds for all ten clients on "
        "one core, without computing features",
        _cost,
    ),
]
