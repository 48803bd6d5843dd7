"""Plans for a round's releases, and the charged mechanisms for a client's step.

The releases of one mechanism are planned and charged together. A method states its plans once
(`Method.release_plans`), before any data are read. In each exchange with the server, a client's
ledger is first charged for all plans of this exchange. The client's step then receives a
`ReleaseBudget`, from which it can take each charged mechanism once, by the name of its plan. A
`ReleaseBudget` gives no access to the ledger, so a step cannot charge a release that was not
planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsynth.errors import UnplannedReleaseError
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.randomness import Addends, Grid, SecretGenerator, grid_of
from fedsynth.privacy.releases import FULL, POISSON, RECORD, Release, is_real, require

S = TypeVar("S")
# A function of (release, groups, a client's `BudgetEnforcer`, its secret generator) that returns a
# charged mechanism. `GaussianSumMechanism` is the default.
MakeMechanism = Callable[[Release, int, BudgetEnforcer, SecretGenerator], GaussianSumMechanism]

FIRST, MAIN = "first", "main"
# The exchanges between server and clients in a round. Every method has the main exchange, and some
# methods have one before it.
EXCHANGES = (FIRST, MAIN)


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """A plan for noisy sums released by a client in a round.

    Args:
        name: the name by which a step asks for the mechanism, such as "images".
        quantity: the released quantity, in words for the ledger and the report.
        mechanism: the name of the mechanism.
        clipped: the vector that is clipped, in words.
        clip: the bound 𝒞 on the L2 norm of one example's contribution.
        sample_rate: the rate q of Poisson sampling.
        steps: the number of noisy sums in a round.
        dimension: the number of coordinates of one release.
        groups: the number of separate sums in one release, such as one per class. They divide the
            coordinates evenly.
        relative_noise_multiplier: the noise multiplier of this release, divided by the run's σ.
        exchange: the exchange in which the release is made, "main" or "first".
        shares: the number H of clients that together add the charged noise under secure
            aggregation. Each of them adds noise with 1/√H of the charged standard deviation. With
            1, every client adds all of the noise.
        addends: the bounds on the clients and records in the sum, if the clients' releases are
            rounded and summed before anyone sees them. None if each release is seen separately.
        signal: the norm of the sum over the examples of all clients, divided by the largest
            possible norm (𝒞 times the number of examples), in a public reference case. The
            method's documentation describes the case. None if there is no such case.

    Raises:
        PrivacySettingError: the exchange is unknown, `clip` is not above 0, `shares` is less than
            1, or `groups` does not divide `dimension`.
    """

    name: str
    quantity: str
    mechanism: str
    clipped: str
    clip: float
    sample_rate: float
    steps: int
    dimension: int
    groups: int = 1
    relative_noise_multiplier: float = 1.0
    exchange: str = MAIN
    shares: int = 1
    addends: Addends | None = None
    signal: float | None = None

    def __post_init__(self) -> None:
        require(
            self.exchange in EXCHANGES,
            "exchange",
            f"must be one of {', '.join(EXCHANGES)}",
            self.exchange,
        )
        valid = is_real(self.clip) and self.clip > 0
        require(valid, "clip", "must be a finite number above 0", self.clip)
        require(self.shares >= 1, "shares", "must be at least 1", self.shares)
        divides = self.groups >= 1 and self.dimension % self.groups == 0
        require(divides, "groups", f"must divide dimension={self.dimension}", self.groups)

    def signal_to_noise(self, sigma: float, records: float, clients: int, rounds: int = 1) -> float:
        """Computes the signal-to-noise ratio of a release, summed over all clients.

        The ratio holds for the public reference case of `signal`. It is signal·n·𝒞 /
        (σ·𝒞·√(K/H)·√D). It divides the sum's norm by the root mean square of its noise's norm.

        Without `signal`, it is an upper bound for all T releases of the run together: as if the C
        groups had equally many examples, all with the same vector, of norm 𝒞. The signal is then
        q·√(T/C).

        Args:
            sigma: the run's σ.
            records: n, the public number of examples (or users) of all clients.
            clients: K, the number of clients, each of which adds noise.
            rounds: the number of rounds in which the release is made.
        """
        signal = self.signal
        if signal is None:
            signal = self.sample_rate * math.sqrt(rounds * self.steps / self.groups)
        noise = sigma * self.relative_noise_multiplier
        return signal * records / (noise * math.sqrt(clients / self.shares * self.dimension))

    def grid(self, noise_multiplier: float) -> Grid | None:
        """Returns the grid to which a client rounds its noisy release.

        Returns None if the release is not summed by secure aggregation.

        Args:
            noise_multiplier: the run's σ.

        Raises:
            PrivacySettingError: the noise is too small for such a sum (see `grid_of`).
        """
        if self.addends is None:
            return None
        charged = noise_multiplier * self.relative_noise_multiplier * self.clip
        return grid_of(self.clip, charged / math.sqrt(self.shares), self.shares, self.addends)

    def release(
        self, round: int, sigma: float, *, unit: str = RECORD, unaccounted: str | None = None
    ) -> Release:
        """Returns the ledger row for the planned release.

        Args:
            round: the number of the round.
            sigma: the run's σ.
            unit: the privacy unit, one of `releases.UNITS`.
            unaccounted: the reason why the release has no guarantee. None if it has one.
        """
        return Release(
            round=round,
            quantity=self.quantity,
            mechanism=self.mechanism,
            clipped=self.clipped,
            noise_multiplier=sigma * self.relative_noise_multiplier,
            sensitivity=self.clip,
            sample_rate=self.sample_rate,
            sampler=POISSON if self.sample_rate < 1 else FULL,
            steps=self.steps,
            dimension=self.dimension,
            unaccounted=unaccounted,
            unit=unit,
            shares=self.shares,
        )


# The type of the plans of a client's releases.
Plans = tuple[ReleasePlan, ...]


def check_plans(plans: Sequence[ReleasePlan]) -> None:
    """Checks that a round has at least one plan, and that plan names are unique.

    Raises:
        PrivacySettingError: there is no plan, or two plans have the same name.
    """
    require(bool(plans), "plans", "must contain at least one ReleasePlan for a round", plans)
    names = [plan.name for plan in plans]
    require(len(set(names)) == len(names), "plans", "of a round must have different names", names)


@dataclass(frozen=True)
class UnaccountedNoise:
    """The noise of the mechanism "paper", without a privacy guarantee.

    Attributes:
        release: the row that the ledger records. It states σ and the clip.
        secret: the client's secret generator, which draws the noise.
    """

    release: Release
    secret: SecretGenerator

    @property
    def noise_std(self) -> float:
        """The standard deviation σ𝒞 of the noise."""
        return self.release.noise_multiplier * self.release.sensitivity


class ReleaseBudget(Generic[S]):
    """The charged mechanisms that one step of a client may use.

    A step of the method takes each mechanism once, by the name of its plan.

    Args:
        exchange: the exchange, "main" or "first".
        charged: the plans of the exchange, each with its charged mechanism.
    """

    def __init__(self, exchange: str, charged: Sequence[tuple[ReleasePlan, S]]) -> None:
        self._exchange = exchange
        self._plans: dict[str, ReleasePlan] = {}
        self._unused: dict[str, S] = {}
        for plan, mechanism in charged:
            self._plans[plan.name] = plan
            self._unused[plan.name] = mechanism

    def plan(self, name: str) -> ReleasePlan:
        """Returns the plan with the given name.

        Raises:
            UnplannedReleaseError: the client was not charged for such a plan in this exchange.
        """
        if name not in self._plans:
            raise UnplannedReleaseError(
                f"release {name!r} is not planned for the {self._exchange} exchange (planned: "
                f"{', '.join(self._plans) or 'none'}). Add it to Method.release_plans"
            ).with_code("release.unplanned_name")
        return self._plans[name]

    @property
    def plans(self) -> list[ReleasePlan]:
        """The exchange's plans."""
        return list(self._plans.values())

    @property
    def unused(self) -> bool:
        """True if `take` has not returned any mechanism yet.

        In this case no noise was drawn, so a step that failed may be repeated without another
        charge.
        """
        return len(self._unused) == len(self._plans)

    def check(self, name: str) -> None:
        """Checks that `take` would return a mechanism, without taking it.

        Raises:
            UnplannedReleaseError: this exchange has no such plan, or its mechanism was taken
                before.
        """
        self.plan(name)
        if name not in self._unused:
            raise UnplannedReleaseError(f"release {name!r} is used twice in a round. Use it once")

    def take(self, name: str) -> S:
        """Returns the charged mechanism for the plan with the given name.

        Each mechanism can be taken only once.

        Raises:
            UnplannedReleaseError: this exchange has no such plan, or its mechanism was taken
                before.
        """
        self.check(name)
        return self._unused.pop(name)


