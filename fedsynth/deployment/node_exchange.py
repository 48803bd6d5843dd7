"""A server's exchange with data owners' nodes: one message to each node for each question.

A node that does not connect, or whose owner declines, is excluded from the run. A client that does
not answer, answers with invalid bytes or has exhausted its budget is lost for the round. The round
continues with the others while they are a quorum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.uploads import most_bytes
from fedsynth.deployment import frames
from fedsynth.deployment.connection import Connection
from fedsynth.deployment.frames import Frame, JoinAnswer, parse_history
from fedsynth.deployment.proposal import Proposal
from fedsynth.deployment.record_source import JoinedClient, read_clients, write_clients
from fedsynth.deployment.secure_exchange import SecureStep
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.protocol import (
    BUDGET,
    MAX_FACTS_BYTES,
    REQUEST,
    ClientEvaluation,
    ClientInfo,
    Refusal,
    Replies,
    RunTerms,
    agreement,
    declared,
)
from fedsynth.federation.round_loop import needed_uploads
from fedsynth.privacy.ledger.ledger import History

REFUSAL_SECONDS = 10.0
"""How long the server waits for a refused node to receive the refusal."""


class TooFewClientsError(FedsynthError):
    """Fewer clients have joined than the quorum."""


class NodeExchange:
    """A server's exchange with nodes.

    Args:
        proposal: the run's.
        connection: to the nodes.
        device: the device of uploads.
        file: of the run's clients.
        last_round: the last completed round of a resumed run; 0: the run begins.
        names: the clients' names when a private run began, in their order; empty: it begins now.
        note: receives lines for the server's operator.

    Attributes:
        clients: those that have joined the run, in this process or in an earlier one.
        absent: client -> why it does not take part.
    """

    def __init__(
        self,
        proposal: Proposal,
        connection: Connection,
        device: torch.device,
        file: Path,
        *,
        last_round: int = 0,
        names: Sequence[str] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings = proposal.settings
        self._proposal = proposal
        self._transport = connection.transport
        self._transport.run = proposal.run
        self._connection = connection
        self._device = device
        self._file = file
        self._last_round = last_round
        self._note = note
        self.clients = read_clients(file)
        self.absent: dict[int, str] = {}
        self._numbers = range(proposal.settings.partition.clients)
        self._resumed = bool(names)
        self._names = names or [f"client-{number:03d}" for number in self._numbers]
        self._terms = RunTerms()
        self._request = 0
        self._lost: dict[int, str] = {}
        self._refusals: list[Refusal] = []

    # ------------------------------------------------------------------------------ joining

    def join(self) -> list[ClientInfo]:
        """Waits until every client has joined or declined, or the timeout has passed.

        Raises:
            TooFewClientsError: fewer clients have joined than the quorum.
            OutputError: the clients' file cannot be written.
        """
        invited: set[int] = set()
        deadline = time.monotonic() + self._connection.timeouts.join
        while len(self._present) + len(self.absent) < len(self._numbers):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                break
            connected = set(self._transport.nodes())
            invited &= connected  # a node that has reconnected is asked again
            new = connected - invited - {client.node for client in self.clients.values()}
            invited |= new
            if new:
                self._invite(sorted(new), seconds)
            else:
                time.sleep(min(self._connection.timeouts.poll, seconds))
        present = self._present
        for number in self._numbers:
            if number not in present:
                self.absent.setdefault(number, "has not joined")
        for number, reason in sorted(self.absent.items()):
            self._note(f"client {number} does not take part: {reason}")
        needed = needed_uploads(self._settings.quorum, len(self._numbers))
        if len(present) < needed:
            joined_of = f"{len(present)} of {len(self._numbers)} clients have joined"
            raise TooFewClientsError(f"{joined_of}, but the quorum is {needed}")
        write_clients(self._file, self.clients)
        joined = []
        for number, name in enumerate(self._names):
            client = self.clients.get(number, JoinedClient(0, History(name)))
            joined.append(ClientInfo(number, client.size, client.history))
        return joined

    @property
    def _present(self) -> list[int]:
        """Clients that have joined this process of the server."""
        return [number for number, client in self.clients.items() if client.node is not None]

    def _invite(self, nodes: Sequence[int], seconds: float) -> None:
        """Asks nodes to join, and notifies those that may not."""
        self._request += 1
        proposal = self._proposal.to_json()
        facts = {"proposal": proposal, "last_round": self._last_round, "number": self._request}
        invitation = Frame(frames.JOIN, facts).to_bytes()
        refusals: dict[int, bytes] = {}
        for node, answer in self._transport.ask(dict.fromkeys(nodes, invitation), seconds).items():
            try:
                self._admit(node, answer)
            except MessageError as error:
                self._note(f"node {node} cannot join: {error}")
                refusal = Frame(frames.REFUSED, {"reason": str(error), "number": self._request})
                refusals[node] = refusal.to_bytes()
        if refusals:
            self._transport.ask(refusals, min(seconds, REFUSAL_SECONDS))

    def _admit(self, node: int, answer: bytes | str) -> None:
        """Processes a node's answer to the request to join.

        Raises:
            MessageError: it is not the answer of a client that may join.
        """
        frame = _frame(answer, frames.LONGEST_HEADER)
        stated = JoinAnswer.of(frame)
        number = stated.client
        if number not in self._numbers:
            raise MessageError(f"there is no client {number!s:.20} in this run")
        client_of_node = self._connection.clients
        if client_of_node and client_of_node.get(node) != number:
            raise MessageError(f"claims to be client {number}, but its key is another client's")
        if number in self._present:
            raise MessageError(f"claims to be client {number}, which another node is")
        if frame.kind != frames.ANSWER:
            reason = frame.facts.get("reason", frame.facts.get("text"))
            self.absent[number] = f"{reason!s:.500}"
            return
        history = parse_history(stated.history)
        self._check_name(number, history)
        client = self.clients.setdefault(number, JoinedClient(stated.size, history))
        if client.size != stated.size:
            raise MessageError(f"it had {client.size} examples, and joins with {stated.size}")
        client.update(history)
        client.node = node
        self.absent.pop(number, None)

    def _check_name(self, number: int, history: History | None) -> None:
        """Checks that a client states a ledger, under its own name.

        Raises:
            MessageError: it states none, or one under another name.
        """
        if history is None:
            if self._settings.privacy is not None:
                raise MessageError("it does not state its ledger")
            return
        if self._resumed and history.client != self._names[number]:
            raise MessageError(f"its name was {self._names[number]!r} when the run began")
        other_names = set(self._names) - {self._names[number]}
        for other, client in self.clients.items():
            if other != number and client.history is not None:
                other_names.add(client.history.client)
        if history.client in other_names:
            raise MessageError(f"its name {history.client!r:.80} belongs to another client")

    @property
    def never_joined(self) -> dict[int, str]:
        """Clients that take no part in the run's releases, with the reasons."""
        return {k: reason for k, reason in self.absent.items() if k not in self.clients}

    # ------------------------------------------------------------------------------ a round

    def start(self, terms: RunTerms) -> None:
        """Stores the terms, which come with each question."""
        self._terms = terms

    def prepare(self, context: RoundContext) -> list[Refusal]:
        """Asks no client before the step: a client that cannot take part declines the step."""
        self._lost = dict(self.absent)
        return []

    def begin(self, context: RoundContext) -> None:
        """Tells no client: a question of the round begins it."""

    def step(
        self, phase: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        """Sends a step; see `Exchange.step`.

        If no client answers and some decline, the run ends regularly. If all that answer refuse the
        request as invalid, it is the server's error.
        """
        self._refusals = []
        collect = self._sum if self._settings.method.requires_secure_sum else self._uploads
        replies = collect(phase, message, context, clients)
        if replies.messages or replies.rejected or replies.total is not None:
            return replies
        declined = [refusal for refusal in self._refusals if refusal.kind == BUDGET]
        refusals = tuple(declined or self._refusals)
        return Replies(refusals=refusals) if refusals else replies

    def _facts(self, context: RoundContext) -> dict[str, Any]:
        """Returns the facts of a question in a round."""
        participants = list(context.active)
        return {"round": context.round, "participants": participants, **asdict(self._terms)}

    def _uploads(
        self, phase: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        method = self._settings.method
        frame = Frame(frames.STEP, {**self._facts(context), "phase": phase}, message.to_bytes())
        expected = declared(method, phase, "upload")
        rules = [method.upload_rules(phase, client, context) for client in clients]
        max_bytes = max(most_bytes(expected, fields) for fields in rules)
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
        facts = {**self._facts(context), "phase": phase}
        agreed = agreement(self._settings)
        exchange = SecureStep(self._settings.method, phase, context, facts, agreed, self._ask)
        total = exchange.run(clients, message)
        counted = () if total is None else total.clients
        lost: dict[int, str] = {}
        rejected: dict[int, str] = {}
        for client in set(clients).difference(counted):
            if client in self._lost:
                lost[client] = self._lost[client]
            elif client in exchange.rejected:
                rejected[client] = exchange.rejected[client]
        return Replies(lost=lost, rejected=rejected, total=total)

    def facts(self, context: RoundContext, clients: Sequence[int]) -> list[Mapping[str, Any]]:
        """Returns no facts: only a simulation asks for them."""
        return []

    def histories(self) -> list[History]:
        """Returns the ledgers of all clients that have ever joined, as they last stated them."""
        stated = (client.history for _, client in sorted(self.clients.items()))
        return [history for history in stated if history is not None]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[ClientEvaluation]:
        """Returns no results: only a simulation tests models on clients' own test splits."""
        return []

    def end(self, rounds: int) -> None:
        """Tells the clients that the run is over, and receives their final ledgers: they were
        charged also for uploads that never arrived.
        """
        self._lost = dict(self.absent)
        frame = Frame(frames.END, {"rounds": rounds, **asdict(self._terms)})
        self._ask(dict.fromkeys(sorted(self.clients), frame))

    # ------------------------------------------------------------------------------ messages

    def _ask(self, questions: Mapping[int, Frame], max_bytes: int = 0) -> dict[int, Frame]:
        """Returns the answers of the clients that are not lost. The others are lost from now on.

        The request of a step is written to the file first: from then on the client may be charged.

        Args:
            questions: one for each client.
            max_bytes: the size limit of a payload.
        """
        self._request += 1
        messages: dict[int, bytes] = {}
        nodes: dict[int, int] = {}
        for number, frame in questions.items():
            if number in self._lost:
                continue
            client = self.clients[number]
            nodes[number] = client.node or 0
            facts = {**frame.facts, "number": self._request}
            messages[nodes[number]] = replace(frame, facts=facts).to_bytes()
            if frame.kind == frames.STEP:
                client.unstated.append((facts["round"], facts["phase"]))
        if any(frame.kind == frames.STEP for frame in questions.values()):
            write_clients(self._file, self.clients)
        received = self._transport.ask(messages, self._connection.timeouts.answer)
        answers: dict[int, Frame] = {}
        limit = frames.LONGEST_HEADER + MAX_FACTS_BYTES + max_bytes
        for number, node in nodes.items():
            try:
                answer = self._read(number, received.get(node, "does not answer in time"), limit)
            except MessageError as error:
                self._lost[number] = str(error)
                continue
            if answer.kind == frames.ANSWER:
                answers[number] = answer
            else:
                self._store_refusal(number, answer)
        return answers

    def _read(self, number: int, answer: bytes | str, max_bytes: int) -> Frame:
        """Returns a client's answer or refusal, and stores what it states.

        Raises:
            MessageError: there is none, it is an error, or its ledger does not continue the one
                that was stated before.
        """
        frame = _frame(answer, max_bytes)
        stated = (frame.facts.get("client"), frame.facts.get("number"))
        if stated != (number, self._request):
            raise MessageError(f"received request {self._request}, but answers {stated!r:.80}")
        if frame.kind not in (frames.ANSWER, frames.REFUSAL):
            raise MessageError(f"answers with an error: {frame.facts.get('text')!s:.200}")
        client = self.clients[number]
        if "history" in frame.facts:
            client.update(parse_history(frame.facts["history"]))
        return frame

    def _store_refusal(self, number: int, answer: Frame) -> None:
        reason = f"{answer.facts.get('reason')!s:.500}"
        if answer.facts.get("kind") == BUDGET and self._settings.privacy is not None:
            self._refusals.append(Refusal(number, reason))
            self._lost[number] = f"declines: {reason}"
        else:
            self._refusals.append(Refusal(number, reason, REQUEST))
            self._lost[number] = f"refuses: {reason}"


def _frame(answer: bytes | str, max_bytes: int) -> Frame:
    """Returns the frame that a node has sent.

    Raises:
        MessageError: it has sent none, or one above the size limit.
    """
    if isinstance(answer, str):
        raise MessageError(answer)
    if len(answer) > max_bytes:
        raise MessageError(f"sends {len(answer)} bytes, above the limit of {max_bytes}")
    return Frame.from_bytes(answer)
