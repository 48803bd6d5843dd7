"""FedStats' releases: their contents, widths and shares of the budget.

Shares are of μ²: a release with share s has the run's noise multiplier over √s, so that all of them
together cost as much as a single Gaussian release with the run's σ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.registry import is_own_features
from fedsynth.features.scattering import low_pass
from fedsynth.methods.statistics.pixel_moments import PIXELS, pixel_plan, pixel_width
from fedsynth.methods.statistics.whitening import COVARIANCES, covariance_plan
from fedsynth.privacy.plans import FIRST, ReleasePlan
from fedsynth.privacy.products import grams_width

CENTRE, MOMENTS, STEP = "centre", "moments", "step"
"""The names of the plans; `PIXELS` and `COVARIANCES` are the others."""
FIRST_ROUND = (MOMENTS, CENTRE, PIXELS, COVARIANCES)


@dataclass(frozen=True)
class Shares:
    """Shares of the budget μ² for the releases of the first round; steps share the rest.

    Args:
        centre: for the features' centre.
        pictures: for small pictures; 0: not released.
        covariances: for those of channels and cells; 0: not released.
        moments: with second moments; without, moments have a step's share.

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
                "must leave a part of the budget for the steps: centre_share, pixel_share, "
                f"covariance_share and moment_share together use {total:g} of it",
                value=self.moments,
            )

    def of_moments_and_step(self, rounds: int, *, second: bool) -> tuple[float, float]:
        """Returns the shares of the moments and of each step.

        Args:
            rounds: of the run.
            second: whether second moments are released.
        """
        rest = 1 - self.centre - self.pictures - self.covariances
        if not second or rounds == 1:  # without second moments, as a step; without steps, all of it
            return rest / rounds, rest / rounds
        return self.moments, (rest - self.moments) / (rounds - 1)


@dataclass(frozen=True)
class Releases:
    """All releases of a run, from public facts.

    Args:
        features: φ.
        image_shape: of the images.
        classes: C.
        rounds: of the run.
        second: whether second moments are released.
        shares: of the budget.
        step_clip: c of a step's clip(p − y).
    """

    features: FeatureMap
    image_shape: Shape
    classes: int
    rounds: int
    second: bool
    shares: Shares
    step_clip: float

    def widths(self) -> dict[str, int]:
        """Returns the coordinates of each release by its plan's name; 0 if it is not made."""
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
        """Returns the plans of round 1 (moments, centre and optional releases), and of later steps.

        Signals assume C equally frequent classes, with identical examples in a class and orthogonal
        ones across classes. Then Σ e/b ⊗ z is n/C times C orthogonal terms of norm 1, so its norm
        is n/√C, and so is that of Σ z zᵀ; all examples share their centre. Small pictures have the
        moments' signal; covariances that of white features.
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
    """Returns the facts of a run, for its report, that were fixed before data were read.

    Args:
        features: φ.
        image_shape: of the images.
        pictures: whether small pictures are released.
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
