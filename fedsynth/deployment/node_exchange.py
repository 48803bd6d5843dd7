"""A server's exchange with data owners' nodes: one message to each node for each question.

A node that does not connect, or whose owner declines, is excluded from the run. A client that does
not answer, answers with invalid bytes or has exhausted its budget is lost for the round. The round
continues with the others while they are a quorum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.uploads import most_bytes
from fedsynth.deployment.carrier import Carrier, Timeouts
from fedsynth.deployment.client_records import Admission, ClientRecords
from fedsynth.deployment.frames import LONGEST_HEADER, Frame
from fedsynth.deployment.messages import (
    MAX_FRAMES,
    Request,
    majority_schema,
    pack,
    parse_evaluation,
)
from fedsynth.deployment.proposal import Proposal
from fedsynth.deployment.secure_exchange import SecureStep
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.protocol import (
    BUDGET,
    MAX_FACTS_BYTES,
    REQUEST,
    Evaluated,
    Joined,
    Models,
    Refusal,
    Replies,
    Terms,
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
        carrier: transports messages to the nodes.
        device: the device of uploads.
        timeouts: how long the server waits.
        records: the file of the run's clients.
        numbers: node -> client, by the keys that nodes authenticate with; empty: each node states
            its client's number.
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
        carrier: Carrier,
        device: torch.device,
        timeouts: Timeouts | None = None,
        *,
        records: ClientRecords,
        numbers: Mapping[int, int] | None = None,
        completed: int = 0,
        names: Sequence[str] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings = proposal.settings
        self._method = proposal.settings.method
        self._proposal = proposal
        self._carrier = carrier
        self._carrier.run = proposal.run
        self._device = device
        self._timeouts = timeouts or Timeouts()
        self._records = records
        self._after = completed
        self._note = note
        self.clients = records.read()
        self.out: dict[int, str] = {}
        self._everybody = range(proposal.settings.partition.clients)
        self._admission = Admission(proposal.settings, self.clients, self.out, numbers or {}, names)
        self._sent = 0
        self._start: Frame | None = None
        self._waiting: list[Frame] = []
        self._lost: dict[int, str] = {}
        self._declined: dict[int, Refusal] = {}
        self._unsound: dict[int, Refusal] = {}

    # ------------------------------------------------------------------------------ joining

    def join(self) -> list[Joined]:
        """Waits until every client has joined or declined, or the timeout has passed.

        Raises:
            TooFewClientsError: fewer clients have joined than the quorum.
            OutputError: the clients' file cannot be written.
        """
        asked_nodes: set[int] = set()
        ends = time.monotonic() + self._timeouts.join
        while len(self._admission.present) + len(self.out) < len(self._everybody):
            remaining = ends - time.monotonic()
            if remaining <= 0:
                break
            connected = set(self._carrier.nodes())
            asked_nodes &= connected  # a node that has left and is back is asked again
            new = sorted(
                connected - asked_nodes - {joined.node for joined in self.clients.values()}
            )
            asked_nodes.update(new)
            if new:
                self._ask_to_join(new, remaining)
            else:
                time.sleep(min(self._timeouts.look, remaining))
        present = self._admission.present
        for client in self._everybody:
            if client not in present:
                self.out.setdefault(client, "has not joined")
        for client, why in sorted(self.out.items()):
            self._note(f"client {client} takes no part: {why}")
        needed = needed_uploads(self._settings.quorum, len(self._everybody))
        if len(present) < needed:
            raise TooFewClientsError(
                f"{len(present)} of {len(self._everybody)} clients have joined, and {needed} "
                "are the quorum"
            )
        self._records.write(self.clients)
        return [self._admission.joined(client) for client in self._everybody]

    def _ask_to_join(self, nodes: Sequence[int], seconds: float) -> None:
        self._sent += 1
        number = self._sent
        facts = {"proposal": self._proposal.to_json(), "after": self._after, "number": number}
        sent = pack([Frame("join", facts).to_bytes()])
        refused: dict[int, bytes] = {}
        for node, answer in self._carrier.ask(dict.fromkeys(nodes, sent), seconds).items():
            try:
                self._admission.admit(node, answer)
            except MessageError as error:
                self._note(f"node {node} cannot join: {error}")
                if isinstance(answer, bytes):
                    message = Frame("refused", {"reason": str(error), "number": number})
                    refused[node] = pack([message.to_bytes()])
        if refused:
            self._carrier.ask(refused, min(seconds, REFUSAL_SECONDS))

    @property
    def never_joined(self) -> dict[int, str]:
        """Clients that take no part in the run's releases, with the reasons."""
        return {k: why for k, why in self.out.items() if k not in self.clients}

    # ------------------------------------------------------------------------------ a round

    def start(self, terms: Terms) -> None:
        """Stores the terms, which each client receives with its first message of a round."""
        facts = {"sizes": terms.sizes, "noise_multiplier": terms.noise_multiplier}
        self._start = Frame("start", facts)

    def prepare(self, context: RoundContext) -> list[Refusal]:
        """Asks no client before the step: a client that cannot take part declines the step."""
        self._lost = dict(self.out)
        for client in self.clients.values():
            client.facts = {}
        self._waiting = [Frame("prepare", round_header(context))]
        return []

    def begin(self, context: RoundContext) -> None:
        self._waiting.append(Frame("begin", round_header(context)))

    def step(
        self,
        phase: str,
        message: Message,
        context: RoundContext,
        numbers: Sequence[int],
    ) -> Replies:
        """Sends a step; see `Exchange.step`.

        If no client answers and some decline, the run ends regularly. If all that answer refuse the
        request as invalid, it is the server's error.
        """
        self._declined, self._unsound = {}, {}
        answers = self._sum if self._method.sums_alone else self._uploads
        replies = answers(phase, message, context, numbers)
        if not (replies.messages or replies.rejected or replies.total is not None):
            refusals = self._declined or self._unsound
            if refusals:
                return Replies(refusals=tuple(refusals.values()))
        return replies

    def _uploads(
        self, phase: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        frame = Frame("step", {**round_header(context), "phase": phase}, message.to_bytes())
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

        header = round_header(context)
        agreed = agreement(self._settings)
        exchange = SecureStep(self._method, phase, context, header, agreed, ask)
        total = exchange.run(clients, message)
        summed = () if total is None else total.clients
        lost = {k: self._lost[k] for k in clients if k in self._lost and k not in summed}
        rejected = {k: why for k, why in exchange.rejected.items() if k not in {*lost, *summed}}
        return Replies(lost=lost, rejected=rejected, total=total)

    def facts(self, context: RoundContext, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Returns the facts that came with the step."""
        stated = [self.clients[k].facts.get("facts") for k in numbers if k in self.clients]
        return majority_schema(stated)

    def histories(self) -> list[History]:
        """Returns the ledgers of all clients that have ever joined, as they last stated them."""
        stated = (self.clients[k].history for k in sorted(self.clients))
        return [history for history in stated if history is not None]

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> list[Evaluated]:
        answers: list[dict[int, Frame]] = []
        for parameters in models.values():
            question = Frame("evaluate", round_header(context), Models(parameters).to_bytes())
            answers.append(self._ask(dict.fromkeys(self._everybody, question)))
        evaluated = []
        for client in self._everybody:
            if client in self._lost:
                continue
            try:
                facts = [answer[client].facts for answer in answers]
                evaluated.append(parse_evaluation(client, models, facts))
            except (MessageError, LookupError, TypeError) as error:
                self._lost[client] = f"tells no accuracy: {error!r:.80}"
        return evaluated

    def end(self, rounds: int) -> None:
        """Tells the clients that the run is over, and receives their final ledgers: they were
        charged also for uploads that never arrived.
        """
        self._lost = dict(self.out)
        self._waiting = [Frame("history", {})]
        self._ask(dict.fromkeys(sorted(self.clients), Frame("end", {"rounds": rounds})))

    # ------------------------------------------------------------------------------ messages

    def _ask(
        self, questions: Mapping[int, Frame], max_bytes: Mapping[int, int] | None = None
    ) -> dict[int, Frame]:
        """Returns the answers of the clients that are not lost. The others are lost from now on.

        Args:
            questions: one for each client.
            max_bytes: the size limit of each client's payload; None: no limit.
        """
        pending = {k: frame for k, frame in questions.items() if k not in self._lost}
        requests = self._requests_to(pending)
        nodes = {client: self.clients[client].node or 0 for client in requests}
        received = self._carrier.ask(
            {nodes[client]: request.to_bytes() for client, request in requests.items()},
            self._timeouts.answer,
        )
        answers: dict[int, Frame] = {}
        for client, request in requests.items():
            limit = LONGEST_HEADER if max_bytes is None else MAX_FACTS_BYTES + max_bytes[client]
            sent = received.get(nodes[client], "does not answer in time")
            try:
                reply = request.read(sent, self.clients[client], limit + LONGEST_HEADER)
            except MessageError as error:
                self._lost[client] = str(error)
                continue
            if reply.kind == "answer":
                answers[client] = reply
            else:
                self._refused(client, reply)
        return answers

    def _refused(self, client: int, reply: Frame) -> None:
        reason = f"{reply.facts.get('reason')!s:.500}"
        if reply.facts.get("kind") == BUDGET and self._settings.privacy is not None:
            self._declined[client] = Refusal(client, reason)
            self._lost[client] = f"declines: {reason}"
        else:
            self._unsound[client] = Refusal(client, reason, REQUEST)
            self._lost[client] = f"refuses: {reason}"

    def _requests_to(self, questions: Mapping[int, Frame]) -> dict[int, Request]:
        """Returns each client's message, which includes the frames waiting for the next one.

        The request of a step is written to the file first: from then on the client may be charged.
        """
        first = self._sent + 1
        self._sent += MAX_FRAMES
        requests: dict[int, Request] = {}
        for client, frame in questions.items():
            record = self.clients[client]
            start = [] if record.started or self._start is None else [self._start]
            requests[client] = Request(client, frame, [*start, *self._waiting], first)
            if frame.kind == "step":
                record.unstated.append((frame.facts["round"], frame.facts["phase"]))
        self._waiting = []
        if any(request.is_step for request in requests.values()):
            self._records.write(self.clients)
        return requests


def round_header(context: RoundContext) -> dict[str, Any]:
    """Returns the facts that identify a round to its clients."""
    return {"round": context.round, "participants": list(context.active)}
