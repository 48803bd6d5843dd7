"""FedFM, FPL, FedSR, FedGen, FedFA+ and FedSum: rounds against NumPy, sums, losses and private releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import (
    CCVR,
    FPL,
    FedAvg,
    FedFM,
    FedFMLite,
    FedGen,
    FedSR,
    PrivacySettings,
    RoundContext,
    errors,
    resolve,
    simulate,
)
from fedsynth.core.client import ExactClientView
from fedsynth.core.sums import summed
from fedsynth.data.images import normalise
from fedsynth.errors import SettingError
from fedsynth.federation.server import Server
from fedsynth.methods.ccvr import MOMENTS, moment_rows
from fedsynth.methods.feddm import FedDM
from fedsynth.methods.fedfa_plus import FedFAPlus, StatisticsUp
from fedsynth.methods.fedfm import COUNT_DEVIATIONS, FeatureSums, anchor_losses
from fedsynth.methods.fedgen import DECAY, POOL, GeneratorDown
from fedsynth.methods.fedkf import FedKF
from fedsynth.methods.fedsum import CondensedState, FedSum, NetworkSums
from fedsynth.methods.fpl import first_partition, last_partition, prototype_losses
from fedsynth.methods.shared.class_sums import COUNTS, IMAGES, ModelAndSums
from fedsynth.methods.shared.condensing import perturbed
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import Linear
from fedsynth.privacy import Ledger, Release, epsilon
from fedsynth.privacy.dpsgd import cross_entropies
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.distillation.generator import LatentGenerator
from fedsynth.training import feature_statistics as fs
from fedsynth.training.loop import load_tensors
from tests import digits as setup
from tests.digits import CPU, SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.methods import tiny_problem as tiny
from tests.methods.tiny_problem import ALL, FULL, LABELS, PARTS, SIZES, START, Array, X, descend
from tests.privacy.support import HOSTILE, guard
from tests.quick_runs import quick_sections
from tests.raising import raises
from tests.rounds import play_round, take_step


def run_rounds(method: Any, device: Any = CPU, active: Any = (ALL, ALL)) -> tuple[list[Array], Any]:
    models, state, _ = tiny.run_rounds(method, tiny.TwoLayers, device, active)
    return [tiny.flat(model) for model in models], state


def assert_close(actual: Sequence[Array], expected: Sequence[Array]) -> None:
    np.testing.assert_allclose(actual, expected, atol=5e-5)
    assert np.abs(expected[-1] - START).max() > 0.01  # training has moved the weights


def fit(w: Array, k: int, anchors: Array | None = None, kind: str = "contrastive") -> Array:
    x, y = X[PARTS[k]], LABELS[PARTS[k]]

    def loss(v: Array) -> float:
        plain = tiny.cross_entropy(v, x, y)
        if anchors is None:
            return plain
        f, a = unit(tiny.embeddings(v, x)), unit(anchors)
        contrastive, l2 = tiny.label_losses(f @ a.T / 0.4, y), (f - a[y]) ** 2
        anchor_loss = contrastive if kind == "contrastive" else l2
        return plain + 0.7 * float(anchor_loss.mean())

    return descend(w, loss)


def class_means(models: dict[int, Array], previous: Array | None = None) -> Array:
    f = np.concatenate([tiny.embeddings(w, X[PARTS[k]]) for k, w in models.items()])
    y = np.concatenate([LABELS[PARTS[k]] for k in models])
    anchors = np.zeros((3, 3)) if previous is None else previous.copy()
    for c in np.unique(y):
        anchors[c] = f[y == c].mean(axis=0)
    return anchors


@pytest.mark.parametrize("kind", ["contrastive", "l2"])
def test_two_fedfm_rounds_equal_numpy(kind: str, device: torch.device) -> None:
    """Client 0 lacks class 2, whose anchor stays. Round 1 of FedFM-lite is FedAvg."""
    settings = {**FULL, "weight": 0.7, "matching": kind, "temperature": 0.4}
    w, expected, anchors = START, [], None
    for ids in (ALL, (0,)):
        anchors = class_means(dict.fromkeys(ids, w), anchors)
        models = [fit(w, k, anchors, kind) for k in ids]
        w = np.average(models, axis=0, weights=[SIZES[k] for k in ids])
        expected.append(w)
    actual, state = run_rounds(FedFM(**settings), device, (ALL, (0,)))
    assert_close(actual, expected)
    np.testing.assert_allclose(state.anchors.cpu().numpy(), anchors, atol=1e-5)
    models = [fit(START, k) for k in ALL]
    first = np.average(models, axis=0, weights=SIZES)
    anchors = class_means(dict(enumerate(models)))
    second = np.average([fit(first, k, anchors, kind) for k in ALL], axis=0, weights=SIZES)
    assert_close(run_rounds(FedFMLite(**settings), device)[0], [first, second])


def test_anchor_losses_ignore_classes_without_anchor(device: torch.device) -> None:
    f = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    has_anchor = torch.tensor([True, False, True], device=device)
    anchors, y = torch.eye(3, device=device), torch.tensor([0, 1, 2, 1], device=device)
    for temperature in (None, 0.1):
        q = anchor_losses(f, y, anchors, has_anchor, temperature=temperature)
        assert q[1] == q[3] == 0
        (gradient,) = torch.autograd.grad(q.sum(), f)
        assert gradient.isfinite().all()
        assert gradient[[1, 3]].abs().sum() == 0
    unit = (f / f.norm(dim=1, keepdim=True)).detach().cpu().numpy()
    z = unit[0, [0, 2]] / 0.1  # only the classes with anchors compete
    expected = -np.log(np.exp(z[0]) / np.exp(z).sum())
    np.testing.assert_allclose(float(q[0].detach()), expected, rtol=1e-4)


def unit(rows: Array) -> Array:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def numpy_prototype_loss(f: Array, y: int, prototypes: list[Array]) -> float:
    """0.7·L_CPCL + 0.3·L_UPCR of one embedding; each class has the rows of its clusters."""
    exponentials = [np.exp(unit(rows) @ unit(f) / 0.4).sum() for rows in prototypes]
    distance = ((f - prototypes[y].mean(axis=0)) ** 2).mean()
    return float(-0.7 * np.log(exponentials[y] / sum(exponentials)) + 0.3 * distance)


def test_two_fpl_rounds_equal_numpy(device: torch.device) -> None:
    """Round 1 is FedAvg. Client 0 lacks class 2; at most three clients form a single cluster."""
    first_models = [fit(START, k) for k in ALL]
    first = np.average(first_models, axis=0, weights=SIZES)
    means = [class_means({k: w}) for k, w in enumerate(first_models)]
    prototypes = [
        np.mean([means[k][c] for k in ALL if c in LABELS[PARTS[k]]], axis=0)[None] for c in range(3)
    ]

    def loss(w: Array, k: int) -> float:
        x, y = X[PARTS[k]], LABELS[PARTS[k]]
        losses = map(partial(numpy_prototype_loss, prototypes=prototypes), tiny.embeddings(w, x), y)
        return tiny.cross_entropy(w, x, y) + float(np.mean(list(losses)))

    models = [descend(first, partial(loss, k=k)) for k in ALL]
    second = np.average(models, axis=0, weights=SIZES)
    weights = {"contrastive_weight": 0.7, "consistency_weight": 0.3, "temperature": 0.4}
    assert_close(run_rounds(FPL(**FULL, **weights), device)[0], [first, second])
    plain = FPL(**FULL, contrastive_weight=0.0, consistency_weight=0.0)
    assert_close(run_rounds(plain, device)[0], run_rounds(FedAvg(**FULL), device)[0])


def test_fpl_losses_depend_only_on_the_example(device: torch.device) -> None:
    """Class 1 has no prototype, and class 0 has two; a loss with batch statistics would fail."""
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    y = torch.tensor([0, 1, 2, 2, 0, 1], device=device)
    prototypes = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(device)
    clusters = [prototypes[:2], prototypes[:0], prototypes[2:]]
    unbiased = torch.stack([rows.sum(dim=0) / max(1, len(rows)) for rows in clusters])
    classes = torch.tensor([0, 0, 2], device=device)

    def losses(rows: Tensor, labels: Tensor) -> Tensor:
        contrastive, distance = prototype_losses(rows, labels, prototypes, classes, unbiased, 0.4)
        return 0.7 * contrastive + 0.3 * distance

    together = losses(z, y)
    (gradient,) = torch.autograd.grad(together.sum(), z)
    assert gradient.isfinite().all()
    assert gradient[y == 1].abs().sum() == together[y == 1].abs().sum() == 0
    arrays = [rows.cpu().double().numpy() for rows in clusters]
    for i in (0, 2, 3, 4):
        torch.testing.assert_close(losses(z[i : i + 1], y[i : i + 1])[0], together[i])
        expected = numpy_prototype_loss(z[i].detach().cpu().double().numpy(), int(y[i]), arrays)
        assert float(together[i].detach()) == pytest.approx(expected, rel=1e-5)


def closure_of_first_neighbours(rows: Array) -> npt.NDArray[np.int64]:
    """Rows are adjacent if one is the other's first neighbour or both have the same one."""
    count = len(rows)
    first = [max((j for j in range(count) if j != i), key=row.__getitem__, default=i)
             for i, row in enumerate((unit(rows) @ unit(rows).T).tolist())]  # fmt: skip
    adjacent = [
        [i == j or j == first[i] or i == first[j] or first[i] == first[j] for j in range(count)]
        for i in range(count)
    ]
    connected = np.linalg.matrix_power(np.array(adjacent, dtype=float), count) > 0
    return np.unique(connected.argmax(axis=1), return_inverse=True)[1]


