"""Methods with local training and rules of robust aggregation, against NumPy; refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedsynth as fs
from fedsynth.core.client import ExactClientView
from fedsynth.errors import DivergedError, SettingError, UnaccountedReleaseError, UnknownNameError
from fedsynth.federation.server import Server
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedharmo import AmplitudeNorm
from fedsynth.methods.fedmgda_plus import min_norm_weights
from fedsynth.methods.fednova import NormalisedModel
from fedsynth.methods.qffl import TINY, FairModel
from fedsynth.methods.scaffold import ControlState, ControlUp
from fedsynth.methods.shared import aggregation as robust
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.models.flat import flatten_named
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import Linear
from fedsynth.seeding import torch_generator
from fedsynth.training.many_clients import train_together
from tests.digits import SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.methods import tiny_problem as tiny
from tests.methods.tiny_problem import ALL, FULL, LABELS, PARTS, SIZES, Array, TwoLayers, descend
from tests.quick_runs import by_family, quick_sections
from tests.raising import raises
from tests.rounds import play_round

X = np.concatenate([tiny.X, np.ones((9, 1))], axis=1)  # a last column for the bias


def network() -> nn.Module:
    return build_model(ModelSettings("linear"), (1, 2, 2), 3, 0)


def weight_matrix(parameters: dict[str, Array]) -> Array:
    return np.column_stack([parameters["classifier.weight"], parameters["classifier.bias"]])


START = weight_matrix(tiny.as_arrays(network().state_dict()))


def run_rounds(method: Any, device: Any, active: Any = (ALL, ALL)) -> list[Array]:
    """Returns the global model after each round; training clients in one pass changes nothing."""
    with patch("fedsynth.training.many_clients.FEW", 1):
        runs = [tiny.run_rounds(method, network, device, active, g) for g in (True, False)]
    grouped, separate = ([weight_matrix(model) for model in models] for models, *_ in runs)
    np.testing.assert_allclose(grouped, separate, atol=2e-6)
    return grouped


def gradient(W: Array, examples: Tensor) -> Array:
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
    by_size, even = fedavg_rounds(SIZES), fedavg_rounds((1, 1, 1))
    for method, expected in (
        (fs.FedAvg(**FULL), by_size),
        (fs.FedAvg(**FULL, weight_decay=0.1), fedavg_rounds(SIZES, 0.1)),
        (fs.FedAvgM(**FULL, server_momentum=0.0), by_size),
        (fs.FedGKD(**FULL, gamma=0.0), by_size),
        (fs.FedMGDAPlus(**FULL, epsilon=0.0, normalise=False), by_size),
        (fs.FedNova(**FULL), by_size),  # equally many steps
        (fs.FedProx(**FULL, mu=0.0), by_size),
        (fs.FedDyn(**FULL, alpha=0.0), even),
        (fs.FedDC(**FULL, alpha=0.0, correction=False), even),
        (fs.QFFL(**FULL, q=0.0), even),
        (fs.Scaffold(**FULL), even[:1]),
    ):
        assert_close(run_rounds(method, device, (ALL,) * len(expected)), expected)


def adam(W: Array, k: int, mu: float, steps: int = 3) -> Array:
    start, m, v = W, W * 0, W * 0
    for t in range(1, steps + 1):
        g = gradient(W, PARTS[k]) + mu * (W - start) + 0.1 * W
        m, v = 0.8 * m + 0.2 * g, 0.999 * v + 0.001 * g**2
        W = W - 0.05 * m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return W


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_local_adam_equals_numpy(mu: float, device: torch.device) -> None:
    """Each round starts with new moments. Clients train together and apart."""
    W, expected = START, []
    for _ in range(2):
        W = np.average([adam(W, k, mu) for k in ALL], axis=0, weights=SIZES)
        expected.append(W)
    settings = FULL | {"optimiser": "adam", "lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}
    assert_close(run_rounds(fs.FedProx(**settings, mu=mu), device), expected)
    for method in (fs.Scaffold, fs.FedDC, fs.FedNova, fs.QFFL):
        with raises(SettingError, "method.optimiser"):
            method(optimiser="adam", momentum=0.0)
    with raises(SettingError, "method.momentum"):
        fs.FedAvg(optimiser="adam", momentum=1.0)


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
    with raises(SettingError, "method.stragglers"):
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
    with raises(SettingError, "method.momentum"):
        fs.Scaffold(momentum=0.9)


@pytest.mark.parametrize("drop", [False, True])
def test_scaffold_with_stragglers_equals_numpy(drop: bool, device: torch.device) -> None:
    """K_k differs. Broken versions would divide by the planned steps, or keep the c_k of a straggler
    whose upload is dropped."""
    method = fs.Scaffold(
        **{**FULL, "batch": 2}, server_lr=0.9, stragglers=0.67, drop_stragglers=drop
    )
    x, c, controls, expected, counts = START, START * 0, [START * 0] * 3, [], set()
    for number in (1, 2, 3):
        late = method.straggler_epochs(tiny.context(number, device, network()))
        ys, change = [], START * 0
        for k in ALL:
            y, steps = x, 0
            draws = torch_generator(0, "local training", number, k)
            for _ in range(late.get(k, method.local_epochs)):
                for part in torch.randperm(SIZES[k], generator=draws).split(2):
                    y = y - 0.5 * (gradient(y, PARTS[k][part]) - controls[k] + c)
                    steps += 1
            if drop and k in late:
                continue
            counts.add(steps)
            c_k = controls[k] - c + (x - y) / (steps * 0.5)
            change, controls[k] = change + c_k - controls[k], c_k
            ys.append(y)
        x, c = x + 0.9 * (sum(ys) / len(ys) - x), c + change / 3
        expected.append(x)
    assert len(counts) > 1
    assert_close(run_rounds(method, device, (ALL,) * 3), expected)


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


@pytest.mark.parametrize(
    ("alpha", "correction", "same"),
    [
        (0.3, True, None),
        (0.3, False, fs.FedDyn(**FULL, alpha=0.3)),
        (0.0, True, fs.Scaffold(**FULL)),
    ],
)
def test_feddc_with_absent_client_equals_numpy(
    alpha: float, correction: bool, same: Any, device: torch.device
) -> None:
    """With one of its two terms, it is FedDyn or SCAFFOLD."""
    active, expected = (ALL, (0, 2), ALL), []
    w, c, controls, h = START, START * 0, [START * 0] * 3, [START * 0] * 3
    for ids in active:
        models, change = [], START * 0
        for k in ids:
            linear = alpha * h[k] + correction * (c - controls[k])
            theta = fit(w, k, extra=lambda V, w=w, linear=linear: alpha * (V - w) + linear)  # type: ignore[misc]
            c_k = controls[k] - c + (w - theta) / (3 * 0.5)
            change = change + c_k - controls[k]
            controls[k], h[k] = c_k, h[k] + theta - w
            models.append(theta)
        w, c = np.mean(models, axis=0) + (alpha > 0) * sum(h) / 3, c + change / 3
        expected.append(w)
    method = fs.FedDC(**FULL, alpha=alpha, correction=correction)
    actual = run_rounds(method, device, active)
    assert_close(actual, expected)
    if same is not None:
        np.testing.assert_allclose(actual, run_rounds(same, device, active), atol=5e-6)


def test_fedgkd_equals_numpy(device: torch.device) -> None:
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


@pytest.mark.parametrize("normalise", [False, True])
def test_fedmgda_plus_equals_numpy(normalise: bool, device: torch.device) -> None:
    """On the face of the simplex where the shortest sum lies, its products with all g_k are equal."""
    W, expected = START, []
    for _ in range(2):
        g = np.stack([(W - fit(W, k)).ravel() for k in ALL])
        if normalise:
            g /= np.linalg.norm(g, axis=1, keepdims=True)
        directions = []
        for face in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            weights = np.linalg.solve(g[face] @ g[face].T, np.ones(len(face)))
            if weights.min() > 0:
                directions.append(weights / weights.sum() @ g[face])
        W = W - 0.8 * min(directions, key=np.linalg.norm).reshape(W.shape)
        expected.append(W)
    settings = {**FULL, "epsilon": 1.0, "normalise": normalise, "server_lr": 0.8}
    assert_close(run_rounds(fs.FedMGDAPlus(**settings), device), expected)


@given(st.integers(0, 99), st.integers(1, 8), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_min_norm_weights_are_optimal(seed: int, count: int, radius: float) -> None:
    """No allowed weights have a smaller product with the gradient 2Gλ. Two vectors are equal."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, 3)) * 10.0 ** rng.integers(-6, 3)
    vectors[0] = vectors[-1]
    center, gram = rng.dirichlet(np.ones(count)), vectors @ vectors.T
    weights = min_norm_weights(gram, center, radius)
    assert weights.sum() == pytest.approx(1)
    assert np.abs(weights - center).max() <= radius + 1e-6
    box = np.clip([center - radius, center + radius], 0, 1).T
    best = linprog(gram @ weights, A_eq=np.ones((1, count)), b_eq=[1], bounds=box).x
    assert (weights - best) @ gram @ weights < 1e-4 * gram.diagonal().max()


