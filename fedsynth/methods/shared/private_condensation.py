"""Condensation with differential privacy: the releases of a round, and the matchers that use them.

A mechanism consists of release plans and of a matcher. `residual` and `gradient` release noisy
class sums at each of T steps. `features` releases the noisy class sums under M networks and the
class counts, once in a round (`synthesizer.condensation.private_matchers`). `paper` is Algorithm 1
of FedDM as printed, which gives no guarantee, and works with the exact data.
"""

from __future__ import annotations

import math
from typing import Any

from fedsynth.core.client import PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.errors import SettingError
from fedsynth.methods.shared.class_sums import COUNTS, counts_plan
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.matching import MatchingObjective
from fedsynth.synthesizer.condensation.private_matchers import (
    FeatureSumMatcher,
    GradientMatcher,
    ResidualMatcher,
)

IMAGES = "images"
"""The name of the release plan to which images are matched. The mechanism `features` also has the
plan `COUNTS`."""


def feature_width(context: RoundContext, logits: bool) -> int:
    """Returns the dimension of the matched features.

    Args:
        context: the context of the round, whose network defines the embedding.
        logits: whether the logits are matched in addition to the embedding.
    """
    classifier: Any = context.architecture.classifier
    width: int = classifier.in_features
    return width + classifier.out_features if logits else width


def default_clip(width: int) -> float:
    """Returns a public clipping bound that is close to the typical norm of a matched residual.

    The bound is for instance-normalised features. Their spread in each coordinate is about the same
    for all networks, so the norm grows as √width.
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
) -> ReleasePlan:
    """Returns the plan of T releases in a round, each of which moves the synthetic images by one
    step.

    Args:
        mechanism: "residual", "gradient" or "paper".
        privacy: the settings of differential privacy.
        context: the context of the round.
        ipc: number of synthetic images per class.
        steps: T.
        batch: expected number of examples of a class in a step, which determines the default
            sampling rate.
        logits: whether logits are matched in addition to embeddings.

    Raises:
        SettingError: the mechanism is not one of these.
    """
    classes = context.spec.classes
    coordinates = ipc * math.prod(context.spec.image_shape)
    if mechanism == "residual":
        coordinates = feature_width(context, logits)
        clip = default_clip(coordinates)
        clipped = "residual h(S) − h(x) of each example's embedding"
        if logits:
            clipped = (
                "residual [h(S) − h(x); z(S) − z(x)] of each example, embedding and logits jointly"
            )
    elif mechanism == "gradient":
        clip, clipped = 1.0, "image gradient g̃(x) of each example (FedDM, Eq. 15)"
    elif mechanism == "paper":
        clip, clipped = 5.0, "gradient of each class's batch, not of an example"  # the paper's
    else:
        raise _unsupported(mechanism, "release_plans")
    return ReleasePlan(
        name=IMAGES,
        quantity="synthetic images",
        mechanism=mechanism,
        clipped=clipped,
        clip=privacy.clip or clip,
        sample_rate=privacy.sample_rate or min(1.0, batch * classes / context.nominal_size),
        steps=steps,
        dimension=classes * coordinates,
        groups=classes,
    )


def feature_plans(
    privacy: PrivacySettings, context: RoundContext, *, networks: int, count_noise: float
) -> tuple[ReleasePlan, ReleasePlan]:
    """Returns the plans of the mechanism `features`: M releases of class sums in a round, and one
    release of the class counts.

    Args:
        privacy: the settings of differential privacy.
        context: the context of the round.
        networks: M.
        count_noise: noise multiplier of the counts, divided by σ/√M, the noise multiplier of all M
            sums together.
    """
    width = feature_width(context, logits=True)
    classes = context.spec.classes
    sums = ReleasePlan(
        name=IMAGES,
        quantity="class sums of features",
        mechanism="features",
        clipped="features [h(x); z(x)] of each example about the synthetic images' mean, "
        "embedding and logits jointly",
        clip=privacy.clip or default_clip(width),
        sample_rate=privacy.sample_rate or 1.0,
        steps=networks,
        dimension=classes * width,
        groups=classes,
    )
    return sums, counts_plan(sums, count_noise / math.sqrt(networks))


def private_matching(
    clients: PrivateClientView,
    context: RoundContext,
    *,
    columns: int | None = None,
    min_examples: float,
) -> MatchingObjective:
    """Returns the matcher for the releases for which the clients were charged.

    Args:
        clients: the clients, charged for `image_plan` or for both `feature_plans`.
        context: the context of the round.
        columns: number of leading coordinates of the features that the mechanism `residual`
            matches. With None, it matches all.
        min_examples: smallest released count with which the mechanism `features` sends a class.

    Raises:
        SettingError: the clients were charged for a different mechanism.
    """
    plan = clients.plan(IMAGES)
    series = clients.series(IMAGES)
    divisor = plan.sample_rate * context.nominal_size / context.spec.classes
    if plan.mechanism == "residual":
        return ResidualMatcher(clients, series, divisor, columns)
    if plan.mechanism == "gradient":
        return GradientMatcher(clients, series, divisor)
    if plan.mechanism != "features":
        raise _unsupported(plan.mechanism, "client_step")
    counts = clients.series(COUNTS)
    floor = max(1.0, min_examples * plan.sample_rate, 2 * counts[0].noise_std)
    return FeatureSumMatcher(clients, series, counts, plan.steps, floor)


def _unsupported(mechanism: str, hook: str) -> SettingError:
    return SettingError(
        "privacy",
        "mechanism",
        f"is {mechanism!r}, which the condensing methods do not implement: a method that "
        f"supports another mechanism must override `{hook}`",
    )
