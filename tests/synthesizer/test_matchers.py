"""Distribution matching against NumPy and autograd, private mechanisms against the exact gradient."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.data.images import ImageData
from fedsynth.models import convnet as frozen
from fedsynth.models.convnet import ConvNet
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.plans import UnaccountedNoise
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.synthesizer.condensation.augmentation import SiameseAugmentation
from fedsynth.synthesizer.condensation.matching import (
    ExactMatcher,
    MatchingObjective,
    NetworkFeatures,
    matching_gradient,
    pull_back,
    segment_sums,
)
from fedsynth.synthesizer.condensation.private_matchers import (
    GradientMatcher,
    PaperMatcher,
    ResidualMatcher,
    per_example_gradients,
)
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import CPU, digits
from tests.privacy.support import series

N, CLASSES, IPC = 60, 10, 3
WIDTH = 8 * 4 + CLASSES
PRIVATE_MATCHERS = [(ResidualMatcher, WIDTH), (GradientMatcher, IPC * 64)]
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)


def data(device: torch.device = CPU) -> ImageData:
    return digits(np.arange(N) % CLASSES, device=device)


def network(device: torch.device = CPU) -> ConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return ConvNet((1, 8, 8), CLASSES, width=8, depth=2).to(device).requires_grad_(False)


def features_of(device: torch.device = CPU, **other: Any) -> NetworkFeatures:
    return NetworkFeatures(network(device), 1.0, None, **other)


def synthetic(segments: int = CLASSES, device: torch.device = CPU) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(segments, IPC, 1, 8, 8, generator=draws).to(device)


def exact_matcher(
    parts: Sequence[Tensor] = (torch.arange(N),),
    batch: int = 100,
    steps: int = 1,
    device: Any = CPU,
) -> ExactMatcher:
    clients = ExactClientView(range(len(parts)), data(device), list(parts))
    segments = clients.segments(1)
    batches = BatchIndices(clients, segments, batch, steps, seed=0, round=1)
    return ExactMatcher(clients, batches)


def synthetic_means(features: NetworkFeatures, synthetic_SICHW: Tensor) -> Tensor:
    """Returns mean_{S_c} u_w per segment, [S, D], with the graph to `synthetic_SICHW`."""
    segments, ipc = synthetic_SICHW.shape[:2]
    numbers = torch.arange(segments, device=synthetic_SICHW.device)
    u = features(synthetic_SICHW.flatten(0, 1), numbers.repeat_interleave(ipc))
    return u.view(segments, ipc, -1).mean(dim=1)


def segment_means(values_ND: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Returns the mean row of each segment, [segments, D]; empty segments give zero."""
    counts_S = torch.bincount(segment_N, minlength=segments).clamp_min(1)
    return segment_sums(values_ND, segment_N, segments) / counts_S[:, None]


def noisy_series(
    clients: int, sigma: float, clip: float, width: int, rate: float = 1.0
) -> list[GaussianSumMechanism]:
    row = {"sensitivity": clip, "sample_rate": rate, "steps": 50, "dimension": CLASSES * width}
    return [series(CLASSES, noise_multiplier=sigma, **row) for _ in range(clients)]


def private_matcher(
    mechanism: type, sigma: float, clip: float, width: int, divisor: float, rate: float = 1.0
) -> MatchingObjective:
    group = PrivateClientView([0], data(), [torch.arange(N)], [])
    return mechanism(group, noisy_series(1, sigma, clip, width, rate), divisor)  # type: ignore[no-any-return]


