"""The releases of a private run and their privacy cost, computed only from public values.

A server makes the plan before its first round, from public settings, the public context, and the
history of releases that each client states when it joins; it needs no client's data or ledger
object. The plan is then fixed and public: clients charge themselves by it (`ClientBudget`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fedsynth.config.checks import (
    check_custom_model,
    check_method,
    check_participation,
    mechanism_of,
    most_records,
    refuse_own_proxy,
)
from fedsynth.config.participation import Participation, PlannedEpsilon, most_rounds, shown_rounds
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.privacy import accounting
from fedsynth.privacy.accounting import Totals, calibrate_noise_multiplier, totals
from fedsynth.privacy.disclosure import MechanismFacts, mechanism_facts
from fedsynth.privacy.errors import (
    BudgetExceededError,
    UnaccountedReleaseError,
    UnplannedReleaseError,
)
from fedsynth.privacy.grid import Grid
from fedsynth.privacy.guard import NOTHING_LEFT, BudgetEnforcer, EpsilonCap
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import ReleasePlan, check_plans
from fedsynth.privacy.releases import Release, check_delta
from fedsynth.privacy.report.build import reasons_in_ledgers
from fedsynth.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class PrivacyPlan:
    """The plan of a private run; create it with `make`.

    Attributes:
        run: the run's settings, as given.
        spec: the data set's specification, which is public.
        nominal_size: the public, nominal number of records (or users) of a client.
        privacy: the privacy settings, with mechanism and σ determined.
        plans: the kinds of release of a round, the chief one first.
        max_records: the public bound on the number of records of all clients.
        histories: the contents of each client's ledger when it joined, in client order.
    """

    run: RunSettings
    spec: DatasetSpec
    nominal_size: float
    privacy: PrivacySettings
    plans: tuple[ReleasePlan, ...]
    max_records: int
    histories: tuple[History, ...] = ()

    @classmethod
    def checked(cls, settings: RunSettings, context: RoundContext) -> PrivacyPlan:
        """Returns the plan before any client has joined: without histories, and without σ if a
        budget is given. Thus invalid settings are found before a ledger is opened.

        Raises:
            UnaccountedReleaseError: the method uploads something that no mechanism protects.
            PrivacySettingError: δ too large for the declared number of records, ….
        """
        stated = settings.privacy
        method = settings.method
        spec = context.spec
        if stated is None:
            raise SettingError(None, "privacy", "must be set for a private run")
        check_method(method)
        refuse_own_proxy(method, spec)
        mechanism = mechanism_of(method, stated)
        limit = most_records(spec, stated)
        check_delta(stated.delta, limit)
        privacy = replace(stated, mechanism=mechanism)
        plans = tuple(method.release_plans(privacy, context))
        check_plans(plans)
        check_custom_model(settings, context, plans)
        check_participation(settings, plans)
        return cls(settings, spec, context.nominal_size, privacy, plans, limit)

    @classmethod
    def make(
        cls, settings: RunSettings, context: RoundContext, histories: Sequence[History]
    ) -> PrivacyPlan:
        """Returns the plan of a run with these clients, with σ determined.

        Args:
            settings: the run's settings, with `privacy` set.
            context: the public context of round 1.
            histories: the contents of each client's ledger, in client order.

        Raises:
            UnaccountedReleaseError: the method uploads something that no mechanism protects, or a
                ledger holds a release without any guarantee although a budget is given.
            PrivacySettingError: δ too large for the declared number of records, no σ reaches ε, ….
            BudgetExceededError: a client's earlier releases have spent the budget.
            LedgerError: a ledger holds releases that protect another unit.
        """
        plan = replace(cls.checked(settings, context), histories=tuple(histories))
        privacy = plan.privacy
        reasons = plan.reasons(plan.histories)
        if plan.facts.guaranteed and privacy.epsilon is not None and reasons:
            raise UnaccountedReleaseError(
                f"ε = {privacy.epsilon:g} cannot be guaranteed: a ledger in {privacy.ledger} "
                f"contains a release without any guarantee ({reasons[0]}), which cannot be "
                "undone; set only privacy.noise_multiplier to add noise without stating ε"
            )
        if privacy.noise_multiplier is None:
            privacy = replace(privacy, noise_multiplier=plan._calibrated())
        for history in plan.histories:
            plan.guard(Ledger(history.client)).check_unit(history.releases)
        return replace(plan, privacy=privacy)

    # -------------------------------------------------------------------------- what is released

    @property
    def chief(self) -> ReleasePlan:
        """The round's most important release, which headlines report."""
        return self.plans[0]

    @property
    def facts(self) -> MechanismFacts:
        """The guarantee of the run's mechanism, or the reasons why it has none."""
        return mechanism_facts(self.privacy.mechanism or self.chief.mechanism)

    @property
    def sigma(self) -> float:
        """The noise multiplier σ.

        Raises:
            SettingError: σ is not determined yet (`checked`).
        """
        if self.privacy.noise_multiplier is None:
            raise SettingError(
                "privacy", "noise_multiplier", "is not known yet: no client has joined"
            )
        return self.privacy.noise_multiplier

    def signal_to_noise(self, release: ReleasePlan) -> float | None:
        """Returns the signal-to-noise ratio of the sum over all clients
        (`ReleasePlan.signal_to_noise`), or None if no signal is named.
        """
        clients = self.run.partition.clients
        return release.signal_to_noise(self.sigma, clients * self.nominal_size, clients)

    @property
    def releases(self) -> int:
        """The number of noisy releases of a client in a round; if rounds differ, in the first."""
        return sum(plan.steps for plan in self.round_plans(1))

    @property
    def all_releases(self) -> int:
        """The number of noisy releases of a client that takes part in every round."""
        if self.run.method.same_releases_every_round:
            return self.run.rounds * self.releases
        return sum(row.steps for row in self.planned())

    def round_plans(self, number: int) -> tuple[ReleasePlan, ...]:
        """Returns the releases of the round with this number.

        Raises:
            UnplannedReleaseError: the method names a release that is not planned.
        """
        if self.run.method.same_releases_every_round:
            return self.plans
        planned = tuple(self.run.method.round_plans(self.plans, number))
        if tuple(filter(planned.__contains__, self.plans)) != planned:
            raise UnplannedReleaseError(
                f"{self.run.method.name} may only leave out planned releases in round "
                f"{number}, but changes others"
            )
        return planned

    @property
    def noise(self) -> dict[str, float]:
        """The standard deviation of the noise in each coordinate of a release, by plan."""
        noise = {}
        for plan in self.plans:
            row = self._row(plan, 1, self.sigma)
            noise[plan.name] = row.noise_multiplier * row.sensitivity
        return noise

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids, by plan, to which clients round releases that are summed before they are seen.

        Raises:
            PrivacySettingError: the noise is too small for the grid.
        """
        grids = {}
        for plan in self.plans:
            grid = plan.grid(self.sigma)
            if grid is not None:
                grids[plan.name] = grid
        return grids

    def in_context(self, context: RoundContext) -> RoundContext:
        """Returns the context of the run's steps, with the public values of the plan."""
        return replace(context, privacy=self.privacy, noise=self.noise, grids=self.grids)

    def planned(
        self, rounds: Sequence[int] | None = None, noise_multiplier: float | None = None
    ) -> list[Release]:
        """Returns the rows that a participating client's ledger gets, without exceptions for single
        clients (`client_rows`).

        Args:
            rounds: the round numbers; None: all rounds of the run.
            noise_multiplier: a σ in place of the plan's.
        """
        if noise_multiplier is None:
            noise_multiplier = self.sigma
        if rounds is None:
            rounds = range(1, self.run.rounds + 1)
        rows = []
        for number in rounds:
            for plan in self.round_plans(number):
                rows.append(self._row(plan, number, noise_multiplier))
        return rows

    def _totals(self, rounds: int, sigma: float | None = None) -> Totals:
        """Returns the total releases of a client that takes part in this many rounds. If rounds
        differ, these are the first ones, because then all clients take part in every round.
        """
        if self.run.method.same_releases_every_round:
            return totals(self.planned([1], sigma)).times(rounds)
        return totals(self.planned(range(1, rounds + 1), sigma))

    def client_plans(self, client: int, context: RoundContext) -> tuple[ReleasePlan, ...]:
        """Returns the releases of one client in the context's round: the plans, with the method's
        exceptions for that client.

        Raises:
            UnplannedReleaseError: the method changes anything other than the dimension or the
                number of steps, which may only decrease.
        """
        planned = self.round_plans(context.round)
        plans = tuple(self.run.method.client_plans(planned, client, context))
        if len(plans) != len(planned):
            raise UnplannedReleaseError(
                f"{self.run.method.name} plans {len(planned)} releases, but {len(plans)} for "
                f"client {client}"
            )
        for plan, client_plan in zip(planned, plans, strict=True):
            allowed = replace(
                plan,
                steps=client_plan.steps,
                dimension=client_plan.dimension,
                groups=client_plan.groups,
            )
            if client_plan != allowed or client_plan.steps > plan.steps:
                raise UnplannedReleaseError(
                    f"{self.run.method.name} may change only the dimension or lower the "
                    f"steps for a client: {client_plan} of client {client} does not fit the "
                    f"plan {plan}"
                )
        return plans

    def client_rows(self, client: int, context: RoundContext) -> list[Release]:
        """Returns the rows that a client's ledger gets for the context's round."""
        plans = self.client_plans(client, context)
        return [self._row(plan, context.round, self.sigma) for plan in plans]

    def _row(self, plan: ReleasePlan, number: int, sigma: float) -> Release:
        return plan.release(
            number, sigma, unit=self.privacy.unit, unaccounted=self.facts.unaccounted
        )

    # ---------------------------------------------------------------------------- what it costs

    @cached_property
    def participation(self) -> Participation:
        """The public schedule of the clients that take part in each round."""
        return self.run.schedule()

    def reasons(self, histories: Sequence[History]) -> list[str]:
        """Returns the releases in ledgers that have no guarantee, with the reasons."""
        return reasons_in_ledgers({history.client: history.releases for history in histories})

    def guaranteed(self, histories: Sequence[History]) -> bool:
        """Returns whether an ε can be stated: both the mechanism and all current contents of the
        clients' ledgers must have a guarantee.
        """
        return self.facts.guaranteed and not self.reasons(histories)

    def epsilon(self, histories: Sequence[History]) -> float:
        """Returns ε of the worst client, from the current contents of the clients' ledgers."""
        return max(map(self._epsilon, _distinct(histories)[0]))

    def planned_epsilon(self) -> float:
        """Returns ε of the worst client after the whole run, including what its ledger
        held before.
        """
        return self.planned_epsilon_by_round()[self.run.rounds]

    def planned_epsilon_by_round(self) -> PlannedEpsilon:
        """Returns ε of the worst client after each round, including what its ledger held before;
        for a long run, after its `shown_rounds`.
        """

        def epsilon_after(position: int) -> float:
            return max(
                self._epsilon(spent + self._totals(rounds[position]))
                for spent, rounds in self._attendance
            )

        return PlannedEpsilon(shown_rounds(self.run.rounds), epsilon_after)

    def most_rounds(self) -> int:
        """Returns the number of the run's rounds in which the busiest client takes part."""
        return max(rounds[-1] for _, rounds in self._attendance)

    def guard(self, ledger: Ledger, cap: EpsilonCap | None = None) -> BudgetEnforcer:
        """Returns a guard that refuses any release that would make this ledger exceed the plan's
        cap.

        Args:
            ledger: a client's ledger.
            cap: the owner's cap, independent of the run; None: only the run's cap.
        """
        privacy = self.privacy
        return BudgetEnforcer(
            ledger, privacy.delta, privacy.epsilon, privacy.adjacency, privacy.unit, owner=cap
        )

    def check_cap(self) -> None:
        """Refuses a cap that allows no round even if nothing was spent before.

        Raises:
            BudgetExceededError: this is a mistake in the settings, not a run that ends early.
        """
        if self.facts.guaranteed:
            self.guard(Ledger("any")).check(self.planned([1]))

    def check_round(self, number: int, histories: Sequence[History]) -> None:
        """Checks for every client of a round that it may be charged, given the contents of its
        ledger; each client checks this itself, too (`ClientBudget.check`).

        Raises:
            BudgetExceededError: some client's cap would be exceeded.
        """
        if not self.facts.guaranteed:
            return
        planned = self.planned([number])
        for client in self.participation.in_round(number):
            history = histories[client]
            self.guard(Ledger(history.client)).check_budget(history.releases, planned)

    @cached_property
    def _attendance(self) -> list[tuple[Totals, list[int]]]:
        """Pairs of a ledger's earlier releases and the numbers of the first n rounds in which its
        client takes part, one for each n of the run's `shown_rounds`; without clients that others
        dominate.
        """
        distinct, groups = _distinct(self.histories)
        maxima = most_rounds(self.participation, groups, shown_rounds(self.run.rounds))
        return list(zip(distinct, maxima.T.tolist(), strict=True))

    def _epsilon(self, rows: Totals) -> float:
        return accounting.epsilon(rows, self.privacy.delta, self.privacy.adjacency)

    def _calibrated(self) -> float:
        """Returns the σ with which the planned run, on top of each ledger's contents, reaches ε for
        the client that needs most noise.
        """
        return max(self._needed_sigma(spent, rounds[-1]) for spent, rounds in self._attendance)

    def _needed_sigma(self, spent: Totals, rounds: int) -> float:
        """Returns the σ with which this many rounds, on top of `spent`, reach ε."""
        if not rounds:
            return 0.0
        privacy = self.privacy
        target = privacy.epsilon or math.inf
        spent_epsilon = self._epsilon(spent)
        if spent_epsilon >= target * (1 - NOTHING_LEFT):
            raise BudgetExceededError(
                f"the budget ε = {target:g} is exhausted: a client's ledger has spent "
                f"{spent_epsilon:.4g}"
            )
        return calibrate_noise_multiplier(
            target,
            privacy.delta,
            lambda sigma: spent + self._totals(rounds, sigma),
            privacy.adjacency,
        )


def _distinct(histories: Sequence[History]) -> tuple[list[Totals], tuple[int, ...]]:
    """Returns the distinct totals of the histories, and for each history the index of its total."""
    positions: dict[Totals, int] = {}
    groups = []
    for history in histories:
        groups.append(positions.setdefault(totals(history.releases), len(positions)))
    return list(positions), tuple(groups)
