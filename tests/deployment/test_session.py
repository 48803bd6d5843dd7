"""A client at its owner's node: what it answers, and what it refuses before it is charged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsynth import ModelParameters
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.node import Node
from fedsynth.deployment.policy import Policy
from fedsynth.deployment.proposal import new_proposal
from fedsynth.federation.protocol import RunTerms
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import Release, epsilon
from tests.deployment.place import CLIENTS, PRIVATE, Place, ask, joined, sections
from tests.families import by_family

ROUND: dict[str, Any] = {"round": 1, "participants": list(range(CLIENTS)), "phase": "main"}
EPSILON = {"epsilon": 8.0}
CAPPED = {"epsilon": 50.0, "noise_multiplier": 5.0}
"""With which an exchange is answered anew when a server begins again."""
Tensors = dict[str, torch.Tensor]


class Client:
    """A node that has joined a run, and the test as its server."""

    def __init__(
        self, place: Place, given: Any, policy: Policy | None = None, **terms: Any
    ) -> None:
        self.proposal = new_proposal(given)
        self.node: Node = place.node(0, policy)
        self.terms = terms
        assert joined(self.node, self.proposal).kind == "answer"
        self.runtime = self.node._session(self.proposal.run).runtime

    def asked(self, kind: str, payload: bytes = b"", **facts: Any) -> Frame:
        """The client's answer to one question."""
        asked = {**ROUND, **self.terms, **facts}
        return ask(self.node, self.proposal.run, kind, payload, **asked)

    @property
    def rows(self) -> tuple[Release, ...]:
        assert self.runtime.ledger is not None
        return self.runtime.ledger.releases

    def model(self, **other: torch.Tensor) -> Tensors:
        return {**self.runtime.context.architecture.state_dict(), **other}

    def message(self, **other: torch.Tensor) -> bytes:
        return ModelParameters(self.model(**other), 1.0).to_bytes()


def test_a_hostile_question_is_answered_with_an_error(place: Place) -> None:
    client = Client(place, sections("fedavg"), sizes=[1] * CLIENTS)
    questions: list[tuple[str, dict[str, Any]]] = [
        *(("step", {"phase": phase}) for phase in ("other", "first", None, 7)),
        ("read the disk", {}),
        ("step", {}),  # whose message is junk
        *(("step", {"sizes": sizes}) for sizes in (["many"], [1], [True] * 3, 7, [-1] * 3)),
        *(("step", {"participants": some}) for some in ([], [7], [1, 0], [0, 0], "0", None)),
        *(("step", {"round": n}) for n in (-1, 0, 3, 10**300, 10**1000, 1.0, True, "1", None)),
        *((kind, {}) for kind in ("keys", "shares", "unmask")),
        ("end", {"rounds": "2"}),
        ("join", {"last_round": -1}),
    ]
    for kind, facts in questions:
        answer = client.asked(kind, b"junk", **facts)
        assert answer.kind == "error", (kind, facts)
        assert 0 < len(answer.facts["text"]) < 400
    for sent in (b"", b"\xff" * 40):
        assert Frame.from_bytes(client.node.answer(client.proposal.run, sent)).kind == "error"
    for _ in range(2):
        assert client.asked("step", client.message()).kind == "answer"
    assert [row.unaccounted is not None for row in client.rows] == [True]  # recorded once


@pytest.mark.parametrize(
    "method", by_family((n for n in METHODS if method_class(n).dp_mechanisms), ("fedavg", "feddm"))
)
def test_nothing_is_answered_without_the_terms(place: Place, method: str) -> None:
    """A client is private by its own settings, and not because a server has said so."""
    client = Client(place, sections(method, privacy=EPSILON))
    state = client.runtime.method.initial_state(client.model())
    sent = client.runtime.method.broadcast(state, client.runtime.context).to_bytes()
    for kind in ("step", "keys"):
        for facts in ({}, {"phase": "first"}, {"sizes": [1] * CLIENTS}):
            assert client.asked(kind, sent, **facts).kind == "error", kind
    assert client.rows == ()


def test_the_noise_is_that_of_the_clients_own_settings_and_the_first_terms(place: Place) -> None:
    """Where the settings name σ, it is this one, whatever the server says; otherwise the first."""
    client = Client(place, sections("fedavg", privacy=PRIVATE))
    for sigma in ("3", None, 3, 0.0, -1.0, 1e-300, 0.001, 4.999):
        answer = client.asked("step", client.message(), noise_multiplier=sigma)
        assert answer.kind == "error", sigma
    assert client.rows == ()
    other = Client(Place(place.folder / "other"), sections("fedavg", privacy=EPSILON))
    assert other.asked("step", other.message(), noise_multiplier=6.0).kind == "answer"
    assert other.asked("step", other.message(), noise_multiplier=5.0, round=2).kind == "error"
    assert {row.noise_multiplier for row in other.rows} == {6.0}


