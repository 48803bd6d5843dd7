"""Mechanisms that compute condensation gradients from noisy sums.

Each release is charged to the ledgers. One further mechanism, `paper`, gives no guarantee.
`residual` and `gradient` release sums at every step. `features` releases the following sums once
for each of M networks, with the synthetic images at the time of the release:

    R_{m,c} = Σ_{x ∈ c} clip_𝒞(u_m(x) − s_{m,c}) + N(0, σ²𝒞²I),      s_{m,c} = mean_{S_c} u_m

It also releases the counts n̂_c = n_c + N(0, σ_count²) once. The target of network m is s_{m,c} +
R_{m,c} / max(n̂_c, floor). Later steps do not read the data, so any number of steps over the M
networks is post-processing.

The sensitivity of `features` follows from three facts. s is public noise or computed from earlier
releases, so u_m(x) − s is a function of x only. An example contributes to the sum of one class,
which it changes by at most 𝒞, and to the count of one class, which it changes by 1. The M + 1
releases compose adaptively.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.core.client import ClientClassPairs, PrivateClientView
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.owner import DataOwner
from fedsynth.privacy.passes import padded, power_of_two
from fedsynth.privacy.plans import UnaccountedNoise
from fedsynth.synthesizer.condensation import matching

# Objects that hold private records and release noisy sums.
PrivateSums = PrivateClientView | DataOwner

# Functions that compute the gradient of each record's loss with respect to synthetic features [R,
# M, D], from a class's synthetic features [M, D] and real records' features [R, D].
Cotangents = Callable[[Tensor, Tensor], Tensor]

# Limits on the backward passes of `per_example_gradients`. A (client, class) pair has about PASSES
# backward passes. Each has at most PULLED times as many images as a forward pass.
PASSES, PULLED = 4, 8
# The fixed cost of calling `per_example_gradients`, divided by its cost per record. A call repeats
# the synthetic images' forward pass.
GRADIENT_START = 64.0


@dataclass(eq=False)
class ResidualMatcher(matching.MatchingObjective):
    """The mechanism `residual`, which adds noise to class sums of clipped feature differences.

    The gradient ∇_S L_c = 2·J_cᵀ (mean_{S_c} u − mean_{B_c} u) is linear in the mean of the
    per-example residuals r(x) = mean_{S_c} u − u(x). Each r(x) is clipped to 𝒞 (embedding and
    logits jointly). The Poisson batch's residuals are summed by class, and noise from N(0, σ²𝒞²I)
    is added. The noisy sum is divided by the public constant `divisor` = q · nominal examples per
    class. One multiplication by J_cᵀ follows as post-processing.

    The sensitivity is 𝒞. r(x) depends only on x, released images and public weights, so an example
    changes one class's sum by at most 𝒞.

    Args:
        clients: the private records.
        mechanisms: one charged mechanism for each client.
        divisor: the public divisor of each sum.
        columns: the number of leading coordinates of u that are released and matched. With None,
            all are.
    """

    clients: PrivateSums
    mechanisms: Sequence[GaussianSumMechanism]
    divisor: float
    columns: int | None = None

    def gradient(self, step: int, features: matching.NetworkFeatures, synthetic: Tensor) -> Tensor:
        fixed = matching.frozen_means(features, synthetic)[:, : self.columns]

        def residuals(x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
            pair_N = pair_N.to(x_NCHW.device, non_blocking=True)
            return fixed[pair_N] - features.real(x_NCHW, pair_N)[:, : self.columns]

        noisy = self.clients.class_sums(self.mechanisms, residuals) / self.divisor
        return matching.pull_back(
            features,
            synthetic,
            lambda means, numbers: torch.nn.functional.pad(
                2 * noisy[numbers], (0, means.shape[1] - noisy.shape[1])
            ),
        )


@dataclass(eq=False)
class GradientMatcher(matching.MatchingObjective):
    """The mechanism `gradient`, which adds noise to class sums of clipped per-example gradients.

    The mechanism is FedDM's Eq. 15 (App. B) with per-example clipping, a sum, noise and a public
    divisor. With x as the only real image, the squared-norm loss has the gradient g̃(x) = 2·J_cᵀ
    (mean_{S_c} u − u(x)). The mean of g̃ over a batch is the batch's gradient. One forward pass of
    S_c serves all examples of the class, and one backward pass handles many of them.

    Args:
        clients, mechanisms, divisor: see `ResidualMatcher`.
        cotangents: the derivative of the per-example loss. With None, the loss is the squared
            distance of means.
    """

    clients: PrivateSums
    mechanisms: Sequence[GaussianSumMechanism]
    divisor: float
    cotangents: Cotangents | None = None

    def gradient(self, step: int, features: matching.NetworkFeatures, synthetic: Tensor) -> Tensor:
        def rows(x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
            return per_example_gradients(features, synthetic, x_NCHW, pair_N, self.cotangents)

        sums = self.clients.class_sums(self.mechanisms, rows, start_over_row=GRADIENT_START)
        return (sums / self.divisor).view_as(synthetic)


def per_example_gradients(
    features: matching.NetworkFeatures,
    synthetic_SICHW: Tensor,
    x_NCHW: Tensor,
    pair_N: Tensor,
    cotangents: Cotangents | None = None,
) -> Tensor:
    """Computes each real example's gradient with respect to synthetic images, [N, ipc·C·H·W].

    This is g̃(x) of FedDM's Eq. 15, for the synthetic images of the example's own (client, class)
    pair. Each pair's images have one forward pass. The backward passes then handle a fixed number
    of the pair's examples at a time, with zeros in the last group. A pair's number of examples must
    not select a kernel (`fedsynth.privacy.passes`). Reduced precision in the backward pass changes
    the rows but not their bound, because rows are clipped when they are summed.

    Args:
        features: computes u.
        synthetic_SICHW: the synthetic images.
        x_NCHW: the real images. Their number N is public, and so is the number of pairs.
        pair_N: each image's pair index, or −1 for ignored images. It should be on the CPU, where
            the passes are planned.
        cotangents: see `GradientMatcher`.
    """
    derivative = cotangents or mean_cotangents
    pair_N = pair_N.cpu()
    device = x_NCHW.device
    pairs = len(synthetic_SICHW)
    u = features.real(x_NCHW, pair_N.to(device, non_blocking=True))
    at_once = vectors_at_once(features, synthetic_SICHW, len(x_NCHW) / pairs)
    out = u.new_zeros(len(x_NCHW), synthetic_SICHW[0].numel())
    for number in pair_N[pair_N >= 0].unique().tolist():
        images = synthetic_SICHW[number]
        number_M = torch.full((len(images),), number, device=device)
        features_MID, pull = features.vjp(images, number_M, exact=False)
        for rows in torch.nonzero(pair_N == number).flatten().split(at_once):
            rows = rows.to(device, non_blocking=True)
            vectors = padded(derivative(features_MID, u[rows]), at_once)
            out[rows] = pull(vectors)[: len(rows)].flatten(1)
    return out


def mean_cotangents(made_MD: Tensor, real_RD: Tensor) -> Tensor:
    """Computes the mean-matching loss's gradient for each synthetic feature, [R, M, D].

    The loss is ‖mean_m u_m − r‖², and the gradient is taken with respect to each u_m.

    Args:
        made_MD: the features u_m of a class's synthetic images.
        real_RD: the features r of real records.
    """
    gradient_RD = 2 * (made_MD.mean(dim=0) - real_RD) / len(made_MD)
    return gradient_RD[:, None].expand(-1, len(made_MD), -1)


def vectors_at_once(
    features: matching.NetworkFeatures, synthetic_SICHW: Tensor, expected: float
) -> int:
    """Returns the number of vectors per (client, class) pair in one backward pass.

    It is a power of two. On average, half of the last pass is padding.

    Args:
        features: computes u.
        synthetic_SICHW: the synthetic images.
        expected: the approximate number of vectors per pair, which is public.
    """
    images = PULLED * features.images_at_once(synthetic_SICHW[0])
    return min(power_of_two(images / synthetic_SICHW.shape[1]), power_of_two(expected / PASSES))


def ones(x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
    """Returns the number 1 for each image, [N, 1]. Summed by class, these give class counts."""
    return x_NCHW.new_ones(len(x_NCHW), 1)


@dataclass(eq=False)
class FeatureSumMatcher(matching.MatchingObjective):
    """The mechanism `features`, which releases class sums of features once for each of M networks.

    Each of the first M steps releases the sums of one network. Step t uses the sums of network t
    mod M.

    Args:
        clients: the private records.
        mechanisms: for each client, a mechanism that is charged for M releases.
        count_mechanisms: for each client, a mechanism that is charged for one release of
            sensitivity 1.
        networks: the number of networks M.
        floor: a public lower bound on the divisor. The images of a class with a lower noisy count
            are not `uploaded`.

    Attributes:
        counts: the released noisy counts [S].
    """

    clients: PrivateSums
    mechanisms: Sequence[GaussianSumMechanism]
    count_mechanisms: Sequence[GaussianSumMechanism]
    networks: int
    floor: float

    def __post_init__(self) -> None:
        self.period = self.networks
        self.counts: Tensor = self.clients.class_sums(self.count_mechanisms, ones)[:, 0]
        self.uploaded = self.counts >= self.floor
        self._divisors = self.counts.clamp_min(self.floor)[:, None]
        self._targets: list[Tensor] = []

    def gradient(self, step: int, features: matching.NetworkFeatures, synthetic: Tensor) -> Tensor:
        if step < self.networks:
            self._targets.append(self._release(features, synthetic))
        return matching.matching_gradient(features, synthetic, self._targets[step % self.networks])

    def _release(self, features: matching.NetworkFeatures, synthetic: Tensor) -> Tensor:
        """Releases one noisy sum for each class and returns the estimated class means, [S, D]."""
        centre = matching.frozen_means(features, synthetic)

        def rows(x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
            pair_N = pair_N.to(x_NCHW.device, non_blocking=True)
            return features.real(x_NCHW, pair_N) - centre[pair_N]

        return centre + self.clients.class_sums(self.mechanisms, rows) / self._divisors


@dataclass(eq=False)
class PaperMatcher(matching.MatchingObjective):
    """The mechanism `paper`, which is NOT differentially private, for comparisons only.

    It implements lines 15 to 17 of FedDM's Algorithm 1 as printed. Clipping a class's batch
    gradient to 𝒞 bounds its norm, but not one example's influence. The sensitivity is up to 2𝒞, not
    𝒞/|B_c|.
    """

    exact: matching.ExactMatcher
    pairs: ClientClassPairs
    noise: Sequence[UnaccountedNoise]

    def gradient(self, step: int, features: matching.NetworkFeatures, synthetic: Tensor) -> Tensor:
        gradient = self.exact.gradient(step, features, synthetic)
        first = self.noise[0]
        deviation = first.noise_std / self.exact.batches.sizes.to(torch.float64)  # σ𝒞 / |B_c|
        norms = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
        gradient = gradient / (norms / first.release.sensitivity).clamp_min(1)  # line 16
        noise = []
        for position, client_noise in enumerate(self.noise):
            pairs = self.pairs.of(position)
            standard = client_noise.secret.normal((len(pairs), *gradient.shape[1:]), 1.0)
            noise.append(standard * deviation[pairs].view(-1, 1, 1, 1, 1))
        return gradient + torch.cat(noise).to(gradient.device, gradient.dtype)  # line 17
