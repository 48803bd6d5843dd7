"""An exchange without a wire: all clients in this process, those of a round in groups.

How many clients share a group is decided by what one more of them takes in memory
(`Method.client_bytes`) and the run's bound; it has no influence on what is computed. Where the
device's memory runs out all the same, groups become half as large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.context import Reporter, RoundContext
from fedsynth.core.messages import Message
from fedsynth.errors import DeviceMemoryError
from fedsynth.federation.exchange.client_group import evaluate_together, step_together
from fedsynth.federation.exchange.client_runtime import ClientRuntime
from fedsynth.federation.exchange.protocol import Evaluated, Joined, Refusal, Replies, Terms, shown
from fedsynth.federation.terms.participation import CRASHED, TIMED_OUT
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
        self._most = len(self.clients)  # in a group; less once the device's memory ran out

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
        asked: Sequence[int],
    ) -> Replies:
        lost = self._failing(phase, asked, context)
        working = [number for number in asked if lost.get(number) != CRASHED]
        hanging = [self.clients[k] for k, why in lost.items() if why == TIMED_OUT]
        before = [client.memory for client in hanging]
        messages: dict[int, Message] = {}
        while len(messages) < len(working):
            group = self._group(working, len(messages), context)
            reporter = _GroupReporter(context.reporter, len(messages), len(group), len(working))
            told = replace(context, reporter=reporter)
            try:
                replies = step_together(group, phase, message, told)
            except torch.OutOfMemoryError:
                replies = None
            if replies is None:  # after the error, which holds on to what the step has allocated
                self._halve(group, phase, context)
                continue
            if replies.refusals:
                return Replies(messages, replies.refusals)
            messages.update(replies.messages)
        for client, memory in zip(hanging, before, strict=True):
            client.forget(memory)
        arrived = {number: sent for number, sent in messages.items() if number not in lost}
        return Replies(arrived, lost=lost)

    def _halve(self, group: Sequence[ClientRuntime], phase: str, context: RoundContext) -> None:
        """From now on groups of half as many as this one, whose step failed.

        No message has left a client. But noise may have been drawn, and whether a step fails may
        depend on the data: a charge serves one attempt.

        Raises:
            DeviceMemoryError: it is one client alone, or some have used what they were charged for.
        """
        device = context.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        whose = f"round {context.round}: {device} ran out of memory in a step of "
        whose += _clients(len(group))
        fewer = (len(group) + 1) // 2
        alone = "use a smaller batch or a smaller model.width"
        if not all(one.may_try_again(phase, context) for one in group):
            each = self.clients[0].method.client_bytes(context)
            bound = f"{2 * fewer * (each or 0) / 2**30:.3g}"
            remedy = f"go on with run.memory_gb={bound}"
            raise DeviceMemoryError(
                f"{whose} with differential privacy; it is charged, and is not taken again, as one "
                f"charge pays for one draw of noise: {alone if len(group) == 1 else remedy}"
            )
        if len(group) == 1:
            raise DeviceMemoryError(f"{whose}, number {group[0].number}: {alone}")
        self._most = fewer
        context.note(f"{whose}; from now on at most {fewer} share a pass, which moves no result")

    def _failing(self, phase: str, numbers: Sequence[int], context: RoundContext) -> dict[int, str]:
        """Which of these clients fail in this exchange, and how: in the main one also those whose
        time was in a first one that the round did not have."""
        found = {number: self._failures.of(context.round, number) for number in numbers}
        return {
            number: failure.kind
            for number, failure in found.items()
            if failure is not None and phase in (MAIN, failure.phase)
        }

    def facts(self, context: RoundContext, asked: Sequence[int]) -> list[Mapping[str, Any]]:
        return [self.clients[number].facts(context) for number in asked]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        return evaluate_together(self.clients, models, context)

    def _group(
        self, numbers: Sequence[int], start: int, context: RoundContext
    ) -> list[ClientRuntime]:
        """Those of these clients, from this position on, that share a pass."""
        each = self.clients[0].method.client_bytes(context)
        at_once = 1 if each is None else max(1, context.memory_bytes // 2 // max(1, each))
        stop = start + min(at_once, self._most)
        return [self.clients[k] for k in numbers[start:stop]]


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


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
