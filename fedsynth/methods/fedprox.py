"""FedProx: a proximal term keeps local training near the global model, and partial work is used (Li
et al. 2020, arXiv 1812.06127).

Each client minimises F_k(w) + μ/2·‖w − w_t‖² (Eq. 2). The server averages the models, weighted by
n_k. The models of clients that did not finish all epochs are included in the average, unless
`drop_stragglers` is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import Memory
from fedsynth.methods.shared.client_training import LocalObjective
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import in_range


@dataclass(frozen=True)
class FedProx(TrainsLocally):
    """FedAvg with a proximal term.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        mu: μ, the weight of the proximal term. The papers that compare with FedProx use 0.001
            (FedAF, and FedKF on EMNIST and CIFAR-10) or the best of {0.01, 0.1, 1} (FedDM). With 0,
            the method is FedAvg.

    >>> from fedsynth import FedProx, ModelSettings, RunSettings, simulate
    >>> method = FedProx(mu=0.1, local_epochs=3, batch=32, lr=0.1, stragglers=0.9)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> len(result.metrics[0]["stragglers"]), result.accuracy > 0.8  # of ten clients
    (9, True)
    """

    name = "fedprox"
    summary = "FedAvg with a proximal term and the partial work of stragglers"
    reference = "Li et al. 2020, FedProx, arXiv 1812.06127"
    one_pass = True

    mu: float = in_range(0.01, 0)

    def task(
        self, client: int, message: ModelParameters, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        if not self.mu:
            return LocalObjective()
        center = flatten_named(message.parameters, context.architecture)
        return LocalObjective(penalty=Pull(self.mu, center, torch.zeros_like(center)))
