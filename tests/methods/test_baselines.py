"""The baselines: two rounds of each on softmax regression against NumPy, their degenerate cases,
and what each refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from fedsynth.core.client import OpenClients
from fedsynth.core.context import RoundContext, round_context
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import SettingError
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.participation import Participation
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.fedavgm import FedAvgM
from fedsynth.methods.fedbn import FedBN, local_names
from fedsynth.methods.feddyn import FedDyn
from fedsynth.methods.fedgkd import FedGKD
from fedsynth.methods.fednova import FedNova, reach
from fedsynth.methods.fedprox import FedProx, LossModel, ProxState
from fedsynth.methods.moon import Moon, contrastive
from fedsynth.methods.qffl import QFFL
from fedsynth.methods.scaffold import Scaffold
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.seeding import torch_generator
from tests.rounds import play

Array = npt.NDArray[np.float64]
SPEC = DatasetSpec("tiny", 1, 2, 2, 3, 9, 3, (0.0,), (1.0,), ("a", "b", "c"), "made up")
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 1, 2, 2)).astype(np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 1, 2, 2, 0])
PARTS = [torch.arange(2), torch.arange(2, 5), torch.arange(5, 9)]
SIZES = (2, 3, 4)
# a last column for the bias
X = np.concatenate([PIXELS.reshape(9, 4) / 255, np.ones((9, 1))], axis=1)
# an epoch is one step on all examples
FULL: dict[str, Any] = {
    "batch": 10,
    "lr": 0.5,
    "momentum": 0.0,
    "local_epochs": 3,
}


class Linear(nn.Module):
    dense = True

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.fc.weight.data = torch.linspace(-1, 1, 12).view(3, 4)
        self.fc.bias.data = torch.tensor([0.1, 0.0, -0.2])

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(x.flatten(1))
        return z


def as_array(parameters: Mapping[str, Tensor]) -> Array:
    """[3, 5]: weights and bias."""
    joined = torch.cat([parameters["fc.weight"], parameters["fc.bias"][:, None]], dim=1)
    return joined.detach().cpu().double().numpy()


START = as_array(dict(Linear().named_parameters()))


def data(device: torch.device) -> ImageData:
    return from_arrays(PIXELS, LABELS, SPEC).to(device)


def context(number: int, device: torch.device, active: tuple[int, ...] = (0, 1, 2)) -> RoundContext:
    return round_context(
        number, 0, device, SPEC, Linear(), 3.0, clients=3, participants=active, sizes=SIZES
    )


def rounds(
    method: TrainsLocally,
    device: torch.device,
    active: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0, 1, 2)),
) -> list[Array]:
    """The global model after each round; the same whether clients are trained one after another or
    in one pass."""
    with patch("fedsynth.training.many_clients.FEW", 1):
        found, alone = (each_round(method, device, active, grouped) for grouped in (True, False))
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    return found


def each_round(
    method: TrainsLocally, device: torch.device, active: tuple[tuple[int, ...], ...], grouped: bool
) -> list[Array]:
    """The global model after each round, with all clients in a group, or each alone."""
    server = Server(method, {n: value.to(device) for n, value in Linear().state_dict().items()})
    memories: dict[int, Any] = {}
    found = []
    for number, ids in enumerate(active, 1):
        groups = [
            OpenClients(some, data(device), [PARTS[k] for k in some])
            for some in ([ids] if grouped else [(k,) for k in ids])
        ]
        play(server, groups, memories, context(number, device, ids))
        found.append(as_array(server.state.parameters))
    return found


def probabilities(W: Array, k: int) -> Array:
    z = X[PARTS[k].numpy()] @ W.T
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def loss(W: Array, k: int) -> float:
    return float(-np.log(probabilities(W, k)[np.arange(SIZES[k]), LABELS[PARTS[k].numpy()]]).mean())


def gradient(W: Array, k: int) -> Array:
    mine = PARTS[k].numpy()
    return np.asarray((probabilities(W, k) - np.eye(3)[LABELS[mine]]).T @ X[mine] / SIZES[k])


def local(
    W: Array,
    k: int,
    steps: int = 3,
    lr: float = 0.5,
    extra: Callable[[Array], Array] = lambda W: W * 0,
) -> Array:
    for _ in range(steps):
        W = W - lr * (gradient(W, k) + extra(W))
    return W


def close(actual: list[Array], expected: list[Array]) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5)
    assert np.abs(expected[-1] - START).max() > 0.05  # something happened


def fedavg(weights: tuple[float, ...]) -> list[Array]:
    W, out = START, []
    for _ in range(2):
        W = sum(n * local(W, k) for k, n in enumerate(weights)) / sum(weights)  # type: ignore[assignment]
        out.append(W)
    return out


def test_fedavg_and_every_degenerate_case(device: torch.device) -> None:
    """Which are weighted by n_k, and which uniformly, is part of each method."""
    by_size, even = fedavg(SIZES), fedavg((1, 1, 1))
    close(rounds(FedAvg(**FULL), device), by_size)
    close(rounds(FedAvgM(**FULL, server_momentum=0.0), device), by_size)
    close(rounds(FedGKD(**FULL, gamma=0.0), device), by_size)
    close(rounds(FedNova(**FULL), device), by_size)  # equally many steps
    close(rounds(FedProx(**FULL, mu=0.0), device), by_size)
    close(rounds(FedProx(**FULL, mu=0.0, by_size=False), device), even)
    close(rounds(FedDyn(**FULL, alpha=0.0), device), even)
    close(rounds(QFFL(**FULL, q=0.0), device), even)
    close(rounds(Scaffold(**FULL), device, ((0, 1, 2),)), even[:1])


def test_fedavgm(device: torch.device) -> None:
    W, v, expected = START, START * 0, []
    for _ in range(2):
        v = 0.9 * v + (W - sum(n * local(W, k) for k, n in enumerate(SIZES)) / 9)
        W = W - 0.8 * v
        expected.append(W)
    close(rounds(FedAvgM(**FULL, server_lr=0.8), device), expected)


def test_fedprox(device: torch.device) -> None:
    W, expected = START, []
    for _ in range(2):
        W = sum(local(W, k, extra=lambda V, W=W: 0.7 * (V - W)) for k in range(3)) / 3  # type: ignore[assignment,misc]
        expected.append(W)
    close(rounds(FedProx(**FULL, mu=0.7, by_size=False), device), expected)


def test_fedprox_keeps_partial_work_and_fedavg_drops_it(device: torch.device) -> None:
    method = FedProx(**FULL, mu=0.7, stragglers=0.67, by_size=False)
    late = method.late(context(1, device))
    assert len(late) == 2
    assert all(1 <= passes <= 3 for passes in late.values())
    done = [local(START, k, late.get(k, 3), extra=lambda V: 0.7 * (V - START)) for k in range(3)]
    close(rounds(method, device, ((0, 1, 2),)), [sum(done) / 3])  # type: ignore[list-item]
    (on_time,) = set(range(3)) - set(late)
    dropping = FedAvg(**FULL, stragglers=0.67, drop_stragglers=True)
    close(rounds(dropping, device, ((0, 1, 2),)), [local(START, on_time)])
    with pytest.raises(SettingError, match="stragglers"):
        FedAvg(stragglers=0.5, local_steps=3)
    nobody = FedAvg(**FULL, stragglers=1.0, drop_stragglers=True)
    np.testing.assert_allclose(rounds(nobody, device, ((0, 1, 2),))[0], START, atol=1e-6)


def test_fedproxs_mu_adapts_to_the_loss() -> None:
    """Raised when the loss rises, lowered after five falls in a row."""
    method = FedProx(mu=0.5, adaptive=True)
    state = ProxState(dict(Linear().state_dict()))
    ctx, seen = context(1, torch.device("cpu")), []
    for value in (1.0, 2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4):
        state = method.combine(state, {0: LossModel(state.parameters, 1.0, value)}, ctx)
        assert state.mu is not None
        seen.append(round(state.mu, 6))
    assert seen == [0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.5, 0.5]
    message: Any = method.broadcast(state, ctx)
    assert message.mu == pytest.approx(0.5)


def test_adaptive_fedprox_uploads_the_loss_of_the_global_model(device: torch.device) -> None:
    method, ctx = FedProx(**FULL, adaptive=True), context(1, device)
    message = method.broadcast(
        ProxState({n: v.to(device) for n, v in Linear().state_dict().items()}), ctx
    )
    results = method.client_step(
        message, OpenClients((0, 1, 2), data(device), PARTS), [{}, {}, {}], ctx
    )
    uploads: list[Any] = [upload for upload, _ in results]
    assert [u.loss for u in uploads] == pytest.approx([loss(START, k) for k in range(3)], rel=1e-5)
    with pytest.raises(SettingError, match="adaptive"):
        simulate(
            resolve(
                {
                    "run": {"method": "fedprox", "rounds": 1},
                    "method": {"adaptive": True},
                    "privacy": {"epsilon": 8.0},
                }
            )
        )


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova_with_unequal_steps(momentum: float, device: torch.device) -> None:
    """Batches of two: 1, 2 and 2 steps a pass; each client's own batches are read from the seed."""
    settings = {**FULL, "batch": 2, "momentum": momentum}
    W, expected = START, []
    for number in (1, 2):
        made, norms = [], []
        for k in range(3):
            V, v, steps = W, W * 0, 0
            generator = torch_generator(0, "local training", number, k)
            for _ in range(3):
                for part in torch.randperm(SIZES[k], generator=generator).split(2):
                    mine = PARTS[k][part].numpy()
                    z = X[mine] @ V.T
                    e = np.exp(z - z.max(1, keepdims=True))
                    v = momentum * v + (
                        e / e.sum(1, keepdims=True) - np.eye(3)[LABELS[mine]]
                    ).T @ X[mine] / len(mine)
                    V, steps = V - 0.5 * v, steps + 1
            made.append(V)
            # ‖a‖₁: the weight of each step's gradient in the sum of all later velocities
            norms.append(sum(sum(momentum**j for j in range(steps - i)) for i in range(steps)))
        p = np.array(SIZES) / 9
        W = W - (p @ norms) * sum(p[k] * (W - made[k]) / norms[k] for k in range(3))
        expected.append(W)
    close(rounds(FedNova(**settings), device), expected)
    assert reach(4, 0.0) == 4


