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
from fedsynth.federation.exchange import Evaluated, Joined, Refusal, Replies, Terms
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.settings import RunSettings
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import FIRST, PHASES

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
        settings: the client's own copy of the run's settings.
        runtime: the client.
        context: public, as `fedsynth.federation.planning.public_context` makes it of the settings,
            with proxy images where the method names them.
        reporter: told of progress.
    """

    def __init__(
        self,
        settings: RunSettings,
        runtime: ClientRuntime,
        context: RoundContext,
        reporter: Reporter | None = None,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._context = replace(context, reporter=reporter or Silent())
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
        """The answer to one frame; what goes wrong is an answer, too."""
        try:
            frame = Frame.from_bytes(sent)
            if frame.kind not in self._answers:
                raise MessageError(f"no client answers {frame.kind!r:.80}")
            return self._answers[frame.kind](frame).to_bytes()
        except (FedsynthError, PrivacyError) as error:
            return Frame("error", {"text": str(error)}).to_bytes()

    def _join(self, frame: Frame) -> Frame:
        if frame.facts.get("agreement") != agreement(self._settings):
            raise MessageError("the server has other settings for this run than the client")
        joined = self._runtime.join(private=self._settings.privacy is not None)
        return Frame(
            "answer",
            {
                "client": joined.client,
                "size": joined.size,
                "history": None if joined.history is None else joined.history.to_json(),
            },
        )

    def _start(self, frame: Frame) -> Frame:
        sizes = frame.facts.get("sizes")
        if self._settings.privacy is None:
            known = None if sizes is None else tuple(_whole(size, "size") for size in sizes)
            federation = replace(self._context.federation, sizes=known)
            self._context = replace(self._context, federation=federation)
            self._runtime.start(Terms(sizes=known))
            return Frame("answer", {})
        plan = PrivacyPlan.checked(self._settings, self._context)
        sigma = frame.facts.get("noise_multiplier")
        if type(sigma) is not float:
            raise MessageError(f"a private run needs a noise multiplier, got {sigma!r:.80}")
        plan = replace(plan, privacy=replace(plan.privacy, noise_multiplier=sigma))
        self._context = plan.in_context(self._context)
        self._runtime.start(Terms(plan=plan))
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
        return replace(self._context, round=number, participants=participants)

    def _prepare(self, frame: Frame) -> Frame:
        refusal = self._runtime.prepare(self._round(frame))
        return Frame("answer", {}) if refusal is None else _refused(refusal)

    def _begin(self, frame: Frame) -> Frame:
        self._runtime.begin(self._round(frame))
        return Frame("answer", {})

    def _step(self, frame: Frame) -> Frame:
        phase = frame.facts.get("phase")
        if phase not in PHASES:
            raise MessageError(f"a round has no exchange {phase!r:.80}")
        context = self._round(frame)
        message = _request_type(self._runtime.method, phase).from_bytes(frame.payload)
        reply = self._runtime.step(phase, message.to(context.device), context)
        if isinstance(reply, Refusal):
            return _refused(reply)
        return Frame("answer", {}, reply.to_bytes())

    def _facts(self, frame: Frame) -> Frame:
        return Frame("answer", {"facts": dict(self._runtime.facts(self._round(frame)))})

    def _history(self, frame: Frame) -> Frame:
        history = self._runtime.history()
        return Frame("answer", {"history": None if history is None else history.to_json()})

    def _evaluate(self, frame: Frame) -> Frame:
        if self._settings.privacy is not None:
            raise PrivacyError("accuracies on a client's own records are not protected")
        context = self._round(frame)
        model = Models.from_bytes(frame.payload).to(context.device)
        return Frame("answer", asdict(self._runtime.evaluate({"model": model.parameters}, context)))


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
        sigma = None if terms.plan is None else terms.plan.sigma
        facts = {"sizes": terms.sizes, "noise_multiplier": sigma}
        self._ask(range(len(self._channels)), Frame("start", facts))

    def prepare(self, context: RoundContext) -> list[Refusal]:
        answers = self._ask(context.active, Frame("prepare", _of_round(context)))
        return [
            _refusal(client, answer)
            for client, answer in zip(context.active, answers, strict=True)
            if answer.kind == "refusal"
        ]

    def begin(self, context: RoundContext) -> None:
        self._ask(context.active, Frame("begin", _of_round(context)))

    def step(self, phase: str, message: Message, context: RoundContext) -> Replies:
        asked = Frame("step", {**_of_round(context), "phase": phase}, message.to_bytes())
        expected = _reply_type(self._method, phase)
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
        sent = frame.to_bytes()
        for client in clients:
            self._channels[client].send(sent)
        answers = [Frame.from_bytes(self._channels[client].receive()) for client in clients]
        for client, answer in zip(clients, answers, strict=True):
            if answer.kind == "error":
                raise RemoteError(f"client {client}: {answer.facts.get('text')}")
        return answers


def _of_round(context: RoundContext) -> dict[str, Any]:
    return {"round": context.round, "participants": list(context.active)}


def _request_type(method: Method, phase: str) -> type[Message]:
    declared = method.first_downlink if phase == FIRST else method.downlink
    if declared is None:
        raise MessageError(f"{method.name} has no {phase} exchange")
    return declared


def _reply_type(method: Method, phase: str) -> type[Message]:
    declared = method.first_upload if phase == FIRST else method.upload
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
