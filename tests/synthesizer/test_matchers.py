"""Distribution matching against NumPy, against autograd, and the private mechanisms against the
exact gradient."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fedsynth.core.client import OpenClients, PrivateClients, Segments
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.models import frozen
from fedsynth.models.convnet import ConvNet
from fedsynth.privacy.allowance import UnaccountedNoise
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.synthesizer.condensation.loop import NetworkFeatures, condense
from fedsynth.synthesizer.condensation.matchers import (
    ClippedMatcher,
    ExactMatcher,
    FeatureMap,
    GradientMatcher,
    Matcher,
    PaperMatcher,
    ResidualMatcher,
    per_example_gradients,
    pull_back,
    segment_sums,
)
from fedsynth.synthesizer.condensation.real_batches import BatchIndices
from fedsynth.synthesizer.condensation.siamese import SiameseAugmentation
from fedsynth.training.optimisers import MomentumSgd

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
N, CLASSES, IPC = 60, 10, 3


def synthetic_means(features: FeatureMap, synthetic_SICHW: Tensor) -> Tensor:
    """mean_{S_c} u_w for every segment, [S, D], with the graph to `synthetic_SICHW`."""
    segments, ipc = synthetic_SICHW.shape[:2]
    numbers = torch.arange(segments, device=synthetic_SICHW.device)
    u = features(synthetic_SICHW.flatten(0, 1), numbers.repeat_interleave(ipc))
    return u.view(segments, ipc, -1).mean(dim=1)


def segment_means(values_ND: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """Mean of the rows of each segment, [segments, D]; empty segments give zero."""
    counts_S = torch.bincount(segment_N, minlength=segments).clamp_min(1)
    return segment_sums(values_ND, segment_N, segments) / counts_S[:, None]


def data(device: str = "cpu") -> ImageData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (N, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, np.arange(N) % CLASSES, dataset_spec("digits")).to(
        torch.device(device)
    )


def network(device: str = "cpu") -> ConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return ConvNet((1, 8, 8), CLASSES, width=8, depth=2).to(device).requires_grad_(False)


def synthetic(segments: int, device: str = "cpu") -> Tensor:
    return torch.randn(segments, IPC, 1, 8, 8, generator=torch.Generator().manual_seed(1)).to(
        device
    )


def all_batches(
    clients: OpenClients, batch: int = 100, steps: int = 1
) -> tuple[Segments, BatchIndices]:
    segments = clients.segments(1)
    return segments, BatchIndices(
        clients, segments, batch, steps, small_class="all", seed=0, round=1
    )


def private(
    clients: int,
    mechanism: type,
    sigma: float,
    clip: float,
    width: int,
    divisor: float,
    rate: float = 1.0,
) -> Matcher:
    secrets = [SecretGenerator() for _ in range(clients)]
    guards = [Guard(Ledger(str(k)), 1e-5, None) for k in range(clients)]
    parts = list(torch.arange(N).tensor_split(clients))
    group = PrivateClients(range(clients), data(), parts, [])
    row = Release(
        1,
        "images",
        "test",
        "x",
        sigma,
        clip,
        rate,
        "poisson" if rate < 1 else "full",
        50,
        CLASSES * width,
    )
    series = [GaussianSums(row, CLASSES, g, s) for g, s in zip(guards, secrets, strict=True)]
    return mechanism(group, series, divisor)  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
def test_eq_9_for_a_linear_network_equals_numpy(device: str) -> None:
    """h(x) = A x, z(x) = B h + b: L_c and its gradient by hand."""
    rng = np.random.default_rng(2)
    A, B, b = rng.normal(size=(5, 6)), rng.normal(size=(3, 5)), rng.normal(size=3)
    S, X = rng.normal(size=(2, 4, 6)), [rng.normal(size=(7, 6)), rng.normal(size=(2, 6))]

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(5, 3)
            self.classifier.weight.data, self.classifier.bias.data = (
                torch.tensor(B),
                torch.tensor(b),
            )

        def embed(self, x: Tensor) -> Tensor:
            return x.flatten(1) @ torch.tensor(A, device=x.device).T

    logit_weight = 0.7
    features = NetworkFeatures(Linear().to(device), logit_weight, None)
    leaf = torch.tensor(S, device=device).view(2, 4, 1, 2, 3).requires_grad_()
    segment = torch.tensor([0] * 7 + [1] * 2, device=device)
    real = segment_means(
        features(torch.tensor(np.concatenate(X), device=device).view(9, 1, 2, 3), segment),
        segment,
        2,
    )
    loss = (synthetic_means(features, leaf) - real).square().sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected_loss, expected = 0.0, np.zeros_like(S)
    for c in range(2):
        h = A @ (S[c].mean(axis=0) - X[c].mean(axis=0))
        z = logit_weight * (B @ h)
        expected_loss += h @ h + z @ z
        expected[c] = 2 * (A.T @ h + logit_weight * A.T @ B.T @ z) / 4
    assert loss.item() == pytest.approx(expected_loss)
    np.testing.assert_allclose(gradient.cpu().numpy().reshape(2, 4, 6), expected, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_eq_15_the_mean_of_per_example_gradients_is_the_batch_gradient(device: str) -> None:
    """App. B of FedDM, to 1e-5, for ragged classes, one of them empty, and several passes."""
    features, S = NetworkFeatures(network(device), 1.0, None), synthetic(4, device)
    x = torch.randn(23, 1, 8, 8, generator=torch.Generator().manual_seed(3)).to(device)
    segment = torch.tensor([0] * 11 + [1] + [3] * 11, device=device)
    rows = per_example_gradients(features, S, x, segment)
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    real = segment_means(features(x, segment), segment, 4)
    loss = (means - real)[[0, 1, 3]].square().sum()
    (autograd,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(
        segment_means(rows, segment, 4).view_as(S), autograd, atol=1e-5, rtol=1e-5
    )
    one = per_example_gradients(features, S, x[5:6], segment[5:6])
    # an example's row does not depend on the batch
    torch.testing.assert_close(rows[5:6], one, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("mechanism", "width"), [(ResidualMatcher, 8 * 4 + CLASSES), (GradientMatcher, IPC * 64)]
)
def test_without_noise_and_clipping_the_private_gradient_is_the_exact_one(
    mechanism: type, width: int
) -> None:
    """Full batch, huge clip, σ → 0, divisor = the true class size (equal here): all three
    mechanisms agree."""
    features, S = NetworkFeatures(network(), 1.0, None), synthetic(CLASSES)
    clients = OpenClients([0], data(), [torch.arange(N)])
    _, batches = all_batches(clients)
    exact = ExactMatcher(clients, batches).gradient(0, features, S)
    ours = private(1, mechanism, 1e-12, 1e6, width, divisor=N / CLASSES).gradient(0, features, S)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mechanism", "width"), [(ResidualMatcher, 8 * 4 + CLASSES), (GradientMatcher, IPC * 64)]
)
def test_subsampling_is_unbiased(mechanism: type, width: int) -> None:
    """Over 50 Poisson batches at q = 0.5, divided by the public q·n_c, the gradient averages to the
    exact one."""
    features, S = NetworkFeatures(network(), 1.0, None), synthetic(CLASSES)
    clients = OpenClients([0], data(), [torch.arange(N)])
    exact = ExactMatcher(clients, all_batches(clients)[1]).gradient(0, features, S)
    matcher = private(1, mechanism, 1e-12, 1e6, width, divisor=0.5 * N / CLASSES, rate=0.5)
    draws = torch.stack([matcher.gradient(t, features, S) for t in range(50)])
    error = (draws.mean(0) - exact).flatten()
    assert error.norm() < 3 * (draws.std(0).norm() / 50**0.5)


def test_residual_noise_enters_the_gradient_through_the_jacobian_only() -> None:
    """With clip 𝒞 and σ, the released sums have deviation σ𝒞; divided by the public divisor they go
    through J once."""
    width = 8 * 4 + CLASSES
    features, S = NetworkFeatures(network(), 1.0, None), synthetic(CLASSES)
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    J = torch.autograd.grad(means[0], leaf, torch.eye(width), is_grads_batched=True)[0][
        :, 0
    ].flatten(1)
    draws = []
    matcher = private(1, ResidualMatcher, 1e4, 1e-3, width, divisor=6.0)
    for t in range(50):
        draws.append(matcher.gradient(t, features, S)[0].flatten())
    expected = 2 * 1e4 * 1e-3 / 6 * J.norm()
    assert torch.stack(draws).square().sum(1).mean().sqrt() == pytest.approx(
        float(expected), rel=0.15
    )


def test_paper_mechanism_clips_the_batch_and_its_noise_shrinks_with_it() -> None:
    features, S = NetworkFeatures(network(), 1.0, None), synthetic(CLASSES)
    clients = OpenClients([0], data(), [torch.arange(N)])
    segments, batches = all_batches(clients)
    exact = ExactMatcher(clients, batches)
    clip = float(exact.gradient(0, features, S).flatten(1).norm(dim=1).median())

    def noise(sigma: float, clip: float) -> UnaccountedNoise:
        row = Release(1, "images", "paper", "x", sigma, clip, 1.0, "full", 1, 1, "not private")
        return UnaccountedNoise(row, SecretGenerator())

    clipped = PaperMatcher(exact, segments, batches, [noise(0.0, clip)]).gradient(0, features, S)
    norms = clipped.flatten(1).norm(dim=1)
    assert norms.max() <= clip * (1 + 1e-5)
    noisy = PaperMatcher(exact, segments, batches, [noise(3.0, 5.0)]).gradient(0, features, S)
    unclipped = exact.gradient(0, features, S)
    assert (noisy - unclipped).std() == pytest.approx(3.0 * 5.0 / (N / CLASSES), rel=0.1)


def test_clients_batched_or_alone_make_the_same_images() -> None:
    """Same seed, fp32: uploads equal to 1e-4, whoever shares the group."""
    parts = list(torch.arange(N).tensor_split(3))

    def images(ids: list[int]) -> Tensor:
        clients = OpenClients(ids, data(), [parts[k] for k in ids])
        segments = clients.segments(1)
        matcher = ExactMatcher(
            clients, BatchIndices(clients, segments, 1, 5, small_class="all", seed=0, round=1)
        )
        return condense(
            torch.zeros(len(segments), IPC, 1, 8, 8),
            network,
            matcher,
            steps=5,
            optimiser=MomentumSgd(1.0),
        )

    together = images([0, 1, 2])
    torch.testing.assert_close(
        together, torch.cat([images([k]) for k in range(3)]), atol=1e-4, rtol=1e-4
    )


def test_condensation_lowers_the_loss_and_keeps_the_start() -> None:
    clients = OpenClients([0], data(), [torch.arange(N)])
    _, batches = all_batches(clients, steps=30)
    features = NetworkFeatures(network(), 1.0, None)
    start = synthetic(CLASSES)
    before = start.clone()
    matcher = ExactMatcher(clients, batches)

    def loss(S: Tensor) -> float:
        return float(
            (synthetic_means(features, S) - matcher.real_means(0, features, CLASSES)).square().sum()
        )

    after = condense(start, network, matcher, steps=30, optimiser=MomentumSgd(1.0))
    assert torch.equal(start, before)
    assert loss(after) < 0.7 * loss(start)


def test_clipping_is_by_client_over_all_its_images() -> None:
    class Given:
        def gradient(self, step: int, features: object, synthetic: Tensor) -> Tensor:
            return synthetic

    images = torch.randn(3, IPC, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images[2] *= 0.01
    client = torch.tensor([0, 0, 1])
    clipped = ClippedMatcher(Given(), client, 2.0).gradient(0, None, images)  # type: ignore[arg-type]
    assert float(clipped[:2].norm()) == pytest.approx(2.0, rel=1e-5)
    torch.testing.assert_close(clipped[:2], images[:2] * (2.0 / images[:2].norm()))
    torch.testing.assert_close(clipped[2], images[2])  # below the bound
    nothing = ClippedMatcher(Given(), client, 2.0).gradient(0, None, torch.zeros_like(images))  # type: ignore[arg-type]
    assert torch.equal(nothing, torch.zeros_like(images))


def test_momentum_is_heavy_ball() -> None:
    class Constant:
        def gradient(self, step: int, features: object, synthetic: Tensor) -> Tensor:
            return torch.ones_like(synthetic)

    out = condense(
        torch.zeros(1, 1, 1, 2, 2), network, Constant(), steps=3, optimiser=MomentumSgd(0.1, 0.5)
    )  # type: ignore[arg-type]
    assert torch.allclose(out, torch.full_like(out, -0.1 * (1 + 1.5 + 1.75)))


def test_batches_are_without_replacement_or_resampled_on_request() -> None:
    images = data()
    labels = torch.cat([torch.zeros(40), torch.ones(5), torch.full((15,), 2)]).long()
    clients = OpenClients([4], ImageData(images.images, labels, images.spec), [torch.arange(N)])
    segments = clients.segments(1)
    all_ = BatchIndices(clients, segments, 10, 70, small_class="all", seed=0, round=1)
    assert all_.sizes.tolist() == [10, 5, 10]
    seen = torch.zeros(N)
    for step in range(70):
        indices, where = all_.at(step), all_.segment
        assert torch.equal(clients.labels(indices), segments.label[where])
        assert len(set(indices.tolist())) == len(indices)
        seen[indices] += 1
    assert (seen > 0).all()
    resampled = BatchIndices(clients, segments, 10, 70, small_class="resample", seed=0, round=1)
    assert resampled.sizes.tolist() == [10, 10, 10]
    draws = torch.stack([resampled.at(step)[10:20] for step in range(70)]) - 40
    assert draws.min() >= 0
    assert draws.max() < 5
    # with replacement, not the whole class repeated
    assert any(len(set(row.tolist())) < 5 for row in draws)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reduced_precision_of_the_real_pass_changes_the_gradient_little(device: str) -> None:
    """bfloat16 keeps 8 bits: the gradient moves by about a percent, its direction hardly; synthetic
    images stay float32."""
    net, S = network(device), synthetic(CLASSES, device)
    clients = OpenClients([0], data(device), [torch.arange(N)])
    _, batches = all_batches(clients)
    full, half = (
        ExactMatcher(clients, batches)
        .gradient(0, NetworkFeatures(net, 1.0, None, dtype), S)
        .flatten()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    assert (full - half).norm() < 0.03 * full.norm()


@pytest.mark.parametrize("images", [1, 8, 256])
def test_the_size_of_passes_changes_nothing_but_rounding(
    images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real images, synthetic segments and per-example gradients in pieces of any size."""
    features, S = NetworkFeatures(network(), 1.0, None), synthetic(CLASSES)
    x, segment = torch.randn(50, 1, 8, 8), (torch.arange(50) ** 2) % CLASSES
    whole = features(x, segment), per_example_gradients(features, S, x, segment)
    leaf = S.clone().requires_grad_()
    means = synthetic_means(features, leaf)
    (pulled,) = torch.autograd.grad(means, leaf, torch.ones_like(means))
    monkeypatch.setattr("fedsynth.synthesizer.condensation.loop.CPU_BYTES", images * 8 * 64 * 4)
    assert features.images_at_once(x) == images
    torch.testing.assert_close(features.real(x, segment), whole[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        per_example_gradients(features, S, x, segment), whole[1], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        pull_back(features, S, lambda m, numbers: torch.ones_like(m)), pulled, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("augment", [False, True])
def test_features_pull_back_what_autograd_does(augment: bool) -> None:
    """Embedding and weighted logits, through the siamese augmentation or not, many vectors or one;
    also for networks without a VJP."""
    transform = (
        SiameseAugmentation(4, torch.Generator().manual_seed(3), flip=True) if augment else None
    )
    x, segment = torch.randn(9, 1, 8, 8), torch.arange(9) % 4
    for norm in ("instance", "group"):
        net = ConvNet((1, 8, 8), CLASSES, width=8, depth=2, norm=norm).requires_grad_(False)
        features = NetworkFeatures(net, 0.4, transform)
        leaf = x.clone().requires_grad_()
        u = features(leaf, segment)
        vectors = torch.randn(3, *u.shape)
        expected = torch.stack(
            [torch.autograd.grad(u, leaf, v, retain_graph=True)[0] for v in vectors]
        )
        mine, pull = features.vjp(x, segment)
        torch.testing.assert_close(mine, u.detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pull(vectors), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pull(vectors[:1]), expected[:1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_of_the_batch_may_cut_classes_and_clients(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over ragged segments, and private sums over clients of different sizes, do not depend
    on where the pieces end."""
    features, parts = (
        NetworkFeatures(network(), 1.0, None),
        [torch.arange(5), torch.arange(5, 33), torch.arange(33, N)],
    )
    clients = OpenClients([0, 1, 2], data(), parts)
    segments, batches = all_batches(clients)
    width = 8 * 4 + CLASSES
    indices = torch.cat(
        [
            clients.examples(p, c)
            for p, c in zip(segments.position.tolist(), segments.label.tolist(), strict=True)
        ]
    )
    rows = features(clients.images(indices), batches.segment)
    expected = torch.stack([rows[batches.segment == s].mean(0) for s in range(len(segments))])
    monkeypatch.setattr("fedsynth.core.client.CPU_CHUNK", size)
    torch.testing.assert_close(
        ExactMatcher(clients, batches).real_means(0, features, len(segments)),
        expected,
        atol=1e-5,
        rtol=1e-4,
    )

    guards, secrets = (
        [Guard(Ledger(str(k)), 1e-5, None) for k in range(3)],
        [SecretGenerator() for _ in range(3)],
    )
    group = PrivateClients(range(3), data(), parts, [])
    row = Release(1, "x", "test", "x", 1e-12, 1e6, 1.0, "full", 1, CLASSES * width)
    series = [GaussianSums(row, CLASSES, g, s) for g, s in zip(guards, secrets, strict=True)]
    sums = group.class_sums(series, lambda x, segment: features.real(x, segment))
    by_client = torch.zeros(3 * CLASSES, width)
    for position, part in enumerate(parts):
        labels = clients.labels(part)
        by_client.index_add_(0, CLASSES * position + labels, features(clients.images(part), labels))
    torch.testing.assert_close(sums, by_client, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_compiled_real_pass_is_the_same_pass(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full pieces compiled, the rest eager; new weights of the same network are seen; the global
    generator stays."""
    before = torch.get_rng_state()
    net, x = network(), torch.randn(13, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        "fedsynth.synthesizer.condensation.loop.CPU_BYTES", 4 * 8 * 64 * precision.itemsize
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
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_synthetic_images_compiled_are_pulled_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole passes are compiled, whichever comes first, and smaller ones are not; u and the
    gradient are those of the eager pass. Catches: a shape that a client's data decide, a compiled
    part that is another function, and one that falls back to torch alone."""
    monkeypatch.setattr("fedsynth.synthesizer.condensation.loop.CPU_BYTES", 4 * 8 * 64 * 4)
    torch.compiler.reset()
    counters.clear()
    asked: list[bool] = []
    parts = frozen._parts
    monkeypatch.setattr(
        frozen, "_parts", lambda compiled: asked.append(compiled) or parts(compiled)
    )
    net = network()
    plain, compiled = (NetworkFeatures(net, 0.5, None, compiled=c, ipc=2) for c in (False, True))
    draws = torch.Generator().manual_seed(0)
    for images in (2, 4, 2, 4):
        x = torch.randn(images, 1, 8, 8, generator=draws)
        segment = torch.zeros(images, dtype=torch.int64)
        u, pull = plain.vjp(x, segment)
        vectors = torch.randn(1, *u.shape, generator=draws)
        mine, pull_mine = compiled.vjp(x, segment)
        torch.testing.assert_close(mine, u, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pull_mine(vectors), pull(vectors), atol=1e-5, rtol=1e-5)
    assert asked[::2] == [False] * 4
    assert asked[1::2] == [False, True, False, True]
    assert counters["frames"]["ok"] == 2 * 2  # forward and back, of two blocks
    assert not counters["graph_break"]
