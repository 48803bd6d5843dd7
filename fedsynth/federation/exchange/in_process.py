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
from fedsynth.privacy.history import History


class InProcess:
    """The exchange of a simulation.

    Args:
        clients: all, by number; with the same settings, and data that are resident together.
    """

    def __init__(self, clients: Sequence[ClientRuntime]) -> None:
        self.clients = list(clients)
        self._settings = self.clients[0].settings

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

    def step(self, phase: str, message: Message, context: RoundContext) -> Replies:
        messages: dict[int, Message] = {}
        for group in self._groups(context):
            reporter = _GroupReporter(
                context.reporter, len(messages), len(group), len(context.active)
            )
            replies = step_together(group, phase, message, replace(context, reporter=reporter))
            if replies.refusals:
                return Replies(messages, replies.refusals)
            messages.update(replies.messages)
        return Replies(messages)

    def facts(self, context: RoundContext) -> list[Mapping[str, Any]]:
        return [self.clients[number].facts(context) for number in context.active]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        return evaluate_together(self.clients, models, context)

    def _groups(self, context: RoundContext) -> Iterator[list[ClientRuntime]]:
        each = self.clients[0].method.client_bytes(context)
        at_once = 1 if each is None else max(1, context.memory_bytes // 2 // max(1, each))
        for start in range(0, len(context.active), at_once):
            yield [self.clients[k] for k in context.active[start : start + at_once]]


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