def test_fedsam_equals_numpy(device: torch.device) -> None:
    def sharpness(V: Array, k: int) -> Array:
        g = gradient(V, PARTS[k])
        return gradient(V + 0.6 * g / float(np.linalg.norm(g)), PARTS[k]) - g

    W, expected = START, []
    for _ in range(2):
        models = [fit(W, k, extra=partial(sharpness, k=k)) for k in ALL]
        W = np.average(models, axis=0, weights=SIZES)
        expected.append(W)
    assert_close(run_rounds(fs.FedSAM(**FULL, rho=0.6), device), expected)
    once = {**FULL, "local_epochs": 1}
    normed = partial(TwoLayers, norm=True)
    sam, avg = (
        tiny.run_rounds(method, normed, device, (ALL,))[1].parameters
        for method in (fs.FedSAM(**once, rho=0.6), fs.FedAvg(**once))
    )
    torch.testing.assert_close(sam["norm.running_var"], avg["norm.running_var"])
    assert int(sam["norm.num_batches_tracked"]) == 1  # only the first pass changes the statistics


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
            to_global = np.exp(cosine(z, tiny.embeddings(w_t, x)) / 0.5)
            to_last = np.exp(cosine(z, tiny.embeddings(last[k], x)) / 0.5)
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
    """Clients keep γ, β and the statistics, which are constants of batch-normed inputs."""
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
    models, state, client_states = tiny.run_rounds(method, partial(TwoLayers, True), device)
    np.testing.assert_allclose([tiny.flat(model) for model in models], expected, atol=5e-5)
    assert models[1]["norm.weight"].tolist() == [1.0] * 4  # no client sends it
    for k in ALL:
        personal = tiny.as_arrays(method.personal_parameters(state.parameters, client_states[k]))
        assert personal.keys() == models[1].keys()
        batch_norm = np.concatenate([personal["norm.weight"], personal["norm.bias"]])
        np.testing.assert_allclose(batch_norm, norms[k], atol=5e-5)
        # running statistics: momentum 0.1, six steps
        running = tiny.X[PARTS[k]].mean(0) * (1 - 0.9**6)
        np.testing.assert_allclose(personal["norm.running_mean"], running, atol=1e-5)
    with raises(SettingError, "model.norm"):
        method.check_model(network())


