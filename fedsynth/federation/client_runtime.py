"""One client of a federation: its own records, its memory, its privacy budget, and what it answers.

In a process of its own a client is a group of one. In a simulation the clients of a group take a
step together, in one batched pass over the data that they share a device with (`step_together`);
what each gets is what it would get alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import FIRST, Memory, Method
from fedsynth.data.images import ImageData
from fedsynth.evaluation.accuracy import correct
from fedsynth.federation.exchange import REQUEST, Evaluated, Joined, Refusal, Replies
from fedsynth.federation.server import check_declared, check_finite
from fedsynth.privacy.errors import BudgetExceededError, RequestRefusedError
from fedsynth.privacy.releases import Release
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


class Budget(Protocol):
    """What a client may show of its records; without privacy: what it writes down of that."""

    @property
    def name(self) -> str:
        """What its ledger is called; "" for none."""

    def history(self) -> tuple[Release, ...]:
        """What its ledger holds."""

    def check(self, context: RoundContext) -> None:
        """Asks whether the round can be charged, before anything is.

        Raises:
            BudgetExceededError: the cap would be exceeded.
            LedgerError: the ledger cannot be written.
        """

    def begin(self, context: RoundContext) -> None:
        """Charges what has no guarantee, before the round shows it."""

    def group(
        self,
        budgets: Sequence[Any],
        ids: Sequence[int],
        data: Sequence[OwnData],
        phase: str,
        context: RoundContext,
    ) -> ClientGroup:
        """The group's view of its data for one exchange; charges each of its clients for it."""


class NoBudget:
    """Of a run without privacy and without ledgers."""

    name = ""

    def history(self) -> tuple[Release, ...]:
        return ()

    def check(self, context: RoundContext) -> None:
        """Nothing to ask."""

    def begin(self, context: RoundContext) -> None:
        """Nothing to charge."""

    def group(
        self,
        budgets: Sequence[Any],
        ids: Sequence[int],
        data: Sequence[OwnData],
        phase: str,
        context: RoundContext,
    ) -> ClientGroup:
        return OpenClients(ids, data[0].resident, [own.records for own in data])


class ClientRuntime:
    """One client.

    Args:
        number: k, from 0.
        method: what it takes part in.
        data: its own.
        budget: its own.
        tells_size: whether n_k is no secret: with DP off.

    Attributes:
        memory: what it keeps between rounds.
    """

    def __init__(
        self, number: int, method: Method, data: OwnData, budget: Budget, *, tells_size: bool
    ) -> None:
        self.number = number
        self.method = method
        self.data = data
        self.budget = budget
        self.memory: Memory = {}
        self._tells_size = tells_size

    def join(self) -> Joined:
        """What it says of itself."""
        size = len(self.data.records) if self._tells_size else None
        return Joined(self.number, size, self.budget.history(), self.budget.name)

    def prepare(self, context: RoundContext) -> Refusal | None:
        """Whether it can take part in the round; nothing is charged.

        Raises:
            LedgerError: its ledger cannot be written.
        """
        try:
            self.budget.check(context)
        except BudgetExceededError as error:
            return Refusal(self.number, str(error))
        return None

    def begin(self, context: RoundContext) -> None:
        """The round begins."""
        self.budget.begin(context)

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
        test = self.data.resident.subset(self.data.held_out)
        right = {name: 0 for name in models}
        if len(test):
            for name, parameters in models.items():
                model = context.load(self.personal(parameters))
                right[name] = int(correct(model, test).sum())
        return Evaluated(self.number, len(self.data.records), len(test), right)


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
        group = clients[0].budget.group(
            [client.budget for client in clients],
            numbers,
            [client.data for client in clients],
            phase,
            context,
        )
        step = method.first_step if first else method.client_step
        results = step(message, group, [client.memory for client in clients], context)
    except RequestRefusedError as error:
        return Replies(refusals=(Refusal(numbers[0], str(error), REQUEST),))
    except BudgetExceededError as error:
        return Replies(refusals=(Refusal(numbers[0], str(error)),))
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
    if clients[0].method.personal:
        return [client.evaluate(models, context) for client in clients]
    resident = clients[0].data.resident
    where = torch.cat([client.data.held_out for client in clients]).to(resident.labels.device)
    tested = [len(client.data.held_out) for client in clients]
    test = resident.subset(where)
    right = {
        name: [int(own.sum()) for own in _right(context.load(model), test).split(tested)]
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


def _right(model: nn.Module, test: ImageData) -> Tensor:
    return correct(model, test).cpu() if len(test) else torch.zeros(0)
