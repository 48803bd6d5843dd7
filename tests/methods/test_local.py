"""Methods with local training: groups of clients, rounds without counted clients, penalties of
private clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedsynth as fs
from fedsynth.core.client import ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.errors import DivergedError
from fedsynth.federation.server import Server
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.qffl import TINY, FairModel
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.models.registry import parameter_count
from fedsynth.models.small import Linear
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.training.many_clients import Learner, train_together
from tests.digits import SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.rounds import play_round

PARTS = torch.arange(40).split([8, 1, 15, 5, 11])
LOCAL: dict[str, Any] = {"batch": 4, "lr": 0.2, "momentum": 0.0, "local_epochs": 2}
PLAIN = (fs.FedAvg, fs.FedAvgM, fs.FedProx, fs.FedNova, fs.FedDyn, fs.Scaffold, fs.QFFL, fs.Solo)
LINEAR = Linear(SPEC.image_shape, 10)


DATA = digits(np.random.default_rng(0).integers(0, 3, 40))


def context(number: int = 1, clients: int = 5, **changes: Any) -> RoundContext:
    sizes = tuple(len(part) for part in PARTS[:clients])
    federation = {"nominal": 8.0, "network": LINEAR, "sizes": sizes, **changes}
    return round_context(federation.pop("privacy", None), number, clients=clients, **federation)


def group(clients: int = 5) -> ExactClientView:
    return ExactClientView(range(clients), DATA, PARTS[:clients])


def vectors(uploads: list[Any]) -> list[Tensor]:
    return [torch.cat([value.flatten() for value in u.parameters.values()]) for u in uploads]


@pytest.mark.parametrize("kind", PLAIN)
def test_clients_that_train_in_turn_upload_what_they_upload_alone(kind: Any) -> None:
    """A broken version would start a client from the weights of the one before, or overwrite its
    upload, as one network trains for all."""
    method, network = kind(**LOCAL), convnet()
    together = client_uploads(method, context(network=network), group())
    for number, upload in enumerate(together):
        (alone,) = client_uploads(method, context(network=network), group().select(number))
        for (name, tensor), (_, other) in zip(upload.arrays(), alone.arrays(), strict=True):
            assert torch.equal(tensor, other), name


def test_dense_networks_train_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken version would train in turn, or keep a group's models in memory."""
    passes: list[int] = []

    def spy(learners: Sequence[Learner], *rest: Any) -> None:
        passes.append(len(learners))
        train_together(learners, *rest)

    monkeypatch.setattr("fedsynth.methods.shared.client_training.train_together", spy)
    for kind in (*PLAIN, fs.FedGKD):
        passes.clear()
        client_uploads(kind(**LOCAL, stragglers=0.4), context(), group())
        assert passes == ([] if kind is fs.FedGKD else [5]), kind
    private = PrivacySettings(noise_multiplier=1.0)
    for name in METHODS:
        cls: Any = method_class(name)
        if issubclass(cls, fs.TrainsLocally):
            assert (cls().client_bytes(context()) is not None) == (cls in PLAIN), name
            assert cls().client_bytes(context(privacy=private)) is None
    in_turn = fs.FedAvg().client_bytes(context(network=convnet()))
    assert in_turn == 16 * parameter_count(convnet())
    assert fs.FedAvg().client_bytes(context(client_architectures=(LINEAR,) * 5)) is None
    largest_batch = 2**15 // 64
    in_turn = 16 * parameter_count(LINEAR)
    assert fs.FedAvg(batch=largest_batch).client_bytes(context()) > in_turn
    assert fs.FedAvg(batch=largest_batch + 1).client_bytes(context()) == in_turn


@pytest.mark.parametrize("kind", [*PLAIN[:-1], fs.FedGKD, fs.FedGen])
def test_rounds_without_counted_clients_change_nothing(kind: Any) -> None:
    method = kind(**LOCAL)
    server, memories = Server(method, LINEAR.state_dict()), dict[int, Any]()
    for number in (1, 2):
        uploads = play_round(server, [group()], memories, context(number))
    dropped = {k: replace(u, weight=0.0) for k, u in uploads.items()}
    next_state = method.server_step(server.state, dropped, context(3))
    old, new = dict(server.state.numbers()), dict(next_state.numbers())
    assert set(old) == set(new)
    assert all(torch.equal(new[name], value) for name, value in old.items())


