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


def context(number: int = 2) -> RoundContext:
    return RoundContext(number, 0, CPU, SPEC, torch.nn.Linear(1, 1), 5.0, clients=4)


def vectors(*numbers: int, value: float = 1.0) -> dict[int, Message]:
    return {k: Reply(torch.tensor([value])) for k in numbers}


@pytest.fixture
def server() -> Server:
    return Server(Trace(), {"w": torch.ones(1)})


def test_replies_are_ordered_and_state_changes_after_round(server: Server) -> None:
    """After a refusal in the first exchange, the next round starts from the last completed one."""
    state = server.state
    assert type(state) is TraceState
    assert server.final_parameters() is state.parameters
    replies = vectors(3, 0, 2)
    for completed in (False, True):
        server.request(FIRST, context())
        server.receive(FIRST, replies, context())
        request: Any = server.request(MAIN, context())
        assert request.first[:, 0].tolist() == [0, 2, 3]  # result of the first exchange
        assert server.state is state
        if not completed:
            assert server.request(FIRST, context(1)) is None  # a round without a first exchange
            request = server.request(MAIN, context(1))
            assert len(request.first) == 0
    server.receive(MAIN, vectors(2, 1), context())
    assert server.state.parameters["w"][:, 0].exp().round().tolist() == [1, 2]
    assert server.state.first is not None  # type: ignore[attr-defined]
    assert list(replies) == [3, 0, 2]  # the argument is unchanged


@pytest.mark.parametrize(("phase", "name"), [(FIRST, "first_request"), (MAIN, "broadcast")])
def test_messages_of_wrong_type_are_rejected(
    server: Server, phase: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subclasses are rejected too, since only the declared type was checked for privacy."""
    server.request(phase, context())
    state = server.state
    for reply in (WideReply(torch.ones(1)), ModelParameters({}, 1.0)):
        message = f"trace must send messages of type Reply, got {type(reply).__name__}"
        with pytest.raises(TypeError, match=message):
            server.receive(phase, {**vectors(0), 1: reply}, context())
    assert server.state is state
    monkeypatch.setattr(Trace, name, lambda *_: Reply(torch.ones(1)))
    with pytest.raises(TypeError, match=r"trace must send messages of type \w+, got Reply"):
        server.request(phase, context())


def test_non_finite_replies_and_models_are_rejected(server: Server) -> None:
    state = server.state
    for phase, value in ((FIRST, float("nan")), (MAIN, float("inf"))):
        server.request(phase, context())
        replies = {**vectors(3, value=value), **vectors(1, 0)}
        accepted, rejected = server.check(phase, replies, context())
        assert list(rejected) == [3]
        assert "value is not finite" in str(rejected[3])
        assert list(accepted) == [0, 1]
    with pytest.raises(DivergedError, match="round 1: w of the server's model is not finite"):
        server.receive(MAIN, vectors(1, value=-1.0), context(1))  # its logarithm
    assert server.state is state
