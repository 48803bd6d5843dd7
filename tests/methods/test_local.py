"""All methods with local training: groups of clients, rounds without counted clients, private
clients' penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.method import charge_for
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DivergedError
from fedsynth.federation.server import Server
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.dense import Dense
from fedsynth.methods.fedavg import FedAvg, FedAvgM, FedProx, Solo
from fedsynth.methods.feddyn import FedDyn
from fedsynth.methods.fedgen import FedGen
from fedsynth.methods.fedgkd import FedGKD
from fedsynth.methods.fednova import FedNova
from fedsynth.methods.qffl import QFFL, TINY, FairModel
from fedsynth.methods.scaffold import Scaffold
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.convnet import ConvNet
from fedsynth.models.small import Linear
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.simulation.simulate import simulate
from fedsynth.training.many_clients import Learner, train_together
from tests.rounds import play

SPEC, CPU = (
    DatasetSpec("tiny", 1, 4, 4, 3, 40, 3, (0.5,), (0.3,), ("a", "b", "c"), "made up"),
    torch.device("cpu"),
)
PARTS = torch.arange(40).split([8, 1, 15, 5, 11])
LOCAL: dict[str, Any] = {"batch": 4, "lr": 0.2, "momentum": 0.0, "local_epochs": 2}
PLAIN = (FedAvg, FedAvgM, FedProx, FedNova, FedDyn, Scaffold, QFFL, Solo)


def data() -> ImageData:
    rng = np.random.default_rng(0)
    return from_arrays(
        rng.integers(0, 256, (40, 1, 4, 4)).astype(np.uint8), rng.integers(0, 3, 40), SPEC
    )


def context(number: int = 1, clients: int = 5, **changes: Any) -> RoundContext:
    sizes = tuple(len(part) for part in PARTS[:clients])
    linear = Linear((1, 4, 4), 3)
    default = RoundContext(number, 0, CPU, SPEC, linear, 8.0, clients=clients, sizes=sizes)
    return replace(default, **changes)


def start() -> AveragingState:
    draws = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in Linear((1, 4, 4), 3).state_dict().items()}
    return AveragingState({n: 0.1 * torch.randn(s, generator=draws) for n, s in shapes.items()})


def group(clients: int = 5) -> ExactClientView:
    return ExactClientView(range(clients), data(), PARTS[:clients])


def uploads(
    method: TrainsLocally, clients: Any, ctx: RoundContext, memories: Any = None, state: Any = None
) -> list[Any]:
    """Returns the uploads of a first round, unless a state is given."""
    message = method.broadcast(state or method.initial_state(start().parameters), ctx)
    memories = memories or [{} for _ in clients.ids]
    return [upload for upload, _ in method.client_step(message, clients, memories, ctx)]


def vectors(sent: list[Any]) -> list[Tensor]:
    return [torch.cat([value.flatten() for value in u.parameters.values()]) for u in sent]


def private(
    method: Any, ctx: RoundContext, ids: Sequence[int], ledgers: Sequence[Ledger] | None = None
) -> PrivateClientView:
    guards = [
        BudgetEnforcer(ledger, 1e-5, None) for ledger in ledgers or [Ledger(str(k)) for k in ids]
    ]
    charged = charge_for(method, ctx, ids, guards, [SecretGenerator() for _ in ids])
    return PrivateClientView(ids, data(), [PARTS[k] for k in ids], charged)


def test_dense_networks_are_trained_in_one_pass_and_only_then_clients_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a penalty that is no `Pull` any more, so that a method falls back, unseen, to one
    client after another; and groups of such clients with all their models in memory."""
    passes: list[int] = []

    def spy(learners: Sequence[Learner], *rest: Any) -> None:
        passes.append(len(learners))
        train_together(learners, *rest)

    monkeypatch.setattr("fedsynth.methods.shared.client_training.train_together", spy)
    for kind in (*PLAIN, FedGKD):
        passes.clear()
        uploads(kind(**LOCAL, stragglers=0.4), group(), context())
        assert passes == ([] if kind is FedGKD else [5]), kind
    private = PrivacySettings(noise_multiplier=1.0)
    for name in METHODS:
        cls: Any = method_class(name)
        if issubclass(cls, TrainsLocally):
            assert (cls().client_bytes(context()) is not None) == (cls in PLAIN), name
            assert cls().client_bytes(context(privacy=private)) is None
    convnet = ConvNet((1, 8, 8), 3, width=4, depth=1)
    assert FedAvg().client_bytes(context(architecture=convnet)) is None
    assert FedAvg().client_bytes(context(client_architectures=(Linear((1, 4, 4), 3),) * 5)) is None
    assert FedAvg(batch=2**15 // 16).client_bytes(context()) is not None
    assert FedAvg(batch=2**15 // 16 + 1).client_bytes(context()) is None


@pytest.mark.parametrize(
    "kind", [FedAvg, FedAvgM, FedNova, FedDyn, Scaffold, QFFL, FedGKD, FedGen, FedProx]
)
def test_a_round_without_counted_clients_changes_nothing(kind: Any) -> None:
    method = kind(**LOCAL)
    server, memories = Server(method, start().parameters), dict[int, Any]()
    for number in (1, 2):
        sent = play(server, [group()], memories, context(number))
    dropped = {k: replace(u, weight=0.0) for k, u in sent.items()}
    next_state = method.server_step(server.state, dropped, context(3))
    old, new = dict(server.state.numbers()), dict(next_state.numbers())
    assert set(old) == set(new)
    assert all(torch.equal(new[name], value) for name, value in old.items())


def test_local_steps_are_the_same_for_every_client() -> None:
    """Whatever their sizes; and a client without an example takes none, and keeps SCAFFOLD's
    control."""
    three = {**LOCAL, "local_steps": 3}
    assert [u.norm for u in uploads(FedNova(**three), group(), context())] == [3.0] * 5
    one_step = FedAvg(**{**LOCAL, "local_steps": 1, "batch": 40})
    (uploaded,) = vectors(uploads(one_step, group(1), context(clients=1)))
    net = Linear((1, 4, 4), 3)
    net.load_state_dict(dict(start().parameters))
    clients = group(1)
    nn.functional.cross_entropy(net(clients.images(PARTS[0])), clients.labels(PARTS[0])).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([(p - 0.2 * p.grad).flatten() for p in net.parameters()])
    torch.testing.assert_close(uploaded, expected.detach(), atol=1e-6, rtol=1e-5)
    control = {name: torch.ones_like(value) for name, value in start().parameters.items()}
    empty = ExactClientView((0,), data(), [torch.arange(0)])
    scaffold = Scaffold(**three)
    message = scaffold.broadcast(scaffold.initial_state(start().parameters), context())
    ((nothing, memory),) = scaffold.client_step(message, empty, [control], context(clients=1))
    assert all(torch.equal(memory[name], control[name]) for name in control)
    assert nothing.weight == 0  # type: ignore[attr-defined]


def test_a_large_q_does_not_overflow() -> None:
    """Against the update's own formula, in numbers of 80 bits: F^q is 10^602 and more."""
    state, q = start(), 1000.0
    sent = {
        k: FairModel({n: v + 0.01 * (k + 1) for n, v in state.parameters.items()}, 1, 4 + k / 100)
        for k in range(3)
    }
    next_state = QFFL(lr=0.5, q=q).server_step(state, sent, context(clients=3))
    F = np.array([u.loss for u in sent.values()], dtype=np.longdouble) + TINY
    delta = [2.0 * -0.01 * (k + 1) * np.ones(51) for k in range(3)]
    h = sum(q * f ** (q - 1) * (d**2).sum() + 2.0 * f**q for f, d in zip(F, delta, strict=True))
    step = sum(f**q * d for f, d in zip(F, delta, strict=True)) / h
    for name, value in next_state.parameters.items():
        moved = value - state.parameters[name]
        expected = torch.full_like(value, -float(step[0]))
        torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [Scaffold, FedDyn])
def test_each_private_client_has_its_own_terms(kind: type[TrainsLocally]) -> None:
    """Catches: one client's penalty for all."""
    method = kind(**LOCAL)
    exact = PrivacySettings(noise_multiplier=1e-9, sample_rate=1.0, clip=1e3)
    ctx = context(clients=3, privacy=exact)
    memories = [
        {name: 0.3 * (k - 1) * torch.ones_like(value) for name, value in start().parameters.items()}
        for k in range(3)
    ]
    together = vectors(uploads(method, private(method, ctx, range(3)), ctx, memories))
    for k in range(3):
        (single,) = vectors(uploads(method, private(method, ctx, [k]), ctx, [memories[k]]))
        torch.testing.assert_close(together[k], single, atol=1e-4, rtol=1e-4)
    assert float((together[0] - together[2]).norm()) > 0.1


def test_each_client_is_charged_for_its_own_network_and_shows_no_size() -> None:
    """n_k is private: uniform weights, and ceil(epochs / q) steps for clients of 8 and of 1."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    privacy = PrivacySettings(noise_multiplier=1.0, sample_rate=0.4)
    nets = (Linear((1, 4, 4), 3), hidden)
    ctx = context(clients=2, client_architectures=nets, privacy=privacy)
    ledgers = [Ledger("0"), Ledger("1")]
    method = Dense(**{**LOCAL, "local_epochs": 1})
    sent = uploads(method, private(method, ctx, (0, 1), ledgers), ctx)
    assert [upload.weight for upload in sent] == [1.0, 1.0]
    rows = [row for ledger in ledgers for row in ledger.releases]
    assert [(row.dimension, row.steps) for row in rows] == [(51, 3), (16 * 5 + 5 + 5 * 3 + 3, 3)]


def test_a_model_that_stays_with_its_client_is_checked_too() -> None:
    settings = {
        "run": {"method": "solo", "rounds": 1},
        "method": {"lr": 1e38, "local_epochs": 3},
        "model": {"name": "linear"},
    }
    with pytest.raises(DivergedError, match="client 0"):
        simulate(resolve(settings))
