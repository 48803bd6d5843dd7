"""Implements a custom condensing method with its own upload and its own private release.

The method is FedDM with prototypes. A client also uploads the class means of its embeddings under
the global model. While the server trains, a loss pulls the embeddings of synthetic images towards
those of the real images (prototypes as in FedProto, Tan et al. 2022, arXiv 2105.00243).

A condensing method inherits from `CondensingMethod` or from another method, and overrides:

- `client_step`: here FedDM's step, followed by the class means. With privacy, these must be charged
  noisy sums of one vector per example, which depends on that example and on releases only.
- the message: each field declares its privacy status.
- `release_plans`: one plan for each release. The engine charges them before any data are read.
- `server_step`: the training on the images of all clients.
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
from fedsynth.methods.kit import (
    MAIN,
    ClientState,
    Group,
    Loss,
    ReleasePlan,
    Results,
    RoundContext,
    ServerState,
    SyntheticSet,
    average_over_holders,
    class_means,
    feature_width,
    released,
    sums_plans,
    train_on_union,
)


@dataclass(frozen=True)
class SetWithPrototypes(SyntheticSet):
    """The upload of a client: images and labels, the class means of embeddings [C, D], and a mask
    [C] of the classes that have a mean.
    """

    prototypes: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class ProtoDM(FedDM):
    """FedDM whose server also pulls embeddings towards prototypes.

    The following settings come in addition to those of `FedDM`.

    Args:
        alignment: weight of mean ‖h(x) − p_y‖²/D relative to the server's cross-entropy.
        prototype_clip: L2 bound on the embedding of an example. It is used only with differential
            privacy.
        prototype_noise: noise multiplier of the sums of embeddings and of the counts, divided by
            that of the images. It is used only with differential privacy.
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
            exchange=MAIN,
        )

    def client_step(
        self,
        message: ModelParameters,
        clients: Group,
        states: Sequence[ClientState],
        context: RoundContext,
    ) -> Results:
        model: Any = context.load(message.parameters).requires_grad_(False).eval()
        width = feature_width(context, logits=False)
        means = class_means(clients, model.embed, width, "prototypes", context, self.min_examples)
        condensed = super().client_step(message, clients, states, context)
        return [
            (SetWithPrototypes(sent.images, sent.labels, *prototypes), state)
            for (sent, state), prototypes in zip(condensed, means, strict=True)
            if isinstance(sent, SyntheticSet)
        ]

    def server_step(
        self, state: ServerState, uploads: Mapping[int, Any], context: RoundContext
    ) -> ServerState:
        model = context.load(state.parameters)
        train_on_union(model, uploads, self.union_sgd(), context, self.loss(uploads))
        return replace(state, parameters=model.state_dict())

    def loss(self, uploads: Mapping[int, SetWithPrototypes]) -> Loss:
        """Returns cross-entropy plus the distance of embeddings to the prototypes."""
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