def harmonised(images: Array, average: Array | None, window: float) -> Array:
    """Returns images [N, 2, 2] whose amplitudes at the chosen frequencies are the average's."""
    spectrum = np.fft.fft2(images)
    low = np.ones((2, 2), bool) if window else np.array([[True, False], [False, False]])
    amplitude = np.abs(spectrum) if average is None else np.where(low, average, np.abs(spectrum))
    return np.asarray(np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum))).real)


@pytest.mark.parametrize("window", [0.0, 0.5])
def test_fedharmo_equals_numpy(window: float, device: torch.device) -> None:
    def numeric(loss: Callable[[Array], float], w: Array) -> Array:
        return np.array([(loss(w + e) - loss(w - e)) / 2e-5 for e in np.eye(len(w)) * 1e-5])

    images = tiny.X.reshape(9, 2, 2)
    amplitudes = [np.abs(np.fft.fft2(images[part.numpy()])).mean(axis=0) for part in PARTS]
    w, expected = tiny.START, []
    for averages in (amplitudes, [np.mean(amplitudes, axis=0)] * 3):  # own, then the server's
        trained = []
        for part, average in zip(PARTS, averages, strict=True):
            x = harmonised(images[part.numpy()], average, window).reshape(-1, 4)
            loss = partial(tiny.cross_entropy, x=x, y=LABELS[part.numpy()])
            v = w
            for _ in range(3):
                g = numeric(loss, v)
                v = v - 0.5 * numeric(loss, v + 0.3 * g / np.linalg.norm(g))
            trained.append(v)
        w = np.mean(trained, axis=0)
        expected.append(w)
    method = fs.FedHarmo(**FULL, alpha=0.3, window=window)
    models, *_ = tiny.run_rounds(method, lambda: method.add_layers(TwoLayers(), tiny.SPEC), device)
    for model, exact in zip(models, expected, strict=True):
        plain = {name.removeprefix("network."): value for name, value in model.items()}
        np.testing.assert_allclose(tiny.flat(plain), exact, atol=1e-4)
        average = np.fft.ifftshift(model["norm.amplitude"][0])
        np.testing.assert_allclose(average, np.mean(amplitudes, axis=0), atol=1e-5)


