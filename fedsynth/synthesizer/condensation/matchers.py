"""Distribution matching: what pulls the synthetic images, with DP off and under each private
mechanism.

FedDM (arXiv 2207.09653), Eq. 9. For a class c, network w and feature map u_w(x) = [h_w(x);
b·z_w(x)] (embedding and logits),

    L_c = ‖ mean_{B_c} u_w − mean_{S_c} u_w ‖²,      L = Σ_c L_c,

and one step needs ∇_S L. All (client, class) pairs of a group are segments of one pass: `synthetic`
is [S, ipc, C, H, W], the real batch has a segment number for each image. Real images go through
without graph; the network's weights are frozen; what is pulled back to the synthetic images is a
vector-Jacobian product (`fedsynth.models.frozen`, or autograd for other networks).

Every class here is a `Matcher`: it turns (step, features, synthetic) into ∇_S L, or into a private
stand-in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedsynth.core.client import OpenClients, PrivateClients, Segments, chunk
from fedsynth.models.frozen import VectorJacobian
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.passes import padded, power_of_two
from fedsynth.privacy.plans import UnaccountedNoise
from fedsynth.synthesizer.condensation.sets import BatchIndices

PASSES, PULLED = 4, 8
"""`per_example_gradients` pulls a segment's vectors back in about so many passes, each within so
many times the images of a pass forward."""


class FeatureMap(Protocol):
    """(images [N, C, H, W], segment number of each [N]) -> u [N, D]; the segment number selects the
    siamese augmentation.

    Attributes:
        mixes: an image's features depend on the others of its pass (batch norm), so that a pass
            must hold all of a group's images.
    """

    mixes: bool

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """With the graph to the images."""

    def real(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """Without graph, and possibly in a reduced precision: for real images."""

    def vjp(
        self, x_NCHW: Tensor, segment_N: Tensor, *, exact: bool = True
    ) -> tuple[Tensor, VectorJacobian]:
        """u [N, D], and what pulls vectors [V, N, D] back to images [V, N, C, H, W]; `exact` False
        allows a reduced precision in that."""

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        """How many such images one pass should hold."""


class Matcher(Protocol):
    """Makes the gradient [S, ipc, C, H, W] for one condensation step."""

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor: ...


class SyntheticPass:
    """One pass of some segments' synthetic images: their means, and J_cᵀ v for many v, with J_c the
    Jacobian of mean_{S_c} u."""

    def __init__(
        self,
        features: FeatureMap,
        synthetic_SICHW: Tensor,
        numbers_G: Tensor,
        *,
        exact: bool = True,
    ) -> None:
        self._shape = synthetic_SICHW[numbers_G].shape
        groups, self._ipc = self._shape[:2]
        u, self._vjp = features.vjp(
            synthetic_SICHW[numbers_G].flatten(0, 1),
            numbers_G.repeat_interleave(self._ipc),
            exact=exact,
        )
        self.means = u.view(groups, self._ipc, -1).mean(dim=1)

    def pull(self, v_VGD: Tensor) -> Tensor:
        """J_cᵀ v_c for each of the V rows, [V, G, ipc, C, H, W]."""
        pulled = self._vjp((v_VGD / self._ipc).repeat_interleave(self._ipc, dim=1))
        return pulled.view(len(v_VGD), *self._shape)


def pull_back(
    features: FeatureMap, synthetic_SICHW: Tensor, cotangents: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """J_cᵀ v_c for every segment, [S, ipc, C, H, W].

    A segment's images meet only their own mean, so segments can go few at a time, which keeps a
    pass in the cache on a CPU; with batch norm they go together.

    Args:
        cotangents: (means [G, D] of some segments, their numbers [G]) -> v [G, D].
    """
    out = torch.empty_like(synthetic_SICHW)
    for numbers in passes(features, synthetic_SICHW):
        one = SyntheticPass(features, synthetic_SICHW, numbers)
        out[numbers] = one.pull(cotangents(one.means, numbers)[None])[0]
    return out


def frozen_means(features: FeatureMap, synthetic_SICHW: Tensor) -> Tensor:
    """mean_{S_c} u_w for every segment, [S, D], without graph, in the passes of `pull_back`."""
    ipc = synthetic_SICHW.shape[1]
    with torch.no_grad():
        rows = [
            features(synthetic_SICHW[numbers].flatten(0, 1), numbers.repeat_interleave(ipc))
            .view(len(numbers), ipc, -1)
            .mean(dim=1)
            for numbers in passes(features, synthetic_SICHW)
        ]
    return torch.cat(rows)


def passes(features: FeatureMap, synthetic_SICHW: Tensor) -> tuple[Tensor, ...]:
    """The segments' numbers, cut into what goes through the network together."""
    segments, ipc = synthetic_SICHW.shape[:2]
    at_once = segments if features.mixes else segments_at_once(features, synthetic_SICHW[0], ipc)
    pieces: tuple[Tensor, ...] = torch.arange(segments, device=synthetic_SICHW.device).split(
        at_once
    )
    return pieces


