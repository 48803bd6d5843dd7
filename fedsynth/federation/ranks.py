"""Runs simulated clients in several processes started by torchrun (ranks).

Rank 0 is the server. It also has every client's ledger and state, and writes all files. In each
exchange, the clients of the round are shared out over all ranks by their estimated cost. Rank 0
charges the clients of another rank and then sends their states and the request to this rank. The
rank computes the clients' steps, as `InProcess` does, and sends the uploads and the new states
back. Except for last bits in a pass that clients share, a client's step depends neither on the rank
nor on the number of ranks. If the server's step has independent parts (`ServerParts`), the ranks
take turns to compute them.

In a private run, a rank draws the noise of its clients with its own secret keys. It has ledgers in
memory only, which mirror the charges that rank 0 has made before.

The frames between the ranks (`fedsynth.federation.links`) have a kind, facts and packed messages.
Those of many clients are packed together (`stacked`):

    rank 0 sends    downloaded {}, start {sizes, noise_multiplier}, step {round, participants,
                    exchange, clients} with the request and the states, parts {round, participants,
                    count} of the server's step with their tensors, end {results} with the model
    others send     hello {versions, settings, data}, report {clients, stage, completed,
                    total}, note {text}, answer {clients, refusals, rejected} with uploads and
                    states, part {} with the result of a part, error {text, code}
    all send        sum {} with a part of a tensor to be added up, alive {} as a sign of life, stop
                    {text, code} if the run fails, and bye {} after the last message of a run
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fedsynth.config.participation import CRASHED, TIMED_OUT
from fedsynth.core.capabilities import ServerParts, exchange_of
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, Packed, Tensors
from fedsynth.core.method import Method
from fedsynth.core.uploads import check_type, require_dense
from fedsynth.errors import (
    BudgetExceededError,
    MessageError,
    UploadRejectedError,
    short_repr,
)
from fedsynth.federation import protocol
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.links import Frame, Links, RankError
from fedsynth.privacy.plans import MAIN
from fedsynth.training.loop import LoopCheckpointer
from fedsynth.version import __version__

REPORT_SECONDS = 1.0  # between two reports of a rank's progress
STACK_BYTES = 2**25  # of the messages that are stacked: a memory bound
P = TypeVar("P", bound=Packed)


@dataclass(frozen=True)
class NamedTensors(Packed):
    """Tensors that one rank sends to another, such as a client's state or the final model.

    Args:
        tensors: the tensors by name.
    """

    tensors: Tensors


def owners(
    method: Method, sizes: Mapping[int, int], context: RoundContext, ranks: int
) -> dict[int, int]:
    """Returns the rank of each client, by the longest-processing-time rule.

    The clients with the highest estimated cost are assigned first, each to the rank that has the
    lowest total cost so far.

    Args:
        method: the method, which estimates the cost.
        sizes: the number of training records of each client of the round.
        context: the context before the run terms, in all rounds and at all ranks.
        ranks: the number of ranks.
    """
    costs = {client: method.client_cost(size, context) for client, size in sizes.items()}
    totals = [0.0] * ranks
    assigned = {}
    for client in sorted(costs, key=lambda client: (-costs[client], client)):
        lowest = totals.index(min(totals))
        totals[lowest] += costs[client]
        assigned[client] = lowest
    return assigned


def statement(settings: Mapping[str, Mapping[str, Any]], identity: str) -> dict[str, Any]:
    """Returns a description of the run that must be the same at all ranks.

    Args:
        settings: the settings by section, without those that may differ between machines.
        identity: the identity of the settings and data (`run_identity`).
    """
    named = {f"{name}.{key}": v for name, section in settings.items() for key, v in section.items()}
    versions = {"fedsynth": __version__, "torch": torch.__version__}
    return {**versions, **named, "data with the hash": identity}


class Ranks(InProcess):
    """The `Backend` at rank 0, which passes the server's requests to the clients at all ranks.

    Args:
        clients: all clients in the order of their indices.
        links: the connections to the other ranks.
        stated: the `statement` of rank 0.
    """

    def __init__(
        self, clients: Sequence[ClientRuntime], links: Links, stated: Mapping[str, Any]
    ) -> None:
        super().__init__(clients)
        self._links = links
        self._stated = stated
        # Another rank keeps the records that it owns in this context (`Following`).
        self._context = clients[0].context
        self._calls = 0  # of `compute_parts`

    def start(self, terms: protocol.RunTerms) -> None:
        """Sends the run terms to all ranks, and checks that all have the same versions and data.

        Raises:
            RankError: a rank differs, has failed, or is lost.
        """
        super().start(terms)
        self._links.send_all("start", asdict(terms))
        waiting = set(self._links.peers)
        while waiting:
            frame = self._links.next(sorted(waiting))
            waiting.remove(frame.peer)
            for name in {**self._stated, **frame.facts}:
                value, expected = frame.facts.get(name), self._stated.get(name)
                if value != expected:
                    raise RankError(
                        f"rank {frame.peer} has {name} {short_repr(value)}, but rank 0 has "
                        f"{short_repr(expected)}. Start all ranks with the same versions, settings "
                        "and data"
                    ).with_code("ranks.differ")

    def step(
        self, exchange: str, message: Message, context: RoundContext, numbers: Sequence[int]
    ) -> protocol.Replies:
        # A group's loops may not resume with another group, and other ranks have no checkpoints.
        context = replace(context, keeper=LoopCheckpointer())
        lost = self._failing(exchange, numbers, context)
        shares = self._shares(context, numbers)
        try:  # before any other rank begins
            for number in set(numbers) - set(shares[0]):
                if self.clients[number].private and lost.get(number) != CRASHED:
                    self.clients[number].charge(exchange, context)  # its rank draws the noise
        except BudgetExceededError as error:
            return protocol.Replies(refusals=(protocol.Refusal(str(error), spent=error.spent),))
        facts = {"exchange": exchange, **_round_facts(context)}
        packed = {"request": bytearray(message.to_bytes())}  # one copy for all peers
        stepping = [peer for peer in self._links.peers if shares[peer]]
        for peer in stepping:
            states, parts = _packed_states(self.clients, shares[peer], exchange, context)
            stated = {**facts, "clients": shares[peer], "states": states}
            self._links.send(peer, "step", stated, packed | parts)
        exchanged = Exchanged(self._links, context, len(numbers))
        report = partial(exchanged.report, 0, len(shares[0]))
        replies = super().step(exchange, message, replace(context, report=report), shares[0])
        messages, refusals = dict(replies.messages), [*replies.refusals]
        rejected: dict[int, str] = {}
        for answer in exchanged.wait(stepping):
            rejected |= {int(k): reason for k, reason in answer.facts["rejected"].items()}
            refusals += [protocol.Refusal(*values) for values in answer.facts["refusals"]]
            if not refusals:
                messages |= self._received(exchange, answer, context, lost, rejected)
        return protocol.Replies(messages, tuple(refusals), lost, rejected)

    def compute_parts(
        self, shared: Tensors, context: RoundContext, parts: Sequence[Tensors]
    ) -> Iterator[Tensors]:
        """Computes parts of the server's step at all ranks, and yields their results in order.

        Part i is computed at rank i modulo the number of ranks.

        Args:
            shared: the tensors that all parts need.
            context: the context of the round.
            parts: each part's tensors.
        """
        self._calls += 1
        size, call = self._links.size, self._calls
        facts = {**_round_facts(context), "call": call}
        shared_bytes = bytearray(NamedTensors(shared).to_bytes())  # one copy for all peers
        for peer in self._links.peers:
            assigned = parts[peer::size]
            if assigned:
                packed: dict[str, Any] = {"shared": shared_bytes}
                packed |= {str(i): NamedTensors(part).to_bytes() for i, part in enumerate(assigned)}
                self._links.send(peer, "parts", {**facts, "count": len(assigned)}, packed)
        compute = cast(ServerParts, self.clients[0].method).server_part(shared, context)
        received: dict[int, deque[Frame]] = {peer: deque() for peer in self._links.peers}
        for number, part in enumerate(parts):
            peer = number % size
            if peer == 0:
                yield compute(part)
                continue
            while not received[peer]:
                frame = self._links.next([peer])
                if frame.kind == "part" and frame.facts["call"] == call:  # others are left over
                    received[frame.peer].append(frame)
                elif frame.kind == "note":
                    context.note(frame.facts["text"])
            yield _tensors(received[peer].popleft(), "result", context.device)

    def _shares(self, context: RoundContext, numbers: Sequence[int]) -> list[list[int]]:
        """Divides the clients in `numbers` among the ranks, and returns one list per rank."""
        sizes = {number: len(self.clients[number].data.records) for number in context.active}
        assigned = owners(self.clients[0].method, sizes, self._context, self._links.size)
        shares: list[list[int]] = [[] for _ in range(self._links.size)]
        for number in numbers:
            shares[assigned[number]].append(number)
        return shares

    def _received(
        self,
        exchange: str,
        answer: Frame,
        context: RoundContext,
        lost: Mapping[int, str],
        rejected: dict[int, str],
    ) -> dict[int, Message]:
        """Stores the states in a rank's answer, and returns the valid uploads."""
        upload = exchange_of(self.clients[0].method, exchange).upload
        states = unstacked(NamedTensors, "states", answer, context.device)
        for number in answer.facts["clients"]:
            client = self.clients[number]
            if lost.get(number) == TIMED_OUT:
                client.rollback(client.client_state)
            elif lost.get(number) != CRASHED:
                client.store_state(exchange, _state(states, number), context)
        return unstacked(upload, "uploads", answer, context.device, rejected)


