"""FedAvg and its variants FedAvgM, FedProx and SOLO.

FedAvgM adds momentum on the server, and FedProx a term in the clients' loss. In SOLO, each client
trains only on its own data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedsynth.core.capabilities import PersonalModels
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.method import ClientState
from fedsynth.methods.shared.aggregation import AveragingState, average, momentum_step
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import in_range


@dataclass(frozen=True)
class FedAvg(TrainsLocally):
    """FedAvg: clients train the global model, and the server averages the results (McMahan et al.
    2017).

    Without differential privacy, the average is weighted by n_k, each client's number of examples.
    With differential privacy, each client trains by DP-SGD (`fedsynth.privacy.dpsgd`) for
    ceil(local_epochs / q) steps in a round, where q is the sampling rate. The number of steps does
    not depend on the private n_k. All clients then have equal weight.

    `TrainsLocally` documents the settings. FedDM's comparison tunes lr in {0.001, 0.01, 0.1} and
    the number of local epochs in {10, 15, 20} (Sec. 4.1). It uses NIID-Bench's momentum of 0.9.
    With `final="oca"`, the method is FedAvg (OCA) in FedKF's Table XII.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> method = FedAvg(local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.8
    True
    """

    name = "fedavg"
    summary = "clients train the global model locally, and the server averages"
    reference = "McMahan et al. 2017, arXiv 1602.05629"


@dataclass(frozen=True)
class FedAvgM(TrainsLocally):
    """FedAvgM: FedAvg with momentum on the server (Hsu, Qi and Brown 2019).

    The server computes Δ = w_t − Σ_k n_k/n w_k, v ← β·v + Δ and w_{t+1} = w_t − η_s·v, without
    Nesterov's look-ahead. The server's state holds the velocity v in `buffers`. The following
    settings come in addition to those of `TrainsLocally`.

    Args:
        server_momentum: β, the server's momentum. It is 0.9 in the paper's comparison.
        server_lr: η_s, the server's learning rate. With β = 0 and η_s = 1, the method is FedAvg,
            weighted by n_k.

    >>> from fedsynth import FedAvgM, ModelSettings, RunSettings, simulate
    >>> def accuracy(momentum):
    ...     method = FedAvgM(server_momentum=momentum, local_steps=1)
    ...     return simulate(RunSettings(method, rounds=5, model=ModelSettings("linear"))).accuracy
    >>> accuracy(0.9) > accuracy(0.0)  # where clients move little, momentum carries the server on
    True
    """

    name = "fedavgm"
    summary = "FedAvg with momentum on the server"
    reference = "Hsu, Qi and Brown 2019, arXiv 1909.06335"

    server_momentum: float = in_range(0.9, 0, 1)
    server_lr: float = in_range(1.0, 0)

    def combine(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        return momentum_step(
            state, average(uploads), context, lr=self.server_lr, momentum=self.server_momentum
        )


@dataclass(frozen=True)
class FedProx(TrainsLocally):
    """FedProx: FedAvg with a loss that keeps local training near the global model (Li et al. 2020).

    Each client minimises F_k(w) + μ/2·‖w − w_t‖² (Eq. 2). The server averages the models, weighted
    by n_k. The average includes stragglers' models, unless `drop_stragglers` is set.

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

    mu: float = in_range(0.01, 0)

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        center = flatten_named(message.parameters, context.architecture)
        return LocalObjective(penalty=Pull(self.mu, center, torch.zeros_like(center)))


@dataclass(frozen=True)
class Nothing(Message):
    """A client's empty upload in SOLO."""


@dataclass(frozen=True)
class Solo(TrainsLocally, PersonalModels):
    """SOLO: every client trains only on its own data, without federation.

    Clients send nothing to the server and continue with their own models in each round. The run's
    model remains the initial one. A run's result is the accuracy of each client's model on the
    client's own test split (`--local-test`).

    The settings are documented in `TrainsLocally`.

    >>> from fedsynth import ModelSettings, PartitionSettings, RunSettings, Solo, simulate
    >>> split = PartitionSettings(local_test=0.2)
    >>> method, model = Solo(local_epochs=5, batch=32), ModelSettings("linear")
    >>> last = simulate(RunSettings(method, rounds=1, partition=split, model=model)).metrics[-1]
    >>> last["upload_bytes"], last["local"]["amp"] > 0.7  # accuracy of own models, on average
    (0, True)
    """

    name = "solo"
    summary = "no federation: each client trains only on its data"
    reference = "the comparison papers' SOLO"
    upload = Nothing
    dp_mechanisms = ()
    refusal = "the clients send nothing, and the accuracies are computed from private data"
    robust_refusal = "the clients send no models that the server could average"
    oca_refusal = "it has no global model"

    def start_model(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> nn.Module:
        return context.load(state or message.parameters)

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            return Nothing(), copy.deepcopy(model.state_dict())

        return LocalObjective(make_upload=make_upload)

    def server_step(
        self, state: ServerState, uploads: Mapping[int, Nothing], context: RoundContext
    ) -> ServerState:
        return state

    def personal_parameters(self, parameters: Tensors, state: ClientState) -> Tensors:
        return state or parameters
