"""Tests of the server without clients, and of clients without an engine: requests, replies, charges
and changes of the state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsynth as fs
from fedsynth.core.client import PrivateClientView
from fedsynth.errors import DivergedError, MessageError, RequestRefusedError, UnplannedReleaseError
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import public_context
from fedsynth.federation.in_process import evaluate_together, step_together, view
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import BUDGET, REQUEST, RunTerms
from fedsynth.federation.server import Server
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedfm import FeatureSums, ModelAndSums
from fedsynth.methods.shared.class_sums import COUNTS
from fedsynth.models.small import Linear
from fedsynth.privacy import Ledger
from fedsynth.privacy.plans import EXCHANGES, FIRST, MAIN
from tests.digits import CPU, SPEC, digits
from tests.raising import raises


def in_round(number: int = 2) -> fs.RoundContext:
    return replace(context(), round=number)


def sums(*numbers: int, value: float = 1.0) -> dict[int, FeatureSums]:
    return {k: FeatureSums(torch.full((10, 64), value + k), torch.ones(10)) for k in numbers}


def models(*numbers: int, value: float = 1.0) -> dict[int, fs.ModelParameters]:
    return {
        k: fs.ModelParameters(request(context(), value).parameters, len(PARTS[k])) for k in numbers
    }


@pytest.fixture
def server() -> Server:
    """The server of a method whose rounds have a first exchange from round 2 on."""
    return Server.begun(fs.FedFM(start_round=2), context())


def test_replies_are_ordered_and_state_changes_after_round(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a refusal in the first exchange, the next round starts from the last completed one."""
    first = create_autospec(fs.FedFM.first_aggregate, side_effect=fs.FedFM.first_aggregate)
    main = create_autospec(fs.FedFM.server_step, side_effect=fs.FedFM.server_step)
    monkeypatch.setattr(fs.FedFM, "first_aggregate", first)
    monkeypatch.setattr(fs.FedFM, "server_step", main)
    state, replies = server.state, sums(3, 0, 2)
    assert server.final_parameters() is state.parameters
    for completed in (False, True):
        server.request(FIRST, in_round())
        server.receive(FIRST, replies, in_round())
        assert list(first.call_args.args[2]) == [0, 2, 3]
        sent: Any = server.request(MAIN, in_round())
        torch.testing.assert_close(sent.anchors, torch.full((10, 64), (1 + 3 + 4) / 3))
        assert server.state is state
        if not completed:
            assert server.request(FIRST, in_round(1)) is None  # a round without a first exchange
            sent = server.request(MAIN, in_round(1))
            assert not sent.has_anchor.any()
    server.receive(MAIN, models(2, 1), in_round())
    assert list(main.call_args.args[2]) == [1, 2]
    assert server.state is not state
    assert server.state.has_anchor.all()  # type: ignore[attr-defined]
    assert list(replies) == [3, 0, 2]  # the argument is unchanged


