"""FedStats' settings, messages and release plans.

The module also computes what follows from the settings and from public sizes: the feature map φ and
the linear model on it, the releases of a run, and the size of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.uploads import LARGEST, Array, Rule
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import feature_map, feature_names, features_for, refuse_unknown_map
from fedsynth.methods.shared.noise_shares import DistributedNoise
from fedsynth.methods.statistics.class_moments import PIXELS, Pace, pace
from fedsynth.methods.statistics.images import ImagesState, MakesImages, check_differentiable
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
from fedsynth.models.on_features import FeatureLinear
from fedsynth.models.registry import ModelSettings
from fedsynth.privacy.plans import FIRST, ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class StatisticSums(Message):
    """The upload of a client: the noisy sum of one release, as a vector."""

    sums: Tensor = released()


@dataclass(frozen=True)
class CentreSums(Message):
    """The upload of a client in the first exchange: noisy sums of features, of small pictures, and
    of products for covariances.

    The sums of small pictures and the sums of products are empty if they are not released.
    """

    sums: Tensor = released()
    pictures: Tensor = released()
    covariances: Tensor = released()


@dataclass(frozen=True)
class FedStatsState(ImagesState):
    """The server's state: the classifier, the fields of `ImagesState`, and the fields below.

    Args:
        eigenvalues: the eigenvalues [d] of the released second moments, plus the ridge. None before
            round 1, or without second moments.
        eigenvectors: the eigenvectors [d, d] of the released second moments.
        velocity: the last change of the classifier divided by the rate, [C, d]. None before the
            first step.
    """

    eigenvalues: Tensor | None = None
    eigenvectors: Tensor | None = None
    velocity: Tensor | None = None


@dataclass(frozen=True)
class PlansStatistics(DistributedNoise, MakesImages):
    """A method whose releases are noisy sums of fixed features.

    Args:
        features: name of the feature map φ, either built in (`fedsynth.features.feature_names`) or
            registered. "auto" chooses a map by the public shape of the images (`features_for`).
        centre_share: share of the budget μ² for the centre.
        whitening: whether covariances of the feature map's channels and spatial cells are released
            together with the centre, and z is whitened by them. "auto" does so with differential
            privacy for grey images of at least 12 pixels a side. For colour images, the gain does
            not exceed the cost. Without differential privacy, whitening is not needed.
        covariance_share: share of the budget for the covariances that `whitening` uses.
        moment_share: share of the budget for the second moments and z ⊗ e, if second moments are
            released. The steps divide the rest equally. Without second moments, z ⊗ e is the first
            of as many gradients as there are rounds, and all gradients have equal shares.
        second_moments: whether z zᵀ is released together with z ⊗ e. With "no", z ⊗ e uses the
            whole clipping bound, an upload is smaller by a factor of about d/2C, and all directions
            have the same step size. This is the better choice if the features are already white and
            there is noise. With "yes", the steps are Newton-like. "auto" is "yes" without
            differential privacy, and "no" with it.
        ridge: λ, the ridge of the classifier in closed form, divided by σ_A·√d, where σ_A is the
            noise of a moment. It is used with second moments.
        step_clip: c, the bound of clip(p − y). ‖p − y‖ is at most √2.
        step_size: factor of the Newton-like step. Without second moments, it is the largest step
            size, in units of 1/`curvature`.
        logit_noise: standard deviation of the noise that all steps together may add to a logit. It
            is used without second moments, and determines the step size together with the public
            noise (`fedsynth.methods.statistics.class_moments.pace`).
        momentum: share of the last change that is repeated in each step. It is used without second
            moments.
        curvature: a value that replaces all eigenvalues of the second moments if they are not
            released.
        step_floor: smallest eigenvalue by which a step divides, in units of σ_G·√d, where σ_G is
            the noise of a coordinate of the gradient. It is used with second moments.
    """

    first_downlink = ModelParameters
    first_upload = CentreSums
    upload = StatisticSums
    state = FedStatsState
    robust_refusal = (
        "the server needs the sums over all clients' examples, which a robust rule cannot replace"
    )
    same_releases_every_round = False
    model_sees_data = False
    takes_model = False
    features_refusal = "method.features names the feature map instead"

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
        """Returns the feature map φ for the images of a dataset."""
        name = self.features
        if name == AUTO:
            name = features_for(spec.image_shape)
        return feature_map(name, spec.image_shape)

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> FeatureLinear:
        """Returns a linear model on φ. The model settings of the run are ignored."""
        return FeatureLinear(self.map_of(spec), spec, whitens=self.whitens(spec))

    def whitens(self, spec: DatasetSpec) -> bool:
        """Returns whether the model has a matrix T, with which a private run whitens z.

        In a run without differential privacy, T stays the identity.

        Raises:
            SettingError: `whitening=yes` is set for features without channels and spatial cells.
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
        """Returns whether second moments are released, which depends only on public settings."""
        if self.second_moments == AUTO:
            return privacy is None
        return self.second_moments == YES

    def has_covariances(self, privacy: PrivacySettings | None, spec: DatasetSpec) -> bool:
        """Returns whether covariances are released.

        They are released in runs with differential privacy that whiten z.
        """
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
        """Returns the plans of all releases of a run.

        Raises:
            SettingError: a clipping bound or a sampling rate is set, although the method fixes
                both; or the shares leave no budget for steps.
        """
        for key in ("clip", "sample_rate"):
            if getattr(privacy, key) is not None:
                raise SettingError(
                    "privacy",
                    key,
                    f"must be left out with {self.name}, which sets the value for each release",
                )
        return self.sum_over_clients(self.releases(privacy, context).plans(), privacy, context)

    def round_plans(self, plans: tuple[ReleasePlan, ...], round: int) -> tuple[ReleasePlan, ...]:
        return tuple(plan for plan in plans if (plan.name in FIRST_ROUND) == (round == 1))

    def pace(self, context: RoundContext) -> Pace:
        """Returns the rate and the momentum of steps without second moments, which depend only on
        public numbers."""
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
            reason = f"must be left out with {self.name}, which uses a linear model on features"
            raise SettingError("model", "name", reason)
        if self.ipc > 0:
            check_differentiable(model)

    def first_request(self, state: FedStatsState, context: RoundContext) -> ModelParameters | None:
        if context.round > 1:
            return None
        return ModelParameters(state.parameters, 1.0)

    def broadcast(self, state: FedStatsState, context: RoundContext) -> ModelParameters:
        return ModelParameters(state.parameters, 1.0)
