"""The tables of docs/fedstats.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter

from library.rows import NOTHING, STATISTICS_SEEDS, by_key, percents, spread, table

SEEDS = (0, 1, 2, 3, 4)
DATASETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "emnist-letters": "EMNIST letters",
    "cifar10": "CIFAR-10",
}
SOURCES = {
    "real": "the training images themselves (an upper bound, not private)",
    "small": "these as 14×14 pictures (CIFAR-10: 8×8), enlarged and sharpened as drawn ones are "
    "(not private)",
    "random": "random processes",
    "drawn": "drawn from small pictures (step 1)",
    "moved": "moved towards class means as well (steps 1 to 3)",
}
REACHES = ("0.45", "0.9", "1.8")
CLIPS = ("0.3", "0.5", "0.7")
ROUNDS = (32, 64, 128)
NOISES = {"own": "own", "secure": "aggregated"}
SCATTERING, PAIR, MIRRORED = (
    "whitened-scattering",
    "whitened-scattering+random-process",
    "mirrored-scattering+random-process",
)


def _cell(dataset: str, epsilon: str, noise: str, alpha: str, clients: int) -> str:
    name = f"{dataset} eps={epsilon} {noise} alpha={alpha} K={clients}"
    return spread(percents(by_key("fedstats_table"), name, STATISTICS_SEEDS), len(SEEDS))


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


def _cost() -> str:
    """What a client sends, and seconds of a run but for features, at ε = 1 with own noise."""
    rows = by_key("fedstats_table")
    body = []
    for dataset, label in DATASETS.items():
        name = f"{dataset} eps=1 own alpha=0.5 K=10"
        there = [rows[f"{name} seed={n}"] for n in SEEDS if f"{name} seed={n}" in rows]
        if not there:
            body.append([label, NOTHING, NOTHING])
            continue
        sent = there[0]["bytes"] / 10 / 1e6
        seconds = min(row["seconds"] for row in there)  # others ran beside other work
        body.append([label, f"{sent:.2f}", f"{seconds:.0f}"])
    return table(["", "MB that a client sends", "seconds"], body)


def _features() -> str:
    """Held-out accuracy at ε = 1 with own noise by feature map."""
    rows = by_key("fedstats_settings")
    body = []
    for name in (SCATTERING, PAIR, MIRRORED):
        values = [percents(rows, f"{one} features {name}", (0,)) for one in DATASETS]
        body.append([f"`{name}`", *(spread(one, 1) for one in values)])
    return table(["", *DATASETS.values()], body)


def _reach() -> str:
    """Held-out accuracy at ε = 1 by how far steps go."""
    rows = by_key("fedstats_settings")
    body = []
    for dataset, label in DATASETS.items():
        for noise, word in NOISES.items():
            values = [
                percents(rows, f"{dataset} logit noise {far} {noise}", (0,)) for far in REACHES
            ]
            if any(values):
                body.append([f"{label}, {word} noise", *(spread(one, 1) for one in values)])
    return table(["`logit_noise`", *REACHES], body)


def _clip() -> str:
    """Held-out accuracy at ε = 1 with own noise by the clip of steps."""
    rows = by_key("fedstats_settings")
    body = []
    for dataset, label in DATASETS.items():
        values = [percents(rows, f"{dataset} step clip {clip}", (0,)) for clip in CLIPS]
        if any(values):
            body.append([label, *(spread(one, 1) for one in values)])
    return table(["`step_clip`", *CLIPS], body)


def _rounds() -> str:
    """Held-out accuracy at ε = 1 with own noise by the number of rounds, three seeds."""
    rows = by_key("fedstats_settings")
    body = []
    for dataset, label in DATASETS.items():
        values = [percents(rows, f"{dataset} rounds {rounds}", (0, 1, 2)) for rounds in ROUNDS]
        if any(values):
            body.append([label, *(spread(one, 3) for one in values)])
    return table(["rounds", *map(str, ROUNDS)], body)


def _second() -> str:
    """Held-out accuracy with released second moments and without, 32 rounds, own noise."""
    rows = by_key("fedstats_settings")
    body = []
    for dataset, label in DATASETS.items():
        cells = [
            percents(rows, f"{dataset} {name}", (0,))
            for epsilon in ("1", "10")
            for name in (
                f"whitening yes own eps={epsilon} rounds 32",
                f"second moments eps={epsilon}",
            )
        ]
        if cells[1] or cells[3]:
            body.append([label, *(spread(one, 1) for one in cells)])
    heads = [f"ε = {epsilon}: {end}" for epsilon in ("1", "10") for end in ("no", "yes")]
    return table(["second moments", *heads], body)


def _whitening() -> str:
    """Held-out accuracy with released covariances and without, by rounds, noise and ε."""
    rows = by_key("fedstats_settings")
    cases = [("own", "1"), ("secure", "1"), ("own", "10")]
    body = []
    for dataset, label in DATASETS.items():
        for rounds in (16, 32):
            cells = [
                percents(
                    rows, f"{dataset} whitening {white} {noise} eps={epsilon} rounds {rounds}", (0,)
                )
                for noise, epsilon in cases
                for white in ("no", "yes")
            ]
            if any(cells):
                body.append([f"{label}, {rounds} rounds", *(spread(one, 1) for one in cells)])
    heads = [f"{NOISES[noise]}, ε = {epsilon}" for noise, epsilon in cases]
    return table(["", *(f"{head}{end}" for head in heads for end in (": no", ": yes"))], body)


def _few_records() -> str:
    """Held-out accuracy on the embedded digits by the number of rounds."""
    rows = by_key("fedstats_settings")
    body = []
    for epsilon in ("1", "3"):
        values = [
            percents(rows, f"digits rounds {rounds} eps={epsilon}", SEEDS) for rounds in (1, 4, 32)
        ]
        body.append([f"ε = {epsilon}", *(spread(one, len(SEEDS), 1) for one in values)])
    return table(["", "1 round", "4 rounds", "32 rounds"], body)


def _students() -> str:
    """Classifier and students at ε = 1 with own noise, Dir(0.5), ten clients, 2,000 images a
    class."""
    rows = by_key("fedstats_students")
    body = []
    for dataset, label in DATASETS.items():
        name = f"{dataset} eps=1 own alpha=0.5 K=10"
        cells = []
        for key in ("accuracy", "student_hard", "student_stored", "student_taught"):
            values = percents(rows, name, SEEDS, itemgetter(key))
            cells.append(spread(values, len(SEEDS)))
        body.append([label, *cells])
    head = ["", "classifier", "hard labels", "stored soft labels", "classifier labels copies"]
    return table(head, body)


def _students_by_epsilon() -> str:
    """The student that the classifier teaches, by ε, own noise, Dir(0.5), ten clients."""
    rows = by_key("fedstats_students")
    body = []
    for dataset, label in DATASETS.items():
        cells = []
        for epsilon in ("0.5", "1", "3", "10", "inf"):
            name = f"{dataset} eps={epsilon} own alpha=0.5 K=10"
            values = percents(rows, name, SEEDS, itemgetter("student_taught"))
            cells.append(spread(values, len(SEEDS)))
        if sum(cell != NOTHING for cell in cells) > 1:
            body.append([label, *cells])
    return table(["", "ε = 0.5", "ε = 1", "ε = 3", "ε = 10", "no privacy"], body)


def _diagnosis() -> str:
    """Students by the source of their images, on held-out training images."""
    rows = by_key("student_images")
    body = []
    for source, label in SOURCES.items():
        cells = []
        for dataset in ("mnist", "fashion-mnist", "cifar10"):
            values = percents(rows, f"{dataset} {source}", (0,))
            cells.append(spread(values, 1))
        body.append([label, *cells])
    return table(["images", "MNIST", "Fashion-MNIST", "CIFAR-10"], body)


TABLES: dict[str, Callable[[], str]] = {
    "fedstats-own": partial(_teacher, "own"),
    "fedstats-secure": partial(_teacher, "secure"),
    "fedstats-skew": _skew,
    "fedstats-clients": _clients,
    "fedstats-cost": _cost,
    "fedstats-features": _features,
    "fedstats-reach": _reach,
    "fedstats-rounds": _rounds,
    "fedstats-clip": _clip,
    "fedstats-whitening": _whitening,
    "fedstats-second": _second,
    "fedstats-few-records": _few_records,
    "fedstats-students": _students,
    "fedstats-students-epsilon": _students_by_epsilon,
    "fedstats-diagnosis": _diagnosis,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
