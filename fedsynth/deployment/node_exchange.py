"""A server's exchange with data owners' nodes: one message to each node for each question.

A node that does not connect, or whose owner declines, is excluded from the run. A client that does
not answer, answers with invalid bytes or has exhausted its budget is lost for the round. The round
continues with the others while they are a quorum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.uploads import LARGEST, most_bytes
from fedsynth.deployment.carrier import Post
from fedsynth.deployment.client_records import JoinedClient, read_clients, write_clients
from fedsynth.deployment.frames import (
    ANSWER,
    END,
    EVALUATE,
    JOIN,
    LONGEST_HEADER,
    REFUSAL,
    REFUSED,
    STEP,
    Accuracy,
    Frame,
    Joining,
    parse_history,
)
from fedsynth.deployment.proposal import Proposal
from fedsynth.deployment.secure_exchange import SecureStep
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.protocol import (
    BUDGET,
    MAX_FACTS_BYTES,
    REQUEST,
    ClientEvaluation,
    ClientInfo,
    Models,
    Refusal,
    Replies,
    RunTerms,
    agreement,
    declared,
)
from fedsynth.federation.round_loop import needed_uploads
from fedsynth.privacy.ledger.history import History

REFUSAL_SECONDS = 10.0
"""How long the server waits for a refused node to receive the refusal."""


class TooFewClientsError(FedsynthError):
    """Fewer clients have joined than the quorum."""


class NodeExchange:
    """A server's exchange with nodes.

    Args:
        proposal: the run's.
        post: to the nodes.
        device: the device of uploads.
        file: of the run's clients.
        after: the last completed round of a resumed run; 0: the run begins.
        names: the clients' names when a private run began, in their order; empty: it begins now.
        note: receives lines for the server's operator.

    Attributes:
        clients: those that have joined the run, in this process or in an earlier one.
        out: client -> why it does not take part.
    """

    def __init__(
        self,
        proposal: Proposal,
        post: Post,
        device: torch.device,
        file: Path,
        *,
        after: int = 0,
        names: Sequence[str] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings = proposal.settings
        self._method = proposal.settings.method
        self._proposal = proposal
        self._post = post
        post.carrier.run = proposal.run
        self._device = device
        self._file = file
        self._after = after
        self._note = note
        self.clients = read_clients(file)
        self.out: dict[int, str] = {}
        self._everybody = range(proposal.settings.partition.clients)
        self._known_names = names
        self._names = names or [f"client-{number:03d}" for number in self._everybody]
        self._terms = RunTerms()
        self._number = 0
        self._lost: dict[int, str] = {}
        self._declined: dict[int, Refusal] = {}
        self._unsound: dict[int, Refusal] = {}

    # ------------------------------------------------------------------------------ joining

    def join(self) -> list[ClientInfo]:
        """Waits until every client has joined or declined, or the timeout has passed.

        Raises:
            TooFewClientsError: fewer clients have joined than the quorum.
            OutputError: the clients' file cannot be written.
        """
        asked: set[int] = set()
        timeouts = self._post.timeouts
        ends = time.monotonic() + timeouts.join
        while len(self._present) + len(self.out) < len(self._everybody):
            left = ends - time.monotonic()
            if left <= 0:
                break
            here = set(self._post.carrier.nodes())
            asked &= here  # a node that has left and is back is asked again
            new = sorted(here - asked - {one.node for one in self.clients.values()})
            asked.update(new)
            if new:
                self._ask_to_join(new, left)
            else:
                time.sleep(min(timeouts.look, left))
        present = self._present
        for client in self._everybody:
            if client not in present:
                self.out.setdefault(client, "has not joined")
        for client, why in sorted(self.out.items()):
            self._note(f"client {client} does not take part: {why}")
        needed = needed_uploads(self._settings.quorum, len(self._everybody))
        if len(present) < needed:
            raise TooFewClientsError(
                f"{len(present)} of {len(self._everybody)} clients have joined, but the "
                f"quorum is {needed}"
            )
        write_clients(self._file, self.clients)
        never = JoinedClient(0, None)  # has no records
        joined = [(k, self.clients.get(k, never)) for k in self._everybody]
        return [
            ClientInfo(k, one.size, History(self._names[k]) if one is never else one.history)
            for k, one in joined
        ]

    @property
    def _present(self) -> list[int]:
        """Clients that have joined this process of the server."""
        return [client for client, one in self.clients.items() if one.node is not None]

    def _ask_to_join(self, nodes: Sequence[int], seconds: float) -> None:
        self._number += 1
        number = self._number
        facts = {"proposal": self._proposal.to_json(), "after": self._after, "number": number}
        carrier = self._post.carrier
        asked = dict.fromkeys(nodes, Frame(JOIN, facts).to_bytes())
        refused: dict[int, bytes] = {}
        for node, answer in carrier.ask(asked, seconds).items():
            try:
                self._admit(node, answer)
            except MessageError as error:
                self._note(f"node {node} cannot join: {error}")
                if isinstance(answer, bytes):
                    reason = {"reason": str(error), "number": number}
                    refused[node] = Frame(REFUSED, reason).to_bytes()
        if refused:
            carrier.ask(refused, min(seconds, REFUSAL_SECONDS))

    def _admit(self, node: int, answer: bytes | str) -> None:
        """Processes a node's answer to the request to join.

        Raises:
            MessageError: it is not the answer of a client that may join.
        """
        if isinstance(answer, str):
            raise MessageError(answer)
        if len(answer) > LONGEST_HEADER:
            raise MessageError(f"sends {len(answer)} bytes")
        frame = Frame.from_bytes(answer)
        stated = Joining.of(frame)
        client = stated.client
        numbers = self._post.numbers
        if client not in self._everybody:
            raise MessageError(f"there is no client {client!s:.20} in this run")
        if numbers and numbers.get(node) != client:
            raise MessageError(
                f"claims to be client {client}, but its key belongs to another client"
            )
        if client in self._present:
            raise MessageError(f"claims to be client {client}, which another node is")
        if frame.kind != ANSWER:
            why = frame.facts.get("reason", frame.facts.get("text"))
            self.out[client] = f"{why!s:.500}"
            return
        history = parse_history(stated.history)
        self._check_name(client, history)
        known = self.clients.setdefault(client, JoinedClient(stated.size, history))
        if known.size != stated.size:
            raise MessageError(f"it had {known.size} examples, and joins with {stated.size}")
        known.state(history)
        known.node = node
        self.out.pop(client, None)

    def _check_name(self, client: int, history: History | None) -> None:
        """Checks that a client states a ledger, under its own name.

        Raises:
            MessageError: it states none, or one under another name.
        """
        if history is None:
            if self._settings.privacy is not None:
                raise MessageError("it does not state its ledger")
            return
        name = self._names[client]
        if self._known_names and history.client != name:
            raise MessageError(
                f"its name is {history.client!r:.80}, but it was {name!r} when the run began"
            )
        others = {other for number, other in enumerate(self._names) if number != client}
        for number, one in self.clients.items():
            if number != client and one.history is not None:
                others.add(one.history.client)
        if history.client in others:
            raise MessageError(f"its name {history.client!r:.80} belongs to another client")

    @property
    def never_joined(self) -> dict[int, str]:
        """Clients that take no part in the run's releases, with the reasons."""
        return {k: why for k, why in self.out.items() if k not in self.clients}

    # ------------------------------------------------------------------------------ a round

    def start(self, terms: RunTerms) -> None:
        """Stores the terms, which come with each question."""
        self._terms = terms

    def prepare(self, context: RoundContext) -> list[Refusal]:
        """Asks no client before the step: a client that cannot take part declines the step."""
        self._lost = dict(self.out)
        for client in self.clients.values():
            client.facts = None
        return []

    def begin(self, context: RoundContext) -> None:
        """Tells no client: a question of the round begins it."""

    def step(
        self, phase: str, message: Message, context: RoundContext, asked: Sequence[int]
    ) -> Replies:
        """Sends a step; see `Exchange.step`.

        If no client answers and some decline, the run ends regularly. If all that answer refuse the
        request as invalid, it is the server's error.
        """
        self._declined, self._unsound = {}, {}
        answers = self._sum if self._method.requires_secure_sum else self._uploads
        replies = answers(phase, message, context, asked)
        if not (replies.messages or replies.rejected or replies.total is not None):
            refusals = self._declined or self._unsound
            if refusals:
                return Replies(refusals=tuple(refusals.values()))
        return replies

    def _facts(self, context: RoundContext) -> dict[str, Any]:
        """Returns the facts of a question in a round."""
        return {
            "round": context.round,
            "participants": list(context.active),
            **asdict(self._terms),
        }

    def _uploads(
        self, phase: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        frame = Frame(STEP, {**self._facts(context), "phase": phase}, message.to_bytes())
        expected = declared(self._method, phase, "upload")
        max_bytes = {
            client: most_bytes(expected, self._method.upload_rules(phase, client, context))
            for client in clients
        }
        messages: dict[int, Message] = {}
        rejected: dict[int, str] = {}
        for client, answer in self._ask(dict.fromkeys(clients, frame), max_bytes).items():
            try:
                messages[client] = expected.from_bytes(answer.payload).to(self._device)
            except MessageError as error:
                rejected[client] = str(error)
        lost = {client: self._lost[client] for client in clients if client in self._lost}
        return Replies(messages, lost=lost, rejected=rejected)

    def _sum(
        self, phase: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        """Returns the sum of the uploads; the server sees none of them."""

        def ask(questions: Mapping[int, Frame], max_bytes: int) -> dict[int, bytes]:
            answers = self._ask(questions, dict.fromkeys(questions, max_bytes))
            return {client: answer.payload for client, answer in answers.items()}

        facts = {**self._facts(context), "phase": phase}
        exchange = SecureStep(self._method, phase, context, facts, agreement(self._settings), ask)
        total = exchange.run(clients, message)
        there = () if total is None else total.clients
        lost = {k: self._lost[k] for k in clients if k in self._lost and k not in there}
        rejected = {k: why for k, why in exchange.rejected.items() if k not in {*lost, *there}}
        return Replies(lost=lost, rejected=rejected, total=total)

    def facts(self, context: RoundContext, asked: Sequence[int]) -> list[Mapping[str, Any]]:
        """Returns the facts that came with the step."""
        return majority_schema([self.clients[k].facts for k in asked if k in self.clients])

    def histories(self) -> list[History]:
        """Returns the ledgers of all clients that have ever joined, as they last stated them."""
        known = (self.clients[k].history for k in sorted(self.clients))
        return [history for history in known if history is not None]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[ClientEvaluation]:
        found: dict[int, ClientEvaluation] = {}
        for name, parameters in models.items():
            payload = Models(parameters).to_bytes()
            asked = Frame(EVALUATE, self._facts(context), payload)
            for client, answer in self._ask(dict.fromkeys(self._everybody, asked)).items():
                try:
                    stated = Accuracy.of(answer)
                    first = ClientEvaluation(client, stated.size, stated.tested, {})
                    known = found.setdefault(client, first)
                    if stated.right.model > known.tested:
                        raise MessageError(f"{stated.right.model} of {known.tested} are right")
                except MessageError as error:
                    self._lost[client] = f"tells no accuracy: {error}"
                    continue
                found[client] = replace(known, right={**known.right, name: stated.right.model})
        return [one for client, one in sorted(found.items()) if client not in self._lost]

    def end(self, rounds: int) -> None:
        """Tells the clients that the run is over, and receives their final ledgers: they were
        charged also for uploads that never arrived.
        """
        self._lost = dict(self.out)
        frame = Frame(END, {"rounds": rounds, **asdict(self._terms)})
        self._ask(dict.fromkeys(sorted(self.clients), frame))

    # ------------------------------------------------------------------------------ messages

    def _ask(
        self, questions: Mapping[int, Frame], max_bytes: Mapping[int, int] | None = None
    ) -> dict[int, Frame]:
        """Returns the answers of the clients that are not lost. The others are lost from now on.

        The request of a step is written to the file first: from then on the client may be charged.

        Args:
            questions: one for each client.
            max_bytes: the size limit of each client's payload; None: no limit.
        """
        asked = {k: frame for k, frame in questions.items() if k not in self._lost}
        self._number += 1
        messages: dict[int, bytes] = {}
        nodes: dict[int, int] = {}
        for client, frame in asked.items():
            nodes[client] = self.clients[client].node or 0
            facts = {**frame.facts, "number": self._number}
            messages[nodes[client]] = replace(frame, facts=facts).to_bytes()
            if frame.kind == STEP:
                exchange = (frame.facts["round"], frame.facts["phase"])
                self.clients[client].unstated.append(exchange)
        if any(frame.kind == STEP for frame in asked.values()):
            write_clients(self._file, self.clients)
        received = self._post.carrier.ask(messages, self._post.timeouts.answer)
        answers: dict[int, Frame] = {}
        for client, node in nodes.items():
            payload = 0 if max_bytes is None else max_bytes[client]
            limit = LONGEST_HEADER + MAX_FACTS_BYTES + payload
            try:
                reply = self._read(client, received.get(node, "does not answer in time"), limit)
            except MessageError as error:
                self._lost[client] = str(error)
                continue
            if reply.kind == ANSWER:
                answers[client] = reply
            else:
                self._refused(client, reply)
        return answers

    def _read(self, client: int, sent: bytes | str, max_bytes: int) -> Frame:
        """Returns a client's answer or refusal, and stores what it states.

        Raises:
            MessageError: there is none, it is an error, or its ledger does not continue the one
                that was stated before.
        """
        if isinstance(sent, str):
            raise MessageError(sent)
        if len(sent) > max_bytes:
            raise MessageError(f"sends {len(sent)} bytes, above the limit of {max_bytes}")
        frame = Frame.from_bytes(sent)
        stated = (frame.facts.get("client"), frame.facts.get("number"))
        if stated != (client, self._number):
            raise MessageError(f"received request {self._number}, but answers {stated!r:.80}")
        if frame.kind not in (ANSWER, REFUSAL):
            raise MessageError(f"answers with an error: {frame.facts.get('text')!s:.200}")
        known = self.clients[client]
        if "history" in frame.facts:
            known.state(parse_history(frame.facts["history"]))
        known.facts = frame.facts.get("facts", known.facts)
        return frame

    def _refused(self, client: int, reply: Frame) -> None:
        reason = f"{reply.facts.get('reason')!s:.500}"
        if reply.facts.get("kind") == BUDGET and self._settings.privacy is not None:
            self._declined[client] = Refusal(client, reason)
            self._lost[client] = f"declines: {reason}"
        else:
            self._unsound[client] = Refusal(client, reason, REQUEST)
            self._lost[client] = f"refuses: {reason}"


def majority_schema(stated: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Returns the facts that a method can merge: those with the schema of most clients.

    Facts are finite numbers by name, or mappings of such by name.
    """
    schemas = {position: form for position, one in enumerate(stated) if (form := _schema(one))}
    most = Counter(schemas.values()).most_common(1)
    return [stated[position] for position, form in schemas.items() if form == most[0][0]]


def _schema(value: Any, depth: int = 2) -> str:
    """Returns the schema of a client's facts; empty: there are none, or they are invalid."""
    if not isinstance(value, dict) or not depth:
        return ""
    parts = []
    for name, one in sorted(value.items()):
        number = type(one) in (int, float) and abs(one) <= LARGEST
        inner = "" if number else _schema(one, depth - 1)
        if not (number or inner):
            return ""
        parts.append(f"{name!r}:{inner}")
    return f"{{{','.join(parts)}}}" if parts else ""
