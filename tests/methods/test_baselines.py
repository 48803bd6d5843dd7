"""The baselines: their rounds on tiny networks against NumPy, special cases and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedsynth as fs
from fedsynth.errors import SettingError
from fedsynth.methods.fednova import update_norm
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.seeding import torch_generator
from tests.methods import tiny_problem as tiny
from tests.methods.tiny_problem import ALL, FULL, LABELS, PARTS, SIZES, Array, TwoLayers, descend

X = np.concatenate([tiny.X, np.ones((9, 1))], axis=1)  # a last column for the bias


def network() -> nn.Module:
    return build_model(ModelSettings("linear"), (1, 2, 2), 3, 0)


def weight_matrix(parameters: dict[str, Array]) -> Array:
    """Returns [3, 5]: weights and bias."""
    return np.column_stack([parameters["classifier.weight"], parameters["classifier.bias"]])


START = weight_matrix(tiny.as_arrays(network().state_dict()))


def run_rounds(
    method: Any, device: torch.device, active: Sequence[tuple[int, ...]] = (ALL, ALL)
) -> list[Array]:
    """Returns the global model after each round; training clients in one pass changes nothing."""
    with patch("fedsynth.training.many_clients.FEW", 1):
        runs = [tiny.run_rounds(method, network, device, active, g) for g in (True, False)]
    grouped, separate = ([weight_matrix(model) for model in models] for models, *_ in runs)
    np.testing.assert_allclose(grouped, separate, atol=2e-6)
    return grouped


def gradient(W: Array, examples: Tensor) -> Array:
    """Returns the gradient of these examples' mean loss."""
    x, y = X[examples.numpy()], LABELS[examples.numpy()]
    return np.asarray((tiny.softmax(x @ W.T) - np.eye(3)[y]).T @ x / len(x))


def fit(W: Array, k: int, steps: int = 3, extra: Callable[[Array], Any] = lambda W: 0) -> Array:
    for _ in range(steps):
        W = W - 0.5 * (gradient(W, PARTS[k]) + extra(W))
    return W


def assert_close(actual: list[Array], expected: list[Array]) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert np.abs(expected[-1] - START).max() > 0.05  # training has moved the weights


def fedavg_rounds(weights: Sequence[float], decay: float = 0.0) -> list[Array]:
    W, out = START, []
    for _ in range(2):
        local_models = [fit(W, k, extra=lambda V: decay * V) for k in ALL]
        W = np.average(local_models, axis=0, weights=weights)
        out.append(W)
    return out


def test_special_cases_equal_fedavg(device: torch.device) -> None:
    """Methods weight clients by n_k or uniformly."""
    by_size, even = fedavg_rounds(SIZES), fedavg_rounds((1, 1, 1))
    for method, expected in (
        (fs.FedAvg(**FULL), by_size),
        (fs.FedAvg(**FULL, weight_decay=0.1), fedavg_rounds(SIZES, 0.1)),
        (fs.FedAvgM(**FULL, server_momentum=0.0), by_size),
        (fs.FedGKD(**FULL, gamma=0.0), by_size),
        (fs.FedNova(**FULL), by_size),  # equally many steps
        (fs.FedProx(**FULL, mu=0.0), by_size),
        (fs.FedDyn(**FULL, alpha=0.0), even),
        (fs.QFFL(**FULL, q=0.0), even),
        (fs.Scaffold(**FULL), even[:1]),
    ):
        assert_close(run_rounds(method, device, (ALL,) * len(expected)), expected)


def test_fedavgm_equals_numpy(device: torch.device) -> None:
    W, v, expected = START, START * 0, []
    for _ in range(2):
        v = 0.9 * v + (W - sum(n * fit(W, k) for k, n in enumerate(SIZES)) / 9)
        W = W - 0.8 * v
        expected.append(W)
    assert_close(run_rounds(fs.FedAvgM(**FULL, server_lr=0.8), device), expected)


