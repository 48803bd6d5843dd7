"""An exchange over bytes: what a server and its clients send each other where they are apart.

A frame is a JSON header (its length first, 8 bytes little-endian) and, for requests, replies and
models, one packed message (`fedsynth.core.messages`). Nothing in it is executed. Whatever carries
frames (pipes, HTTP, Flower) is a `Channel`; `RemoteClient` answers them where the client's data
are, and `OverWire` is the server's exchange.

Both sides have the run's settings before: a client takes part by its own copy, caps included, and
refuses a server that has others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedsynth.core.context import Reporter, RoundContext, Silent
from fedsynth.core.messages import LENGTH_BYTES, Message, Packed
from fedsynth.core.method import Method
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.exchange import Evaluated, Joined, Refusal, Replies, Terms, shown
from fedsynth.federation.settings import RunSettings
from fedsynth.privacy.errors import PrivacyError, RequestRefusedError
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import PHASES

BROKEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a request that is not sound can raise in a step."""

LONGEST_HEADER = 64 * 2**20
"""Bytes; a ledger's history is in a header."""


class RemoteError(FedsynthError):
    """A client could not answer."""


class Channel(Protocol):
    """Carries frames to one client and back, in order."""

    def send(self, frame: bytes) -> None: ...

    def receive(self) -> bytes: ...


