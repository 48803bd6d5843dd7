"""FedStats: clients send class statistics of fixed features, from which the server computes the
model and synthetic images.

φ is a public feature map that does not depend on private data (`fedsynth.features`). Each client
sends only noisy sums over its examples. The sum over all clients equals the sum over the pooled
data, so the result does not depend on how the data are distributed over the clients. Round 1 has
two releases. The first is a centre m of the features. The second contains second moments about m:

    z = clip₁(T(φ(x) − m)/R),   √½·[svec(z zᵀ); z ⊗ (e_y − 1/C)/√(1 − 1/C)]    (norm ≤ 1)

From these, the server computes a ridge classifier in closed form. If second moments are not
released, the server computes a first gradient from z ⊗ e instead. Each later round is one step of
softmax regression with the gradient Σ clip_c(p − y) ⊗ z. With second moments, the step is
Newton-like. Without them, the steps have momentum, and their size is chosen such that the noise of
all steps together stays at a given level.

Together with the centre, round 1 may also release two optional statistics. Covariances of the
channels and of the spatial cells of φ are used to whiten z. Moments of downsampled images are
released if synthetic images are requested. No release subsamples the data, so the composition of
these Gaussian mechanisms is exact. docs/privacy-proofs.md proves the sensitivities, and
docs/fedstats.md has results.

In earlier work, DP-FC and DP-NTK use such moments in a central setting (arXiv 2211.13403), one-shot
federated ridge regression sums them over clients (arXiv 2601.08216), and Tramèr & Boneh train on
scattering features by DP-SGD (arXiv 2011.11660).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.client import Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters, Tensors
from fedsynth.core.method import ClientStates, Results
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.scattering import low_pass
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics import class_moments
from fedsynth.methods.statistics.images import class_means_of
from fedsynth.methods.statistics.settings import (
    CENTRE,
    MOMENTS,
    STEP,
    CentreSums,
    FedStatsState,
    PlansStatistics,
    StatisticSums,
)
from fedsynth.methods.statistics.whitening import COVARIANCES, covariance_rows, released_roots
from fedsynth.models.on_features import Embedding
from fedsynth.privacy.plans import FIRST
from fedsynth.privacy.products import Products, Rows

# The factor that converts the outputs of a regression on labels to logits. It is 4, because the
# slope of the softmax at equal odds of two classes is ¼.
SCALE = 4.0


@dataclass(frozen=True)
class FedStats(PlansStatistics):
    """FedStats: the server computes a linear model on fixed features, from noisy sums of the
    clients.

    A run takes one gradient step in each round after the first. The defaults were
    tuned on held-out training images. The settings are documented in `PlansStatistics`,
    `MakesImages` and `DistributedNoise`.

    >>> from fedsynth import FedStats, PrivacySettings, RunSettings, simulate
    >>> result = simulate(RunSettings(FedStats(), rounds=1, privacy=PrivacySettings(epsilon=8.0)))
    >>> result.accuracy > 0.8
    True
    """

    name = "fedstats"
    summary = "the server computes a model and images from noisy class statistics of fixed features"
    reference = "after Mehta et al. 2022, DP-FC, arXiv 2211.13403"
    dp_mechanisms = ("statistics",)

    # ---------------------------------------- round 1, first exchange: the centre m of the features

    def first_step(
        self,
        message: ModelParameters,
        clients: Group,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        """Computes the sums that each client releases in the first exchange.

        Each client sums its features, each of which is clipped to the public norm bound. If small
        pictures are released, the client also sums them for synthetic images. If covariances are
        released, it also sums the products of features for whitening.
        """
        features = self.map_of(context.spec)
        sums = self._sums(CENTRE, features, lambda f, y: Rows(f, features.norm_bound), clients)
        small = covariances = torch.zeros(len(sums), 0, device=sums.device)
        if self.releases_pictures(context.spec):
            rows = partial(class_moments.pixel_rows, classes=context.spec.classes)
            cells = low_pass(context.spec.image_shape)
            small = self._sums(class_moments.PIXELS, cells, rows, clients)
        if self.has_covariances(context.privacy, context.spec):
            covariances = self._sums(
                COVARIANCES, features, lambda f, y: covariance_rows(f, features), clients
            )
        results: Results = []
        for k, state in enumerate(states):
            upload = CentreSums(sums[k].clone(), small[k].clone(), covariances[k].clone())
            results.append((upload, state))
        return results

    def _with_centre(
        self, state: FedStatsState, total: CentreSums, clients: int, context: RoundContext
    ) -> FedStatsState:
        """Returns the state with what the first exchange released.

        This is the centre m, the whitening matrices and the moments of small pictures.

        The matrices and the moments are added only if they are released.
        """
        pool = self.pooled(total.sums, clients, CENTRE, context)
        centre = (pool.sums / pool.records).float()
        state = _with_parameters(state, {"centre": centre})
        if self.has_covariances(context.privacy, context.spec):
            second = self.pooled(total.covariances, clients, COVARIANCES, context)
            noise = pool.noise_std / pool.records
            roots = released_roots(second, centre, noise, self.map_of(context.spec))
            state = _with_parameters(state, roots)
        if not self.releases_pictures(context.spec):
            return state
        small = self.pooled(total.pictures, clients, class_moments.PIXELS, context)
        width = low_pass(context.spec.image_shape).dimension
        moments = class_moments.PixelMoments.unpacked(small, width, context.spec.classes)
        return replace(state, picture_means=moments.means, picture_roots=moments.roots)

    # ---------------------- each round: moments about m in round 1, then a gradient at the model

    def client_step(
        self,
        message: ModelParameters,
        clients: Group,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        """Computes the sums that each client releases in the main exchange of a round.

        In round 1 they are moments about the released centre. In later rounds they are gradients at
        the released model.
        """
        weight = message.parameters["classifier.weight"]
        features = self.map_of(context.spec)
        embedding = Embedding.of(message.parameters, features)
        classes = context.spec.classes

        def rows(z: Tensor, labels_N: Tensor) -> Products:
            if context.round == 1:
                second = self.has_second(context.privacy)
                return class_moments.moment_rows(z, labels_N, classes, second=second)
            return class_moments.step_rows(z, labels_N, weight, self.step_clip)

        name = MOMENTS if context.round == 1 else STEP
        results = zip(self._sums(name, features, rows, clients, embedding), states, strict=True)
        return [(StatisticSums(client_sums.clone()), state) for client_sums, state in results]

    def from_sum(
        self, exchange: str, state: FedStatsState, total: Any, clients: int, context: RoundContext
    ) -> FedStatsState:
        """Computes the next state of the server from the sum of all uploads.

        After the first exchange, the state has the centre. After the main exchange of round 1, it
        has the closed-form classifier, or the first gradient step if second moments are not
        released. After each later round, it has the model after one more step.
        """
        if not self.has_enough_noise(clients, context):
            return state
        if exchange == FIRST:
            return self._with_centre(state, total, clients, context)
        if context.round > 1:
            return self._step(state, self.pooled(total.sums, clients, STEP, context), context)
        pool = self.pooled(total.sums, clients, MOMENTS, context)
        second = self.has_second(context.privacy)
        if self.images_each:
            size = (context.spec.classes, self.map_of(context.spec).dimension)
            state = replace(state, class_means=class_means_of(pool, size, second=second))
        if second:
            return self._closed_form(state, pool)
        weight = state.parameters["classifier.weight"]
        state = _with_parameters(state, {"classifier.weight": torch.zeros_like(weight)})
        return self._momentum_step(state, class_moments.first_gradient(pool, len(weight)), context)

    def _closed_form(self, state: FedStatsState, pool: Pool) -> FedStatsState:
        """Returns the state with the classifier that ridge regression computes from the released
        moments."""
        classes, d = state.parameters["classifier.weight"].shape
        second, crossed, noise = class_moments.unpacked(pool, d, classes)
        spectrum = class_moments.Spectrum.of(second, noise, self.ridge)
        crossed = crossed * class_moments.target_norm(classes)
        weight = (SCALE * spectrum.solve(crossed)).float()
        return replace(
            _with_parameters(state, {"classifier.weight": weight}),
            eigenvalues=spectrum.values.float(),
            eigenvectors=spectrum.vectors.float(),
        )

    def _step(self, state: FedStatsState, pool: Pool, context: RoundContext) -> FedStatsState:
        """Returns the state after one gradient step of softmax regression.

        The step is Newton-like if second moments are released. Otherwise it is a step with
        momentum.
        """
        weight = state.parameters["classifier.weight"]
        gradient = (pool.sums / pool.records).float().view_as(weight)
        if state.eigenvalues is None or state.eigenvectors is None:
            if self.has_second(context.privacy):  # round 1 was discarded
                return state
            return self._momentum_step(state, gradient, context)
        spectrum = class_moments.Spectrum(state.eigenvalues, state.eigenvectors)
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
        """Computes what each client releases for the plan with this name, [clients, D]."""
        if isinstance(clients, PrivateClientView):
            return clients.feature_sums(clients.mechanisms(name), features, rows, embedding)
        return clients.feature_sums(features, rows, embedding).float()


def _with_parameters(state: FedStatsState, changed: Tensors) -> FedStatsState:
    return replace(state, parameters={**state.parameters, **changed})
