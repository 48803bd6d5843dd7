"""A server's exchange with clients that are elsewhere: each question is a frame to each client
(`fedsynth.federation.exchange.frames`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.exchange.frames import (
    Channel,
    Frame,
    Models,
    agreement,
    declared,
    whole,
)
from fedsynth.federation.exchange.protocol import Evaluated, Joined, Refusal, Replies, Terms, shown
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.history import History


class RemoteError(FedsynthError):
    """A client could not answer."""


class OverWire:
    """A server's exchange with clients that are elsewhere.

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
        self._device = device
        self._asked = 0

    def join(self) -> list[Joined]:
        asked = Frame("join", {"agreement": agreement(self._settings)})
        answers = self._ask(range(len(self._channels)), asked)
        joined = [
            Joined(
                whole(one.facts.get("client"), "client"),
                None if one.facts.get("size") is None else whole(one.facts["size"], "size"),
                _read_history(one.facts.get("history")),
            )
            for one in answers
        ]
        if [one.client for one in joined] != list(range(len(joined))):
            raise RemoteError("the clients must join by number, each once")
        return joined

    def start(self, terms: Terms) -> None:
        facts = {"sizes": terms.sizes, "noise_multiplier": terms.noise_multiplier}
        self._ask(range(len(self._channels)), Frame("start", facts))

    def prepare(self, context: RoundContext) -> list[Refusal]:
        asked = shown(self._settings, context)
        answers = self._ask(asked, Frame("prepare", _of_round(context)))
        return [
            _refusal(client, answer)
            for client, answer in zip(asked, answers, strict=True)
            if answer.kind == "refusal"
        ]

    def begin(self, context: RoundContext) -> None:
        self._ask(shown(self._settings, context), Frame("begin", _of_round(context)))

    def step(self, phase: str, message: Message, context: RoundContext) -> Replies:
        asked = Frame("step", {**_of_round(context), "phase": phase}, message.to_bytes())
        expected = declared(self._method, phase, "upload")
        messages: dict[int, Message] = {}
        refusals: list[Refusal] = []
        answers = self._ask(context.active, asked)
        for client, answer in zip(context.active, answers, strict=True):
            if answer.kind == "refusal":
                refusals.append(_refusal(client, answer))
            else:
                messages[client] = expected.from_bytes(answer.payload).to(self._device)
        return Replies(messages, tuple(refusals))

    def facts(self, context: RoundContext) -> list[Mapping[str, Any]]:
        answers = self._ask(context.active, Frame("facts", _of_round(context)))
        stated = [answer.facts.get("facts") or {} for answer in answers]
        if not all(isinstance(one, dict) for one in stated):
            raise MessageError("a client's facts must be a mapping")
        return stated

    def histories(self) -> list[History]:
        answers = self._ask(range(len(self._channels)), Frame("history", {}))
        stated = [_read_history(answer.facts.get("history")) for answer in answers]
        return [history for history in stated if history is not None]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        everybody = range(len(self._channels))
        of_each: list[list[Frame]] = []
        for parameters in models.values():
            asked = Frame("evaluate", _of_round(context), Models(parameters).to_bytes())
            of_each.append(self._ask(everybody, asked))
        evaluated = []
        for client in everybody:
            answers = [answers[client].facts for answers in of_each]
            right = {
                name: whole(_right(answer), "count")
                for name, answer in zip(models, answers, strict=True)
            }
            size = whole(answers[0].get("size"), "size")
            tested = whole(answers[0].get("tested"), "count")
            evaluated.append(Evaluated(client, size, tested, right))
        return evaluated

    def _ask(self, clients: Sequence[int], frame: Frame) -> list[Frame]:
        """Sends all before it waits for any, so that clients work at the same time."""
        self._asked += 1
        sent = replace(frame, facts={**frame.facts, "number": self._asked}).to_bytes()
        for client in clients:
            self._channels[client].send(sent)
        answers = [Frame.from_bytes(self._channels[client].receive()) for client in clients]
        for client, answer in zip(clients, answers, strict=True):
            said = (answer.facts.get("client"), answer.facts.get("number"))
            if said != (client, self._asked):
                raise RemoteError(
                    f"client {client} was asked request {self._asked}, and {said!r:.80} answers"
                )
            if answer.kind == "error":
                raise RemoteError(f"client {client}: {answer.facts.get('text')}")
        return answers


def _of_round(context: RoundContext) -> dict[str, Any]:
    return {"round": context.round, "participants": list(context.active)}


def _right(answer: Mapping[str, Any]) -> Any:
    """How many a model gets right, by a client's answer; None, where it does not say."""
    stated = answer.get("right")
    return stated.get("model") if isinstance(stated, dict) else None


def _refusal(client: int, answer: Frame) -> Refusal:
    return Refusal(client, str(answer.facts.get("reason")), str(answer.facts.get("kind")))


def _read_history(stated: Any) -> History | None:
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a client's history is damaged: {error!r:.80}") from None
