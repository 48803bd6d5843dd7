"""The baselines: rounds of each on tiny networks against NumPy, their degenerate cases, and what
each refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.config.participation import Participation
from fedsynth.config.resolve import resolve
from fedsynth.errors import SettingError
from fedsynth.methods.fedavg import FedAvg, FedAvgM, FedProx, Solo
from fedsynth.methods.fedbn import FedBN
from fedsynth.methods.feddyn import FedDyn
from fedsynth.methods.fedgkd import FedGKD
from fedsynth.methods.fednova import FedNova, update_norm
from fedsynth.methods.moon import Moon
from fedsynth.methods.qffl import QFFL
from fedsynth.methods.scaffold import Scaffold
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.seeding import torch_generator
from fedsynth.simulation.simulate import simulate
from tests.methods import tiny
from tests.methods.tiny import FULL, LABELS, PARTS, SIZES, Array, context

CPU = torch.device("cpu")
X = np.concatenate([tiny.X, np.ones((9, 1))], axis=1)  # a last column for the bias
ALL = (0, 1, 2)


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


def joined(parameters: dict[str, Array]) -> Array:
    """[3, 5]: weights and bias."""
    return np.concatenate([parameters["fc.weight"], parameters["fc.bias"][:, None]], axis=1)


START = joined(tiny.as_arrays(Linear().state_dict()))


def rounds(
    method: TrainsLocally, device: torch.device, active: Sequence[tuple[int, ...]] = (ALL, ALL)
) -> list[Array]:
    """The global model after each round; the same whether clients are trained one after another or
    in one pass."""
    with patch("fedsynth.training.many_clients.FEW", 1):
        runs = [tiny.rounds(method, Linear, device, active, grouped) for grouped in (True, False)]
    grouped, separate = ([joined(model) for model in models] for models, *_ in runs)
    np.testing.assert_allclose(grouped, separate, atol=2e-6)
    return grouped


def probabilities(W: Array, k: int) -> Array:
    z = X[PARTS[k].numpy()] @ W.T
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def loss(W: Array, k: int) -> float:
    return float(-np.log(probabilities(W, k)[np.arange(SIZES[k]), LABELS[PARTS[k].numpy()]]).mean())


def gradient(W: Array, k: int) -> Array:
    examples = PARTS[k].numpy()
    errors = probabilities(W, k) - np.eye(3)[LABELS[examples]]
    return np.asarray(errors.T @ X[examples] / SIZES[k])


def local(
    W: Array, k: int, steps: int = 3, extra: Callable[[Array], Array] = lambda W: W * 0
) -> Array:
    for _ in range(steps):
        W = W - 0.5 * (gradient(W, k) + extra(W))
    return W


def close(actual: list[Array], expected: list[Array]) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert np.abs(expected[-1] - START).max() > 0.05  # something happened


def fedavg(weights: Sequence[float], decay: float = 0.0) -> list[Array]:
    W, out = START, []
    for _ in range(2):
        local_models = [local(W, k, extra=lambda V: decay * V) for k in range(3)]
        W = np.average(local_models, axis=0, weights=weights)
        out.append(W)
    return out


def test_fedavg_and_every_degenerate_case(device: torch.device) -> None:
    """A method also decides whether clients are weighted by n_k or uniformly."""
    by_size, even = fedavg(SIZES), fedavg((1, 1, 1))
    close(rounds(FedAvg(**FULL), device), by_size)
    close(rounds(FedAvg(**FULL, weight_decay=0.1), device), fedavg(SIZES, 0.1))
    close(rounds(FedAvgM(**FULL, server_momentum=0.0), device), by_size)
    close(rounds(FedGKD(**FULL, gamma=0.0), device), by_size)
    close(rounds(FedNova(**FULL), device), by_size)  # equally many steps
    close(rounds(FedProx(**FULL, mu=0.0), device), by_size)
    close(rounds(FedDyn(**FULL, alpha=0.0), device), even)
    close(rounds(QFFL(**FULL, q=0.0), device), even)
    close(rounds(Scaffold(**FULL), device, (ALL,)), even[:1])


def test_fedavgm(device: torch.device) -> None:
    W, v, expected = START, START * 0, []
    for _ in range(2):
        v = 0.9 * v + (W - sum(n * local(W, k) for k, n in enumerate(SIZES)) / 9)
        W = W - 0.8 * v
        expected.append(W)
    close(rounds(FedAvgM(**FULL, server_lr=0.8), device), expected)


def test_fedprox_keeps_partial_work_and_fedavg_drops_it(device: torch.device) -> None:
    method = FedProx(**FULL, mu=0.7, stragglers=0.67)
    epochs = method.straggler_epochs(context(1, device, Linear()))
    assert len(epochs) == 2
    assert all(1 <= passes <= 3 for passes in epochs.values())
    proximal = lambda V: 0.7 * (V - START)  # noqa: E731
    models = [local(START, k, epochs.get(k, 3), extra=proximal) for k in range(3)]
    close(rounds(method, device, (ALL,)), [np.average(models, axis=0, weights=SIZES)])
    (on_time,) = set(range(3)) - set(epochs)
    dropping = FedAvg(**FULL, stragglers=0.67, drop_stragglers=True)
    close(rounds(dropping, device, (ALL,)), [local(START, on_time)])
    with pytest.raises(SettingError, match="stragglers"):
        FedAvg(stragglers=0.5, local_steps=3)
    all_dropped = FedAvg(**FULL, stragglers=1.0, drop_stragglers=True)
    np.testing.assert_allclose(rounds(all_dropped, device, (ALL,))[0], START, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova_with_unequal_steps(momentum: float, device: torch.device) -> None:
    """Batches of two: 1, 2 and 2 steps a pass; each client's own batches are read from the seed."""
    settings = {**FULL, "batch": 2, "momentum": momentum}
    W, expected = START, []
    for number in (1, 2):
        local_models, norms = [], []
        for k in range(3):
            V, v, steps = W, W * 0, 0
            generator = torch_generator(0, "local training", number, k)
            for _ in range(3):
                for part in torch.randperm(SIZES[k], generator=generator).split(2):
                    batch = PARTS[k][part].numpy()
                    z = X[batch] @ V.T
                    e = np.exp(z - z.max(1, keepdims=True))
                    errors = e / e.sum(1, keepdims=True) - np.eye(3)[LABELS[batch]]
                    v = momentum * v + errors.T @ X[batch] / len(batch)
                    V, steps = V - 0.5 * v, steps + 1
            local_models.append(V)
            # ‖a‖₁: the weight of each step's gradient in the sum of all later velocities
            norms.append(sum(sum(momentum**j for j in range(steps - i)) for i in range(steps)))
        p = np.array(SIZES) / 9
        W = W - (p @ norms) * sum(p[k] * (W - local_models[k]) / norms[k] for k in range(3))
        expected.append(W)
    close(rounds(FedNova(**settings), device), expected)
    assert update_norm(4, 0.0) == 4