def test_fedharmo_trains_networks_with_unused_parameters() -> None:
    network = TwoLayers()
    network.unused = nn.Parameter(torch.ones(2))
    method = fs.FedHarmo(**FULL, alpha=0.3)
    models, *_ = tiny.run_rounds(method, lambda: method.add_layers(network, tiny.SPEC), tiny.CPU)
    assert models[-1]["network.unused"].tolist() == [1, 1]


def test_fedharmo_without_its_parts_is_fedavg_and_averages_batches() -> None:
    settings = {"local_epochs": 2, "batch": 16}
    models = []
    for method in (fs.FedAvg(**settings), fs.FedHarmo(**settings, alpha=0, normalise=False)):  # type: ignore[arg-type]
        run = fs.RunSettings(method, rounds=2, model=ModelSettings("linear"), device="cpu")
        parts = np.arange(150).reshape(3, 50)  # of equal sizes
        result = fs.simulate(
            run, data=(fs.load_dataset("digits")[0], None), parts=list(parts), quiet=True
        )
        models.append(flatten_named(result.model.state_dict(), result.model))
    torch.testing.assert_close(*models, rtol=0, atol=0)
    spec = replace(tiny.SPEC, mean=(0.5,), std=(0.25,))
    norm, pixels = AmplitudeNorm(spec, decay=0.25, window=0.5), tiny.X.reshape(9, 2, 2)
    x = (torch.from_numpy(pixels).float()[:, None] - 0.5) / 0.25
    torch.testing.assert_close(norm(x), x)  # no average is known
    norm.learns = True
    for batch in (x[:4], x[4:]):
        norm(batch)
    norm.eval()(x)
    first, second = (np.abs(np.fft.fft2(b)).mean(axis=0) for b in (pixels[:4], pixels[4:]))
    expected = np.fft.fftshift(0.75 * first + 0.25 * second)
    np.testing.assert_allclose(norm.amplitude[0].numpy(), expected, atol=1e-6)


def test_solo_clients_keep_their_models(device: torch.device) -> None:
    models, _, client_states = tiny.run_rounds(fs.Solo(**FULL), TwoLayers, device)
    for k in ALL:
        w = tiny.START
        for _ in range(2):
            w = descend(w, lambda v, k=k: tiny.cross_entropy(v, tiny.X[PARTS[k]], LABELS[PARTS[k]]))  # type: ignore[misc]
        np.testing.assert_allclose(tiny.flat(tiny.as_arrays(client_states[k])), w, atol=5e-5)
    np.testing.assert_allclose(tiny.flat(models[1]), tiny.START, atol=1e-6)