class Exchanged:
    """The frames of the other ranks in one exchange: progress, notes and answers.

    Args:
        links: the connections to the other ranks.
        context: the context of the round, which receives the progress and the notes.
        clients: the number of clients at all ranks.
    """

    def __init__(self, links: Links, context: RoundContext, clients: int) -> None:
        self._links = links
        self._context = context
        self._clients = clients
        self._finished: dict[int, float] = {}  # by rank, the number of finished clients
        self._answers: dict[int, Frame] = {}

    def report(self, peer: int, clients: int, stage: str, completed: int, total: int) -> None:
        """Reports the progress of a rank together with that of the others.

        Args:
            peer: the rank.
            clients: the number of the rank's clients.
            stage, completed, total: the progress, as for `RoundContext.report`.
        """
        self._finished[peer] = clients * completed / max(1, total)
        steps = total * self._clients // max(1, clients)
        finished = sum(self._finished.values()) / self._clients
        self._context.report(stage, int(finished * steps), steps)
        if peer == 0 and (frame := self._links.poll()) is not None:
            self._process(frame)

    def _process(self, frame: Frame) -> None:
        if frame.kind == "report":
            self.report(frame.peer, *frame.facts["progress"])
        elif frame.kind == "note":
            self._context.note(frame.facts["text"])
        elif frame.kind == "answer":
            self._answers[frame.peer] = frame

    def wait(self, stepping: Sequence[int]) -> list[Frame]:
        """Waits for the answers of the given ranks, and returns them."""
        while waiting := sorted(set(stepping) - self._answers.keys()):
            self._process(self._links.next(waiting))
        return list(self._answers.values())