def test_scaffold_with_an_absent_client(device: torch.device) -> None:
    active = ((0, 1, 2), (0, 2), (0, 1, 2))
    x, c, own, expected = START, START * 0, [START * 0] * 3, []
    for ids in active:
        ys, change = [], START * 0
        for k in ids:
            y = local(x, k, extra=lambda V, d=c - own[k]: d)  # type: ignore[misc]
            after = own[k] - c + (x - y) / (3 * 0.5)
            change = change + after - own[k]
            own = [after if j == k else old for j, old in enumerate(own)]
            ys.append(y)
        x, c = x + 0.9 * (sum(ys) / len(ys) - x), c + change / 3
        expected.append(x)
    close(rounds(Scaffold(**FULL, server_lr=0.9), device, active), expected)
    with pytest.raises(SettingError, match="momentum"):
        Scaffold(momentum=0.9)


def test_feddyn_with_an_absent_client(device: torch.device) -> None:
    active, alpha = ((0, 1, 2), (1, 2)), 0.3
    W, h, g, expected = START, START * 0, [START * 0] * 3, []
    for ids in active:
        made = {k: local(W, k, extra=lambda V, d=g[k], W=W: alpha * (V - W) - d) for k in ids}  # type: ignore[misc]
        g = [g[k] - alpha * (made[k] - W) if k in made else g[k] for k in range(3)]
        h = h - alpha / 3 * sum(made[k] - W for k in ids)
        W = sum(made.values()) / len(ids) - h / alpha
        expected.append(W)
    close(rounds(FedDyn(**FULL, alpha=alpha), device, active), expected)


