"""The server alone: what it asks, what it takes, and when its state changes."""

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
class Question(Message):
    """Down: what the server knows from the round's first exchange."""

    first: Tensor = public("a test's")


@dataclass(frozen=True)
class Word(Message):
    """Up: a vector."""

    value: Tensor = released()


@dataclass(frozen=True)
class Wide(Word):
    """A subclass of what is declared."""


@dataclass(frozen=True)
class TraceState(ServerState):
    """The state, with what the first exchange brought."""

    first: Tensor | None = None


def in_order(replies: Mapping[int, Word]) -> Tensor:
    """[clients, 1 + values]: numbers and values as they came."""
    rows = [torch.cat([torch.tensor([float(k)]), word.value]) for k, word in replies.items()]
    return torch.stack(rows)


@dataclass(frozen=True)
class Trace(Method):
    """Keeps what came in, as it came; from round 2 on a round has a first exchange."""

    name: ClassVar[str] = "trace"
    downlink: ClassVar[type[Message]] = Question
    upload: ClassVar[type[Message]] = Word
    first_downlink: ClassVar[type[Message] | None] = ModelParameters
    first_upload: ClassVar[type[Message] | None] = Word
    state: ClassVar[type[ServerState]] = TraceState

    def first_request(self, state: TraceState, context: RoundContext) -> Message | None:
        return ModelParameters(state.parameters, 1.0) if context.round > 1 else None

    def first_aggregate(
        self, state: TraceState, replies: Mapping[int, Word], context: RoundContext
    ) -> TraceState:
        return replace(state, first=in_order(replies))

    def broadcast(self, state: TraceState, context: RoundContext) -> Message:
        return Question(torch.zeros(0) if state.first is None else state.first)

    def server_step(
        self, state: TraceState, uploads: Mapping[int, Word], context: RoundContext
    ) -> TraceState:
        return replace(state, parameters={"w": in_order(uploads).log()})


def context(number: int = 1) -> RoundContext:
    return RoundContext(number, 0, CPU, SPEC, torch.nn.Linear(1, 1), 5.0, clients=4)


def words(*numbers: int, value: float = 1.0) -> dict[int, Message]:
    return {k: Word(torch.tensor([value])) for k in numbers}


def server() -> Server:
    return Server(Trace(), {"w": torch.ones(1)})


def test_replies_are_ordered_by_client_and_a_state_changes_at_a_rounds_end() -> None:
    made = server()
    before = made.state
    assert type(before) is TraceState
    assert made.final_parameters() is before.parameters
    replies = words(3, 0, 2)
    made.request(FIRST, context(2))
    made.receive(FIRST, replies, context(2))
    request = made.request(MAIN, context(2))
    assert isinstance(request, Question)
    assert request.first[:, 0].tolist() == [0, 2, 3]  # the main exchange sees the first one's
    assert made.state is before
    made.receive(MAIN, words(2, 1), context(2))
    assert made.state.parameters["w"][:, 0].exp().round().tolist() == [1, 2]
    assert made.state.first is not None  # type: ignore[attr-defined]
    assert list(replies) == [3, 0, 2]  # the argument is unchanged


def test_a_round_that_ended_early_leaves_nothing_behind() -> None:
    """A client refuses after the first exchange; the next round begins from the last whole one."""
    made = server()
    made.request(FIRST, context(2))
    made.receive(FIRST, words(0, 1), context(2))
    made.request(MAIN, context(2))
    assert made.request(FIRST, context(1)) is None  # a round without a first exchange
    request: Any = made.request(MAIN, context(1))
    assert len(request.first) == 0


@pytest.mark.parametrize(("phase", "name"), [(FIRST, "first_request"), (MAIN, "broadcast")])
def test_a_request_of_another_type_is_not_sent(
    phase: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trace, name, lambda *_: Word(torch.ones(1)))
    with pytest.raises(TypeError, match=r"trace must send messages of type \w+, got Word"):
        server().request(phase, context(2))


@pytest.mark.parametrize(
    ("phase", "reply"), [(FIRST, Wide(torch.ones(1))), (MAIN, ModelParameters({}, 1.0))]
)
def test_a_reply_of_another_type_is_refused(phase: str, reply: Message) -> None:
    """Also one of a subclass: what was declared was checked under differential privacy."""
    made = server()
    made.request(phase, context(2))
    before = made.state
    got = type(reply).__name__
    with pytest.raises(TypeError, match=f"trace must send messages of type Word, got {got}"):
        made.receive(phase, {**words(0), 1: reply}, context(2))
    assert made.state is before


@pytest.mark.parametrize(("phase", "value"), [(FIRST, float("nan")), (MAIN, float("inf"))])
def test_a_reply_that_is_not_finite_is_rejected(phase: str, value: float) -> None:
    made = server()
    made.request(phase, context(2))
    before = made.state
    checked = made.check(phase, {**words(3, value=value), **words(1, 0)}, context(2))
    assert list(checked.rejected) == [3]
    assert "value is not finite" in str(checked.rejected[3])
    assert list(checked.accepted) == [0, 1]
    assert made.state is before


def test_a_non_finite_model_is_not_the_next_state() -> None:
    made = server()
    before = made.state
    made.request(MAIN, context(1))
    with pytest.raises(DivergedError, match="round 1: w of the server's model is not finite"):
        made.receive(MAIN, words(1, value=-1.0), context(1))  # its logarithm
    assert made.state is before
