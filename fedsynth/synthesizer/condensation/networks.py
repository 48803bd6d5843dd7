"""The networks of condensation: one for each step, drawn from the round's public seed, so that all
clients of a round share them.

FedDM's P_w(w_r) (App. D.3, Eq. 24) is w_r + ε with ε ~ N(0, I) rescaled so that ‖ε‖₂ ≤ ρ. With
300,000 parameters ‖N(0, I)‖ ≈ 550, so for ρ = 5 w lies on the sphere: this is interpretation
"sphere", the literal one and the default. Interpretation "ball" draws the distance to w_r uniformly
from [0, ρ]. FedAF (Eq. 17) uses γ·w + (1 − γ)·w̃ with w̃ newly initialised by the architecture's
own rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.models.flat import FlatNetwork, flatten
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.condensation.augmentation import SiameseDraws
from fedsynth.synthesizer.condensation.loop import Augmentation
from fedsynth.validation import check_choice

READINGS = ("sphere", "ball")


class Perturbations:
    """Draws w ~ P_w(w_r), one for each step, from the round's public seed: all clients of a round
    share them.

    Args:
        model: w_r. Copied; the copy's weights are frozen.
        radius: ρ; 0 matches at w_r itself.
        period: number of networks after which they repeat, in the same order; None: never.
    """

    def __init__(
        self,
        model: nn.Module,
        radius: float,
        *,
        reading: str = "sphere",
        seed: int,
        round: int,
        device: torch.device,
        period: int | None = None,
    ) -> None:
        check_choice("method", "perturbation", reading, READINGS)
        self._network = FlatNetwork(model, device)
        self._network.module.eval()
        self._center = self._network.flat.clone()
        self._noise = torch.empty_like(self._center)
        self._radius = radius
        self._reading = reading
        self._key = (seed, round, device)
        self._period = period
        self._drawn = 0
        self._generator = self._stream()

    def _stream(self) -> torch.Generator:
        seed, round, device = self._key
        return torch_generator(seed, "parameter perturbation", round, device=device)

    def draw(self) -> nn.Module:
        """Returns the next network: the same object each time, with other weights."""
        if self._period is not None and self._drawn % self._period == 0:
            self._generator = self._stream()
        self._drawn += 1
        self._noise.normal_(generator=self._generator)
        norm = torch.linalg.vector_norm(self._noise)
        if self._reading == "ball":
            scale = (
                self._radius * torch.rand((), generator=self._generator, device=norm.device) / norm
            )
        else:
            scale = (self._radius / norm).clamp_max(1.0)
        torch.addcmul(self._center, self._noise, scale, out=self._network.flat)
        return self._network.module


class ResampledNetworks:
    """Draws FedAF's network of each step, γ·w + (1 − γ)·w̃.

    Args:
        model: w, the global model. Copied; the copy's weights are frozen.
        architecture: a network with the same parameters in the same order, whose layers have
            `reset_parameters`.
        gamma: γ in [0, 1]; 1 is the global model itself at every step.
        period: number of networks after which they repeat; None: never.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: nn.Module,
        gamma: float,
        *,
        seed: int,
        round: int,
        device: torch.device,
        period: int | None = None,
    ) -> None:
        self._network = FlatNetwork(model, device)
        self._network.module.eval()
        self._center = self._network.flat.clone()
        self._gamma = gamma
        self._scratch = copy.deepcopy(architecture).cpu()
        self._seed = seed
        self._round = round
        self._period = period
        self._drawn = 0

    def draw(self) -> nn.Module:
        """Returns the next network: the same object each time, with other weights."""
        if self._gamma < 1:
            step = self._drawn if self._period is None else self._drawn % self._period
            with forked_rng(self._seed, "model re-sampling", self._round, step):
                for layer in self._scratch.modules():
                    reset: Any = getattr(layer, "reset_parameters", None)
                    if reset is not None:
                        reset()
            fresh = flatten(self._scratch).to(self._center.device, non_blocking=True)
            torch.lerp(fresh, self._center, self._gamma, out=self._network.flat)
        self._drawn += 1
        return self._network.module


@dataclass(frozen=True)
class FeatureMaps:
    """Draws each step's feature map u = [h; b·z] and the augmentation before it.

    Args:
        draw_network: draws the step's network, with frozen weights.
        draw_augmentation: draws the step's augmentation of real and synthetic images; None: none.
        logit_weight: b.
    """

    draw_network: Callable[[], nn.Module]
    draw_augmentation: Callable[[], Augmentation] | None = None
    logit_weight: float = 1.0


AUGMENTATIONS = ("none", "siamese")
FRESH = "fresh"
"""Newly initialised networks, a value of `reading` next to those of `READINGS`."""


def maps_around(
    model: nn.Module,
    label_S: Tensor,
    context: RoundContext,
    *,
    radius: float,
    reading: str,
    augment: str,
    flip: bool,
    logit_weight: float,
    period: int | None,
) -> FeatureMaps:
    """Returns the feature maps of a round's steps, drawn from the round's public seed.

    Args:
        model: w_r, frozen.
        label_S: class of each segment of the images.
        context: the round's.
        radius: ρ of the ball around w_r.
        reading: one of `READINGS`, or `FRESH`.
        augment: one of `AUGMENTATIONS`.
        flip: whether "siamese" may mirror images.
        logit_weight: b.
        period: number of steps after which the draws repeat; None: never.
    """
    draw = _networks(model, context, radius, reading, period)
    if augment == "none":
        return FeatureMaps(draw, None, logit_weight)
    augmentations = SiameseDraws(
        label_S.to(context.device),
        context.spec.classes,
        flip=flip,
        seed=context.seed,
        round=context.round,
        period=period,
    )
    return FeatureMaps(draw, augmentations.draw, logit_weight)


def _networks(
    model: nn.Module, context: RoundContext, radius: float, reading: str, period: int | None
) -> Callable[[], nn.Module]:
    if reading == FRESH:
        fresh = ResampledNetworks(
            model,
            context.architecture,
            0.0,
            seed=context.seed,
            round=context.round,
            device=context.device,
            period=period,
        )
        return fresh.draw
    around = Perturbations(
        model,
        radius,
        reading=reading,
        seed=context.seed,
        round=context.round,
        device=context.device,
        period=period,
    )
    return around.draw
