"""Augmentations that the FedFA+ paper (TPAMI 2024) uses as baselines.

Each function augments a batch of images or feature maps [N, C, H, W]. `Mixing` draws their random
numbers and applies them to a network. The constants are the papers'. MixUp, Manifold MixUp and MoEx
also mix the labels. MixStyle and DAC-SC preserve labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsynth.training.segmentation import example_losses

EPS = 1e-6
LABEL_MIXING = ("mixup", "m-mixup", "moex")
LABEL_PRESERVING = ("mixstyle", "dac-sc")
ALTERNATIVES = (*LABEL_MIXING, *LABEL_PRESERVING)

# α of the symmetric Beta distribution of λ: MixUp's and Manifold MixUp's for CIFAR-10, and that of
# MixStyle's code.
BETA = {"mixup": 1.0, "m-mixup": 2.0, "mixstyle": 0.1}
MOEX_SHARE = 0.9  # MoEx's λ, the weight of the image's own label


def mixup(x_NCHW: Tensor, partner_N: Tensor, share: float) -> Tensor:
    """Computes λ·x + (1 − λ)·x', where x' is the partner of x (MixUp, Zhang et al. 2018, Sec. 2).

    Applied to feature maps, it is Manifold MixUp (Verma et al. 2019, Eq. 2).
    """
    return share * x_NCHW + (1 - share) * x_NCHW[partner_N]


def mixstyle(x_NCHW: Tensor, partner_N: Tensor, share_N: Tensor) -> Tensor:
    """Mixes each image's channel statistics with those of a partner (MixStyle, Zhou et al. 2021).

    The result is γ·(x − μ)/σ + β, where γ = λ·σ + (1 − λ)·σ' and β = λ·μ + (1 − λ)·μ' (Eqs. 4 to
    6). As in the code, the statistics have no gradient. The variances are biased, as in Eq. 3.
    """
    share = share_N[:, None, None, None]
    mean = x_NCHW.mean(dim=(2, 3), keepdim=True).detach()
    std = (x_NCHW.var(dim=(2, 3), correction=0, keepdim=True) + EPS).sqrt().detach()
    mixed_mean, mixed_std = (share * s + (1 - share) * s[partner_N] for s in (mean, std))
    return (x_NCHW - mean) / std * mixed_std + mixed_mean


def moex(x_NCHW: Tensor, partner_N: Tensor) -> Tensor:
    """Replaces each image's moments by those of a partner (MoEx, Li et al. 2021, Eq. 2).

    The result is σ'·(x − μ)/σ + μ'. As in positional normalisation, the moments are taken over each
    pixel's channels. The variance is biased as in the paper, unlike the code's.
    """
    mean = x_NCHW.mean(dim=1, keepdim=True)
    std = (x_NCHW.var(dim=1, correction=0, keepdim=True) + 1e-5).sqrt()
    return (x_NCHW - mean) / std * std[partner_N] + mean[partner_N]


def scnorm(x_NCHW: Tensor) -> Tensor:
    """Averages each image and its instance norm (SCNorm; DAC-SC, Lee, Bae and Kim 2023).

    SCNorm keeps the phase of x's Fourier transform. It mixes the amplitudes of the instance norm
    IN(x) and x with the weights λ and 1 − λ. IN(x) has the phase of x and a mean of 0, so the
    result is λ·IN(x) + (1 − λ)·x. DAC-SC learns λ from λ = 1/2, which is used here.
    """
    std = (x_NCHW.var(dim=(2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    return ((x_NCHW - x_NCHW.mean(dim=(2, 3), keepdim=True)) / std + x_NCHW) / 2


@dataclass(frozen=True)
class Mixed:
    """One batch's augmentation.

    Args:
        x: the images that the network receives.
        layers: functions that change the output of submodules, by name.
        partner: the indices [N] of the images whose labels are mixed in.
        share: λ, the weight of the own label.
    """

    x: Tensor
    layers: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    partner: Tensor | None = None
    share: float = 1.0

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Computes λ·ℓ(z, y) + (1 − λ)·ℓ(z, y') for each example, with the task's loss ℓ."""
        losses = example_losses(logits, y)
        if self.partner is None:
            return losses
        of_partners = example_losses(logits, y[self.partner])
        return self.share * losses + (1 - self.share) * of_partners


@dataclass(frozen=True)
class Mixing:
    """Draws an augmentation for each batch.

    Args:
        name: one of `ALTERNATIVES`, or another name for no augmentation.
        stages: the names of the submodules that may be augmented.
        probability: the probability that a label-preserving augmentation changes a stage's output.
        mix_probability: the probability that a label-mixing augmentation changes a batch.
        generator: CPU generator of all draws.
    """

    name: str
    stages: Sequence[str]
    probability: float
    mix_probability: float
    generator: torch.Generator

    def draw(self, x_NCHW: Tensor) -> Mixed:
        """Draws one batch's augmentation."""
        draws = np.random.default_rng(int(torch.randint(2**62, (), generator=self.generator)))
        if self.name in LABEL_PRESERVING:
            hit = [stage for stage in self.stages if draws.random() < self.probability]
            return Mixed(x_NCHW, {stage: self._layer(x_NCHW, draws) for stage in hit})
        if self.name not in LABEL_MIXING or draws.random() >= self.mix_probability:
            return Mixed(x_NCHW)
        partner = _partners(x_NCHW, draws)
        if self.name == "moex":  # in the first stage, as in the paper
            layers = {self.stages[0]: partial(moex, partner_N=partner)}
            return Mixed(x_NCHW, layers, partner, MOEX_SHARE)
        share = draws.beta(BETA[self.name], BETA[self.name])
        mix = partial(mixup, partner_N=partner, share=share)
        place = int(draws.integers(len(self.stages) + 1)) if self.name == "m-mixup" else 0
        if place == 0:  # the images, which are one of the places of Manifold MixUp
            return Mixed(mix(x_NCHW), {}, partner, share)
        return Mixed(x_NCHW, {self.stages[place - 1]: mix}, partner, share)

    def _layer(self, x_NCHW: Tensor, draws: np.random.Generator) -> Callable[[Tensor], Tensor]:
        if self.name == "dac-sc":
            return scnorm
        alpha = BETA[self.name]
        share = torch.from_numpy(draws.beta(alpha, alpha, len(x_NCHW))).to(x_NCHW)
        return partial(mixstyle, partner_N=_partners(x_NCHW, draws), share_N=share)


def _partners(x_NCHW: Tensor, draws: np.random.Generator) -> Tensor:
    """Draws a permutation of a batch's images."""
    return torch.from_numpy(draws.permutation(len(x_NCHW))).to(x_NCHW.device)
