"""An exchange without a wire: all clients in this process, those of a round in groups.

How many clients share a group is decided by what one more of them takes in memory
(`Method.client_bytes`) and the run's bound; it has no influence on what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedsynth.core.context import Reporter, RoundContext
from fedsynth.core.messages import Message
from fedsynth.federation.exchange.client_runtime import (
    ClientRuntime,
    evaluate_together,
    step_together,
)
from fedsynth.federation.exchange.protocol import Evaluated, Joined, Refusal, Replies, Terms, shown
from fedsynth.federation.terms.failures import CRASHED, TIMED_OUT
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import MAIN


class InProcess:
    """The exchange of a simulation.

    Args:
        clients: all, by number; with the same settings, and data that are resident together.
            Those fail that the settings say (`client_failures`).
    """

    def __init__(self, clients: Sequence[ClientRuntime]) -> None:
        self.clients = list(clients)
        self._settings = self.clients[0].settings
        self._failures = self._settings.failures

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
        asked: Sequence[int] | None = None,
    ) -> Replies:
        numbers = context.active if asked is None else asked
        lost = self._failing(phase, numbers, context)
        working = [number for number in numbers if lost.get(number) != CRASHED]
        hanging = [self.clients[k] for k, why in lost.items() if why == TIMED_OUT]
        before = [client.memory for client in hanging]
        messages: dict[int, Message] = {}
        for group in self._groups(working, context):
            reporter = _GroupReporter(context.reporter, len(messages), len(group), len(working))
            replies = step_together(group, phase, message, replace(context, reporter=reporter))
            if replies.refusals:
                return Replies(messages, replies.refusals)
            messages.update(replies.messages)
        for client, memory in zip(hanging, before, strict=True):
            client.forget(memory)
        arrived = {number: sent for number, sent in messages.items() if number not in lost}
        return Replies(arrived, lost=lost)

    def _failing(self, phase: str, numbers: Sequence[int], context: RoundContext) -> dict[int, str]:
        """Which of these clients fail in this exchange, and how: in the main one also those whose
        time was in a first one that the round did not have."""
        found = {number: self._failures.of(context.round, number) for number in numbers}
        return {
            number: failure.kind
            for number, failure in found.items()
            if failure is not None and phase in (MAIN, failure.phase)
        }

    def facts(
        self, context: RoundContext, asked: Sequence[int] | None = None
    ) -> list[Mapping[str, Any]]:
        numbers = context.active if asked is None else asked
        return [self.clients[number].facts(context) for number in numbers]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        return evaluate_together(self.clients, models, context)

    def _groups(
        self, numbers: Sequence[int], context: RoundContext
    ) -> Iterator[list[ClientRuntime]]:
        each = self.clients[0].method.client_bytes(context)
        at_once = 1 if each is None else max(1, context.memory_bytes // 2 // max(1, each))
        for start in range(0, len(numbers), at_once):
            yield [self.clients[k] for k in numbers[start : start + at_once]]


@dataclass(frozen=True)
class _GroupReporter:
    """Turns one group's steps into the round's: `before` clients are done, `share` are in it."""

    reporter: Reporter
    before: int
    share: int
    clients: int

    def report(self, phase: str, done: int, total: int) -> None:
        self.reporter.report(phase, self.before * total + done * self.share, self.clients * total)

    def note(self, text: str) -> None:
        self.reporter.note(text)