def test_fedprox_averages_partial_work_of_stragglers(device: torch.device) -> None:
    method = fs.FedProx(**FULL, mu=0.7, stragglers=0.67)
    epochs = method.straggler_epochs(tiny.context(1, device, network()))
    assert len(epochs) == 2
    assert all(1 <= passes <= 3 for passes in epochs.values())
    models = [fit(START, k, epochs.get(k, 3), lambda V: 0.7 * (V - START)) for k in ALL]
    assert_close(run_rounds(method, device, (ALL,)), [np.average(models, axis=0, weights=SIZES)])
    (on_time,) = set(ALL) - set(epochs)
    dropping = fs.FedAvg(**FULL, stragglers=0.67, drop_stragglers=True)
    assert_close(run_rounds(dropping, device, (ALL,)), [fit(START, on_time)])
    with pytest.raises(SettingError, match="stragglers"):
        fs.FedAvg(stragglers=0.5, local_steps=3)
    all_dropped = fs.FedAvg(**FULL, stragglers=1.0, drop_stragglers=True)
    np.testing.assert_allclose(run_rounds(all_dropped, device, (ALL,))[0], START, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_fednova_with_unequal_steps_equals_numpy(momentum: float, device: torch.device) -> None:
    """Batches of two give 1, 2 and 2 steps per pass; the seed gives each client's batches."""
    settings = {**FULL, "batch": 2, "momentum": momentum}
    W, expected = START, []
    for number in (1, 2):
        local_models, norms = [], []
        for k in ALL:
            V, v, steps = W, W * 0, 0
            generator = torch_generator(0, "local training", number, k)
            for _ in range(3):
                for part in torch.randperm(SIZES[k], generator=generator).split(2):
                    v = momentum * v + gradient(V, PARTS[k][part])
                    V, steps = V - 0.5 * v, steps + 1
            local_models.append(V)
            # ‖a‖₁: the weight of each step's gradient in the sum of all later velocities
            norms.append(sum(sum(momentum**j for j in range(steps - i)) for i in range(steps)))
        p = np.array(SIZES) / 9
        W = W - (p @ norms) * sum(p[k] * (W - local_models[k]) / norms[k] for k in ALL)
        expected.append(W)
    assert_close(run_rounds(fs.FedNova(**settings), device), expected)
    assert update_norm(4, 0.0) == 4


def test_scaffold_with_absent_client_equals_numpy(device: torch.device) -> None:
    active = (ALL, (0, 2), ALL)
    x, c, controls, expected = START, START * 0, [START * 0] * 3, []
    for ids in active:
        ys, change = [], START * 0
        for k in ids:
            y = fit(x, k, extra=lambda V, d=c - controls[k]: d)  # type: ignore[misc]
            c_k = controls[k] - c + (x - y) / (3 * 0.5)
            change = change + c_k - controls[k]
            controls[k] = c_k
            ys.append(y)
        x, c = x + 0.9 * (sum(ys) / len(ys) - x), c + change / 3
        expected.append(x)
    assert_close(run_rounds(fs.Scaffold(**FULL, server_lr=0.9), device, active), expected)
    with pytest.raises(SettingError, match="momentum"):
        fs.Scaffold(momentum=0.9)


def test_feddyn_with_absent_client_equals_numpy(device: torch.device) -> None:
    active, alpha = (ALL, (1, 2)), 0.3
    W, h, g, expected = START, START * 0, [START * 0] * 3, []
    for ids in active:
        models = {k: fit(W, k, extra=lambda V, d=g[k], W=W: alpha * (V - W) - d) for k in ids}  # type: ignore[misc]
        for k in ids:
            g[k] = g[k] - alpha * (models[k] - W)
        h = h - alpha / 3 * sum(models[k] - W for k in ids)
        W = sum(models.values()) / len(ids) - h / alpha
        expected.append(W)
    assert_close(run_rounds(fs.FedDyn(**FULL, alpha=alpha), device, active), expected)


def test_fedgkd_equals_numpy(device: torch.device) -> None:
    """The teacher is the average of the last two global models."""
    W, past, expected = START, [START], []
    for _ in range(3):
        teacher = sum(past[-2:]) / len(past[-2:])

        def distil(V: Array, k: int, teacher: Any = teacher) -> Array:
            x = X[PARTS[k].numpy()]
            difference = tiny.softmax(x @ V.T) - tiny.softmax(x @ teacher.T)
            return np.asarray(0.8 / 2 * difference.T @ x / SIZES[k])

        W = sum(n * fit(W, k, extra=lambda V, k=k: distil(V, k)) for k, n in enumerate(SIZES)) / 9  # type: ignore[misc,assignment]
        past.append(W)
        expected.append(W)
    assert_close(run_rounds(fs.FedGKD(**FULL, gamma=0.8, buffer=2), device, (ALL,) * 3), expected)


def test_qffl_equals_numpy(device: torch.device) -> None:
    W, q, L, expected = START, 0.5, 2.0, []
    for _ in range(2):
        F = [tiny.label_losses(X[p] @ W.T, LABELS[p]).mean() + 1e-10 for p in PARTS]
        delta = [L * (W - fit(W, k)) for k in ALL]
        h = [q * f ** (q - 1) * (d**2).sum() + L * f**q for f, d in zip(F, delta, strict=True)]
        W = W - sum(f**q * d for f, d in zip(F, delta, strict=True)) / sum(h)
        expected.append(W)
    assert_close(run_rounds(fs.QFFL(**FULL, q=q), device), expected)


def cosine(a: Array, b: Array) -> Array:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def test_moon_equals_numpy(device: torch.device) -> None:
    """Eq. 3, with each client's previous model; in the first round that is the global model."""
    w_t, last, expected = tiny.START, [tiny.START] * 3, []
    for _ in range(2):

        def loss(w: Array, k: int, w_t: Array = w_t, last: Any = tuple(last)) -> float:
            x, y = tiny.X[PARTS[k]], LABELS[PARTS[k]]
            z = tiny.embeddings(w, x)
            to_global, to_last = (
                np.exp(cosine(z, tiny.embeddings(v, x)) / 0.5) for v in (w_t, last[k])
            )
            contrast = float(np.log(to_global / (to_global + to_last)).mean())
            return tiny.cross_entropy(w, x, y) - 2.0 * contrast

        last = [descend(w_t, partial(loss, k=k)) for k in ALL]
        w_t = np.average(last, axis=0, weights=SIZES)
        expected.append(w_t)
    models, *_ = tiny.run_rounds(fs.Moon(**FULL, mu=2.0), TwoLayers, device)
    np.testing.assert_allclose([tiny.flat(model) for model in models], expected, atol=5e-5)
    plain, *_ = tiny.run_rounds(fs.Moon(**FULL, mu=0.0), TwoLayers, device)
    assert np.abs(tiny.flat(plain[1]) - expected[1]).max() > 0.01  # the term has an effect


def test_fedbn_equals_numpy(device: torch.device) -> None:
    """Batch norm of the inputs makes their statistics constants. γ, β and the statistics stay with
    each client; all other parameters are averaged by 1/K."""
    shared, norms, expected = tiny.START, [np.array([1.0] * 4 + [0.0] * 4)] * 3, []
    for _ in range(2):
        trained = []
        for k in ALL:
            x, y = tiny.X[PARTS[k]], LABELS[PARTS[k]]
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

            def loss(w: Array, x: Array = x, y: Array = y) -> float:
                return tiny.cross_entropy(w[:24], x * w[24:28] + w[28:], y)

            trained.append(descend(np.concatenate([shared, norms[k]]), loss))
        shared, norms = np.mean(trained, axis=0)[:24], [w[24:] for w in trained]
        expected.append(shared)
    method = fs.FedBN(**FULL)
    models, state, memories = tiny.run_rounds(method, partial(TwoLayers, True), device)
    np.testing.assert_allclose([tiny.flat(model) for model in models], expected, atol=5e-5)
    assert models[1]["norm.weight"].tolist() == [1.0] * 4  # no client sends it
    for k in ALL:
        personal = tiny.as_arrays(method.personal_parameters(state.parameters, memories[k]))
        assert personal.keys() == models[1].keys()
        batch_norm = np.concatenate([personal["norm.weight"], personal["norm.bias"]])
        np.testing.assert_allclose(batch_norm, norms[k], atol=5e-5)
        # running statistics: momentum 0.1, six steps
        running = tiny.X[PARTS[k]].mean(0) * (1 - 0.9**6)
        np.testing.assert_allclose(personal["norm.running_mean"], running, atol=1e-5)
    with pytest.raises(SettingError, match=r"model\.norm must be 'batch'"):
        method.check_model(network())


def test_solo_clients_keep_their_models(device: torch.device) -> None:
    """Clients continue with their models; the global model stays unchanged."""
    models, _, memories = tiny.run_rounds(fs.Solo(**FULL), TwoLayers, device)
    for k in ALL:
        w = tiny.START
        for _ in range(2):
            w = descend(w, lambda v, k=k: tiny.cross_entropy(v, tiny.X[PARTS[k]], LABELS[PARTS[k]]))  # type: ignore[misc]
        np.testing.assert_allclose(tiny.flat(tiny.as_arrays(memories[k])), w, atol=5e-5)
    np.testing.assert_allclose(tiny.flat(models[1]), tiny.START, atol=1e-6)


@pytest.mark.parametrize(
    ("run", "privacy", "message"),
    [
        ({"method": "qffl"}, {"epsilon": 8.0}, "qffl"),
        ({"method": "fedbn"}, {"epsilon": 8.0}, "fedbn"),
        ({"method": "solo"}, {"epsilon": 8.0}, "solo"),
        ({"sampling": "size", "participation": 0.5}, {"epsilon": 8.0}, "sampling"),
        ({"sampling": "size"}, {}, "participation"),
    ],
)
def test_unsupported_settings_are_refused(run: Any, privacy: Any, message: str) -> None:
    sections = {"run": {"method": "fedprox", "rounds": 1, **run}, "model": {"norm": "batch"}}
    with pytest.raises((SettingError, UnaccountedReleaseError), match=message):
        fs.simulate(fs.resolve({**sections, "privacy": privacy}))
