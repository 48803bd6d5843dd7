"""Feature maps, and private baselines on them: docs/features.md."""

from __future__ import annotations

import statistics
from itertools import product

from library.pages import markdown, pivot, sentence, table
from library.rows import STATISTICS_SEEDS, Row, by_seed, case, lines, spread, spread_of

DATASETS = {"MNIST": "mnist", "Fashion-MNIST": "fashion-mnist"}
PLACES = list(product(DATASETS, ("0.5", "0.01")))


@table("encoder-constants")
def _constants() -> str:
    maps = {
        "divided by the norm": "unit",
        "centred on public images, divided by the norm": "centred",
    }
    ways = product({"FedStats": "fedstats", "DP-FedAvg": "fedavg"}.items(), DATASETS.items())
    columns = {f"{title}, {place}": f"{key} {way}" for (title, way), (place, key) in ways}

    def cell(constants: str, key: str) -> str:
        return spread_of("encoder_constants", f"{key} {constants}", range(3), digits=1)

    return pivot("vectors", maps, columns, cell)


@sentence(
    "docs/features.md",
    "{:.1f} % with `scattering`, {:.1f} % with `random-process` and {:.1f} % with both",
)
def _random_process() -> list[float]:
    return sorted(100 * float(row["accuracy"]) for row in lines("random_process_prior"))


@table("large-data")
def _large_data() -> str:
    files = ("npy", "parquet", "png", "npy, scattering")
    columns = {
        "anonymous memory, MB": ("anonymous_peak_mib", 2**20 / 1e6),
        "reading, CPU seconds": ("read_seconds", 1),
        "encoding": ("encode_seconds", 1),
    }

    def cell(name: str, column: tuple[str, float]) -> str:
        key, unit = column
        return f"{case('large_data', name)[key] * unit:,.0f}"

    return pivot("files", {name: name for name in files}, columns, cell)


@table("private-baselines")
def _private_baselines() -> str:
    ways = {
        "DP-FedAvg, ConvNet": ("convnet", 3),
        "FPL, ConvNet": ("fpl", 3),
        "CCVR, ConvNet": ("ccvr", 3),
        "DP-FedAvg, linear on features": ("linear", 5),
        "FedStats": ("fedstats", 5),
    }
    body = []
    for title, (way, seeds) in ways.items():
        runs = [_runs(way, DATASETS[dataset], alpha) for dataset, alpha in PLACES]
        rows = [row for place in runs for row in place]
        accuracies = [[100 * row["accuracy"] for row in place] for place in runs]
        sent = max(row.get("bytes", 0) for row in rows) / 1e6
        seconds = statistics.median(row["seconds"] for row in rows)
        texts = [spread(values, seeds, 1) for values in accuracies]
        body.append([title, *texts, f"{sent:.1f}", f"{seconds:.0f}"])
    places = [f"{dataset}, Dir({alpha})" for dataset, alpha in PLACES]
    return markdown(["", *places, "uploads, MB", "seconds"], body)


def _runs(way: str, dataset: str, alpha: str) -> list[Row]:
    if way == "fedstats":
        key = f"{dataset} eps=1 own alpha={alpha} K=10"
        return list(by_seed("fedstats_table", key, STATISTICS_SEEDS).values())
    if (way, alpha) == ("convnet", "0.5"):
        return list(by_seed("dp_utility", f"{dataset} dp-sgd, ε = 1", range(3)).values())
    return list(by_seed("private_baselines", f"{dataset} {way} alpha={alpha}", range(5)).values())