def test_fedgkd(device: torch.device) -> None:
    """The teacher is the average of the last two global models; KL(teacher ‖ student)'s gradient is
    (p − t)ᵀX/n."""
    W, past, expected = START, [START], []
    for _ in range(3):
        teacher = sum(past[-2:]) / len(past[-2:])

        def distil(V: Array, k: int, teacher: Any = teacher) -> Array:
            return np.asarray(
                0.8
                / 2
                * (probabilities(V, k) - probabilities(teacher, k)).T
                @ X[PARTS[k].numpy()]
                / SIZES[k]
            )

        W = sum(n * local(W, k, extra=lambda V, k=k: distil(V, k)) for k, n in enumerate(SIZES)) / 9  # type: ignore[misc,assignment]
        past.append(W)
        expected.append(W)
    close(rounds(FedGKD(**FULL, gamma=0.8, buffer=2), device, ((0, 1, 2),) * 3), expected)


def test_qffl(device: torch.device) -> None:
    W, q, L, expected = START, 0.5, 2.0, []
    for _ in range(2):
        F = [loss(W, k) + 1e-10 for k in range(3)]
        delta = [L * (W - local(W, k)) for k in range(3)]
        h = [q * f ** (q - 1) * (d**2).sum() + L * f**q for f, d in zip(F, delta, strict=True)]
        W = W - sum(f**q * d for f, d in zip(F, delta, strict=True)) / sum(h)
        expected.append(W)
    close(rounds(QFFL(**FULL, q=q), device), expected)


