"""FedFM: local training pulls features towards shared anchors (Ye et al. 2023, arXiv 2210.07615).

The anchors are the features' class means over all clients. A round has two exchanges. In the first,
each client sends its class sums of features under w_t and its class counts. The server computes the
anchors a_c = Σ_k n_{k,c} a_{k,c} / Σ_k n_{k,c}. In the second, each client trains on CE + λ·q(f(x),
a), and the server averages the models, weighted by n_k. The loss q is contrastive guiding,
CE(softmax(⟨a_n, f⟩/α), c), or the squared distance ‖f − a_c‖²/D. In FedFM-Lite, each client
computes its sums after local training under its own model, and sends them together with the model.

With differential privacy, the features are clipped, and the sums and counts are charged in addition
to DP-SGD. An example's loss depends only on the example and on released anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.capabilities import TwoExchanges
from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public, released
from fedsynth.core.method import ClientState, ClientStates, Results
from fedsynth.core.uploads import Rule, check_tensor
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.class_sums import (
    COUNTS,
    ModelAndSums,
    feature_sums,
    feature_width,
    sums_plans,
    sums_rules,
    uploads_with_sums,
)
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.privacy.plans import FIRST, MAIN, Plans
from fedsynth.privacy.row_products import row_product
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class AnchorsDown(ModelParameters):
    """FedFM's request to the clients: the model w_t and the anchors [C, D].

    A boolean mask [C] marks the classes with an anchor."""

    anchors: Tensor = public("sent to clients, never uploaded")
    has_anchor: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class FeatureSums(Message):
    """A client's upload in FedFM's first exchange: class sums [C, D] and class counts [C]."""

    sums: Tensor = released()
    counts: Tensor = released()


# The name of the feature sums' release plan.
SUMS = "feature sums"

# The largest weight λ without a warning in a private run, whose anchors are noisy. On the digits at
# ε = 8, single runs reached 16 % with weight 50, 72 % with 0.5, and 84 % with fedavg (`fedsynth
# train --method fedfm --rounds 5 --set local_epochs=2 --set lr=0.05 --set weight=…
# --dp-epsilon 8`).
LARGEST_PRIVATE_WEIGHT = 1.0
# The factor that decides whether a class is present. Its noisy count must be at least this many
# standard deviations of the noise. A class that no client has gets an anchor with a probability of
# 3e-5 in each round, and the anchor is kept in later rounds.
COUNT_DEVIATIONS = 4


def anchor_losses(
    features_ND: Tensor,
    labels_N: Tensor,
    anchors_CD: Tensor,
    has_anchor_C: Tensor,
    *,
    temperature: float | None,
) -> Tensor:
    """Computes the anchor loss q for each example, [N].

    Features and anchors are scaled to length 1. The loss is 0 for examples whose class has no
    anchor.

    Args:
        features_ND: the features of the examples.
        labels_N: the examples' classes.
        anchors_CD: the anchors.
        has_anchor_C: a boolean mask of the classes with an anchor.
        temperature: α of contrastive guiding, whose softmax runs over the classes with anchors.
            With None, q is the squared distance divided by D.
    """
    f = F.normalize(features_ND, dim=1)
    a = F.normalize(anchors_CD, dim=1)
    usable = has_anchor_C[labels_N]
    if temperature is None:
        q = (f - a[labels_N]).square().mean(dim=1)
    else:
        logits = (row_product(f, a) / temperature).masked_fill(~has_anchor_C, -torch.inf)
        # a class without anchor would give infinity, whose gradient is not a number
        target = torch.where(usable, labels_N, has_anchor_C.to(torch.uint8).argmax())
        q = F.cross_entropy(logits, target, reduction="none")
    return torch.where(usable, q, 0.0)


@dataclass(frozen=True)
class AnchorState(AveragingState):
    """The server's state in FedFM: the anchors [C, D], and a mask [C] of classes with anchors."""

    anchors: Tensor = field(kw_only=True)
    has_anchor: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class TrainsToAnchors(TrainsLocally):
    """Base class of FedFM and FedFM-Lite, whose local training pulls features towards anchors.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        weight: λ, the weight of q. The default of 50 is the public code's. Unlike the paper's
            formulas, the code scales features and anchors to length 1 in q. With 0, the method is
            FedAvg, weighted by n_k. With differential privacy, the anchors are noisy, and a model
            with λ = 50 learns almost nothing. Try 0.5 with it.
        matching: the loss q. "contrastive" is contrastive guiding. "l2" is the squared distance,
            averaged over the D features as in the public code. With the paper's sum over the
            features, λ = 50 outweighs the cross-entropy, and the accuracy on Fashion-MNIST is 20 %
            instead of 73 %.
        temperature: α, the temperature of contrastive guiding. 0.1 is the best value in the paper.
        start_round: first round that uses q. The public code starts in round 21 of 100. The default
            is 1, because runs may be shorter. With differential privacy it must be 1, because
            anchors would be charged even if they are not used.
        anchor_clip: L2 bound on an example's features. It is used only with differential privacy.
        anchor_noise: noise multiplier of the feature sums and the class counts, divided by σ. It is
            used only with differential privacy. The default is public and was not tuned.
    """

    request = AnchorsDown
    state = AnchorState
    sums_exchange: ClassVar[str] = FIRST
    masks_refusal = "anchors are the mean features of the images of each class"
    robust_refusal = (
        "the server adds class sums. In a robust rule, clients without examples of a class would "
        "outvote the clients that have examples"
    )

    weight: float = in_range(50.0, 0)
    matching: str = one_of("contrastive", "l2")
    temperature: float = in_range(0.1, 1e-6)
    start_round: int = in_range(1, 1)
    anchor_clip: float = in_range(5.0, 1e-9)
    anchor_noise: float = in_range(5.0, 1e-3)

    def initial_state(self, parameters: Tensors) -> AnchorState:
        anchors = torch.zeros_like(parameters["classifier.weight"])
        has_anchor = anchors.new_zeros(len(anchors), dtype=torch.bool)
        return AnchorState(parameters, anchors=anchors, has_anchor=has_anchor)

    def check_model(self, model: nn.Module) -> None:
        check_learned_embedding(self.name, model)

    def check_request(self, message: ModelParameters, context: RoundContext) -> None:
        if isinstance(message, AnchorsDown):  # not the plain model of the first exchange
            shape = context.spec.classes, feature_width(context, logits=False)
            check_tensor("anchors", message.anchors, shape, torch.float32)
            check_tensor("has_anchor", message.has_anchor, shape[:1], torch.bool)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rules = super().upload_rules(exchange, client, context)
        if exchange == self.sums_exchange:
            shape = context.spec.classes, feature_width(context, logits=False)
            rules |= sums_rules(client, shape, SUMS, context)
        return rules

    def broadcast(self, state: AnchorState, context: RoundContext) -> Message:
        private = context.privacy is not None
        if context.round == 1 and private and self.weight > LARGEST_PRIVATE_WEIGHT:
            context.note(
                f"warning: method.weight={self.weight:g} may lower the accuracy, because the "
                "anchors are noisy with differential privacy. Try method.weight=0.5"
            )
        return super().broadcast(state, context)

    def later_request(self, message: AnchorsDown, context: RoundContext) -> AnchorsDown:
        anchors = message.parameters["classifier.weight"]  # one public row for each class
        return replace(message, anchors=anchors, has_anchor=torch.ones_like(message.has_anchor))

    def task(
        self, client: int, message: AnchorsDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        started = context.round >= self.start_round and bool(message.has_anchor.any())
        if not self.weight or not started:
            return LocalObjective()
        temperature = self.temperature if self.matching == "contrastive" else None

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            f = network.embed(x)  # type: ignore[operator]
            logits = network.classifier(f)  # type: ignore[operator]
            cross_entropy = F.cross_entropy(logits, y, reduction="none")
            q = anchor_losses(f, y, message.anchors, message.has_anchor, temperature=temperature)
            return cross_entropy + self.weight * q

        return LocalObjective(loss=loss)

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Plans a round's private releases: DP-SGD, feature sums and class counts."""
        if self.start_round > 1 or self.weight == 0:
            reason = (
                f"must be 1 and method.weight above 0, got {self.start_round} and {self.weight:g}. "
                "Otherwise a private run is charged for anchors that it does not use. Set "
                "method.start_round=1 and method.weight=0.5"
            )
            raise SettingError("method", "start_round", reason)
        return *super().release_plans(privacy, context), *sums_plans(
            SUMS,
            "features (anchors)",
            "features f(x) of each example",
            clip=self.anchor_clip,
            width=feature_width(context, logits=False),
            classes=context.spec.classes,
            noise=self.anchor_noise,
            exchange=self.sums_exchange,
        )

    def _with_anchors(
        self, state: AnchorState, sent: Sequence[FeatureSums | ModelAndSums], context: RoundContext
    ) -> AnchorState:
        """Computes the round's anchors, and returns the state with them.

        A class without examples in the round keeps its last anchor.
        """
        counts = torch.stack([upload.counts for upload in sent]).sum(dim=0)
        sums = torch.stack([upload.sums for upload in sent]).sum(dim=0)
        noise = context.noise.get(COUNTS, 0.0) * sqrt(len(sent))  # of the clients' sum
        floor = max(1.0, COUNT_DEVIATIONS * noise)
        has_anchor = counts >= floor
        anchors = sums / counts.clamp_min(floor)[:, None]
        anchors = torch.where(has_anchor[:, None], anchors, state.anchors)
        return replace(state, anchors=anchors, has_anchor=has_anchor | state.has_anchor)


@dataclass(frozen=True)
class FedFM(TrainsToAnchors, TwoExchanges):
    """FedFM: local training that pulls features towards shared anchors.

    The settings are documented in `TrainsToAnchors`.

    >>> from fedsynth import FedFM, ModelSettings, RunSettings, simulate
    >>> method = FedFM(weight=1.0, local_epochs=2, batch=32, lr=0.05)
    >>> result = simulate(RunSettings(method, rounds=2, model=ModelSettings(width=16, depth=2)))
    >>> result.accuracy > 0.4
    True
    """

    name = "fedfm"
    summary = "local training pulls features towards anchors, the class means over all clients"
    reference = "Ye et al. 2023, FedFM, arXiv 2210.07615"
    first_upload = FeatureSums

    def first_broadcast(self, state: AnchorState, context: RoundContext) -> Message | None:
        if context.round < self.start_round:
            return None
        return ModelParameters(state.parameters, 1.0)

    def first_step(
        self, message: ModelParameters, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        model = context.load(message.parameters).requires_grad_(False).eval()
        results: Results = []
        for client, state in zip(clients.split(), states, strict=True):
            results.append((FeatureSums(*feature_sums(model, client, SUMS, context)), state))
        return results

    def first_aggregate(
        self, state: AnchorState, replies: Mapping[int, FeatureSums], context: RoundContext
    ) -> AnchorState:
        return self._with_anchors(state, list(replies.values()), context)


@dataclass(frozen=True)
class FedFMLite(TrainsToAnchors):
    """FedFM-Lite: FedFM with a single exchange in each round.

    The settings are documented in `TrainsToAnchors`. The first round has no anchors, so q is used
    from round 2 on, or from `start_round` on if that is later.

    >>> from fedsynth import FedFMLite, ModelSettings, RunSettings, simulate
    >>> method, model = FedFMLite(local_epochs=1), ModelSettings(width=16, depth=2)
    >>> sent = simulate(RunSettings(method, rounds=1, model=model)).uploads[0]
    >>> list(sent.sums.shape), list(sent.counts.shape)  # of 64 features, for each of ten classes
    ([10, 64], [10])
    """

    name = "fedfm-lite"
    summary = "FedFM with anchors made after local training and sent with the model"
    reference = "Ye et al. 2023, FedFM, arXiv 2210.07615"
    upload = ModelAndSums
    sums_exchange = MAIN

    def task(
        self, client: int, message: AnchorsDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        make_upload = uploads_with_sums(SUMS, context)
        return replace(super().task(client, message, state, context), make_upload=make_upload)

    def combine(
        self, state: AnchorState, uploads: Mapping[int, ModelAndSums], context: RoundContext
    ) -> AnchorState:
        anchored = self._with_anchors(state, list(uploads.values()), context)
        return replace(anchored, parameters=average(uploads))
