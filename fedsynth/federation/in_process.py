"""Simulated clients, which all run in one process.

The clients of a round are processed in groups. The size of a group follows from the memory that one
client needs (`Method.client_bytes`) and from the memory bound of the run. It does not affect the
results. If the device still runs out of memory, the groups are halved.

The steps of a group's clients are computed together on one device. Each client gets the same result
as in a separate process, where it is the only client of its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedsynth.config.participation import CRASHED, TIMED_OUT
from fedsynth.core.capabilities import PersonalModels, exchange_of
from fedsynth.core.client import ExactClientView, Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, Tensors
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import check_numbers
from fedsynth.errors import BudgetExceededError, DeviceMemoryError, RequestRefusedError
from fedsynth.evaluation.accuracy import predict, scores
from fedsynth.federation import protocol
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import MAIN
from fedsynth.privacy.releases import USER
from fedsynth.training.segmentation import network_losses

GRADIENT_PASS = 128  # the number of records in a pass that computes a gradient


def view(clients: Sequence[ClientRuntime], exchange: str, context: RoundContext) -> Group:
    """Returns an object that gives a method's step access to the clients' data.

    In a private run, each client is charged for the exchange.

    Raises:
        BudgetExceededError: a client's cap would be exceeded, because another run has charged its
            ledger since `prepare`. Clients that were charged before this client remain charged.
        RequestRefusedError: a client has not received the run terms.
        ValueError: the clients' records are not in one data set in memory.
    """
    resident = clients[0].data.resident
    ids = []
    records = []
    for client in clients:
        client.require_terms()
        if client.data.resident is not resident:
            raise ValueError(
                f"client {client.number} uses another data set than client {clients[0].number}. "
                "Use one data set in memory for all clients of a step"
            )
        ids.append(client.number)
        records.append(client.data.records)
    if not clients[0].private:
        for client in clients:
            client.begin(context)
        return ExactClientView(ids, resident, records, network=context.architecture)
    budgets = [client.charge(exchange, context) for client in clients]
    budget = clients[0].budget
    if budget is None or not budget.plan.facts.guaranteed:
        return ExactClientView(ids, resident, records, budgets, network=context.architecture)
    users = None
    if context.privacy is not None and context.privacy.unit == USER:
        users = resident.groups
    return PrivateClientView(
        ids,
        resident,
        records,
        budgets,
        nominal_size=context.nominal_size,
        users=users,
        network=context.architecture,
        note=context.note,
        isolated=context.isolated,
    )


def step_together(
    clients: Sequence[ClientRuntime], exchange: str, message: Message, context: RoundContext
) -> protocol.Replies:
    """Computes one step for all clients in a group at once, and returns their replies.

    Raises:
        TypeError: the message has another type than the method declares.
        DivergedError: the personal model of a client is not finite.
    """
    method = clients[0].method
    declared = exchange_of(method, exchange)
    protocol.check_declared(method, message, declared.request)
    try:
        protocol.check_model_request(message, context)
        method.check_request(message, context)
        if context.privacy is not None:
            check_numbers(message.numbers(), context.privacy.max_request_norm)
        client_states = [client.load_state(exchange, context) for client in clients]
        group = view(clients, exchange, context)
        results = declared.client_step(message, group, client_states, context)
    except RequestRefusedError as error:
        return protocol.Replies(refusals=(protocol.Refusal(str(error), protocol.REQUEST),))
    except BudgetExceededError as error:
        return protocol.Replies(refusals=(protocol.Refusal(str(error), spent=error.spent),))
    replies: dict[int, Message] = {}
    if isinstance(method, PersonalModels):  # all are checked before any client state is updated
        for client, (_, client_state) in zip(clients, results, strict=True):
            protocol.check_finite(client_state, f"client {client.number}", context.round)
    for client, (reply, client_state) in zip(clients, results, strict=True):
        client.store_state(exchange, client_state, context)
        replies[client.number] = reply
    return protocol.Replies(replies)


def evaluate_together(
    clients: Sequence[ClientRuntime], models: Mapping[str, Tensors], context: RoundContext
) -> list[protocol.ClientEvaluation]:
    """Evaluates models on each client's test split.

    The result for a model and a client is the sum of `scores` over the client's split. The splits
    of all clients are classified together, unless each client has a personal model.
    """
    right: dict[int, dict[str, float]] = {}
    for client in clients:
        client.begin(context)
        right[client.number] = dict.fromkeys(models, 0.0)
    tested = [client for client in clients if len(client.data.held_out)]
    at_once = len(clients)
    if isinstance(clients[0].method, PersonalModels):
        at_once = 1
    resident = clients[0].data.resident
    for name, parameters in models.items():
        for start in range(0, len(tested), at_once):
            group = tested[start : start + at_once]
            splits = [client.data.held_out for client in group]
            model = context.load(group[0].personal(parameters))
            among = torch.cat(splits)
            labels = resident.labels[among.to(resident.labels.device)]
            values = scores(predict(model, resident, among=among), labels).cpu()
            for client, part in zip(group, values.split(list(map(len, splits))), strict=True):
                right[client.number][name] = float(part.sum())
    return [
        protocol.ClientEvaluation(k.number, k.data.size, len(k.data.held_out), right[k.number])
        for k in clients
    ]


def mean_gradient(client: ClientRuntime, parameters: Tensors, context: RoundContext) -> Tensor:
    """Computes the gradient [d] of a model's mean loss on the client's training records, ∇F_k(w).

    The model is in evaluation mode, so batch norm uses the running statistics.
    """
    model = context.load(parameters).eval()
    records = [client.data.records]
    view = ExactClientView([client.number], client.data.resident, records, network=model)
    for indices in view.examples(0).split(GRADIENT_PASS):
        losses = network_losses(model, view.images(indices), view.labels(indices))
        losses.sum().backward()
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts]) / len(records[0])


def _report_group(
    context: RoundContext, finished: int, size: int, clients: int, stage: str, step: int, total: int
) -> None:
    """Reports the progress of a round while the step of one group of clients runs.

    Args:
        finished: the number of clients in the groups that have finished.
        size: the number of clients in this group.
        clients: the number of clients in all groups.
    """
    context.report(stage, finished * total + step * size, clients * total)


class InProcess:
    """Passes the server's requests to the clients of a simulation, and returns their answers.

    It is a `Backend`. Clients may fail at random, as the settings state (`client_failures`).

    Args:
        clients: all clients in the order of their indices. They must have the same settings, and
            their records must be in one data set in memory.

    Attributes:
        stepping: the indices of the clients whose step was computed last.
    """

    def __init__(self, clients: Sequence[ClientRuntime]) -> None:
        self.clients = list(clients)
        self.stepping: list[int] = []
        self._settings = self.clients[0].settings
        self._max_group = len(self.clients)  # halved when the device's memory runs out

    def join(self) -> list[protocol.ClientInfo]:
        return list(map(ClientRuntime.join, self.clients))

    def start(self, terms: protocol.RunTerms) -> None:
        for client in self.clients:
            client.start(terms)

    def histories(self) -> list[History]:
        return [client.ledger.history() for client in self.clients if client.ledger is not None]

    def note_files(self, sha256: str) -> None:
        for client in self.clients:
            if client.ledger is not None:
                client.ledger.note_files(sha256, repeated=client.sequence is not None)

    def client_states(self, clients: Iterable[int]) -> Iterator[ClientState]:
        for number in clients:
            yield self.clients[number].client_state  # which may be in a file

    def prepare(self, context: RoundContext) -> list[protocol.Refusal]:
        refusals = []
        for number in protocol.affected_clients(self._settings, context):
            refusal = self.clients[number].prepare(context)
            if refusal is not None:
                refusals.append(refusal)
        return refusals

    def begin(self, context: RoundContext) -> None:
        for number in protocol.affected_clients(self._settings, context):
            self.clients[number].begin(context)

    def step(
        self, exchange: str, message: Message, context: RoundContext, numbers: Sequence[int]
    ) -> protocol.Replies:
        lost = self._failing(exchange, numbers, context)
        stepping = []
        hanging = []
        for number in numbers:
            client = self.clients[number]
            if lost.get(number) != CRASHED:
                stepping.append(client)
            if lost.get(number) == TIMED_OUT:
                hanging.append((client, client.client_state))
        messages: dict[int, Message] = {}
        while len(messages) < len(stepping):
            group = stepping[len(messages) :][: self._group_size(context)]
            self.stepping = [client.number for client in group]
            report = partial(_report_group, context, len(messages), len(group), len(stepping))
            group_context = replace(context, report=report)
            try:
                replies = step_together(group, exchange, message, group_context)
            except torch.OutOfMemoryError:
                replies = None
            if replies is None:  # outside `except`: the error keeps the step's allocations alive
                self._halve(group, exchange, context)
                continue
            if replies.refusals:
                return protocol.Replies(messages, replies.refusals)
            messages.update(replies.messages)
            context.report("clients", len(messages), len(stepping))
        for client, client_state in hanging:
            client.rollback(client_state)
        for number in lost:
            messages.pop(number, None)
        return protocol.Replies(messages, lost=lost)

    def _group_size(self, context: RoundContext) -> int:
        """Returns the maximum number of clients whose steps are computed together."""
        client_bytes = self.clients[0].method.client_bytes(context)
        if client_bytes is None:
            return 1
        fitting = context.memory_bytes // 2 // max(1, client_bytes)
        return min(max(1, fitting), self._max_group)

    def _halve(self, group: Sequence[ClientRuntime], exchange: str, context: RoundContext) -> None:
        """Halves the maximum size of a group after a step ran out of memory.

        No message has left a client. However, noise may have been drawn, and whether a step fails
        may depend on the data. Therefore a step that has used its charge is not repeated.

        Raises:
            DeviceMemoryError: the group has only one client, or a client has taken a mechanism from
                its release budget.
        """
        device = context.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        location = f"round {context.round}: {device} ran out of memory in a step of {len(group)} "
        location += "client(s)"
        remedy = "Use a smaller batch or a smaller model.width"
        if not all(client.may_try_again(exchange, context) for client in group):
            if len(group) > 1:
                remedy = f"Resume with run.memory_gb below {context.memory_bytes / 2**30:g}"
            raise DeviceMemoryError(f"{location}. The charged step cannot be repeated. {remedy}")
        if len(group) == 1:
            raise DeviceMemoryError(f"{location}. {remedy}")
        self._max_group = (len(group) + 1) // 2
        context.note(f"{location}. From now on, at most {self._max_group} clients share a pass")

    def _failing(
        self, exchange: str, numbers: Sequence[int], context: RoundContext
    ) -> dict[int, str]:
        """Returns the simulated failures in the current exchange, by client.

        If a round has no first exchange, a client that would fail in the first exchange fails in
        the main exchange.
        """
        kinds = {}
        for number in numbers:
            failure = self._settings.failures.of(context.round, number)
            if failure is not None and exchange in (MAIN, failure.exchange):
                kinds[number] = failure.kind
        return kinds

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[protocol.ClientEvaluation]:
        return evaluate_together(self.clients, models, context)

    def gradients(
        self, parameters: Mapping[str, Tensor], context: RoundContext
    ) -> Iterator[tuple[int, Tensor]]:
        for client in self.clients:
            client.begin(context)
            if size := len(client.data.records):
                yield size, mean_gradient(client, parameters, context)
