"""Tests of a client at its owner's node: its answers, and refusals before a charge."""

from __future__ import annotations

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
from tests.deployment.local_setup import CLIENTS, PRIVATE, Setup, ask, join, sections
from tests.quick_runs import by_family

ROUND: dict[str, Any] = {"round": 1, "participants": list(range(CLIENTS)), "phase": "main"}
EPSILON = {"epsilon": 8.0}
CAPPED = {"epsilon": 50.0, "noise_multiplier": 5.0}
"""A cap, with which an exchange is answered again after a server restarts."""
Tensors = dict[str, torch.Tensor]


class Client:
    """A node that has joined a run; the test is its server."""

    def __init__(
        self, setup: Setup, settings: Any, policy: Policy | None = None, **terms: Any
    ) -> None:
        self.proposal = new_proposal(settings)
        self.node: Node = setup.node(0, policy)
        self.terms = terms
        assert join(self.node, self.proposal).kind == "answer"
        self.runtime = self.node._session(self.proposal.run).runtime

    def request(self, kind: str, payload: bytes = b"", **facts: Any) -> Frame:
        """Returns the client's answer to a request."""
        request = {**ROUND, **self.terms, **facts}
        return ask(self.node, self.proposal.run, kind, payload, **request)

    @property
    def rows(self) -> tuple[Release, ...]:
        assert self.runtime.ledger is not None
        return self.runtime.ledger.releases

    def model(self, **other: torch.Tensor) -> Tensors:
        return {**self.runtime.context.architecture.state_dict(), **other}

    def message(self, **other: torch.Tensor) -> bytes:
        return ModelParameters(self.model(**other), 1.0).to_bytes()


def test_hostile_requests_are_answered_with_errors(setup: Setup) -> None:
    client = Client(setup, sections("fedavg"), sizes=[1] * CLIENTS)
    requests: list[tuple[str, dict[str, Any]]] = [
        *(("step", {"phase": phase}) for phase in ("other", "first", None, 7)),
        ("read the disk", {}),
        ("step", {}),  # whose message is junk
        *(("step", {"sizes": sizes}) for sizes in (["many"], [1], [True] * 3, 7, [-1] * 3)),
        *(("step", {"participants": clients}) for clients in ([], [7], [1, 0], [0, 0], "0", None)),
        *(("step", {"round": n}) for n in (-1, 0, 3, 10**300, 10**1000, 1.0, True, "1", None)),
        *((kind, {}) for kind in ("keys", "shares", "unmask")),
        ("end", {"rounds": "2"}),
        ("join", {"last_round": -1}),
    ]
    for kind, facts in requests:
        answer = client.request(kind, b"junk", **facts)
        assert answer.kind == "error", (kind, facts)
        assert 0 < len(answer.facts["text"]) < 400
    for sent in (b"", b"\xff" * 40):
        assert Frame.from_bytes(client.node.answer(client.proposal.run, sent)).kind == "error"
    for _ in range(2):
        assert client.request("step", client.message()).kind == "answer"
    assert [row.unaccounted is not None for row in client.rows] == [True]  # recorded once


@pytest.mark.parametrize(
    "method", by_family((n for n in METHODS if method_class(n).dp_mechanisms), ("fedavg", "feddm"))
)
def test_private_requests_without_noise_terms_are_errors(setup: Setup, method: str) -> None:
    """A client is private by its own settings, not by the server's request."""
    client = Client(setup, sections(method, privacy=EPSILON))
    state = client.runtime.method.initial_state(client.model())
    sent = client.runtime.method.broadcast(state, client.runtime.context).to_bytes()
    for kind in ("step", "keys"):
        for facts in ({}, {"phase": "first"}, {"sizes": [1] * CLIENTS}):
            assert client.request(kind, sent, **facts).kind == "error", kind
    assert client.rows == ()


def test_noise_must_match_the_settings_or_the_first_terms(setup: Setup) -> None:
    """The settings' σ is required, or else the first one that the server requested, if the budget
    allows it."""
    client = Client(setup, sections("fedavg", privacy=PRIVATE))
    for sigma in ("3", None, 3, 0.0, -1.0, 1e-300, 0.001, 4.999):
        answer = client.request("step", client.message(), noise_multiplier=sigma)
        assert answer.kind == "error", sigma
    assert client.rows == ()
    for folder, sigma in (("low", 0.05), ("high", 6.0)):
        client = Client(Setup(setup.folder / folder), sections("fedavg", privacy=EPSILON))
        answer = client.request("step", client.message(), noise_multiplier=sigma)
        if folder == "low":
            assert (answer.kind, answer.facts["kind"]) == ("refusal", "budget")
            assert answer.facts["history"]["releases"] == []
            assert client.rows == ()
    assert answer.kind == "answer"
    again = client.request("step", client.message(), noise_multiplier=5.0, round=2)
    assert again.kind == "error"
    assert {row.noise_multiplier for row in client.rows} == {6.0}


