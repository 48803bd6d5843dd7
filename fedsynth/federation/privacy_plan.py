"""The releases of a private run and their privacy cost. Both are computed only from public values.

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
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.mechanisms import NOTHING_LEFT, BudgetEnforcer, EpsilonCap
from fedsynth.privacy.plans import ReleasePlan, check_plans
from fedsynth.privacy.randomness import Grid
from fedsynth.privacy.releases import Release, check_delta
from fedsynth.privacy.report.build import reasons_in_ledgers
from fedsynth.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class PrivacyPlan:
    """The plan of a private run. Create it with `make`.

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
        """Returns the plan before any client has joined. It has no histories, and no σ if a budget
        is set. Creating it detects invalid settings before a ledger is opened.

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
        """Returns the plan of a run with these clients, after σ has been calibrated.

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
                f"privacy.epsilon={privacy.epsilon:g} cannot be guaranteed, because the ledgers in "
                f"{privacy.ledger} contain a release without a guarantee: {reasons[0]}. Set only "
                "privacy.noise_multiplier"
            )
        if privacy.noise_multiplier is None:
            privacy = replace(privacy, noise_multiplier=plan._calibrated())
        for history in plan.histories:
            plan.guard(Ledger(history.client)).check_unit(history.releases)
        return replace(plan, privacy=privacy)

    # -------------------------------------------------------------------------- what is released

    @property
    def chief(self) -> ReleasePlan:
        """Returns the most important release of a round, which summaries describe."""
        return self.plans[0]

    @property
    def facts(self) -> MechanismFacts:
        """Returns the guarantee of the run's mechanism, or the reasons why it has none."""
        return mechanism_facts(self.privacy.mechanism or self.chief.mechanism)

    @property
    def sigma(self) -> float:
        """Returns the noise multiplier σ.

        Raises:
            SettingError: σ is not determined yet (`checked`).
        """
        if self.privacy.noise_multiplier is None:
            raise SettingError(
                "privacy", "noise_multiplier", "is unknown before the clients have joined"
            )
        return self.privacy.noise_multiplier

    def signal_to_noise(self, release: ReleasePlan) -> float | None:
        """Returns the signal-to-noise ratio of the sum over all clients
        (`ReleasePlan.signal_to_noise`), or None if the method does not state a signal."""
        clients = self.run.partition.clients
        return release.signal_to_noise(self.sigma, clients * self.nominal_size, clients)

    @property
    def releases(self) -> int:
        """Returns the number of noisy releases of a client in a round. If rounds differ, this is
        the number in the first round."""
        return sum(plan.steps for plan in self.round_plans(1))

    @property
    def all_releases(self) -> int:
        """Returns the number of noisy releases of a client that takes part in every round."""
        if self.run.method.same_releases_every_round:
            return self.run.rounds * self.releases
        return sum(row.steps for row in self.planned())

    def round_plans(self, number: int) -> tuple[ReleasePlan, ...]:
        """Returns the release plans of the round with this number.

        Raises:
            UnplannedReleaseError: the method names a release that is not planned.
        """
        if self.run.method.same_releases_every_round:
            return self.plans
        planned = tuple(self.run.method.round_plans(self.plans, number))
        if tuple(filter(planned.__contains__, self.plans)) != planned:
            raise UnplannedReleaseError(
                f"method {self.run.method.name} changes a planned release in round {number}. A round "
                "can only omit releases"
            )
        return planned

    @property
    def noise(self) -> dict[str, float]:
        """Returns the noise standard deviation in each coordinate of a release, for each plan."""
        noise = {}
        for plan in self.plans:
            row = self._row(plan, 1, self.sigma)
            noise[plan.name] = row.noise_multiplier * row.sensitivity
        return noise

    @property
    def grids(self) -> dict[str, Grid]:
        """Returns the rounding grid of each plan with secure aggregation, where clients round
        their releases and only the sum is revealed.

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
        """Returns the context for the run's steps, including the public values of the plan."""
        return replace(context, privacy=self.privacy, noise=self.noise, grids=self.grids)

    def planned(
        self, rounds: Sequence[int] | None = None, noise_multiplier: float | None = None
    ) -> list[Release]:
        """Returns the ledger entries of a participating client for a round. `client_rows` also
        includes exceptions for single clients.

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
        """Returns the total releases of a client that takes part in this number of rounds. If
        rounds differ, all clients take part in every round, so these are the releases of the first
        rounds."""
        if self.run.method.same_releases_every_round:
            return totals(self.planned([1], sigma)).times(rounds)
        return totals(self.planned(range(1, rounds + 1), sigma))

    def client_plans(self, client: int, context: RoundContext) -> tuple[ReleasePlan, ...]:
        """Returns the release plans of one client for the round of the context. They include the
        exceptions that the method makes for this client.

        Raises:
            UnplannedReleaseError: the method changes anything other than the dimension or the
                number of steps, which may only decrease.
        """
        planned = self.round_plans(context.round)
        plans = tuple(self.run.method.client_plans(planned, client, context))
        if len(plans) != len(planned):
            raise UnplannedReleaseError(
                f"method {self.run.method.name} must plan {len(planned)} releases for client "
                f"{client}, got {len(plans)}"
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
                    f"method {self.run.method.name} may change only the dimension of release "
                    f"{plan.name!r} for client {client} and reduce its steps, got {client_plan}"
                )
        return plans

    def client_rows(self, client: int, context: RoundContext) -> list[Release]:
        """Returns the ledger entries of one client for the round of the context."""
        plans = self.client_plans(client, context)
        return [self._row(plan, context.round, self.sigma) for plan in plans]

    def _row(self, plan: ReleasePlan, number: int, sigma: float) -> Release:
        return plan.release(
            number, sigma, unit=self.privacy.unit, unaccounted=self.facts.unaccounted
        )

    # ---------------------------------------------------------------------------- what it costs

    @cached_property
    def participation(self) -> Participation:
        """Returns the public schedule of the clients that take part in each round."""
        return self.run.schedule()

    def reasons(self, histories: Sequence[History]) -> list[str]:
        """Returns the releases in ledgers that have no guarantee, with the reasons."""
        return reasons_in_ledgers({history.client: history.releases for history in histories})

    def guaranteed(self, histories: Sequence[History]) -> bool:
        """Returns whether an ε can be stated. This requires a guarantee of the mechanism and of
        every entry in the clients' ledgers."""
        return self.facts.guaranteed and not self.reasons(histories)

    def epsilon(self, histories: Sequence[History]) -> float:
        """Returns the largest ε over all clients, computed from the current contents of their
        ledgers."""
        return max(map(self._epsilon, _distinct(histories)[0]))

    def planned_epsilon(self) -> float:
        """Returns the largest ε over all clients after the whole run. It includes earlier entries
        of their ledgers."""
        return self.planned_epsilon_by_round()[self.run.rounds]

    def planned_epsilon_by_round(self) -> PlannedEpsilon:
        """Returns the largest ε over all clients after each round. It includes earlier entries of
        their ledgers. For a long run, only the rounds in `shown_rounds` are computed."""

        def epsilon_after(position: int) -> float:
            return max(
                self._epsilon(spent + self._totals(rounds[position]))
                for spent, rounds in self._attendance
            )

        return PlannedEpsilon(shown_rounds(self.run.rounds), epsilon_after)

    def most_rounds(self) -> int:
        """Returns the largest number of rounds in which a client takes part."""
        return max(rounds[-1] for _, rounds in self._attendance)

    def guard(self, ledger: Ledger, cap: EpsilonCap | None = None) -> BudgetEnforcer:
        """Returns a budget enforcer that refuses every release with which this ledger would exceed
        the plan's cap.

        Args:
            ledger: a client's ledger.
            cap: the owner's cap, independent of the run; None: only the run's cap.
        """
        privacy = self.privacy
        return BudgetEnforcer(
            ledger, privacy.delta, privacy.epsilon, privacy.adjacency, privacy.unit, owner=cap
        )

    def check_cap(self) -> None:
        """Refuses a cap that is too small for even one round with empty ledgers.

        Raises:
            BudgetExceededError: this is a mistake in the settings, not a run that ends early.
        """
        if self.facts.guaranteed:
            self.guard(Ledger("any")).check(self.planned([1]))

    def check_round(self, number: int, histories: Sequence[History]) -> None:
        """Checks that every client of a round can be charged, given the contents of its ledger.
        Each client also checks this itself (`ClientBudget.check`).

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
        """Returns the earlier releases of each ledger together with the numbers of rounds in which
        its client takes part, for each n in `shown_rounds`. Clients whose cost another client
        exceeds are left out."""
        distinct, groups = _distinct(self.histories)
        maxima = most_rounds(self.participation, groups, shown_rounds(self.run.rounds))
        return list(zip(distinct, maxima.T.tolist(), strict=True))

    def _epsilon(self, rows: Totals) -> float:
        return accounting.epsilon(rows, self.privacy.delta, self.privacy.adjacency)

    def _calibrated(self) -> float:
        """Returns the smallest σ with which no client exceeds ε after the planned run, given the
        earlier entries of its ledger."""
        return max(self._needed_sigma(spent, rounds[-1]) for spent, rounds in self._attendance)

    def _needed_sigma(self, spent: Totals, rounds: int) -> float:
        """Returns the σ with which this number of rounds reaches ε, given the earlier releases
        `spent`."""
        if not rounds:
            return 0.0
        privacy = self.privacy
        target = privacy.epsilon or math.inf
        spent_epsilon = self._epsilon(spent)
        if spent_epsilon >= target * (1 - NOTHING_LEFT):
            raise BudgetExceededError(
                f"the budget ε = {target:g} is exhausted: a client has spent {spent_epsilon:.4g}"
            )
        return calibrate_noise_multiplier(
            target,
            privacy.delta,
            lambda sigma: spent + self._totals(rounds, sigma),
            privacy.adjacency,
        )


def _distinct(histories: Sequence[History]) -> tuple[list[Totals], tuple[int, ...]]:
    """Returns the distinct totals of the histories, and the index of the total of each history."""
    positions: dict[Totals, int] = {}
    groups = []
    for history in histories:
        groups.append(positions.setdefault(totals(history.releases), len(positions)))
    return list(positions), tuple(groups)
