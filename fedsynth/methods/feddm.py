"""FedDM: clients send synthetic sets matched to their data around the model (arXiv 2207.09653).

Client, every round (Algorithm 1): for T iterations draw w ~ P_w(w_r), draw real batches, and move
the synthetic images down ∇ Σ_c L_c (Eq. 9). Server: train w from w_r on the union of all sets,
projected onto ‖w − w_r‖ ≤ ρ (Eqs. 3, 10, 23).

With differential privacy the images start from noise, and the matching gradient comes from a
mechanism. `residual` and `gradient` (`fedsynth.synthesizer.condensation.matchers`) are charged for
T releases a round and send all classes. `features`
(`fedsynth.synthesizer.condensation.feature_sums`) is charged for M releases and the counts, and
sends classes whose released count is large enough. `paper` is the noise of Algorithm 1 as printed,
which guarantees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import nn

from fedsynth.core.client import ClientGroup, OpenClients, Segments
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Down, Presets, PrivatePlan
from fedsynth.errors import SettingError
from fedsynth.methods.shared.condensing import Condenses
from fedsynth.methods.shared.private_condensation import Matching, feature_plans, feature_width
from fedsynth.methods.shared.union import TrainsInBall
from fedsynth.models.batch_norm import has_batch_norm
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.feature_sums import NetworkMeansMatcher
from fedsynth.synthesizer.condensation.matchers import ClippedMatcher, Matcher
from fedsynth.synthesizer.condensation.networks import (
    AUGMENTATIONS,
    READINGS,
    FeatureMaps,
    maps_around,
)
from fedsynth.validation import check_choices, check_ranges


@dataclass(frozen=True)
class FedDM(Condenses, TrainsInBall):
    """Settings, with the paper's values; those that the paper leaves open say why they are as they
    are. What is not named here is `Condenses`'s or `TrainsInBall`'s.

    Args:
        ipc: images per class: 10 on MNIST and CIFAR-10, 5 on CIFAR-100.
        min_examples: inferred from the paper's Table 3; with mechanism `features` the least
            released count.
        matching: "mean" is Eq. 9.
        image_momentum: 0, as Algorithm 1 has plain gradient steps (distribution matching's code
            uses 0.5).
        restart: False, as Algorithm 1's ClientUpdate has no initialisation.
        radius: ρ of the ball around w_r, for the perturbation and for the server's projection.
        perturbation: "sphere" (rescaling a Gaussian in 300,000 dimensions always ends on the
            sphere) or "ball" (uniform radius).
        augment: "none" (the paper mentions none) or "siamese".
        flip: whether "siamese" may mirror; off, as digits and letters are not symmetric.
        logit_weight: weight b of the logits relative to the embedding; 1 is Eq. 9.
        image_clip: clip the norm of each client's image gradient, for stability (FedAF's paper runs
            FedDM with 2, momentum 0.9 and averaged start images); 0: no clipping. Not a privacy
            mechanism.
        networks_per_round: ours, not the paper's: M networks a round, whose class means over all of
            a client's data are computed once, and T steps that go through them in turn
            (`fedsynth.synthesizer.condensation.feature_sums`); 0: the paper's new network and
            minibatch in every step. For networks without batch norm, matching "mean", and not with
            differential privacy, where mechanism `features` does the same.
        networks: M of mechanism `features`.
        count_noise: of mechanism `features`: the counts' noise multiplier over that of the M
            networks' sums together, σ/√M, so that counts take 1/(1 + count_noise²) of the budget
            μ².

    >>> from fedsynth import FedDM, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> method = FedDM(ipc=5, iterations=5, image_lr=5.0, server_epochs=50)
    >>> model, iid = ModelSettings(width=16, depth=2), PartitionSettings("iid", clients=2)
    >>> result = simulate(RunSettings(method, rounds=1, model=model, partition=iid))
    >>> list(result.uploads[0].images.shape), result.accuracy > 0.6  # five images of each class
    ([50, 1, 8, 8], True)
    """

    name: ClassVar[str] = "feddm"
    summary: ClassVar[str] = (
        "clients send synthetic sets matched to their data around the global model"
    )
    reference: ClassVar[str] = "Xiong et al. 2023, FedDM, arXiv 2207.09653"
    protects: ClassVar[tuple[str, ...]] = ("residual", "gradient", "features", "paper")
    presets: ClassVar[Presets] = {
        "digits": {"iterations": 10, "image_lr": 5.0},
        "cifar100": {"ipc": 5},  # the paper's
    }

    perturbation: str = "sphere"
    augment: str = "none"
    flip: bool = False
    logit_weight: float = 1.0
    image_clip: float = 0.0
    networks_per_round: int = 0
    networks: int = 16
    count_noise: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, logit_weight=(0, inf), image_clip=(0, inf))
        check_ranges(self, networks=(1, inf), count_noise=(0.01, inf))
        check_ranges(self, networks_per_round=(0, inf))
        if self.networks_per_round and self.matching != "mean":
            raise SettingError(
                "method",
                "networks_per_round",
                "must be 0 unless class means are matched (method.matching=mean): whole "
                "distributions need examples in every step",
            )
        check_choices(self, augment=AUGMENTATIONS, perturbation=READINGS)

    def feature_maps(
        self, model: nn.Module, segments: Segments, context: RoundContext, period: int | None
    ) -> FeatureMaps:
        return maps_around(
            model,
            segments.label,
            context,
            radius=self.radius,
            reading=self.perturbation,
            augment=self.augment,
            flip=self.flip,
            logit_weight=self.logit_weight,
            period=period,
        )

    def objective(
        self, matcher: Matcher, message: Down, segments: Segments, context: RoundContext
    ) -> Matcher:
        if not self.image_clip:
            return matcher
        return ClippedMatcher(matcher, segments.position.to(context.device), self.image_clip)

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if self.networks_per_round and has_batch_norm(model):
            raise SettingError(
                "method",
                "networks_per_round",
                "must be 0 with batch norm, which ties an image's features to the others of its "
                "pass",
            )

    def printed_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        return {
            "source": "FedDM (arXiv 2207.09653), Sec. 4.4: σ ≥ sqrt(2 log(1/δ)/ε)",
            "published": f"ε = {2 * math.log(1 / delta) / sigma**2:.3g}",
            "why it differs": (
                "the formula counts neither steps nor rounds, and its conditions (Poisson "
                "sampling, Tq² ≤ ε/2) are not met"
            ),
        }

    def client_bytes(self, context: RoundContext) -> int:
        means = self.networks_per_round * context.spec.classes * feature_width(context, logits=True)
        return super().client_bytes(context) + 4 * means

    def _matching(
        self, clients: ClientGroup, segments: Segments, context: RoundContext
    ) -> Matching:
        if self.networks_per_round and isinstance(clients, OpenClients):
            networks = min(self.networks_per_round, self.iterations)
            matcher = NetworkMeansMatcher(clients, segments, networks)
            return Matching(matcher, period=networks)
        return super()._matching(clients, segments, context)

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """Returns the plans of T releases a round; for `features`, of M and of the counts.

        M is at most the number of steps.
        """
        if self.networks_per_round:
            raise SettingError(
                "method",
                "networks_per_round",
                "must be 0 with differential privacy: it reads exact class means; its private form "
                "is privacy.mechanism=features with method.networks",
            )
        if privacy.mechanism != "features":
            return super().private_plans(privacy, context)
        self.check_private(context)
        networks = min(self.networks, self.iterations)
        return feature_plans(privacy, context, networks=networks, count_noise=self.count_noise)