@given(st.integers(0, 99), st.integers(1, 20))
def test_partitions_are_closures_of_first_neighbours(seed: int, count: int) -> None:
    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = closure_of_first_neighbours(rows.numpy())
    assert first_partition(rows).tolist() == expected.tolist()
    while True:
        groups = [rows.numpy()[expected == c].mean(axis=0) for c in range(max(expected) + 1)]
        coarser = closure_of_first_neighbours(np.stack(groups))
        if not coarser.any():
            break
        expected = coarser[expected]
    assert last_partition(rows).tolist() == expected.tolist()


def test_fpl_clusters_prototypes_with_counts_above_the_noise() -> None:
    """Two pairs of clients agree; the fifth has too few examples for the noise of its count."""
    privacy, sigma = PrivacySettings(noise_multiplier=1.0), 3.0
    ctx = round_context(privacy, noise={COUNTS: sigma}, clients=5)
    method, weights = FPL(), convnet().state_dict()
    counts, sums = torch.zeros(5, 10), torch.zeros(5, 10, 16)
    counts[:, 4] = torch.tensor([7.0, 70.0, 7.0, 10.0, 5.9])
    sums[range(5), 4, [0, 0, 1, 1, 2]] = torch.tensor([7.0, 210.0, 14.0, 60.0, 1e6])
    uploads = {k: ModelAndSums(weights, 1.0, sums[k], counts[k]) for k in range(5)}
    state: Any = method.server_step(method.initial_state(weights), uploads, ctx)
    torch.testing.assert_close(state.prototypes, torch.eye(16)[:2] * torch.tensor([[2.0], [4.0]]))
    assert state.classes.tolist() == [4, 4]
    request = method.broadcast(state, ctx)
    method.check_request(request, ctx)
    for wrong, code in (
        (state.classes + 6, "request.classes"),
        (state.classes[:1], "request.tensor"),
    ):
        with raises(errors.RequestRefusedError, code):
            method.check_request(replace(request, classes=wrong), ctx)
    state = method.server_step(state, {4: uploads[4]}, ctx)
    assert state.prototypes.shape == (0, 16)


def extended(method: FedSR) -> nn.Module:
    network = tiny.TwoLayers()
    with forked_rng(0, "added layers"):
        return method.add_layers(network, tiny.SPEC)