def test_rounds_that_exceed_the_budget_are_declined_before_the_first_exchange(
    setup: Setup,
) -> None:
    settings = sections("fedaf", privacy=PRIVATE)
    settings["method"]["knowledge_from"] = "first-phase"
    client = Client(setup, settings, noise_multiplier=5.0)
    client.node._session(client.proposal.run).accept(RunTerms(noise_multiplier=5.0))
    context = replace(client.runtime.context, participants=tuple(range(CLIENTS)))
    budget = client.runtime.budget
    assert budget is not None
    rows = budget.plan.client_rows(0, context)
    plans = budget.plan.client_plans(0, context)
    first = [row for row, plan in zip(rows, plans, strict=True) if plan.phase == "first"]
    first_epsilon, round_epsilon = epsilon(first, 1e-5), epsilon(rows, 1e-5)
    assert first_epsilon < 0.9 * round_epsilon
    method: Any = client.runtime.method
    state = method.initial_state(client.model())
    sent = method.first_request(state, client.runtime.context).to_bytes()
    for share, kind in ((0.5, "refusal"), (1.01, "answer")):
        policy = Policy(epsilon=first_epsilon + share * (round_epsilon - first_epsilon), delta=1e-5)
        capped = Client(Setup(setup.folder / kind), settings, policy, **client.terms)
        assert capped.request("step", sent, phase="first").kind == kind
        assert bool(capped.rows) == (kind == "answer")


def test_malformed_requests_are_refused_before_charging(setup: Setup) -> None:
    """`has_anchor` as a matrix would make each example's loss depend on the others."""
    settings = sections("fedfm-lite", privacy=PRIVATE)
    client = Client(setup, settings, noise_multiplier=5.0)
    name, tensor = next(iter(client.model().items()))
    tensors: list[Tensors] = [
        {name: tensor[None]},
        {name: torch.full_like(tensor, 7).to(torch.int64)},
        {name: tensor.to(torch.complex64)},
        {name: torch.full_like(tensor, float("inf"))},
        {"other": tensor},
    ]
    fields: dict[str, Any] = {
        "has_anchor": torch.ones(10, 64, dtype=torch.bool),
        "anchors": torch.ones(64),
    }
    changes = [{"parameters": client.model(**changed)} for changed in tensors]
    changes += [{field: malformed} for field, malformed in fields.items()]
    state = client.runtime.method.initial_state(client.model())
    sent = client.runtime.method.broadcast(state, client.runtime.context)
    assert client.request("step", sent.to_bytes()).kind == "answer"
    for number, change in enumerate(changes):
        client = Client(Setup(setup.folder / str(number)), settings, noise_multiplier=5.0)
        answer = client.request("step", replace(sent, **change).to_bytes())
        assert answer.kind in ("refusal", "error"), change
        [field] = change
        assert field == "parameters" or field in answer.facts["reason"]
        assert client.rows == ()


def test_only_scheduled_rounds_are_answered_once(setup: Setup) -> None:
    """In new processes, too, which continue the stored session; a damaged state is refused."""
    client = Client(setup, sections("fedavg", privacy=CAPPED), noise_multiplier=5.0)
    answer = client.request("step", client.message())
    assert answer.kind == "answer"
    charged = len(client.rows)
    assert len(answer.facts["history"]["releases"]) == charged
    other = client.message(**{k: v + 1 for k, v in client.model().items()})
    others = ({"round": 2, "participants": clients} for clients in ([1, 2], [0]))
    for facts in ({}, {"round": 0}, {"round": 3}, {"round": 10**9}, *others):
        assert client.request("step", other, **facts).kind == "error", facts
    assert client.request("step", client.message()).payload == answer.payload  # the stored one
    assert len(client.rows) == charged
    client.node = setup.node(0)
    assert "already answered" in client.request("step", other).facts["text"]
    [state] = setup.folder.glob("owner-0/runs/*/session.json")
    text = state.read_text()
    for damaged in (text[:-9], "{}", text.replace('"initial_rows"', '"rows"')):
        state.write_text(damaged)
        client.node = setup.node(0)
        answer = client.request("step", other, round=2)
        assert "Only the data owner sees the reason" in answer.facts["text"]
        assert "damaged" in setup.messages[-1]
    state.write_text(text)
    client.node = setup.node(0)
    assert client.request("step", other, round=2).kind == "answer"
