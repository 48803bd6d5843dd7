"""Distribution matching against autograd, private mechanisms against the exact gradient."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fedsynth import FedDM, PrivacySettings, resolve, simulate
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.models import convnet as frozen
from fedsynth.models.flat import flatten
from fedsynth.privacy import Release, epsilon
from fedsynth.privacy.plans import UnaccountedNoise
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.synthesizer.condensation import matching
from fedsynth.synthesizer.condensation import private_matchers as private
from fedsynth.synthesizer.condensation.augmentation import SiameseAugmentation
from fedsynth.synthesizer.condensation.matching import ExactMatcher, NetworkFeatures
from fedsynth.synthesizer.condensation.private_matchers import GradientMatcher, ResidualMatcher
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import CPU, convnet, digits, round_context
from tests.privacy.support import mechanism
from tests.quick_runs import quick_sections

N, CLASSES, IPC = 60, 10, 3
WIDTH = 4 * 4 + CLASSES
near = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def network(**settings: Any) -> Any:
    return convnet(**settings).requires_grad_(False)


def features_of(device: torch.device = CPU, **other: Any) -> NetworkFeatures:
    return NetworkFeatures(network().to(device), 1.0, None, **other)


def synthetic(pairs: int = CLASSES, device: torch.device = CPU) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(pairs, IPC, 1, 8, 8, generator=draws).to(device)


def exact_matcher(parts: Any = (), device: torch.device = CPU) -> ExactMatcher:
    images, parts = digits(np.arange(N) % CLASSES, device=device), parts or [torch.arange(N)]
    clients = ExactClientView(range(len(parts)), images, parts)
    batches = BatchIndices(clients, clients.pairs(1), 100, 1, seed=0, round=1)
    return ExactMatcher(clients, batches)


def group(*parts: Tensor) -> PrivateClientView:
    return PrivateClientView(range(len(parts)), digits(np.arange(N) % CLASSES), parts, [])


def synthetic_means(features: NetworkFeatures, synthetic_SICHW: Tensor) -> Tensor:
    pairs, ipc = synthetic_SICHW.shape[:2]
    numbers = torch.arange(pairs, device=synthetic_SICHW.device)
    u = features(synthetic_SICHW.flatten(0, 1), numbers.repeat_interleave(ipc))
    return u.view(pairs, ipc, -1).mean(dim=1)


def noisy_mechanism(clients: int, sigma: float, clip: float, width: int, **other: Any) -> list[Any]:
    row = {"noise_multiplier": sigma, "sensitivity": clip, "steps": 50, **other}
    return [mechanism(CLASSES, **row, dimension=CLASSES * width) for _ in range(clients)]


def private_matcher(kind: Any, sigma: float, clip: float, divisor: float, rate: float = 1) -> Any:
    width = WIDTH if kind is ResidualMatcher else IPC * 64
    noisy = noisy_mechanism(1, sigma, clip, width, sample_rate=rate)
    return kind(group(torch.arange(N)), noisy, divisor)  # type: ignore[no-any-return]


def test_mean_of_per_example_gradients_is_the_batch_gradient(device: torch.device) -> None:
    """Eq. 15 (FedDM's App. B) for classes of unequal sizes, one empty, in several passes."""
    features, S = features_of(device), synthetic(4, device)
    x = torch.randn(23, 1, 8, 8, generator=torch.Generator().manual_seed(3)).to(device)
    pair = torch.tensor([0] * 11 + [1] + [3] * 11, device=device)
    rows, present = private.per_example_gradients(features, S, x, pair), [0, 1, 3]
    leaf, real = S.clone().requires_grad_(), features(x, pair)
    real_means, row_means = (
        torch.stack([values[pair == c].mean(0) for c in present]) for values in (real, rows)
    )
    difference = synthetic_means(features, leaf)[present] - real_means
    (autograd,) = torch.autograd.grad(difference.square().sum(), leaf)
    near(row_means.view_as(autograd[present]), autograd[present], rtol=1e-5)
    single = private.per_example_gradients(features, S, x[5:6], pair[5:6])
    # an example's row does not depend on the batch
    torch.testing.assert_close(rows[5:6], single, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mechanism", [ResidualMatcher, GradientMatcher])
def test_noiseless_private_gradient_equals_the_exact_one(mechanism: type) -> None:
    """Also in the mean of Poisson batches, divided by the public q·n_c."""
    features, S = features_of(), synthetic()
    exact = exact_matcher().gradient(0, features, S)
    full = private_matcher(mechanism, 1e-12, 1e6, divisor=N / CLASSES)
    near(full.gradient(0, features, S), exact)
    sampled = private_matcher(mechanism, 1e-12, 1e6, divisor=0.5 * N / CLASSES, rate=0.5)
    draws = torch.stack([sampled.gradient(t, features, S) for t in range(15)])
    error = (draws.mean(0) - exact).flatten()
    assert error.norm() < 3 * (draws.std(0).norm() / 15**0.5)


def test_residual_noise_passes_through_the_jacobian() -> None:
    """Released sums have deviation σ𝒞; divided by the public divisor they are multiplied by J."""
    features, S = features_of(), synthetic()
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    (J,) = torch.autograd.grad(means[0], leaf, torch.eye(WIDTH), is_grads_batched=True)
    matcher = private_matcher(ResidualMatcher, 1e4, 1e-3, divisor=6.0)
    draws = torch.stack([matcher.gradient(t, features, S)[0].flatten() for t in range(50)])
    expected = 2 * 1e4 * 1e-3 / 6 * J[:, 0].norm()
    assert draws.square().sum(1).mean().sqrt() == pytest.approx(float(expected), rel=0.25)


def test_paper_mechanism_clips_the_batch_gradient() -> None:
    features, S, exact = features_of(), synthetic(), exact_matcher()
    plain = exact.gradient(0, features, S)
    clip = float(plain.flatten(1).norm(dim=1).median())

    def with_noise(sigma: float, clip: float) -> Tensor:
        row = Release(1, "images", "paper", "x", sigma, clip, 1.0, "full", 1, 1, "not private")
        noise = [UnaccountedNoise(row, SecretGenerator())]
        matcher = private.PaperMatcher(exact, exact.clients.pairs(1), noise)
        return matcher.gradient(0, features, S)

    assert with_noise(0.0, clip).flatten(1).norm(dim=1).max() <= clip * (1 + 1e-5)
    assert (with_noise(3.0, 5.0) - plain).std() == pytest.approx(15.0 / (N / CLASSES), rel=0.1)


def test_batches_are_drawn_without_replacement_by_default() -> None:
    images = digits(np.repeat([0, 1, 2], [40, 5, 15]))
    clients = ExactClientView([4], images, [torch.arange(N)])
    pairs = clients.pairs(1)
    batches = BatchIndices(clients, pairs, 10, 70, seed=0, round=1)
    assert batches.sizes.tolist() == [10, 5, 10]
    pair = ExactClientView([2, 4], images, [torch.arange(20), torch.arange(N)])
    both = BatchIndices(pair, pair.pairs(1), 10, 70, seed=0, round=1)
    assert torch.equal(both.at(3)[10:], batches.at(3))  # independent of other clients
    draw_counts = torch.zeros(N)
    for step in range(70):
        indices, positions = batches.at(step), batches.pair
        assert torch.equal(clients.labels(indices), pairs.label[positions])
        assert len(set(indices.tolist())) == len(indices)
        draw_counts[indices] += 1
    assert (draw_counts > 0).all()
    resampled = BatchIndices(clients, pairs, 10, 70, small_class="resample", seed=0, round=1)
    assert resampled.sizes.tolist() == [10, 10, 10]
    draws = torch.stack([resampled.at(step)[10:20] for step in range(70)]) - 40
    assert 0 <= draws.min() <= draws.max() < 5
    # drawn with replacement, not the class repeated
    assert any(len(set(row.tolist())) < 5 for row in draws)


@pytest.mark.parametrize("images", [1, 8, 256])
def test_pass_size_changes_only_rounding(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features, S = features_of(), synthetic()
    x, pair = torch.randn(50, 1, 8, 8), (torch.arange(50) ** 2) % CLASSES
    expected = features(x, pair), private.per_example_gradients(features, S, x, pair)
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    (pulled,) = torch.autograd.grad(means, leaf, torch.ones_like(means))
    monkeypatch.setattr(matching, "CPU_BYTES", images * 4 * 64 * 4)
    assert features.images_at_once(x) == images
    near(features.real(x, pair), expected[0])
    near(private.per_example_gradients(features, S, x, pair), expected[1])
    near(matching.pull_back(features, S, lambda m, numbers: torch.ones_like(m)), pulled)


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_feature_vjp_equals_autograd(norm: str) -> None:
    """Also for networks without a VJP."""
    transform = SiameseAugmentation(4, torch.Generator().manual_seed(3), flip=True)
    x, pair = torch.randn(9, 1, 8, 8), torch.arange(9) % 4
    features = NetworkFeatures(network(norm=norm), 0.4, transform)
    leaf = x.clone().requires_grad_()
    u = features(leaf, pair)
    vectors = torch.randn(3, *u.shape)
    (expected,) = torch.autograd.grad(u, leaf, vectors, is_grads_batched=True)
    actual, pull = features.vjp(x, pair)
    near(actual, u.detach())
    near(pull(vectors), expected)
    near(pull(vectors[:1]), expected[:1])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_may_split_classes_and_clients(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with clients of unequal sizes, means and private sums do not depend on chunks."""
    features, parts = features_of(), torch.arange(N).split([5, 28, 27])
    exact = exact_matcher(parts)
    clients = exact.clients
    pairs, sums = clients.pairs(1), torch.zeros(3 * CLASSES, WIDTH)
    means: list[Tensor] = []
    for position, label in zip(pairs.position.tolist(), pairs.label.tolist(), strict=True):
        x = clients.images(clients.examples(position, label))
        rows = features(x, torch.full((len(x),), len(means)))
        means.append(rows.mean(0))
        sums[CLASSES * position + label] = rows.sum(0)
    monkeypatch.setattr("fedsynth.core.client.CPU_CHUNK", size)
    near(exact.real_means(0, features), torch.stack(means))
    private_sums = group(*parts).class_sums(noisy_mechanism(3, 1e-12, 1e6, WIDTH), features.real)
    torch.testing.assert_close(private_sums, sums, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_compiled_real_pass_equals_the_eager_pass(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full chunks are compiled, the rest is eager. New weights take effect."""
    rng_state = torch.get_rng_state()
    net, x = network(), torch.randn(13, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(matching, "CPU_BYTES", 4 * 4 * 64 * precision.itemsize)
    plain = NetworkFeatures(net, 1.0, None, precision)
    compiled = NetworkFeatures(net, 1.0, None, precision, compiled=True)
    pair = torch.zeros(13, dtype=torch.int64)
    tolerance = 1e-5 if precision == torch.float32 else 0.03
    first = plain.real(x, pair)
    near(compiled.real(x, pair), first, atol=tolerance, rtol=tolerance)
    net.features[0].weight.mul_(-0.5)  # type: ignore[operator,union-attr]
    for features in (plain, compiled):
        features.use(net, None)
    second = plain.real(x, pair)
    assert (second - first).norm() > 0.1 * first.norm()
    near(compiled.real(x, pair), second, atol=tolerance, rtol=tolerance)
    assert torch.equal(rng_state, torch.get_rng_state())


@pytest.mark.slow
@needs_compiler
def test_compiled_synthetic_pass_equals_the_eager_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole passes are compiled, so that no shape depends on a client's data."""
    monkeypatch.setattr(matching, "CPU_BYTES", 4 * 4 * 64 * 4)
    torch.compiler.reset()
    counters.clear()
    parts, net = Mock(wraps=frozen._parts), network()
    monkeypatch.setattr(frozen, "_parts", parts)
    plain, compiled = (NetworkFeatures(net, 0.5, None, compiled=c, ipc=2) for c in (False, True))
    draws = torch.Generator().manual_seed(0)
    for images in (2, 4, 2, 4):
        x = torch.randn(images, 1, 8, 8, generator=draws)
        pair = torch.zeros(images, dtype=torch.int64)
        u, pull = plain.vjp(x, pair)
        vectors = torch.randn(1, *u.shape, generator=draws)
        actual, pull_actual = compiled.vjp(x, pair)
        near(actual, u, rtol=1e-5)
        near(pull_actual(vectors), pull(vectors), rtol=1e-5)
    requests = [call.args[0] for call in parts.call_args_list]
    assert requests == [False, False, False, True] * 2
    assert counters["frames"]["ok"] == 2 * 2  # forward and back, of two blocks
    assert not counters["graph_break"]


def sum_matcher(clients: PrivateClientView, networks: int, sigma: float, clip: float) -> Any:
    sums = noisy_mechanism(len(clients.ids), sigma, clip, WIDTH, steps=networks)
    counts = noisy_mechanism(len(clients.ids), sigma, 1.0, 1, steps=1)
    return private.FeatureSumMatcher(clients, sums, counts, networks, 1.0)


def test_noiseless_gradient_of_sums_equals_the_exact_gradient() -> None:
    """Checks the releasing step and a later one."""
    parts, features, S = torch.arange(N).split([23, 37]), features_of(), synthetic(20)
    exact, noiseless = exact_matcher(parts), sum_matcher(group(*parts), 1, 1e-12, 1e6)
    counts = [int((p % 10 == c).sum()) for p in parts for c in range(10)]
    assert noiseless.counts.tolist() == pytest.approx(counts)
    for step, S_step in ((0, S), (1, S + 0.1)):
        near(noiseless.gradient(step, features, S_step), exact.gradient(0, features, S_step))


def test_records_are_read_once_per_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken version would add new noise to cached clean sums, or release at each step."""
    spy = create_autospec(PrivateClientView.class_sums, side_effect=PrivateClientView.class_sums)
    monkeypatch.setattr(PrivateClientView, "class_sums", spy)
    clients = group(torch.arange(N))
    features, S, matcher = features_of(), synthetic(), sum_matcher(clients, 3, 1.0, 1.0)
    first = [matcher.gradient(t, features, S) for t in range(3)]
    clients._data = None  # type: ignore[assignment]
    repeated = [matcher.gradient(t, features, S) for t in range(3, 9)]
    assert spy.call_count == 4
    for t in range(6):
        assert torch.equal(repeated[t], first[t % 3])
    assert not torch.equal(first[0], first[1])  # different noise in each release


def test_charges_are_m_sums_and_one_count() -> None:
    """σ_count = count_noise·σ/√M, and σ = 3.73√M, 1.39√M, 0.50√M give ε = 1, 3, 10."""
    method = FedDM(networks=16, iterations=100, count_noise=3.0)
    privacy = PrivacySettings(noise_multiplier=8.0, mechanism="features")
    sums, counts = (plan.release(1, 8.0) for plan in method.release_plans(privacy, round_context()))
    assert (sums.steps, counts.steps, counts.sensitivity, counts.dimension) == (16, 1, 1.0, 10)
    assert sums.sample_rate == counts.sample_rate == 1
    assert counts.noise_multiplier == pytest.approx(3 * 8 / 4)
    few = replace(method, iterations=5).release_plans(privacy, round_context())[0]
    assert few.steps == 5  # unused networks are not released
    for target, factor in ((1.0, 3.73), (3.0, 1.39), (10.0, 0.50)):
        row = replace(sums, noise_multiplier=factor * 4)
        assert epsilon([row], 1e-5) == pytest.approx(target, rel=0.02)


def test_round_without_large_counts_writes_a_report(tmp_path: Path, capsys: Any) -> None:
    """The ledger is charged. The warning blames the noise, not true counts."""
    images = digits(np.zeros(200, dtype=np.int64))
    privacy = {"noise_multiplier": 1.0, "mechanism": "features"}
    partition, method = {"kind": "iid", "subset": 1.0}, {"min_examples": 100_000}
    sections = quick_sections("feddm", partition=partition, method=method, privacy=privacy)
    result = simulate(resolve(sections), data=(images, images), output=tmp_path)
    assert (result.folder / "privacy_report.json").exists()  # type: ignore[operator]
    assert "noise hides the counts" in "".join(capsys.readouterr())
    assert torch.equal(flatten(result.model), flatten(convnet()))
