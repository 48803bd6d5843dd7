"""docs/fedstats.md and docs/fedsum.md."""

from __future__ import annotations

import statistics
from functools import partial

from library.pages import markdown, pivot, sentence, table
from library.rows import STATISTICS_SEEDS, by_seed, lines, percents, spread, spread_of

SEEDS = range(5)
DATASETS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion-mnist",
    "EMNIST letters": "emnist-letters",
    "CIFAR-10": "cifar10",
}
KEY = "{} eps={} own alpha=0.5 K=10"


@table("fedstats-own")
def _own() -> str:
    columns = {f"ε = {epsilon}": epsilon for epsilon in ("0.5", "1", "3", "10")}
    columns["no privacy"] = "inf"

    def cell(dataset: str, epsilon: str) -> str:
        key = KEY.format(dataset, epsilon)
        return spread(percents("fedstats_table", key, STATISTICS_SEEDS), len(SEEDS))

    return pivot("", DATASETS, columns, cell)


@table("number-of-clients")
def _number_of_clients() -> str:
    columns = {f"{clients} clients": f"K={clients}" for clients in (3, 10, 50)}

    def cell(noise: str, clients: str) -> str:
        key = f"fashion-mnist eps=1 {noise} alpha=0.5 {clients}"
        return spread_of("fedstats_table", key, SEEDS, digits=1)

    return pivot("", {"each client adds the full noise": "own"}, columns, cell)


@sentence(
    "docs/fedstats.md",
    "accuracy is {:.2f} % instead of {:.2f} % on MNIST, and {:.2f} % instead of {:.2f} % on "
    "Fashion-MNIST",
)
def _shortening() -> list[float]:
    """The means with the default share and with none."""
    keys = [f"{name} share={share}" for name in ("mnist", "fashion-mnist") for share in (0.05, 0)]
    return [statistics.mean(percents("shortening", key, SEEDS)) for key in keys]


@sentence(
    "docs/fedstats.md",
    "A client sends {:.1f} to {:.1f} MB in a run. A run takes at least {:.0f} to {:.0f} seconds "
    "for ten clients on one core, without features",
)
def _cost() -> list[float]:
    """The least and the most at ε = 1."""
    sent = []
    seconds = []
    for dataset in DATASETS.values():
        runs = by_seed("fedstats_table", KEY.format(dataset, 1), SEEDS)
        sent.append(runs[0]["bytes"] / 10 / 1e6)
        seconds.append(min(run["seconds"] for run in runs.values()))  # other work shared the CPU
    return [min(sent), max(sent), min(seconds), max(seconds)]


@table("fedsum-digits")
def _digits() -> str:
    rows = {
        "FedDM, Dir(0.05)": "feddm, Dir(0.05)",
        "FedDM, Dir(100)": "feddm, Dir(100)",
        "FedSum, Dir(0.05)": "fedsum, Dir(0.05)",
        "FedSum, Dir(100)": "fedsum, Dir(100)",
        "FedSum, ipc 50, Dir(0.05)": "fedsum with 50 images, Dir(0.05)",
    }
    body = []
    for title, name in rows.items():
        cell = partial(spread_of, "fedsum_table", f"digits: {name}", range(3), digits=1)
        runs = by_seed("fedsum_table", f"digits: {name}", range(3)).values()
        seconds = statistics.mean(run["cpu_seconds"][-1] for run in runs)
        sent = statistics.mean(run["bytes"] for run in runs) / 1e6
        accuracy = [cell(value=f"curve.{number}") for number in range(3)]
        body.append([title, *accuracy, f"{seconds:.1f}", f"{sent:.2f}"])
    return markdown(["method", "round 1", "round 2", "round 3", "CPU seconds", "MB up"], body)


@table("fedsum-private")
def _private() -> str:
    feddm = spread_of("dp_utility", "fashion-mnist features, ε = 1", range(3), digits=1)
    key = "private: fedsum, ε = 1, own noise seed=0 "  # these runs differ by their noise
    rows = [row for row in lines("fedsum_table") if row["key"].startswith(key)]
    fedsum = spread([100 * row["accuracy"] for row in rows], 0, 1)
    return markdown(["ε", "FedDM, `features`", "FedSum, own noise"], [["1", feddm, fedsum]])