def test_unsupported_settings_and_divergence_are_refused() -> None:
    for run, privacy, message in (
        ({"method": "qffl"}, {"epsilon": 8.0}, "qffl"),
        ({"method": "fedbn"}, {"epsilon": 8.0}, "fedbn"),
        ({"method": "solo"}, {"epsilon": 8.0}, "solo"),
        *(({"method": n}, {"epsilon": 8.0}, n) for n in ("fedsam", "fedmix", "fedrobust")),
        ({"sampling": "size", "participation": 0.5}, {"epsilon": 8.0}, "sampling"),
        ({"sampling": "size"}, {}, r"run\.sampling"),
        ({"robust": "median", "participation": 0.4}, {}, r"run\.robust needs 3 .*got 2"),
        ({"robust": "trimmed", "robust_share": 0.5}, {}, r"run\.robust_share"),
        ({"robust": "medain"}, {}, "did you mean median"),
    ):
        sections = {"run": {"method": "fedprox", "rounds": 1, **run}, "model": {"norm": "batch"}}
        refusals = SettingError, UnaccountedReleaseError, UnknownNameError
        with pytest.raises(refusals, match=message):
            fs.simulate(fs.resolve({**sections, "privacy": privacy}))
    solo = {"run": {"method": "solo", "rounds": 1}, "model": {"name": "linear"}}
    with raises(DivergedError, "training.diverged"):
        fs.simulate(fs.resolve({**solo, "method": {"lr": 1e38, "local_epochs": 3}}))


BLOCKS = torch.arange(40).split([8, 1, 15, 5, 11])
LOCAL: dict[str, Any] = {"batch": 4, "lr": 0.2, "momentum": 0.0, "local_epochs": 2}
PLAIN = (
    *(fs.FedAvg, fs.FedAvgM, fs.FedProx, fs.FedNova, fs.FedDyn, fs.FedDC, fs.Scaffold, fs.QFFL),
    fs.Solo,
)
LINEAR = Linear(SPEC.image_shape, 10)
DATA = digits(np.random.default_rng(0).integers(0, 3, 40))


class Custom(fs.TrainsLocally):
    name = "custom"


def context(number: int = 1, clients: int = 5, **changes: Any) -> fs.RoundContext:
    sizes = tuple(len(part) for part in BLOCKS[:clients])
    federation = {"nominal": 8.0, "network": LINEAR, "sizes": sizes, **changes}
    return round_context(federation.pop("privacy", None), number, clients=clients, **federation)


def group(clients: int = 5) -> ExactClientView:
    return ExactClientView(range(clients), DATA, BLOCKS[:clients])


