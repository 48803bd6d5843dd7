"""One client of a federation, with its records, its privacy budget and its state.

The client state is what the client stores between rounds. The client's steps are computed
in `in_process.py`, for several clients together. A client in a separate process is a group of one.

The privacy budget belongs to the client. It holds the public plan, the client's ledger and the
client's secret generator, and no data of other clients. It refuses every release that would exceed
the client's cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from fedsynth.config.checks import check_own_noise
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import PersonalModels
from fedsynth.core.context import RoundContext
from fedsynth.core.method import ClientState
from fedsynth.core.periods import has_periods
from fedsynth.core.sums import sums_securely
from fedsynth.data.images import ImageData
from fedsynth.errors import (
    BudgetExceededError,
    LedgerError,
    RequestRefusedError,
    SettingError,
)
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import ClientInfo, Refusal, RunTerms
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.mechanisms import EpsilonCap, GaussianSumMechanism
from fedsynth.privacy.periods import PeriodEnforcer, ReleaseSequence, RunningSumMechanism
from fedsynth.privacy.plans import (
    FIRST,
    MakeMechanism,
    ReleaseBudget,
    UnaccountedNoise,
    charge_round,
)
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release


@dataclass(eq=False, repr=False)
class ClientBudget:
    """One client's privacy budget, which charges the client's releases to its ledger.

    Args:
        client: the index of the client, which selects the client's part of the plan.
        ledger: the client's ledger.
        plan: the privacy plan of the run.
        secret: the client's secret generator.
        cap: the data owner's cap, which applies in addition to the cap of the run. None means that
            the data owner has no cap.
        make_mechanism: the function that charges the ledger and creates a mechanism of releases. An
            audit replaces it.
        sequence: the client's noise of earlier periods, if the run is one of several periods.

    Raises:
        LedgerError: the ledger holds releases that protect another unit than this run.
        SettingError: the run is one of several periods, and there is no sequence.
    """

    client: int
    ledger: Ledger
    plan: PrivacyPlan
    secret: SecretGenerator
    cap: EpsilonCap | None = None
    make_mechanism: MakeMechanism = GaussianSumMechanism
    sequence: ReleaseSequence | None = None

    def __post_init__(self) -> None:
        self._guard = self.plan.guard(self.ledger, self.cap)
        if self.sequence is not None:
            self._guard = PeriodEnforcer(**vars(self._guard), rows=self.sequence.rows)
            self.make_mechanism = partial(RunningSumMechanism, self.sequence)
        elif has_periods(self.plan.run.method):
            reason = (
                "needs a ledger folder that keeps the noise of earlier periods. Use fedsynth "
                "synthesize with --dp-ledger (privacy.ledger)"
            )
            raise SettingError("method", "periods", reason, value=self.plan.run.method.periods)

    def check(self, number: int) -> None:
        """Checks that the client can be charged for a round, without charging it.

        The check runs for all clients before any client is charged, so that no client pays for a
        round that releases nothing.

        Raises:
            BudgetExceededError: the round would exceed the client's cap.
            LedgerError: the ledger cannot be written.
        """
        if self.plan.facts.guaranteed:
            self._guard.check(self.plan.planned([number]))
        self.ledger.check_writable()

    def charge(self, context: RoundContext, exchange: str) -> ReleaseBudget[Any]:
        """Charges the ledger for all of the client's releases in one exchange.

        A mechanism without a privacy guarantee is recorded, too. From then on, the ε of the ledger
        is infinite.

        Raises:
            BudgetExceededError: the cap would be exceeded, because another run has charged the
                ledger since `check`. Earlier charges remain.
        """
        plans = self.plan.client_plans(self.client, context)
        if self.plan.facts.guaranteed:
            return charge_round(
                plans,
                context.round,
                self.plan.sigma,
                self._guard,
                self.secret,
                exchange=exchange,
                make_mechanism=self.make_mechanism,
            )
        rows = self.plan.client_rows(self.client, context)
        charged = []
        for plan, row in zip(plans, rows, strict=True):
            if plan.exchange == exchange:
                self.ledger.charge(row)
                charged.append((plan, UnaccountedNoise(row, self.secret)))
        return ReleaseBudget(exchange, charged)


def record_open_round(ledger: Ledger, method: str, number: int) -> None:
    """Adds an entry to a ledger for a round without differential privacy.

    From then on, the ε of this ledger is infinite. Nothing is clipped and no noise is added, so the
    recorded sensitivity and dimension are placeholders.
    """
    ledger.charge(
        Release(
            round=number,
            quantity=f"a round of {method}",
            mechanism="none",
            clipped="nothing",
            noise_multiplier=0.0,
            sensitivity=1.0,
            sample_rate=1.0,
            sampler="full",
            steps=1,
            dimension=1,
            unaccounted="a run on the same data without differential privacy",
        )
    )


@dataclass(frozen=True, eq=False)
class ClientData:
    """The records of one client.

    Args:
        resident: the data set that contains the records, on the run's device. In a simulation, it
            contains the records of all clients.
        records: the positions of the client's training records in `resident`, int64.
        held_out: the positions of the client's test split in `resident`.
    """

    resident: ImageData
    records: Tensor
    held_out: Tensor

    @property
    def size(self) -> int:
        """The client's total number of training and test records."""
        return len(self.records) + len(self.held_out)