def charge_round(
    plans: Sequence[ReleasePlan],
    round: int,
    noise_multiplier: float,
    guard: BudgetEnforcer,
    secret: SecretGenerator,
    *,
    exchange: str = MAIN,
    make_mechanism: MakeMechanism = GaussianSumMechanism,
) -> ReleaseBudget[GaussianSumMechanism]:
    """Charges a client for all releases in an exchange before any noise can be drawn.

    Args:
        plans: the plans of the round. Plans for another exchange are not charged.
        round: the number of the round.
        noise_multiplier: the run's σ.
        guard: the client's ledger and cap.
        secret: the client's secret generator.
        exchange: the exchange, "main" or "first".
        make_mechanism: a function that charges and creates a mechanism. An audit replaces it to
            observe the releases.

    Returns:
        The charged mechanisms.

    Raises:
        BudgetExceededError: a release would exceed the cap. Releases that were charged before it
            remain charged.
    """
    charged: list[tuple[ReleasePlan, GaussianSumMechanism]] = []
    for plan in plans:
        if plan.exchange == exchange:
            grid = plan.grid(noise_multiplier)  # may refuse, before the charge
            mechanism = make_mechanism(
                plan.release(round, noise_multiplier), plan.groups, guard, secret
            )
            mechanism.shares = plan.shares
            mechanism.grid = grid
            charged.append((plan, mechanism))
    return ReleaseBudget(exchange, charged)
