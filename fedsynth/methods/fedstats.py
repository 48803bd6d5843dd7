"""FedStats: the server computes a model and synthetic images from noisy class statistics.

φ is a public feature map that does not depend on private data (`fedsynth.features`). Each client
sends only noisy sums over its examples. The sum over all clients equals the sum over the pooled
data, so the result does not depend on how the data are distributed over the clients. Round 1 has
two exchanges. The first releases the features' centre m. The second releases moments about m. With
e = e_y − 1/C and b = ‖e‖ = √(1 − 1/C), the moments are sums of

    z = clip₁(T(φ(x) − m)/R),   √½·[svec(z zᵀ); e/b ⊗ z]    (norm ≤ 1)

From the moments, the server computes a ridge classifier in closed form. If second moments are not
released, the server computes a first gradient from e/b ⊗ z instead. Each later round is one step of
softmax regression with the gradient Σ clip_c(p − y) ⊗ z. With second moments, the step is
Newton-like. Without them, all steps have momentum and one size, which limits the noise that they
add together.

Together with the centre, round 1 may release two optional statistics. Covariances of φ's channels
and spatial cells are used to whiten z. Moments of thumbnails are released if synthetic
images are requested. Second moments of z in the subspace of images that are rendered from them are
then released together with the moments, and z is shortened along the largest directions before the
gradient steps. No release subsamples the data, so the Gaussian mechanisms compose exactly.
docs/privacy-proofs.md proves the sensitivities, and docs/fedstats.md has results.

In earlier work, DP-FC and DP-NTK use such moments in a central setting (arXiv 2211.13403). One-shot
federated ridge regression sums them over clients (arXiv 2601.08216). Tramèr & Boneh train on
scattering features by DP-SGD (arXiv 2011.11660).

Shares of the budget refer to μ². A release with the share s uses the run's noise multiplier divided
by √s. All releases together then cost as much as a single Gaussian release with the run's σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import OwnNetwork, TwoExchanges, VaryingReleases
from fedsynth.core.client import Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, released
from fedsynth.core.method import ClientStates, Plans, ReleasePlan, Results
from fedsynth.core.periods import SumsOverPeriods
from fedsynth.core.sums import Pool
from fedsynth.core.uploads import LARGEST, Array, Rule
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features import registry
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.random_process import MIN_SIDE
from fedsynth.features.scattering import low_pass
from fedsynth.methods.statistics import images, moments
from fedsynth.methods.statistics.images import ImagesState, MakesImages
from fedsynth.methods.statistics.pictures import (
    DIRECTIONS,
    PixelMoments,
    class_shares,
    pixel_rows,
    pixel_width,
    principal_directions,
)
from fedsynth.models.on_features import Embedding, FeatureLinear
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.products import Products, Rows, grams_width
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.validation import in_range, one_of

AUTO, YES, NO = "auto", "yes", "no"
# The factor that converts the outputs of a regression on labels to logits. It is 4, because the
# slope of the softmax at equal odds of two classes is ¼.
SCALE = 4.0
# The factor of `logit_noise` if z is shortened, tuned on held-out training images of MNIST and
# Fashion-MNIST.
SHORTENED_NOISE = 2 / 3


# The names of the release plans. `MOMENTS` are products with labels; with `second_moments` also
# z zᵀ. `PIXELS`, `COVARIANCES` and `PRINCIPAL` are optional.
CENTRE, PIXELS, COVARIANCES, MOMENTS, STEP = "centre", "pixels", "covariances", "moments", "step"
PRINCIPAL = "principal moments"

# The releases of round 1, the main release first (`Method.release_plans`).
FIRST_ROUND = (MOMENTS, CENTRE, PIXELS, COVARIANCES, PRINCIPAL)
# The releases that later periods continue. Their z has the centre and whitening of period 1.
CONTINUED = (MOMENTS, PIXELS)


@dataclass(frozen=True)
class StatisticSums(Message):
    """A client's upload in FedStats: one noisy sum, as a vector.

    The second moments of z in a subspace are empty if they are not released.
    """

    sums: Tensor = released()
    principal: Tensor = released()


@dataclass(frozen=True)
class CentreAsked(Message):
    """The empty request of FedStats' first exchange, whose sums need no model."""


