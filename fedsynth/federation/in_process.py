"""An exchange within one process: all clients are in this process, those of a round in groups.

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
from fedsynth.federation.protocol import Evaluated, Joined, Refusal, Replies, Terms, shown
from fedsynth.privacy.ledger.history import History
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
        self._failures = self._settings.failures
        self._most = len(self.clients)  # per group; halved when the device's memory runs out

    def join(self) -> list[Joined]:
        return [client.join() for client in self.clients]

    def start(self, terms: Terms) -> None:
        for client in self.clients:
            client.start(terms)

    def histories(self) -> list[History]:
        stated = [client.history() for client in self.clients]
        return [history for history in stated if history is not None]

    def prepare(self, context: RoundContext) -> list[Refusal]:
        answers = [self.clients[k].prepare(context) for k in shown(self._settings, context)]
        return [answer for answer in answers if answer is not None]

    def begin(self, context: RoundContext) -> None:
        for number in shown(self._settings, context):
            self.clients[number].begin(context)

    def step(
        self,
        phase: str,
        message: Message,
        context: RoundContext,
        numbers: Sequence[int],
    ) -> Replies:
        lost = self._failing(phase, numbers, context)
        working = [number for number in numbers if lost.get(number) != CRASHED]
        hanging = [self.clients[k] for k, why in lost.items() if why == TIMED_OUT]
        memories = [client.memory for client in hanging]
        messages: dict[int, Message] = {}
        while len(messages) < len(working):
            group = self._group(working, len(messages), context)
            reporter = _GroupReporter(context.reporter, len(messages), len(group), len(working))
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
        for client, memory in zip(hanging, memories, strict=True):
            client.forget(memory)
        arrived = {number: sent for number, sent in messages.items() if number not in lost}
        return Replies(arrived, lost=lost)

    def _halve(self, group: Sequence[ClientRuntime], phase: str, context: RoundContext) -> None:
        """Halves the size of groups, after a step of this one ran out of memory.

        No message has left a client. But noise may have been drawn, and whether a step fails may
        depend on the data: a charge is for one attempt.

        Raises:
            DeviceMemoryError: it is only one client, or some have used part of their allowance.
        """
        device = context.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        location = f"round {context.round}: {device} ran out of memory in a step of "
        location += _clients(len(group))
        fewer = (len(group) + 1) // 2
        advice = "use a smaller batch or a smaller model.width"
        if not all(client.may_try_again(phase, context) for client in group):
            client_bytes = self.clients[0].method.client_bytes(context)
            bound = f"{2 * fewer * (client_bytes or 0) / 2**30:.3g}"
            remedy = f"resume with run.memory_gb={bound}"
            raise DeviceMemoryError(
                f"{location} with differential privacy; it is charged and cannot be "
                "repeated, because a charge covers one draw of noise: "
                f"{advice if len(group) == 1 else remedy}"
            )
        if len(group) == 1:
            raise DeviceMemoryError(f"{location}, number {group[0].number}: {advice}")
        self._most = fewer
        context.note(
            f"{location}; from now on, at most {fewer} clients share a pass, which does "
            "not change results"
        )

    def _failing(self, phase: str, numbers: Sequence[int], context: RoundContext) -> dict[int, str]:
        """Returns which of these clients fail in this exchange, and how. The main exchange also has
        the failures of a first exchange that the round does not have.
        """
        failures = {number: self._failures.of(context.round, number) for number in numbers}
        return {
            number: failure.kind
            for number, failure in failures.items()
            if failure is not None and phase in (MAIN, failure.phase)
        }

    def facts(self, context: RoundContext, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self.clients[number].facts(context) for number in numbers]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        return evaluate_together(self.clients, models, context)

    def _group(
        self, numbers: Sequence[int], start: int, context: RoundContext
    ) -> list[ClientRuntime]:
        """Returns the clients, from this position on, that share a pass."""
        client_bytes = self.clients[0].method.client_bytes(context)
        at_once = (
            1 if client_bytes is None else max(1, context.memory_bytes // 2 // max(1, client_bytes))
        )
        stop = start + min(at_once, self._most)
        return [self.clients[k] for k in numbers[start:stop]]


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


@dataclass(frozen=True)
class _GroupReporter:
    """Converts one group's progress to the round's: `before` clients are done, `share` are in
    it.
    """

    reporter: Reporter
    before: int
    share: int
    clients: int

    def report(self, phase: str, completed: int, total: int) -> None:
        self.reporter.report(
            phase, self.before * total + completed * self.share, self.clients * total
        )

    def note(self, text: str) -> None:
        self.reporter.note(text)
