"""The server's communication with data owners' nodes.

Each request is one message to each node. A node that does not connect, or whose owner declines,
does not take part in the run. A client is dropped for the current round if it does not answer,
sends invalid bytes, or has exhausted its budget. The round continues with the other clients while
they are a quorum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from fedsynth.core.capabilities import exchange_of
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.sums import SummedUploads, sums_securely
from fedsynth.core.uploads import most_bytes
from fedsynth.deployment import frames
from fedsynth.deployment.frames import SAME_VERSION, Frame
from fedsynth.deployment.proposal import Proposal
from fedsynth.deployment.secure_aggregation.server import SecureStep
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation import protocol
from fedsynth.federation.run_data import data_set_id
from fedsynth.federation.server import needed_uploads
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import default_names
from fedsynth.privacy.ledger.ledger import History

# How many seconds the server waits for a node to confirm that it was refused.
REFUSAL_SECONDS = 10.0


class TooFewClientsError(FedsynthError, code="clients.few"):
    """Raised if fewer clients than the quorum have joined."""


@dataclass
class NodeBackend(protocol.Backend):
    """The server's communication with one run's nodes.

    Args:
        proposal: the proposal of the run.
        connection: the connection to the nodes.
        device: the device to which uploads are moved.
        file: the file of the clients that have joined the run.
        ledger: the file of the server's ledger.
        last_round: the last completed round of a resumed run. 0: the run is new.
        note: receives messages for the server's operator.

    Attributes:
        clients: the clients that have joined the run, in this process or in an earlier one.
        absent: maps each client that does not take part to the reason.
    """

    proposal: Proposal
    connection: frames.Connection
    device: torch.device
    file: Path
    ledger: Path
    last_round: int = 0
    note: Callable[[str], None] = lambda text: None
    absent: dict[int, str] = field(default_factory=dict, init=False)
    _terms: protocol.RunTerms = field(default_factory=protocol.RunTerms, init=False)
    _request: int = field(default=0, init=False)
    _lost: dict[int, str] = field(default_factory=dict, init=False)
    _refusals: list[protocol.Refusal] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._settings = self.proposal.settings
        self._transport = self.connection.transport
        self._transport.run = self.proposal.run
        self._numbers = range(self._settings.partition.clients)
        self._names = default_names(len(self._numbers))
        self.clients = frames.read_clients(self.file)

    # ------------------------------------------------------------------------------ joining

    def join(self) -> list[protocol.ClientInfo]:
        """Waits until every client has joined or declined, or until the timeout has passed.

        Raises:
            TooFewClientsError: if fewer clients have joined than the quorum requires.
            OutputError: if the file of joined clients cannot be written.
        """
        invited: set[int] = set()
        deadline = time.monotonic() + self.connection.timeouts.join
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
                time.sleep(min(self.connection.timeouts.poll, seconds))
        present = self._present
        for number in self._numbers:
            if number not in present:
                self.absent.setdefault(number, "the client did not join in time")
        for number, reason in sorted(self.absent.items()):
            self.note(f"client {number} does not take part: {reason}")
        needed = needed_uploads(self._settings.quorum, len(self._numbers))
        if len(present) < needed:
            raise TooFewClientsError(
                f"{len(present)} of {len(self._numbers)} clients joined, but the run needs "
                f"{needed}. Start the missing nodes"
            )
        frames.write_clients(self.file, self.clients)
        joined = []
        for number, name in enumerate(self._names):
            client = self.clients.get(number, frames.JoinedClient(size=0, history=History(name)))
            joined.append(protocol.ClientInfo(number, client.size, client.history))
        return joined

    @property
    def _present(self) -> list[int]:
        """The clients whose nodes have joined since the server process started."""
        return [number for number, client in self.clients.items() if client.node is not None]

    def _invite(self, nodes: Sequence[int], seconds: float) -> None:
        """Asks nodes to join the run, and tells each rejected node the reason."""
        self._request += 1
        proposal = self.proposal.to_json()
        facts = {"proposal": proposal, "last_round": self.last_round, "number": self._request}
        invitation = Frame(frames.JOIN, facts).to_bytes()
        refusals: dict[int, bytes] = {}
        for node, answer in self._transport.ask(dict.fromkeys(nodes, invitation), seconds).items():
            try:
                self._admit(node, answer)
            except MessageError as error:
                self.note(f"node {node} cannot join: {error}")
                refusal = Frame(frames.REFUSED, {"reason": str(error), "number": self._request})
                refusals[node] = refusal.to_bytes()
        if refusals:
            self._transport.ask(refusals, min(seconds, REFUSAL_SECONDS))

    def _admit(self, node: int, answer: bytes | str) -> None:
        """Processes a node's answer to the request to join."""
        frame = _frame(answer, frames.LONGEST_HEADER)
        stated = frames.Statement.of(frame)
        number = stated.client
        if number not in self._numbers:
            raise MessageError(
                f"client {number!s:.20} is not one of the run's {len(self._numbers)} clients. "
                "Correct its number"
            ).with_code("message.client")
        client_of_node = self.connection.clients
        if client_of_node and client_of_node.get(node) != number:
            raise MessageError(
                f"the node's key does not match client {number}'s registered key. Correct the "
                "node's number or --key"
            )
        if number in self._present:
            raise MessageError(
                f"client {number} has already joined from another node. Start each node with its "
                "own number"
            )
        if frame.kind != frames.ANSWER:
            reason = frame.facts.get("reason", frame.facts.get("text"))
            self.absent[number] = f"{reason!s:.500}"
            return
        history = stated.history
        self._check_name(number, history)
        client = self.clients.setdefault(
            number, frames.JoinedClient(size=stated.size, history=history)
        )
        if client.size != stated.size:
            raise MessageError(
                f"client {number} joined with {client.size} examples, but now has {stated.size}. "
                "Restore its data"
            )
        client.update(history)
        client.node = node
        self.absent.pop(number, None)

    def _check_name(self, number: int, history: History | None) -> None:
        """Checks that a joining client has sent a ledger history with the client's name."""
        # without differential privacy, a client may have no ledger
        if history is None and self._settings.privacy is not None:
            raise MessageError(
                f"client {number} sent no ledger history, but a private run requires one. "
                f"{SAME_VERSION}"
            )
        if history is not None and history.client != self._names[number]:
            raise MessageError(
                f"client {number} sent the ledger of {history.client!r:.80}, expected "
                f"{self._names[number]!r}. Correct its number or ledger folder"
            )

    @property
    def never_joined(self) -> dict[int, str]:
        """Maps each client that never joined to the reason for its absence.

        These clients release nothing.
        """
        return {k: reason for k, reason in self.absent.items() if k not in self.clients}

    # ------------------------------------------------------------------------------ a round

    def start(self, terms: protocol.RunTerms) -> None:
        """Stores the run terms for the requests to the clients.

        Each request repeats the terms.
        """
        self._terms = terms

    def prepare(self, context: RoundContext) -> list[protocol.Refusal]:
        """Begins a round, without sending a message to the clients.

        A client that cannot take part declines later, when it receives the request for its step.
        """
        self._lost = dict(self.absent)
        return []

    def step(
        self, exchange: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> protocol.Replies:
        """Asks the clients for one step of the method, and collects their replies.

        If no client answers and some decline because of their budgets, the run ends regularly. If
        all clients that answer refuse the request as invalid, the method raises an error, because
        the server made the mistake.
        """
        self._refusals = []
        collect = self._sum if sums_securely(self._settings.method) else self._uploads
        replies = collect(exchange, message, context, clients)
        if replies.messages or replies.rejected or replies.total is not None:
            return replies
        declined = [refusal for refusal in self._refusals if refusal.kind == protocol.BUDGET]
        refusals = tuple(declined or self._refusals)
        return protocol.Replies(refusals=refusals) if refusals else replies

    def _facts(self, context: RoundContext) -> dict[str, Any]:
        """Returns the header fields common to all of a round's requests."""
        participants = list(context.active)
        return {"round": context.round, "participants": participants, **asdict(self._terms)}

    def _uploads(
        self, exchange: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> protocol.Replies:
        method = self._settings.method
        frame = Frame(
            frames.STEP, {**self._facts(context), "exchange": exchange}, message.to_bytes()
        )
        expected = exchange_of(method, exchange).upload
        rules = [method.upload_rules(exchange, client, context) for client in clients]
        max_bytes = max(most_bytes(expected, fields) for fields in rules)
        messages: dict[int, Message] = {}
        rejected: dict[int, str] = {}
        for client, answer in self._ask(dict.fromkeys(clients, frame), max_bytes).items():
            try:
                messages[client] = expected.from_bytes(answer.payload).to(self.device)
            except MessageError as error:
                rejected[client] = str(error)
        lost = {client: self._lost[client] for client in clients if client in self._lost}
        return protocol.Replies(messages, lost=lost, rejected=rejected)

    def _sum(
        self, exchange: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> protocol.Replies:
        """Computes the secure sum of the clients' uploads. The server sees no single upload."""
        facts = {**self._facts(context), "exchange": exchange}
        agreed = self.proposal.agreement
        method = cast(SummedUploads, self._settings.method)
        secure_step = SecureStep(method, exchange, context, facts, agreed, self._ask)
        total = secure_step.run(clients, message)
        counted = () if total is None else total.clients
        lost: dict[int, str] = {}
        rejected: dict[int, str] = {}
        for client in set(clients).difference(counted):
            if client in self._lost:
                lost[client] = self._lost[client]
            elif client in secure_step.server.rejected:
                rejected[client] = secure_step.server.rejected[client]
        return protocol.Replies(lost=lost, rejected=rejected, total=total)

    def histories(self) -> list[History]:
        """Returns the latest ledger history of each client that has joined."""
        stated = (client.history for _, client in sorted(self.clients.items()))
        return [history for history in stated if history is not None]

    def note_files(self, sha256: str) -> None:
        """Writes the server's ledger, which contains only the hash of the run's files."""
        Ledger("server", self.ledger, dataset=data_set_id(self._settings)).note_files(sha256)

    def end(self, rounds: int) -> None:
        """Tells the clients that the run is over, and receives their final ledgers.

        The final ledgers also contain the charges for uploads that never arrived.
        """
        self._lost = dict(self.absent)
        frame = Frame(frames.END, {"rounds": rounds, **asdict(self._terms)})
        self._ask(dict.fromkeys(sorted(self.clients), frame))

    # ------------------------------------------------------------------------------ messages

    def _ask(self, questions: Mapping[int, Frame], max_bytes: int = 0) -> dict[int, Frame]:
        """Sends a request to each client, and returns the valid answers.

        A client that refuses, or whose answer is invalid or missing, is dropped for the rest of the
        round. Before a request for a step is sent, it is written to the file of joined clients,
        because the client may be charged from then on.
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
                client.unstated.append((facts["round"], facts["exchange"]))
        if any(frame.kind == frames.STEP for frame in questions.values()):
            frames.write_clients(self.file, self.clients)
        received = self._transport.ask(messages, self.connection.timeouts.answer)
        answers: dict[int, Frame] = {}
        limit = frames.LONGEST_HEADER + protocol.MAX_FACTS_BYTES + max_bytes
        for number, node in nodes.items():
            try:
                answer = self._read(
                    number, received.get(node, "the node does not answer in time"), limit
                )
            except MessageError as error:
                self._lost[number] = str(error)
                continue
            if answer.kind == frames.ANSWER:
                answers[number] = answer
                continue
            reason = f"{answer.facts.get('reason')!s:.500}"
            kind, verb = protocol.REQUEST, "refuses"
            if answer.facts.get("kind") == protocol.BUDGET and self._settings.privacy is not None:
                kind, verb = protocol.BUDGET, "declines"
            self._refusals.append(protocol.Refusal(reason, kind))
            self._lost[number] = f"{verb}: {reason}"
        return answers

    def _read(self, number: int, answer: bytes | str, max_bytes: int) -> Frame:
        """Decodes a client's answer or refusal, and stores its ledger history."""
        frame = _frame(answer, max_bytes)
        stated = (frame.facts.get("client"), frame.facts.get("number"))
        if stated != (number, self._request):
            raise MessageError(
                f"the answer must come from client {number} and belong to request {self._request}, "
                f"got client {stated[0]!r:.40} and request {stated[1]!r:.40}"
            ).with_code("message.sender")
        if frame.kind not in (frames.ANSWER, frames.REFUSAL):
            raise MessageError(f"client {number} failed: {frame.facts.get('text')!s:.200}")
        if "history" in frame.facts:
            self.clients[number].update(frames.Statement.of(frame).history)
        return frame


def _frame(answer: bytes | str, max_bytes: int) -> Frame:
    """Decodes the frame that a node has sent."""
    if isinstance(answer, str):
        raise MessageError(answer)
    if len(answer) > max_bytes:
        raise MessageError(
            f"the node's answer has {len(answer)} bytes, but at most {max_bytes} are allowed. "
            f"{SAME_VERSION}"
        )
    return Frame.from_bytes(answer)
