"""Distribution matching: the gradients that move the synthetic images, exact and under each private
mechanism.

FedDM (arXiv 2207.09653), Eq. 9. For a class c, network w and feature map u_w(x) = [h_w(x);
b·z_w(x)] (embedding and logits),

    L_c = ‖ mean_{B_c} u_w − mean_{S_c} u_w ‖²,      L = Σ_c L_c,

and one step needs ∇_S L. All (client, class) pairs of a group are segments of one pass: `synthetic`
is [S, ipc, C, H, W], and each image of the real batch has a segment number. Real images are
embedded without graph; the network's weights are frozen; a vector-Jacobian product
(`fedsynth.models.frozen`, or autograd for other networks) pulls gradients back to the synthetic
images.

Every class here is a `Matcher`: it maps (step, features, synthetic) to ∇_S L, or to a private
estimate of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedsynth.core.client import OpenClients, Segments, chunk
from fedsynth.models.frozen import VectorJacobian
from fedsynth.privacy.mechanisms import GaussianSums, Released
from fedsynth.privacy.passes import padded, power_of_two
from fedsynth.privacy.plans import UnaccountedNoise
from fedsynth.synthesizer.condensation.sets import BatchIndices

PASSES, PULLED = 4, 8
"""Limits of `per_example_gradients`: it pulls a segment's vectors back in about PASSES passes, each
with at most PULLED times the images of a forward pass."""


class FeatureMap(Protocol):
    """(images [N, C, H, W], segment number of each [N]) -> u [N, D]; the segment number selects the
    siamese augmentation.

    Attributes:
        mixes: an image's features depend on the other images of its pass (batch norm), so that a
            pass must hold all of a group's images.
    """

    mixes: bool

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """Returns u with the graph to the images."""

    def real(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """Returns u without graph, and possibly in a reduced precision: for real images."""

    def vjp(
        self, x_NCHW: Tensor, segment_N: Tensor, *, exact: bool = True
    ) -> tuple[Tensor, VectorJacobian]:
        """Returns u [N, D], and a function that pulls vectors [V, N, D] back to images [V, N, C, H,
        W]; with `exact` False this function may use a reduced precision."""

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        """Returns the number of images of this shape that one pass should hold."""


class Matcher(Protocol):
    """Computes the gradient [S, ipc, C, H, W] for one condensation step."""

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor: ...


class PrivateSums(Protocol):
    """Private records, of clients in a run (`PrivateClients`) or of one `DataOwner`."""

    def class_sums(
        self,
        series: Sequence[GaussianSums],
        rows: Callable[[Tensor, Tensor], Tensor],
        /,
        *,
        start_over_row: float = 4.0,
    ) -> Released:
        """Returns noisy sums by class of a vector of each sampled record."""


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
        """Returns J_cᵀ v_c for each of the V rows, [V, G, ipc, C, H, W]."""
        pulled = self._vjp((v_VGD / self._ipc).repeat_interleave(self._ipc, dim=1))
        return pulled.view(len(v_VGD), *self._shape)


def pull_back(
    features: FeatureMap, synthetic_SICHW: Tensor, cotangents: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Returns J_cᵀ v_c for every segment, [S, ipc, C, H, W].

    A segment's images affect only their own mean, so a pass can hold a few segments, which keeps it
    in a CPU's cache; with batch norm one pass holds all segments.

    Args:
        cotangents: (means [G, D] of some segments, their numbers [G]) -> v [G, D].
    """
    out = torch.empty_like(synthetic_SICHW)
    for numbers in passes(features, synthetic_SICHW):
        one = SyntheticPass(features, synthetic_SICHW, numbers)
        out[numbers] = one.pull(cotangents(one.means, numbers)[None])[0]
    return out


def frozen_means(features: FeatureMap, synthetic_SICHW: Tensor) -> Tensor:
    """Returns mean_{S_c} u_w for every segment, [S, D], without graph, in the passes of
    `pull_back`."""
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
    """Returns the segments' numbers, split into passes through the network."""
    segments, ipc = synthetic_SICHW.shape[:2]
    at_once = segments if features.mixes else segments_at_once(features, synthetic_SICHW[0], ipc)
    pieces: tuple[Tensor, ...] = torch.arange(segments, device=synthetic_SICHW.device).split(
        at_once
    )
    return pieces


