"""The runs of FedStats' tables: a cell's name and settings, and accuracy on kept features."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from fedsynth import FedStats, PartitionSettings, PrivacySettings, RunSettings
from fedsynth.data.registry import DatasetSpec
from fedsynth.models.feature_linear import Embedding

ROUNDS = 32
DELTA = 1e-5
DELTAS = {"emnist-letters": 5e-6}
"""Below one over the number of records."""


class Case(NamedTuple):
    """One cell of the table."""

    dataset: str
    epsilon: str
    noise: str
    alpha: float
    clients: int

    @property
    def name(self) -> str:
        """As in the rows."""
        return (
            f"{self.dataset} eps={self.epsilon} {self.noise} alpha={self.alpha:g} K={self.clients}"
        )


def settings_for(case: Case, seed: int, device: str, quick: bool) -> RunSettings:
    private = None
    if case.epsilon != "inf":
        delta = DELTAS.get(case.dataset, DELTA)
        private = PrivacySettings(epsilon=float(case.epsilon), delta=delta)
    return RunSettings(
        FedStats(aggregation=case.noise),
        dataset=case.dataset,
        rounds=2 if quick else ROUNDS,
        seed=seed,
        device=device,
        partition=PartitionSettings("dirichlet-plain", clients=case.clients, alpha=case.alpha),
        privacy=private,
    )


def classifier_accuracy(
    model: nn.Module, method: FedStats, spec: DatasetSpec, features_Nd: Tensor, labels_N: Tensor
) -> float:
    """Of a run's classifier on kept features of some images."""
    parameters = {name: value.cpu() for name, value in model.state_dict().items()}
    z = Embedding.of(parameters, method.map_of(spec))(features_Nd)
    guessed = (z @ parameters["classifier.weight"].T).argmax(dim=1)
    return float((guessed == labels_N).float().mean())
