"""What one client may spend in one exchange of a round: series that are charged already, by name.

The client's budget charges its ledger for everything that the plan names, and only then there is an
`Allowance`. A step takes each series by its plan's name, once. It holds no ledger and no guard, so
that a release outside the plan cannot be written down in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedsynth.privacy.errors import UnplannedReleaseError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.plans import MAIN, PrivatePlan
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release

S = TypeVar("S")

MakeSeries = Callable[[Release, int, Guard, SecretGenerator], GaussianSums]
"""(release, groups, a client's guard, its secret) -> a charged series, as of `GaussianSums`."""


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
        """The plan with this name, as this client was charged for it.

        Raises:
            UnplannedReleaseError: there is none in this exchange.
        """
        if name in self._plans:
            return self._plans[name]
        if name in self._elsewhere:
            raise UnplannedReleaseError(
                f"{name!r} is planned for the {self._elsewhere[name]} phase of a round, and was "
                f"asked for in the {self._phase} one"
            )
        known = ", ".join(map(repr, (*self._plans, *self._elsewhere)))
        raise UnplannedReleaseError(
            f"no release {name!r} is planned (Method.private_plans names {known})"
        )

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
    here = [plan for plan in plans if plan.phase == phase]
    granted: list[tuple[PrivatePlan, GaussianSums]] = []
    for plan in here:
        row = plan.release(round, noise_multiplier)
        grid = plan.grid(noise_multiplier)
        series = make_series(row, plan.groups, guard, secret)
        series.shares = plan.shares
        series.grid = grid
        granted.append((plan, series))
    return Allowance(phase, granted, [plan for plan in plans if plan.phase != phase])