def test_two_fedsr_rounds_equal_plain_torch(device: torch.device) -> None:
    method = FedSR(**FULL, alpha=0.2, beta=0.1)
    names, start = zip(*extended(method).to(device).state_dict().items(), strict=True)
    assert len(names) == 6  # the last are V, v and r
    w_t, expected = list(start), []
    for number in (1, 2):
        models = []
        for k in ALL:
            order = torch_generator(0, "local training", number, k)
            noise = torch_generator(0, "fedsr", number, k, device=device)
            w = [value.clone().requires_grad_() for value in w_t]
            for _ in range(3):
                batch = PARTS[k][torch.randperm(len(PARTS[k]), generator=order)].numpy()
                x = torch.tensor(X[batch], dtype=torch.float32, device=device)
                y = torch.tensor(LABELS[batch], device=device)
                A, W, b, V, v, r = w
                mu = x @ A.T
                sigma = torch.log1p((mu @ V.T + v).exp())
                mean, deviation = r[y, :3], torch.log1p(r[y, 3:].exp())
                z = mu + sigma * torch.randn(mu.shape, generator=noise, device=device)
                kl = (deviation / sigma).log() - 0.5
                kl = kl + (sigma**2 + (mu - mean) ** 2) / (2 * deviation**2)
                penalty = 0.2 * (z**2).sum(dim=1).sqrt() + 0.1 * kl.sum(dim=1)
                loss = F.cross_entropy(z @ W.T + b, y) + penalty.mean()
                steps = torch.autograd.grad(loss, w)
                w = [(p - 0.5 * g).detach().requires_grad_() for p, g in zip(w, steps, strict=True)]
            models.append(w)
        shares = torch.tensor(SIZES, device=device) / 9
        w_t = [torch.stack(p, dim=-1).detach() @ shares for p in zip(*models, strict=True)]
        expected.append(dict(zip(names, w_t, strict=True)))
    models, *_ = tiny.run_rounds(method, partial(extended, method), device)
    for model, values in zip(models, expected, strict=True):
        for name, value in tiny.as_arrays(values).items():
            np.testing.assert_allclose(model[name], value, atol=5e-5, err_msg=name)
    plain = FedSR(**FULL, alpha=0.0, beta=0.0, sample=False)
    models, *_ = tiny.run_rounds(plain, partial(extended, plain), device)
    assert_close(list(map(tiny.flat, models)), run_rounds(FedAvg(**FULL), device)[0])


