"""FedStats' releases, their dimensions, and their shares of the budget.

Shares refer to μ². A release with the share s has the run's noise multiplier divided by √s. All
releases together then cost as much as a single Gaussian release with the run's σ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.registry import is_own_features
from fedsynth.features.scattering import low_pass
from fedsynth.methods.statistics.class_moments import PIXELS, pixel_plan, pixel_width
from fedsynth.methods.statistics.whitening import COVARIANCES, covariance_plan
from fedsynth.privacy.plans import FIRST, ReleasePlan
from fedsynth.privacy.products import grams_width

CENTRE, MOMENTS, STEP = "centre", "moments", "step"
"""The names of three release plans. The other two are `PIXELS` and `COVARIANCES`."""
FIRST_ROUND = (MOMENTS, CENTRE, PIXELS, COVARIANCES)


@dataclass(frozen=True)
class Shares:
    """Shares of the budget μ² for the releases of the first round.

    The steps divide the rest of the budget equally.

    Args:
        centre: share for the centre of the features.
        pictures: share for the moments of small pictures. With 0, they are not released.
        covariances: share for the covariances of channels and spatial cells. With 0, they are not
            released.
        moments: share for the moments if they include second moments. Otherwise the moments have
            the same share as a step.

    Raises:
        SettingError: the shares leave no budget for steps.
    """

    centre: float
    pictures: float
    covariances: float
    moments: float

    def __post_init__(self) -> None:
        total = self.centre + self.pictures + self.covariances + self.moments
        if total >= 1:
            raise SettingError(
                "method",
                "moment_share",
                "must leave a part of the budget for the steps, but centre_share, pixel_share, "
                f"covariance_share and moment_share add up to {total:g}",
                value=self.moments,
            )

    def of_moments_and_step(self, rounds: int, *, second: bool) -> tuple[float, float]:
        """Returns the share of the moments, and the share of each step.

        Args:
            rounds: number of rounds of the run.
            second: whether second moments are released.
        """
        rest = 1 - self.centre - self.pictures - self.covariances
        if not second or rounds == 1:  # without second moments, as a step; without steps, all of it
            return rest / rounds, rest / rounds
        return self.moments, (rest - self.moments) / (rounds - 1)


@dataclass(frozen=True)
class Releases:
    """All releases of a run, computed from public facts.

    Args:
        features: φ.
        image_shape: shape of the images.
        classes: C.
        rounds: number of rounds of the run.
        second: whether second moments are released.
        shares: shares of the budget.
        step_clip: c, the bound of clip(p − y) in a step.
    """

    features: FeatureMap
    image_shape: Shape
    classes: int
    rounds: int
    second: bool
    shares: Shares
    step_clip: float

    def widths(self) -> dict[str, int]:
        """Returns the number of coordinates of each release by the name of its plan.

        The number is 0 if the release is not made.
        """
        d = self.features.dimension
        pictures = pixel_width(low_pass(self.image_shape).dimension, self.classes)
        second = d * (d + 1) // 2
        return {
            CENTRE: d,
            PIXELS: pictures * bool(self.shares.pictures),
            COVARIANCES: grams_width(self.features.blocks) * bool(self.shares.covariances),
            MOMENTS: d * self.classes + second * self.second,
            STEP: d * self.classes,
        }

    def plans(self) -> tuple[ReleasePlan, ...]:
        """Returns the plans of the releases in round 1 and of the later steps.

        Round 1 has the moments, the centre, and the optional releases. The expected signals assume
        C equally frequent classes, in which all examples of a class are identical, and examples of
        different classes are orthogonal. Then Σ e/b ⊗ z is n/C times a sum of C orthogonal terms of
        norm 1, so its norm is n/√C. The norm of Σ z zᵀ is the same. All examples share one centre.
        Small pictures have the same signal as the moments, and covariances have the signal of white
        features.
        """
        widths = self.widths()
        of_moments, of_step = self.shares.of_moments_and_step(self.rounds, second=self.second)
        make = partial(ReleasePlan, mechanism="statistics", sample_rate=1.0, steps=1)
        products = "products of features with labels"
        if self.second:
            products += ", and second moments of features"
        z = "z = (φ(x) − m)/R of each example; the joint vector of its products has norm at most 1"
        if self.shares.covariances:
            z = z.replace("= (", "= T(") + "; T is made of the released covariances"
        plans = [
            make(
                name=MOMENTS,
                quantity=products,
                clipped=z,
                clip=1.0,
                dimension=widths[MOMENTS],
                relative_noise_multiplier=of_moments**-0.5,
                signal=self.classes**-0.5,
            ),
            make(
                name=CENTRE,
                quantity="sum of features",
                clipped="φ(x) of each example",
                clip=self.features.norm_bound,
                dimension=widths[CENTRE],
                relative_noise_multiplier=self.shares.centre**-0.5,
                phase=FIRST,
                signal=1.0,
            ),
        ]
        if self.shares.pictures:
            plans.append(pixel_plan(make, self.shares.pictures, self.image_shape, self.classes))
        if self.shares.covariances:
            plans.append(covariance_plan(make, self.shares.covariances, self.features))
        if self.rounds > 1:
            plans.append(
                make(
                    name=STEP,
                    quantity="sum of gradients of a linear model on features",
                    clipped="p − y of each example, and z",
                    clip=self.step_clip,
                    dimension=widths[STEP],
                    relative_noise_multiplier=of_step**-0.5,
                    signal=self.classes**-0.5,
                )
            )
        return tuple(plans)


def public_facts(
    features: FeatureMap, image_shape: Shape, *, pictures: bool, whitening: bool
) -> dict[str, str]:
    """Returns the facts of a run that were fixed before any data were read, for the privacy report.

    Args:
        features: φ.
        image_shape: shape of the images.
        pictures: whether moments of small pictures are released.
        whitening: whether covariances are released in a private run.
    """
    facts = {"model": "linear in the features, without a bias: it follows from what is released"}
    if pictures:
        small = low_pass(image_shape)
        facts["small pictures"] = f"{small.dimension} coordinates of norm 1: {small.source}"
    if whitening:
        facts["whitening"] = (
            "in a private run by noisy covariances of the features' channels and cells, released "
            "in round 1"
        )
    facts["feature map"] = (
        f"{features.name}, {features.dimension} coordinates: fixed before data are read"
    )
    if not is_own_features(features.name):
        facts["feature map"] += "; which map was chosen on public benchmarks"
    facts["constants of the features"] = (
        f"norm bound {features.norm_bound:.6g}, radius R {features.radius:.6g}: {features.source}"
    )
    return facts
