"""q-FFL, solved by q-FedAvg: clients with larger losses have more weight (Li et al. 2020, arXiv
1905.10497, Algorithm 2).

Each client computes its loss F_k at w_t, trains w_k locally, and computes Δw_k = L(w_t − w_k) with
L = 1/η. The server computes w_{t+1} = w_t − Σ_k F_k^q·Δw_k / Σ_k h_k with h_k = q·F_k^{q−1}·‖Δw_k‖²
+ L·F_k^q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, unprotected
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Number, Rule
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.validation import in_range

TINY = 1e-10  # the public code's guard of F_k


@dataclass(frozen=True)
class FairModel(ModelParameters):
    """A client's upload in q-FFL: the trained model w_k, and F_k(w_t), the loss before training."""

    loss: float = unprotected()


@dataclass(frozen=True)
class QFFL(TrainsLocally):
    """q-FFL: federated averaging in which clients with larger losses have more weight.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        q: exponent of the losses, which is 1e-4 in FedKF's comparison. With 0, the method is FedAvg
            with equal weights.
        momentum: momentum of local SGD. The default is 0, because the server treats the client's
            update as a gradient.

    >>> from fedsynth import QFFL, ModelSettings, RunSettings, simulate
    >>> method = QFFL(q=0.1, local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.6
    True
    >>> min(upload.loss for upload in result.uploads.values()) > 0  # they decide clients' weights
    True
    """

    name = "qffl"
    summary = "clients with larger losses have more weight, so that accuracies become even"
    reference = "Li et al. 2020, q-FFL, arXiv 1905.10497"
    upload = FairModel
    dp_mechanisms = ()
    masks_refusal = "the clients measure cross-entropies"
    refusal = "each client uploads its exact loss, which no mechanism protects"
    adam_refusal = "the server divides updates by the learning rate, which gives gradients for SGD"
    robust_refusal = "the server weights clients by their reported losses, and a malicious client can report any loss"

    momentum: float = 0.0
    lr: float = in_range(0.01, 1e-12)
    q: float = in_range(1e-4, 0)

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            w_t = context.load(message.parameters).eval()
            loss = mean_loss(w_t, trained.client)
            return FairModel(model.state_dict(), trained.weight, loss), {}

        return LocalObjective(make_upload=make_upload)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        return {**super().upload_rules(exchange, client, context), "loss": Number()}

    def combine(
        self, state: AveragingState, uploads: Mapping[int, FairModel], context: RoundContext
    ) -> AveragingState:
        lipschitz = 1 / self.lr
        # dividing by the largest loss cancels out, and avoids overflow
        largest = max(upload.loss for upload in uploads.values()) + TINY
        names = trainable(context)
        step = {name: torch.zeros_like(state.parameters[name]).double() for name in names}
        h = 0.0
        for upload in uploads.values():
            loss = upload.loss + TINY
            power = (loss / largest) ** self.q
            squares: list[Tensor] = []
            for name in names:
                delta = lipschitz * (state.parameters[name] - upload.parameters[name]).double()
                step[name] += power * delta
                squares.append(delta.square().sum())
            h += power * (self.q / loss * float(sum(squares)) + lipschitz)
        parameters = average(uploads, uniform=True)
        for name in names:
            w_t = state.parameters[name]
            parameters[name] = (w_t.double() - step[name] / h).to(w_t.dtype)
        return replace(state, parameters=parameters)


def mean_loss(model: nn.Module, client: ExactClientView) -> float:
    """Computes a model's mean cross-entropy on one client's examples, or 0 without examples."""
    examples = client.examples(0)
    total = 0.0
    with torch.no_grad():
        for indices in examples.split(chunk(examples.device)):
            logits, labels = model(client.images(indices)), client.labels(indices)
            total += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return total / max(1, len(examples))
