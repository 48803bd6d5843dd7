"""FedDyn: a dynamic regulariser aligns the local optima with the global one (Acar et al. 2021,
arXiv 2111.04263, Algorithm 1).

Each client minimises F_k(w) − ⟨g_k, w⟩ + α/2·‖w − w_t‖², and then updates g_k ← g_k − α(w_k − w_t).
The server computes h ← h − α/K·Σ_{k active}(w_k − w_t) and w_{t+1} = mean_{k active} w_k − h/α.

With differential privacy, g_k is computed from released weights and stays on the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import in_range


@dataclass(frozen=True)
class FedDyn(TrainsLocally):
    """FedDyn: local training with a regulariser that aligns the clients' optima with the global
    one.

    The server's state holds the accumulated drift h in `buffers`. The following settings come in
    addition to those of `TrainsLocally`.

    Args:
        alpha: α, the weight of the quadratic term. It is 0.01 in FedAF's comparison. With 0, the
            method is FedAvg with equal weights.

    >>> from fedsynth import FedDyn, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> skewed, linear = PartitionSettings("classes", classes_per_client=2), ModelSettings("linear")
    >>> def accuracy(alpha):
    ...     method = FedDyn(alpha=alpha, local_epochs=2, batch=32)
    ...     return simulate(RunSettings(method, rounds=3, partition=skewed, model=linear)).accuracy
    >>> accuracy(0.1) > accuracy(0.0)
    True
    """

    name = "feddyn"
    summary = "local training with a dynamic regulariser that aligns local and global optima"
    reference = "Acar et al. 2021, FedDyn, arXiv 2111.04263"

    alpha: float = in_range(0.01, 0)

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        w_t, network = message.parameters, context.architecture
        g = {name: state.get(name, w_t[name] * 0) for name in trainable(context)}
        penalty = Pull(self.alpha, flatten_named(w_t, network), -flatten_named(g, network))

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            for name, w_k in model.named_parameters():
                g[name] = g[name] - self.alpha * (w_k.detach() - w_t[name])
            return ModelParameters(model.state_dict(), trained.weight), g

        return LocalObjective(penalty=penalty, make_upload=make_upload)

    def combine(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        parameters = average(uploads, uniform=True)
        if self.alpha == 0:
            return replace(state, parameters=parameters)
        h: dict[str, Tensor] = {}
        for name in trainable(context):
            w_t = state.parameters[name]
            drift = torch.zeros_like(w_t)
            for upload in uploads.values():
                drift += upload.parameters[name] - w_t
            h[name] = state.buffers.get(name, 0) - self.alpha / context.clients * drift
            parameters[name] -= h[name] / self.alpha
        return replace(state, parameters=parameters, buffers=h)
