"""FedStats' settings, messages and declarations, and values that follow from these and public sizes:
the map φ and the linear model on it, the releases of a run, and the size of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.uploads import LARGEST, Array, Rule
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import feature_map, feature_names, features_for, refuse_unknown_map
from fedsynth.methods.shared.noise_shares import DistributedNoise
from fedsynth.methods.statistics.class_moments import Pace, pace
from fedsynth.methods.statistics.images import ImagesState, MakesImages, check_differentiable
from fedsynth.methods.statistics.pixel_moments import PIXELS
from fedsynth.methods.statistics.releases import (
    CENTRE,
    FIRST_ROUND,
    MOMENTS,
    STEP,
    Releases,
    Shares,
    public_facts,
)
from fedsynth.methods.statistics.whitening import AUTO, COVARIANCES, NO, YES, whitens
from fedsynth.models.feature_linear import FeatureLinear
from fedsynth.models.registry import ModelSettings
from fedsynth.privacy.plans import FIRST, ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class StatisticSums(Message):
    """A client's noisy sum of one release, a vector."""

    sums: Tensor = released()


@dataclass(frozen=True)
class CentreSums(Message):
    """A client's noisy sums of the first exchange: of features, of small pictures and of products
    for covariances. The latter two are empty if they are not released."""

    sums: Tensor = released()
    pictures: Tensor = released()
    covariances: Tensor = released()


@dataclass(frozen=True)
class FedStatsState(ImagesState):
    """The server's state: the classifier, the fields of `ImagesState`, and

    Args:
        eigenvalues: of the released second moments, plus the ridge, [d]; None before round 1.
        eigenvectors: [d, d].
        velocity: the last move over its rate, [C, d]; None before the first.
    """

    eigenvalues: Tensor | None = None
    eigenvectors: Tensor | None = None
    velocity: Tensor | None = None