def test_dense_networks_train_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds out from the objectives; a custom method declares nothing."""
    for kind in (*PLAIN, fs.FedGKD, Custom):
        spy = Mock(wraps=train_together)
        monkeypatch.setattr("fedsynth.training.many_clients.train_together", spy)
        client_uploads(kind(**LOCAL, stragglers=0.4), context(), group())
        passes = [len(call.args[0]) for call in spy.call_args_list]
        assert passes == ([] if kind is fs.FedGKD else [5]), kind
    private = fs.PrivacySettings(noise_multiplier=1.0)
    assert fs.FedAvg().client_bytes(context()) is not None
    assert fs.FedAvg().client_bytes(context(privacy=private)) is None
    assert fs.FedAvg().client_bytes(context(network=convnet())) is None
    assert fs.FedAvg().client_bytes(context(client_architectures=(LINEAR,) * 5)) is None


@pytest.mark.parametrize("kind", [*PLAIN[:-1], fs.FedGKD, fs.FedGen])
def test_rounds_without_counted_clients_change_nothing(kind: Any) -> None:
    method = kind(**LOCAL)
    server, client_states = Server(method, LINEAR.state_dict()), dict[int, Any]()
    for number in (1, 2):
        uploads = play_round(server, [group()], client_states, context(number))
    dropped = {k: replace(u, weight=0.0) for k, u in uploads.items()}
    next_state = method.server_step(server.state, dropped, context(3))
    old, new = dict(server.state.numbers()), dict(next_state.numbers())
    torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_local_steps_are_equal_for_all_clients() -> None:
    settings = {**LOCAL, "local_steps": 3}
    assert [u.norm for u in client_uploads(fs.FedNova(**settings), context(), group())] == [3.0] * 5
    control = {name: torch.ones_like(value) for name, value in LINEAR.state_dict().items()}
    empty = ExactClientView((0,), DATA, [torch.arange(0)])
    scaffold = fs.Scaffold(**settings)
    message = scaffold.broadcast(scaffold.initial_state(LINEAR.state_dict()), context())
    ((empty_upload, client_state),) = scaffold.client_step(
        message, empty, [control], context(clients=1)
    )
    assert all(torch.equal(client_state[name], control[name]) for name in control)
    assert empty_upload.weight == 0  # type: ignore[attr-defined]


def test_large_q_does_not_overflow() -> None:
    """Compares the formula in numbers of 80 bits: F^q is at least 10^602."""
    q, start = 1000.0, dict(LINEAR.state_dict())
    models = [{n: v + 0.01 * (k + 1) for n, v in start.items()} for k in range(3)]
    uploads = {k: FairModel(model, 1, 4 + k / 100) for k, model in enumerate(models)}
    method = fs.QFFL(lr=0.5, q=q)
    next_state = method.server_step(AveragingState(start), uploads, context(clients=3))
    F = np.array([u.loss for u in uploads.values()], dtype=np.longdouble) + TINY
    delta = [2.0 * -0.01 * (k + 1) * np.ones(650) for k in range(3)]
    h = sum(q * f ** (q - 1) * (d**2).sum() + 2.0 * f**q for f, d in zip(F, delta, strict=True))
    step = sum(f**q * d for f, d in zip(F, delta, strict=True)) / h
    for name, value in next_state.parameters.items():
        np.testing.assert_allclose(value - start[name], -float(step[0]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [fs.Scaffold, fs.FedDyn, fs.FedDC])
def test_private_clients_have_separate_penalties(kind: type[fs.TrainsLocally]) -> None:
    method = kind(**LOCAL)
    exact = fs.PrivacySettings(noise_multiplier=1e-9, sample_rate=1.0, clip=1e3)
    ctx = context(clients=3, privacy=exact)
    ones = {name: torch.ones_like(value) for name, value in LINEAR.state_dict().items()}
    client_states = [{name: 0.3 * (k - 1) * one for name, one in ones.items()} for k in range(3)]
    clients = private_clients(method, ctx, DATA, BLOCKS[:3])
    together = [u.parameters for u in client_uploads(method, ctx, clients, client_states)]
    for k in range(3):
        single_client = private_clients(method, ctx, DATA, [BLOCKS[k]])
        (single,) = client_uploads(method, ctx, single_client, [client_states[k]])
        torch.testing.assert_close(together[k], single.parameters, atol=1e-4, rtol=1e-4)
    first, _, last = (flatten_named(model, LINEAR) for model in together)
    assert float((first - last).norm()) > 0.1


def random_uploads(network: nn.Module, count: int, seed: int = 0) -> dict[int, fs.ModelParameters]:
    """Returns clients' networks near this one, with weights that rules must ignore."""
    draws = torch.Generator().manual_seed(seed)
    uploads = {}
    for client in range(count):
        parameters = dict(network.state_dict())
        for name, value in parameters.items():
            noise = torch.randn(value.shape, generator=draws)
            parameters[name] = value + (noise if value.is_floating_point() else 10 * (client + 1))
        uploads[client] = fs.ModelParameters(parameters, 10.0**client)
    return uploads


def expected_aggregate(rule: str, rows: Array, center: Array, percent: int) -> Array:
    if rule == "median":
        return np.asarray(np.median(rows, axis=0))
    if rule == "trimmed":
        cut = min((len(rows) - 1) // 2, -(-percent * len(rows) // 100))
        return np.asarray(np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0))
    offsets = rows - center
    norms = np.sqrt((offsets**2).sum(axis=1))
    scales = np.minimum(1, np.median(norms) / norms)
    return np.asarray(center + (offsets * scales[:, None]).mean(axis=0))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(0, 9), st.integers(0, 49))