@pytest.mark.parametrize(("exchange", "name"), [(FIRST, "first_broadcast"), (MAIN, "broadcast")])
def test_messages_of_wrong_type_are_rejected(
    server: Server, exchange: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subclasses are rejected too, since only the declared type was checked for privacy."""
    server.request(exchange, in_round())
    state, tensors = server.state, (torch.ones(10, 64), torch.ones(10))
    replies = sums(0) if exchange == FIRST else models(0)
    wide_sums = type("WideSums", (FeatureSums,), {})
    for reply in (wide_sums(*tensors), ModelAndSums({}, 1.0, *tensors)):
        message = f"fedfm returned a {type(reply).__name__}, but declares"
        with pytest.raises(TypeError, match=message):
            server.receive(exchange, {**replies, 1: reply}, in_round())
    assert server.state is state
    step = "first_aggregate" if exchange == FIRST else "server_step"
    monkeypatch.setattr(fs.FedFM, step, lambda *_: {})
    with pytest.raises(
        TypeError, match=r"fedfm's server step must return its declared `state`.*got dict"
    ):
        server.receive(exchange, replies, in_round())
    monkeypatch.setattr(fs.FedFM, name, lambda *_: FeatureSums(*tensors))
    with pytest.raises(TypeError, match="fedfm returned a FeatureSums"):
        server.request(exchange, in_round())


def test_non_finite_replies_and_models_are_rejected(server: Server) -> None:
    state = server.state
    for exchange, replies in (
        (FIRST, {**sums(3, value=math.nan), **sums(1, 0)}),
        (MAIN, {**models(3, value=math.inf), **models(1, 0)}),
    ):
        server.request(exchange, in_round())
        accepted, rejected = server.check(exchange, replies, in_round())
        assert list(rejected) == [3]
        assert "is not finite" in str(rejected[3])
        assert list(accepted) == [0, 1]
    with raises(DivergedError, "training.diverged"):
        server.receive(MAIN, models(1, value=math.inf), in_round(1))
    assert server.state is state


PARTS = [torch.arange(0, 30), torch.arange(30, 70), torch.arange(70, 90), torch.arange(90, 120)]


def parts(count: int, held_out: list[Tensor] | None = None) -> list[ClientData]:
    """Returns the records of the first clients, in one resident data set."""
    resident = digits(np.arange(150) % 10)
    splits = held_out or [torch.arange(0)] * count
    return [ClientData(resident, PARTS[k], splits[k]) for k in range(count)]


def context(**values: Any) -> fs.RoundContext:
    fields = {"clients": 4, "sizes": tuple(len(part) for part in PARTS), **values}
    return fs.RoundContext(1, 0, CPU, SPEC, Linear(SPEC.image_shape, 10), 30.0, **fields)


def client_of(
    number: int, method: Any, client_data: Any = None, server_sigma: Any = None, **privacy: Any
) -> ClientRuntime:
    """Returns a client that has received the terms of a run."""
    settings = fs.RunSettings(
        method=method,
        dataset="digits",
        model=fs.ModelSettings("linear"),
        partition=fs.PartitionSettings(clients=4),
        privacy=fs.PrivacySettings(**privacy) if privacy else None,
    )
    ledger = Ledger(f"client-{number}") if privacy else None
    client = ClientRuntime(number, settings, context(sizes=None), client_data, ledger)
    sigma = privacy.get("noise_multiplier") if server_sigma is None else server_sigma
    client.start(RunTerms(noise_multiplier=sigma) if privacy else RunTerms())
    return client


def runtimes(method: Any, held_out: list[Tensor] | None = None) -> list[ClientRuntime]:
    return [client_of(k, method, split) for k, split in enumerate(parts(4, held_out))]


def request(ctx: fs.RoundContext, value: float | None = None) -> fs.ModelParameters:
    """Returns the initial model, or one with this value in all parameters."""
    model = ctx.architecture.state_dict()
    if value is not None:
        model = {name: torch.full_like(old, value) for name, old in model.items()}
    return fs.ModelParameters(model, 1.0)


def test_requests_of_wrong_type_are_rejected() -> None:
    """Covers all methods, with clients without data."""
    unrelated = type("Unrelated", (fs.Message,), {})()
    for name in METHODS:
        client = client_of(0, method_class(name)())
        for exchange in EXCHANGES:
            with pytest.raises((TypeError, MessageError), match=rf"{name} (returned a|has no)"):
                step_together([client], exchange, unrelated, context())
        assert client.client_state == {}


def test_replies_and_memories_belong_to_their_clients() -> None:
    ctx = context()
    method = fs.FedAvg(local_epochs=2, batch=8, lr=0.1)
    together = step_together(runtimes(method)[1:], MAIN, request(ctx), ctx)
    assert (list(together.messages), together.refusals) == ([1, 2, 3], ())
    for client in runtimes(method)[1:]:
        reply: Any = step_together([client], MAIN, request(ctx), ctx).messages[client.number]
        group: Any = together.messages[client.number]
        torch.testing.assert_close(group.parameters, reply.parameters, atol=1e-6, rtol=1e-5)
        assert group.weight == reply.weight == len(PARTS[client.number])
    clients = runtimes(fs.Solo(local_epochs=1, batch=8, lr=0.1))
    step_together(clients[:2], MAIN, request(ctx), ctx)
    assert clients[2].client_state == {}
    first, second = (clients[k].client_state for k in (0, 1))
    assert set(first) == set(request(ctx).parameters)
    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert clients[0].personal({}) is first


def test_invalid_requests_are_refused_by_reply() -> None:
    """The remote server receives a refusal instead of an exception, and no data are read."""
    privacy = {"noise_multiplier": 1.0, "max_request_norm": 1.0}
    ctx = context(privacy=fs.PrivacySettings(**privacy), sizes=None)
    for method, exchange in ((fs.FedAvg(), MAIN), (fs.FedFM(), FIRST)):
        client = client_of(2, method, **privacy)
        for value, reason in ((5.0, "max_request_norm"), (float("nan"), "NaN or infinite")):
            replies = step_together([client], exchange, request(ctx, value), ctx)
            assert replies.messages == {}
            (refusal,) = replies.refusals
            assert refusal.kind == REQUEST
            assert reason in refusal.reason


def test_size_is_sent_only_without_privacy() -> None:
    (client, *_) = runtimes(fs.FedAvg())
    assert client.join().size == 30
    assert client.join().history is None
    private = client_of(0, fs.FedAvg(), client.data, noise_multiplier=1.0)
    assert private.join().size is None
    assert private.join().history is not None


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan, True, "1"])
def test_invalid_noise_multipliers_of_server_are_rejected(sigma: Any) -> None:
    with raises(RequestRefusedError, "request.noise"):
        client_of(0, fs.FedAvg(), server_sigma=sigma, epsilon=8.0)


def constant(label: int) -> dict[str, Tensor]:
    """Returns the parameters of a linear model that predicts this class for all images."""
    return {"classifier.weight": torch.zeros(10, 64), "classifier.bias": torch.eye(10)[label]}


def test_models_are_tested_on_splits_of_clients() -> None:
    """Every tenth label is 0. A personal model has its client's parameters."""
    bounds = ((0, 0), (120, 131), (121, 125), (130, 150))
    splits = [torch.arange(*bound) for bound in bounds]
    ctx = context()
    clients = runtimes(fs.FedAvg(), splits)
    models = {"global": constant(0), "one": constant(1)}
    evaluations = evaluate_together(clients, models, ctx)
    assert [e.client for e in evaluations] == [0, 1, 2, 3]
    assert [e.size for e in evaluations] == [30, 40 + 11, 20 + 4, 30 + 20]
    assert [e.tested for e in evaluations] == [0, 11, 4, 20]
    assert [e.right["global"] for e in evaluations] == [0, 2, 0, 2]
    assert [e.right["one"] for e in evaluations] == [0, 1, 1, 2]
    assert [e.tested for e in evaluate_together(runtimes(fs.FedAvg()), models, ctx)] == [0] * 4
    personal = runtimes(fs.Solo(), [torch.arange(120, 131)] * 4)
    personal[1].client_state = constant(5)
    evaluations = evaluate_together(personal, {"global": constant(0)}, ctx)
    assert [e.right["global"] for e in evaluations] == [2, 1, 2, 2]


def test_client_with_exhausted_budget_refuses() -> None:
    """Another run charges client 1 between `prepare` and the step."""
    base = {"run": {"method": "fedavg", "rounds": 1}, "method": {"local_epochs": 1}}
    settings = fs.resolve({**base, "privacy": {"epsilon": 1.0, "sample_rate": 1.0}})
    public = public_context(settings, SPEC, CPU)
    ledgers = [Ledger(f"client-{k}") for k in range(5)]
    plan = PrivacyPlan.make(settings, public, [ledger.history() for ledger in ledgers])
    held = enumerate(parts(3))
    clients = [ClientRuntime(k, settings, public, own, ledgers[k]) for k, own in held]
    for client in clients:
        client.start(RunTerms(noise_multiplier=plan.sigma))
    assert len({id(client.secret) for client in clients}) == len(clients)  # no shared noise
    ctx = plan.in_context(public)
    assert [client.prepare(ctx) for client in clients] == [None] * 3
    for row in plan.planned():
        ledgers[1].charge(row)
    assert [client.prepare(ctx) is None for client in clients] == [True, False, True]
    replies = step_together(clients, MAIN, request(ctx), ctx)
    (refusal,) = replies.refusals
    assert refusal.kind == BUDGET
    assert "client-1" in refusal.reason
    assert [len(ledger.releases) for ledger in ledgers[:3]] == [1, 1, 0]
    assert replies.messages == {}


def test_mechanisms_are_bound_to_clients() -> None:
    """A wrong index in a method would release a client's records twice for one charge, and indices
    into the data of another client would silently select other records."""
    held = enumerate(parts(2))
    clients = [client_of(k, fs.FedFMLite(), own, noise_multiplier=2.0) for k, own in held]
    ctx = clients[0].context
    group = view(clients, MAIN, ctx)
    assert isinstance(group, PrivateClientView)
    other = group.select(1).mechanisms(COUNTS)
    with raises(UnplannedReleaseError, "release.foreign_mechanism"):
        group.select(0).class_sums(other, lambda x, pair: x.new_ones(len(x), 1))
    clients = [client_of(k, fs.FedAvg(), parts(2)[k]) for k in range(2)]
    with pytest.raises(ValueError, match="uses another data set than"):
        step_together(clients, MAIN, request(context()), context())
