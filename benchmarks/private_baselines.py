"""DP-FedAvg at ε = 1, δ = 1e-5: a ConvNet, and a linear model on fixed features, on MNIST and
Fashion-MNIST, 10 clients, Dir(0.5) and Dir(0.01).

    FEDSYNTH_DATA=DIR python benchmarks/private_baselines.py [--quick] [--tune]
        [--only "mnist linear"] [--datasets mnist] [--seeds 0] [--time-budget 3600]

The linear model is on whitened scattering coefficients, each image's made once (`--cache`), so that
seconds are those of all else. Its rounds, sampling rate, clip and learning rate are the best of a
grid (`library/baselines.py`) on 5,000 Fashion-MNIST training images held out of the run, with a
seed that the table does not use; they then serve both data sets and both partitions, and the choice
is not accounted for (the data are public). `--tune` runs the grid and nothing else. The ConvNet has
the clip and the rate that `dp_utility.py` found in the same way; its rows at Dir(0.5) are that
script's. Rows of the linear model at ε = 10 have the settings that were chosen at ε = 1.

Resumes: finished runs are lines of results/private_baselines.jsonl; `--only` shares the work among
processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from fedsynth.config.settings import RunSettings
from fedsynth.core.feature_cache import keep_features
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.features import feature_map
from library.baselines import (
    ALPHAS,
    FEATURES,
    TUNE_ON,
    Candidate,
    candidates,
    linear_settings,
    network_settings,
)
from library.fashion import TUNING_SEED
from library.kept_features import add_cache, vectors
from library.private import CLIPS, RATES
from library.results import Results, best_key, start, table_parser
from library.rows import by_key

HELD_OUT = 5000
FEW_SEEDS = (0, 1, 2)
LARGE_EPSILON = 10.0


def with_features(dataset: str, cache: Path) -> tuple[ImageData, ImageData]:
    """The data set with the features of all its images."""
    train, test = load_dataset(dataset)
    features = feature_map(FEATURES, train.spec.image_shape)
    keep_features(train, features, vectors(cache, "train", train, features))
    keep_features(test, features, vectors(cache, "test", test, features))
    return train, test


@lru_cache(maxsize=1)
def held_out(cache: Path) -> tuple[ImageData, ImageData]:
    """(the rest, 5,000 training images) of the data set that settings are chosen on, with
    features."""
    train, _ = load_dataset(TUNE_ON)
    features = feature_map(FEATURES, train.spec.image_shape)
    found = vectors(cache, "train", train, features)
    order = np.random.default_rng(0).permutation(len(train))
    parts = []
    for where in (np.sort(order[HELD_OUT:]), np.sort(order[:HELD_OUT])):
        part = train.subset(where)
        keep_features(part, features, found[where])
        parts.append(part)
    return parts[0], parts[1]


def tuned(results: Results, options: argparse.Namespace) -> Candidate | None:
    """Returns the best candidate of the grid; None if the grid is not complete."""
    rows = {}
    for one in candidates():
        settings = linear_settings(TUNE_ON, one, 0.5, TUNING_SEED, options.device, options.quick)
        if options.tune:
            rows[one] = results.get(f"tune {one.name}", settings, partial(held_out, options.cache))
        else:
            rows[one] = results.find(f"tune {one.name}", settings)
    best: Candidate | None = best_key(rows)
    return best


def best_of_the_network() -> tuple[float, float]:
    """Clip and rate of the best tuning run of `dp_utility.py`."""
    rows = by_key("dp_utility")
    tried = [(clip, rate) for clip in CLIPS for rate in RATES]
    return max(
        tried,
        key=lambda one: rows[f"fashion-mnist tune dp-sgd clip={one[0]} rate={one[1]}"]["accuracy"],
    )


def runs(
    dataset: str, best: Candidate, seed: int, options: argparse.Namespace
) -> Iterator[tuple[str, RunSettings]]:
    """Those of one seed, by the names of their rows."""
    how = (seed, options.device, options.quick)
    for alpha in ALPHAS:
        yield f"{dataset} linear alpha={alpha:g}", linear_settings(dataset, best, alpha, *how)
    if seed in FEW_SEEDS:
        settings = linear_settings(dataset, best, ALPHAS[0], *how, LARGE_EPSILON)
        yield f"{dataset} linear eps={LARGE_EPSILON:g} alpha={ALPHAS[0]:g}", settings
        settings = network_settings(dataset, best_of_the_network(), ALPHAS[1], *how)
        yield f"{dataset} convnet alpha={ALPHAS[1]:g}", settings


def main() -> None:
    parser = table_parser(__doc__, "two rounds: a test", range(5))
    choices = ["fashion-mnist", "mnist"]
    parser.add_argument("--datasets", nargs="+", default=choices, choices=choices)
    parser.add_argument("--tune", action="store_true", help="run only the grid")
    add_cache(parser)
    options, results = start("private_baselines", parser)
    best = tuned(results, options)
    if options.tune or best is None:
        print(f"best of the grid: {best.name if best else 'incomplete, run --tune'}")
        return
    for dataset in options.datasets:
        data = with_features(dataset, options.cache)
        for seed in options.seeds:
            for name, settings in runs(dataset, best, seed, options):
                results.get(f"{name} seed={seed}", settings, data)
    results.show()


if __name__ == "__main__":
    main()
