"""How far steps on noisy gradients go: until their noise, added up, is as large as it may be.

With gradients of noise ν a coordinate each, T steps W ← W − Σ_t η_t g_t of effective lengths η_t
leave noise ν·√(Σ η_t²) in a coordinate of W, and in the logit of a z of norm 1. Where a budget is
divided over T releases, ν grows with √T, so that it is τ = Σ η_t alone that noise goes by, and not
how many steps there are. As τ grows a classifier goes on from its class means to where the
likelihood is largest, and noise grows with it; so τ is chosen by the noise, which is public before
any data are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pace:
    """Steps v ← m·v + g, W ← W − rate·v.

    Attributes:
        rate: of each step.
        momentum: m.
    """

    rate: float
    momentum: float

    def step(
        self, weight_Cd: Tensor, gradient_Cd: Tensor, velocity_Cd: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """W and v after a step; v is None before the first."""
        velocity = gradient_Cd
        if velocity_Cd is not None:
            velocity = self.momentum * velocity_Cd + gradient_Cd
        return weight_Cd - self.rate * velocity, velocity


def reach(steps: int, momentum: float) -> float:
    """τ over the rate: how often gradients are taken in all, Σ_t (1 − mᵗ)/(1 − m).

    >>> reach(2, 0.5)
    2.5
    """
    return sum((1 - momentum**t) / (1 - momentum) for t in range(1, steps + 1))


def pace(noise: float, steps: int, logit_noise: float, most_rate: float, momentum: float) -> Pace:
    """The steps whose noise in a logit is about `logit_noise`, or the longest there are.

    Args:
        noise: ν/√T, the deviation of a gradient's coordinate if the whole budget were one
            gradient's; 0: as far as steps go.
        steps: T.
        logit_noise: in a logit, of all T together.
        most_rate: that steps along the steepest direction bear.
        momentum: m, below 1.

    >>> pace(0.001, steps=1, logit_noise=0.1, most_rate=200.0, momentum=0.5)
    Pace(rate=100.0, momentum=0.5)
    """
    far = logit_noise / noise if noise > 0 else math.inf
    return Pace(min(most_rate, far / reach(steps, momentum)), momentum)
