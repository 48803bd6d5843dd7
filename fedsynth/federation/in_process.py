"""The exchange of a simulation: all clients run in this process, and the clients of a round are
processed in groups.

The size of a group follows from the memory that one more client needs (`Method.client_bytes`) and
the run's limit; it does not affect the results. If the device still runs out of memory, groups are
halved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsynth.config.participation import CRASHED, TIMED_OUT
from fedsynth.core.context import Reporter, RoundContext
from fedsynth.core.messages import Message
from fedsynth.errors import DeviceMemoryError
from fedsynth.federation.client_group import evaluate_together, step_together
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.protocol import (
    ClientEvaluation,
    ClientInfo,
    Refusal,
    Replies,
    RunTerms,
    affected_clients,
)
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.plans import MAIN


class InProcess:
    """The exchange of a simulation.

    Args:
        clients: all, by index; with the same settings, and data that are resident together. Some
            fail as the settings state (`client_failures`).
    """

    def __init__(self, clients: Sequence[ClientRuntime]) -> None:
        self.clients = list(clients)
        self._settings = self.clients[0].settings
        self._max_group = len(self.clients)  # halved when the device's memory runs out

    def join(self) -> list[ClientInfo]:
        return [client.join() for client in self.clients]

    def start(self, terms: RunTerms) -> None:
        for client in self.clients:
            client.start(terms)

    def histories(self) -> list[History]:
        return [client.ledger.history() for client in self.clients if client.ledger is not None]

    def prepare(self, context: RoundContext) -> list[Refusal]:
        refusals = []
        for number in affected_clients(self._settings, context):
            refusal = self.clients[number].prepare(context)
            if refusal is not None:
                refusals.append(refusal)
        return refusals

    def begin(self, context: RoundContext) -> None:
        for number in affected_clients(self._settings, context):
            self.clients[number].begin(context)

    def step(
        self, phase: str, message: Message, context: RoundContext, numbers: Sequence[int]
    ) -> Replies:
        lost = self._failing(phase, numbers, context)
        stepping = []
        hanging = []
        for number in numbers:
            client = self.clients[number]
            if lost.get(number) != CRASHED:
                stepping.append(client)
            if lost.get(number) == TIMED_OUT:
                hanging.append((client, client.memory))
        messages: dict[int, Message] = {}
        while len(messages) < len(stepping):
            group = stepping[len(messages) :][: self._group_size(context)]
            reporter = _GroupReporter(context.reporter, len(messages), len(group), len(stepping))
            group_context = replace(context, reporter=reporter)
            try:
                replies = step_together(group, phase, message, group_context)
            except torch.OutOfMemoryError:
                replies = None
            if replies is None:  # outside `except`: the error keeps the step's allocations alive
                self._halve(group, phase, context)
                continue
            if replies.refusals:
                return Replies(messages, replies.refusals)
            messages.update(replies.messages)
        for client, memory in hanging:
            client.rollback(memory)
        for number in lost:
            messages.pop(number, None)
        return Replies(messages, lost=lost)

    def _group_size(self, context: RoundContext) -> int:
        """Returns the number of clients that are processed in one pass."""
        client_bytes = self.clients[0].method.client_bytes(context)
        if client_bytes is None:
            return 1
        fitting = context.memory_bytes // 2 // max(1, client_bytes)
        return min(max(1, fitting), self._max_group)

    def _halve(self, group: Sequence[ClientRuntime], phase: str, context: RoundContext) -> None:
        """Halves the group size after a step ran out of memory.

        No message has left a client. But noise may have been drawn, and whether a step fails may
        depend on the data: a charge is for one attempt.

        Raises:
            DeviceMemoryError: it is only one client, or some have used part of their allowance.
        """
        device = context.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        location = f"round {context.round}: {device} ran out of memory in a step of "
        location += f"{len(group)} client(s)"
        smaller = (len(group) + 1) // 2
        remedy = "use a smaller batch or a smaller model.width"
        if not all(client.may_try_again(phase, context) for client in group):
            if len(group) > 1:
                remedy = (
                    f"resume with a smaller run.memory_gb than {context.memory_bytes / 2**30:g}"
                )
            raise DeviceMemoryError(
                f"{location} with differential privacy; it is charged and cannot be "
                f"repeated, because a charge covers one draw of noise: {remedy}"
            )
        if len(group) == 1:
            raise DeviceMemoryError(f"{location}, number {group[0].number}: {remedy}")
        self._max_group = smaller
        context.note(
            f"{location}; from now on, at most {smaller} clients share a pass, which does "
            "not change results"
        )

    def _failing(self, phase: str, numbers: Sequence[int], context: RoundContext) -> dict[int, str]:
        """Returns the clients that fail in this exchange, with the kind of failure. If a round has
        no first exchange, the failures drawn for it count in the main exchange."""
        kinds = {}
        for number in numbers:
            failure = self._settings.failures.of(context.round, number)
            if failure is not None and phase in (MAIN, failure.phase):
                kinds[number] = failure.kind
        return kinds

    def facts(self, context: RoundContext, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self.clients[number].facts(context) for number in numbers]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[ClientEvaluation]:
        return evaluate_together(self.clients, models, context)


@dataclass(frozen=True)
class _GroupReporter:
    """Converts the progress of one group to the progress of the round.

    Args:
        reporter: the round's.
        finished: the number of clients that have taken their step.
        size: the number of clients in the group.
        clients: the number of clients that take a step in this exchange.
    """

    reporter: Reporter
    finished: int
    size: int
    clients: int

    def report(self, phase: str, completed: int, total: int) -> None:
        steps = self.finished * total + completed * self.size
        self.reporter.report(phase, steps, self.clients * total)

    def note(self, text: str) -> None:
        self.reporter.note(text)
