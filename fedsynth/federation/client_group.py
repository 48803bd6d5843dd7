"""The local steps of clients. A simulation batches the clients of a group into one pass over the
data on their shared device. Each client gets the same result as in a separate process
(`step_alone`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsynth.core.client import ClientGroup, ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.evaluation.accuracy import correct
from fedsynth.federation.client_runtime import ClientRuntime, RefusedError
from fedsynth.federation.protocol import (
    REQUEST,
    ClientEvaluation,
    Refusal,
    Replies,
    check_declared,
    check_finite,
    check_model_request,
    declared,
)
from fedsynth.privacy.errors import RequestRefusedError
from fedsynth.privacy.plans import FIRST
from fedsynth.privacy.releases import USER
from fedsynth.privacy.requests import check_numbers


def view(clients: Sequence[ClientRuntime], phase: str, context: RoundContext) -> ClientGroup:
    """Returns the view through which a method accesses the data of these clients in one exchange.
    In a private run, this charges each client for the exchange.

    Raises:
        RefusedError: a client's cap would be exceeded: another run has charged its ledger since
            `prepare`. The charges of the clients before it remain.
        RequestRefusedError: a client has not received the terms.
        ValueError: clients whose data are not resident together.
    """
    resident = clients[0].data.resident
    ids = []
    records = []
    for client in clients:
        client.require_terms()
        if client.data.resident is not resident:
            raise ValueError("the clients of a group must share one data set in memory")
        ids.append(client.number)
        records.append(client.data.records)
    if not clients[0].private:
        for client in clients:
            client.begin(context)
        return ExactClientView(ids, resident, records, network=context.architecture)
    allowances = [client.charge(phase, context) for client in clients]
    budget = clients[0].budget
    if budget is None or not budget.guaranteed:
        return ExactClientView(ids, resident, records, allowances, network=context.architecture)
    users = None
    if context.privacy is not None and context.privacy.unit == USER:
        users = resident.groups
    return PrivateClientView(
        ids,
        resident,
        records,
        allowances,
        nominal_size=context.nominal_size,
        users=users,
        network=context.architecture,
        note=context.note,
    )


def step_together(
    clients: Sequence[ClientRuntime], phase: str, message: Message, context: RoundContext
) -> Replies:
    """Runs one step for all clients of a group in a single pass, and returns their replies.

    Raises:
        TypeError: a message of another type than the method declares.
        DivergedError: a personal model is not finite.
    """
    method = clients[0].method
    check_declared(method, message, declared(method, phase, "downlink"))
    try:
        check_model_request(message, context)
        method.check_request(message, context)
        if context.privacy is not None:
            check_numbers(message.numbers(), context.privacy.max_request_norm)
        memories = [client.load_memory(phase, context) for client in clients]
        group = view(clients, phase, context)
        step = method.first_step if phase == FIRST else method.client_step
        results = step(message, group, memories, context)
    except RequestRefusedError as error:
        return Replies(refusals=(Refusal(clients[0].number, str(error), REQUEST),))
    except RefusedError as error:
        return Replies(refusals=(error.refusal,))
    replies: dict[int, Message] = {}
    if method.personal:  # check the models that stay with clients, all before any memory is updated
        for client, (_, memory) in zip(clients, results, strict=True):
            check_finite(memory, f"client {client.number}", context.round)
    for client, (reply, memory) in zip(clients, results, strict=True):
        client.store_memory(phase, memory, context)
        replies[client.number] = reply
    return Replies(replies)


def step_alone(
    client: ClientRuntime, phase: str, message: Message, context: RoundContext
) -> Message | Refusal:
    """Runs one step for a single client, and returns its reply."""
    replies = step_together([client], phase, message, context)
    if replies.refusals:
        return replies.refusals[0]
    return replies.messages[client.number]


def evaluate_together(
    clients: Sequence[ClientRuntime],
    models: Mapping[str, Mapping[str, Tensor]],
    context: RoundContext,
) -> list[ClientEvaluation]:
    """Evaluates clients that share a device (`ClientRuntime.evaluate`). A model that they have in
    common is evaluated in one pass."""
    held_out = [client.data.held_out for client in clients]
    sizes = list(map(len, held_out))
    if clients[0].method.personal or not any(sizes):
        return [client.evaluate(models, context) for client in clients]
    resident = clients[0].data.resident
    indices = torch.cat(held_out).to(resident.labels.device)
    results = []
    for client, size in zip(clients, sizes, strict=True):
        client.begin(context)
        results.append(ClientEvaluation(client.number, client.data.size, size, {}))
    for name, model in models.items():
        is_correct = correct(context.load(model), resident, among=indices).cpu()
        for position, of_client in enumerate(is_correct.split(sizes)):
            counts = {**results[position].right, name: int(of_client.sum())}
            results[position] = replace(results[position], right=counts)
    return results
