"""How much noise a budget takes: the smallest noise multiplier with which a whole run stays within
ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

from fedsynth.privacy.accounting import Totals, epsilon
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.releases import ADD_REMOVE, Release, check_delta, is_real, require


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    plan: Callable[[float], Sequence[Release] | Totals],
    adjacency: str = ADD_REMOVE,
) -> float:
    """Smallest σ (to 0.1 %, on the safe side) with epsilon(plan(σ), delta) ≤ `target_epsilon`.

    `plan` must give the releases of the *whole* run for a σ, or their `totals`, with an ε that does
    not grow with σ.

    Raises:
        PrivacySettingError: target not finite and positive, bad δ, or no σ up to 1e6 reaches the
            target.
    """
    possible = is_real(target_epsilon) and target_epsilon > 0
    require(possible, "epsilon", "must be finite and above 0", target_epsilon, "privacy")
    check_delta(delta, None)

    def excess(σ: float) -> float:
        spent = epsilon(plan(σ), delta, adjacency)
        return math.inf if math.isinf(spent) else math.log(max(spent, 1e-12) / target_epsilon)

    high, at_high = 1.0, excess(1.0)
    low, at_low = high, at_high
    while at_high > 0:
        if high > 1e6:
            raise PrivacySettingError(
                "privacy",
                "epsilon",
                "is reached with no noise multiplier up to 1e6: a release that does not depend on "
                "it costs more, or has no guarantee",
                value=f"{target_epsilon:g}",
            )
        low, at_low, high = high, at_high, 4 * high
        at_high = excess(high)
    while at_low <= 0:
        if low < 1e-3:
            return low  # any noise at all is enough
        high, at_high, low = low, at_low, low / 4
        at_low = excess(low)
    for turn in count():
        if high <= 1.001 * low:
            break
        # log ε is nearly linear in log σ: interpolate, a little to the safe side so that both ends
        # close in; every third turn halves the bracket, in case it is not
        share = 0.5 if turn % 3 == 2 or math.isinf(at_low) else at_low / (at_low - at_high)
        aim = math.exp(math.log(low) + share * math.log(high / low)) * 1.0004
        σ = min(max(aim, low * 1.0009), high / 1.0009)
        value = excess(σ)
        (low, at_low, high, at_high) = (
            (low, at_low, σ, value) if value <= 0 else (σ, value, high, at_high)
        )
    return high
