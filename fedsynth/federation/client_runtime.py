"""One client of a federation: its own records, its memory, its privacy budget, and what it answers.

In a process of its own a client is a group of one. In a simulation the clients of a group take a
step together, in one batched pass over the data that they share a device with (`step_together`);
what each gets is what it would get alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Memory, Method
from fedsynth.data.images import ImageData
from fedsynth.evaluation.accuracy import correct
from fedsynth.federation.client_budget import ClientBudget, OpenBudget
from fedsynth.federation.exchange import REQUEST, Evaluated, Joined, Refusal, Replies, Terms
from fedsynth.federation.server import check_declared, check_finite
from fedsynth.privacy.allowance import Allowance
from fedsynth.privacy.errors import BudgetExceededError, LedgerError, RequestRefusedError
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.plans import FIRST
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER
from fedsynth.privacy.requests import check_request


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


class RefusedError(Exception):
    """A client refuses what was asked of its group.

    Attributes:
        refusal: its answer.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class ClientRuntime:
    """One client.

    Args:
        number: k, from 0.
        method: what it takes part in.
        data: its own.
        ledger: its own; None: nothing is charged.
        secret: of its noise; None makes one with a fresh key when it is needed.
        shows_always: whether its data are in what is shown of every round, also of those that it
            takes no part in: a run without privacy that measures all test splits, or draws clients
            by their sizes.

    Attributes:
        memory: what it keeps between rounds.
        budget: from `start` on, with differential privacy.
    """

    def __init__(
        self,
        number: int,
        method: Method,
        data: OwnData,
        ledger: Ledger | None = None,
        *,
        secret: SecretGenerator | None = None,
        shows_always: bool = False,
    ) -> None:
        self.number = number
        self.method = method
        self.data = data
        self.memory: Memory = {}
        self.budget: ClientBudget | None = None
        self._ledger = ledger
        self._secret = secret
        self.shows_always = shows_always

    def join(self, *, private: bool) -> Joined:
        """What it says of itself; its size is its own where the run is private."""
        size = None if private else len(self.data.records)
        return Joined(self.number, size, self.history())

    def start(self, terms: Terms) -> None:
        """Takes the terms: with a plan it is charged by it from now on.

        Raises:
            LedgerError: its ledger holds releases of another unit.
        """
        if terms.plan is not None:
            if self._ledger is None:
                raise LedgerError(f"client {self.number} has no ledger for a private run")
            self.budget = ClientBudget(self.number, self._ledger, terms.plan, self._secret)
            self._secret = self.budget.secret

    def move_ledger(self, ledger: Ledger, terms: Terms) -> None:
        """Goes on with another ledger, in place of its own, which is empty."""
        self._ledger = ledger
        self.start(terms)

    def history(self) -> History | None:
        """What its ledger holds now."""
        return None if self._ledger is None else self._ledger.history()

    def prepare(self, context: RoundContext) -> Refusal | None:
        """Whether it can take part in the round; nothing is charged.

        Raises:
            LedgerError: its ledger cannot be written.
        """
        if self.budget is None:
            if self._ledger is not None:
                self._ledger.check_writable()
            return None
        try:
            self.budget.check(context.round)
        except BudgetExceededError as error:
            return Refusal(self.number, str(error))
        return None

    def begin(self, context: RoundContext) -> None:
        """The round begins: without privacy a ledger records it before anything is shown."""
        if self.budget is None and self._ledger is not None:
            OpenBudget(self._ledger, self.method.name).record(context.round)

    def step(self, phase: str, message: Message, context: RoundContext) -> Message | Refusal:
        """Its reply to a request."""
        replies = step_together([self], phase, message, context)
        return replies.refusals[0] if replies.refusals else replies.messages[self.number]

    def facts(self, context: RoundContext) -> Mapping[str, Any]:
        """What it says of its memory, for the round's row."""
        return self.method.client_facts(self.memory, context)

    def personal(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The model that it uses itself, where the federation has `parameters`."""
        return self.method.personal_parameters(parameters, self.memory)

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> Evaluated:
        """Tests models on its own test split."""
        held_out = self.data.held_out
        right = dict.fromkeys(models, 0)
        if len(held_out):
            test = self.data.resident.subset(held_out)
            for name, parameters in models.items():
                model = context.load(self.personal(parameters))
                right[name] = int(correct(model, test).sum())
        return Evaluated(self.number, len(self.data.records), len(held_out), right)


def view(clients: Sequence[ClientRuntime], phase: str, context: RoundContext) -> ClientGroup:
    """What a method may see of these clients in one exchange; with privacy each is charged for it.

    Raises:
        RefusedError: a client's cap would be exceeded: another run has charged its ledger since
            `prepare`. The clients before it stay charged.
    """
    ids = [client.number for client in clients]
    resident = clients[0].data.resident
    records = [client.data.records for client in clients]
    budgets = [client.budget for client in clients if client.budget is not None]
    if not budgets:
        return OpenClients(ids, resident, records)
    if not budgets[0].guaranteed:
        noise = [budget.unaccounted(context, phase) for budget in budgets]
        return OpenClients(ids, resident, records, noise)
    protects_users = context.privacy is not None and context.privacy.unit == USER
    return PrivateClients(
        ids,
        resident,
        records,
        [_authorised(client, phase, context) for client in clients],
        nominal_size=context.nominal_size,
        users=resident.groups if protects_users else None,
    )


def _authorised(
    client: ClientRuntime, phase: str, context: RoundContext
) -> Allowance[GaussianSums]:
    """What the client is charged for."""
    if client.budget is None:
        raise LedgerError(f"client {client.number} was not told the terms of a private run")
    try:
        return client.budget.authorise(context, phase)
    except BudgetExceededError as error:
        raise RefusedError(Refusal(client.number, str(error))) from None


def step_together(
    clients: Sequence[ClientRuntime], phase: str, message: Message, context: RoundContext
) -> Replies:
    """The replies of clients that share a device, in one pass.

    Raises:
        TypeError: a message of another type than the method declares.
        DivergedError: a personal model is not finite.
    """
    method = clients[0].method
    first = phase == FIRST
    check_declared(method, message, method.first_downlink if first else method.downlink)
    numbers = [client.number for client in clients]
    try:
        if context.privacy is not None:
            check_request(message.numbers(), context.privacy.max_request_norm)
        group = view(clients, phase, context)
        step = method.first_step if first else method.client_step
        results = step(message, group, [client.memory for client in clients], context)
    except RequestRefusedError as error:
        return Replies(refusals=(Refusal(numbers[0], str(error), REQUEST),))
    except RefusedError as error:
        return Replies(refusals=(error.refusal,))
    replies: dict[int, Message] = {}
    for client, (reply, memory) in zip(clients, results, strict=True):
        if method.personal:  # what is tested stays with the client
            check_finite(memory, f"client {client.number}", context.round)
        client.memory = memory
        replies[client.number] = reply
    return Replies(replies)


def evaluate_together(
    clients: Sequence[ClientRuntime],
    models: Mapping[str, Mapping[str, Tensor]],
    context: RoundContext,
) -> list[Evaluated]:
    """`ClientRuntime.evaluate` of clients that share a device: a common model in one pass."""
    tested = [len(client.data.held_out) for client in clients]
    if clients[0].method.personal or not any(tested):
        return [client.evaluate(models, context) for client in clients]
    resident = clients[0].data.resident
    where = torch.cat([client.data.held_out for client in clients]).to(resident.labels.device)
    test = resident.subset(where)
    right = {
        name: [int(own.sum()) for own in correct(context.load(model), test).cpu().split(tested)]
        for name, model in models.items()
    }
    return [
        Evaluated(
            client.number,
            len(client.data.records),
            tested[position],
            {name: counts[position] for name, counts in right.items()},
        )
        for position, client in enumerate(clients)
    ]
