"""FedStats' settings compared on held-out training images, ε = 1, ten clients, own noise.

    FEDSYNTH_DATA=DIR python benchmarks/fedstats_settings.py [--quick] [--datasets cifar10]
        [--seeds 0] [--only "logit noise"] [--time-budget 600]

A run (defaults but for one setting, Dir(0.5), 32 rounds, δ = 1e-5) sees all training images but the
last 10,000, and is measured on these; no test image is read. Compared are feature maps, whitening
by released covariances (with 16 rounds too, with aggregated noise, and at ε = 10), second moments,
how far steps go (`logit_noise`), their clip, and further rounds. Of the embedded digits, which
stand for few records (300 are held out), it is the number of rounds.

Resumes: finished rows are lines of results/fedstats_settings.jsonl.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsynth import FedStats, RunSettings
from fedsynth.core.feature_cache import keep_features
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.federation.simulation import simulate
from library.fedstats import ROUNDS, Case, classifier_accuracy, settings_for
from library.kept_features import add_cache, vectors
from library.results import start, table_parser

DATASETS = ("digits", "fashion-mnist", "mnist", "cifar10", "emnist-letters")
HELD_OUT, FEW = 10_000, 300
SCATTERING = "whitened-scattering"
PAIR = "whitened-scattering+random-process"
MIRRORED = "mirrored-scattering+random-process"
REACHES = (0.45, 0.9, 1.8)
CLIPS = (0.3, 0.5, 0.7)
MORE_ROUNDS = (32, 64, 128)


class Variant(NamedTuple):
    """What is compared."""

    method: FedStats
    epsilon: str = "1"
    rounds: int = ROUNDS


def variants(dataset: str) -> dict[str, Variant]:
    """By name, the most telling first."""
    if dataset == "digits":
        return {
            f"rounds {rounds} eps={epsilon}": Variant(FedStats(), epsilon, rounds)
            for epsilon in ("1", "3")
            for rounds in (1, 4, ROUNDS)
        }
    maps = (SCATTERING, PAIR, MIRRORED) if dataset == "cifar10" else (SCATTERING, PAIR)
    found = {f"features {name}": Variant(FedStats(features=name)) for name in maps}
    for noise, epsilon in (("own", "1"), ("secure", "1"), ("own", "10")):
        for rounds in (16, 32):
            for white in ("no", "yes"):
                method = FedStats(aggregation=noise, whitening=white)
                name = f"whitening {white} {noise} eps={epsilon} rounds {rounds}"
                found[name] = Variant(method, epsilon, rounds)
    for noise in ("own", "secure"):
        for far in REACHES:
            method = FedStats(aggregation=noise, logit_noise=far)
            found[f"logit noise {far:g} {noise}"] = Variant(method)
    for epsilon in ("1", "10"):
        method = FedStats(second_moments="yes")
        found[f"second moments eps={epsilon}"] = Variant(method, epsilon)
    for rounds in MORE_ROUNDS:
        found[f"rounds {rounds}"] = Variant(FedStats(), rounds=rounds)
    for clip in CLIPS:
        found[f"step clip {clip:g}"] = Variant(FedStats(step_clip=clip))
    return found


def held_out_run(
    settings: RunSettings,
    data: tuple[ImageData, ImageData],
    vectors_Nd: Tensor,
    method: FedStats,
) -> dict[str, Any]:
    """A run, and its classifier's accuracy on `data[1]`, whose features are `vectors_Nd`."""
    train, held_out = data
    result = simulate(settings, data=(train, None), quiet=True)
    accuracy = classifier_accuracy(result.model, method, train.spec, vectors_Nd, held_out.labels)
    return {
        "accuracy": accuracy,
        "bytes": result.summary["upload_bytes"],
        "seconds": round(sum(row["seconds"] for row in result.metrics), 3),
    }


def main() -> None:
    parser = table_parser(__doc__, "two rounds: a test", (0,))
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    add_cache(parser)
    options, results = start("fedstats_settings", parser)
    for dataset in options.datasets:
        whole, _ = load_dataset(dataset)
        count = len(whole) - (FEW if dataset == "digits" else HELD_OUT)
        seen = whole.subset(torch.arange(count))
        held_out = whole.subset(torch.arange(count, len(whole)))
        made: dict[str, Tensor] = {}
        for variant, (method, epsilon, rounds) in variants(dataset).items():
            if not any(options.only in f"{dataset} {variant} seed={n}" for n in options.seeds):
                continue
            features = method.map_of(whole.spec)
            if features.name not in made:
                made = {features.name: vectors(options.cache, "train", whole, features)}
                keep_features(seen, features, made[features.name][:count])
            for seed in options.seeds:
                case = Case(dataset, epsilon, method.aggregation, 0.5, 10)
                base = settings_for(case, seed, options.device, options.quick)
                run = partial(held_out_run, vectors_Nd=made[features.name][count:], method=method)
                asked = 2 if options.quick else rounds
                settings = replace(base, method=method, rounds=asked)
                results.get(f"{dataset} {variant} seed={seed}", settings, (seen, held_out), run)


if __name__ == "__main__":
    main()
