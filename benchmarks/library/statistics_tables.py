"""The tables of docs/fedstats.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter

from library.rows import by_key, percents, spread, table

SEEDS = (0, 1, 2, 3, 4)
DATASETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "emnist-letters": "EMNIST letters",
    "cifar10": "CIFAR-10",
}
NOISES = {"own": "own", "secure": "aggregated"}


def _cell(dataset: str, epsilon: str, noise: str, alpha: str, clients: int) -> str:
    name = f"{dataset} eps={epsilon} {noise} alpha={alpha} K={clients}"
    return spread(percents(by_key("fedstats_table"), name, SEEDS), len(SEEDS))


def _teacher(noise: str) -> str:
    """Accuracy by data set and ε, Dir(0.5), ten clients."""
    epsilons = ("0.5", "1", "3", "10", "inf") if noise == "own" else ("0.5", "1", "3", "10")
    body = [
        [label, *(_cell(dataset, epsilon, noise, "0.5", 10) for epsilon in epsilons)]
        for dataset, label in DATASETS.items()
    ]
    head = ["", *(f"ε = {one}" if one != "inf" else "no privacy" for one in epsilons)]
    return table(head, body)


def _skew() -> str:
    """Accuracy at ε = 1 with own noise by Dir(α), ten clients."""
    body = [
        [label, *(_cell(dataset, "1", "own", alpha, 10) for alpha in ("0.01", "0.5", "100"))]
        for dataset, label in DATASETS.items()
    ]
    return table(["", "Dir(0.01)", "Dir(0.5)", "Dir(100)"], body)


def _clients() -> str:
    """Accuracy at ε = 1 with own noise by the number of clients, Dir(0.5)."""
    body = [
        [label, *(_cell(dataset, "1", "own", "0.5", clients) for clients in (3, 10, 50))]
        for dataset, label in DATASETS.items()
    ]
    return table(["", "3 clients", "10 clients", "50 clients"], body)


def _students() -> str:
    """Classifier and students at ε = 1 with own noise, Dir(0.5), ten clients, ten images a class."""
    rows = by_key("fedstats_students")
    body = []
    for dataset, label in DATASETS.items():
        name = f"{dataset} eps=1 own alpha=0.5 K=10"
        cells = []
        for key in ("accuracy", "student_hard", "student_soft"):
            values = percents(rows, name, SEEDS, itemgetter(key))
            cells.append(spread(values, len(SEEDS)))
        body.append([label, *cells])
    head = ["", "classifier on features", "ConvNet, hard labels", "ConvNet, soft labels"]
    return table(head, body)


TABLES: dict[str, Callable[[], str]] = {
    "fedstats-own": partial(_teacher, "own"),
    "fedstats-secure": partial(_teacher, "secure"),
    "fedstats-skew": _skew,
    "fedstats-clients": _clients,
    "fedstats-students": _students,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
