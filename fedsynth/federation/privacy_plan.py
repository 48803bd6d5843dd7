"""A private run's plan, with all releases and their privacy cost.

The server makes the plan before the first round. It needs only public values: the settings, the
public context, and the earlier releases that each client states when it joins. The plan is then
fixed and public. Each client charges its ledger for the releases in the plan (`ClientBudget`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fedsynth import errors
from fedsynth.config import checks
from fedsynth.config.participation import Participation, most_rounds, shown_rounds
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import VaryingReleases
from fedsynth.core.context import RoundContext
from fedsynth.core.periods import has_periods
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.formatting import format_rounded_up
from fedsynth.privacy import accounting
from fedsynth.privacy.accounting import Totals, calibrate_noise_multiplier, totals
from fedsynth.privacy.disclosure import MechanismFacts, mechanism_facts
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.mechanisms import NOTHING_LEFT, BudgetEnforcer, EpsilonCap
from fedsynth.privacy.plans import EXCHANGES, Plans, ReleasePlan, check_plans
from fedsynth.privacy.randomness import Grid
from fedsynth.privacy.releases import RECORD, USER, Release, check_delta
from fedsynth.privacy.report.build import reasons_in_ledgers
from fedsynth.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class PrivacyPlan:
    """A private run's releases and privacy cost, planned before the first round.

    Create a plan with `make`, or with `checked` before the clients have joined.

    Attributes:
        run: the settings of the run, as given.
        spec: the public specification of the data set.
        nominal_size: the public number of records (or users) that a client is supposed to have.
        privacy: the privacy settings, in which the mechanism and σ are determined.
        plans: the kinds of release in a round. The most important one is first.
        max_records: the public bound on the number of records of all clients in all periods.
        histories: the content of each client's ledger when the client joined, in the order of the
            clients.
    """

    run: RunSettings
    spec: DatasetSpec
    nominal_size: float
    privacy: PrivacySettings
    plans: Plans
    max_records: int
    histories: tuple[History, ...] = ()

    @classmethod
    def checked(cls, settings: RunSettings, context: RoundContext) -> PrivacyPlan:
        """Checks the settings and returns the plan of the run before any client has joined.

        The plan has no histories. It has no σ if only a budget is set. It detects invalid settings
        before a ledger is opened.

        Raises:
            UnaccountedReleaseError: the method uploads a value that no mechanism protects.
            PrivacySettingError: a privacy setting is invalid, for example because δ is too large
                for the declared number of records.
        """
        stated = settings.privacy
        method = settings.method
        spec = context.spec
        if stated is None:
            raise SettingError(None, "privacy", "must be PrivacySettings, got None. Set it")
        checks.check_method(method)
        checks.refuse_own_proxy(method, spec)
        checks.check_unit(stated, spec)
        mechanism = checks.mechanism_of(method, stated)
        limit = checks.most_records(spec, stated)
        if has_periods(method):
            limit *= method.periods
            if stated.unit == USER:
                reason = (
                    "must be 'record' with several periods, because users may return. Set "
                    "privacy.unit=record"
                )
                raise SettingError("privacy", "unit", reason, value=USER)
        check_delta(stated.delta, limit)
        privacy = replace(stated, mechanism=mechanism)
        plans = tuple(method.release_plans(privacy, context))
        check_plans(plans)
        checks.check_participation(settings, plans)
        return cls(settings, spec, context.nominal_size, privacy, plans, limit)

    @classmethod
    def make(
        cls, settings: RunSettings, context: RoundContext, histories: Sequence[History]
    ) -> PrivacyPlan:
        """Returns the plan for a run whose clients have joined. If only a budget is set, chooses σ.

        Args:
            settings: the run's settings, with `privacy` set.
            context: the public context of round 1.
            histories: the content of each client's ledger, in the order of the clients.

        Raises:
            UnaccountedReleaseError: the method uploads a value that no mechanism protects, or a
                budget is set although a ledger holds a release without a guarantee.
            PrivacySettingError: a privacy setting is invalid, or no σ stays within the budget.
            BudgetExceededError: the earlier releases of a client have spent the budget.
            LedgerError: a ledger holds releases that protect another unit than this run.
        """
        plan = replace(cls.checked(settings, context), histories=tuple(histories))
        privacy = plan.privacy
        for history in plan.histories:
            plan.guard(Ledger(history.client)).check_unit(history.releases)
        reasons = reasons_in_ledgers(plan.histories)
        if plan.facts.guaranteed and privacy.epsilon is not None and reasons:
            raise errors.UnaccountedReleaseError(
                f"privacy.epsilon={privacy.epsilon:g} cannot be guaranteed, because the ledgers in "
                f"{privacy.ledger} contain a release without a guarantee, which cannot be undone: "
                f"{reasons[0]}. For a run without ε, set only privacy.noise_multiplier"
            ).with_code("release.ledger")
        if privacy.noise_multiplier is None:
            calibrated_plan = plan
            if has_periods(settings.method):  # σ is for all periods together
                run = replace(settings, method=settings.method.all_periods())
                calibrated_plan = replace(cls.checked(run, context), histories=plan.histories)
            privacy = replace(privacy, noise_multiplier=calibrated_plan._calibrated())
        return replace(plan, privacy=privacy)

    # -------------------------------------------------------------------------- what is released

    @property
    def chief(self) -> ReleasePlan:
        """The most important release of a round, as shown in summaries."""
        return self.plans[0]

    @property
    def unit(self) -> str:
        """The privacy unit of the run, "record" or "user"."""
        return self.privacy.unit or RECORD

    @property
    def facts(self) -> MechanismFacts:
        """The properties of the run's mechanism, such as its privacy guarantee."""
        return mechanism_facts(self.privacy.mechanism or self.chief.mechanism)

    @property
    def sigma(self) -> float:
        """The noise multiplier σ of the run.

        Raises:
            SettingError: σ is unknown, because the clients have not joined yet.
        """
        if self.privacy.noise_multiplier is None:
            raise SettingError(
                "privacy",
                "noise_multiplier",
                "is unknown until all clients have joined. Wait for them",
            )
        return self.privacy.noise_multiplier

    def signal_to_noise(self, release: ReleasePlan) -> float:
        """Returns a release's largest signal-to-noise ratio after it is summed over all clients."""
        clients = self.run.partition.clients
        rounds = sum(release in self.round_plans(n + 1) for n in range(self.run.rounds))
        return release.signal_to_noise(self.sigma, clients * self.nominal_size, clients, rounds)

    @property
    def releases(self) -> int:
        """The number of noisy releases that a client makes in a round.

        If the rounds differ, it is the number in the first round.
        """
        return sum(plan.steps for plan in self.round_plans(1))

    @property
    def all_releases(self) -> int:
        """The number of noisy releases from a client that takes part in every round."""
        if self.varies:
            return sum(row.steps for row in self.planned())
        return self.run.rounds * self.releases

    @property
    def varies(self) -> bool:
        """True if a client's releases differ between rounds."""
        return isinstance(self.run.method, VaryingReleases)

    def round_plans(self, number: int) -> Plans:
        """Returns the planned DP releases of round `number`.

        Raises:
            UnplannedReleaseError: the method changes a planned release or adds another release.
        """
        method = self.run.method
        if not isinstance(method, VaryingReleases):
            return self.plans
        planned = tuple(method.round_plans(self.plans, number, self.run.rounds))
        if tuple(filter(planned.__contains__, self.plans)) != planned:
            raise errors.UnplannedReleaseError(
                f"method {method.name}'s round_plans returned a changed or new release plan in "
                f"round {number}. Return only plans that were passed, in the same order"
            ).with_code("release.changed_plan")
        return planned

    @property
    def noise(self) -> dict[str, float]:
        """The noise's standard deviation per coordinate, by plan name."""
        noise = {}
        for plan in self.plans:
            row = self._row(plan, 1, self.sigma)
            noise[plan.name] = row.noise_multiplier * row.sensitivity
        return noise

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids to which clients round their noisy releases, by plan name.

        It contains only the releases that secure aggregation sums.

        Raises:
            PrivacySettingError: the noise is too small for a sum with secure aggregation.
        """
        grids = {}
        for plan in self.plans:
            grid = plan.grid(self.sigma)
            if grid is not None:
                grids[plan.name] = grid
        return grids

    def in_context(self, context: RoundContext) -> RoundContext:
        """Adds the plan's public values to the context, for the run's steps."""
        return replace(context, privacy=self.privacy, noise=self.noise, grids=self.grids)

    def planned(
        self, rounds: Sequence[int] | None = None, noise_multiplier: float | None = None
    ) -> list[Release]:
        """Returns the ledger rows of a client that takes part in some rounds.

        They do not include the exceptions that a method makes for a single client (`client_rows`).

        Args:
            rounds: the numbers of the rounds. None means all rounds of the run.
            noise_multiplier: the σ of the rows. None uses the σ of the plan.
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
        """Returns the total of all releases by a client that takes part in `rounds` rounds.

        If the rounds differ, all clients take part in every round. The totals are then those of the
        first rounds.
        """
        if self.varies:
            return totals(self.planned(range(1, rounds + 1), sigma))
        return totals(self.planned([1], sigma)).times(rounds)

    def client_plans(self, client: int, context: RoundContext) -> Plans:
        """Returns one client's planned DP releases in the current round.

        They include the exceptions that the method makes for this client.

        Raises:
            UnplannedReleaseError: for this client, the method changes more than the dimension and
                the groups of a release, or increases its number of steps.
        """
        planned = self.round_plans(context.round)
        plans = tuple(self.run.method.client_plans(planned, client, context))
        if len(plans) != len(planned):
            raise errors.UnplannedReleaseError(
                f"method {self.run.method.name}'s client_plans returned {len(plans)} plans for "
                f"client {client}, expected {len(planned)}. Return one plan for each given plan"
            ).with_code("release.plan_count")
        for plan, new in zip(planned, plans, strict=True):
            allowed = replace(plan, steps=new.steps, dimension=new.dimension, groups=new.groups)
            if new != allowed or new.steps > plan.steps:
                raise errors.UnplannedReleaseError(
                    f"method {self.run.method.name}'s client_plans changed client {client}'s plan "
                    f"{plan.name!r} to {new}. Change only dimension and groups, or reduce steps"
                ).with_code("release.changed_plan")
        return plans

    def client_rows(
        self, client: int, context: RoundContext, exchanges: Sequence[str] = EXCHANGES
    ) -> list[Release]:
        """Returns one client's ledger rows for the given exchanges in the context's round."""
        rows = []
        for plan in self.client_plans(client, context):
            if plan.exchange in exchanges:
                rows.append(self._row(plan, context.round, self.sigma))
        return rows

    def _row(self, plan: ReleasePlan, number: int, sigma: float) -> Release:
        return plan.release(number, sigma, unit=self.unit, unaccounted=self.facts.unaccounted)

    # ---------------------------------------------------------------------------- what it costs

    @cached_property
    def participation(self) -> Participation:
        """The public schedule that states which clients take part in each round."""
        return self.run.schedule()

    def guaranteed(self, histories: Sequence[History]) -> bool:
        """Returns True if the mechanism and all releases in the ledgers have a privacy guarantee.

        Otherwise no ε can be stated for the run.
        """
        return self.facts.guaranteed and not reasons_in_ledgers(histories)

    def epsilon(self, histories: Sequence[History]) -> float:
        """Returns the largest ε of all clients, computed from the contents of their ledgers."""
        return max(map(self._epsilon, _distinct(histories)[0]))

    @property
    def shown_rounds(self) -> tuple[int, ...]:
        """The numbers of the rounds whose ε is reported, in ascending order."""
        return shown_rounds(self.run.rounds)

    def planned_epsilon(self, number: int | None = None) -> float:
        """Returns the largest ε of all clients after a planned round, by default after the last
        one.

        It includes the releases that were in the ledgers when the clients joined. The computation
        can take up to a second with subsampling.

        Args:
            number: one of the `shown_rounds`.
        """
        position = self.shown_rounds.index(number or self.run.rounds)
        return max(
            self._epsilon(spent + self._totals(rounds[position]))
            for spent, rounds in self._attendance
        )

    def most_rounds(self) -> int:
        """Returns the largest number of rounds in which any client takes part."""
        return max(rounds[-1] for _, rounds in self._attendance)

    def allowed_rounds(self, cap: EpsilonCap) -> int:
        """Returns the number of planned rounds in which a data owner's cap lets a client take part.

        It counts the releases that were in the ledgers when the clients joined.
        """

        def exceeds(rounds: int) -> bool:
            further, adjacency = self._totals(rounds), self.privacy.adjacency
            ledgers = (spent + further for spent, _ in self._attendance)
            return any(accounting.epsilon(r, cap.delta, adjacency) > cap.epsilon for r in ledgers)

        return bisect_left(range(1, self.most_rounds() + 1), True, key=exceeds)

    def guard(self, ledger: Ledger, cap: EpsilonCap | None = None) -> BudgetEnforcer:
        """Returns an object that charges a ledger and refuses releases that would exceed the cap.

        Args:
            ledger: a client's ledger.
            cap: the data owner's cap, which applies in addition to the cap of the run. None means
                that the data owner has no cap.
        """
        privacy = self.privacy
        caps = list(filter(None, [cap]))
        if privacy.epsilon is not None:
            caps.append(EpsilonCap(privacy.epsilon, privacy.delta))
        return BudgetEnforcer(ledger, caps, privacy.adjacency, self.unit)

    def check_cap(self) -> None:
        """Checks that the cap allows at least one round if the ledgers are empty.

        Raises:
            BudgetExceededError: the cap is too small. The settings contain a mistake.
        """
        if self.facts.guaranteed:
            self.guard(Ledger("any of the run")).check(self.planned([1]))

    def check_round(self, number: int, histories: Sequence[History]) -> None:
        """Checks that all clients of a round can be charged for it.

        Each client also checks its own budget (`ClientBudget.check`).

        Args:
            number: the number of the round.
            histories: the content of each client's ledger, in the order of the clients.

        Raises:
            BudgetExceededError: the round would exceed the cap of a client.
        """
        if not self.facts.guaranteed:
            return
        planned = self.planned([number])
        for client in self.participation.in_round(number):
            history = histories[client]
            self.guard(Ledger(history.client)).check_budget(history.releases, planned)

    @property
    def totals(self) -> Totals:
        """The totals of all releases from a client with the most rounds."""
        return self._totals(self.most_rounds())

    def as_trial(self, epsilon: float) -> PrivacyPlan:
        """Returns the plan for this run as one trial of a private selection.

        A trial has its own budget and no earlier releases. Its plan has the σ for the budget, and
        no cap, because the selection has been charged for the trial.

        Args:
            epsilon: the budget of the trial.
        """
        plan = replace(
            self,
            privacy=replace(self.privacy, epsilon=epsilon, noise_multiplier=None),
            histories=tuple(History(history.client) for history in self.histories),
        )
        privacy = replace(plan.privacy, epsilon=None, noise_multiplier=plan._calibrated())
        return replace(plan, privacy=privacy)

    @cached_property
    def _attendance(self) -> list[tuple[Totals, list[int]]]:
        """The clients' earlier releases and numbers of rounds, from which ε is computed.

        Each pair has the totals of the releases that a ledger contained when its client joined.
        With it comes, for each n in `shown_rounds`, the number of the first n rounds in which the
        client takes part. Clients with equal totals share a pair with their largest numbers.
        """
        distinct, groups = _distinct(self.histories)
        maxima = most_rounds(self.participation, groups, self.shown_rounds)
        return list(zip(distinct, maxima.T.tolist(), strict=True))

    def _epsilon(self, rows: Totals) -> float:
        return accounting.epsilon(rows, self.privacy.delta, self.privacy.adjacency)

    def _calibrated(self) -> float:
        """Returns the smallest σ that keeps every client within the budget.

        It counts the releases that were in the ledgers when the clients joined.
        """
        return max(self._needed_sigma(spent, rounds[-1]) for spent, rounds in self._attendance)

    def _needed_sigma(self, spent: Totals, rounds: int) -> float:
        """Returns the σ that spends a client's budget in `rounds` more rounds.

        Args:
            spent: the totals of the client's earlier releases.
            rounds: the number of rounds in which the client takes part.
        """
        if not rounds:
            return 0.0
        privacy = self.privacy
        target = privacy.epsilon or math.inf
        spent_epsilon = self._epsilon(spent)
        if spent_epsilon >= target * (1 - NOTHING_LEFT):
            raise errors.BudgetExceededError(
                f"privacy.epsilon={target:g} leaves too little for a release of this run: earlier "
                f"runs on these records have spent ε = {format_rounded_up(spent_epsilon, 4)}. "
                "Increase privacy.epsilon"
            ).with_code("budget.spent")
        return calibrate_noise_multiplier(
            target, privacy.delta, lambda s: spent + self._totals(rounds, s), privacy.adjacency
        )


def _distinct(histories: Sequence[History]) -> tuple[list[Totals], tuple[int, ...]]:
    """Groups histories with equal totals. Returns each group's totals and each history's group."""
    positions: dict[Totals, int] = {}
    groups = []
    for history in histories:
        groups.append(positions.setdefault(totals(history.releases), len(positions)))
    return list(positions), tuple(groups)
