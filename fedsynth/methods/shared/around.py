"""The networks that condensation looks through: drawn around the global model (FedDM's P_w), or
fresh ones (distribution matching's), with or without siamese augmentation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.methods.shared.condensing import FeatureMaps
from fedsynth.synthesizer.condensation.perturbation import Perturbations
from fedsynth.synthesizer.condensation.resampling import ResampledNetworks
from fedsynth.synthesizer.condensation.siamese import SiameseDraws

AUGMENTATIONS = ("none", "siamese")
FRESH = "fresh"
"""Networks that are newly initialised, beside the readings of `perturbation.READINGS`."""


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
    """What the steps of a round look through, from its public seed.

    Args:
        model: w_r, frozen.
        label_S: class of each segment of the images.
        context: the round's.
        radius: ρ of the ball around w_r.
        reading: one of `perturbation.READINGS`, or `FRESH`.
        augment: one of `AUGMENTATIONS`.
        flip: whether "siamese" may mirror.
        logit_weight: b.
        period: after so many steps the same draws come again; None: never.
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
