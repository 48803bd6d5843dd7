"""Condensation with differential privacy: what a round releases of a client, and what matches on that.

A mechanism is a row of plans and a matcher on them: `residual` and `gradient` release noisy sums by
class at each of T steps (`synthesizer.condensation.matchers`), `features` those of M networks and
the counts, once (`synthesizer.condensation.feature_sums`). `paper` is FedDM's Algorithm 1 as
printed: it works on open clients, and guarantees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedsynth.core.client import OpenClients, PrivateClients, Segments
from fedsynth.core.method import PrivatePlan, RoundContext
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.feature_sums import FeatureSumMatcher
from fedsynth.synthesizer.condensation.matchers import (
    ExactMatcher,
    GradientMatcher,
    Matcher,
    PaperMatcher,
    ResidualMatcher,
)
from fedsynth.synthesizer.condensation.real_batches import BatchIndices


@dataclass(frozen=True)
class Matching:
    """What pulls a round's images, and what comes with it.

    Args:
        matcher: makes the gradient.
        period: after so many steps the same networks and augmentations come again; None: never.
        kept: which segments are sent; None: all.
    """

    matcher: Matcher
    period: int | None = None
    kept: Tensor | None = None


def feature_width(context: RoundContext, logits: bool) -> int:
    """Coordinates of what is matched: of an embedding, and of its logits beside it."""
    classifier: Any = context.architecture.classifier
    width: int = classifier.in_features
    return width + classifier.out_features if logits else width


def default_clip(width: int) -> float:
    """About the norm of a matched residual of instance-normalised features: a public constant.

    Their spread in a coordinate is roughly the same for all networks, so it grows as √width.
    """
    return 0.25 * math.sqrt(width)


def image_plan(
    mechanism: str,
    privacy: PrivacySettings,
    context: RoundContext,
    *,
    ipc: int,
    steps: int,
    batch: int,
    logits: bool,
) -> PrivatePlan:
    """T releases a round, of which each moves the synthetic images by a step.

    Args:
        mechanism: "residual", "gradient" or "paper".
        ipc: images of a class.
        steps: T.
        batch: examples of a class that a step expects; decides the default sampling rate.
        logits: whether they are matched beside embeddings.
    """
    width = feature_width(context, logits)
    pixels = ipc * math.prod(context.spec.image_shape)
    residual = "residual h(S) − h(x) of each example's embedding"
    if logits:
        residual = (
            "residual [h(S) − h(x); z(S) − z(x)] of each example, embedding and logits jointly"
        )
    clipped, clip, coordinates = {
        "residual": (residual, default_clip(width), width),
        "gradient": ("image gradient g̃(x) of each example (FedDM, Eq. 15)", 1.0, pixels),
        "paper": ("gradient of each class's batch, not of an example", 5.0, pixels),  # the paper's
    }[mechanism]
    classes = context.spec.classes
    return PrivatePlan(
        quantity="synthetic images",
        mechanism=mechanism,
        clipped=clipped,
        clip=privacy.clip or clip,
        sample_rate=privacy.sample_rate or min(1.0, batch * classes / context.nominal_size),
        steps=steps,
        dimension=classes * coordinates,
    )


def feature_plans(
    privacy: PrivacySettings, context: RoundContext, *, networks: int, count_noise: float
) -> tuple[PrivatePlan, PrivatePlan]:
    """Mechanism `features`: M releases a round of class sums, and one of the counts.

    Args:
        networks: M.
        count_noise: the counts' noise multiplier over that of the M sums together, σ/√M.
    """
    width = feature_width(context, logits=True)
    classes = context.spec.classes
    sums = PrivatePlan(
        quantity="class sums of features",
        mechanism="features",
        clipped="features [h(x); z(x)] of each example about the synthetic images' mean, "
        "embedding and logits jointly",
        clip=privacy.clip or default_clip(width),
        sample_rate=privacy.sample_rate or 1.0,
        steps=networks,
        dimension=classes * width,
    )
    counts = PrivatePlan(
        quantity="class counts",
        mechanism="features",
        clipped="each example counts 1",
        clip=1.0,
        sample_rate=sums.sample_rate,
        steps=1,
        dimension=classes,
        noise_ratio=count_noise / math.sqrt(networks),
    )
    return sums, counts


def private_matching(
    clients: PrivateClients,
    plans: Sequence[PrivatePlan],
    context: RoundContext,
    *,
    columns: int | None,
    min_examples: float,
) -> Matching:
    """Charges all clients of the group for the images' releases, and matches on them.

    Args:
        plans: the images' first (`image_plan`, or both `feature_plans`); others are left alone.
        columns: of "residual": how many of the features' first coordinates it matches; None: all.
        min_examples: of "features": the least released count of a class that is sent.
    """
    plan, classes = plans[0], context.spec.classes
    _, sigma = context.protection()
    series = clients.charge(plan.release(context.round, sigma), classes)
    divisor = plan.sample_rate * context.nominal_size / classes
    if plan.mechanism == "residual":
        return Matching(ResidualMatcher(clients, series, divisor, columns))
    if plan.mechanism == "gradient":
        return Matching(GradientMatcher(clients, series, divisor))
    row = plans[1].release(context.round, sigma)
    floor = max(1.0, min_examples * plan.sample_rate, 2 * row.noise_multiplier)
    counts = clients.charge(row, classes)
    matcher = FeatureSumMatcher(clients, series, counts, plan.steps, floor)
    return Matching(matcher, period=plan.steps, kept=matcher.kept)


def paper_matching(
    clients: OpenClients,
    exact: ExactMatcher,
    segments: Segments,
    batches: BatchIndices,
    plan: PrivatePlan,
    noise_multiplier: float,
) -> Matching:
    """Mechanism `paper`, on open clients: clips and noise that guarantee nothing."""
    secrets = [SecretGenerator() for _ in clients.ids]
    return Matching(PaperMatcher(exact, segments, batches, secrets, noise_multiplier, plan.clip))