def test_moons_contrastive_loss_equals_numpy(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    z, whole, last = rng.normal(size=(3, 4, 6))

    def sim(a: Array, b: Array) -> Array:
        return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))

    near, far = np.exp(sim(z, whole) / 0.5), np.exp(sim(z, last) / 0.5)
    tensors = [torch.tensor(a, device=device) for a in (z, whole, last)]
    np.testing.assert_allclose(
        contrastive(*tensors, 0.5).cpu().numpy(), -np.log(near / (near + far))
    )  # type: ignore[arg-type]


def test_two_rounds_of_moon_equal_plain_torch() -> None:
    """z_prev is the client's own last model; μ = 0 is FedAvg. On the CPU: a GPU's convolutions
    round to TF32."""
    device = torch.device("cpu")
    spec = dataset_spec("digits")
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8)).astype(np.uint8)
    clients = OpenClients(
        [0], from_arrays(images, np.arange(6), spec).to(device), [torch.arange(6)]
    )
    start = build_model(ModelSettings(width=4, depth=2), spec.image_shape, 10, 0)
    settings: dict[str, Any] = {**FULL, "lr": 0.1}

    def uploads(method: TrainsLocally) -> Tensor:
        parameters: Any = {name: value.to(device) for name, value in start.state_dict().items()}
        memory: Any = {}
        for number in (1, 2):
            ctx = round_context(number, 0, device, spec, start, 6.0, clients=1)
            ((upload, memory),) = method.client_step(
                method.broadcast(method.initial_state(parameters), ctx), clients, [memory], ctx
            )
            parameters = {name: 0.5 * value for name, value in upload.parameters.items()}  # type: ignore[attr-defined]  # another model
        return torch.cat(
            [upload.parameters[name].cpu().flatten() for name, _ in start.named_parameters()]
        )  # type: ignore[attr-defined]

    x, y = clients.images(torch.arange(6).to(device)).cpu(), torch.arange(6)
    net, last = build_model(ModelSettings(width=4, depth=2), spec.image_shape, 10, 0), start
    for number in (1, 2):
        whole = build_model(ModelSettings(width=4, depth=2), spec.image_shape, 10, 0)
        whole.load_state_dict(net.state_dict())
        last = whole if number == 1 else last
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            z, a, b = net.embed(x), whole.embed(x).detach(), last.embed(x).detach()  # type: ignore[operator]
            near, far = (torch.exp(nn.functional.cosine_similarity(z, o) / 0.5) for o in (a, b))
            total = (
                nn.functional.cross_entropy(net(x), y)
                + 2.0 * -torch.log(near / (near + far)).mean()
            )
            sgd.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            sgd.step()
        last = build_model(ModelSettings(width=4, depth=2), spec.image_shape, 10, 0)
        last.load_state_dict(net.state_dict())
        if number == 1:
            net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})
    torch.testing.assert_close(
        uploads(Moon(**settings, mu=2.0)), flatten(net), atol=2e-4, rtol=1e-3
    )
    torch.testing.assert_close(uploads(Moon(**settings, mu=0.0)), uploads(FedAvg(**settings)))


def test_fedbn_keeps_batch_norms_and_averages_the_rest(device: torch.device) -> None:
    spec = dataset_spec("digits")
    start = build_model(ModelSettings(width=4, depth=2, norm="batch"), spec.image_shape, 10, 0)
    images = np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8)).astype(np.uint8)
    clients = OpenClients(
        [0, 1],
        from_arrays(images, np.arange(8), spec).to(device),
        [torch.arange(3), torch.arange(3, 8)],
    )
    method = FedBN(**{**FULL, "lr": 0.1})
    ctx = round_context(1, 0, device, spec, start, 4.0, clients=2)
    state = AveragingState({name: value.to(device) for name, value in start.state_dict().items()})
    (a, mine), (b, _) = method.client_step(method.broadcast(state, ctx), clients, [{}, {}], ctx)
    kept = local_names(start)
    assert len(kept) == 2 * 5  # two layers: weight, bias, mean, variance, counter
    assert not kept & set(a.parameters)  # type: ignore[attr-defined]
    assert set(mine) == kept
    made = method.server_step(state, {0: a, 1: b}, ctx)
    for name, value in made.parameters.items():
        if name in kept:
            assert torch.equal(value, state.parameters[name])
        else:
            torch.testing.assert_close(value, (a.parameters[name] + b.parameters[name]) / 2)  # type: ignore[attr-defined]
    personal = method.personal_parameters(made.parameters, mine)
    assert torch.equal(personal["features.1.running_mean"], mine["features.1.running_mean"])
    again = method.start_model(0, method.broadcast(made, ctx), mine, ctx)
    torch.testing.assert_close(
        again.get_buffer("features.1.running_mean"), mine["features.1.running_mean"]
    )
    with pytest.raises(SettingError, match=r"model\.norm must be batch"):
        method.check_model(Linear())