def serve(backend: InProcess, links: Links) -> Frame:
    """Computes the steps that rank 0 requests from this rank, until the run has ended.

    Args:
        backend: the clients.
        links: the connection to rank 0.

    Returns:
        The frame with the results of the run.
    """
    while True:
        frame = links.next(links.peers)
        if frame.kind == "end":
            return frame
        if frame.kind == "start":
            sizes, sigma = frame.facts["sizes"], frame.facts["noise_multiplier"]
            backend.start(protocol.RunTerms(sizes and tuple(sizes), sigma))
        elif frame.kind == "parts":
            _answer_parts(backend, links, frame)
        else:
            _answer(backend, links, frame)


def _round_facts(context: RoundContext) -> dict[str, Any]:
    return {"round": context.round, "participants": context.participants}


def _context(backend: InProcess, links: Links, frame: Frame, clients: int) -> RoundContext:
    """Returns the context of the round in which rank 0 has sent a frame.

    Args:
        clients: the number of clients whose progress is reported.
    """
    participants = frame.facts["participants"]
    return replace(
        backend.clients[0].context,
        round=frame.facts["round"],
        participants=participants and tuple(participants),
        report=reporter(links, clients),
        note=lambda text: links.send(0, "note", {"text": text}),
    )


def _answer_parts(backend: InProcess, links: Links, frame: Frame) -> None:
    """Computes parts of the server's step that rank 0 has requested, and sends each result."""
    links.locate = lambda: ", in a part of the server's step"
    context = _context(backend, links, frame, 1)
    method = cast(ServerParts, backend.clients[0].method)
    compute = method.server_part(_tensors(frame, "shared", context.device), context)
    for number in range(frame.facts["count"]):
        result = compute(_tensors(frame, str(number), context.device))
        links.send(
            0, "part", {"call": frame.facts["call"]}, {"result": NamedTensors(result).to_bytes()}
        )


def _answer(backend: InProcess, links: Links, frame: Frame) -> None:
    """Computes the step that rank 0 has requested, and sends the answer."""
    numbers, exchange = frame.facts["clients"], frame.facts["exchange"]
    clients = [backend.clients[number] for number in numbers]
    context = _context(backend, links, frame, len(numbers))
    request = exchange_of(clients[0].method, exchange).request.from_bytes(frame.parts["request"])
    sent = unstacked(NamedTensors, "states", frame, context.device)
    for client in clients:
        client.rollback(_state(sent, client.number))
    links.locate = lambda: f", one of the clients {backend.stepping}"
    replies = backend.step(exchange, request.to(context.device), context, numbers)
    states, parts = _packed_states(backend.clients, numbers, MAIN, context)
    for client in clients:
        client.rollback({})  # rank 0 keeps the states
    refusals = [(r.reason, r.kind, r.spent) for r in replies.refusals]
    messages, rejected = dict(replies.messages), dict[int, str]()
    del replies  # `stacked` frees the uploads
    kind = exchange_of(clients[0].method, exchange).upload
    uploads, packed = stacked(kind, "uploads", messages, rejected)
    answer = {"clients": numbers, "refusals": refusals, "rejected": rejected}
    answer |= {"states": states, "uploads": uploads}
    links.send(0, "answer", answer, parts | packed)