def segments_at_once(features: FeatureMap, some_NCHW: Tensor, ipc: int) -> int:
    """Returns how many segments of `ipc` images of this shape a full pass holds, independent of the
    number of segments."""
    return max(1, features.images_at_once(some_NCHW) // ipc)


def segment_sums(values_ND: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Returns the sum of the rows of each segment, [segments, D], as a matrix product
    (deterministic on CUDA)."""
    return torch.nn.functional.one_hot(segment_N, segments).to(values_ND.dtype).T @ values_ND


def first_columns(rows_ND: Tensor, columns: int | None) -> Tensor:
    """Returns the rows with everything after the first `columns` set to zero, so that only these
    are matched. None: all rows unchanged."""
    return (
        rows_ND
        if columns is None
        else torch.nn.functional.pad(rows_ND[:, :columns], (0, rows_ND.shape[1] - columns))
    )


class ExactMatcher:
    """∇_S L with real means from minibatches, without differential privacy.

    Args:
        columns: match only this many leading coordinates of u: embeddings without logits (FedAF,
            Eq. 4). None: all.
    """

    def __init__(
        self, clients: OpenClients, batches: BatchIndices, columns: int | None = None
    ) -> None:
        self._clients = clients
        self._batches = batches
        self._columns = columns

    def real_means(self, step: int, features: FeatureMap, segments: int) -> Tensor:
        """Returns mean_{B_c} u_w of this step's batch for every segment, [segments, D], without
        graph."""
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
        """Returns u_w of every image of this step's batch [N, D], without graph; its segment [N],
        ascending; and the number of images of each segment [S], on the CPU."""
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
    `divisor` = q · nominal examples of a class, and multiplied by J_cᵀ once.

    Sensitivity: r(x) depends only on x, released images and public weights, so an example changes
    one class's sum by at most 𝒞.

    Args:
        columns: release only this many leading coordinates of u, which are matched as in
            `ExactMatcher`.
    """

    def __init__(
        self,
        clients: PrivateSums,
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

    g̃(x) = 2·J_cᵀ (mean_{S_c} u − u(x)) is the gradient of the squared-norm loss with x as the only
    real image; the mean of g̃ over a batch is the batch's gradient. One forward pass of S_c serves
    all examples of its class, and many vectors are pulled back at a time.
    """

    def __init__(
        self, clients: PrivateSums, series: Sequence[GaussianSums], divisor: float
    ) -> None:
        self._clients = clients
        self._series = series
        self._divisor = divisor

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            return per_example_gradients(features, synthetic, x_NCHW, segment_N)

        # Each call repeats the forward pass of the synthetic images; a discarded image is cheap in
        # comparison.
        noisy = self._clients.class_sums(self._series, rows, start_over_row=64.0) / self._divisor
        return noisy.view_as(synthetic)


def per_example_gradients(
    features: FeatureMap, synthetic_SICHW: Tensor, x_NCHW: Tensor, segment_N: Tensor
) -> Tensor:
    """Returns g̃(x) of FedDM's Eq. 15 for every example, [N, ipc·C·H·W]: the gradient for the
    synthetic images of the example's own segment.

    Each segment's images have one forward pass. The vectors of its examples are pulled back a fixed
    number at a time, the last ones padded with zeros, because the number of a segment's examples
    must not select a kernel (`fedsynth.privacy.passes`). A reduced precision of the backward pass
    changes the rows, but not their bound: rows are clipped when they are summed.

    Args:
        x_NCHW, segment_N: N is public, and so is the number of segments; −1 marks images that are
            ignored. `segment_N` should be on the CPU, where the passes are planned.
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
    """Returns how many vectors of a segment that has about `expected` of them (a public number) are
    pulled back together: a power of two. On average half of the last pass is padding."""
    images = PULLED * features.images_at_once(synthetic_SICHW[0])
    return min(power_of_two(images / synthetic_SICHW.shape[1]), power_of_two(expected / PASSES))


class ClippedMatcher:
    """Another matcher's gradient, with each client's part (all its images jointly) clipped in norm;
    for stability, not for privacy.

    Args:
        client_S: the client of each segment, on the images' device.
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