def test_local_steps_are_equal_for_all_clients() -> None:
    """Sizes do not matter; a client without examples takes no step and keeps SCAFFOLD's control."""
    settings = {**LOCAL, "local_steps": 3}
    assert [u.norm for u in client_uploads(fs.FedNova(**settings), context(), group())] == [3.0] * 5
    one_step = fs.FedAvg(**{**LOCAL, "local_steps": 1, "batch": 40})
    clients, net = group(1), context().load(LINEAR.state_dict())
    (uploaded,) = vectors(client_uploads(one_step, context(clients=1), clients))
    nn.functional.cross_entropy(net(clients.images(PARTS[0])), clients.labels(PARTS[0])).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([(p - 0.2 * p.grad).flatten() for p in net.parameters()])
    torch.testing.assert_close(uploaded, expected.detach(), atol=1e-6, rtol=1e-5)
    control = {name: torch.ones_like(value) for name, value in LINEAR.state_dict().items()}
    empty = ExactClientView((0,), DATA, [torch.arange(0)])
    scaffold = fs.Scaffold(**settings)
    message = scaffold.broadcast(scaffold.initial_state(LINEAR.state_dict()), context())
    ((empty_upload, memory),) = scaffold.client_step(message, empty, [control], context(clients=1))
    assert all(torch.equal(memory[name], control[name]) for name in control)
    assert empty_upload.weight == 0  # type: ignore[attr-defined]


def test_large_q_does_not_overflow() -> None:
    """Compares the formula in numbers of 80 bits: F^q is at least 10^602."""
    q, start = 1000.0, dict(LINEAR.state_dict())
    uploads = {
        k: FairModel({n: v + 0.01 * (k + 1) for n, v in start.items()}, 1, 4 + k / 100)
        for k in range(3)
    }
    method = fs.QFFL(lr=0.5, q=q)
    next_state = method.server_step(AveragingState(start), uploads, context(clients=3))
    F = np.array([u.loss for u in uploads.values()], dtype=np.longdouble) + TINY
    delta = [2.0 * -0.01 * (k + 1) * np.ones(650) for k in range(3)]
    h = sum(q * f ** (q - 1) * (d**2).sum() + 2.0 * f**q for f, d in zip(F, delta, strict=True))
    step = sum(f**q * d for f, d in zip(F, delta, strict=True)) / h
    for name, value in next_state.parameters.items():
        np.testing.assert_allclose(value - start[name], -float(step[0]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [fs.Scaffold, fs.FedDyn])
def test_private_clients_have_separate_penalties(kind: type[fs.TrainsLocally]) -> None:
    """A broken version would apply one client's penalty to all."""
    method = kind(**LOCAL)
    exact = PrivacySettings(noise_multiplier=1e-9, sample_rate=1.0, clip=1e3)
    ctx = context(clients=3, privacy=exact)
    ones = {name: torch.ones_like(value) for name, value in LINEAR.state_dict().items()}
    memories = [{name: 0.3 * (k - 1) * one for name, one in ones.items()} for k in range(3)]
    clients = private_clients(method, ctx, DATA, PARTS[:3])
    together = vectors(client_uploads(method, ctx, clients, memories))
    for k in range(3):
        single_client = private_clients(method, ctx, DATA, [PARTS[k]])
        (single,) = vectors(client_uploads(method, ctx, single_client, [memories[k]]))
        torch.testing.assert_close(together[k], single, atol=1e-4, rtol=1e-4)
    assert float((together[0] - together[2]).norm()) > 0.1


def test_divergence_of_personal_models_is_detected() -> None:
    run = {"run": {"method": "solo", "rounds": 1}, "model": {"name": "linear"}}
    with pytest.raises(DivergedError, match="client 0"):
        fs.simulate(fs.resolve({**run, "method": {"lr": 1e38, "local_epochs": 3}}))