@example(100, 0, 7)  # of 0.07 · 100, which is 7.000000000000001, the ceiling would be 8
def test_robust_rules_equal_numpy(count: int, seed: int, percent: int) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    uploads, start = random_uploads(network, count, seed), network.state_dict()
    trained = [name for name, _ in network.named_parameters()]

    def flat(parameters: Mapping[str, Tensor], names: Sequence[str]) -> Array:
        return np.concatenate([parameters[n].double().numpy().ravel() for n in names])

    for rule in ("median", "trimmed", "clip"):
        context = round_context(network=network, robust=rule, robust_share=percent / 100)
        with patch.object(robust, "BLOCK", 2 * count if seed % 2 else robust.BLOCK):
            aggregated = robust.robust_uploads(uploads, start, context)
        assert list(aggregated) == list(uploads)
        assert all(u is aggregated[0] for u in aggregated.values())
        assert aggregated[0].weight == 1.0
        buffer_rule = "median" if rule == "clip" else rule
        for names, kind in ((trained, rule), (["1.running_mean", "1.running_var"], buffer_rule)):
            rows = np.stack([flat(u.parameters, names) for u in uploads.values()])
            expected = expected_aggregate(kind, rows, flat(start, names), percent)
            actual = flat(aggregated[0].parameters, names)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
        assert int(aggregated[0].parameters["1.num_batches_tracked"]) == 10 * ((count - 1) // 2 + 1)


def test_rules_apply_to_all_parts_of_uploads() -> None:
    network = nn.Linear(2, 1)
    start = network.state_dict()
    control = [torch.full((1, 2), x) for x in (1.0, 2.0, 3.0, 4.0, 1e9)]
    bias = torch.zeros(1)
    uploads = {k: ControlUp(start, 1.0, {"weight": c, "bias": bias}) for k, c in enumerate(control)}
    context = round_context(network=network, clients=5, robust="median")
    aggregated: Any = robust.robust_uploads(uploads, start, context)[4]
    assert aggregated.control_change["weight"].tolist() == [[3.0, 3.0]]
    state = fs.Scaffold().server_step(ControlState(start), uploads, context)
    assert isinstance(state, ControlState)
    assert state.control["weight"].tolist() == [[3.0, 3.0]]  # 5 of 5 clients: their rule's mean
    norms = {k: NormalisedModel(start, 1.0, norm) for k, norm in enumerate((1.0, 2.0, 1e9))}
    assert robust.robust_uploads(norms, start, context)[0].norm == 2.0
    models, all_models = random_uploads(network, 5), AveragingState(start)
    for name, value in robust.update_cache(all_models, all_models, models, context).overall.items():
        values = np.stack([u.parameters[name].double().numpy() for u in models.values()])
        np.testing.assert_allclose(value.numpy(), np.median(values, axis=0), rtol=1e-5)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_averaging_needs_memory_of_one_tensor() -> None:
    """Stacking fifty uploads would need fifty times the client state."""
    network = nn.Linear(20, 10)
    network.register_buffer("batches", torch.tensor(3))
    uploads = random_uploads(network, 50)
    with _LargestTensor() as largest:
        averaged = robust.average(uploads)
    assert largest.bytes == 8 * 200  # in float64
    assert averaged["batches"] == uploads[0].parameters["batches"]
    start = AveragingState(network.state_dict())
    with _LargestTensor() as largest:
        robust.update_cache(start, start, uploads, round_context(network=network, clients=50))
    assert largest.bytes == 4 * 50 * 200  # the cache itself, in its precision


@pytest.mark.parametrize("name", by_family(METHODS))
def test_methods_support_or_refuse_robust_rules(name: str) -> None:
    sections = quick_sections(name, run={"rounds": 1, "robust": "clip"})
    if method_class(name).robust_refusal:
        with raises(SettingError, "run.robust"):
            fs.resolve(sections)
        return
    result = fs.simulate(fs.resolve(sections))
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())
