"""Channel statistics of feature maps, resampled while a network trains, and soft-binned histograms
of embeddings (FedFA+, TPAMI 2024).

An augmentation layer takes each image's channel means μ and deviations σ over its pixels and
replaces them by draws from N(μ, Σ̂²_μ) and N(σ, Σ̂²_σ), where Σ̂² = (γ + 1) ⊙ Σ² widens the batch's
own variance of these statistics by how much they vary across clients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

EPS = 1e-6
MOMENTUM = 0.99


def modulation(means_MC: Tensor) -> Tensor:
    """Returns γ [C]: C·(1 + 1/Σ²)⁻¹ divided by its sum, with Σ² the variance across clients of
    their accumulated statistics [M, C]; all 1 if those are equal."""
    variance = means_MC.var(dim=0, correction=0) + EPS
    weight = 1 / (1 + 1 / variance)
    return weight * len(weight) / weight.sum()


@dataclass(eq=False)
class Augmentation:
    """The augmentation layer of one stage, and the statistics that it accumulates.

    Args:
        gamma_mean, gamma_std: γ of both statistics [C]; None: 1, as for clients that agree.
        probability: probability that a batch is augmented.
        coin: CPU generator that decides this.
        noise: generator on the features' device.
        mean, std: statistics accumulated so far [C]; None: starts with those of the first batch.

    Attributes:
        statistics: the accumulated mean and standard deviation; empty before the first batch.
    """

    probability: float
    coin: torch.Generator
    noise: torch.Generator
    gamma_mean: Tensor | None = None
    gamma_std: Tensor | None = None
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
        factor: Tensor | int = 2
        if gamma_C is not None:
            factor = gamma_C + 1
        deviation = (factor * (value_NC.var(dim=0, correction=0) + EPS)).sqrt()
        drawn = torch.randn(value_NC.shape, generator=self.noise, device=value_NC.device)
        return value_NC + drawn * deviation


def _moved(running_C: Tensor, batch_C: Tensor) -> Tensor:
    return MOMENTUM * running_C + (1 - MOMENTUM) * batch_C


@contextmanager
def augmented(network: nn.Module, layers: Mapping[str, Augmentation]) -> Iterator[None]:
    """Passes the outputs of the named submodules through their layers inside the context."""
    handles = [
        network.get_submodule(name).register_forward_hook(
            lambda module, inputs, out, layer=layer: layer(out)
        )
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@lru_cache(maxsize=4)  # a server calls it for each client's upload
def channels(
    network: nn.Module, stages: tuple[str, ...], image_shape: tuple[int, int, int]
) -> dict[str, int]:
    """Returns the number of channels of each named submodule's output."""
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
    """Returns π [D, bins]: the shares of the examples in each feature's bins, soft so that they
    have a gradient; rows sum to 1.

    The sigmoid maps a feature z to s in (0, 1), so clients need not agree on a range; bins divide
    this interval equally. Membership is softmax((w·s + b)/temperature), w = 1 … L, b = −(sums of
    the cut points) (Yang et al. 2018, soft binning): it hardens as the temperature falls.
    """
    squashed = features_ND.sigmoid()
    w = torch.arange(1, bins + 1, device=squashed.device, dtype=squashed.dtype)
    cuts = torch.arange(bins, device=squashed.device, dtype=squashed.dtype) / bins
    member = torch.softmax((squashed[..., None] * w - cuts.cumsum(0)) / temperature, dim=2)
    return member.mean(dim=0)


def symmetric_divergence(p_DL: Tensor, q_DL: Tensor) -> Tensor:
    """Returns ½(KL(p‖q) + KL(q‖p)), averaged over the features, so that its weight does not depend
    on their number."""
    p, q = p_DL.clamp_min(EPS), q_DL.clamp_min(EPS)
    return ((p - q) * (p.log() - q.log())).sum(dim=1).mean() / 2
