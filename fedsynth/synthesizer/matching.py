"""Distribution matching: what pulls the synthetic images, with DP off and under each private mechanism.

FedDM (arXiv 2207.09653), Eq. 9. For a class c, network w and feature map u_w(x) = [h_w(x); b·z_w(x)] (embedding and logits),

    L_c = ‖ mean_{B_c} u_w − mean_{S_c} u_w ‖²,      L = Σ_c L_c,

and one step needs ∇_S L. All (client, class) pairs of a group are segments of one pass: `synthetic` is [S, ipc, C, H, W], the real
batch has a segment number for each image. Real images go through without graph; the network's weights are frozen.

Every class here is a `Matcher`: it turns (step, features, synthetic) into ∇_S L, or into a private stand-in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedsynth.core.client import CHUNK, OpenClients, PrivateClients, Segments
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.synthesizer.batches import BatchIndices


class FeatureMap(Protocol):
    """(images [N, C, H, W], segment number of each [N]) -> u [N, D], per example; the segment number selects the siamese augmentation."""

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """With the graph to the images."""

    def real(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """Without graph, and possibly in a reduced precision: for real images."""

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        """How many such images one pass should hold."""


PASSES = 8  # backward passes at a time that `per_example_gradients` aims for


class Matcher(Protocol):
    """Makes the gradient [S, ipc, C, H, W] for one condensation step."""

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor: ...


def synthetic_means(features: FeatureMap, synthetic_SICHW: Tensor, segment_S: Tensor | None = None) -> Tensor:
    """mean_{S_c} u_w for every segment, [S, D], with the graph to `synthetic_SICHW`; `segment_S`: their numbers, if not 0, 1, 2, …"""
    segments, ipc = synthetic_SICHW.shape[:2]
    numbers = torch.arange(segments, device=synthetic_SICHW.device) if segment_S is None else segment_S
    u = features(synthetic_SICHW.flatten(0, 1), numbers.repeat_interleave(ipc))
    return u.view(segments, ipc, -1).mean(dim=1)


def pull_back(features: FeatureMap, synthetic_SICHW: Tensor, cotangents: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """J_cᵀ v_c for every segment, [S, ipc, C, H, W], with J_c the Jacobian of mean_{S_c} u.

    A segment's images meet only their own mean, so segments can go few at a time: the graph then stays in the cache on a CPU.

    Args:
        cotangents: (means [G, D] of some segments, their numbers [G]) -> v [G, D].
    """
    out = torch.empty_like(synthetic_SICHW)
    at_once = max(1, features.images_at_once(synthetic_SICHW[0]) // synthetic_SICHW.shape[1])
    for numbers in torch.arange(len(synthetic_SICHW), device=synthetic_SICHW.device).split(at_once):
        leaf = synthetic_SICHW[numbers].detach().requires_grad_()
        means = synthetic_means(features, leaf, numbers)
        (out[numbers],) = torch.autograd.grad(means, leaf, cotangents(means.detach(), numbers))
    return out


def segment_means(values_ND: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Mean of the rows of each segment, [segments, D], as a matrix product (deterministic on CUDA); empty segments give zero."""
    weights = torch.nn.functional.one_hot(segment_N, segments).to(values_ND.dtype)
    return (weights / weights.sum(dim=0).clamp_min(1)).T @ values_ND


class ExactMatcher:
    """∇_S L with real means from minibatches; DP off."""

    def __init__(self, clients: OpenClients, batches: BatchIndices) -> None:
        self._clients, self._batches = clients, batches

    def real_means(self, step: int, features: FeatureMap, segments: int) -> Tensor:
        """mean_{B_c} u_w of this step's batch for every segment, [segments, D], without graph."""
        indices, where = self._batches.at(step)
        rows = [
            features.real(self._clients.images(part), segment)
            for part, segment in zip(indices.split(CHUNK), where.split(CHUNK), strict=True)
        ]
        return segment_means(torch.cat(rows), where, segments)

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        real = self.real_means(step, features, len(synthetic))
        return pull_back(features, synthetic, lambda means, numbers: 2 * (means - real[numbers]))


