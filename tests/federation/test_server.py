"""The server alone: what it asks, what it takes, and when its state changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.core.method import Method
from fedsynth.core.state import ServerState
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DivergedError
from fedsynth.federation.server import Server, check_declared
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedprox import LossModel
from fedsynth.privacy.plans import FIRST, MAIN


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
    return RoundContext(
        number,
        0,
        torch.device("cpu"),
        dataset_spec("digits"),
        torch.nn.Linear(1, 1),
        5.0,
        clients=4,
    )


def words(*numbers: int, value: float = 1.0) -> dict[int, Message]:
    return {k: Word(torch.tensor([value])) for k in numbers}


def server(method: Method | None = None) -> Server:
    return Server(method or Trace(), {"w": torch.ones(1)})


def test_the_first_state_is_of_the_methods_type() -> None:
    made = server()
    assert type(made.state) is TraceState
    assert made.state.first is None
    assert made.final_parameters() is made.state.parameters


def test_replies_are_known_by_number_whatever_their_order() -> None:
    made = server()
    replies = words(3, 0, 2)
    made.request(FIRST, context(2))
    made.receive(FIRST, replies, context(2))
    request = made.request(MAIN, context(2))
    assert isinstance(request, Question)
    assert request.first[:, 0].tolist() == [0, 2, 3]
    made.receive(MAIN, words(2, 1), context(2))
    assert made.state.parameters["w"][:, 0].exp().round().tolist() == [1, 2]
    assert list(replies) == [3, 0, 2]  # and what was given is left as it is


def test_the_state_changes_at_the_end_of_a_round_alone() -> None:
    made = server()
    before = made.state
    assert made.request(FIRST, context(2)) is not None
    made.receive(FIRST, words(0, 1), context(2))
    request: Any = made.request(MAIN, context(2))
    assert len(request.first) == 2  # the main exchange sees what the first one brought
    assert made.state is before
    made.receive(MAIN, words(1, 2), context(2))
    assert made.state is not before
    assert made.state.first is not None  # type: ignore[attr-defined]


def test_a_round_that_ended_early_leaves_nothing_behind() -> None:
    """Somebody refuses after the first exchange; the next round begins from the last whole one."""
    made = server()
    made.request(FIRST, context(2))
    made.receive(FIRST, words(0, 1), context(2))
    made.request(MAIN, context(2))
    assert made.request(FIRST, context(1)) is None  # a round without a first exchange
    request: Any = made.request(MAIN, context(1))
    assert len(request.first) == 0


def test_a_method_without_a_first_exchange_asks_nothing_in_it() -> None:
    for name in METHODS:
        cls = method_class(name)
        if cls.first_downlink is None:
            made = cls().first_request(cls().initial_state({}), context(3))
            assert made is None, name


@pytest.mark.parametrize(("phase", "step"), [(FIRST, "first_request"), (MAIN, "broadcast")])
def test_a_request_of_another_type_is_not_sent(
    phase: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trace, step, lambda self, state, context: Word(torch.ones(1)))
    with pytest.raises(TypeError, match=r"trace declares messages of type \w+, got Word"):
        server().request(phase, context(2))


def test_a_first_request_that_is_not_declared_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "first_downlink", None)
    with pytest.raises(TypeError, match="type nothing, got ModelParameters"):
        server().request(FIRST, context(2))


@pytest.mark.parametrize(
    ("phase", "reply"), [(FIRST, Wide(torch.ones(1))), (MAIN, ModelParameters({}, 1.0))]
)
def test_a_reply_of_another_type_is_refused(phase: str, reply: Message) -> None:
    """Also one of a subclass: what was declared was checked under differential privacy."""
    made = server()
    made.request(phase, context(2))
    before = made.state
    got = type(reply).__name__
    with pytest.raises(TypeError, match=f"trace declares messages of type Word, got {got}"):
        made.receive(phase, {**words(0), 1: reply}, context(2))
    assert made.state is before


@pytest.mark.parametrize(("phase", "value"), [(FIRST, float("nan")), (MAIN, float("inf"))])
def test_a_reply_that_is_not_finite_is_rejected(phase: str, value: float) -> None:
    made = server()
    made.request(phase, context(2))
    before = made.state
    checked = made.check(phase, {**words(3, value=value), **words(1, 0)}, context(2))
    assert {client: str(error) for client, error in checked.rejected.items()} == {
        3: "value is not finite"
    }
    assert list(checked.accepted) == [0, 1]
    assert made.state is before


def test_a_model_that_is_not_finite_is_no_next_state() -> None:
    made = server()
    before = made.state
    made.request(MAIN, context(1))
    with pytest.raises(DivergedError, match="round 1: w of the server's model is not finite"):
        made.receive(MAIN, words(1, value=-1.0), context(1))  # its logarithm
    assert made.state is before


def test_what_a_method_declares_is_what_it_takes() -> None:
    """Of every method; the exact type, and no other message."""
    for name in METHODS:
        method = method_class(name)()
        for declared in (method.downlink, method.upload):
            check_declared(method, object.__new__(declared), declared)
            for wrong in (Word, type("Sub", (declared,), {})):
                with pytest.raises(TypeError, match=f"{name} declares .*{declared.__name__}, got"):
                    check_declared(method, object.__new__(wrong), declared)


def test_a_model_is_not_taken_for_a_richer_message() -> None:
    """FedProx's clients send their losses; a plain model in their place would have none."""
    made = Server(method_class("fedprox")(), {"w": torch.ones(1)})
    made.request(MAIN, context())
    plain = {0: ModelParameters({"w": torch.ones(1)}, 1.0)}
    with pytest.raises(TypeError, match="type LossModel, got ModelParameters"):
        made.receive(MAIN, plain, context())
    made.receive(MAIN, {0: LossModel({"w": torch.full((1,), 4.0)}, 1.0, 0.0)}, context())
    assert float(made.state.parameters["w"]) == 4