@dataclass(eq=False, repr=False)
class ClientRuntime:
    """One client of a run, which answers the server's requests.

    The client uses its own copy of the run's settings. If these settings demand differential
    privacy, the client is private, whatever the server sends. Before the client has received the
    run terms, it answers only `join`.

    Args:
        number: the index of the client, from 0.
        settings: the client's copy of the settings.
        context: the public context of round 1, without the run terms.
        data: the client's records.
        ledger: the client's ledger. None means that nothing is charged.
        secret: the client's secret generator. None creates a generator with a new key when it is
            needed.
        cap: the data owner's cap, which applies in addition to the cap of the run. None means that
            the data owner has no cap.
        remote: True if the client runs on the data owner's machine. An upload with only a part of
            the noise may then leave the machine only in a secure sum.
        sequence: the client's noise of earlier periods, if the run is one of several periods.

    Attributes:
        budget: the privacy budget. `start` sets it in a private run.
        context: the public context. `start` adds the run terms.
        recorded: the last round that the ledger of a client without privacy has recorded. 0 if
            there is none.
        pending: the number of a round, and the client state that its first exchange stored. The
            main exchange of this round uses the client state.
        stored: True if the client's state is currently in a file.
    """

    number: int
    settings: RunSettings
    context: RoundContext
    data: ClientData
    ledger: Ledger | None = None
    _: KW_ONLY
    secret: SecretGenerator | None = None
    cap: EpsilonCap | None = None
    remote: bool = False
    sequence: ReleaseSequence | None = None

    def __post_init__(self) -> None:
        self.method = self.settings.method
        self._load_state: Callable[[], ClientState] = dict
        self.stored = False
        self.budget: ClientBudget | None = None
        self._has_terms = False
        self.pending: tuple[int, ClientState] | None = None
        self._granted: tuple[int, str, ReleaseBudget[Any]] | None = None
        self.recorded = 0

    @property
    def client_state(self) -> ClientState:
        """The state that the client stores between rounds."""
        return self._load_state()

    @client_state.setter
    def client_state(self, client_state: ClientState) -> None:
        self._load_state = lambda: client_state
        self.stored = False

    def store(self, load: Callable[[], ClientState]) -> None:
        """Removes the client's state from RAM. The next access loads the state from a file.

        Args:
            load: a function that reads the client state from the file.
        """
        self._load_state = load
        self.stored = True

    @property
    def private(self) -> bool:
        """True if the client takes part with differential privacy."""
        return self.settings.privacy is not None

    @property
    def sends_sums(self) -> bool:
        """True if the client's uploads leave its machine only as part of a secure sum."""
        return self.remote and sums_securely(self.method)

    def join(self) -> ClientInfo:
        """Returns the message that the client sends to join a run.

        In a private run, the message does not state the number of the client's records.
        """
        if self.private:
            return ClientInfo(self.number, history=self.history())
        return ClientInfo(self.number, len(self.data.records), self.history())

    def start(self, terms: RunTerms) -> RoundContext:
        """Accepts the run terms from the server.

        A client accepts terms only once. The client's charges follow from its own settings and the
        noise multiplier σ in the terms.

        Returns:
            The public context with the terms.

        Raises:
            RequestRefusedError: the client has already received terms, or the terms do not fit its
                settings.
            LedgerError: the ledger holds releases that protect another unit than this run.
        """
        if self._has_terms:
            raise RequestRefusedError(f"client {self.number} has already received the run terms")
        if self.private:
            plan = self._plan(terms)
            self.budget = self._new_budget(plan)
            self.context = plan.in_context(self.context)
        elif terms.noise_multiplier is not None:
            raise RequestRefusedError("the server sent a noise multiplier for a non-private run")
        else:
            self.context = replace(self.context, sizes=terms.sizes)
        self._has_terms = True
        return self.context

    def _plan(self, terms: RunTerms) -> PrivacyPlan:
        """Returns the privacy plan for the client's settings and the server's σ.

        The server has calibrated σ for all clients.
        """
        sigma = terms.noise_multiplier
        if type(sigma) is not float or not 0 < sigma < math.inf:
            raise RequestRefusedError(
                f"the server's noise multiplier must be above 0 and finite, got {sigma!r:.80}"
            ).with_code("request.noise")
        plan = PrivacyPlan.checked(self.settings, self.context)
        if self.remote and not sums_securely(self.method):
            check_own_noise(plan.plans)
        stated = plan.privacy.noise_multiplier
        if stated is not None and sigma != stated:
            raise RequestRefusedError(
                f"the server sent the noise multiplier {sigma:.6g}, but the run has "
                f"privacy.noise_multiplier={stated:.6g}"
            ).with_code("request.stated_noise")
        return replace(plan, privacy=replace(plan.privacy, noise_multiplier=sigma))

    def _new_budget(self, plan: PrivacyPlan) -> ClientBudget:
        if self.ledger is None:
            raise LedgerError(f"client {self.number} has no ledger, but a private run needs one")
        self.secret = self.secret or SecretGenerator(four_sums=plan.privacy.four_sums)
        return ClientBudget(
            self.number, self.ledger, plan, self.secret, self.cap, sequence=self.sequence
        )

    def move_ledger(self, ledger: Ledger) -> None:
        """Replaces the client's empty ledger with another one."""
        self.ledger = ledger
        if self.budget is not None:
            self.budget = self._new_budget(self.budget.plan)

    def history(self) -> History | None:
        """Returns the content of the client's ledger, or None if it has no ledger.

        The charges of a period that is repeated are left out, since they count for the repetition.
        """
        if self.ledger is None or self.sequence is None:
            return None if self.ledger is None else self.ledger.history()
        rows, lines = self.sequence.rows, self.ledger.lines
        return History(self.ledger.client, lines.releases[:rows], lines.chains[rows])

    def require_terms(self) -> None:
        """Checks that the client has received the run terms.

        Raises:
            RequestRefusedError: the client has not received the terms yet.
        """
        if not self._has_terms:
            raise RequestRefusedError(f"client {self.number} has not received the run terms")

    def prepare(self, context: RoundContext) -> Refusal | None:
        """Returns a refusal if the client cannot take part in the round, otherwise None.

        Nothing is charged yet.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        self.require_terms()
        try:
            if self.budget is not None:
                self.budget.check(context.round)
            elif self.ledger is not None:
                self.ledger.check_writable()
        except BudgetExceededError as error:
            return Refusal(str(error), spent=error.spent)
        return None

    def begin(self, context: RoundContext) -> None:
        """Records a round without differential privacy in the ledger, before anything is released.

        Nothing happens in a private run, or without a ledger. A client that misses the message
        records the round before its first step or evaluation.
        """
        self.require_terms()
        if self.private or self.ledger is None or self.recorded == context.round:
            return
        record_open_round(self.ledger, self.method.name, context.round)
        self.recorded = context.round

    def charge(self, exchange: str, context: RoundContext) -> ReleaseBudget[Any]:
        """Charges the client for an exchange, and returns the mechanisms that its step may use.

        If the step failed before it drew any noise, the step can be repeated without another
        charge.

        Raises:
            BudgetExceededError: the client's cap would be exceeded (`ClientBudget.charge`).
            RequestRefusedError: the client has not received the run terms.
        """
        if self.budget is None:
            raise RequestRefusedError(f"client {self.number} has not received the run terms")
        if self._granted is None or not self.may_try_again(exchange, context):
            self._granted = (context.round, exchange, self.budget.charge(context, exchange))
        return self._granted[2]

    def may_try_again(self, exchange: str, context: RoundContext) -> bool:
        """Returns True if a failed step can be repeated without another charge.

        This is the case for steps without differential privacy, and for charged steps that have not
        taken any mechanism from their release budget.
        """
        if not self.private:
            return True
        if self._granted is None:
            return False
        number, charged_exchange, budget = self._granted
        return (number, charged_exchange) == (context.round, exchange) and budget.unused

    def load_state(self, exchange: str, context: RoundContext) -> ClientState:
        """Returns the client's state for an exchange.

        If the round had a first exchange, this is the client state that the first exchange stored.
        """
        if exchange != FIRST and self.pending is not None and self.pending[0] == context.round:
            return self.pending[1]
        return self.client_state

    def store_state(self, exchange: str, client_state: ClientState, context: RoundContext) -> None:
        """Stores the client state returned by a step.

        The client state of a first exchange is used only in the main exchange of the same round.
        """
        if exchange == FIRST:
            self.pending = (context.round, client_state)
        else:
            self.pending = None
            self.client_state = client_state

    def rollback(self, client_state: ClientState) -> None:
        """Restores the client's state from before the round.

        A simulation uses this for a client that timed out.
        """
        self.pending = None
        self.client_state = client_state

    def personal(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the client's personal model, given the server model's `parameters`."""
        if isinstance(self.method, PersonalModels):
            return self.method.personal_parameters(parameters, self.client_state)
        return parameters
