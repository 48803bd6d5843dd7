"""What all methods with local training share: groups of clients, rounds in which nobody counts,
private clients' own terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.charging import charge_for
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import RoundContext, round_context
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DivergedError
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.dense import Dense
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.fedavgm import FedAvgM
from fedsynth.methods.feddyn import FedDyn
from fedsynth.methods.fedgen import FedGen
from fedsynth.methods.fedgkd import FedGKD
from fedsynth.methods.fednova import FedNova
from fedsynth.methods.fedprox import FedProx, ProxState
from fedsynth.methods.qffl import QFFL, TINY, FairModel
from fedsynth.methods.scaffold import Scaffold
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.methods.solo import Solo
from fedsynth.models.convnet import ConvNet
from fedsynth.models.small import Linear
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
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


def context(number: int = 1, clients: int = 5, **others: Any) -> RoundContext:
    sizes = tuple(len(part) for part in PARTS[:clients])
    given = {
        "architecture": Linear((1, 4, 4), 3),
        "nominal_size": 8.0,
        "clients": clients,
        "participants": tuple(range(clients)),
        "sizes": sizes,
        **others,
    }
    return round_context(number, 0, CPU, SPEC, **given)


def start() -> AveragingState:
    draws = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in Linear((1, 4, 4), 3).state_dict().items()}
    return AveragingState(
        {name: 0.1 * torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    )


def group(clients: int = 5) -> OpenClients:
    return OpenClients(range(clients), data(), PARTS[:clients])


def vector(upload: Any) -> Tensor:
    return torch.cat([value.flatten() for value in upload.parameters.values()])


def test_dense_networks_are_trained_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a penalty that is no `Pull` any more, so that a method falls back, unseen, to one
    client after another."""
    passes: list[int] = []

    def spy(learners: Sequence[Learner], *rest: Any) -> None:
        passes.append(len(learners))
        train_together(learners, *rest)

    monkeypatch.setattr("fedsynth.methods.shared.client_training.train_together", spy)
    for kind in PLAIN:
        passes.clear()
        method: TrainsLocally = kind(**LOCAL, stragglers=0.4)
        method.client_step(
            method.broadcast(method.initial_state(start().parameters), context()),
            group(),
            [{}] * 5,
            context(),
        )
        assert passes == [5], method.name
    passes.clear()
    teacher = FedGKD(**LOCAL)
    teacher.client_step(
        teacher.broadcast(teacher.initial_state(start().parameters), context()),
        group(),
        [{}] * 5,
        context(),
    )
    assert passes == []


