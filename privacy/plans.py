"""The planned releases of a method in a round, and the charged series that its steps receive.

A method names its plans once (`Method.release_plans`), before any data are read. A client's ledger
is charged for all plans of an exchange; only then is there an `ReleaseBudget`, from which a step takes
each series once, by its plan's name. An allowance holds neither ledger nor guard, so a step cannot
charge a release outside the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsynth.privacy.errors import UnplannedReleaseError
from fedsynth.privacy.grid import Addends, Grid, grid_of
from fedsynth.privacy.guard import BudgetEnforcer
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import FULL, POISSON, RECORD, Release, require

S = TypeVar("S")
MakeSeries = Callable[[Release, int, BudgetEnforcer, SecretGenerator], GaussianSumMechanism]
"""(release, groups, a client's guard, its secret generator) -> a charged series, like
`GaussianSumMechanism`."""
FIRST, MAIN = "first", "main"
PHASES = (FIRST, MAIN)
"""The exchanges of a round; some methods have one before the main one."""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """One planned kind of release in a round: a series of noisy sums.

    Args:
        name: the name by which a step asks for the series, such as "images".
        quantity: the released quantity, in words for ledger and report.
        mechanism: the mechanism's name.
        clipped: the vector that is clipped, in words.
        clip: L2 bound 𝒞 of one example's contribution.
        sample_rate: q of Poisson sampling.
        steps: releases in a round.
        dimension: coordinates of one release.
        groups: number of sums into which the coordinates divide: one per class, or one.
        relative_noise_multiplier: the release's noise multiplier over the run's σ.
        phase: the exchange in which it is made, "main" or "first".
        shares: H of secure aggregation: the charged noise is that of H clients together, each of
            which adds noise of 1/√H of its standard deviation; 1: every client adds all of it.
        addends: the clients whose releases are rounded and summed before anyone sees them; None:
            each release is seen individually.
        signal: norm of the sum over all clients' examples, divided by its bound (𝒞 per example), in
            a public reference case that the method's documentation describes; None: no such case.

    Raises:
        PrivacySettingError: an unknown phase, fewer than one share, or a dimension that `groups`
            does not divide.
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
    phase: str = MAIN
    shares: int = 1
    addends: Addends | None = None
    signal: float | None = None

    def __post_init__(self) -> None:
        require(self.phase in PHASES, "phase", f"must be one of {', '.join(PHASES)}", self.phase)
        require(self.shares >= 1, "shares", "must be at least 1", self.shares)
        divides = self.groups >= 1 and self.dimension % self.groups == 0
        rule = f"must divide the {self.dimension} coordinates evenly"
        require(divides, "groups", rule, self.groups)

    def signal_to_noise(
        self, noise_multiplier: float, records: float, clients: int
    ) -> float | None:
        """Returns the norm of the pooled sum in the public reference case, divided by the root mean
        square of its noise's norm: signal·n·𝒞 / (σ·𝒞·√(K/H)·√D).

        Args:
            noise_multiplier: the run's σ.
            records: n, the public number of examples (or users) of all clients.
            clients: K, the number of clients, each of which adds noise.

        Returns:
            The ratio; None if the plan names no signal.
        """
        if self.signal is None:
            return None
        noise = noise_multiplier * self.relative_noise_multiplier
        return self.signal * records / (noise * math.sqrt(clients / self.shares * self.dimension))

    def grid(self, noise_multiplier: float) -> Grid | None:
        """Returns the grid to which a client rounds its noisy release, or None if it does not
        round.

        Args:
            noise_multiplier: the run's σ.

        Raises:
            PrivacySettingError: see `grid_of`.
        """
        if self.addends is None:
            return None
        charged = noise_multiplier * self.relative_noise_multiplier * self.clip
        return grid_of(self.clip, charged / math.sqrt(self.shares), self.shares, self.addends)

    def release(
        self,
        round: int,
        noise_multiplier: float,
        *,
        unit: str = RECORD,
        unaccounted: str | None = None,
    ) -> Release:
        """Returns the ledger row of this release.

        Args:
            round: the round's number.
            noise_multiplier: the run's σ.
            unit: the privacy unit, one of `releases.UNITS`.
            unaccounted: the reason why it has no guarantee, or None.
        """
        return Release(
            round=round,
            quantity=self.quantity,
            mechanism=self.mechanism,
            clipped=self.clipped,
            noise_multiplier=noise_multiplier * self.relative_noise_multiplier,
            sensitivity=self.clip,
            sample_rate=self.sample_rate,
            sampler=POISSON if self.sample_rate < 1 else FULL,
            steps=self.steps,
            dimension=self.dimension,
            unaccounted=unaccounted,
            unit=unit,
            shares=self.shares,
        )


def check_plans(plans: Sequence[ReleasePlan]) -> None:
    """Refuses plans that steps cannot ask for by name.

    Raises:
        PrivacySettingError: there is no plan, or two have the same name.
    """
    require(bool(plans), "plans", "must contain at least one plan: the releases of a round", plans)
    names = [plan.name for plan in plans]
    require(len(set(names)) == len(names), "plans", "of a round must have different names", names)


@dataclass(frozen=True)
class UnaccountedNoise:
    """The noise of a mechanism without a guarantee (`paper`), for a row in the ledger.

    Attributes:
        release: the ledger row, with σ and the clip.
        secret: the client's secret generator.
    """

    release: Release
    secret: SecretGenerator

    @property
    def noise_std(self) -> float:
        """σ𝒞."""
        return self.release.noise_multiplier * self.release.sensitivity


class ReleaseBudget(Generic[S]):
    """One client's charged series, for one exchange of one round.

    Args:
        phase: the exchange.
        charged: the exchange's plans, each with its charged series.
    """

    def __init__(self, phase: str, charged: Sequence[tuple[ReleasePlan, S]]) -> None:
        self._phase = phase
        self._plans: dict[str, ReleasePlan] = {}
        self._unused: dict[str, S] = {}
        for plan, series in charged:
            self._plans[plan.name] = plan
            self._unused[plan.name] = series

    def plan(self, name: str) -> ReleasePlan:
        """Returns the plan with this name that this client was charged for.

        Raises:
            UnplannedReleaseError: this exchange has no such plan.
        """
        if name not in self._plans:
            raise UnplannedReleaseError(
                f"no release {name!r} is planned for the {self._phase} exchange of this round; "
                f"Method.release_plans names {', '.join(map(repr, self._plans))}"
            )
        return self._plans[name]

    @property
    def unused(self) -> bool:
        """True if no series was taken. Then no noise was drawn, and a failed attempt may be
        repeated on the same charge."""
        return len(self._unused) == len(self._plans)

    def check(self, name: str) -> None:
        """Refuses the names that `take` would refuse, without taking anything."""
        self.plan(name)
        if name not in self._unused:
            raise UnplannedReleaseError(
                f"the mechanism of plan {name!r} was already taken: it is charged once per round"
            )

    def take(self, name: str) -> S:
        """Returns the charged series of the plan with this name, once.

        Raises:
            UnplannedReleaseError: this exchange has no such plan, or its series was taken before.
        """
        self.check(name)
        return self._unused.pop(name)


class GroupReleaseBudget(Generic[S]):
    """The allowances of a group of clients, in the group's order."""

    def __init__(self, allowances: Sequence[ReleaseBudget[S]]) -> None:
        self._allowances = tuple(allowances)

    def plan(self, name: str) -> ReleasePlan:
        """Returns the plan with this name, if all clients of the group have the same.

        Raises:
            UnplannedReleaseError: there is none, or it differs between clients (in steps or
                dimension), so that each must be asked separately.
        """
        self._refuse_empty(name)
        plan = self._allowances[0].plan(name)
        for allowance in self._allowances:
            if allowance.plan(name) != plan:
                raise UnplannedReleaseError(
                    f"the clients of this group have different plans {name!r}: use select(position)"
                )
        return plan

    def take(self, name: str) -> list[S]:
        """Returns each client's charged series of the plan with this name; takes none if one
        refuses."""
        self._refuse_empty(name)
        for allowance in self._allowances:
            allowance.check(name)
        return [allowance.take(name) for allowance in self._allowances]

    def of_client(self, position: int) -> GroupReleaseBudget[S]:
        """Returns one client's group allowance; a series taken from either is taken from both."""
        return GroupReleaseBudget(self._allowances[position : position + 1])

    def _refuse_empty(self, name: str) -> None:
        if not self._allowances:
            raise UnplannedReleaseError(f"release {name!r}: there are no clients with a charge")


def charge_round(
    plans: Sequence[ReleasePlan],
    round: int,
    noise_multiplier: float,
    guard: BudgetEnforcer,
    secret: SecretGenerator,
    *,
    phase: str = MAIN,
    make_series: MakeSeries = GaussianSumMechanism,
) -> ReleaseBudget[GaussianSumMechanism]:
    """Charges a client for everything that an exchange releases, before any noise can be drawn.

    Args:
        plans: the round's plans; those of other exchanges are not charged.
        round: the round's number.
        noise_multiplier: the run's σ.
        guard: the client's ledger and cap.
        secret: the client's secret generator.
        phase: the exchange.
        make_series: charges and creates a series; an audit replaces it to observe the series.

    Raises:
        BudgetExceededError: the cap would be exceeded; earlier charges remain.
    """
    charged: list[tuple[ReleasePlan, GaussianSumMechanism]] = []
    for plan in plans:
        if plan.phase == phase:
            grid = plan.grid(noise_multiplier)  # may refuse, before the charge
            row = plan.release(round, noise_multiplier)
            series = make_series(row, plan.groups, guard, secret)
            series.shares = plan.shares
            series.grid = grid
            charged.append((plan, series))
    return ReleaseBudget(phase, charged)
