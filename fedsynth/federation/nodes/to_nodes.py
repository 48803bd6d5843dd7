"""A server's exchange with data owners' nodes, a message an exchange.

It differs from `OverWire` in who takes part: a node that does not come, or whose owner declines, is
out for the run, and one whose budget is spent is out for the round; the round goes on with the
others as long as they are a quorum. Silence is no error of anybody's: a node that was killed says
nothing, and is lost when the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedsynth.core.context import RoundContext
from fedsynth.core.frames import LONGEST_HEADER, Frame, whole
from fedsynth.core.messages import LENGTH_BYTES, Message
from fedsynth.errors import MessageError
from fedsynth.federation.exchange.channel import LONGEST_FACTS, agreement
from fedsynth.federation.exchange.over_wire import (
    OverWire,
    RemoteError,
    alike,
    of_round,
    read_history,
    sound,
)
from fedsynth.federation.exchange.protocol import Joined, Refusal, Replies, Terms
from fedsynth.federation.exchange.rounds import needed_uploads
from fedsynth.federation.exchange.secure_step import SecureStep
from fedsynth.federation.nodes.bundles import pack, unpack
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import MAIN
from fedsynth.validation import MAX_SECONDS, check_number

WAITING = ("start", "prepare", "begin")
"""Frames that wait for the next message: nothing is released for them."""
AFTER = ("facts", "history")
"""Frames that go with a step."""


class Carrier(Protocol):
    """Carries messages to nodes, which it knows by their own numbers, and back.

    Attributes:
        run: the run that they are of; set before anything is sent.
    """

    run: str

    def nodes(self) -> Sequence[int]:
        """Those that are there now."""

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | str]:
        """The answers of those nodes that answer in time; for others the reason, or nothing."""


@dataclass(frozen=True)
class Patience:
    """How long a server waits, in seconds.

    Args:
        join: for all clients to join.
        answer: for the answer to a message, the client's step included.
        look: between two looks for nodes.

    Raises:
        SettingError: a number that is negative, not finite or more than three years.
    """

    join: float = 600.0
    answer: float = 3600.0
    look: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(None, f"{name}_seconds", value, 0, MAX_SECONDS)


@dataclass
class _Known:
    """A client that has joined, as the server knows it."""

    node: int
    history: History | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: bool = False


class ToNodes(OverWire):
    """A server's exchange with nodes.

    Args:
        proposal: the run's.
        carrier: to the nodes.
        device: where replies are put.
        patience: how long it waits.
        numbers: which client each node is, where the server knows (by the keys that they
            authenticate with); empty: each says so itself.
        after: the last round that has ended, where a run goes on; 0: it begins.
        note: told what people should know.

    Attributes:
        out: clients that take no part in the run, and why.
    """

    def __init__(
        self,
        proposal: Proposal,
        carrier: Carrier,
        device: torch.device,
        patience: Patience | None = None,
        *,
        numbers: Mapping[int, int] | None = None,
        after: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(proposal.settings, (), device)
        self._proposal = proposal
        self._carrier = carrier
        self._carrier.run = proposal.run
        self._patience = patience or Patience()
        self._numbers = dict(numbers or {})
        self._after = after
        self._note = note
        self._everybody = range(proposal.settings.partition.clients)
        self._known: dict[int, _Known] = {}
        self._start: Frame | None = None
        self._waiting: list[Frame] = []
        self.out: dict[int, str] = {}

    # ------------------------------------------------------------------------------ who is there

    def join(self) -> list[Joined]:
        """Waits until every client has joined or declined, or the time is over.

        Raises:
            RemoteError: fewer have joined than a quorum.
        """
        asked: set[int] = set()
        ends = time.monotonic() + self._patience.join
        joined: dict[int, Joined] = {}
        while len(self._known) + len(self.out) < len(self._everybody):
            left = ends - time.monotonic()
            if left <= 0:
                break
            new = [node for node in self._carrier.nodes() if node not in asked]
            asked.update(new)
            for node, answer in self._ask_to_join(new, left).items():
                self._joined(node, answer, joined)
            if not new:
                time.sleep(min(self._patience.look, left))
        for client in self._everybody:
            if client not in self._known and client not in self.out:
                self.out[client] = "has not joined"
        for client, why in sorted(self.out.items()):
            self._note(f"client {client} takes no part: {why}")
        needed = needed_uploads(self._settings.quorum, len(self._everybody))
        if len(self._known) < needed:
            raise RemoteError(
                f"{len(self._known)} of {len(self._everybody)} clients have joined, and {needed} "
                "are the quorum"
            )
        return [joined.get(k, _absent(k)) for k in self._everybody]

    def _ask_to_join(self, nodes: Sequence[int], seconds: float) -> Mapping[int, bytes | str]:
        if not nodes:
            return {}
        self._asked += 1
        facts = {
            "proposal": self._proposal.to_json(),
            "after": self._after,
            "number": self._asked,
        }
        sent = pack([Frame("join", facts).to_bytes()])
        return self._carrier.ask(dict.fromkeys(nodes, sent), seconds)

    def _joined(self, node: int, answer: bytes | str, joined: dict[int, Joined]) -> None:
        """Takes a node's answer; one that is none is no client's."""
        try:
            if isinstance(answer, str):
                raise MessageError(answer)
            if len(answer) > LONGEST_HEADER:
                raise MessageError(f"sends {len(answer)} bytes")
            frame = Frame.from_bytes(unpack(answer)[0])
            client = self._client(node, frame)
            if frame.kind == "answer":
                size = frame.facts.get("size")
                own = None if size is None else whole(size, "size")
                history = read_history(frame.facts.get("history"))
                if self._settings.privacy is not None and history is None:
                    raise MessageError("says nothing of its ledger")
                joined[client] = Joined(client, own, history)
                self._known[client] = _Known(node, history)
            else:
                why = frame.facts.get("reason", frame.facts.get("text"))
                self.out[client] = f"{why!s:.500}"
        except MessageError as error:
            self._note(f"node {node} cannot join: {error}")

    def _client(self, node: int, frame: Frame) -> int:
        """Which client answers.

        Raises:
            MessageError: none of this run, or one that has answered before.
        """
        client = whole(frame.facts.get("client"), "client")
        if client not in self._everybody:
            raise MessageError(f"there is no client {client} in this run")
        if self._numbers and self._numbers.get(node) != client:
            raise MessageError(f"says that it is client {client}, which its key is not for")
        if client in self._known or client in self.out:
            raise MessageError(f"says that it is client {client}, which another one is")
        return client

    # ----------------------------------------------------------------------------------- a round

    def start(self, terms: Terms) -> None:
        """Each client is told with the first message of a round."""
        facts = {"sizes": terms.sizes, "noise_multiplier": terms.noise_multiplier}
        self._start = Frame("start", facts)

    def prepare(self, context: RoundContext) -> list[Refusal]:
        """Nobody is asked apart from the step: who cannot take part declines it."""
        self._lost = dict(self.out)
        for known in self._known.values():
            known.facts = {}
        self._waiting = [Frame("prepare", of_round(context))]
        return []

    def begin(self, context: RoundContext) -> None:
        self._waiting.append(Frame("begin", of_round(context)))

    def step(
        self,
        phase: str,
        message: Message,
        context: RoundContext,
        asked: Sequence[int] | None = None,
    ) -> Replies:
        """As `OverWire.step`; who declines is lost for the round, and where all do, the run ends
        with the first one's refusal."""
        numbers = context.active if asked is None else asked
        self._declined: dict[int, Refusal] = {}
        if self._method.sums_alone:
            replies = self._step_in_sum(phase, message, context, numbers)
        else:
            replies = super().step(phase, message, context, numbers)
        answered = replies.messages or replies.rejected or replies.total is not None
        if self._declined and not answered:
            return Replies(refusals=tuple(self._declined.values()))
        return replies

    def _step_in_sum(
        self, phase: str, message: Message, context: RoundContext, numbers: Sequence[int]
    ) -> Replies:
        """The sum of the replies, of which the server sees none."""
        unsound: list[Refusal] = []

        def ask(questions: Mapping[int, Frame], longest: int) -> dict[int, bytes]:
            most = dict.fromkeys(questions, longest)
            there = {k: one for k, one in questions.items() if k not in self._lost}
            answers: dict[int, Frame] = {}
            for client, answer in self._asked_each(there, most).items():
                if isinstance(answer, Frame):
                    answers[client] = answer
                else:
                    self._lost[client] = answer
            unsound.extend(self._refusals(answers)[1])
            return {k: one.payload for k, one in answers.items() if one.kind == "answer"}

        where = of_round(context)
        agreed = agreement(self._settings)
        exchange = SecureStep(self._method, phase, context, where, agreed, ask)
        total = exchange.run(numbers, message)
        there = () if total is None else total.clients
        lost = {k: self._lost[k] for k in numbers if k in self._lost and k not in there}
        if total is None and unsound and len(unsound) == len(lost) == len(numbers):
            return Replies(refusals=tuple(unsound))
        rejected = {k: why for k, why in exchange.rejected.items() if k not in {*lost, *there}}
        return Replies(lost=lost, rejected=rejected, total=total)

    def _refusals(self, answers: Mapping[int, Frame]) -> tuple[list[Refusal], list[Refusal]]:
        spent, unsound = super()._refusals(answers)
        for one in spent:
            self._declined[one.client] = one
            self._lost[one.client] = f"declines: {one.reason}"
        return [], unsound

    def facts(
        self, context: RoundContext, asked: Sequence[int] | None = None
    ) -> list[Mapping[str, Any]]:
        """As they came with the step."""
        numbers = context.active if asked is None else asked
        told = [self._known[k].facts.get("facts") for k in numbers if k in self._known]
        return alike(told)

    def histories(self) -> list[History]:
        """Of those that have joined, as they came with their last answers."""
        known = (self._known[k].history for k in sorted(self._known))
        return [history for history in known if history is not None]

    def end(self, rounds: int) -> None:
        """Tells the clients that the run is over, and takes what their ledgers hold now: they are
        charged also for what never arrived."""
        self._waiting = [Frame("history", {})]
        self._asked_all(sorted(self._known), Frame("end", {"rounds": rounds}), None)

    # ---------------------------------------------------------------------------------- messages

    def _asked_all(
        self, clients: Sequence[int], frame: Frame, longest: Mapping[int, int] | None
    ) -> dict[int, Frame | str]:
        """Each client's answer, or why there is none."""
        return self._asked_each(dict.fromkeys(clients, frame), longest)

    def _asked_each(
        self, questions: Mapping[int, Frame], longest: Mapping[int, int] | None
    ) -> dict[int, Frame | str]:
        """The same where each client has a question of its own: a message to each."""
        first = self._asked
        at: dict[int, int] = {}
        messages: dict[int, bytes] = {}
        self._asked += len(WAITING) + 1 + len(AFTER)
        for client, frame in questions.items():
            if client in self.out:
                continue
            after = _after(frame)
            known = self._known[client]
            start = [] if known.told or self._start is None else [self._start]
            frames = [*start, *self._waiting, frame, *after]
            at[client] = len(frames) - len(after) - 1
            numbered = [
                replace(one, facts={**one.facts, "number": first + place}).to_bytes()
                for place, one in enumerate(frames, 1)
            ]
            messages[known.node] = pack(numbered)
        self._waiting = []
        answers = self._carrier.ask(messages, self._patience.answer)
        found: dict[int, Frame | str] = {}
        for client in questions:
            if client in self.out:
                found[client] = self.out[client]
                continue
            sent = answers.get(self._known[client].node, "does not answer in time")
            most = LONGEST_HEADER if longest is None else LONGEST_FACTS + longest[client]
            if isinstance(sent, str):
                found[client] = sent
            else:
                found[client] = self._read(client, sent, first, at[client], most + LONGEST_HEADER)
        return found

    def _read(self, client: int, sent: bytes, first: int, at: int, most: int) -> Frame | str:
        """The answer to the frame at a place in a message, or why there is none."""
        if len(sent) > most + LENGTH_BYTES:
            return f"sends {len(sent)} bytes, above the {most} that it may"
        try:
            frames = [Frame.from_bytes(one) for one in unpack(sent)]
            for place, frame in enumerate(frames, 1):
                said = (frame.facts.get("client"), frame.facts.get("number"))
                if said != (client, first + place):
                    return f"was asked request {first + place}, and {said!r:.80} answers"
            known = self._known[client]
            known.told = known.told or frames[0].kind == "answer"
            if len(frames) <= at:
                last = sound(frames[-1])
                if isinstance(last, str) or last.kind != "answer":
                    return last
                return "does not answer all that it was asked"
            self._take_along(known, [*frames[:at], *frames[at + 1 :]])
        except MessageError as error:
            return str(error)
        return sound(frames[at])

    def _take_along(self, known: _Known, frames: Sequence[Frame]) -> None:
        """What came with an answer: facts for the round's row, and the ledger's rows."""
        for frame in frames:
            if frame.kind != "answer":
                continue
            if "facts" in frame.facts:
                known.facts = frame.facts
            if "history" in frame.facts:
                known.history = read_history(frame.facts["history"])


def _after(frame: Frame) -> list[Frame]:
    """What is asked together with a question: after a round's step, what the round's row needs."""
    if frame.kind != "step" or frame.facts["phase"] != MAIN:
        return []
    where = {key: frame.facts[key] for key in ("round", "participants")}
    facts, history = AFTER
    return [Frame(facts, where), Frame(history, {})]


def _absent(client: int) -> Joined:
    """Of a client that takes no part: it has spent nothing, and has no records."""
    return Joined(client, 0, History(f"client-{client:03d}"))