@dataclass(frozen=True)
class PlansStatistics(DistributedNoise, MakesImages):
    """A method whose releases are noisy sums of fixed features.

    Args:
        features: the map φ, see `fedsynth.features.feature_names`, or one that was registered.
            "auto": by the images' public shape (`features_for`).
        centre_share: of the budget μ² for the centre.
        whitening: whether covariances of the features' channels and cells are released with the
            centre, and z is whitened by them. "auto": with privacy, for grey images of 12 pixels a
            side and more; in colour it costs what it brings. Without privacy there is no need.
        covariance_share: of the budget for them.
        moment_share: with second moments, for them and z ⊗ e; steps share the rest. Without, z ⊗ e
            is the first of as many gradients as rounds, with equal shares.
        second_moments: whether z zᵀ is released with z ⊗ e. "no": the clip has all of z ⊗ e, an
            upload is smaller by about d/2C, and steps have one rate for all directions: right where
            features are white already and there is noise. "yes": steps are Newton's. "auto": yes
            without privacy, and no with it.
        ridge: λ over σ_A·√d, with σ_A the noise of a moment.
        step_clip: c of clip(p − y); ‖p − y‖ is at most √2.
        step_size: of the Newton-like step; without second moments, of the longest step over
            1/`curvature`.
        logit_noise: without second moments, how far steps go: until the noise of all of them is of
            this deviation in a logit. Their rate follows from it and the public noise
            (`fedsynth.methods.statistics.class_moments.pace`).
        momentum: without second moments, the part of the last move that is made again with each
            step.
        curvature: without second moments, one value in place of all their eigenvalues.
        step_floor: with second moments, the least eigenvalue that a step divides by, over σ_G·√d,
            with σ_G the noise of a gradient's coordinate.
    """

    first_downlink: ClassVar[type[Message] | None] = ModelParameters
    first_upload: ClassVar[type[Message] | None] = CentreSums
    upload: ClassVar[type[Message]] = StatisticSums
    state: ClassVar[type[ServerState]] = FedStatsState
    robust_refusal: ClassVar[str] = (
        "its server needs the sums over all clients' examples, which a robust rule cannot replace"
    )
    same_releases_every_round: ClassVar[bool] = False
    model_sees_data: ClassVar[bool] = False
    takes_model: ClassVar[bool] = False
    features_refusal: ClassVar[str] = "its feature map is method.features"

    features: str = AUTO
    centre_share: float = in_range(0.04, 1e-4, 0.9)
    whitening: str = one_of(AUTO, YES, NO)
    covariance_share: float = in_range(0.05, 1e-4, 0.9)
    moment_share: float = in_range(0.1, 1e-4, 0.999)
    second_moments: str = one_of(AUTO, YES, NO)
    ridge: float = in_range(0.25, 0)
    step_clip: float = in_range(0.5, 1e-3, 1.5)
    step_size: float = in_range(1.5, 0)
    logit_noise: float = in_range(0.9, 1e-3)
    momentum: float = in_range(0.5, 0, 0.999)
    step_floor: float = in_range(0.1, 0)
    curvature: float = in_range(0.00375, 1e-9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features not in (AUTO, *feature_names()):
            refuse_unknown_map(self.features, "method", AUTO)
        pictures = self.images_each > 0 and self.pictures != NO
        self._shares(pictures, self.whitening == YES)

    def map_of(self, spec: DatasetSpec) -> FeatureMap:
        """Returns φ for a data set's images."""
        name = self.features
        if name == AUTO:
            name = features_for(spec.image_shape)
        return feature_map(name, spec.image_shape)

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> FeatureLinear:
        """Returns a linear model on φ; the run's model settings are ignored."""
        return FeatureLinear(self.map_of(spec), spec, whitens=self.whitens(spec))

    def whitens(self, spec: DatasetSpec) -> bool:
        """Returns whether the model has a T, with which private runs whiten z. In an open run T
        stays the identity.

        Raises:
            SettingError: `whitening=yes` for features without channels and cells.
        """
        return whitens(self.whitening, self.map_of(spec), spec.image_shape)

    def _shares(self, pictures: bool, covariances: bool) -> Shares:
        return Shares(
            self.centre_share,
            pictures * self.pixel_share,
            covariances * self.covariance_share,
            self.moment_share,
        )

    def has_second(self, privacy: PrivacySettings | None) -> bool:
        """Returns whether second moments are released, from public settings only."""
        if self.second_moments == AUTO:
            return privacy is None
        return self.second_moments == YES

    def has_covariances(self, privacy: PrivacySettings | None, spec: DatasetSpec) -> bool:
        """Returns whether covariances are released: in a private run that whitens z."""
        return privacy is not None and self.whitens(spec)

    def releases(self, privacy: PrivacySettings | None, context: RoundContext) -> Releases:
        """Returns all releases of a run with these settings.

        Raises:
            SettingError: the shares leave no budget for steps.
        """
        spec = context.spec
        covariances = self.has_covariances(privacy, spec)
        return Releases(
            self.map_of(spec),
            spec.image_shape,
            spec.classes,
            context.rounds,
            self.has_second(privacy),
            self._shares(self.releases_pictures(spec), covariances),
            self.step_clip,
        )

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        return public_facts(
            self.map_of(spec),
            spec.image_shape,
            pictures=self.releases_pictures(spec),
            whitening=self.whitens(spec),
        )

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the plans of `Releases.plans`.

        Raises:
            SettingError: a clip or a sampling rate is set, which the method's theorem fixes; or the
                shares leave no budget for steps.
        """
        for key in ("clip", "sample_rate"):
            if getattr(privacy, key) is not None:
                raise SettingError(
                    "privacy",
                    key,
                    f"must be left out with {self.name}, which sets it for each release",
                )
        return self.sum_over_clients(self.releases(privacy, context).plans(), privacy, context)

    def round_plans(self, plans: tuple[ReleasePlan, ...], round: int) -> tuple[ReleasePlan, ...]:
        return tuple(plan for plan in plans if (plan.name in FIRST_ROUND) == (round == 1))

    def pace(self, context: RoundContext) -> Pace:
        """Returns rate and momentum of steps without second moments, from public numbers only."""
        records = context.nominal_size * context.clients
        noise_std = self.pooled_deviation(MOMENTS, context.clients, context)
        return pace(
            noise_std * self.step_clip / records / math.sqrt(context.rounds),
            context.rounds,
            self.logit_noise,
            self.step_size / self.curvature,
            self.momentum,
        )

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        widths = self.releases(context.privacy, context).widths()
        bound = LARGEST * max(1.0, *context.noise.values(), 1.0)
        rules: dict[str, Rule] = {}
        for field, plan in self.sum_releases(phase, context).items():
            dtype = self.sum_dtype(plan, context)
            rules[field] = Array((widths[plan],), dtype, low=-bound, high=bound)
        return rules

    def sum_releases(self, phase: str, context: RoundContext) -> Mapping[str, str]:
        if context.round > 1:
            return {"sums": STEP}
        if phase == FIRST:
            return {"sums": CENTRE, "pictures": PIXELS, "covariances": COVARIANCES}
        return {"sums": MOMENTS}

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, FeatureLinear):
            raise SettingError("model", "name", f"must be a linear model on features: {self.name}")
        if self.ipc > 0:
            check_differentiable(model)

    def first_request(self, state: FedStatsState, context: RoundContext) -> ModelParameters | None:
        if context.round > 1:
            return None
        return ModelParameters(state.parameters, 1.0)

    def broadcast(self, state: FedStatsState, context: RoundContext) -> ModelParameters:
        return ModelParameters(state.parameters, 1.0)
