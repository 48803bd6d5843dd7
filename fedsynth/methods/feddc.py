"""FedDC: each client tracks its drift from the global model (Gao et al. 2022, arXiv 2203.11751).

Each client keeps a drift variable h_k, and minimises F_k(θ) + α/2·‖θ + h_k − w‖² + ⟨c − c_k, θ⟩.
It then updates h_k ← h_k + θ_k − w. The server computes
w ← mean_{k active} θ_k + mean_{all k} h_k.

The last term of the loss is SCAFFOLD's correction, in the notation of `scaffold.py`. The paper
prints c_k as the last local update divided by −ηK. Like the public code, this file computes
SCAFFOLD's option II, c_k⁺ = c_k − c + (w − θ_k)/(K_k·η). The public code divides α and c by
n_k/mean(n). Like the paper, this file does not, because n_k is private with differential privacy.
The code also clips the gradient of each step, including the terms in θ, to length 10, which this
file does not. The sum over the h_k changes by the uploaded θ_k − w, so the server computes it from
the models.

The gradient of the quadratic term is α(θ − w) + αh_k. This is the regulariser of FedDyn, whose g_k
is −αh_k. FedDC is therefore FedDyn with the correction of SCAFFOLD.

With differential privacy, h_k and c_k are computed from released weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import ClientState
from fedsynth.methods.scaffold import (
    ControlDown,
    ControlState,
    ControlUp,
    TrainsWithControls,
    controls_of,
)
from fedsynth.methods.shared.aggregation import trainable
from fedsynth.methods.shared.local import LocalObjective, Trained
from fedsynth.models.flat import flatten_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import in_range

# The prefix of the drift's names in a client's state, next to the control variate.
DRIFT = "drift."


@dataclass(frozen=True)
class FedDC(TrainsWithControls):
    """FedDC: local training with SCAFFOLD's correction and one drift variable per client.

    The server's state holds the mean of all h_k in `buffers`. The following settings come in
    addition to those of `TrainsWithControls`.

    Args:
        alpha: α, the weight of the quadratic term. It is 0.01 on CIFAR and 0.1 on MNIST in the
            public code. With 0, nothing ties θ_k + h_k to w, and h_k would be the sum of all
            updates. The server therefore leaves h_k out, and the method is SCAFFOLD with η_g = 1.
        correction: whether the correction ⟨c − c_k, θ⟩ is used. Without it, the method is FedDyn,
            and with α = 0 FedAvg with equal weights. The clients' Δc is then not used.

    >>> from fedsynth import FedDC, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> skewed, linear = PartitionSettings("classes", classes_per_client=2), ModelSettings("linear")
    >>> def accuracy(alpha):
    ...     method = FedDC(alpha=alpha, local_epochs=2, batch=32, lr=0.1)
    ...     return simulate(RunSettings(method, rounds=3, partition=skewed, model=linear)).accuracy
    >>> accuracy(0.1) > accuracy(0.0)
    True
    """

    name = "feddc"
    summary = "local training with drift variables and the correction of SCAFFOLD"
    reference = "Gao et al. 2022, FedDC, arXiv 2203.11751"

    alpha: float = in_range(0.01, 0)
    correction: bool = True

    def task(
        self, client: int, message: ControlDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        w, network = message.parameters, context.architecture
        h = {name: state.get(DRIFT + name, w[name] * 0) for name in trainable(context)}
        corrected = super().task(client, message, state, context)
        linear = self.alpha * flatten_named(h, network)
        if self.correction:
            linear += flatten_named(controls_of(message, state, context)[1], network)

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            upload, new = corrected.make_upload(model, trained)
            drift = {
                DRIFT + n: h[n] + theta.detach() - w[n] for n, theta in model.named_parameters()
            }
            return upload, {**new, **drift}

        penalty = Pull(self.alpha, flatten_named(w, network), linear)
        return LocalObjective(penalty=penalty, make_upload=make_upload)

    def combine(
        self, state: ControlState, uploads: Mapping[int, ControlUp], context: RoundContext
    ) -> ControlState:
        averaged = super().combine(state, uploads, context)
        if self.alpha == 0:
            return averaged
        parameters, h = dict(averaged.parameters), dict[str, Tensor]()
        for name in trainable(context):
            w = state.parameters[name]
            moves = torch.stack([upload.parameters[name] - w for upload in uploads.values()])
            h[name] = state.buffers.get(name, 0) + moves.sum(dim=0) / context.clients
            parameters[name] = parameters[name] + h[name]
        return replace(averaged, parameters=parameters, buffers=h)