def segments_at_once(features: FeatureMap, some_NCHW: Tensor, ipc: int) -> int:
    """How many segments of `ipc` such images a whole pass holds, however many there are."""
    return max(1, features.images_at_once(some_NCHW) // ipc)


def segment_sums(values_ND: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Sum of the rows of each segment, [segments, D], as a matrix product (deterministic on
    CUDA)."""
    return torch.nn.functional.one_hot(segment_N, segments).to(values_ND.dtype).T @ values_ND


def first_columns(rows_ND: Tensor, columns: int | None) -> Tensor:
    """The rows with everything beyond the first `columns` set to zero (None: as they are): matching
    those alone."""
    return (
        rows_ND
        if columns is None
        else torch.nn.functional.pad(rows_ND[:, :columns], (0, rows_ND.shape[1] - columns))
    )


class ExactMatcher:
    """∇_S L with real means from minibatches; DP off.

    Args:
        columns: match only so many of the first coordinates of u: embeddings without logits (FedAF,
            Eq. 4). None: all.
    """

    def __init__(
        self, clients: OpenClients, batches: BatchIndices, columns: int | None = None
    ) -> None:
        self._clients = clients
        self._batches = batches
        self._columns = columns

    def real_means(self, step: int, features: FeatureMap, segments: int) -> Tensor:
        """mean_{B_c} u_w of this step's batch for every segment, [segments, D], without graph."""
        indices = self._batches.at(step)
        sums: Tensor | None = None
        for piece in self._batches.pieces(
            len(indices) if features.mixes else chunk(indices.device)
        ):
            part = indices[piece.rows]
            where = self._batches.segment[piece.rows]
            u = features.real(self._clients.images(part), where)
            sums = u.new_zeros(segments, u.shape[1]) if sums is None else sums
            sums[piece.segments] += segment_sums(
                u, where - piece.segments.start, piece.segments.stop - piece.segments.start
            )
        if sums is None:
            raise ValueError("a step without any real image")
        return sums / self._batches.divisors.to(sums.dtype)

    def real_rows(self, step: int, features: FeatureMap) -> tuple[Tensor, Tensor, Tensor]:
        """u_w of every image of this step's batch [N, D], without graph, its segment [N],
        ascending, and on the CPU how many images each segment has [S]."""
        indices = self._batches.at(step)
        rows = [
            features.real(
                self._clients.images(indices[piece.rows]), self._batches.segment[piece.rows]
            )
            for piece in self._batches.pieces(
                len(indices) if features.mixes else chunk(indices.device)
            )
        ]
        return torch.cat(rows), self._batches.segment, self._batches.sizes

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        real = self.real_means(step, features, len(synthetic))
        return pull_back(
            features,
            synthetic,
            lambda means, numbers: first_columns(2 * (means - real[numbers]), self._columns),
        )


class ResidualMatcher:
    """Mechanism `residual`: noise on the sum of clipped residuals in feature space, then one
    backward pass as post-processing.

    ∇_S L_c = 2·J_cᵀ (mean_{S_c} u − mean_{B_c} u) is linear in the mean of the per-example
    residuals r(x) = mean_{S_c} u − u(x). Each r(x) is clipped to 𝒞 (embedding and logits jointly),
    summed over the Poisson batch by class, noised by N(0, σ²𝒞²I), divided by the public constant
    `divisor` = q · nominal examples of a class, and sent through J_cᵀ once.

    Sensitivity: r(x) depends on x and on released images and public weights alone, so an example
    moves one class's sum by at most 𝒞.

    Args:
        columns: take only so many of the first coordinates of u, as in `ExactMatcher`; the others
            are then not in the release.
    """

    def __init__(
        self,
        clients: PrivateClients,
        series: Sequence[GaussianSums],
        divisor: float,
        columns: int | None = None,
    ) -> None:
        self._clients = clients
        self._series = series
        self._divisor = divisor
        self._columns = columns

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        fixed = frozen_means(features, synthetic)[:, : self._columns]

        def residuals(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            where = segment_N.to(x_NCHW.device, non_blocking=True)
            return fixed[where] - features.real(x_NCHW, where)[:, : self._columns]

        noisy = self._clients.class_sums(self._series, residuals) / self._divisor
        return pull_back(
            features,
            synthetic,
            lambda means, numbers: torch.nn.functional.pad(
                2 * noisy[numbers], (0, means.shape[1] - noisy.shape[1])
            ),
        )


class GradientMatcher:
    """Mechanism `gradient`: FedDM's Eq. 15 (App. B) with per-example clipping, sum, noise and a
    public divisor.

    g̃(x) = 2·J_cᵀ (mean_{S_c} u − u(x)): the gradient of the squared-norm loss with x alone as the
    real mean; the mean of g̃ over a batch is the batch's gradient. S_c goes forward once for all
    examples of its class, and many vectors are pulled back at a time.
    """

    def __init__(
        self, clients: PrivateClients, series: Sequence[GaussianSums], divisor: float
    ) -> None:
        self._clients = clients
        self._series = series
        self._divisor = divisor

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            return per_example_gradients(features, synthetic, x_NCHW, segment_N)

        # Each call takes the synthetic images forward again; an image that is thrown away is cheap
        # beside that.
        noisy = self._clients.class_sums(self._series, rows, start_over_row=64.0) / self._divisor
        return noisy.view_as(synthetic)


def per_example_gradients(
    features: FeatureMap, synthetic_SICHW: Tensor, x_NCHW: Tensor, segment_N: Tensor
) -> Tensor:
    """g̃(x) of FedDM's Eq. 15 for every example, [N, ipc·C·H·W]: the gradient for the synthetic
    images of the example's own segment.

    Each segment's images go forward once, and the vectors of its examples go back a fixed number at
    a time, the last ones filled up with zeros: how many examples a segment has must not choose a
    kernel (`fedsynth.privacy.passes`). A reduced precision of the way back moves the rows, not
    their bound: rows are clipped as they are summed.

    Args:
        x_NCHW, segment_N: N is public, and so is the number of segments; −1 marks images that count
            for nothing. Segments are best on the CPU, where the passes are planned.
    """
    segment_N = segment_N.cpu()
    device = x_NCHW.device
    segments = len(synthetic_SICHW)
    u = features.real(x_NCHW, segment_N.to(device, non_blocking=True))
    at_once = vectors_at_once(features, synthetic_SICHW, len(x_NCHW) / segments)
    out = u.new_zeros(len(x_NCHW), synthetic_SICHW[0].numel())
    for number in segment_N[segment_N >= 0].unique().tolist():
        one = SyntheticPass(
            features, synthetic_SICHW, torch.full((1,), number, device=device), exact=False
        )
        for mine in torch.nonzero(segment_N == number).flatten().split(at_once):
            where = mine.to(device, non_blocking=True)
            cotangents = padded(2 * (one.means - u[where]), at_once)[:, None]
            out[where] = one.pull(cotangents)[: len(where)].flatten(1)
    return out


def vectors_at_once(features: FeatureMap, synthetic_SICHW: Tensor, expected: float) -> int:
    """How many vectors of a segment, of about `expected` (public), go back together: a power of
    two; half of the last ones are wasted."""
    images = PULLED * features.images_at_once(synthetic_SICHW[0])
    return min(power_of_two(images / synthetic_SICHW.shape[1]), power_of_two(expected / PASSES))


class ClippedMatcher:
    """Another matcher's gradient with the norm of each client's part, all its images together,
    clipped; for stability, not for privacy.

    Args:
        client_S: whose segment it is, on the images' device.
        bound: the largest norm.
    """

    def __init__(self, inner: Matcher, client_S: Tensor, bound: float) -> None:
        self._inner = inner
        self._client = client_S
        self._bound = bound

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        gradient = self._inner.gradient(step, features, synthetic)
        squares = gradient.flatten(1).square().sum(dim=1)
        same = (self._client[:, None] == self._client).to(squares.dtype)
        scale = (self._bound / (same @ squares).sqrt().clamp_min(1e-12)).clamp_max(1.0)
        return gradient * scale.view(-1, 1, 1, 1, 1)


class PaperMatcher:
    """Mechanism `paper`: FedDM's Algorithm 1 as printed. NOT differentially private; for comparison
    only.

    Each class's *batch* gradient is clipped to 𝒞 and N(0, σ²𝒞²I)/|B_c| is added. Clipping a mean
    bounds its norm, not one example's influence: the sensitivity is up to 2𝒞, not 𝒞/|B_c|.
    """

    def __init__(
        self,
        exact: ExactMatcher,
        segments: Segments,
        batches: BatchIndices,
        noise: Sequence[UnaccountedNoise],
    ) -> None:
        self._exact = exact
        self._segments = segments
        self._secrets = [one.secret for one in noise]
        self._deviation = noise[0].deviation / batches.sizes.to(torch.float64)
        self._clip = noise[0].release.sensitivity

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        gradient = self._exact.gradient(step, features, synthetic)
        norms = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
        gradient = gradient / (norms / self._clip).clamp_min(1)
        noise = [
            secret.normal((len(mine), *gradient.shape[1:]), 1.0)
            * self._deviation[mine].view(-1, 1, 1, 1, 1)
            for secret, mine in (
                (s, self._segments.of(position)) for position, s in enumerate(self._secrets)
            )
        ]
        noisy: Tensor = gradient + torch.cat(noise).to(gradient.device, gradient.dtype)
        return noisy