def test_a_cap_holds_whatever_noise_a_server_asks_for(place: Place) -> None:
    client = Client(place, sections("fedavg", privacy=EPSILON), noise_multiplier=0.05)
    answer = client.asked("step", client.message())
    assert (answer.kind, answer.facts["kind"]) == ("refusal", "budget")
    assert answer.facts["history"]["releases"] == []
    assert client.rows == ()


def test_a_round_is_declined_before_its_first_exchange_if_the_budget_lacks_its_second(
    place: Place,
) -> None:
    given = sections("fedaf", privacy=PRIVATE)
    given["method"]["knowledge_from"] = "first-phase"
    for share, kind in ((0.5, "refusal"), (1.01, "answer")):
        client = Client(Place(place.folder / kind), given, noise_multiplier=5.0)
        session = client.node._session(client.proposal.run)
        session.accept(RunTerms(noise_multiplier=5.0))
        context = replace(client.runtime.context, participants=tuple(range(CLIENTS)))
        budget = client.runtime.budget
        assert budget is not None
        rows = budget.plan.client_rows(0, context)
        plans = budget.plan.client_plans(0, context)
        first = [row for row, plan in zip(rows, plans, strict=True) if plan.phase == "first"]
        least, whole = epsilon(first, 1e-5), epsilon(rows, 1e-5)
        assert least < 0.9 * whole
        policy = Policy(epsilon=least + share * (whole - least), delta=1e-5)
        capped = Client(Place(place.folder / f"{kind}-capped"), given, policy, **client.terms)
        method: Any = client.runtime.method
        state = method.initial_state(client.model())
        sent = method.first_request(state, client.runtime.context).to_bytes()
        assert capped.asked("step", sent, phase="first").kind == kind
        assert bool(capped.rows) == (kind == "answer")


def test_rounds_are_those_of_the_schedule_each_once(place: Place) -> None:
    client = Client(place, sections("fedavg", privacy=CAPPED), noise_multiplier=5.0)
    answer = client.asked("step", client.message())
    assert answer.kind == "answer"
    charged = len(client.rows)
    assert len(answer.facts["history"]["releases"]) == charged
    other = client.message(**{k: v + 1 for k, v in client.model().items()})
    others = ({"round": 2, "participants": some} for some in ([1, 2], [0]))
    for facts in ({}, {"round": 0}, {"round": 3}, {"round": 10**9}, *others):
        assert client.asked("step", other, **facts).kind == "error", facts
    assert len(client.rows) == charged
    assert client.asked("step", client.message()).payload == answer.payload  # the stored one
    assert len(client.rows) == charged


def test_a_crafted_model_is_refused_before_it_is_charged(place: Place) -> None:
    given = sections("fedavg", privacy=PRIVATE)
    name, own = next(iter(Client(place, given).model().items()))
    changes: list[Callable[[torch.Tensor], Tensors]] = [
        lambda own: {name: own[None]},
        lambda own: {name: torch.full_like(own, 7).to(torch.int64)},
        lambda own: {name: own.to(torch.complex64)},
        lambda own: {name: torch.full_like(own, float("inf"))},
        lambda own: {"other": own},
    ]
    for number, change in enumerate(changes):
        client = Client(Place(place.folder / str(number)), given, noise_multiplier=5.0)
        answer = client.asked("step", client.message(**change(own)))
        assert answer.kind in ("refusal", "error")
        assert client.rows == ()


@pytest.mark.parametrize("field", ["has_anchor", "anchors"])
def test_a_crafted_request_of_a_method_is_refused_before_it_is_charged(
    place: Place, field: str
) -> None:
    """`has_anchor` as a matrix would make each example's loss depend on the others."""
    client = Client(place, sections("fedfm-lite", privacy=PRIVATE), noise_multiplier=5.0)
    state = client.runtime.method.initial_state(client.model())
    sent = client.runtime.method.broadcast(state, client.runtime.context)
    odd = {"has_anchor": torch.ones(10, 64, dtype=torch.bool), "anchors": torch.ones(64)}[field]
    answer = client.asked("step", replace(sent, **{field: odd}).to_bytes())
    assert answer.kind == "refusal"
    assert field in answer.facts["reason"]
    assert client.rows == ()


def test_a_process_that_takes_over_knows_what_was_done(place: Place) -> None:
    """The stored state decides, and a damaged one is no permission."""
    client = Client(place, sections("fedavg", privacy=CAPPED), noise_multiplier=5.0)
    assert client.asked("step", client.message()).kind == "answer"
    other = client.message(**{k: v + 1 for k, v in client.model().items()})
    client.node = place.node(0)
    assert "already answered" in client.asked("step", other).facts["text"]
    [state] = place.folder.glob("owner-0/runs/*/session.json")
    whole = state.read_text()
    for damaged in (whole[:-9], "{}", whole.replace('"initial_rows"', '"rows"')):
        state.write_text(damaged)
        client.node = place.node(0)
        answer = client.asked("step", other, round=2)
        assert "Only the data owner sees the reason" in answer.facts["text"]
        assert "damaged" in place.said[-1]
    state.write_text(whole)
    client.node = place.node(0)
    assert client.asked("step", other, round=2).kind == "answer"