@dataclass(frozen=True)
class CentreSums(Message):
    """A client's upload in FedStats' first exchange: noisy sums of features.

    `pictures` are sums over thumbnails, and `covariances` sums of products of features.
    Both are empty if they are not released.
    """

    sums: Tensor = released()
    pictures: Tensor = released()
    covariances: Tensor = released()


@dataclass(frozen=True)
class FedStatsState(ImagesState):
    """The server's state in FedStats.

    Args:
        eigenvalues: the eigenvalues [d] of the released second moments, plus the ridge. None before
            round 1, or without second moments.
        eigenvectors: the eigenvectors [d, d] of the released second moments.
        velocity: the accumulated gradient v of the last step, [C, d]. None before it and with
            second moments.
    """

    eigenvalues: Tensor | None = None
    eigenvectors: Tensor | None = None
    velocity: Tensor | None = None


@dataclass(frozen=True)
class FedStats(SumsOverPeriods, MakesImages, TwoExchanges, VaryingReleases, OwnNetwork):
    """FedStats: the server computes a linear model from noisy sums of the clients' features.

    A run takes one gradient step in each round, but with second moments none in round 1. Below,
    e = e_y − 1/C and b = ‖e‖. The defaults were tuned on held-out training images. `MakesImages`,
    `SummedUploads` and `SumsOverPeriods` document further settings.

    Args:
        features: name of the feature map φ, either built in (`fedsynth.features.feature_names`) or
            registered. "auto" chooses a map by the images' public shape (`features_for`).
        centre_share: share of the budget μ² for the centre.
        whitening: whether the feature map's covariances over channels and spatial cells are
            released with the centre and used to whiten z. "auto" does so with differential privacy
            for grey images of at least 12 pixels a side. For colour images, the gain does not
            exceed the cost. Without differential privacy, whitening is not needed.
        covariance_share: share of the budget for the covariances that `whitening` uses.
        moment_share: share of the budget for z zᵀ and e/b ⊗ z, if second moments are released. The
            steps divide the rest equally. Without second moments, e/b ⊗ z is gradient 1 of
            `rounds`, which have equal shares.
        principal_share: share of the budget for second moments of z in the subspace of rendered
            images. z is shortened along the directions with the largest ones, so that others use
            more of the clipping bound. It is used in private runs of more than one round with
            pictures and without second moments. With 0, z is not shortened.
        second_moments: whether z zᵀ is released together with e/b ⊗ z. With "no", e/b ⊗ z uses the
            whole clipping bound, an upload is smaller by a factor of about d/2C, and all directions
            share one step size. "no" is better with noise if the features are already white. With
            "yes", the steps are Newton-like. "auto" is "yes" without differential privacy, and "no"
            with it.
        ridge: λ, the closed-form classifier's ridge, divided by σ_A·√d, where σ_A is a moment's
            noise. It is used with second moments.
        step_clip: c, the bound of clip(p − y). ‖p − y‖ is at most √2.
        step_size: factor of the Newton-like step. Without second moments, it is the largest step
            size, in units of 1/`curvature`.
        logit_noise: standard deviation of the noise that all steps together may add to a logit; two
            thirds of it if z is shortened. It is used without second moments, and determines the
            step size together with the public noise
            (`fedsynth.methods.statistics.moments.step_rate`). The first gradient's noise has
            the factor b instead of c, so in a run of few rounds the deviation is up to b/c times
            `logit_noise`.
        momentum: share of the last change that is repeated in each step. It is used without second
            moments.
        step_floor: smallest eigenvalue by which a step divides, in units of σ_G·√d, where σ_G is
            the gradient's noise per coordinate. It is used with second moments.
        curvature: the value of all second moments' eigenvalues if they are not released.
        balanced: whether the classifier predicts as if all classes were equally frequent, as they
            are among the synthetic images. Its logits are then reduced by the logarithms of the
            released class shares (Menon et al. 2021, arXiv 2007.07314). It has an effect only in
            runs with pictures, whose moments contain the shares.

    >>> from fedsynth import FedStats, PrivacySettings, RunSettings, simulate
    >>> result = simulate(RunSettings(FedStats(), rounds=1, privacy=PrivacySettings(epsilon=8.0)))
    >>> result.accuracy > 0.8
    True
    """

    name = "fedstats"
    summary = "the server computes a model and images from noisy class statistics of fixed features"
    reference = "after Mehta et al. 2022, DP-FC, arXiv 2211.13403"
    dp_mechanisms = ("statistics",)
    first_request = CentreAsked
    first_upload = CentreSums
    upload = StatisticSums
    state = FedStatsState
    robust_refusal = "the server needs the exact sum, which a robust rule does not compute"
    features_refusal = "the setting method.features chooses the feature map"

    features: str = AUTO
    centre_share: float = in_range(0.04, 1e-4, 0.9)
    whitening: str = one_of(AUTO, YES, NO)
    covariance_share: float = in_range(0.05, 1e-4, 0.9)
    moment_share: float = in_range(0.1, 1e-4, 0.999)
    principal_share: float = in_range(0.05, 0, 0.9)
    second_moments: str = one_of(AUTO, YES, NO)
    ridge: float = in_range(0.25, 0)
    step_clip: float = in_range(0.5, 1e-3, 1.5)
    step_size: float = in_range(1.5, 0)
    logit_noise: float = in_range(0.9, 1e-3)
    momentum: float = in_range(0.5, 0, 0.999)
    step_floor: float = in_range(0.1, 0)
    curvature: float = in_range(0.00375, 1e-9)
    balanced: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features not in (AUTO, *registry.feature_names()):
            registry.refuse_unknown_map(self.features, "method", AUTO)
        # the data set resolves "auto": here it counts for pictures, as images are requested, but
        # not for whitening, which only private runs release (`release_plans` checks it)
        pictures = self.images_each > 0 and self.pictures != NO
        self._round_1_shares(pictures, self.whitening == YES, principal=False)

    # ---------------------------------------- round 1, first exchange: the centre m of the features

    def first_broadcast(self, state: FedStatsState, context: RoundContext) -> CentreAsked | None:
        if context.round > 1 or not (self.period == 1 or self.releases_pictures(context.spec)):
            return None
        return CentreAsked()

    def first_step(
        self, message: CentreAsked, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Computes the sums that each client releases in the first exchange.

        Each client sums its features, clipped to the public norm bound. It also sums thumbnails
        for synthetic images, and products of features for whitening, where they are released.
        """
        features = self.map_of(context.spec)
        sums = small = covariances = torch.zeros(len(states), 0, device=context.device)
        if self.period == 1:
            sums = self._sums(CENTRE, features, lambda f, y: Rows(f, features.norm_bound), clients)
        if self.releases_pictures(context.spec):
            rows = partial(pixel_rows, classes=context.spec.classes)
            cells = self.thumbnails_of(context.spec)
            small = self._sums(PIXELS, cells, rows, clients)
        if self.period == 1 and self.has_covariances(context.privacy, context.spec):
            covariances = self._sums(
                COVARIANCES, features, lambda f, y: moments.covariance_rows(f, features), clients
            )
        results: Results = []
        for k, state in enumerate(states):
            upload = CentreSums(sums[k].clone(), small[k].clone(), covariances[k].clone())
            results.append((upload, state))
        return results

    def _with_centre(
        self, state: FedStatsState, total: CentreSums, clients: int, context: RoundContext
    ) -> FedStatsState:
        """Returns the server's state after the first exchange.

        It contains the features' centre m. The whitening matrices and the moments of thumbnails
        are added if they are released.
        """
        if self.period == 1:
            pool = self.pooled(total.sums, clients, CENTRE, context)
            centre = (pool.sums / pool.records).float()
            state = _with_parameters(state, {"centre": centre})
        if self.period == 1 and self.has_covariances(context.privacy, context.spec):
            covariance_pool = self.pooled(total.covariances, clients, COVARIANCES, context)
            noise = pool.noise_std / pool.records
            features = self.map_of(context.spec)
            roots = moments.released_roots(covariance_pool, centre, noise, features)
            state = _with_parameters(state, roots)
        if not self.releases_pictures(context.spec):
            return state
        small = self.pooled(total.pictures, clients, PIXELS, context)
        width = self.thumbnails_of(context.spec).dimension
        pictures = PixelMoments.unpacked(small, width, context.spec.classes)
        if self.balanced:
            bias = -class_shares(small, width, context.spec.classes).log().float()
            state = _with_parameters(state, {"classifier.bias": bias - bias.mean()})
        if self.has_principal(context.privacy, context):
            compute = self.in_parts(state.parameters, context)
            number = state.parameters["shortened"].numel()
            draws = torch_generator(context.seed, "fedstats' subspace")
            shape = context.spec.image_shape
            directions = principal_directions(pictures, compute, number, shape, draws)
            state = _with_parameters(state, {"directions": directions})
        return replace(
            state,
            picture_means=pictures.means,
            picture_roots=pictures.roots,
            picture_overall=pictures.overall,
        )

    # ---------------------- each round: moments about m in round 1, then a gradient at the model
    # the request is `Method.broadcast`: the model with m and T

    def client_step(
        self, message: ModelParameters, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Computes the sums that each client releases in the main exchange.

        In round 1, they are moments about the released centre. In later rounds, they are gradients
        at the released model.
        """
        weight = message.parameters["classifier.weight"]
        features = self.map_of(context.spec)
        embedding = Embedding.of(message.parameters, features)  # φ(x) → z
        classes = context.spec.classes

        def rows(z: Tensor, labels_N: Tensor) -> Products:
            if context.round == 1:
                has_second = self.has_second(context.privacy)
                return moments.moment_rows(z, labels_N, classes, has_second=has_second)
            return moments.step_rows(z, labels_N, weight, self.step_clip)

        name = MOMENTS if context.round == 1 else STEP
        sums = self._sums(name, features, rows, clients, embedding)
        principal = torch.zeros(len(states), 0, device=context.device)
        if context.round == 1 and self.has_principal(context.privacy, context):
            directions = message.parameters["directions"]
            principal = self._sums(
                PRINCIPAL,
                features,
                lambda z, y: moments.principal_rows(z, directions),
                clients,
                embedding,
            )
        return [
            (StatisticSums(sums[k].clone(), principal[k].clone()), state)
            for k, state in enumerate(states)
        ]

    def from_sum(
        self, exchange: str, state: FedStatsState, total: Any, clients: int, context: RoundContext
    ) -> FedStatsState:
        """Computes the server's next state from the sum of all uploads.

        The first exchange adds the centre. Round 1's main exchange adds the closed-form classifier,
        or takes the first gradient step if second moments are not released. Each later round takes
        one more step.
        """
        if exchange == FIRST:
            return self._with_centre(state, total, clients, context)
        if context.round > 1:
            pool = self.pooled(total.sums, clients, STEP, context)
            return self._gradient_step(state, pool, context)
        pool = self.pooled(total.sums, clients, MOMENTS, context)
        has_second = self.has_second(context.privacy)
        if self.images_each:
            size = (context.spec.classes, self.map_of(context.spec).dimension)
            means = images.class_means_of(pool, size, has_second=has_second)
            state = replace(state, class_means=means)
        if has_second:
            return self._closed_form(state, pool)
        weight = state.parameters["classifier.weight"]
        state = _with_parameters(state, {"classifier.weight": torch.zeros_like(weight)})
        state = self._momentum_step(state, moments.gradient_at_zero(pool, len(weight)), context)
        if not self.has_principal(context.privacy, context):
            return state
        return self._shortened(state, self.pooled(total.principal, clients, PRINCIPAL, context))

    def _shortened(self, state: FedStatsState, pool: Pool) -> FedStatsState:
        """Returns the state with a linear map that scales down the largest directions of z.

        Weights, velocity and class means are converted to the scaled z.
        """
        shorten, factor = moments.principal_shortening(pool, state.parameters["directions"])

        def converted(rows_Cd: Tensor | None) -> Tensor | None:
            return None if rows_Cd is None else factor * shorten(rows_Cd)

        weight = factor * shorten(state.parameters["classifier.weight"])
        changed = {"directions": shorten.directions, "shortened": shorten.shortened}
        return replace(
            _with_parameters(state, {**changed, "classifier.weight": weight}),
            velocity=converted(state.velocity),
            class_means=converted(state.class_means),
        )

    def _closed_form(self, state: FedStatsState, pool: Pool) -> FedStatsState:
        """Returns the state with the ridge classifier computed from the released moments."""
        classes, d = state.parameters["classifier.weight"].shape
        second, crossed, noise = moments.second_and_crossed(pool, d, classes)
        spectrum = moments.Spectrum.of(second, noise, self.ridge)
        crossed = crossed * moments.target_norm(classes)
        weight = (SCALE * spectrum.solve(crossed)).float()
        return replace(
            _with_parameters(state, {"classifier.weight": weight}),
            eigenvalues=spectrum.values.float(),
            eigenvectors=spectrum.vectors.float(),
        )

    def _gradient_step(
        self, state: FedStatsState, pool: Pool, context: RoundContext
    ) -> FedStatsState:
        """Returns the state after one gradient step of softmax regression.

        The step is Newton-like if second moments are released. Otherwise it is a step with
        momentum.
        """
        weight = state.parameters["classifier.weight"]
        gradient = (pool.sums / pool.records).float().view_as(weight)
        if state.eigenvalues is None or state.eigenvectors is None:
            if self.has_second(context.privacy):  # round 1 did not count
                return state
            return self._momentum_step(state, gradient, context)
        spectrum = moments.Spectrum(state.eigenvalues, state.eigenvectors)
        noise = pool.noise_std / pool.records * math.sqrt(weight.shape[1])
        direction = spectrum.step(gradient, self.step_floor * noise)
        weight = weight - self.step_size * direction
        return _with_parameters(state, {"classifier.weight": weight})

    def _momentum_step(
        self, state: FedStatsState, gradient_Cd: Tensor, context: RoundContext
    ) -> FedStatsState:
        weight = state.parameters["classifier.weight"]
        velocity = gradient_Cd
        if state.velocity is not None:
            velocity = self.momentum * state.velocity + gradient_Cd
        weight = weight - self.rate(context) * velocity
        return replace(_with_parameters(state, {"classifier.weight": weight}), velocity=velocity)

    def _sums(
        self,
        name: str,
        features: FeatureMap,
        rows: Callable[[Tensor, Tensor], Products],
        clients: Group,
        embedding: Embedding | None = None,
    ) -> Tensor:
        """Computes the upload of each client for the plan with the given name, [clients, D].

        The view clips, sums and adds noise. An exact sum is float64 and becomes float32; a release
        is float32, or float64 on a grid.
        """
        if isinstance(clients, PrivateClientView):
            return clients.feature_sums(clients.mechanisms(name), features, rows, embedding)
        return clients.feature_sums(features, rows, embedding).float()

    # ------------------------------------------------- the model, the releases and their shares

    def map_of(self, spec: DatasetSpec) -> FeatureMap:
        """Returns the feature map φ for a dataset's images, as the settings select it."""
        name = self.features
        if name == AUTO:
            name = registry.features_for(spec.image_shape)
        return registry.feature_map(name, spec.image_shape)

    def thumbnails_of(self, spec: DatasetSpec) -> FeatureMap:
        """Returns the map to thumbnails, of deskewed images if the feature map deskews them."""
        return low_pass(spec.image_shape, deskews=self.map_of(spec).deskews)

    def network(self, spec: DatasetSpec) -> FeatureLinear:
        """Returns a linear classifier on the features, with zero weights."""
        pictures, directions = self.releases_pictures(spec), 0
        if pictures and self.principal_share:
            directions = min(DIRECTIONS, self.map_of(spec).dimension)
        return FeatureLinear(
            self.map_of(spec),
            spec,
            whitens=self.has_whitening_matrices(spec),
            directions=directions,
            bias=pictures and self.balanced,
        )

    def has_whitening_matrices(self, spec: DatasetSpec) -> bool:
        """Returns True if the model multiplies its features by a whitening matrix T.

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
                f"must be 'no' for the feature map {features.name!r}, because its attribute "
                "`blocks` is empty. Set method.whitening=no"
            )
            raise SettingError("method", "whitening", reason, value=self.whitening)
        return self.whitening == YES

    def has_second(self, privacy: PrivacySettings | None) -> bool:
        """Returns True if second moments are released.

        The result depends only on public settings.
        """
        if self.second_moments == AUTO:
            return privacy is None
        return self.second_moments == YES

    def has_covariances(self, privacy: PrivacySettings | None, spec: DatasetSpec) -> bool:
        """Returns True if covariances are released.

        They are released in runs with differential privacy that whiten z.
        """
        return privacy is not None and self.has_whitening_matrices(spec)

    def has_principal(self, privacy: PrivacySettings | None, context: RoundContext) -> bool:
        """Returns True if second moments of the features in a subspace are released.

        The subspace is that of rendered images. The result depends only on public settings.
        """
        if privacy is None or self.has_second(privacy) or context.rounds == 1:
            return False
        return self.principal_share > 0 and self.releases_pictures(context.spec)

    def _round_1_shares(
        self, pictures: bool, covariances: bool, principal: bool
    ) -> dict[str, float]:
        """Returns the share of the budget for each release in round 1, by plan name.

        The share is 0 for a release that is not made. `MOMENTS` counts only with second moments.

        Raises:
            SettingError: the shares leave no budget for steps.
        """
        shares = {
            CENTRE: self.centre_share,
            PIXELS: pictures * self.pixel_share,
            COVARIANCES: covariances * self.covariance_share,
            PRINCIPAL: principal * self.principal_share,
            MOMENTS: self.moment_share,
        }
        total = sum(shares.values())
        if total >= 1:
            largest = max(shares, key=lambda name: shares[name])
            key = f"{largest.split()[0].removesuffix('s')}_share"
            reason = (
                "is too large, because the budget shares of round 1 must sum to less than 1, got "
                f"{total:g}. Lower method.{key}"
            )
            raise SettingError("method", key, reason, value=shares[largest])
        return shares

    def budget_shares(
        self, privacy: PrivacySettings | None, context: RoundContext
    ) -> dict[str, float]:
        """Returns the share of the privacy budget μ² for each release, by plan name.

        A release that is not made has the share 0. Without second moments, the moments have the
        same share as a step. The steps divide the rest of the budget equally.
        """
        spec, rounds = context.spec, context.rounds
        covariances = self.has_covariances(privacy, spec)
        principal = self.has_principal(privacy, context)
        shares = self._round_1_shares(self.releases_pictures(spec), covariances, principal)
        rest = 1 - sum(share for name, share in shares.items() if name != MOMENTS)
        if rounds == 1 or not self.has_second(privacy):
            return {**shares, MOMENTS: rest / rounds, STEP: rest / rounds * (rounds > 1)}
        return {**shares, STEP: (rest - shares[MOMENTS]) / (rounds - 1)}

    def check_images(self) -> None:
        if not self.images_each:
            reason = "and method.drawn_ipc are both 0, so no images are made. Set method.ipc=400"
            raise SettingError("method", "ipc", reason, value=self.ipc)
        if self.requires_secure_sum:
            reason = (
                "must be 'own' for images, because a 'secure' sum of round 1 may have too "
                "little noise and be discarded. Set method.aggregation=own"
            )
            raise SettingError("method", "aggregation", reason, value=self.aggregation)

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        bias = "without a bias"
        if self.releases_pictures(spec) and self.balanced:
            bias = "with a bias computed from released class shares"
        facts = {"model": f"linear in the features, {bias}, and computed from releases"}
        if self.releases_pictures(spec):
            small = self.thumbnails_of(spec)
            facts["thumbnails"] = f"{small.dimension} coordinates, norm at most 1: {small.source}"
        if self.has_whitening_matrices(spec):
            facts["whitening"] = (
                "private runs whiten the features by noisy covariances of channels and cells, "
                "which are released in round 1"
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
        """Plans the private releases of round 1 and of the later steps.

        Raises:
            SettingError: a clipping bound or a sampling rate is set, although the method fixes
                both; or the shares leave no budget for steps.
        """
        for key in ("clip", "sample_rate"):
            if getattr(privacy, key) is not None:
                reason = (
                    f"has no effect on {self.name}, which chooses a value for each release. Remove "
                    "it"
                )
                raise SettingError("privacy", key, reason)
        return self.sum_over_clients(self._releases(privacy, context), privacy, context)

    def _releases(self, privacy: PrivacySettings | None, context: RoundContext) -> Plans:
        """Returns all planned DP releases, without the parameters of secure aggregation.

        The expected signals assume a best case. The C classes are equally frequent, all examples of
        a class share one z, and different classes have orthogonal z of norm 1. Then Σ e/b ⊗ z is
        n/C times a sum of C orthogonal terms of norm 1, so its norm is n/√C. The same holds for Σ z
        zᵀ and the thumbnails' moments. For the centre, all examples share one φ. For the
        covariances, features are white.
        """
        features, classes = self.map_of(context.spec), context.spec.classes
        d, by_class = features.dimension, classes**-0.5
        plan = partial(_planned, self.budget_shares(privacy, context))
        products, width = "products of features with labels", d * classes
        if self.has_second(privacy):
            products += ", and second moments of features"
            width += d * (d + 1) // 2
        z = "z = (φ(x) − m)/R of each example; the joint vector of its products has norm at most 1"
        if self.has_covariances(privacy, context.spec):
            z = z.replace("= (", "= T(") + "; T is made of the released covariances"
        pictures = "products of thumbnails with labels, and their second moments"
        u = (
            "u of each example, an image averaged in cells over its own norm, and a constant; "
            "the joint vector of its products has norm at most 1"
        )
        if features.deskews:
            u = u.replace("an image", "its shear, the deskewed image")
        pixels = pixel_width(self.thumbnails_of(context.spec).dimension, classes)
        covariances, white = "second moments of features' channels, and of their cells", 0.0
        matrices = (
            "φ(x)/B of each example, B the map's norm bound; the joint vector of the products "
            "of its channels and of its cells has norm at most 1"
        )
        if features.blocks:
            white = moments.white_signal(features.blocks)
        centre = "φ(x) of each example"
        number = min(DIRECTIONS, d)
        principal = "second moments of features in a subspace of rendered images"
        y = f"the part of each example's z in {number} directions; its products have norm at most 1"
        steps, wrong = (
            "sum of gradients of a linear model on features",
            "p − y of each example, and z",
        )
        plans = (
            *plan(MOMENTS, products, z, width, by_class),
            *plan(CENTRE, "sum of features", centre, d, 1.0, clip=features.norm_bound),
            *plan(PIXELS, pictures, u, pixels, by_class),
            *plan(COVARIANCES, covariances, matrices, grams_width(features.blocks), white),
            *plan(PRINCIPAL, principal, y, grams_width(((number, 1),)), number**-0.5),
            *plan(STEP, steps, wrong, d * classes, by_class, clip=self.step_clip),
        )
        return self.over_periods(plans, CONTINUED, context)

    def round_plans(self, plans: Plans, round: int, rounds: int) -> Plans:
        return tuple(plan for plan in plans if (plan.name in FIRST_ROUND) == (round == 1))

    def rate(self, context: RoundContext) -> float:
        """Returns the step size for runs in which no second moments are released.

        The size depends only on public numbers. It is computed for all K clients, so it is the same
        in all rounds, whereas `pooled` describes the sum over the clients that answered. All
        gradients count with the clip c, including the first (see `logit_noise`).
        """
        records = self.total_records(context) * context.clients
        noise_std = self.pooled_deviation(MOMENTS, context.clients, context)
        logit_noise = self.logit_noise
        if self.has_principal(context.privacy, context):
            logit_noise *= SHORTENED_NOISE
        return moments.step_rate(
            noise_std * self.step_clip / records / math.sqrt(context.rounds),
            context.rounds,
            logit_noise,
            self.step_size / self.curvature,
            self.momentum,
        )

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        plans = self._releases(context.privacy, context)
        plans = self.round_plans(plans, context.round, context.rounds)
        widths = {plan.name: plan.dimension for plan in plans}
        bound = LARGEST * max([1.0, *context.noise.values()])
        rules: dict[str, Rule] = {}
        for field, plan in self.sum_releases(exchange, context).items():
            dtype = self.sum_dtype(plan, context) if plan in widths else torch.float32
            rules[field] = Array((widths.get(plan, 0),), dtype, low=-bound, high=bound)
        return rules

    def sum_releases(self, exchange: str, context: RoundContext) -> Mapping[str, str]:
        if exchange == FIRST:
            return {"sums": CENTRE, "pictures": PIXELS, "covariances": COVARIANCES}
        return {"sums": MOMENTS if context.round == 1 else STEP, "principal": PRINCIPAL}

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, FeatureLinear):
            reason = (
                f"cannot be used with {self.name}, because {self.name} trains its own linear "
                "model. Remove model.name"
            )
            raise SettingError("model", "name", reason)
        if self.images_each:
            images.check_feature_map(model, optimised=self.ipc > 0)


def _with_parameters(state: FedStatsState, changed: Tensors) -> FedStatsState:
    return replace(state, parameters={**state.parameters, **changed})


def _planned(
    shares: Mapping[str, float],
    name: str,
    quantity: str,
    clipped: str,
    dimension: int,
    signal: float,
    clip: float = 1.0,
) -> Plans:
    """Returns a tuple with one planned DP release, or an empty tuple if its budget share is 0."""
    if not shares[name]:
        return ()
    plan = ReleasePlan(
        name=name,
        quantity=quantity,
        mechanism="statistics",
        clipped=clipped,
        clip=clip,
        sample_rate=1.0,
        steps=1,
        dimension=dimension,
        relative_noise_multiplier=shares[name] ** -0.5,
        exchange=MAIN if name in (MOMENTS, PRINCIPAL, STEP) else FIRST,
        signal=signal,
    )
    return (plan,)
