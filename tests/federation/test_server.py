"""Tests of the server without clients: requests, accepted replies and changes of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedsynth import Message, Method, ModelParameters, RoundContext, ServerState
from fedsynth.core.messages import public, released
from fedsynth.errors import DivergedError
from fedsynth.federation.server import Server
from fedsynth.privacy.plans import FIRST, MAIN
from tests.digits import CPU, SPEC


@dataclass(frozen=True)
class Request(Message):
    """A request with the result of the round's first exchange."""

    first: Tensor = public("test")


@dataclass(frozen=True)
class Reply(Message):
    """A reply with a vector."""

    value: Tensor = released()


@dataclass(frozen=True)
class WideReply(Reply):
    """A subclass of the declared message."""


@dataclass(frozen=True)
class TraceState(ServerState):
    """A state with the result of the first exchange."""

    first: Tensor | None = None


def in_order(replies: Mapping[int, Reply]) -> Tensor:
    """Returns the numbers and values in order of arrival, [clients, 1 + values]."""
    rows = [torch.cat([torch.tensor([float(k)]), reply.value]) for k, reply in replies.items()]
    return torch.stack(rows)


@dataclass(frozen=True)
class Trace(Method):
    """Keeps the replies in order of arrival; from round 2 on, rounds have a first exchange."""

    name: ClassVar[str] = "trace"
    downlink: ClassVar[type[Message]] = Request
    upload: ClassVar[type[Message]] = Reply
    first_downlink: ClassVar[type[Message] | None] = ModelParameters
    first_upload: ClassVar[type[Message] | None] = Reply
    state: ClassVar[type[ServerState]] = TraceState

    def first_request(self, state: TraceState, context: RoundContext) -> Message | None:
        return ModelParameters(state.parameters, 1.0) if context.round > 1 else None

    def first_aggregate(
        self, state: TraceState, replies: Mapping[int, Reply], context: RoundContext
    ) -> TraceState:
        return replace(state, first=in_order(replies))

    def broadcast(self, state: TraceState, context: RoundContext) -> Message:
        return Request(torch.zeros(0) if state.first is None else state.first)

    def server_step(
        self, state: TraceState, uploads: Mapping[int, Reply], context: RoundContext
    ) -> TraceState:
        return replace(state, parameters={"w": in_order(uploads).log()})


def context(number: int = 1) -> RoundContext:
    return RoundContext(number, 0, CPU, SPEC, torch.nn.Linear(1, 1), 5.0, clients=4)


def vectors(*numbers: int, value: float = 1.0) -> dict[int, Message]:
    return {k: Reply(torch.tensor([value])) for k in numbers}


def server() -> Server:
    return Server(Trace(), {"w": torch.ones(1)})


def test_replies_are_ordered_and_state_changes_after_round() -> None:
    trace_server = server()
    state = trace_server.state
    assert type(state) is TraceState
    assert trace_server.final_parameters() is state.parameters
    replies = vectors(3, 0, 2)
    trace_server.request(FIRST, context(2))
    trace_server.receive(FIRST, replies, context(2))
    request = trace_server.request(MAIN, context(2))
    assert isinstance(request, Request)
    assert request.first[:, 0].tolist() == [0, 2, 3]  # result of the first exchange
    assert trace_server.state is state
    trace_server.receive(MAIN, vectors(2, 1), context(2))
    assert trace_server.state.parameters["w"][:, 0].exp().round().tolist() == [1, 2]
    assert trace_server.state.first is not None  # type: ignore[attr-defined]
    assert list(replies) == [3, 0, 2]  # the argument is unchanged


def test_aborted_rounds_are_discarded() -> None:
    """After a refusal in the first exchange, the next round starts from the last completed one."""
    trace_server = server()
    trace_server.request(FIRST, context(2))
    trace_server.receive(FIRST, vectors(0, 1), context(2))
    trace_server.request(MAIN, context(2))
    assert trace_server.request(FIRST, context(1)) is None  # a round without a first exchange
    request: Any = trace_server.request(MAIN, context(1))
    assert len(request.first) == 0


@pytest.mark.parametrize(("phase", "name"), [(FIRST, "first_request"), (MAIN, "broadcast")])
def test_requests_of_wrong_type_are_not_sent(
    phase: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trace, name, lambda *_: Reply(torch.ones(1)))
    with pytest.raises(TypeError, match=r"trace must send messages of type \w+, got Reply"):
        server().request(phase, context(2))


@pytest.mark.parametrize(
    ("phase", "reply"), [(FIRST, WideReply(torch.ones(1))), (MAIN, ModelParameters({}, 1.0))]
)
def test_replies_of_wrong_type_are_rejected(phase: str, reply: Message) -> None:
    """Subclasses are rejected too, since only the declared type was checked for privacy."""
    trace_server = server()
    trace_server.request(phase, context(2))
    state = trace_server.state
    name = type(reply).__name__
    with pytest.raises(TypeError, match=f"trace must send messages of type Reply, got {name}"):
        trace_server.receive(phase, {**vectors(0), 1: reply}, context(2))
    assert trace_server.state is state


@pytest.mark.parametrize(("phase", "value"), [(FIRST, float("nan")), (MAIN, float("inf"))])
def test_non_finite_replies_are_rejected(phase: str, value: float) -> None:
    trace_server = server()
    trace_server.request(phase, context(2))
    state = trace_server.state
    replies = {**vectors(3, value=value), **vectors(1, 0)}
    accepted, rejected = trace_server.check(phase, replies, context(2))
    assert list(rejected) == [3]
    assert "value is not finite" in str(rejected[3])
    assert list(accepted) == [0, 1]
    assert trace_server.state is state


def test_non_finite_models_are_rejected() -> None:
    trace_server = server()
    state = trace_server.state
    trace_server.request(MAIN, context(1))
    with pytest.raises(DivergedError, match="round 1: w of the server's model is not finite"):
        trace_server.receive(MAIN, vectors(1, value=-1.0), context(1))  # its logarithm
    assert trace_server.state is state
