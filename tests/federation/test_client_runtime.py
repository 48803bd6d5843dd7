"""Clients without an engine: the requests they accept, their answers, and their charges."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth import (
    FedAvg,
    FedFMLite,
    ImageData,
    Message,
    ModelParameters,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RoundContext,
    RunSettings,
    Solo,
    resolve,
)
from fedsynth.core.client import PrivateClientView
from fedsynth.errors import MessageError
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import public_context
from fedsynth.federation.in_process import evaluate_together, step_alone, step_together, view
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import BUDGET, REQUEST, RunTerms
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.shared.class_sums import COUNTS
from fedsynth.models.small import Linear
from fedsynth.privacy import Ledger
from fedsynth.privacy.errors import RequestRefusedError, UnplannedReleaseError
from fedsynth.privacy.plans import FIRST, MAIN, PHASES
from tests.digits import CPU, SPEC, digits

PARTS = [torch.arange(0, 30), torch.arange(30, 70), torch.arange(70, 90), torch.arange(90, 120)]


def data() -> ImageData:
    return digits(np.arange(150) % 10)


def context(**named: Any) -> RoundContext:
    given = {"clients": 4, "sizes": tuple(len(part) for part in PARTS), **named}
    return RoundContext(1, 0, CPU, SPEC, Linear(SPEC.image_shape, 10), 30.0, **given)


def client_of(
    number: int, method: Any, own: Any = None, server_sigma: Any = None, **privacy: Any
) -> ClientRuntime:
    """A client that was told the terms."""
    settings = RunSettings(
        method=method,
        dataset="digits",
        model=ModelSettings("linear"),
        partition=PartitionSettings(clients=4),
        privacy=PrivacySettings(**privacy) if privacy else None,
    )
    ledger = Ledger(f"client-{number}") if privacy else None
    client = ClientRuntime(number, settings, context(sizes=None), own, ledger)
    sigma = privacy.get("noise_multiplier") if server_sigma is None else server_sigma
    client.start(RunTerms(noise_multiplier=sigma) if privacy else RunTerms())
    return client


def runtimes(method: Any, held_out: list[Tensor] | None = None) -> list[ClientRuntime]:
    nothing = [torch.arange(0)] * len(PARTS)
    resident = data()
    pairs = zip(PARTS, held_out or nothing, strict=True)
    own = [ClientData(resident, part, test) for part, test in pairs]
    return [client_of(k, method, mine) for k, mine in enumerate(own)]


def request(ctx: RoundContext) -> ModelParameters:
    return ModelParameters(ctx.architecture.state_dict(), 1.0)


# ------------------------------------------------------------------------------------------ steps


def test_a_request_of_another_type_is_refused_before_any_data_are_read() -> None:
    """Of every method; no data are there that could be read."""

    class Stranger(Message):
        """Of no method."""

    for name in METHODS:
        method = method_class(name)()
        client = client_of(0, method)
        declared = {MAIN: method.downlink, FIRST: method.first_downlink}
        wrong = ModelParameters({}, 1.0) if method.downlink is not ModelParameters else Stranger()
        for phase in PHASES:
            if type(wrong) is not declared[phase]:
                with pytest.raises((TypeError, MessageError), match=rf"{name} (must send|has no)"):
                    step_together([client], phase, wrong, context())
        assert client.memory == {}


def test_replies_are_keyed_by_client_index() -> None:
    ctx = context()
    method = FedAvg(local_epochs=2, batch=8, lr=0.1)
    some = runtimes(method)[1:]
    together = step_together(some, MAIN, request(ctx), ctx)
    assert list(together.messages) == [1, 2, 3]
    assert together.refusals == ()
    for client in runtimes(method)[1:]:
        reply = step_alone(client, MAIN, request(ctx), ctx)
        assert isinstance(reply, ModelParameters)
        group: Any = together.messages[client.number]
        for name, value in reply.parameters.items():
            torch.testing.assert_close(group.parameters[name], value, atol=1e-6, rtol=1e-5)
        assert group.weight == reply.weight == len(PARTS[client.number])


def test_a_client_keeps_its_own_memory() -> None:
    ctx = context()
    clients = runtimes(Solo(local_epochs=1, batch=8, lr=0.1))
    step_together(clients[:2], MAIN, request(ctx), ctx)
    assert clients[2].memory == {}
    one, other = (clients[k].memory for k in (0, 1))
    assert set(one) == set(request(ctx).parameters)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert clients[0].personal({}) is one


def test_an_unsound_request_is_refused_by_an_answer() -> None:
    """Not by an exception: the server is elsewhere. Nothing was asked of the data."""
    ctx = context(privacy=PrivacySettings(noise_multiplier=1.0, max_request_norm=1.0), sizes=None)
    client = client_of(2, FedAvg(), noise_multiplier=1.0, max_request_norm=1.0)
    for value, reason in ((5.0, "max_request_norm"), (float("nan"), "not finite")):
        parameters = {
            name: torch.full_like(own, value) for name, own in ctx.architecture.state_dict().items()
        }
        message = ModelParameters(parameters, 1.0)
        replies = step_together([client], MAIN, message, ctx)
        assert replies.messages == {}
        (refusal,) = replies.refusals
        assert (refusal.client, refusal.kind) == (2, REQUEST)
        assert reason in refusal.reason
        assert step_alone(client, MAIN, message, ctx) == refusal


def test_a_client_sends_its_size_only_without_privacy() -> None:
    (client, *_) = runtimes(FedAvg())
    assert client.join().size == 30
    assert client.join().history is None
    private = client_of(0, FedAvg(), client.data, noise_multiplier=1.0)
    assert private.join().size is None
    assert private.join().history is not None


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan, True, "1"])
def test_a_servers_noise_multiplier_is_positive_and_finite(sigma: Any) -> None:
    with pytest.raises(RequestRefusedError, match="noise multiplier must be above 0"):
        client_of(0, FedAvg(), server_sigma=sigma, epsilon=8.0)


# ------------------------------------------------------------------------------------- evaluation


class SaysZero(nn.Module):
    """Class 0, whatever it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.eye(10)[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(len(x), 10)


def test_models_are_tested_on_each_clients_own_split() -> None:
    """Every tenth label is 0: counted by hand. A personal model has its client's parameters."""
    bounds = ((0, 0), (120, 131), (121, 125), (130, 150))
    splits = [torch.arange(*some) for some in bounds]
    ctx = replace(context(), architecture=SaysZero())
    clients = runtimes(FedAvg(), splits)
    models = {"global": SaysZero().state_dict(), "one": {"bias": torch.eye(10)[1]}}
    found = evaluate_together(clients, models, ctx)
    assert [e.client for e in found] == [0, 1, 2, 3]
    assert [e.size for e in found] == [30, 40 + 11, 20 + 4, 30 + 20]
    assert [e.tested for e in found] == [0, 11, 4, 20]
    assert [e.right["global"] for e in found] == [0, 2, 0, 2]
    assert [e.right["one"] for e in found] == [0, 1, 1, 2]
    assert [client.evaluate(models, ctx) for client in clients] == found
    assert [e.tested for e in evaluate_together(runtimes(FedAvg()), models, ctx)] == [0] * 4
    personal = runtimes(Solo(), [torch.arange(120, 131)] * 4)
    personal[1].memory = {"bias": torch.eye(10)[5]}
    found = evaluate_together(personal, {"global": SaysZero().state_dict()}, ctx)
    assert [e.right["global"] for e in found] == [2, 1, 2, 2]


# -------------------------------------------------------------------------------------- charges


def test_the_client_with_an_exhausted_budget_refuses() -> None:
    """Another run charges client 1 between `prepare` and the step: 0 is charged, 1 refuses."""
    given = {"run": {"method": "fedavg", "rounds": 1}, "method": {"local_epochs": 1}}
    settings = resolve({**given, "privacy": {"epsilon": 1.0, "sample_rate": 1.0}})
    public = public_context(settings, SPEC, CPU)
    ledgers = [Ledger(f"client-{k}") for k in range(5)]
    plan = PrivacyPlan.make(settings, public, [ledger.history() for ledger in ledgers])
    resident = data()
    own = [ClientData(resident, PARTS[k], torch.arange(0)) for k in range(3)]
    clients = [ClientRuntime(k, settings, public, own[k], ledgers[k]) for k in range(3)]
    for client in clients:
        client.start(RunTerms(noise_multiplier=plan.sigma))
    ctx = plan.in_context(public)
    assert [client.prepare(ctx) for client in clients] == [None] * 3
    for row in plan.planned():
        ledgers[1].charge(row)
    assert [clients[k].prepare(ctx) is None for k in range(3)] == [True, False, True]
    message = ModelParameters(ctx.architecture.state_dict(), 1.0)
    replies = step_together(clients, MAIN, message, ctx)
    (refusal,) = replies.refusals
    assert (refusal.client, refusal.kind) == (1, BUDGET)
    assert "client-1" in refusal.reason
    assert [len(ledger.releases) for ledger in ledgers[:3]] == [1, 1, 0]
    assert replies.messages == {}


def test_clients_with_separate_data_are_not_a_group() -> None:
    """One's positions in another's data would be other records, without a word."""
    clients = [
        client_of(k, FedAvg(), ClientData(data(), PARTS[k], torch.arange(0))) for k in range(2)
    ]
    with pytest.raises(ValueError, match="share one data set"):
        step_together(clients, MAIN, request(context()), context())


def test_a_mechanism_belongs_to_its_client_and_is_not_copied() -> None:
    """A wrong position in a method would release one client's records twice for one charge."""
    resident = data()
    own = [ClientData(resident, PARTS[k], torch.arange(0)) for k in range(2)]
    clients = [client_of(k, FedFMLite(), own[k], noise_multiplier=2.0) for k in range(2)]
    ctx = clients[0].context
    group = view(clients, MAIN, ctx)
    assert isinstance(group, PrivateClientView)
    other = group.select(1).series(COUNTS)
    with pytest.raises(
        UnplannedReleaseError, match=r"records of client 0 cannot be used .* charged to client 1"
    ):
        group.select(0).class_sums(other, lambda x, segment: x.new_ones(len(x), 1))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be"):
            copied(other[0])
