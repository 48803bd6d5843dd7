"""The steps of clients. In a simulation the clients of a group take a step together, in one batched
pass over the data on their shared device. Each gets the same result as in a separate process
(`step_alone`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.client import ClientGroup, ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.evaluation.accuracy import correct
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.message_checks import check_declared, check_finite, check_model_request
from fedsynth.federation.protocol import REQUEST, Evaluated, Refusal, Replies
from fedsynth.privacy.errors import BudgetExceededError, RequestRefusedError
from fedsynth.privacy.plans import FIRST, Allowance
from fedsynth.privacy.releases import USER
from fedsynth.privacy.requests import check_numbers


class RefusedError(Exception):
    """A client of the group refuses the request.

    Attributes:
        refusal: its answer.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def view(clients: Sequence[ClientRuntime], phase: str, context: RoundContext) -> ClientGroup:
    """Returns the data of these clients that a method may access in one exchange; with privacy each
    client is charged for it.

    Raises:
        RefusedError: a client's cap would be exceeded: another run has charged its ledger since
            `prepare`. The charges of the clients before it remain.
        RequestRefusedError: a client has not received the terms.
        ValueError: clients whose data are not resident together, or only some of which are private.
    """
    resident = clients[0].data.resident
    private = clients[0].private
    for client in clients:
        client.require_terms()
        if client.data.resident is not resident or client.private != private:
            raise ValueError(
                "clients of one group must share resident data, and all or none must be private"
            )
    ids = [client.number for client in clients]
    records = [client.data.records for client in clients]
    if not private:
        for client in clients:
            client.begin(context)
        return ExactClientView(ids, resident, records, network=context.architecture)
    allowances = [_charged(client, phase, context) for client in clients]
    if not _guaranteed(clients[0]):
        return ExactClientView(ids, resident, records, allowances, network=context.architecture)
    protects_users = context.privacy is not None and context.privacy.unit == USER
    return PrivateClientView(
        ids,
        resident,
        records,
        allowances,
        nominal_size=context.nominal_size,
        users=resident.groups if protects_users else None,
        network=context.architecture,
        note=context.note,
    )


def _guaranteed(client: ClientRuntime) -> bool:
    return client.budget is not None and client.budget.guaranteed


def _charged(client: ClientRuntime, phase: str, context: RoundContext) -> Allowance[Any]:
    """Charges the client and returns its allowance."""
    try:
        return client.granted(phase, context)
    except BudgetExceededError as error:
        raise RefusedError(Refusal(client.number, str(error), spent=error.spent)) from None


def step_together(
    clients: Sequence[ClientRuntime], phase: str, message: Message, context: RoundContext
) -> Replies:
    """Returns the replies of clients that share a device, in one pass.

    Raises:
        TypeError: a message of another type than the method declares.
        DivergedError: a personal model is not finite.
    """
    method = clients[0].method
    check_declared(method, message, method.exchange_types(phase).downlink)
    numbers = [client.number for client in clients]
    try:
        check_model_request(message, context)
        method.check_request(message, context)
        if context.privacy is not None:
            check_numbers(message.numbers(), context.privacy.max_request_norm)
        memories = [client.recall(phase, context) for client in clients]
        group = view(clients, phase, context)
        step = method.first_step if phase == FIRST else method.client_step
        results = step(message, group, memories, context)
    except RequestRefusedError as error:
        return Replies(refusals=(Refusal(numbers[0], str(error), REQUEST),))
    except RefusedError as error:
        return Replies(refusals=(error.refusal,))
    replies: dict[int, Message] = {}
    if method.personal:  # check the models that stay with clients, all before any memory is updated
        for client, (_, memory) in zip(clients, results, strict=True):
            check_finite(memory, f"client {client.number}", context.round)
    for client, (reply, memory) in zip(clients, results, strict=True):
        client.remember(phase, memory, context)
        replies[client.number] = reply
    return Replies(replies)


def step_alone(
    client: ClientRuntime, phase: str, message: Message, context: RoundContext
) -> Message | Refusal:
    """Returns one client's reply to a request."""
    replies = step_together([client], phase, message, context)
    return replies.refusals[0] if replies.refusals else replies.messages[client.number]


def evaluate_together(
    clients: Sequence[ClientRuntime],
    models: Mapping[str, Mapping[str, Tensor]],
    context: RoundContext,
) -> list[Evaluated]:
    """Evaluates clients that share a device (`ClientRuntime.evaluate`): a common model in one
    pass.
    """
    tested = [len(client.data.held_out) for client in clients]
    if clients[0].method.personal or not any(tested):
        return [client.evaluate(models, context) for client in clients]
    for client in clients:
        client.begin(context)
    resident = clients[0].data.resident
    indices = torch.cat([client.data.held_out for client in clients]).to(resident.labels.device)
    right = {
        name: [
            int(client_correct.sum())
            for client_correct in correct(context.load(model), resident, among=indices)
            .cpu()
            .split(tested)
        ]
        for name, model in models.items()
    }
    return [
        Evaluated(
            client.number,
            client.data.size,
            tested[position],
            {name: counts[position] for name, counts in right.items()},
        )
        for position, client in enumerate(clients)
    ]