def reporter(links: Links, clients: int) -> Callable[..., None]:
    """Returns a function that reports progress to rank 0, which shows that this rank is alive.

    It sends the progress at most once in `REPORT_SECONDS`.

    Args:
        links: the connection to rank 0.
        clients: the number of this rank's clients.
    """
    due = [0.0]

    def report(stage: str, completed: int, total: int) -> None:
        if time.monotonic() >= due[0]:
            due[0] = time.monotonic() + REPORT_SECONDS
            links.send(0, "report", {"progress": [clients, stage, completed, total]})

    return report


def stacked(
    kind: type[P], name: str, messages: dict[int, P], rejected: dict[int, str]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Packs the messages of many clients. Tensors of the same name, dtype and shape are stacked.

    Args:
        kind: the type of the messages.
        name: the name in the frame.
        messages: the messages by client. They are removed, to free the memory.
        rejected: receives the reasons of messages that cannot be packed, by client.

    Returns:
        Each stack's facts: the clients, their `header_values`, and the names of the tensors. The
        parts of the frame.
    """
    stacks: dict[Any, list[Any]] = {}
    total = 0
    for number in list(messages):
        message = messages.pop(number)
        try:
            check_type(message, kind)
            values = message.header_values()
            tensors = {key: tensor.detach() for key, tensor in message.arrays()}
            for key, tensor in tensors.items():
                require_dense(key, tensor)
        except (MessageError, UploadRejectedError, AttributeError, OverflowError) as error:
            rejected[number] = str(error)
            continue
        total += sum(tensor.nbytes for tensor in tensors.values())
        layout = tuple((key, t.dtype, t.shape, t.device) for key, t in tensors.items())
        stacks.setdefault((total // STACK_BYTES, layout), []).append((number, values, tensors))
    facts: list[Any] = []
    parts: dict[str, Tensor] = {}
    for stack in list(stacks):
        numbers, headers, members = zip(*stacks.pop(stack), strict=True)
        for key in members[0]:
            rows = torch.stack([m[key] for m in members])
            parts[f"{name} {len(facts)} {key}"] = rows.cpu().contiguous()
        facts.append([numbers, headers, list(members[0])])
    return facts, parts


def unstacked(
    kind: type[P],
    name: str,
    frame: Frame,
    device: torch.device,
    rejected: dict[int, str] | None = None,
) -> dict[int, P]:
    """Removes from a frame what `stacked` has packed, and returns the messages by client.

    Args:
        kind, name: as for `stacked`.
        frame: the frame.
        device: the device of the messages' tensors.
        rejected: receives the reasons of messages with a field that is missing, unexpected or of
            another type, by client.

    Raises:
        MessageError: there is such a message, and `rejected` is None.
    """
    messages: dict[int, P] = {}
    for place, (numbers, headers, keys) in enumerate(frame.facts[name]):
        rows = [frame.parts.pop(f"{name} {place} {key}").to(device).unbind() for key in keys]
        for number, values, *tensors in zip(numbers, headers, *rows, strict=True):
            # a view would keep the whole stack in memory, and its deep copy would copy it
            copies = dict(zip(keys, map(torch.clone, tensors), strict=True))
            try:
                messages[number] = kind.made_of(copies, values)
            except MessageError as error:
                if rejected is None:
                    raise
                rejected[number] = str(error)
    return messages


def _packed_states(
    clients: Sequence[ClientRuntime], numbers: Sequence[int], exchange: str, context: RoundContext
) -> tuple[list[Any], dict[str, Tensor]]:
    """Packs the clients' states, without those that are empty."""
    states = {number: clients[number].load_state(exchange, context) for number in numbers}
    named = {number: NamedTensors(state) for number, state in states.items() if state}
    rejected: dict[int, str] = {}
    packed = stacked(NamedTensors, "states", named, rejected)
    for number, reason in rejected.items():
        raise MessageError(f"the state of client {number} cannot be sent: {reason}")
    return packed


def _state(states: Mapping[int, NamedTensors], client: int) -> Tensors:
    return states[client].tensors if client in states else {}  # which is not sent


def _tensors(frame: Frame, name: str, device: torch.device) -> Tensors:
    return NamedTensors.from_bytes(frame.parts[name]).to(device).tensors