def test_only_where_it_pays_do_clients_share_memory() -> None:
    """Catches: groups of clients that are trained one after another all the same, with all their
    models in memory."""
    private = PrivacySettings(noise_multiplier=1.0)
    for name in METHODS:
        cls: Any = method_class(name)
        if issubclass(cls, TrainsLocally):
            assert (cls().client_bytes(context()) is not None) == (cls in PLAIN), name
            assert cls().client_bytes(context(privacy=private)) is None
    assert (
        FedAvg().client_bytes(context(architecture=ConvNet((1, 8, 8), 3, width=4, depth=1))) is None
    )
    assert FedAvg().client_bytes(context(client_architectures=(Linear((1, 4, 4), 3),) * 5)) is None
    assert FedAvg(batch=2**15 // 16).client_bytes(context()) is not None
    assert FedAvg(batch=2**15 // 16 + 1).client_bytes(context()) is None


@pytest.mark.parametrize(
    "kind", [FedAvg, FedAvgM, FedProx, FedNova, FedDyn, Scaffold, QFFL, FedGKD, FedGen]
)
def test_a_round_in_which_nobody_counts_changes_nothing(kind: type[TrainsLocally]) -> None:
    method = kind(**LOCAL)
    if kind is FedProx:
        method = FedProx(**LOCAL, adaptive=True)
    server = Server(method, start().parameters)
    memories: dict[int, Any] = {}
    for number in (1, 2):
        uploads = play(server, [group()], memories, context(number))
    dropped = {k: replace(u, weight=0.0) for k, u in uploads.items()}
    after = method.server_step(server.state, dropped, context(3))
    assert len(dropped) == 5
    old, new = (dict(state.numbers()) for state in (server.state, after))
    assert set(old) == set(new)
    assert all(torch.equal(new[name], value) for name, value in old.items())


def test_the_rounds_own_mu_reaches_the_clients() -> None:
    method, ctx = FedProx(**LOCAL, mu=0.1, adaptive=True), context()
    raised = ProxState(start().parameters, mu=2.0, loss=2.0, falls=2)
    ((upload, _), *_) = method.client_step(method.broadcast(raised, ctx), group(), [{}] * 5, ctx)
    fixed = FedProx(**LOCAL, mu=2.0)
    first = fixed.initial_state(start().parameters)
    ((expected, _), *_) = fixed.client_step(fixed.broadcast(first, ctx), group(), [{}] * 5, ctx)
    torch.testing.assert_close(vector(upload), vector(expected))


def test_local_steps_are_the_same_for_every_client() -> None:
    """Whatever their sizes; and a client without an example takes none, and keeps SCAFFOLD's
    control."""
    method, ctx, taken = FedNova(**{**LOCAL, "local_steps": 3}), context(), []
    for upload, _ in method.client_step(
        method.broadcast(method.initial_state(start().parameters), ctx), group(), [{}] * 5, ctx
    ):
        taken.append(upload.norm)  # type: ignore[attr-defined]
    assert taken == [3.0] * 5
    one = FedAvg(**{**LOCAL, "local_steps": 1, "batch": 40})
    ((upload, _),) = one.client_step(
        one.broadcast(one.initial_state(start().parameters), ctx),
        group(1),
        [{}],
        context(clients=1),
    )
    net = Linear((1, 4, 4), 3)
    net.load_state_dict(dict(start().parameters))
    clients = group(1)
    nn.functional.cross_entropy(net(clients.images(PARTS[0])), clients.labels(PARTS[0])).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat(
        [(p - 0.2 * p.grad).flatten() for p in net.parameters() if p.grad is not None]
    )
    torch.testing.assert_close(vector(upload), expected.detach(), atol=1e-6, rtol=1e-5)
    control = {name: torch.ones_like(value) for name, value in start().parameters.items()}
    empty = OpenClients((0,), data(), [torch.arange(0)])
    scaffold = Scaffold(**{**LOCAL, "local_steps": 3})
    ((nothing, memory),) = scaffold.client_step(
        scaffold.broadcast(scaffold.initial_state(start().parameters), ctx),
        empty,
        [control],
        context(clients=1),
    )
    assert all(torch.equal(memory[name], control[name]) for name in control)
    assert nothing.weight == 0  # type: ignore[attr-defined]


def test_a_large_q_does_not_overflow() -> None:
    """Against the update's own formula, in numbers of 80 bits: F^q is 10^602 and more."""
    state, q = start(), 1000.0
    sent = [
        FairModel({n: v + 0.01 * (k + 1) for n, v in state.parameters.items()}, 1.0, 4.0 + k / 100)
        for k in range(3)
    ]
    made = QFFL(lr=0.5, q=q).server_step(state, dict(enumerate(sent)), context(clients=3))
    F = np.array([u.loss for u in sent], dtype=np.longdouble) + TINY
    delta = [2.0 * -0.01 * (k + 1) * np.ones(51) for k in range(3)]
    h = sum(q * f ** (q - 1) * (d**2).sum() + 2.0 * f**q for f, d in zip(F, delta, strict=True))
    step = sum(f**q * d for f, d in zip(F, delta, strict=True)) / h
    for name, value in made.parameters.items():
        torch.testing.assert_close(
            value - state.parameters[name],
            torch.full_like(value, -float(step[0])),
            atol=1e-6,
            rtol=1e-4,
        )


def test_a_model_that_stays_with_its_client_is_checked_too() -> None:
    settings = {
        "run": {"method": "solo", "rounds": 1},
        "method": {"lr": 1e38, "local_epochs": 3},
        "model": {"name": "linear"},
    }
    with pytest.raises(DivergedError, match="client 0"):
        simulate(resolve(settings))


@pytest.mark.parametrize("kind", [Scaffold, FedDyn])
def test_each_private_client_has_its_own_terms(kind: type[TrainsLocally]) -> None:
    """Catches: one client's penalty for all. Almost without noise or clipping, with a memory of its
    own for each."""
    method = kind(**LOCAL)
    ctx = context(
        clients=3, privacy=PrivacySettings(noise_multiplier=1e-9, sample_rate=1.0, clip=1e3)
    )
    memories = [
        {name: 0.3 * (k - 1) * torch.ones_like(value) for name, value in start().parameters.items()}
        for k in range(3)
    ]

    def clients(ids: tuple[int, ...]) -> PrivateClients:
        parts = [PARTS[k] for k in ids]
        guards = [Guard(Ledger(str(k)), 1e-5, None) for k in ids]
        charged = charge_for(method, ctx, ids, guards, [SecretGenerator() for _ in ids])
        return PrivateClients(ids, data(), parts, charged)

    message = method.broadcast(method.initial_state(start().parameters), ctx)
    together = method.client_step(message, clients((0, 1, 2)), memories, ctx)
    for k in range(3):
        ((alone, _),) = method.client_step(message, clients((k,)), [memories[k]], ctx)
        torch.testing.assert_close(vector(together[k][0]), vector(alone), atol=1e-4, rtol=1e-4)
    assert float((vector(together[0][0]) - vector(together[2][0])).norm()) > 0.1


def test_each_client_is_charged_for_its_own_network() -> None:
    nets = (
        Linear((1, 4, 4), 3),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)),
    )
    privacy = PrivacySettings(noise_multiplier=1.0, sample_rate=1.0)
    ctx = context(clients=2, client_architectures=nets, privacy=privacy)
    ledgers = [Ledger("0"), Ledger("1")]
    method = Dense(**{**LOCAL, "local_epochs": 1})
    guards = [Guard(ledger, 1e-5, None) for ledger in ledgers]
    charged = charge_for(method, ctx, (0, 1), guards, [SecretGenerator()] * 2)
    clients = PrivateClients((0, 1), data(), PARTS[:2], charged)
    method.client_step(
        method.broadcast(method.initial_state(start().parameters), ctx), clients, [{}, {}], ctx
    )
    assert [[row.dimension for row in ledger.releases] for ledger in ledgers] == [
        [51],
        [16 * 5 + 5 + 5 * 3 + 3],
    ]
