"""MOON: local training pulls each client's representations towards those of the global model (Li,
He and Song 2021, arXiv 2103.16257).

Each client minimises CE + μ·ℓ_con, where sim is the cosine similarity (Eq. 3) in ℓ_con =
−log(exp(sim(z, z_glob)/τ)/(exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ))). The trained network
represents an example as z, the global model as z_glob. z_prev comes from the client's own model
after its last participation. In a client's first round, z_prev comes from the global model, and
ℓ_con is log 2 without a gradient. The loss pulls z towards z_glob and pushes it away from z_prev.

An example's loss depends only on the example and on released models, so DP-SGD clips and charges it
like the cross-entropy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.validation import in_range


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Computes the contrastive loss ℓ_con of each example [N], from representations [N, D]."""
    to_global = F.cosine_similarity(z, z_global, dim=1) / temperature
    to_previous = F.cosine_similarity(z, z_previous, dim=1) / temperature
    return torch.logaddexp(to_global, to_previous) - to_global


@dataclass(frozen=True)
class Moon(TrainsLocally):
    """MOON: local training that pulls each client's representations towards the global model's.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        mu: weight of ℓ_con. It is 1 in FedAF's comparison, and the paper tunes it over {0.1, 1, 5,
            10}. With 0, the method is FedAvg, weighted by n_k.
        temperature: τ, the contrastive loss's temperature, 0.5 as in the paper. An example's
            representation is the embedding before the classifier. The paper's networks have a
            projection head there, which `model.projection=256` adds. All methods in a comparison
            should then use it, because it makes the model and the uploads larger.

    >>> from fedsynth import ModelSettings, Moon, RunSettings, simulate
    >>> method = Moon(local_epochs=2, batch=32, lr=0.1)
    >>> model = ModelSettings(width=16, depth=2, projection=32)
    >>> simulate(RunSettings(method, rounds=2, model=model)).accuracy > 0.3
    True
    """

    name = "moon"
    summary = "local training pulls representations from the previous to the global model"
    masks_refusal = "the contrastive loss compares one representation of each image"
    reference = "Li, He and Song 2021, MOON, arXiv 2103.16257"

    mu: float = in_range(1.0, 0)
    temperature: float = in_range(0.5, 1e-6)

    def check_model(self, model: nn.Module) -> None:
        check_learned_embedding(self.name, model)

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        global_model = context.load(message.parameters).requires_grad_(False).eval()
        previous = context.load(state or message.parameters).requires_grad_(False).eval()

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = network.embed(x)  # type: ignore[operator]
            with torch.no_grad():
                z_global = global_model.embed(x)  # type: ignore[operator]
                z_previous = previous.embed(x)  # type: ignore[operator]
            logits = network.classifier(z)  # type: ignore[operator]
            cross_entropy = F.cross_entropy(logits, y, reduction="none")
            return cross_entropy + self.mu * contrastive(z, z_global, z_previous, self.temperature)

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            parameters = model.state_dict()
            return ModelParameters(parameters, trained.weight), copy.deepcopy(parameters)

        return LocalObjective(loss=loss, make_upload=make_upload)