def test_solo_sends_nothing_and_each_client_is_tested_with_its_own_model() -> None:
    sections = {
        "run": {"method": "solo", "rounds": 2},
        "partition": {"kind": "classes", "local_test": 0.2},
        "model": {"width": 8, "depth": 2},
    }
    result = simulate(
        resolve({**sections, "method": {"local_epochs": 10, "batch": 32, "lr": 0.05}})
    )
    assert result.metrics[-1]["upload_floats"] == 0
    assert result.metrics[-1]["local"]["amp"] > 0.9  # two digits a client are easy
    assert result.accuracy < 0.4  # nobody trained the common model


@pytest.mark.parametrize("method", ["qffl", "fedbn", "solo"])
def test_refusals_say_what_cannot_be_protected(method: str) -> None:
    with pytest.raises(
        UnaccountedReleaseError, match=f"{method} cannot run with differential privacy: .{{30,}}"
    ):
        simulate(
            resolve(
                {
                    "run": {"method": method, "rounds": 1},
                    "model": {"norm": "batch"},
                    "privacy": {"epsilon": 8.0},
                }
            )
        )


def test_sampling_by_size_and_its_refusal() -> None:
    """FedProx's scheme: a client of nine tenths of the data is nearly always there."""
    drawn = [Participation(0, 3, 0.34, (90, 5, 5)).in_round(n) for n in range(1, 201)]
    assert all(len(ids) == 1 for ids in drawn)
    assert 160 < sum(ids == (0,) for ids in drawn) < 195
    sections = {"run": {"method": "fedprox", "rounds": 1, "sampling": "size", "participation": 0.5}}
    assert len(simulate(resolve(sections)).uploads) == 2
    with pytest.raises(SettingError, match="sampling by size"):
        resolve({**sections, "privacy": {"epsilon": 8.0}})
    with pytest.raises(SettingError, match="participation below 1"):
        resolve({"run": {"method": "fedprox", "sampling": "size"}})


def test_a_dropped_straggler_is_as_if_it_had_not_taken_part() -> None:
    """Neither its model, its control nor what it remembers counts, also in the cache of last
    models."""
    cpu, late = (
        torch.device("cpu"),
        FedAvg(**FULL, stragglers=0.34).late(context(1, torch.device("cpu"))),
    )
    (dropped,) = late
    others = tuple(k for k in range(3) if k != dropped)
    (next_dropped,) = FedAvg(**FULL, stragglers=0.34).late(context(2, cpu))
    then = tuple(k for k in range(3) if k != next_dropped)
    for kind in (Scaffold, FedDyn, FedAvg, FedAvgM, FedNova, QFFL, partial(FedProx, by_size=False)):
        some, whole = kind(**FULL, stragglers=0.34, drop_stragglers=True), kind(**FULL)
        found, expected = rounds(some, cpu), rounds(whole, cpu, (others, then))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=some.name)
    method, ctx = FedDyn(**FULL, stragglers=0.34, drop_stragglers=True), context(1, cpu)
    start, clients = dict(Linear().state_dict()), OpenClients((0, 1, 2), data(cpu), PARTS)
    memories: dict[int, Any] = {}
    play(Server(method, start), [clients], memories, ctx)
    assert [bool(memories[k]) for k in range(3)] == [k != dropped for k in range(3)]
    oca = Server(FedAvg(**FULL, stragglers=1.0, drop_stragglers=True, final="oca"), start)
    play(oca, [clients], {}, ctx)
    np.testing.assert_allclose(as_array(oca.final_parameters()), START, atol=1e-6)


def test_stragglers_are_charged_for_the_steps_that_they_take() -> None:
    sections = {
        "run": {"method": "fedprox", "rounds": 1},
        "model": {"width": 4, "depth": 2},
        "privacy": {"noise_multiplier": 2.0},
    }
    method = {"local_epochs": 4, "batch": 64, "stragglers": 0.4}
    result = simulate(resolve({**sections, "method": method}))
    assert result.privacy is not None
    rows: Any = result.privacy["ledger"]
    steps = {client: row["steps"] for row in rows for client in row["clients"]}
    assert len(set(steps.values())) > 1
    late = replace(FedProx(), **method).late(context(1, torch.device("cpu"), (0, 1, 2, 3, 4)))
    assert {int(c.split("-")[1]) for c, n in steps.items() if n < max(steps.values())} <= set(late)
