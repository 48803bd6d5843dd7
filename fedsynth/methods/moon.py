"""MOON: each client's representation is pulled to the global model's, and away from its last one
(Li, He and Song 2021, arXiv 2103.16257).

Client: CE + μ·ℓ_con, ℓ_con = −log(exp(sim(z, z_glob)/τ)/(exp(sim(z, z_glob)/τ) + exp(sim(z,
z_prev)/τ))) with cosine similarity (Eq. 3), z the representation of the network in training, z_glob
of the global model, z_prev of the client's model of its last round (its first: the global model,
where ℓ_con is log 2, without a gradient).

The loss of an example depends only on that example and on released models, so DP-SGD clips and
charges it like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Memory
from fedsynth.methods.shared.client_training import LocalObjective, Trained
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.validation import check_embedding, in_range


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Returns ℓ_con of each example [N] (Eq. 3), from representations [N, D]."""
    to_global = F.cosine_similarity(z, z_global, dim=1) / temperature
    to_previous = F.cosine_similarity(z, z_previous, dim=1) / temperature
    return torch.logaddexp(to_global, to_previous) - to_global


@dataclass(frozen=True)
class Moon(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        mu: weight of ℓ_con: 1 in FedAF's comparison (the paper tunes it over {0.1, 1, 5, 10}). 0 is
            FedAvg, weighted by n_k.
        temperature: τ, 0.5 as in the paper. The representation is the embedding; the paper's
            networks have a projection head there: `model.projection=256` (for all methods of a
            comparison: it is a larger model, and more bytes).

    >>> from fedsynth import ModelSettings, Moon, RunSettings, simulate
    >>> method = Moon(local_epochs=2, batch=32, lr=0.1)
    >>> model = ModelSettings(width=16, depth=2, projection=32)
    >>> simulate(RunSettings(method, rounds=2, model=model)).accuracy > 0.3
    True
    """

    name: ClassVar[str] = "moon"
    summary: ClassVar[str] = (
        "local training pulls representations to the global model's and away from the "
        "client's previous ones"
    )
    reference: ClassVar[str] = "Li, He and Song 2021, MOON, arXiv 2103.16257"

    mu: float = in_range(1.0, 0)
    temperature: float = in_range(0.5, 1e-6)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)
        check_learned_embedding(self.name, model)

    def task(
        self, client: int, message: ModelParameters, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        global_model = context.load(message.parameters).requires_grad_(False).eval()
        previous = context.load(memory or message.parameters).requires_grad_(False).eval()

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = network.embed(x)  # type: ignore[operator]
            with torch.no_grad():
                z_global = global_model.embed(x)  # type: ignore[operator]
                z_previous = previous.embed(x)  # type: ignore[operator]
            logits = network.classifier(z)  # type: ignore[operator]
            cross_entropy = F.cross_entropy(logits, y, reduction="none")
            return cross_entropy + self.mu * contrastive(z, z_global, z_previous, self.temperature)

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, Memory]:
            parameters = {name: value.clone() for name, value in model.state_dict().items()}
            return ModelParameters(model.state_dict(), trained.weight), parameters

        if not self.mu:
            return LocalObjective(make_upload=make_upload)
        return LocalObjective(loss=loss, make_upload=make_upload)
