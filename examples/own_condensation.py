"""A custom condensing method, with its own upload and private charge: FedDM with prototypes.

A condensing method inherits `CondensingMethod` (its settings) or, as here, a method, and writes the
steps that differ:

- `client_step`: here FedDM's, with class means in addition. With privacy further statistics come
  from charged sums of one vector per example, as by `class_means`. The vector must be a function of
  its example (and of releases) only, or else the clip bounds nothing;
- the message, each of whose fields declares its status under differential privacy;
- `release_plans`: one row per release, the images' first. The engine charges for them before any
  data are read, and hands them out by name: nothing else can be released;
- `server_step`: the training on all clients' images.

Here a client uploads the class means of its embeddings under the global model. While the server
trains, a loss pulls embeddings of synthetic images towards those of the real ones (prototypes as in
FedProto, Tan et al. 2022, arXiv 2105.00243). Inside the package this would be a file in
fedsynth/methods and a line in its registry: from fedsynth.methods.protodm import ProtoDM as ProtoDM
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsynth import (
    FedDM,
    Message,
    ModelParameters,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    simulate,
)
from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import released
from fedsynth.core.method import Memory, ReleasePlan, Results
from fedsynth.methods.shared.class_sums import class_means, sums_plans
from fedsynth.methods.shared.private_condensation import feature_width
from fedsynth.privacy.plans import MAIN
from fedsynth.synthesizer.condensation.knowledge import average_over_holders
from fedsynth.synthesizer.condensation.sets import SyntheticSet, train_on_union
from fedsynth.training.sgd import Objective


@dataclass(frozen=True)
class SetWithPrototypes(SyntheticSet):
    """The upload: images and labels, the class means of embeddings [C, D], and a mask of the
    existing ones [C]."""

    prototypes: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class ProtoDM(FedDM):
    """FedDM whose server also trains towards prototypes. Settings: those of `FedDM`, and

    Args:
        alignment: weight of mean ‖h(x) − p_y‖²/D relative to the server's cross-entropy.
        prototype_clip: with differential privacy, the L2 bound of an example's embedding.
        prototype_noise: the noise multiplier of the embeddings' sums and of the counts, relative to
            the images'.
    """

    name: ClassVar[str] = "protodm"
    summary: ClassVar[str] = "FedDM whose server also trains towards the clients' prototypes"
    upload: ClassVar[type[Message]] = SetWithPrototypes
    dp_mechanisms: ClassVar[tuple[str, ...]] = ("residual", "gradient")

    alignment: float = 0.2
    prototype_clip: float = 5.0
    prototype_noise: float = 1.0

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        images = super().release_plans(privacy, context)
        return *images, *sums_plans(
            "prototypes",
            "embeddings",
            "embedding h(x) of each example",
            clip=self.prototype_clip,
            width=feature_width(context, logits=False),
            classes=context.spec.classes,
            noise=self.prototype_noise,
            phase=MAIN,
        )

    def client_step(
        self,
        message: ModelParameters,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        model: Any = context.load(message.parameters).requires_grad_(False).eval()
        width = feature_width(context, logits=False)
        means = class_means(clients, model.embed, width, "prototypes", context, self.min_examples)
        condensed = super().client_step(message, clients, memories, context)
        return [
            (SetWithPrototypes(sent.images, sent.labels, *prototypes), memory)
            for (sent, memory), prototypes in zip(condensed, means, strict=True)
            if isinstance(sent, SyntheticSet)
        ]

    def server_step(
        self, state: ServerState, uploads: Mapping[int, Any], context: RoundContext
    ) -> ServerState:
        model = context.load(state.parameters)
        train_on_union(model, uploads, self.union_sgd(), context, self.loss(uploads))
        return replace(state, parameters=model.state_dict())

    def loss(self, uploads: Mapping[int, SetWithPrototypes]) -> Objective:
        """Returns the server's loss: the cross-entropy and the pull towards the prototypes."""
        present = [u.present for u in uploads.values()]
        targets, has_target = average_over_holders(
            [u.prototypes for u in uploads.values()], present
        )

        def of_batch(network: Any, images: Tensor, labels: Tensor) -> Tensor:
            h = network.embed(images)
            distance = (h - targets[labels]).square().mean(dim=1)
            pull = torch.where(has_target[labels], distance, 0.0).mean()
            return cross_entropy(network.classifier(h), labels) + self.alignment * pull

        return of_batch


def main(privacy: PrivacySettings | None) -> Any:
    """Returns the result of two rounds on the digits."""
    method = ProtoDM(iterations=10, image_lr=5.0, server_epochs=60)
    model = ModelSettings(width=32, depth=2)
    return simulate(RunSettings(method, rounds=2, model=model, privacy=privacy))


if __name__ == "__main__":
    for privacy in (None, PrivacySettings(epsilon=8.0)):
        result = main(privacy)
        print(f"test accuracy {100 * result.accuracy:.1f} %")
        if privacy is None:
            continue
        for row in result.privacy["ledger"]:
            print(f"  {row['quantity']}: {row['steps']} a round, clip {row['sensitivity']:.3g}")