def test_scaffold_with_an_absent_client(device: torch.device) -> None:
    active = (ALL, (0, 2), ALL)
    x, c, controls, expected = START, START * 0, [START * 0] * 3, []
    for ids in active:
        ys, change = [], START * 0
        for k in ids:
            y = local(x, k, extra=lambda V, d=c - controls[k]: d)  # type: ignore[misc]
            c_k = controls[k] - c + (x - y) / (3 * 0.5)
            change = change + c_k - controls[k]
            controls[k] = c_k
            ys.append(y)
        x, c = x + 0.9 * (sum(ys) / len(ys) - x), c + change / 3
        expected.append(x)
    close(rounds(Scaffold(**FULL, server_lr=0.9), device, active), expected)
    with pytest.raises(SettingError, match="momentum"):
        Scaffold(momentum=0.9)


def test_feddyn_with_an_absent_client(device: torch.device) -> None:
    active, alpha = (ALL, (1, 2)), 0.3
    W, h, g, expected = START, START * 0, [START * 0] * 3, []
    for ids in active:
        models = {k: local(W, k, extra=lambda V, d=g[k], W=W: alpha * (V - W) - d) for k in ids}  # type: ignore[misc]
        for k in ids:
            g[k] = g[k] - alpha * (models[k] - W)
        h = h - alpha / 3 * sum(models[k] - W for k in ids)
        W = sum(models.values()) / len(ids) - h / alpha
        expected.append(W)
    close(rounds(FedDyn(**FULL, alpha=alpha), device, active), expected)