@dataclass(frozen=True)
class Models(Packed):
    """One model to be tested: its parameters and buffers by name."""

    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class Frame:
    """What is sent at once.

    Args:
        kind: what is asked, or "answer", "refusal" or "error".
        facts: JSON values.
        payload: a packed message, or none.
    """

    kind: str
    facts: Mapping[str, Any]
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        header = json.dumps({"kind": self.kind, "facts": self.facts}, allow_nan=False).encode()
        return len(header).to_bytes(LENGTH_BYTES, "little") + header + self.payload

    @classmethod
    def from_bytes(cls, sent: bytes) -> Frame:
        """The frame that was sent.

        Raises:
            MessageError: the bytes are none.
        """
        length = int.from_bytes(sent[:LENGTH_BYTES], "little")
        if len(sent) < LENGTH_BYTES or length > min(LONGEST_HEADER, len(sent) - LENGTH_BYTES):
            raise MessageError("these bytes are no frame of fedsynth: its header is cut off")
        end = LENGTH_BYTES + length
        try:
            header = json.loads(sent[LENGTH_BYTES:end])
            kind = header["kind"]
            facts = header["facts"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise MessageError(f"these bytes are no frame of fedsynth: {error!r:.80}") from None
        if not (isinstance(kind, str) and isinstance(facts, dict)):
            raise MessageError("these bytes are no frame of fedsynth: its header has other types")
        return cls(kind, facts, sent[end:])


def agreement(settings: RunSettings) -> str:
    """A hash of all settings that both sides must share: all but where they compute, and where a
    client keeps its ledgers."""
    shared = settings.to_mapping()
    for own in ("device", "memory_gb", "compile"):
        shared["run"].pop(own, None)
    shared["data"].pop("data_root", None)
    shared.get("privacy", {}).pop("ledger", None)
    text = json.dumps(shared, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class RemoteClient:
    """Answers a server's frames for one client, in the process that has the client's data.

    Args:
        runtime: the client, with its own copy of the run's settings.
        context: public, as `fedsynth.federation.planning.public_context` makes it of the settings,
            with proxy images where the method names them.
        reporter: told of progress.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        context: RoundContext,
        reporter: Reporter | None = None,
    ) -> None:
        self._settings = runtime.settings
        self.runtime = runtime
        self._reporter = reporter or Silent()
        self._context = replace(context, reporter=self._reporter)
        self._joined = False
        self._done: set[tuple[int, str]] = set()
        self._answers: dict[str, Callable[[Frame], Frame]] = {
            "join": self._join,
            "start": self._start,
            "prepare": self._prepare,
            "begin": self._begin,
            "step": self._step,
            "facts": self._facts,
            "history": self._history,
            "evaluate": self._evaluate,
        }

    def answer(self, sent: bytes) -> bytes:
        """The answer to one frame; what goes wrong is an answer, too.

        An error that is none of fedsynth's own may speak of records: its text stays here, with the
        reporter.
        """
        asked: Any = None
        try:
            frame = Frame.from_bytes(sent)
            asked = frame.facts.get("number")
            if frame.kind not in self._answers:
                raise MessageError(f"no client answers {frame.kind!r:.80}")
            answer = self._answers[frame.kind](frame)
        except (MessageError, RequestRefusedError) as error:
            answer = Frame("error", {"text": str(error)})
        except (FedsynthError, PrivacyError) as error:
            answer = self._failed(error)
        except BROKEN as error:
            answer = self._failed(error)
        named = {"client": self.runtime.number, "number": asked if type(asked) is int else None}
        return replace(answer, facts={**answer.facts, **named}).to_bytes()

    def _failed(self, error: Exception) -> Frame:
        """Says the kind of error alone: its text may speak of records, or of this machine."""
        self._reporter.note(f"a request failed: {error!r}")
        return Frame("error", {"text": f"the request failed ({type(error).__name__})"})

    def _join(self, frame: Frame) -> Frame:
        if frame.facts.get("agreement") != agreement(self._settings):
            raise MessageError("the server has other settings for this run than the client")
        joined = self.runtime.join()
        self._joined = True
        return Frame(
            "answer",
            {
                "size": joined.size,
                "history": None if joined.history is None else joined.history.to_json(),
            },
        )

    def _start(self, frame: Frame) -> Frame:
        if not self._joined:
            raise RequestRefusedError("a client joins before it is told the terms")
        sizes = frame.facts.get("sizes")
        if sizes is not None:
            if not isinstance(sizes, list) or len(sizes) != self._context.clients:
                raise MessageError("the terms need the size of every client")
            sizes = tuple(_whole(size, "size") for size in sizes)
        terms = Terms(sizes, frame.facts.get("noise_multiplier"))
        self._context = replace(self.runtime.start(terms), reporter=self._reporter)
        return Frame("answer", {})

    def _round(self, frame: Frame) -> RoundContext:
        number = _whole(frame.facts.get("round"), "round")
        clients = self._context.clients
        named = frame.facts.get("participants")
        if not isinstance(named, list) or not named:
            raise MessageError("a round needs its participants")
        participants = tuple(_whole(one, "participant") for one in named)
        if list(participants) != sorted(set(participants)) or participants[-1] >= clients:
            raise MessageError(f"the participants must be of the {clients} clients, ascending")
        if not 1 <= number <= self._settings.rounds:
            raise RequestRefusedError(f"the run has {self._settings.rounds} rounds, not {number}")
        budget = self.runtime.budget
        if budget is not None and participants != budget.plan.participation.in_round(number):
            raise RequestRefusedError(f"others take part in round {number} by the run's settings")
        return replace(self._context, round=number, participants=participants)

    def _prepare(self, frame: Frame) -> Frame:
        refusal = self.runtime.prepare(self._round(frame))
        return Frame("answer", {}) if refusal is None else _refused(refusal)

    def _begin(self, frame: Frame) -> Frame:
        self.runtime.begin(self._round(frame))
        return Frame("answer", {})

    def _step(self, frame: Frame) -> Frame:
        phase = frame.facts.get("phase")
        if phase not in PHASES:
            raise MessageError(f"a round has no exchange {phase!r:.80}")
        context = self._round(frame)
        method = self.runtime.method
        expected = _declared(method, method.exchange_types(phase).downlink, phase)
        message = expected.from_bytes(frame.payload)
        if self.runtime.number not in context.active:
            raise RequestRefusedError("this client takes no part in the round")
        if (context.round, phase) in self._done and self.runtime.private:
            raise RequestRefusedError(f"round {context.round} was answered before")
        self._done.add((context.round, phase))
        reply = self.runtime.step(phase, message.to(context.device), context)
        if isinstance(reply, Refusal):
            return _refused(reply)
        return Frame("answer", {}, reply.to_bytes())

    def _facts(self, frame: Frame) -> Frame:
        return Frame("answer", {"facts": dict(self.runtime.facts(self._round(frame)))})

    def _history(self, frame: Frame) -> Frame:
        history = self.runtime.history()
        return Frame("answer", {"history": None if history is None else history.to_json()})

    def _evaluate(self, frame: Frame) -> Frame:
        if self._settings.privacy is not None:
            raise RequestRefusedError("accuracies on a client's own records are not protected")
        context = self._round(frame)
        model = Models.from_bytes(frame.payload).to(context.device)
        return Frame("answer", asdict(self.runtime.evaluate({"model": model.parameters}, context)))


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
                _whole(one.facts.get("client"), "client"),
                None if one.facts.get("size") is None else _whole(one.facts["size"], "size"),
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
        upload = self._method.exchange_types(phase).upload
        expected = _declared(self._method, upload, phase)
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
        return [dict(answer.facts.get("facts") or {}) for answer in answers]

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
                name: _whole(answer["right"]["model"], "count")
                for name, answer in zip(models, answers, strict=True)
            }
            size = _whole(answers[0]["size"], "size")
            tested = _whole(answers[0]["tested"], "count")
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


def _declared(method: Method, declared: type[Message] | None, phase: str) -> type[Message]:
    if declared is None:
        raise MessageError(f"{method.name} has no {phase} exchange")
    return declared


def _refused(refusal: Refusal) -> Frame:
    return Frame("refusal", {"reason": refusal.reason, "kind": refusal.kind})


def _refusal(client: int, answer: Frame) -> Refusal:
    return Refusal(client, str(answer.facts.get("reason")), str(answer.facts.get("kind")))


def _read_history(stated: Any) -> History | None:
    if stated is None:
        return None
    try:
        return History.from_json(stated)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"a client's history is damaged: {error!r:.80}") from None


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise MessageError(f"a {what} must be a whole number of at least 0, got {value!r:.80}")
    return value
