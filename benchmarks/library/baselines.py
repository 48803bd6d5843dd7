"""Settings of the table of private baselines, and what its tuning tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fedsynth import (
    FedAvg,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
)
from library.private import settings_for as convnet_settings

FEATURES = "whitened-scattering"
EPSILON = 1.0
ALPHAS = (0.5, 0.01)
TUNE_ON = "fashion-mnist"


class Candidate(NamedTuple):
    """How DP-FedAvg trains a linear model on features: a pass over the data a round."""

    rate: float
    """Of Poisson sampling, q: 1 is one step a round on all records, without momentum; below, 1/q steps
    with momentum 0.9."""
    rounds: int
    clip: float
    lr: float

    @property
    def name(self) -> str:
        """As in the rows."""
        return f"q={self.rate:g} rounds={self.rounds} clip={self.clip:g} lr={self.lr:g}"


def candidates() -> Iterator[Candidate]:
    """The grid: rounds by learning rate for each q, and what is clipped half and double as far."""
    for rate, rates in ((1.0, (64.0, 128.0, 256.0)), (0.1, (4.0, 8.0, 16.0))):
        for rounds in (32, 64, 128):
            for lr in rates:
                yield Candidate(rate, rounds, 0.5, lr)
        for clip in (0.25, 1.0):
            yield Candidate(rate, 64, clip, rates[1])
            yield Candidate(rate, 64, clip, rates[1] * 0.5 / clip)


def linear_settings(
    dataset: str, one: Candidate, alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    """A run of DP-FedAvg with a linear model on features."""
    steps = round(1 / one.rate)
    return RunSettings(
        FedAvg(local_steps=steps, lr=one.lr, momentum=0.0 if steps == 1 else 0.9),
        dataset=dataset,
        rounds=2 if quick else one.rounds,
        seed=seed,
        device=device,
        evaluate_every=one.rounds,
        partition=PartitionSettings("dirichlet-plain", clients=10, alpha=alpha),
        model=ModelSettings(features=FEATURES),
        privacy=PrivacySettings(epsilon=EPSILON, clip=one.clip, sample_rate=one.rate),
    )


def network_settings(
    dataset: str, best: tuple[float, float], alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    """A run of DP-FedAvg with the ConvNet of `dp_utility.py`, at the clip and the rate that were best
    there."""
    clip, rate = best
    settings = convnet_settings(
        dataset, "dp-sgd", seed, device, {"epsilon": EPSILON}, clip, rate, quick
    )
    return replace(settings, partition=replace(settings.partition, alpha=alpha))