def test_fedgkd(device: torch.device) -> None:
    """The teacher is the average of the last two global models."""
    W, past, expected = START, [START], []
    for _ in range(3):
        teacher = sum(past[-2:]) / len(past[-2:])

        def distil(V: Array, k: int, teacher: Any = teacher) -> Array:
            difference = probabilities(V, k) - probabilities(teacher, k)
            return np.asarray(0.8 / 2 * difference.T @ X[PARTS[k].numpy()] / SIZES[k])

        W = sum(n * local(W, k, extra=lambda V, k=k: distil(V, k)) for k, n in enumerate(SIZES)) / 9  # type: ignore[misc,assignment]
        past.append(W)
        expected.append(W)
    close(rounds(FedGKD(**FULL, gamma=0.8, buffer=2), device, (ALL,) * 3), expected)


def test_qffl(device: torch.device) -> None:
    W, q, L, expected = START, 0.5, 2.0, []
    for _ in range(2):
        F = [loss(W, k) + 1e-10 for k in range(3)]
        delta = [L * (W - local(W, k)) for k in range(3)]
        h = [q * f ** (q - 1) * (d**2).sum() + L * f**q for f, d in zip(F, delta, strict=True)]
        W = W - sum(f**q * d for f, d in zip(F, delta, strict=True)) / sum(h)
        expected.append(W)
    close(rounds(QFFL(**FULL, q=q), device), expected)


# ------------------------------------------------------- two layers, by central differences of losses


class Deep(nn.Module):
    """z = A x (after batch norm of x, if asked for), logits = W z; weights are the same in each."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.body, self.classifier = nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.body.weight.data = torch.linspace(-1, 1, 12).view(3, 4)
        self.classifier.weight.data = torch.linspace(1, -0.5, 9).view(3, 3)

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(self.norm(x.flatten(1)))
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits


AW: Array = np.concatenate([np.linspace(-1, 1, 12), np.linspace(1, -0.5, 9)])


def flat(parameters: dict[str, Array]) -> Array:
    """[21]: A and W."""
    return np.concatenate([parameters[f"{name}.weight"].ravel() for name in ("body", "classifier")])


def embeddings(w: Array, x: Array) -> Array:
    return x @ w[:12].reshape(3, 4).T


def cross_entropy(w: Array, x: Array, y: Array) -> float:
    logits = embeddings(w, x) @ w[12:21].reshape(3, 3).T
    return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean())


def descended(w: Array, loss: Callable[[Array], float]) -> Array:
    for _ in range(3):
        unit = np.eye(len(w)) * 1e-5
        w = w - 0.5 * np.array([(loss(w + e) - loss(w - e)) / 2e-5 for e in unit])
    return w


def cosine(a: Array, b: Array) -> Array:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def test_moon(device: torch.device) -> None:
    """Eq. 3, with each client's own last model; in its first round that is the global one."""
    w_t, last, expected = AW, [AW] * 3, []
    for _ in range(2):

        def loss(w: Array, k: int, w_t: Array = w_t, last: Any = tuple(last)) -> float:
            x, y = tiny.X[PARTS[k]], LABELS[PARTS[k]]
            z = embeddings(w, x)
            to_global, to_last = (np.exp(cosine(z, embeddings(v, x)) / 0.5) for v in (w_t, last[k]))
            contrast = float(np.log(to_global / (to_global + to_last)).mean())
            return cross_entropy(w, x, y) - 2.0 * contrast

        last = [descended(w_t, partial(loss, k=k)) for k in range(3)]
        w_t = np.average(last, axis=0, weights=SIZES)
        expected.append(w_t)
    models, *_ = tiny.rounds(Moon(**FULL, mu=2.0), partial(Deep, False), device)
    np.testing.assert_allclose([flat(model) for model in models], expected, atol=5e-5)
    plain, *_ = tiny.rounds(Moon(**FULL, mu=0.0), partial(Deep, False), device)
    assert np.abs(flat(plain[1]) - expected[1]).max() > 0.01  # the term does something