def test_eq_9_for_a_linear_network_equals_numpy(device: torch.device) -> None:
    """With h(x) = A x and z(x) = B h + b, the gradient of Σ_c L_c has a closed form."""
    rng = np.random.default_rng(2)
    A, B, b = rng.normal(size=(5, 6)), rng.normal(size=(3, 5)), rng.normal(size=3)
    S, X = rng.normal(size=(2, 4, 6)), [rng.normal(size=(7, 6)), rng.normal(size=(2, 6))]

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(5, 3)
            self.classifier.weight.data = torch.tensor(B)
            self.classifier.bias.data = torch.tensor(b)

        def embed(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ torch.tensor(A, device=x.device).T

    features = NetworkFeatures(Linear().to(device), 0.7)
    h = np.stack([A @ x.mean(axis=0) for x in X])
    real = torch.tensor(np.concatenate([h, 0.7 * (h @ B.T + b)], axis=1), device=device)
    gradient = matching_gradient(features, torch.tensor(S, device=device).view(2, 4, 1, 2, 3), real)
    expected = np.zeros_like(S)
    for c in range(2):
        difference = A @ (S[c].mean(axis=0) - X[c].mean(axis=0))
        expected[c] = 2 * (A.T @ difference + 0.49 * A.T @ B.T @ B @ difference) / 4
    np.testing.assert_allclose(gradient.cpu().numpy().reshape(2, 4, 6), expected, atol=1e-10)


def test_mean_of_per_example_gradients_is_the_batch_gradient(
    device: torch.device,
) -> None:
    """Eq. 15 (FedDM's App. B) for classes of unequal sizes, one of them empty, in several passes."""
    features, S = features_of(device), synthetic(4, device)
    x = torch.randn(23, 1, 8, 8, generator=torch.Generator().manual_seed(3)).to(device)
    segment = torch.tensor([0] * 11 + [1] + [3] * 11, device=device)
    rows = per_example_gradients(features, S, x, segment)
    leaf = S.clone().requires_grad_()
    difference = synthetic_means(features, leaf) - segment_means(features(x, segment), segment, 4)
    (autograd,) = torch.autograd.grad(difference[[0, 1, 3]].square().sum(), leaf)
    means = segment_means(rows, segment, 4).view_as(S)
    torch.testing.assert_close(means, autograd, atol=1e-5, rtol=1e-5)
    single = per_example_gradients(features, S, x[5:6], segment[5:6])
    # an example's row does not depend on the batch
    torch.testing.assert_close(rows[5:6], single, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("mechanism", "width"), PRIVATE_MATCHERS)
def test_noiseless_private_gradient_equals_the_exact_one(mechanism: type, width: int) -> None:
    """The mechanisms agree with a full batch, a huge clip and σ → 0. Over 15 Poisson batches at
    q = 0.5, divided by the public q·n_c, the gradient averages to the exact one."""
    features, S = features_of(), synthetic()
    exact = exact_matcher().gradient(0, features, S)
    full = private_matcher(mechanism, 1e-12, 1e6, width, divisor=N / CLASSES)
    torch.testing.assert_close(full.gradient(0, features, S), exact, atol=1e-5, rtol=1e-4)
    sampled = private_matcher(mechanism, 1e-12, 1e6, width, divisor=0.5 * N / CLASSES, rate=0.5)
    draws = torch.stack([sampled.gradient(t, features, S) for t in range(15)])
    error = (draws.mean(0) - exact).flatten()
    assert error.norm() < 3 * (draws.std(0).norm() / 15**0.5)


def test_residual_noise_passes_through_the_jacobian() -> None:
    """Released sums have deviation σ𝒞; divided by the public divisor they are multiplied by J."""
    features, S = features_of(), synthetic()
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    (J,) = torch.autograd.grad(means[0], leaf, torch.eye(WIDTH), is_grads_batched=True)
    matcher = private_matcher(ResidualMatcher, 1e4, 1e-3, WIDTH, divisor=6.0)
    draws = torch.stack([matcher.gradient(t, features, S)[0].flatten() for t in range(50)])
    expected = 2 * 1e4 * 1e-3 / 6 * J[:, 0].norm()
    assert draws.square().sum(1).mean().sqrt() == pytest.approx(float(expected), rel=0.15)


def test_paper_mechanism_clips_the_batch_gradient() -> None:
    features, S, exact = features_of(), synthetic(), exact_matcher()
    plain = exact.gradient(0, features, S)
    clip = float(plain.flatten(1).norm(dim=1).median())

    def with_noise(sigma: float, clip: float) -> Tensor:
        row = Release(1, "images", "paper", "x", sigma, clip, 1.0, "full", 1, 1, "not private")
        noise = [UnaccountedNoise(row, SecretGenerator())]
        segments = exact.clients.segments(1)
        matcher = PaperMatcher(exact, segments, noise)
        return matcher.gradient(0, features, S)

    assert with_noise(0.0, clip).flatten(1).norm(dim=1).max() <= clip * (1 + 1e-5)
    assert (with_noise(3.0, 5.0) - plain).std() == pytest.approx(15.0 / (N / CLASSES), rel=0.1)


def test_batches_are_drawn_without_replacement_by_default() -> None:
    images = data()
    labels = torch.cat([torch.zeros(40), torch.ones(5), torch.full((15,), 2)]).long()
    clients = ExactClientView([4], ImageData(images.images, labels, images.spec), [torch.arange(N)])
    segments = clients.segments(1)
    batches = BatchIndices(clients, segments, 10, 70, seed=0, round=1)
    assert batches.sizes.tolist() == [10, 5, 10]
    draw_counts = torch.zeros(N)
    for step in range(70):
        indices, positions = batches.at(step), batches.segment
        assert torch.equal(clients.labels(indices), segments.label[positions])
        assert len(set(indices.tolist())) == len(indices)
        draw_counts[indices] += 1
    assert (draw_counts > 0).all()
    resampled = BatchIndices(clients, segments, 10, 70, small_class="resample", seed=0, round=1)
    assert resampled.sizes.tolist() == [10, 10, 10]
    draws = torch.stack([resampled.at(step)[10:20] for step in range(70)]) - 40
    assert draws.min() >= 0
    assert draws.max() < 5
    # drawn with replacement, not the class repeated
    assert any(len(set(row.tolist())) < 5 for row in draws)


def test_reduced_precision_changes_the_gradient_little(
    device: torch.device,
) -> None:
    """With the 8 bits of bfloat16 the gradient moves by about a percent; synthetic images stay
    float32."""
    S, matcher = synthetic(device=device), exact_matcher(device=device)
    full, half = (
        matcher.gradient(0, features_of(device, precision=dtype), S).flatten()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    assert (full - half).norm() < 0.03 * full.norm()


@pytest.mark.parametrize("images", [1, 8, 256])
def test_pass_size_changes_only_rounding(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers real images, synthetic segments and per-example gradients."""
    features, S = features_of(), synthetic()
    x, segment = torch.randn(50, 1, 8, 8), (torch.arange(50) ** 2) % CLASSES
    expected = features(x, segment), per_example_gradients(features, S, x, segment)
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    (pulled,) = torch.autograd.grad(means, leaf, torch.ones_like(means))
    monkeypatch.setattr("fedsynth.synthesizer.condensation.matching.CPU_BYTES", images * 8 * 64 * 4)
    assert features.images_at_once(x) == images
    torch.testing.assert_close(features.real(x, segment), expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        per_example_gradients(features, S, x, segment), expected[1], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        pull_back(features, S, lambda m, numbers: torch.ones_like(m)), pulled, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_feature_vjp_equals_autograd(norm: str) -> None:
    """Covers embeddings and weighted logits through the siamese augmentation, with one or more
    vectors, also for networks without a VJP."""
    transform = SiameseAugmentation(4, torch.Generator().manual_seed(3), flip=True)
    x, segment = torch.randn(9, 1, 8, 8), torch.arange(9) % 4
    net = ConvNet((1, 8, 8), CLASSES, width=8, depth=2, norm=norm).requires_grad_(False)
    features = NetworkFeatures(net, 0.4, transform)
    leaf = x.clone().requires_grad_()
    u = features(leaf, segment)
    vectors = torch.randn(3, *u.shape)
    (expected,) = torch.autograd.grad(u, leaf, vectors, is_grads_batched=True)
    actual, pull = features.vjp(x, segment)
    torch.testing.assert_close(actual, u.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pull(vectors), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pull(vectors[:1]), expected[:1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_may_split_classes_and_clients(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over segments and private sums over clients of unequal sizes do not depend on chunks."""
    features, parts = (
        features_of(),
        [torch.arange(5), torch.arange(5, 33), torch.arange(33, N)],
    )
    clients = ExactClientView([0, 1, 2], data(), parts)
    segments, sums = clients.segments(1), torch.zeros(3 * CLASSES, WIDTH)
    means: list[Tensor] = []
    for position, label in zip(segments.position.tolist(), segments.label.tolist(), strict=True):
        x = clients.images(clients.examples(position, label))
        rows = features(x, torch.full((len(x),), len(means)))
        means.append(rows.mean(0))
        sums[CLASSES * position + label] = rows.sum(0)
    monkeypatch.setattr("fedsynth.core.client.CPU_CHUNK", size)
    actual = exact_matcher(parts).real_means(0, features)
    torch.testing.assert_close(actual, torch.stack(means), atol=1e-5, rtol=1e-4)
    group = PrivateClientView(range(3), data(), parts, [])
    noisy = noisy_series(3, 1e-12, 1e6, WIDTH)
    private_sums = group.class_sums(noisy, lambda x, segment: features.real(x, segment))
    torch.testing.assert_close(private_sums, sums, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_compiled_real_pass_equals_the_eager_pass(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full chunks are compiled, the rest is eager. New weights take effect, and the global
    generator is unchanged."""
    rng_state = torch.get_rng_state()
    net, x = network(), torch.randn(13, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        "fedsynth.synthesizer.condensation.matching.CPU_BYTES", 4 * 8 * 64 * precision.itemsize
    )
    plain, compiled = (
        NetworkFeatures(net, 1.0, None, precision, compiled=c) for c in (False, True)
    )
    segment = torch.zeros(13, dtype=torch.int64)
    tolerance = 1e-5 if precision == torch.float32 else 0.03
    first = plain.real(x, segment)
    torch.testing.assert_close(compiled.real(x, segment), first, atol=tolerance, rtol=tolerance)
    net.features[0].weight.mul_(-0.5)  # type: ignore[operator,union-attr]
    for features in (plain, compiled):
        features.use(net, None)
    second = plain.real(x, segment)
    assert (second - first).norm() > 0.1 * first.norm()
    torch.testing.assert_close(compiled.real(x, segment), second, atol=tolerance, rtol=tolerance)
    assert torch.equal(rng_state, torch.get_rng_state())


@pytest.mark.slow
@needs_compiler
def test_compiled_synthetic_pass_equals_the_eager_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole passes are compiled, in any order. A broken version would compile shapes that
    depend on a client's data, compute another function, or fall back to eager code."""
    monkeypatch.setattr("fedsynth.synthesizer.condensation.matching.CPU_BYTES", 4 * 8 * 64 * 4)
    torch.compiler.reset()
    counters.clear()
    requests: list[bool] = []
    parts = frozen._parts
    monkeypatch.setattr(
        frozen, "_parts", lambda compiled: requests.append(compiled) or parts(compiled)
    )
    net = network()
    plain, compiled = (NetworkFeatures(net, 0.5, None, compiled=c, ipc=2) for c in (False, True))
    draws = torch.Generator().manual_seed(0)
    for images in (2, 4, 2, 4):
        x = torch.randn(images, 1, 8, 8, generator=draws)
        segment = torch.zeros(images, dtype=torch.int64)
        u, pull = plain.vjp(x, segment)
        vectors = torch.randn(1, *u.shape, generator=draws)
        actual, pull_actual = compiled.vjp(x, segment)
        torch.testing.assert_close(actual, u, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pull_actual(vectors), pull(vectors), atol=1e-5, rtol=1e-5)
    assert requests[::2] == [False] * 4
    assert requests[1::2] == [False, True, False, True]
    assert counters["frames"]["ok"] == 2 * 2  # forward and back, of two blocks
    assert not counters["graph_break"]
