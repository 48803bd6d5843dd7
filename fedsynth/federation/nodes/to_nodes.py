"""A server's exchange with data owners' nodes, a message an exchange.

It differs from `OverWire` in who takes part: a node that does not come, or whose owner declines, is
out for the run, and one whose budget is spent is out for the round; the round goes on with the
others as long as they are a quorum. Silence is no error of anybody's: a node that was killed says
nothing, and is lost when the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from fedsynth.federation.nodes.client_records import ClientRecords, JoinedClient
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import MAIN
from fedsynth.validation import MAX_SECONDS, check_number

WAITING = ("start", "prepare", "begin")
"""Frames that wait for the next message: nothing is released for them."""
AFTER = ("facts", "history")
"""Frames that go with a step."""
REFUSAL_SECONDS = 10.0
"""How long the server waits until a node has received that it is refused."""


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
        names: the clients' names when a private run began, in their order; empty: it begins now.
        records: the file of the run's clients.
        note: told what people should know.

    Attributes:
        clients: those that have joined the run, in this process or in an earlier one.
        out: clients that take no part now, and why.
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
        names: Sequence[str] = (),
        records: ClientRecords,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(proposal.settings, (), device)
        self._proposal = proposal
        self._carrier = carrier
        self._carrier.run = proposal.run
        self._patience = patience or Patience()
        self._numbers = dict(numbers or {})
        self._after = after
        self._names = names
        self._records = records
        self._note = note
        self._everybody = range(proposal.settings.partition.clients)
        self.clients = records.read()
        self._start: Frame | None = None
        self._waiting: list[Frame] = []
        self.out: dict[int, str] = {}

    # ------------------------------------------------------------------------------ who is there

    def join(self) -> list[Joined]:
        """Waits until every client has joined or declined, or the time is over.

        Raises:
            RemoteError: fewer have joined than a quorum.
            OutputError: who has joined cannot be written down.
        """
        asked: set[int] = set()
        ends = time.monotonic() + self._patience.join
        while len(self._present()) + len(self.out) < len(self._everybody):
            left = ends - time.monotonic()
            if left <= 0:
                break
            here = set(self._carrier.nodes())
            asked &= here  # a node that has left and is back is asked again
            new = sorted(here - asked - {one.node for one in self.clients.values()})
            asked.update(new)
            self._ask_to_join(new, left)
            if not new:
                time.sleep(min(self._patience.look, left))
        present = self._present()
        for client in self._everybody:
            if client not in present:
                self.out.setdefault(client, "has not joined")
        for client, why in sorted(self.out.items()):
            self._note(f"client {client} takes no part: {why}")
        needed = needed_uploads(self._settings.quorum, len(self._everybody))
        if len(present) < needed:
            raise RemoteError(
                f"{len(present)} of {len(self._everybody)} clients have joined, and {needed} "
                "are the quorum"
            )
        self._records.write(self.clients)
        return [self._as_joined(client) for client in self._everybody]

    def _present(self) -> list[int]:
        return sorted(k for k, one in self.clients.items() if one.node is not None)

    def _as_joined(self, client: int) -> Joined:
        """What a client has stated of itself; one that never joined has no records."""
        if client not in self.clients:
            return Joined(client, 0, History(self._name(client)))
        one = self.clients[client]
        return Joined(client, one.size, one.history)

    def _name(self, client: int) -> str:
        return self._names[client] if self._names else f"client-{client:03d}"

    def _ask_to_join(self, nodes: Sequence[int], seconds: float) -> None:
        if not nodes:
            return
        self._asked += 1
        facts = {
            "proposal": self._proposal.to_json(),
            "after": self._after,
            "number": self._asked,
        }
        sent = pack([Frame("join", facts).to_bytes()])
        refused: dict[int, bytes] = {}
        for node, answer in self._carrier.ask(dict.fromkeys(nodes, sent), seconds).items():
            try:
                self._take_joining(node, answer)
            except MessageError as error:
                self._note(f"node {node} cannot join: {error}")
                if isinstance(answer, str):
                    continue
                told = Frame("refused", {"reason": str(error), "number": self._asked})
                refused[node] = pack([told.to_bytes()])
        if refused:
            self._carrier.ask(refused, min(seconds, REFUSAL_SECONDS))

    def _take_joining(self, node: int, answer: bytes | str) -> None:
        """Takes a node's answer.

        Raises:
            MessageError: it is not an answer of a client that may join.
        """
        if isinstance(answer, str):
            raise MessageError(answer)
        if len(answer) > LONGEST_HEADER:
            raise MessageError(f"sends {len(answer)} bytes")
        frame = Frame.from_bytes(unpack(answer)[0])
        client = self._client(node, frame)
        if frame.kind != "answer":
            why = frame.facts.get("reason", frame.facts.get("text"))
            self.out[client] = f"{why!s:.500}"
            return
        size = frame.facts.get("size")
        history = read_history(frame.facts.get("history"))
        stated = JoinedClient(None if size is None else whole(size, "size"), history)
        self._check_history(client, history)
        known = self.clients.setdefault(client, stated)
        if known.size != stated.size:
            raise MessageError(f"it had {known.size} examples, and joins with {stated.size}")
        known.state(history)
        known.node = node
        self.out.pop(client, None)

    def _check_history(self, client: int, history: History | None) -> None:
        """Checks that a client states a ledger under a name of its own.

        Raises:
            MessageError: it states none, or under another client's name.
        """
        if history is None:
            if self._settings.privacy is not None:
                raise MessageError("it does not state its ledger")
            return
        if self._names and history.client != self._names[client]:
            raise MessageError(
                f"its name is {history.client!r:.80}, and it was {self._names[client]!r} when the "
                "run began"
            )
        others = {self._name(k) for k in self._everybody if k != client} | {
            one.history.client for k, one in self.clients.items() if k != client and one.history
        }
        if history.client in others:
            raise MessageError(f"its name {history.client!r:.80} is another client's")

    def _client(self, node: int, frame: Frame) -> int:
        """Returns which client answers.

        Raises:
            MessageError: none of this run, or one that is connected already.
        """
        client = whole(frame.facts.get("client"), "client")
        if client not in self._everybody:
            raise MessageError(f"there is no client {client} in this run")
        if self._numbers and self._numbers.get(node) != client:
            raise MessageError(f"says that it is client {client}, which its key is not for")
        if client in self._present():
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
        for known in self.clients.values():
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
        told = [self.clients[k].facts.get("facts") for k in numbers if k in self.clients]
        return alike(told)

    def histories(self) -> list[History]:
        """Returns the ledgers of all clients that have ever joined, as they last stated them."""
        known = (self.clients[k].history for k in sorted(self.clients))
        return [history for history in known if history is not None]

    @property
    def never_joined(self) -> dict[int, str]:
        """Clients that have no part in the run's releases, and why."""
        return {k: why for k, why in self.out.items() if k not in self.clients}

    def end(self, rounds: int) -> None:
        """Tells the clients that the run is over, and takes what their ledgers hold now: they are
        charged also for what never arrived."""
        self._waiting = [Frame("history", {})]
        self._asked_all(sorted(self.clients), Frame("end", {"rounds": rounds}), None)

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
        nodes: dict[int, int] = {}
        self._asked += len(WAITING) + 1 + len(AFTER)
        there = {k: one for k, one in questions.items() if k not in self.out}
        self._write_down(there)
        for client, frame in there.items():
            after = _after(frame)
            known = self.clients[client]
            start = [] if known.started or self._start is None else [self._start]
            frames = [*start, *self._waiting, frame, *after]
            at[client] = len(frames) - len(after) - 1
            numbered = [
                replace(one, facts={**one.facts, "number": first + place}).to_bytes()
                for place, one in enumerate(frames, 1)
            ]
            if known.node is not None:
                nodes[client] = known.node
                messages[known.node] = pack(numbered)
        self._waiting = []
        answers = self._carrier.ask(messages, self._patience.answer)
        found: dict[int, Frame | str] = {}
        for client, frame in questions.items():
            if client in self.out:
                found[client] = self.out[client]
                continue
            sent = answers.get(nodes[client], "does not answer in time")
            most = LONGEST_HEADER if longest is None else LONGEST_FACTS + longest[client]
            if isinstance(sent, str):
                found[client] = sent
            else:
                found[client] = self._read(
                    client, frame, sent, first, at[client], most + LONGEST_HEADER
                )
        return found

    def _write_down(self, questions: Mapping[int, Frame]) -> None:
        """Writes down who is asked for a step, before it is: from then on it may be charged."""
        steps = {k: one.facts for k, one in questions.items() if one.kind == "step"}
        for client, facts in steps.items():
            self.clients[client].unstated.append((facts["round"], facts["phase"]))
        if steps:
            self._records.write(self.clients)

    def _read(
        self, client: int, asked: Frame, sent: bytes, first: int, at: int, most: int
    ) -> Frame | str:
        """The answer to the frame at a place in a message, or why there is none."""
        if len(sent) > most + LENGTH_BYTES:
            return f"sends {len(sent)} bytes, above the {most} that it may"
        try:
            frames = [Frame.from_bytes(one) for one in unpack(sent)]
            for place, frame in enumerate(frames, 1):
                said = (frame.facts.get("client"), frame.facts.get("number"))
                if said != (client, first + place):
                    return f"was asked request {first + place}, and {said!r:.80} answers"
            known = self.clients[client]
            known.started = known.started or frames[0].kind == "answer"
            if len(frames) <= at:
                if asked.kind == "step":
                    known.unstated.pop()  # it has refused what comes before the step
                last = sound(frames[-1])
                if isinstance(last, str) or last.kind != "answer":
                    return last
                return "does not answer all that it was asked"
            self._take_along(known, [*frames[:at], *frames[at + 1 :]])
        except MessageError as error:
            return str(error)
        return sound(frames[at])

    def _take_along(self, known: JoinedClient, frames: Sequence[Frame]) -> None:
        """What came with an answer: facts for the round's row, and the ledger's rows."""
        for frame in frames:
            if frame.kind != "answer":
                continue
            if "facts" in frame.facts:
                known.facts = frame.facts
            if "history" in frame.facts:
                known.state(read_history(frame.facts["history"]))


def _after(frame: Frame) -> list[Frame]:
    """What is asked together with a question: after a round's step, what the round's row needs."""
    if frame.kind != "step" or frame.facts["phase"] != MAIN:
        return []
    where = {key: frame.facts[key] for key in ("round", "participants")}
    facts, history = AFTER
    return [Frame(facts, where), Frame(history, {})]