def test_fedbn(device: torch.device) -> None:
    """Batch norm of the inputs, whose statistics are then constants: γ, β and they stay with each
    client, the rest is averaged by 1/K."""
    shared, norms, expected = AW, [np.array([1.0] * 4 + [0.0] * 4)] * 3, []
    for _ in range(2):
        trained = []
        for k in range(3):
            x, y = tiny.X[PARTS[k]], LABELS[PARTS[k]]
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

            def loss(w: Array, x: Array = x, y: Array = y) -> float:
                return cross_entropy(w[:21], x * w[21:25] + w[25:], y)

            trained.append(descended(np.concatenate([shared, norms[k]]), loss))
        shared, norms = np.mean(trained, axis=0)[:21], [w[21:] for w in trained]
        expected.append(shared)
    method = FedBN(**FULL)
    models, state, memories = tiny.rounds(method, partial(Deep, True), device)
    np.testing.assert_allclose([flat(model) for model in models], expected, atol=5e-5)
    assert models[1]["norm.weight"].tolist() == [1.0] * 4  # no client sends it
    for k in range(3):
        memory = tiny.as_arrays(memories[k])
        batch_norm = np.concatenate([memory["norm.weight"], memory["norm.bias"]])
        np.testing.assert_allclose(batch_norm, norms[k], atol=5e-5)
        # running statistics: momentum 0.1, six steps
        running = tiny.X[PARTS[k]].mean(0) * (1 - 0.9**6)
        np.testing.assert_allclose(memory["norm.running_mean"], running, atol=1e-5)
        personal = tiny.as_arrays(method.personal_parameters(state.parameters, memories[k]))
        assert personal.keys() == models[1].keys()
        assert np.array_equal(personal["norm.running_mean"], memory["norm.running_mean"])
    with pytest.raises(SettingError, match=r"model\.norm must be batch"):
        method.check_model(Linear())


def test_solo(device: torch.device) -> None:
    """Each client continues with its model; the common one stays unchanged."""
    models, _, memories = tiny.rounds(Solo(**FULL), partial(Deep, False), device)
    for k in range(3):
        w = AW
        for _ in range(2):
            w = descended(w, lambda v, k=k: cross_entropy(v, tiny.X[PARTS[k]], LABELS[PARTS[k]]))  # type: ignore[misc]
        np.testing.assert_allclose(flat(tiny.as_arrays(memories[k])), w, atol=5e-5)
    np.testing.assert_allclose(flat(models[1]), AW, atol=1e-6)


# ------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("method", ["qffl", "fedbn", "solo"])
def test_refusals_say_what_cannot_be_protected(method: str) -> None:
    sections = {"run": {"method": method, "rounds": 1}, "model": {"norm": "batch"}}
    refused = f"{method} cannot run with differential privacy: .{{30,}}"
    with pytest.raises(UnaccountedReleaseError, match=refused):
        simulate(resolve({**sections, "privacy": {"epsilon": 8.0}}))


def test_sampling_by_size_and_its_refusal() -> None:
    """FedProx's scheme: a client of nine tenths of the data is nearly always there."""
    drawn = [Participation(0, 3, 0.34, (90, 5, 5)).in_round(n) for n in range(1, 201)]
    assert all(len(ids) == 1 for ids in drawn)
    assert 160 < sum(ids == (0,) for ids in drawn) < 195
    sections = {"run": {"method": "fedprox", "rounds": 1, "sampling": "size", "participation": 0.5}}
    with pytest.raises(SettingError, match="sampling by size"):
        resolve({**sections, "privacy": {"epsilon": 8.0}})
    with pytest.raises(SettingError, match="participation is 1"):
        resolve({"run": {"method": "fedprox", "sampling": "size"}})


def test_stragglers_are_charged_for_the_steps_that_they_take() -> None:
    sections = {
        "run": {"method": "fedprox", "rounds": 1},
        "model": {"name": "linear"},
        "partition": {"subset": 0.1},
        "privacy": {"noise_multiplier": 2.0},
    }
    method = {"local_epochs": 4, "batch": 64, "stragglers": 0.4}
    result = simulate(resolve({**sections, "method": method}))
    assert result.privacy is not None
    rows: Any = result.privacy["ledger"]
    steps = {client: row["steps"] for row in rows for client in row["clients"]}
    assert len(set(steps.values())) > 1
    stragglers = replace(FedProx(), **method).straggler_epochs(context(1, CPU, Linear(), range(5)))
    partial_work = {int(c.split("-")[1]) for c, n in steps.items() if n < max(steps.values())}
    assert partial_work <= set(stragglers)
