"""FedStats' settings, messages and release plans.

The module also computes what follows from the settings and from public sizes: the feature map φ and
the linear model on it, the releases of a run, and the size of the steps.

Shares of the budget refer to μ². A release with the share s has the run's noise multiplier divided
by √s. All releases together then cost as much as a single Gaussian release with the run's σ.
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
from fedsynth.features import registry
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.random_process import MIN_SIDE
from fedsynth.features.scattering import low_pass
from fedsynth.methods.shared.noise_shares import DistributedNoise
from fedsynth.methods.statistics.class_moments import PIXELS, pixel_width, step_rate
from fedsynth.methods.statistics.images import ImagesState, MakesImages, check_differentiable
from fedsynth.methods.statistics.whitening import AUTO, COVARIANCES, NO, YES, white_signal
from fedsynth.models.on_features import FeatureLinear
from fedsynth.models.registry import ModelSettings
from fedsynth.privacy.plans import FIRST, MAIN, Plans, ReleasePlan
from fedsynth.privacy.products import grams_width
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range, one_of

# The names of the release plans of the centre, of the moments and of the gradient steps. The plans
# of optional statistics have the names `PIXELS` and `COVARIANCES`.
CENTRE, MOMENTS, STEP = "centre", "moments", "step"

FIRST_ROUND = (MOMENTS, CENTRE, PIXELS, COVARIANCES)


@dataclass(frozen=True)
class StatisticSums(Message):
    """The upload of a client in FedStats: the noisy sum of one release, as a vector."""

    sums: Tensor = released()


@dataclass(frozen=True)
class CentreSums(Message):
    """The upload of FedStats' first exchange: noisy sums of features and of optional statistics.

    The optional statistics are small pictures, and products of features for covariances.

    The sums of small pictures and the sums of products are empty if they are not released.
    """

    sums: Tensor = released()
    pictures: Tensor = released()
    covariances: Tensor = released()


@dataclass(frozen=True)
class FedStatsState(ImagesState):
    """The server's state in FedStats: the classifier, the fields of `ImagesState`, and the fields
    below.

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
            noise (`fedsynth.methods.statistics.class_moments.step_rate`).
        momentum: share of the last change that is repeated in each step. It is used without second
            moments.
        curvature: a value that replaces all eigenvalues of the second moments if they are not
            released.
        step_floor: smallest eigenvalue by which a step divides, in units of σ_G·√d, where σ_G is
            the noise of a coordinate of the gradient. It is used with second moments.
    """

    first_request = ModelParameters
    first_upload = CentreSums
    upload = StatisticSums
    state = FedStatsState
    robust_refusal = "the server needs the exact sum, which a robust rule does not compute"
    same_releases_every_round = False
    model_sees_data = False
    takes_model = False
    features_refusal = "the setting method.features chooses the feature map"

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
        if self.features not in (AUTO, *registry.feature_names()):
            registry.refuse_unknown_map(self.features, "method", AUTO)
        pictures = self.images_each > 0 and self.pictures != NO
        self._first_shares(pictures, self.whitening == YES)

    def map_of(self, spec: DatasetSpec) -> FeatureMap:
        """Returns the feature map φ that the settings select for the images of a dataset."""
        name = self.features
        if name == AUTO:
            name = registry.features_for(spec.image_shape)
        return registry.feature_map(name, spec.image_shape)

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> FeatureLinear:
        """Returns a linear model on φ. The model settings of the run are ignored."""
        return FeatureLinear(self.map_of(spec), spec, whitens=self.whitens(spec))

    def whitens(self, spec: DatasetSpec) -> bool:
        """Returns whether the model has a matrix T. With T, a private run whitens z.

        In a run without differential privacy, T stays the identity.

        Raises:
            SettingError: `whitening=yes` is set for features without channels and spatial cells.
        """
        features = self.map_of(spec)
        if self.whitening == AUTO:
            grey = spec.channels == 1 and min(spec.height, spec.width) >= MIN_SIDE
            return bool(features.blocks) and grey
        if self.whitening == YES and not features.blocks:
            reason = (
                "needs a feature map with channels and spatial cells (FeatureMap.blocks), but "
                f"the feature map {features.name!r} has none. Set method.whitening=no"
            )
            raise SettingError("method", "whitening", reason, value=self.whitening)
        return self.whitening == YES

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

    def _first_shares(self, pictures: bool, covariances: bool) -> dict[str, float]:
        """Returns the share of the budget of each release in the first round, by the name of the
        plan.

        A release that is not made has the share 0. The share of `MOMENTS` is for moments that
        include second moments.

        Raises:
            SettingError: the shares leave no budget for steps.
        """
        shares = {
            CENTRE: self.centre_share,
            PIXELS: pictures * self.pixel_share,
            COVARIANCES: covariances * self.covariance_share,
            MOMENTS: self.moment_share,
        }
        total = sum(shares.values())
        if total >= 1:
            reason = (
                "is too large. The sum of centre_share, pixel_share, covariance_share and "
                f"moment_share must be below 1, got {total:g}"
            )
            raise SettingError("method", "moment_share", reason, value=self.moment_share)
        return shares

    def shares(self, privacy: PrivacySettings | None, context: RoundContext) -> dict[str, float]:
        """Returns the shares of the releases in the budget μ². The keys are names of release plans.

        A release that is not made has the share 0. Without second moments, the moments have the
        same share as a step. The steps divide the rest of the budget equally.
        """
        spec, rounds = context.spec, context.rounds
        covariances = self.has_covariances(privacy, spec)
        shares = self._first_shares(self.releases_pictures(spec), covariances)
        rest = 1 - shares[CENTRE] - shares[PIXELS] - shares[COVARIANCES]
        if rounds == 1 or not self.has_second(privacy):
            return {**shares, MOMENTS: rest / rounds, STEP: rest / rounds * (rounds > 1)}
        return {**shares, STEP: (rest - shares[MOMENTS]) / (rounds - 1)}

    def widths(self, privacy: PrivacySettings | None, context: RoundContext) -> dict[str, int]:
        """Returns each release's number of coordinates, by the name of the release plan.

        The number is 0 for optional statistics that are not released.
        """
        features, classes = self.map_of(context.spec), context.spec.classes
        d = features.dimension
        shares = self.shares(privacy, context)
        pictures = pixel_width(low_pass(context.spec.image_shape).dimension, classes)
        return {
            CENTRE: d,
            PIXELS: pictures * bool(shares[PIXELS]),
            COVARIANCES: grams_width(features.blocks) * bool(shares[COVARIANCES]),
            MOMENTS: d * classes + d * (d + 1) // 2 * self.has_second(privacy),
            STEP: d * classes,
        }

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        facts = {"model": "linear in the features, without a bias, and computed from releases"}
        if self.releases_pictures(spec):
            small = low_pass(spec.image_shape)
            facts["small pictures"] = f"{small.dimension} coordinates of norm 1: {small.source}"
        if self.whitens(spec):
            facts["whitening"] = (
                "private runs whiten the features by noisy covariances of channels and cells, which "
                "are released in round 1"
            )
        features = self.map_of(spec)
        facts["feature map"] = (
            f"{features.name}, {features.dimension} coordinates: fixed before data are read"
        )
        if not registry.is_own_features(features.name):
            facts["feature map"] += ", and chosen on public benchmarks"
        bounds = f"norm bound {features.norm_bound:.6g}, radius R {features.radius:.6g}"
        facts["constants of the features"] = f"{bounds}: {features.source}"
        return facts

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the plans of the releases in round 1 and of the later steps.

        The expected signals assume C equally frequent classes, in which all examples of a class are
        identical, and examples of different classes are orthogonal. Then Σ e/b ⊗ z is n/C times a
        sum of C orthogonal terms of norm 1, so its norm is n/√C. The norm of Σ z zᵀ is the same.
        All examples share one centre. Small pictures have the same signal as the moments, and
        covariances have the signal of white features.

        Raises:
            SettingError: a clipping bound or a sampling rate is set, although the method fixes
                both; or the shares leave no budget for steps.
        """
        for key in ("clip", "sample_rate"):
            if getattr(privacy, key) is not None:
                reason = f"must not be set for {self.name}, which chooses a value for each release"
                raise SettingError("privacy", key, reason)
        shares, widths = self.shares(privacy, context), self.widths(privacy, context)
        plans = []
        for name, quantity, clipped, clip, signal in self._descriptions(privacy, context):
            if not shares[name]:
                continue
            plan = ReleasePlan(
                name=name,
                quantity=quantity,
                mechanism="statistics",
                clipped=clipped,
                clip=clip,
                sample_rate=1.0,
                steps=1,
                dimension=widths[name],
                relative_noise_multiplier=shares[name] ** -0.5,
                exchange=MAIN if name in (MOMENTS, STEP) else FIRST,
                signal=signal,
            )
            plans.append(plan)
        return self.sum_over_clients(tuple(plans), privacy, context)

    def _descriptions(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> list[tuple[str, str, str, float, float]]:
        """Returns the facts about each release from which its plan is made.

        These are the name, the quantity, the clipped quantity, the clip and the expected signal.
        """
        features = self.map_of(context.spec)
        by_class = context.spec.classes**-0.5
        products = "products of features with labels"
        if self.has_second(privacy):
            products += ", and second moments of features"
        z = "z = (φ(x) − m)/R of each example; the joint vector of its products has norm at most 1"
        if self.has_covariances(privacy, context.spec):
            z = z.replace("= (", "= T(") + "; T is made of the released covariances"
        pictures = "products of small pictures with labels, and their second moments"
        picture = (
            "u of each example, an image averaged in cells over its own norm, beside a "
            "constant; the joint vector of its products has norm at most 1"
        )
        covariances = "second moments of features' channels, and of their cells"
        matrices = (
            "φ(x)/B of each example, B the map's norm bound; the joint vector of the products "
            "of its channels and of its cells has norm at most 1"
        )
        white = white_signal(features.blocks) if features.blocks else 0.0
        steps = "sum of gradients of a linear model on features"
        return [
            (MOMENTS, products, z, 1.0, by_class),
            (CENTRE, "sum of features", "φ(x) of each example", features.norm_bound, 1.0),
            (PIXELS, pictures, picture, 1.0, by_class),
            (COVARIANCES, covariances, matrices, 1.0, white),
            (STEP, steps, "p − y of each example, and z", self.step_clip, by_class),
        ]

    def round_plans(self, plans: Plans, round: int) -> Plans:
        return tuple(plan for plan in plans if (plan.name in FIRST_ROUND) == (round == 1))

    def rate(self, context: RoundContext) -> float:
        """Returns the step size that is used if no second moments are released.

        The step size depends only on public numbers.
        """
        records = context.nominal_size * context.clients
        noise_std = self.pooled_deviation(MOMENTS, context.clients, context)
        return step_rate(
            noise_std * self.step_clip / records / math.sqrt(context.rounds),
            context.rounds,
            self.logit_noise,
            self.step_size / self.curvature,
            self.momentum,
        )

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        widths = self.widths(context.privacy, context)
        bound = LARGEST * max(1.0, *context.noise.values(), 1.0)
        rules: dict[str, Rule] = {}
        for field, plan in self.sum_releases(exchange, context).items():
            dtype = self.sum_dtype(plan, context)
            rules[field] = Array((widths[plan],), dtype, low=-bound, high=bound)
        return rules

    def sum_releases(self, exchange: str, context: RoundContext) -> Mapping[str, str]:
        if context.round > 1:
            return {"sums": STEP}
        if exchange == FIRST:
            return {"sums": CENTRE, "pictures": PIXELS, "covariances": COVARIANCES}
        return {"sums": MOMENTS}

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, FeatureLinear):
            reason = f"must not be set for {self.name}, which trains a linear model on features"
            raise SettingError("model", "name", reason)
        if self.ipc > 0:
            check_differentiable(model)

    def first_broadcast(
        self, state: FedStatsState, context: RoundContext
    ) -> ModelParameters | None:
        if context.round > 1:
            return None
        return ModelParameters(state.parameters, 1.0)
