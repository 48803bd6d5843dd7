"""One client of a federation: its own records, its memory and its privacy budget.

What it answers is in `client_group.py`: in a process of its own a client is a group of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Memory
from fedsynth.data.images import ImageData
from fedsynth.evaluation.accuracy import correct
from fedsynth.federation.exchange.client_budget import ClientBudget, OpenBudget
from fedsynth.federation.exchange.protocol import Evaluated, Joined, Refusal, Terms
from fedsynth.federation.terms.checks import check_own_noise
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import BudgetExceededError, LedgerError, RequestRefusedError
from fedsynth.privacy.guard import Cap
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, Allowance
from fedsynth.privacy.randomness import SecretGenerator


@dataclass(frozen=True, eq=False)
class OwnData:
    """A client's records.

    Args:
        resident: the data that they are among, on the run's device: the client's own, or in a
            simulation everybody's.
        records: positions of those that it trains on, int64.
        held_out: of its own test split.
    """

    resident: ImageData
    records: Tensor
    held_out: Tensor

    @property
    def size(self) -> int:
        """All its records, those that train and those that test."""
        return len(self.records) + len(self.held_out)


@dataclass(frozen=True, eq=False)
class Standing:
    """Where a client stands inside a run, beside its memory.

    Args:
        recorded: the last round that an open client's ledger has recorded; 0: none.
        pending: the round of a first exchange, and what the client keeps of it for that round.
    """

    recorded: int = 0
    pending: tuple[int, Memory] | None = None


class ClientRuntime:
    """One client.

    It goes by its own copy of the run's settings. Until it was told the terms it answers nothing
    but `join`; then it is private if its settings are, whatever a server says.

    Args:
        number: k, from 0.
        settings: its own copy.
        context: public, of round 1, without the terms.
        data: its own.
        ledger: its own; None: nothing is charged.
        secret: of its noise; None makes one with a fresh key when it is needed.
        cap: what its owner allows, whatever the run's settings do; None: no other cap.
        apart: it is on its owner's machine, where an upload that lacks a part of the noise leaves
            in a secure sum alone.

    Attributes:
        budget: from `start` on, with differential privacy.
    """

    def __init__(
        self,
        number: int,
        settings: RunSettings,
        context: RoundContext,
        data: OwnData,
        ledger: Ledger | None = None,
        *,
        secret: SecretGenerator | None = None,
        cap: Cap | None = None,
        apart: bool = False,
    ) -> None:
        self.number = number
        self.settings = settings
        self.method = settings.method
        self.data = data
        self._memory: Memory = {}
        self._stored: Callable[[], Memory] | None = None
        self.budget: ClientBudget | None = None
        self._context = context
        self.ledger = ledger
        self._secret = secret
        self._cap = cap
        self._apart = apart
        self._told = False
        self._pending: tuple[int, Memory] | None = None
        self._granted: tuple[int, str, Allowance[Any]] | None = None
        self._recorded = 0

    @property
    def context(self) -> RoundContext:
        """Public, of round 1; from `start` on with the terms."""
        return self._context

    @property
    def memory(self) -> Memory:
        """What it keeps between rounds."""
        return self._memory if self._stored is None else self._stored()

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory = memory
        self._stored = None

    @property
    def stored(self) -> bool:
        """Whether what it keeps is in a file."""
        return self._stored is not None

    def store(self, load: Callable[[], Memory]) -> None:
        """Leaves what it keeps to a file, until it is needed."""
        self._memory = {}
        self._stored = load

    @property
    def private(self) -> bool:
        """Whether it takes part with differential privacy."""
        return self.settings.privacy is not None

    @property
    def sees_sums(self) -> bool:
        """Whether its uploads leave it in secure sums alone."""
        return self._apart and self.method.sums_alone

    def join(self) -> Joined:
        """What it says of itself; its size is its own where the run is private."""
        size = None if self.private else len(self.data.records)
        return Joined(self.number, size, self.history())

    def start(self, terms: Terms) -> RoundContext:
        """Takes the terms, once: from now on it is charged by its settings and the σ in them.

        Returns:
            The public context with the terms.

        Raises:
            RequestRefusedError: the terms came before, or are not those of its own settings.
            LedgerError: its ledger holds releases of another unit.
        """
        if self._told:
            raise RequestRefusedError("the terms of a run are told once")
        if self.private:
            plan = self._plan(terms)
            self.budget = self._new_budget(plan)
            self._context = plan.in_context(self._context)
        elif terms.noise_multiplier is not None:
            raise RequestRefusedError("this run has no differential privacy, and so no σ")
        else:
            self._context = replace(self._context, sizes=terms.sizes)
        self._told = True
        return self._context

    def _plan(self, terms: Terms) -> PrivacyPlan:
        """What its own settings plan, with the σ that the server found for all clients."""
        sigma = terms.noise_multiplier
        if type(sigma) is not float or not 0 < sigma < math.inf:
            raise RequestRefusedError(f"a noise multiplier must be above 0, got {sigma!r:.80}")
        plan = PrivacyPlan.checked(self.settings, self._context)
        if self._apart and not self.method.sums_alone:
            check_own_noise(plan.plans)
        own = plan.privacy.noise_multiplier
        if own is not None and sigma != own:
            raise RequestRefusedError(
                f"the server says σ = {sigma:.6g}, and the run's settings say {own:.6g}"
            )
        return replace(plan, privacy=replace(plan.privacy, noise_multiplier=sigma))

    def _new_budget(self, plan: PrivacyPlan) -> ClientBudget:
        if self.ledger is None:
            raise LedgerError(f"client {self.number} has no ledger for a private run")
        budget = ClientBudget(self.number, self.ledger, plan, self._secret, self._cap)
        self._secret = budget.secret
        return budget

    def move_ledger(self, ledger: Ledger) -> None:
        """Goes on with another ledger, in place of its own, which is empty."""
        self.ledger = ledger
        if self.budget is not None:
            self.budget = self._new_budget(self.budget.plan)

    def history(self) -> History | None:
        """What its ledger holds now."""
        return None if self.ledger is None else self.ledger.history()

    def require_terms(self) -> None:
        """Raises RequestRefusedError if it was not told the terms yet."""
        if not self._told:
            raise RequestRefusedError(f"client {self.number} was not told the terms of the run")

    def prepare(self, context: RoundContext) -> Refusal | None:
        """Whether it can take part in the round; nothing is charged.

        Raises:
            LedgerError: its ledger cannot be written.
        """
        self.require_terms()
        if self.budget is None:
            if self.ledger is not None:
                self.ledger.check_writable()
            return None
        try:
            self.budget.check(context.round)
        except BudgetExceededError as error:
            return Refusal(self.number, str(error), spent=error.spent)
        return None

    def begin(self, context: RoundContext) -> None:
        """The round begins: without privacy a ledger records it before anything is shown, once.

        A client that was not told so records the round before its first step or evaluation.
        """
        self.require_terms()
        if self.private or self.ledger is None or self._recorded == context.round:
            return
        OpenBudget(self.ledger, self.method.name).record(context.round)
        self._recorded = context.round

    def granted(self, phase: str, context: RoundContext) -> Allowance[Any]:
        """What it is charged for in this exchange; for another attempt at a step, which has drawn
        nothing, no second time.

        Raises:
            BudgetExceededError: see `ClientBudget.charge`.
            RequestRefusedError: it was not told the terms.
        """
        if self.budget is None:
            raise RequestRefusedError(f"client {self.number} was not told the terms of the run")
        if self.may_try_again(phase, context) and self._granted is not None:
            return self._granted[2]
        made = self.budget.charge(context, phase)
        self._granted = (context.round, phase, made)
        return made

    def may_try_again(self, phase: str, context: RoundContext) -> bool:
        """Whether a step that failed may be taken again without a charge: it is not private, or
        was charged for this exchange and nothing of that was handed out."""
        if not self.private:
            return True
        made = self._granted
        return made is not None and made[:2] == (context.round, phase) and made[2].untouched

    def recall(self, phase: str, context: RoundContext) -> Memory:
        """What it remembers in this exchange: of the round's first one, if there was one."""
        if phase != FIRST and self._pending is not None and self._pending[0] == context.round:
            return self._pending[1]
        return self.memory

    def remember(self, phase: str, memory: Memory, context: RoundContext) -> None:
        """Takes a step's memory: of a first exchange for this round alone."""
        if phase == FIRST:
            self._pending = (context.round, memory)
        else:
            self._pending = None
            self.memory = memory

    @property
    def standing(self) -> Standing:
        """What it must know beside its memory to go on in another process."""
        return Standing(self._recorded, self._pending)

    @standing.setter
    def standing(self, standing: Standing) -> None:
        self._recorded = standing.recorded
        self._pending = standing.pending

    def forget(self, memory: Memory) -> None:
        """Goes back to what it kept before the round, as one that hung in its step."""
        self._pending = None
        self.memory = memory

    def facts(self, context: RoundContext) -> Mapping[str, Any]:
        """What it says of its memory, for the round's row."""
        self.require_terms()
        return self.method.client_facts(self.memory, context)

    def personal(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The model that it uses itself, where the federation has `parameters`."""
        return self.method.personal_parameters(parameters, self.memory)

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> Evaluated:
        """Tests models on its own test split."""
        self.begin(context)
        held_out = self.data.held_out
        right = dict.fromkeys(models, 0)
        if len(held_out):
            for name, parameters in models.items():
                model = context.load(self.personal(parameters))
                right[name] = int(correct(model, self.data.resident, among=held_out).sum())
        return Evaluated(self.number, self.data.size, len(held_out), right)
