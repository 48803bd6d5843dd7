"""Settings of the table of private baselines, and what its tuning tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fedsynth import FedAvg, ModelSettings, PartitionSettings, PrivacySettings, RunSettings
from library.private import settings_for as convnet_settings

FEATURES = "whitened-scattering"
EPSILON = 1.0
ALPHAS = (0.5, 0.01)
TUNE_ON = "fashion-mnist"


class Candidate(NamedTuple):
    """How DP-FedAvg trains a linear model on features: a pass over the data a round."""

    rate: float
    """Of Poisson sampling, q: 1 is one step a round on all records, without momentum; below, 1/q
    steps with momentum 0.9."""
    rounds: int
    clip: float
    lr: float

    @property
    def name(self) -> str:
        """As in the rows."""
        return f"q={self.rate:g} rounds={self.rounds} clip={self.clip:g} lr={self.lr:g}"


def candidates() -> Iterator[Candidate]:
    """The grid: rounds by learning rate, and what is clipped at half and at twice the norm, with
    steps of the same rate and of the same length; for small batches, which cost as much, fewer."""
    for lr in (64.0, 128.0, 256.0):
        for rounds in (32, 64, 128):
            yield Candidate(1.0, rounds, 0.5, lr)
    for clip, lr in ((0.25, 128.0), (0.25, 256.0), (1.0, 64.0), (1.0, 128.0)):
        yield Candidate(1.0, 64, clip, lr)
    for lr in (4.0, 8.0, 16.0):
        for rounds in (32, 64):
            yield Candidate(0.1, rounds, 0.5, lr)


def linear_settings(
    dataset: str,
    one: Candidate,
    alpha: float,
    seed: int,
    device: str,
    quick: bool,
    epsilon: float = EPSILON,
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
        privacy=PrivacySettings(epsilon=epsilon, clip=one.clip, sample_rate=one.rate),
    )


def network_settings(
    dataset: str, best: tuple[float, float], alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    """A run of DP-FedAvg with the ConvNet of `dp_utility.py`, at the clip and the rate that were
    best there."""
    clip, rate = best
    settings = convnet_settings(
        dataset, "dp-sgd", seed, device, {"epsilon": EPSILON}, clip, rate, quick
    )
    return replace(settings, partition=replace(settings.partition, alpha=alpha))
