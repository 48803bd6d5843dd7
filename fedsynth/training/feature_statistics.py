"""The two parts of FedFA+ (TPAMI 2024): augmentation of feature maps, and histograms of embeddings.

An augmentation layer computes each image's channel statistics, the means μ and standard deviations
σ. It replaces them by draws from N(μ, Σ̂²_μ) and N(σ, Σ̂²_σ). The variance Σ̂² = (γ + 1) ⊙ Σ²
widens the statistics' variance Σ² within the batch by how much they vary across clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

EPS = 1e-6
MOMENTUM = 0.99


def spread(means_MC: Tensor) -> Tensor:
    """Computes the variance Σ² [C] of statistics [M, C] across M clients."""
    return means_MC.var(dim=0, correction=0) + EPS


def modulation(means_MC: Tensor) -> Tensor:
    """Computes the augmentation strength γ [C] of each channel from M clients' statistics [M, C].

    γ is proportional to (1 + 1/Σ²)⁻¹, scaled to a mean of 1, where Σ² is a channel statistic's
    variance across clients. If all clients have equal statistics, γ is 1 for every channel.
    """
    weight = 1 / (1 + 1 / spread(means_MC))
    return weight * len(weight) / weight.sum()


@dataclass(eq=False)
class Augmentation:
    """Resamples the channel statistics of a network stage's output.

    The layer augments a batch at random, and accumulates the channel statistics of all batches.

    Args:
        probability: probability with which a batch is augmented.
        coin: CPU generator that decides whether a batch is augmented.
        noise: generator of the resampled statistics, on the device of the features.
        gamma_mean, gamma_std: γ [C] for the channel means and the standard deviations. None means 1
            in every channel, as for clients with equal statistics.
        variance: "fedfa" for Σ̂² = (γ + 1) ⊙ Σ², "fedfa-c" for the batch's own variance Σ², or
            "fedfa-r" for a variance drawn from U(0, 1) for each channel and batch.
        mean, std: the client's accumulated statistics [C] from earlier rounds. With None, the layer
            starts with the first batch's statistics.

    Attributes:
        statistics: a list with the accumulated mean and standard deviation as one pair, empty
            before the first batch.
    """

    probability: float
    coin: torch.Generator
    noise: torch.Generator
    gamma_mean: Tensor | None = None
    gamma_std: Tensor | None = None
    variance: str = "fedfa"
    mean: InitVar[Tensor | None] = None
    std: InitVar[Tensor | None] = None

    def __post_init__(self, mean: Tensor | None, std: Tensor | None) -> None:
        self.statistics: list[tuple[Tensor, Tensor]] = []
        if mean is not None and std is not None:
            self.statistics.append((mean, std))

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        mean = x_NCHW.mean(dim=(2, 3))
        std = (x_NCHW.var(dim=(2, 3), correction=0) + EPS).sqrt()
        batch_mean, batch_std = mean.detach().mean(dim=0), std.detach().mean(dim=0)
        for running_mean, running_std in self.statistics:  # none before the first batch
            batch_mean = _moved(running_mean, batch_mean)
            batch_std = _moved(running_std, batch_std)
        self.statistics[:] = [(batch_mean, batch_std)]
        if float(torch.rand((), generator=self.coin)) >= self.probability:
            return x_NCHW
        new_mean, new_std = self._drawn(mean, self.gamma_mean), self._drawn(std, self.gamma_std)
        plain = (x_NCHW - mean[..., None, None]) / std[..., None, None]
        return plain * new_std[..., None, None] + new_mean[..., None, None]

    def _drawn(self, value_NC: Tensor, gamma_C: Tensor | None) -> Tensor:
        variance = value_NC.var(dim=0, correction=0) + EPS
        if self.variance == "fedfa-r":
            variance = torch.rand(variance.shape, generator=self.noise, device=variance.device)
        elif self.variance == "fedfa":
            variance = variance * (2 if gamma_C is None else gamma_C + 1)
        drawn = torch.randn(value_NC.shape, generator=self.noise, device=value_NC.device)
        return value_NC + drawn * variance.sqrt()


def _moved(running_C: Tensor, batch_C: Tensor) -> Tensor:
    return MOMENTUM * running_C + (1 - MOMENTUM) * batch_C


@contextmanager
def augmented(
    network: nn.Module, layers: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Applies augmentation layers to a network while the `with` block runs.

    `layers` maps each submodule's name to the function that changes its output.
    """
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = network.get_submodule(name).register_forward_hook(
                lambda module, inputs, out, layer=layer: layer(out)
            )
            hooks.enter_context(hook)
        yield


@lru_cache(maxsize=4)  # a server calls it for each client's upload
def channels(
    network: nn.Module, stages: tuple[str, ...], image_shape: tuple[int, int, int]
) -> dict[str, int]:
    """Returns the number of output channels of each named submodule."""
    sizes: dict[str, int] = {}
    twin = copy.deepcopy(network).cpu().eval()
    for name in stages:
        twin.get_submodule(name).register_forward_hook(
            lambda module, inputs, out, name=name: sizes.update({name: int(out.shape[1])})
        )
    with torch.no_grad():
        twin(torch.zeros(1, *image_shape))
    return sizes


def soft_histogram(features_ND: Tensor, bins: int, temperature: float) -> Tensor:
    """Computes a differentiable histogram of each feature over a batch.

    The result is [D, bins], and its rows sum to 1. Feature maps [N, D, H, W] are averaged first.

    A sigmoid maps each feature z to s in (0, 1), so that clients need not agree on a range. L equal
    bins divide (0, 1). The membership of s in the bins is softmax((w·s + b)/temperature) with w = 1
    … L (soft binning, Yang et al. 2018). b is the negative cumulative sum of the cut points. A
    lower temperature gives sharper bins.
    """
    if features_ND.dim() > 2:
        features_ND = features_ND.mean(dim=(2, 3))
    squashed = features_ND.sigmoid()
    w = torch.arange(1, bins + 1, device=squashed.device, dtype=squashed.dtype)
    cuts = torch.arange(bins, device=squashed.device, dtype=squashed.dtype) / bins
    member = torch.softmax((squashed[..., None] * w - cuts.cumsum(0)) / temperature, dim=2)
    return member.mean(dim=0)


def symmetric_divergence(p_DL: Tensor, q_DL: Tensor) -> Tensor:
    """Computes the symmetric KL divergence of two histograms, averaged over the features.

    For each feature, the divergence is ½(KL(p‖q) + KL(q‖p)). Because of the average, the loss's
    weight does not depend on the number of features.
    """
    p, q = p_DL.clamp_min(EPS), q_DL.clamp_min(EPS)
    return ((p - q) * (p.log() - q.log())).sum(dim=1).mean() / 2