class ResidualMatcher:
    """Mechanism `residual`: noise on the sum of clipped residuals in feature space, then one backward pass as post-processing.

    ∇_S L_c = 2·J_cᵀ (mean_{S_c} u − mean_{B_c} u) is linear in the mean of the per-example residuals r(x) = mean_{S_c} u − u(x).
    Each r(x) is clipped to 𝒞 (embedding and logits jointly), summed over the Poisson batch by class, noised by N(0, σ²𝒞²I),
    divided by the public constant `divisor` = q · nominal examples of a class, and sent through J_cᵀ once.

    Sensitivity: r(x) depends on x and on released images and public weights alone, so an example moves one class's sum by at most 𝒞.
    """

    def __init__(self, clients: PrivateClients, series: Sequence[GaussianSums], divisor: float) -> None:
        self._clients, self._series, self._divisor = clients, series, divisor

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = synthetic_means(features, synthetic)

        def residuals(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            return fixed[segment_N] - features.real(x_NCHW, segment_N)

        noisy = self._clients.class_sums(self._series, residuals) / self._divisor
        return pull_back(features, synthetic, lambda means, numbers: 2 * noisy[numbers])


class GradientMatcher:
    """Mechanism `gradient`: FedDM's Eq. 15 (App. B) with per-example clipping, sum, noise and a public divisor.

    g̃(x) = 2·J_cᵀ (mean_{S_c} u − u(x)): the gradient of the squared-norm loss with x alone as the real mean; the mean of g̃ over
    a batch is the batch's gradient. S_c meets only its own class's mean, so the j-th example of *every* class shares one backward
    pass, and `is_grads_batched` does several j at a time.
    """

    def __init__(self, clients: PrivateClients, series: Sequence[GaussianSums], divisor: float) -> None:
        self._clients, self._series, self._divisor = clients, series, divisor

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            return per_example_gradients(features, synthetic, x_NCHW, segment_N)

        noisy = self._clients.class_sums(self._series, rows) / self._divisor
        return noisy.view_as(synthetic)


def per_example_gradients(features: FeatureMap, synthetic_SICHW: Tensor, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
    """g̃(x) of FedDM's Eq. 15 for every example, [N, ipc·C·H·W]: the gradient for the synthetic images of the example's own segment.

    Segments with similar numbers of examples share a graph; the j-th examples of all of them share a backward pass, several j at a time.
    """
    with torch.no_grad():
        residual = synthetic_means(features, synthetic_SICHW)[segment_N] - features.real(x_NCHW, segment_N)
    counts, rank = torch.bincount(segment_N, minlength=len(synthetic_SICHW)), _rank_within_segment(segment_N)
    present = counts.argsort(descending=True)[: int((counts > 0).sum())]
    ipc, images = synthetic_SICHW.shape[1], features.images_at_once(synthetic_SICHW[0])
    out = residual.new_empty(len(x_NCHW), synthetic_SICHW[0].numel())
    for numbers in present.split(max(1, images // (PASSES * ipc))):
        leaf = synthetic_SICHW[numbers].detach().requires_grad_()
        means = synthetic_means(features, leaf, numbers)
        passes = max(1, images // (len(numbers) * ipc))
        position = torch.full_like(counts, -1).scatter_(0, numbers, torch.arange(len(numbers), device=numbers.device))[segment_N]
        for first in range(0, int(counts[numbers].max()), passes):
            mine = (position >= 0) & (rank >= first) & (rank < first + passes)
            cotangents = residual.new_zeros(int(rank[mine].max()) - first + 1, *means.shape)
            cotangents[rank[mine] - first, position[mine]] = 2 * residual[mine]
            (gradients,) = torch.autograd.grad(means, leaf, cotangents, is_grads_batched=True, retain_graph=True)
            out[mine] = gradients[rank[mine] - first, position[mine]].flatten(1)
    return out


def _rank_within_segment(segment_N: Tensor) -> Tensor:
    """0, 1, 2, … for the examples of each segment, in order."""
    one_hot = torch.nn.functional.one_hot(segment_N)
    rank: Tensor = one_hot.cumsum(dim=0).gather(1, segment_N[:, None]) - 1
    return rank.flatten()


class PaperMatcher:
    """Mechanism `paper`: FedDM's Algorithm 1 as printed. NOT differentially private; for comparison only.

    Each class's *batch* gradient is clipped to 𝒞 and N(0, σ²𝒞²I)/|B_c| is added. Clipping a mean bounds its norm, not one example's
    influence: the sensitivity is up to 2𝒞, not 𝒞/|B_c|.
    """

    def __init__(
        self,
        exact: ExactMatcher,
        segments: Segments,
        batches: BatchIndices,
        secrets: Sequence[SecretGenerator],
        noise_multiplier: float,
        clip: float,
    ) -> None:
        self._exact, self._segments, self._secrets = exact, segments, secrets
        self._deviation = noise_multiplier * clip / batches.sizes.to(torch.float64)
        self._clip = clip

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        gradient = self._exact.gradient(step, features, synthetic)
        norms = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
        gradient = gradient / (norms / self._clip).clamp_min(1)
        noise = [
            secret.normal((len(mine), *gradient.shape[1:]), 1.0) * self._deviation[mine].view(-1, 1, 1, 1, 1)
            for secret, mine in ((s, self._segments.of(position)) for position, s in enumerate(self._secrets))
        ]
        noisy: Tensor = gradient + torch.cat(noise).to(gradient.device, gradient.dtype)
        return noisy