def test_private_fedsr_losses_depend_only_on_the_example() -> None:
    """The examples of a step share the noise. With noise for each row, rows would differ."""
    method = FedSR()
    network = extended(method)
    ctx = replace(tiny.context(1, network=network), privacy=PrivacySettings(noise_multiplier=1.0))
    task = method.task(
        0, method.broadcast(method.initial_state(network.state_dict()), ctx), {}, ctx
    )
    x, y = torch.tensor(X, dtype=torch.float32), torch.tensor(LABELS)
    assert task.loss is not None
    assert task.before_step is not None
    without = task.loss(network, x, y)
    task.before_step(network)
    together = task.loss(network, x, y)
    separate = torch.cat([task.loss(network, x[i : i + 1], y[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(separate, together)
    assert not torch.isclose(together, without).any()  # the step has new noise


def latent_generator() -> LatentGenerator:
    with forked_rng(0, "latent generator initialisation"):
        return LatentGenerator(3, 3)


def guided_loss(w: Array, x: Array, y: Array, target: Array, z_g: Array, y_g: Any) -> float:
    p = tiny.softmax(tiny.logits(w, tiny.embeddings(w, x)))
    kl = -(target * np.log(p)).sum(1).mean()  # and a constant
    ce = tiny.label_losses(tiny.logits(w, z_g), y_g).mean()
    return tiny.cross_entropy(w, x, y) + DECAY * float(0.8 * kl + 0.5 * ce)


def test_second_fedgen_round_equals_numpy(device: torch.device) -> None:
    """Adds α·CE on the generator's embeddings and β·KL to its averaged answers, times 0.98."""
    method = FedGen(**FULL, alpha=0.5, beta=0.8, generator_steps=3, generator_batch=4)
    (start,), state = run_rounds(method, device, (ALL,))
    ctx = tiny.context(2, device)
    message = method.broadcast(state, ctx)
    assert isinstance(message, GeneratorDown)
    assert message.seen_classes.all()
    generator = latent_generator().to(device)
    load_tensors({"generator": generator}, message.generator)
    generator.eval()

    def generate(labels: Tensor, draws: torch.Generator) -> Array:
        noise = torch.randn(len(labels), 32, generator=draws, device=device)
        with torch.no_grad():
            return generator(labels, noise).cpu().double().numpy()  # type: ignore[no-any-return]

    results = method.client_step(message, tiny.clients(device), [{}, {}, {}], ctx)
    for k, (upload, _) in enumerate(results):
        pool_labels = torch.arange(3, device=device).repeat_interleave(POOL)
        pool = generate(pool_labels, torch_generator(0, "fedgen pool", 2, k, device=device))
        draws = torch_generator(0, "fedgen embeddings", 2, k, device=device)
        x, y, w = X[PARTS[k]], LABELS[PARTS[k]], start
        for _ in range(3):
            target = tiny.softmax(tiny.logits(w, pool)).reshape(3, POOL, 3).mean(1)[y]
            even = torch.ones(3, device=device)
            y_g = torch.multinomial(even, 4, replacement=True, generator=draws)
            z_g = generate(y_g, draws)
            step = partial(guided_loss, x=x, y=y, target=target, z_g=z_g, y_g=y_g.cpu().numpy())
            w = descend(w, step, steps=1)
        actual = tiny.flat(tiny.as_arrays(upload.parameters))  # type: ignore[attr-defined]
        np.testing.assert_allclose(actual, w, atol=5e-5)
        assert upload.counts.tolist() == np.bincount(y, minlength=3).tolist()  # type: ignore[attr-defined]


def test_fedgen_generator_training_equals_plain_torch(device: torch.device) -> None:
    """Over two rounds with the same uploads, Adam continues at a decreasing rate."""
    method = FedGen(**FULL, generator_steps=4, generator_batch=8)
    ctx = tiny.context(1, device)
    state: Any = method.initial_state(ctx.architecture.to(device).state_dict())
    clients = tiny.clients(device)
    results = method.client_step(method.broadcast(state, ctx), clients, [{}] * 3, ctx)
    uploads: Any = {k: upload for k, (upload, _) in enumerate(results)}
    generator = latent_generator().to(device)
    adam = torch.optim.Adam(generator.parameters(), 3e-4, weight_decay=1e-2)
    counts = torch.stack([upload.counts for upload in uploads.values()]).float()
    for number in (1, 2):
        state = method.server_step(state, uploads, tiny.context(number, device))
        draws = torch_generator(0, "fedgen training", number, device=device)
        for _ in range(4):
            even = torch.ones(3, device=device)
            y = torch.multinomial(even, 8, replacement=True, generator=draws)
            noise = torch.randn(8, 32, generator=draws, device=device)
            drawn = generator(y, noise)
            distances = (drawn[:, None] - drawn[None]).abs().mean(2)
            total = (-(noise[:, None] - noise[None]).square().mean(2) * distances).mean().exp()
            for k, upload in uploads.items():
                weight, bias = (upload.parameters[f"classifier.{n}"] for n in ("weight", "bias"))
                losses = F.cross_entropy(drawn @ weight.T + bias, y, reduction="none")
                total = total + ((counts[k] / counts.sum(0)).to(device)[y] * losses).mean()
            take_step(adam, total)
        adam.param_groups[0]["lr"] *= DECAY
    for name, value in generator.state_dict().items():
        torch.testing.assert_close(state.learner["generator." + name], value, atol=1e-5, rtol=1e-3)


def test_fedgen_losses_do_not_depend_on_the_batch() -> None:
    """DP-SGD needs this, also after other calls. Client 0 lacks class 2."""
    method = FedGen(**FULL, generator_steps=2)
    _, state = run_rounds(method, active=((0,),))
    assert state.seen_classes.tolist() == [True, True, False]
    ctx = tiny.context(2)
    task = method.task(0, method.broadcast(state, ctx), {}, ctx)
    assert task.loss is not None
    x = torch.tensor(X, dtype=torch.float32).view(9, 1, 2, 2)
    net, y = tiny.TwoLayers(), torch.tensor(LABELS)
    together, plain = task.loss(net, x, y), cross_entropies(net, x, y)
    separate = torch.stack([task.loss(net, x[i : i + 1], y[i : i + 1])[0] for i in (4, 0)])
    torch.testing.assert_close(separate, together[[4, 0]])
    torch.testing.assert_close(together[y == 2], plain[y == 2])
    assert not torch.isclose(together[y != 2], plain[y != 2]).any()
    assert run_rounds(method, active=((0,), (2,)))[1].seen_classes.all()


def test_anchors_need_counts_above_the_noise_floor() -> None:
    """The floor is four deviations of K clients' noise; below it a released anchor stays."""
    method, sigma = FedFM(anchor_noise=2.0), 3.0
    privacy, noise = PrivacySettings(noise_multiplier=sigma), {COUNTS: 2.0 * sigma}
    initial = method.initial_state(convnet().state_dict())
    first_class = [True] + [False] * 9
    zero_sums = FeatureSums(torch.zeros(10, 16), torch.zeros(10))
    for k in (1, 9):
        ctx = round_context(privacy, noise=noise, clients=k)
        floor = COUNT_DEVIATIONS * 2.0 * sigma * k**0.5
        counts = torch.zeros(10)
        counts[:3] = torch.tensor([floor * 1.01, floor * 0.99, -floor]) / k
        uploads = {i: FeatureSums(torch.ones(10, 16), counts) for i in range(k)}
        aggregated: Any = method.first_aggregate(initial, uploads, ctx)
        assert aggregated.has_anchor.tolist() == first_class
        torch.testing.assert_close(aggregated.anchors[0], torch.full((16,), 1 / (floor * 1.01 / k)))
        next_state: Any = method.first_aggregate(aggregated, {0: zero_sums}, replace(ctx, round=2))
        assert next_state.has_anchor.tolist() == first_class
        assert torch.equal(next_state.anchors[0], aggregated.anchors[0])
    single = FeatureSums(torch.ones(10, 16), torch.eye(10)[0])
    exact: Any = method.first_aggregate(initial, {0: single}, round_context(clients=1))
    assert exact.has_anchor.tolist() == first_class


def test_modulation_and_histograms_equal_numpy(device: torch.device) -> None:
    stats = np.random.default_rng(1).normal(size=(4, 6)) * np.linspace(0.1, 3, 6)
    v = stats.var(0) + 1e-6
    weight = 1 / (1 + 1 / v)
    modulation = fs.modulation(torch.tensor(stats, device=device)).cpu().numpy()
    np.testing.assert_allclose(modulation, 6 * weight / weight.sum())
    z = np.random.default_rng(2).normal(size=(50, 3))
    soft = fs.soft_histogram(torch.tensor(z, device=device), 5, 0.1).cpu().numpy()
    s, cuts = 1 / (1 + np.exp(-z)), np.arange(5) / 5
    logits = (s[..., None] * np.arange(1, 6) - cuts.cumsum()) / 0.1
    shares = tiny.softmax(logits.reshape(150, 5)).reshape(50, 3, 5)
    np.testing.assert_allclose(soft, shares.mean(0))
    hard = fs.soft_histogram(torch.tensor(z), 5, 1e-6).numpy()
    expected = np.stack([np.histogram(s[:, d], bins=5, range=(0, 1))[0] / 50 for d in range(3)])
    np.testing.assert_allclose(hard, expected, atol=1e-6)
    p, q = expected + 0.1, soft + 0.1
    expected_divergence = ((p - q) * np.log(p / q)).sum(1).mean() / 2
    divergence = fs.symmetric_divergence(torch.tensor(p), torch.tensor(q))
    np.testing.assert_allclose(float(divergence), expected_divergence)


def test_two_fedfa_plus_rounds_equal_plain_torch() -> None:
    """The statistics and histograms of two clients give γ and π. CPU only (TF32)."""
    parts = [torch.arange(3), torch.arange(3, 8)]
    clients = ExactClientView([0, 1], digits(np.arange(8)), parts)
    settings = {**FULL, "lr": 0.05, "probability": 1.0, "align_weight": 0.5}
    method = FedFAPlus(**settings, bins=4, bin_temperature=0.1)
    server, client_states = Server(method, dict(convnet().state_dict())), dict[int, Any]()
    for number in (1, 2):
        ctx = round_context(None, number, nominal=4.0, clients=2)
        uploads = play_round(server, [clients], client_states, ctx)
        assert all(type(u) is StatisticsUp for u in uploads.values())
    net, pi = convnet(), None
    gammas: Any = [[1.0, 1.0], [1.0, 1.0]]
    ema: Any = [[[None, None], [None, None]] for _ in parts]
    for number in (1, 2):
        models, histograms = [], []
        for k, part in enumerate(parts):
            client_model = convnet(weights=net.state_dict())
            noise = torch_generator(0, "augmentation", number, k)
            sgd = torch.optim.SGD(client_model.parameters(), 0.05)
            order = torch_generator(0, "local training", number, k)
            for _ in range(3):
                batch = part[torch.randperm(len(part), generator=order)]
                h, y = clients.images(batch), clients.labels(batch)
                for stage in range(2):
                    h = client_model.features[4 * stage : 4 * stage + 4](h)
                    statistics = [h.mean((2, 3)), (h.var((2, 3), correction=0) + 1e-6).sqrt()]
                    new = []
                    for i, s in enumerate(statistics):
                        old, mean = ema[k][stage][i], s.detach().mean(0)
                        ema[k][stage][i] = mean if old is None else 0.99 * old + 0.01 * mean
                        wide = (gammas[stage][i] + 1) * (s.var(0, correction=0) + 1e-6)
                        new.append(s + torch.randn(s.shape, generator=noise) * wide.sqrt())
                    h = (h - statistics[0][..., None, None]) / statistics[1][..., None, None]
                    h = h * new[1][..., None, None] + new[0][..., None, None]
                total = F.cross_entropy(client_model.classifier(h.flatten(1)), y)
                if pi is not None:
                    soft = fs.soft_histogram(h.flatten(1), 4, 0.1)
                    total = total + 0.5 * fs.symmetric_divergence(soft, pi)
                take_step(sgd, total)
            models.append(client_model.state_dict())
            with torch.no_grad():
                h = client_model.embed(clients.images(part))
                histograms.append(fs.soft_histogram(h, 4, 0.1))
        pi = torch.stack(histograms).mean(0)
        for stage in (0, 1):
            for i in (0, 1):
                gammas[stage][i] = fs.modulation(torch.stack([ema[k][stage][i] for k in (0, 1)]))
        a, b = models
        net = convnet(weights={name: (a[name] + b[name]) / 2 for name in a})
    state: Any = server.state
    parameters = torch.cat([state.parameters[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(parameters, flatten(net), atol=1e-4, rtol=1e-3)
    stage_names = {f"{s}.features.{m}" for s in ("mean", "std") for m in (3, 7)}
    assert set(state.statistics) == {"histogram", *stage_names}


@pytest.mark.parametrize("name", ["convnet", "lenet5", "resnet8", "densenet100", "swin-t"])
def test_stages_are_feature_maps_open_to_augmentation(name: str) -> None:
    """Hooks are removed, also after an error."""
    settings = ModelSettings(name, width=4, norm="", projection=5 if name == "lenet5" else 0)
    net: Any = build_model(settings, (3, 64, 64), 10, 0).eval().requires_grad_(False)
    outputs: dict[str, Tensor] = {}
    layers: Any = {s: (lambda out, s=s: outputs.setdefault(s, out) * 2) for s in net.stage_names}
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    plain = net.embed(x)
    with fs.augmented(net, layers):
        assert not torch.allclose(plain, net.embed(x))
    with pytest.raises(RuntimeError), fs.augmented(net, layers):
        raise RuntimeError
    torch.testing.assert_close(net.embed(x), plain)
    assert set(outputs) == set(net.stage_names)
    assert all(out.dim() == 4 and out.shape[2] == out.shape[3] for out in outputs.values())


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_ccvr_rounds_equal_numpy(covariance: str, device: torch.device) -> None:
    """From each client's counts, means and covariances, as in the paper. Client 0 lacks class 2."""
    method = CCVR(**FULL, virtual=5, covariance=covariance, calibration_epochs=3)
    w, states = np.average([fit(START, k) for k in ALL], axis=0, weights=SIZES), dict[int, Any]()
    server = Server(method, {n: v.to(device) for n, v in tiny.TwoLayers().state_dict().items()})
    draws, virtual = torch_generator(0, "virtual features", 2), []
    for c in range(3):
        groups = [tiny.embeddings(w, X[p.numpy()[LABELS[p] == c]]) for p in PARTS]
        groups = [f for f in groups if len(f)]
        N = sum(map(len, groups))
        mean = sum(len(f) / N * f.mean(0) for f in groups)
        total = -N / (N - 1) * np.outer(mean, mean)
        for f in groups:
            scatter = (f - f.mean(0)).T @ (f - f.mean(0))  # (N_ck − 1)·Σ_ck
            total += (scatter + len(f) * np.outer(f.mean(0), f.mean(0))) / (N - 1)
        if covariance == "diagonal":
            total = np.diag(np.diag(total))
        values, vectors = np.linalg.eigh(total)
        root = vectors * np.sqrt(values.clip(0)) @ vectors.T
        virtual.append(
            mean + torch.randn(5, 3, generator=draws, dtype=torch.float64).numpy() @ root
        )
    g, y = torch.tensor(np.concatenate(virtual)), torch.arange(3).repeat_interleave(5)
    layer, shuffle = tiny.TwoLayers().classifier.double(), torch_generator(0, "calibration", 2)
    layer.weight.data, layer.bias.data = torch.tensor(w[12:21]).view(3, 3), torch.tensor(w[21:])
    sgd = torch.optim.SGD(layer.parameters(), 0.01, momentum=0.9)
    for part in [p for _ in range(3) for p in torch.randperm(15, generator=shuffle).split(10)]:
        take_step(sgd, F.cross_entropy(layer(g[part]), y[part]))
    for number in (1, 2):
        ctx = replace(tiny.context(number, device), rounds=2)
        uploads: Any = play_round(server, [tiny.clients(device)], states, ctx)
    actual = tiny.as_arrays(server.state.parameters)
    np.testing.assert_allclose(actual["body.weight"].ravel(), w[:12], atol=5e-5)
    expected = layer.weight.detach().numpy()
    np.testing.assert_allclose(actual["classifier.weight"], expected, atol=5e-4)
    np.testing.assert_allclose(actual["classifier.bias"], layer.bias.detach().numpy(), atol=5e-4)
    assert uploads[0].parameters == {}
    assert uploads[0].moments.shape == (3, 7 if covariance == "diagonal" else 10)


def test_ccvr_without_virtual_features_equals_fedavg() -> None:
    results = [run_rounds(m(**FULL, **v)) for m, v in ((CCVR, {"virtual": 0}), (FedAvg, {}))]
    assert_close(results[0][0], results[1][0])


FEATURES = st.lists(st.sampled_from(HOSTILE), min_size=4, max_size=4)


@pytest.mark.parametrize("diagonal", [False, True])
@given(features=FEATURES)
def test_class_moments_are_within_their_clip_and_count_one(
    diagonal: bool, features: list[float]
) -> None:
    """Without the clip of features, the mechanism would scale the whole vector down, and a record
    with large features would count less than one. A clip of z alone gives norms of up to √3."""
    f = torch.tensor([features, [1.0, -2.0, 2.0, 4.0]])
    u = moment_rows(f, diagonal=diagonal, clip=2.0)
    assert float(u.norm(dim=1).max()) <= 1 + 1e-12
    assert u[:, -1].tolist() == [0.5, 0.5]  # the last coordinate is half a count
    if not diagonal:
        torch.testing.assert_close(u[1].norm(), torch.ones(()).double())  # the bound is reached
    unclipped = moment_rows(f[1:], diagonal=diagonal, clip=None)
    assert float(unclipped.norm()) > 9


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_private_ccvr_finds_gaussians_of_clipped_features(covariance: str) -> None:
    method, data = CCVR(covariance=covariance, feature_clip=2.0), digits(np.arange(300) % 10)
    ctx = context(PrivacySettings(noise_multiplier=1e-7), noise={MOMENTS: 2e-7})
    (upload,) = client_uploads(method, ctx, private_clients(method, ctx, data))
    f = convnet().eval().embed(normalise(data.images[::10], SPEC)).detach()
    norms = f.norm(dim=1, keepdim=True)
    assert norms.min() < 2 < norms.max()
    f = f * (2 / norms).clamp_max(1)
    moments = upload.moments[0].double()
    mean, root = method.gaussian(moments, 2e-7, ctx)  # type: ignore[misc]
    torch.testing.assert_close(mean.float(), f.mean(0), atol=1e-4, rtol=1e-3)
    expected = f.T.cov() if covariance == "full" else f.T.cov().diag().diag()
    torch.testing.assert_close((root @ root).float(), expected, atol=1e-3, rtol=1e-2)
    # noise hides all variances, but not their sum
    mean, root = method.gaussian(moments, 3.7, ctx)  # type: ignore[misc]
    torch.testing.assert_close(root, root[0, 0] * torch.eye(16).double(), atol=1e-8, rtol=0)
    bias = (2 * 2 * 3.7 / 30) ** 2 / 2 * 16  # of the noise of the mean
    variance = float(f.T.cov().trace()) + bias * 30 / 29
    assert float(root.square().sum()) == pytest.approx(variance, rel=1e-3)
    assert method.gaussian(moments, 3.8, ctx) is None  # 30 examples, and a floor of 30.4


def test_unsupported_models_and_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="stage_names"):
        FedFAPlus().check_model(Linear((1, 2, 2), 3))
    FedFAPlus(parts="alignment").check_model(Linear((1, 2, 2), 3))
    for method in (FedFM(), FedFMLite(), FedGen(), FedFAPlus(), FedKF(), FPL()):
        with pytest.raises(SettingError, match="embed"):
            method.check_model(nn.Linear(2, 2))
    with pytest.raises(SettingError, match="embed"):
        FedSR().add_layers(nn.Linear(2, 2), tiny.SPEC)
    for name, more in (("fedfa-plus", {}), ("fedfm", {"start_round": 2}), ("fedfm", {"weight": 0})):
        sections = {"run": {"method": name, "rounds": 1}, "method": more}
        with pytest.raises((errors.UnaccountedReleaseError, SettingError)):
            simulate(resolve({**sections, "privacy": {"epsilon": 8.0}}))


# FedSum
WIDTH = 4 * 4 + 10
RELEASE = GaussianSumMechanism.release
TINY: dict[str, Any] = {"networks": 3, "ipc": 2, "iterations": 6, "server_epochs": 2}
DATA = digits(np.arange(60) % 10)
context = partial(round_context, nominal=60.0)


def initial_state(ctx: RoundContext) -> CondensedState:
    return CondensedState(ctx.architecture.state_dict())


def uploads(method: FedSum, ctx: RoundContext, *parts: Tensor) -> dict[int, NetworkSums]:
    return dict(enumerate(client_uploads(method, ctx, clients(*parts))))


def clients(*parts: Tensor) -> ExactClientView:
    return ExactClientView(range(len(parts)), DATA, parts)


def test_one_round_equals_numpy() -> None:
    """Softmax regression has features [x; b·(Wx + c)]. The networks alternate."""
    b, lr, ipc = 0.5, 0.3, 2
    two = {"networks": 2, "iterations": 2, "server_epochs": 0, "radius": 1.0}
    method = FedSum(ipc=ipc, image_lr=lr, logit_weight=b, **two)
    ctx = context(network=build_model(ModelSettings("linear"), SPEC.image_shape, 10, 0))
    parts = torch.arange(60).split([13, 47])
    upload = uploads(method, ctx, *parts)
    state = method.server_step(initial_state(ctx), upload, ctx)

    drawn = perturbed(ctx.architecture, 1.0, "sphere", ctx)
    maps = []
    for _ in range(2):
        layer: Any = next(drawn).classifier
        W, c = layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy()
        maps.append((np.vstack([np.eye(64), b * W]), np.concatenate([np.zeros(64), b * c])))
    x = clients(torch.arange(60)).images(torch.arange(60)).flatten(1).numpy()
    y = DATA.labels.numpy()
    S = method.broadcast(initial_state(ctx), ctx).images.view(10, ipc, 64).numpy().copy()
    targets = []
    for m, (A, a) in enumerate(maps):
        centre = S.mean(1) @ A.T + a
        deviations = x @ A.T + a - centre[y]
        for k, part in enumerate(parts):
            member = np.isin(np.arange(60), part.numpy())
            expected = np.stack([deviations[member & (y == c)].sum(0) for c in range(10)])
            np.testing.assert_allclose(upload[k].sums[m].numpy(), expected, atol=2e-4)
        targets.append(np.stack([(x @ A.T + a)[y == c].mean(0) for c in range(10)]))
    assert upload[0].counts.tolist() == np.bincount(y[:13], minlength=10).tolist()
    for (A, a), target in zip(maps, targets, strict=True):
        gradient = 2 * (S.mean(1) @ A.T + a - target) @ A / ipc
        S = S - lr * gradient[:, None, :]
    np.testing.assert_allclose(state.images.view(10, ipc, 64).numpy(), S, atol=1e-4)


@given(owners=st.lists(st.integers(0, 4), min_size=60, max_size=60))
@settings(max_examples=10, deadline=None)
def test_client_sums_equal_pooled_sums(owners: list[int]) -> None:
    method, ctx, owner = FedSum(**TINY), context(), torch.tensor(owners)
    parts = [torch.nonzero(owner == k).flatten() for k in range(5)]
    client_sums = uploads(method, ctx, *parts)
    pooled = summed(client_sums)
    separate = summed(uploads(method, ctx, torch.arange(60)))
    assert torch.equal(pooled.counts, separate.counts)
    assert float((pooled.sums - separate.sums).norm()) < 1e-6 * float(separate.sums.norm())
    assert client_sums[0].nbytes == 4 * (3 * 10 * WIDTH + 10)


@pytest.mark.parametrize(
    ("perturbation", "augment"), [("sphere", "none"), ("ball", "siamese"), ("fresh", "siamese")]
)
def test_server_and_clients_use_the_same_networks(perturbation: str, augment: str) -> None:
    """Real images equal to S have sums of zero about S in every network."""
    method, ctx = FedSum(**TINY, perturbation=perturbation, augment=augment), context()
    clients = ExactClientView([0], digits(np.repeat(np.arange(10), 2)), [torch.arange(20)])
    pixels = clients.images(torch.arange(20))
    state = replace(initial_state(ctx), images=pixels, condensed=torch.ones(10, dtype=torch.bool))
    (upload,) = client_uploads(method, ctx, clients, state=state)
    assert upload.sums.abs().max() < 1e-4
    new_state = method.server_step(state, {0: upload}, ctx)
    torch.testing.assert_close(new_state.images, pixels, atol=1e-3, rtol=0)


def test_noiseless_private_sums_equal_open_sums() -> None:
    method, ctx = FedSum(**TINY), context(PrivacySettings(noise_multiplier=1e-12, clip=1e6))
    (upload,) = client_uploads(method, ctx, private_clients(method, ctx, DATA))
    (exact,) = client_uploads(method, context(), clients(torch.arange(60)))
    torch.testing.assert_close(upload.sums, exact.sums, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(upload.counts, exact.counts, atol=1e-4, rtol=0)


def test_round_charges_exactly_its_releases() -> None:
    """μ² = M/σ² + M/(count_noise·σ)², and ε equals one Gaussian's with this μ."""
    method, sigma, ledger = FedSum(**TINY, count_noise=2.0), 3.0, Ledger("0")
    ctx = context(PrivacySettings(noise_multiplier=sigma))
    release = patch.object(GaussianSumMechanism, "release", autospec=True, side_effect=RELEASE)
    with release as spy:
        client_uploads(method, ctx, private_clients(method, ctx, DATA, ledgers=[ledger]))
    released = [call.args[0].noise_std for call in spy.call_args_list]
    rows = {row.quantity: row for row in ledger.releases}
    sums, counts = rows["class sums of features"], rows["class counts"]
    assert (sums.steps, sums.dimension) == (3, 10 * WIDTH)
    assert (counts.steps, counts.dimension, counts.sensitivity) == (1, 10, 1.0)
    assert released == [sigma * sums.sensitivity] * 3 + [pytest.approx(2 * sigma / sqrt(3))]
    mu = sqrt(3 / sigma**2 + 3 / (2 * sigma) ** 2)
    combined = Release(1, "all", "gaussian", "x", 1 / mu, 1.0, 1.0, "full", 1, 1)
    assert epsilon(ledger.releases, 1e-5) == pytest.approx(epsilon([combined], 1e-5), rel=1e-3)


def released_sums(method: Any, images: Any, part: Any, clip: float) -> list[tuple[Tensor, bool]]:
    """Returns a client's sums before noise, with a flag for counts."""
    sums: list[tuple[Tensor, bool]] = []

    def record(mechanism: Any) -> Any:
        sums.append((mechanism._sums.clone(), mechanism._sums.numel() == 10))
        return RELEASE(mechanism)

    mechanism = "features" if isinstance(method, FedDM) else ""
    ctx = context(PrivacySettings(noise_multiplier=1e-9, clip=clip, mechanism=mechanism))
    with patch.object(GaussianSumMechanism, "release", record):
        part_N = torch.tensor(part, dtype=torch.int64)
        client_uploads(method, ctx, private_clients(method, ctx, images, [part_N]))
    return sums


SUMMING = (
    FedSum(**TINY, logit_weight=5.0),
    FedDM(ipc=2, iterations=1, networks=1, logit_weight=5.0),  # later sums are about new images
)


@pytest.mark.parametrize("method", SUMMING, ids=lambda method: method.name)
@given(extra=st.integers(0, 2), label=st.integers(0, 9), records=st.integers(0, 12))
@settings(max_examples=10, deadline=None)
def test_sensitivity_of_sums_and_counts(method: Any, extra: int, label: int, records: int) -> None:
    """Adding a record moves one class's sum by at most the clip, and its count by one."""
    images, clip = digits([*(np.arange(12) % 10), label], setup.HOSTILE[extra]), 0.05
    sums_D = released_sums(method, images, range(records), clip)
    sums_Dx = released_sums(method, images, [*range(records), 12], clip)
    assert sorted(counts for _, counts in sums_Dx) == [False] * method.networks + [True]
    for (sum_D, counts), (sum_Dx, _) in zip(sums_D, sums_Dx, strict=True):
        change = sum_Dx - sum_D
        if counts:
            assert change.flatten().tolist() == [float(c == label) for c in range(10)]
        else:
            assert 0.9 * clip < change.norm() <= clip * (1 + 1e-4)
            assert change[[c for c in range(10) if c != label]].abs().max() < 1e-6


def test_classes_below_the_noise_floor_are_excluded() -> None:
    """The floor is two deviations of the sum of K clients' noise."""
    method, noise_std, k = FedSum(**TINY), 4.0, 9
    noise = {COUNTS: noise_std, IMAGES: 1.0}
    ctx = context(PrivacySettings(noise_multiplier=1.0), noise=noise, clients=k)
    floor = 2 * noise_std * sqrt(k)
    counts = torch.zeros(10)
    counts[:3] = torch.tensor([floor * 1.01, floor * 0.99, -floor]) / k
    client_sums = {i: NetworkSums(torch.zeros(3, 10, WIDTH), counts) for i in range(k)}
    state = method.server_step(initial_state(ctx), client_sums, ctx)
    assert state.condensed.tolist() == [True] + [False] * 9
    assert method.synthetic(state, ctx)[1].tolist() == [0, 0]  # type: ignore[index]
    start_images = method.broadcast(initial_state(ctx), ctx).images
    assert torch.equal(state.images[2:], start_images[2:])  # missing classes are unchanged
    assert method.facts(state, ctx) == {"condensed_classes": 1}


def test_secure_aggregation_shares_noise_of_honest_clients() -> None:
    """Each client adds 1/√H of the charged noise."""
    sigma, open_method = 3.0, FedSum(**TINY)
    privacy = PrivacySettings(noise_multiplier=sigma)
    ctx = context(privacy, clients=5, noise={COUNTS: 7.0})
    plain = [plan.release(1, sigma) for plan in open_method.release_plans(privacy, ctx)]
    for honest, shares in ((0, 4), (3, 3)):
        method = replace(open_method, aggregation="secure", honest=honest)
        plans = method.release_plans(privacy, ctx)
        assert [plan.shares for plan in plans] == [shares, shares]
        rows = [plan.release(1, sigma) for plan in plans]
        assert epsilon(rows, 1e-5) == epsilon(plain, 1e-5)
        (budget,) = setup.charge_for(method, ctx, [0], [guard()], [SecretGenerator()])
        expected = sigma * plans[0].clip / sqrt(shares)
        assert budget.take(IMAGES).noise_std == pytest.approx(expected)
        assert method.pooled_deviation(COUNTS, 5, ctx) == pytest.approx(7 * sqrt(5 / shares))
    method = replace(open_method, aggregation="secure")
    client_sums = {k: NetworkSums(torch.zeros(3, 10, WIDTH), torch.ones(10)) for k in range(5)}
    too_few = {k: client_sums[k] for k in range(4)}
    assert method.server_step(initial_state(ctx), too_few, ctx).images is None
    assert method.server_step(initial_state(ctx), client_sums, ctx).images is not None
    with raises(SettingError, "method.honest"):
        replace(method, honest=5).release_plans(privacy, ctx)


def test_few_participants_bad_requests_and_batch_norm_are_refused() -> None:
    """Two of four clients take part, too few for complete noise of two or three."""
    run, privacy = {"rounds": 1, "participation": 0.5}, {"noise_multiplier": 0.5}
    sections = quick_sections("fedsum", run=run, partition={"clients": 4}, privacy=privacy)
    for honest in (0, 2, 3):
        sections["method"] = {**TINY, "aggregation": "secure", "honest": honest}
        with raises(SettingError, "run.participation"):
            simulate(resolve(sections))
    sections["method"]["honest"] = 2
    sections["run"]["participation"] = 0.75
    rows: Any = simulate(resolve(sections)).privacy["ledger"]  # type: ignore[index]
    assert {row["shares"] for row in rows} == {2}
    # malformed requests and batch norm
    method, ctx = FedSum(**TINY), context()
    request = method.broadcast(initial_state(ctx), ctx)
    method.check_request(request, ctx)
    with raises(errors.RequestRefusedError, "request.tensor"):
        method.check_request(replace(request, images=request.images[:-1]), ctx)
    normed = context(network=convnet("batch"))
    with pytest.raises(errors.ForbiddenLayerError):
        method.release_plans(PrivacySettings(noise_multiplier=1.0), normed)


@pytest.mark.parametrize("start_from", ["noise", "random-process"])
def test_start_images_depend_only_on_the_seed(start_from: str) -> None:
    method, ctx, other = FedSum(**TINY, start=start_from), context(), context(seed=1)
    images = method.broadcast(initial_state(ctx), ctx).images
    assert torch.equal(images, method.broadcast(initial_state(ctx), ctx).images)
    assert not torch.equal(images, method.broadcast(initial_state(other), other).images)
    all_classes = torch.ones(10, dtype=torch.bool)
    stepped = replace(initial_state(ctx), images=images + 1, condensed=all_classes)
    assert torch.equal(method.broadcast(stepped, ctx).images, images + 1)
    assert torch.equal(replace(method, restart=True).broadcast(stepped, ctx).images, images)
