"""What a method releases of each client in a round, and the charged series that its steps get.

A method names its plans once (`Method.private_plans`), before any data are read. A client's ledger
is charged for all plans of an exchange, and only then there is an `Allowance`: a step takes each
series by its plan's name, once. An allowance holds no ledger and no guard, so that a release
outside the plan cannot be charged in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsynth.privacy.errors import UnplannedReleaseError
from fedsynth.privacy.grid import Addends, Grid, grid_of
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import RECORD, Release, require

S = TypeVar("S")
MakeSeries = Callable[[Release, int, Guard, SecretGenerator], GaussianSums]
"""(release, groups, a client's guard, its secret) -> a charged series, as of `GaussianSums`."""
FIRST, MAIN = "first", "main"
PHASES = (FIRST, MAIN)
"""The exchanges of a round: some methods have one before the main one."""


@dataclass(frozen=True, kw_only=True)
class PrivatePlan:
    """One kind of release of a round: a series of noisy sums.

    Args:
        name: what a step asks for the series by, such as "images".
        quantity: what leaves the client, in words for ledger and report.
        mechanism: its name.
        clipped: what is clipped, in words.
        clip: L2 bound 𝒞 of one example's contribution.
        sample_rate: q of Poisson sampling.
        steps: releases in a round.
        dimension: coordinates of one release.
        groups: the sums that these coordinates are: one for each class, or one.
        noise_ratio: the release's noise multiplier over the run's σ.
        phase: the exchange that it is made in, "main" or "first".
        shares: H of secure aggregation: the noise that is charged is that of H clients together,
            each of whom adds 1/√H of its deviation; 1: every client adds all of it.
        addends: whose releases are added up before anybody sees them, and rounded for that; None:
            each is seen by itself.
        signal: norm of the sum over all clients' examples, over its bound (𝒞 for each example), in
            a public case that the method's documentation describes; None: it names none.

    Raises:
        PrivacySettingError: an unknown phase, no share, or a dimension that is not of equal groups.
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
    noise_ratio: float = 1.0
    phase: str = MAIN
    shares: int = 1
    addends: Addends | None = None
    signal: float | None = None

    def __post_init__(self) -> None:
        checks = (
            (self.phase in PHASES, "phase", f"must be one of {', '.join(PHASES)}"),
            (self.shares >= 1, "shares", "must be at least 1"),
            (
                self.groups >= 1 and self.dimension % self.groups == 0,
                "groups",
                f"must divide the {self.dimension} coordinates evenly",
            ),
        )
        for ok, key, rule in checks:
            require(ok, key, f"of plan {self.name!r} {rule}", getattr(self, key))

    def signal_to_noise(
        self, noise_multiplier: float, records: float, clients: int
    ) -> float | None:
        """Norm of the pooled sum in the public case over the root mean square of its noise's norm:
        signal·n·𝒞 / (σ·𝒞·√(K/H)·√D).

        Args:
            noise_multiplier: the run's σ.
            records: n, the public number of examples (or users) of all clients.
            clients: K, who each add noise.

        Returns:
            The ratio; None where the plan names no signal.
        """
        if self.signal is None:
            return None
        noise = noise_multiplier * self.noise_ratio
        return self.signal * records / (noise * math.sqrt(clients / self.shares * self.dimension))

    def grid(self, noise_multiplier: float) -> Grid | None:
        """What a client rounds its noisy release to; None: to no grid, as each is seen by itself.

        Args:
            noise_multiplier: the run's σ.

        Raises:
            PrivacySettingError: see `grid_of`.
        """
        if self.addends is None:
            return None
        charged = noise_multiplier * self.noise_ratio * self.clip
        return grid_of(self.clip, charged / math.sqrt(self.shares), self.shares, self.addends)

    def release(
        self,
        round: int,
        noise_multiplier: float,
        *,
        unit: str = RECORD,
        unaccounted: str | None = None,
    ) -> Release:
        """The ledger's row.

        Args:
            round: its number.
            noise_multiplier: the run's σ.
            unit: who is protected, one of `releases.UNITS`.
            unaccounted: why nothing is guaranteed, where nothing is.
        """
        return Release(
            round=round,
            quantity=self.quantity,
            mechanism=self.mechanism,
            clipped=self.clipped,
            noise_multiplier=noise_multiplier * self.noise_ratio,
            sensitivity=self.clip,
            sample_rate=self.sample_rate,
            sampler="poisson" if self.sample_rate < 1 else "full",
            steps=self.steps,
            dimension=self.dimension,
            unaccounted=unaccounted,
            unit=unit,
            shares=self.shares,
        )


def check_plans(plans: Sequence[PrivatePlan]) -> None:
    """Refuses what no step could ask for by name.

    Raises:
        PrivacySettingError: there is no plan, or two have the same name.
    """
    require(bool(plans), "plans", "must hold at least one: what a round releases", plans)
    names = [plan.name for plan in plans]
    require(len(set(names)) == len(names), "plans", "of a round must have different names", names)


@dataclass(frozen=True)
class UnaccountedNoise:
    """Noise of a mechanism without any guarantee (`paper`), for a row that the ledger holds.

    Attributes:
        release: the ledger's row, with σ and the clip.
        secret: the client's secret generator.
    """

    release: Release
    secret: SecretGenerator

    @property
    def deviation(self) -> float:
        """σ𝒞."""
        return self.release.noise_multiplier * self.release.sensitivity


class Allowance(Generic[S]):
    """One client's, for one exchange of one round.

    Args:
        phase: the exchange.
        granted: each plan of it, with what was charged for it.
        elsewhere: the round's plans of other exchanges.
    """

    def __init__(
        self,
        phase: str,
        granted: Sequence[tuple[PrivatePlan, S]],
        elsewhere: Sequence[PrivatePlan] = (),
    ) -> None:
        self._phase = phase
        self._plans = {plan.name: plan for plan, _ in granted}
        self._left = {plan.name: series for plan, series in granted}
        self._elsewhere = {plan.name: plan.phase for plan in elsewhere}

    def plan(self, name: str) -> PrivatePlan:
        """Returns the plan with this name, as this client was charged for it.

        Raises:
            UnplannedReleaseError: there is none in this exchange.
        """
        if name in self._plans:
            return self._plans[name]
        known = ", ".join(map(repr, (*self._plans, *self._elsewhere)))
        reason = f"no release {name!r} is planned (Method.private_plans names {known})"
        if name in self._elsewhere:
            reason = (
                f"{name!r} is planned for the {self._elsewhere[name]} phase of a round, and was "
                f"asked for in the {self._phase} one"
            )
        raise UnplannedReleaseError(reason)

    @property
    def untouched(self) -> bool:
        """Whether nothing of it was handed out: then nothing was drawn, and an attempt that failed
        may be made again on the same charge."""
        return len(self._left) == len(self._plans)

    def check(self, name: str) -> None:
        """Refuses a name that `take` would refuse, and takes nothing."""
        self.plan(name)
        if name not in self._left:
            raise UnplannedReleaseError(
                f"the series of plan {name!r} was handed out before: it is charged once a round"
            )

    def take(self, name: str) -> S:
        """What was charged for the plan with this name, handed out once.

        Raises:
            UnplannedReleaseError: no such plan in this exchange, or it was handed out before.
        """
        self.check(name)
        return self._left.pop(name)


class GroupAllowance(Generic[S]):
    """The allowances of a group of clients, in the group's order."""

    def __init__(self, each: Sequence[Allowance[S]]) -> None:
        self._each = tuple(each)

    def plan(self, name: str) -> PrivatePlan:
        """The plan with this name, the same for all clients of the group.

        Raises:
            UnplannedReleaseError: there is none, or it differs between clients (in steps, or in
                dimension): each then has to be asked alone.
        """
        self._refuse_nothing(name)
        first, *others = [one.plan(name) for one in self._each]
        if any(other != first for other in others):
            raise UnplannedReleaseError(
                f"the clients of this group have different plans {name!r}: ask alone(position)"
            )
        return first

    def take(self, name: str) -> list[S]:
        """What was charged for the plan with this name, of each client; none where one refuses."""
        self._refuse_nothing(name)
        for one in self._each:
            one.check(name)
        return [one.take(name) for one in self._each]

    def alone(self, position: int) -> GroupAllowance[S]:
        """Of one client of the group: what either hands out is gone for both."""
        return GroupAllowance(self._each[position : position + 1])

    def _refuse_nothing(self, name: str) -> None:
        if not self._each:
            raise UnplannedReleaseError(f"release {name!r}: these clients were charged for nothing")


def authorise(
    plans: Sequence[PrivatePlan],
    round: int,
    noise_multiplier: float,
    guard: Guard,
    secret: SecretGenerator,
    *,
    phase: str = MAIN,
    make_series: MakeSeries = GaussianSums,
) -> Allowance[GaussianSums]:
    """Charges a client for everything that an exchange releases; only then can noise be drawn.

    Args:
        plans: of the round; those of other exchanges are not charged.
        round: its number.
        noise_multiplier: the run's σ.
        guard: the client's ledger and cap.
        secret: the client's secret generator.
        phase: the exchange.
        make_series: what charges and makes a series; an audit watches them.

    Raises:
        BudgetExceededError: the cap would be exceeded; what was charged before it stays charged.
    """
    granted: list[tuple[PrivatePlan, GaussianSums]] = []
    elsewhere = []
    for plan in plans:
        if plan.phase != phase:
            elsewhere.append(plan)
            continue
        grid = plan.grid(noise_multiplier)
        row = plan.release(round, noise_multiplier)
        series = make_series(row, plan.groups, guard, secret)
        series.shares = plan.shares
        series.grid = grid
        granted.append((plan, series))
    return Allowance(phase, granted, elsewhere)
