"""A server's exchange with clients that are elsewhere: each question is a frame to each client
(`fedsynth.core.frames`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.frames import LONGEST_HEADER, Frame, whole
from fedsynth.core.messages import LENGTH_BYTES, Message
from fedsynth.core.uploads import LARGEST, most_bytes
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.exchange.channel import (
    BROKEN_CHANNEL,
    LONGEST_FACTS,
    Channel,
    Models,
    agreement,
    declared,
)
from fedsynth.federation.exchange.protocol import (
    BUDGET,
    REQUEST,
    Evaluated,
    Joined,
    Refusal,
    Replies,
    Terms,
    shown,
)
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.history import History


class RemoteError(FedsynthError):
    """A client could not answer."""


class OverWire:
    """A server's exchange with clients that are elsewhere.

    A client that cannot be reached in a round, takes too long, or answers with an error is lost for
    that round and asked again in the next. Nothing of an answer is read that is longer than what
    its client may send. The run needs every client to join, to be told the terms, and to say what
    its ledger holds.

    Args:
        settings: the server's copy of the run's settings.
        channels: to each client, by number.
        device: where replies are put.
    """

    def __init__(
        self, settings: RunSettings, channels: Sequence[Channel], device: torch.device
    ) -> None:
        self._settings = settings
        self._method = settings.method
        self._channels = list(channels)
        self._everybody = range(len(self._channels))
        self._device = device
        self._asked = 0
        self._lost: dict[int, str] = {}  # in this round, and why

    def join(self) -> list[Joined]:
        asked = Frame("join", {"agreement": agreement(self._settings)})
        answers = self._ask(self._everybody, asked)
        joined = [
            Joined(
                whole(one.facts.get("client"), "client"),
                None if one.facts.get("size") is None else whole(one.facts["size"], "size"),
                read_history(one.facts.get("history")),
            )
            for one in answers
        ]
        if [one.client for one in joined] != list(range(len(joined))):
            raise RemoteError("the clients must join by number, each once")
        return joined

    def start(self, terms: Terms) -> None:
        facts = {"sizes": terms.sizes, "noise_multiplier": terms.noise_multiplier}
        self._ask(self._everybody, Frame("start", facts))

    def prepare(self, context: RoundContext) -> list[Refusal]:
        """A client that does not answer is lost for the round."""
        self._lost = {}
        answers = self._of(shown(self._settings, context), Frame("prepare", of_round(context)))
        return self._refusals(answers)[0]

    def begin(self, context: RoundContext) -> None:
        self._of(shown(self._settings, context), Frame("begin", of_round(context)))

    def step(
        self,
        phase: str,
        message: Message,
        context: RoundContext,
        asked: Sequence[int] | None = None,
    ) -> Replies:
        frame = Frame("step", {**of_round(context), "phase": phase}, message.to_bytes())
        numbers = context.active if asked is None else asked
        expected = declared(self._method, phase, "upload")
        longest = {
            client: most_bytes(expected, self._method.upload_rules(phase, client, context))
            for client in numbers
        }
        answers = self._of(numbers, frame, longest)
        spent, unsound = self._refusals(answers)
        if answers and len(unsound) == len(answers):  # what all refuse is the server's mistake
            return Replies(refusals=tuple(unsound))
        messages: dict[int, Message] = {}
        rejected: dict[int, str] = {}
        for client, answer in answers.items():
            if answer.kind == "refusal":
                continue
            try:
                messages[client] = expected.from_bytes(answer.payload).to(self._device)
            except MessageError as error:
                rejected[client] = str(error)
        lost = {client: self._lost[client] for client in numbers if client in self._lost}
        return Replies(messages, tuple(spent), lost, rejected)

    def facts(
        self, context: RoundContext, asked: Sequence[int] | None = None
    ) -> list[Mapping[str, Any]]:
        numbers = context.active if asked is None else asked
        answers = self._of(numbers, Frame("facts", of_round(context)))
        return alike([answer.facts.get("facts") for answer in answers.values()])

    def histories(self) -> list[History]:
        answers = self._ask(self._everybody, Frame("history", {}))
        stated = [read_history(answer.facts.get("history")) for answer in answers]
        return [history for history in stated if history is not None]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        of_each: list[dict[int, Frame]] = []
        for parameters in models.values():
            asked = Frame("evaluate", of_round(context), Models(parameters).to_bytes())
            of_each.append(self._of(self._everybody, asked))
        evaluated = []
        for client in self._everybody:
            if client in self._lost:
                continue
            try:
                found = _evaluated(client, models, [answers[client].facts for answers in of_each])
            except (MessageError, LookupError, TypeError) as error:
                self._lost[client] = f"tells no accuracy: {error!r:.80}"
            else:
                evaluated.append(found)
        return evaluated

    def _refusals(self, answers: Mapping[int, Frame]) -> tuple[list[Refusal], list[Refusal]]:
        """Those of clients whose budget is spent, and others: these are lost for the round."""
        spent: list[Refusal] = []
        unsound: list[Refusal] = []
        for client, answer in answers.items():
            if answer.kind != "refusal":
                continue
            reason = f"{answer.facts.get('reason')!s:.500}"
            if answer.facts.get("kind") == BUDGET and self._settings.privacy is not None:
                spent.append(Refusal(client, reason))
            else:
                unsound.append(Refusal(client, reason, REQUEST))
                self._lost[client] = f"refuses: {reason}"
        return spent, unsound

    def _of(
        self, clients: Sequence[int], frame: Frame, longest: Mapping[int, int] | None = None
    ) -> dict[int, Frame]:
        """The answers of those clients of a round that are not lost; who does not answer, or with
        an error, is lost from now on.

        Args:
            clients: their numbers.
            frame: the question.
            longest: of each client the most bytes of a payload; None: there is none.
        """
        there = [client for client in clients if client not in self._lost]
        answers: dict[int, Frame] = {}
        for client, answer in self._asked_all(there, frame, longest).items():
            if isinstance(answer, Frame):
                answers[client] = answer
            else:
                self._lost[client] = answer
        return answers

    def _ask(self, clients: Sequence[int], frame: Frame) -> list[Frame]:
        """The answers of clients that the run cannot do without.

        Raises:
            RemoteError: one of them is lost.
        """
        answers = []
        for client, answer in self._asked_all(clients, frame, None).items():
            if not isinstance(answer, Frame):
                raise RemoteError(f"client {client}: {answer}")
            answers.append(answer)
        return answers

    def _asked_all(
        self, clients: Sequence[int], frame: Frame, longest: Mapping[int, int] | None
    ) -> dict[int, Frame | str]:
        """Each client's answer, or why there is none. Sends all before it waits for any, so that
        clients work at the same time."""
        self._asked += 1
        sent = replace(frame, facts={**frame.facts, "number": self._asked}).to_bytes()
        answers: dict[int, Frame | str] = {}
        for client in clients:
            try:
                self._channels[client].send(sent)
            except BROKEN_CHANNEL as error:
                answers[client] = f"cannot be reached ({type(error).__name__})"
        for client in clients:
            if client not in answers:
                most = LONGEST_HEADER if longest is None else LONGEST_FACTS + longest[client]
                answers[client] = self._answer(client, most + LENGTH_BYTES)
        return {client: answers[client] for client in clients}

    def _answer(self, client: int, longest: int) -> Frame | str:
        """A client's answer to the last question, or why there is none.

        What it answers to earlier ones, which the server has given up waiting for, is passed over.
        """
        for _ in range(self._asked):
            try:
                received = self._channels[client].receive(longest)
            except BROKEN_CHANNEL as error:
                return f"does not answer ({type(error).__name__})"
            if len(received) > longest:
                return f"sends {len(received)} bytes, above the {longest} that it may"
            try:
                answer = Frame.from_bytes(received)
            except MessageError as error:
                return str(error)
            said = (answer.facts.get("client"), answer.facts.get("number"))
            if said == (client, self._asked):
                return sound(answer)
            late = type(said[1]) is int and said[0] == client and said[1] < self._asked
            if not late:
                break
        return f"was asked request {self._asked}, and {said!r:.80} answers"


def sound(answer: Frame) -> Frame | str:
    """An answer as it is; an error as the reason why there is none."""
    if answer.kind not in ("answer", "refusal"):
        return f"answers with an error: {answer.facts.get('text')!s:.200}"
    return answer


def of_round(context: RoundContext) -> dict[str, Any]:
    return {"round": context.round, "participants": list(context.active)}


def _evaluated(
    client: int, models: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> Evaluated:
    """What a client says of all models."""
    size = whole(answers[0]["size"], "size")
    tested = whole(answers[0]["tested"], "count")
    right: dict[str, int] = {}
    for name, answer in zip(models, answers, strict=True):
        right[name] = whole(answer["right"]["model"], "count")
        if right[name] > tested:
            raise MessageError(f"{right[name]} of {tested} are right")
    return Evaluated(client, size, tested, right)


def alike(told: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Facts that a method can merge: finite numbers by name, or such by name once more, of the
    names that most clients have."""
    forms = {position: form for position, one in enumerate(told) if (form := _form(one))}
    most = Counter(forms.values()).most_common(1)
    return [told[position] for position, form in forms.items() if form == most[0][0]]


def _form(value: Any, depth: int = 2) -> str:
    """The names in a client's facts; empty: it tells none, or something else."""
    if not isinstance(value, dict) or not depth:
        return ""
    parts = []
    for name, one in sorted(value.items()):
        number = type(one) in (int, float) and abs(one) <= LARGEST
        inner = "" if number else _form(one, depth - 1)
        if not (number or inner):
            return ""
        parts.append(f"{name!r}:{inner}")
    return f"{{{','.join(parts)}}}" if parts else ""


def read_history(stated: Any) -> History | None:
    """What a client says of its ledger; None: it has none.

    Raises:
        MessageError: it is damaged.
    """
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a client's history is damaged: {error!r:.80}") from None
