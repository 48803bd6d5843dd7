"""Training of many clients in one pass equals separate training; optimisers against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fedsynth.models.flat import flatten, load_flat
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import Linear
from fedsynth.privacy.dpsgd import DpSgdSettings, Optimiser, dp_sgd
from fedsynth.training.many_clients import (
    Learner,
    learner_bytes,
    train_together,
    trains_together,
    worth_batching,
)
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings, train_on
from tests.privacy.support import series

SIZES = (7, 1, 0, 23, 10, 5)
DRAWS = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(60, 1, 4, 4, generator=DRAWS), torch.randint(3, (60,), generator=DRAWS)


def two_layers() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))


def pull(seed: int, size: int, device: torch.device | str = "cpu") -> Pull:
    center, linear = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)).to(device)
    return Pull(0.3 * seed, center, 0.1 * linear)


def learners(
    settings: Callable[[int], SgdSettings],
    penalties: bool = False,
    sizes: Sequence[int] = SIZES,
    device: torch.device | str = "cpu",
) -> list[Learner]:
    """Returns clients with separate models, as in SOLO, and parts of one tensor of data."""
    clients, order = [], torch.randperm(60, generator=torch.Generator().manual_seed(1))
    for k, size in enumerate(sizes):
        model = two_layers().to(device)
        weights = flatten(model)
        load_flat(model, weights + 0.01 * k)
        examples, order = order[:size].to(device), order[size:]
        extra = pull(k, len(weights), device) if penalties and k % 2 else None
        draws = torch.Generator().manual_seed(10 + k)
        clients.append(Learner(model, examples, settings(k), draws, extra))
    return clients


def train_separately(clients: list[Learner], images: Tensor, labels: Tensor) -> list[Tensor]:
    """Trains clients one after another, as the oracle."""
    for c in clients:
        x, y = images[c.examples], labels[c.examples]
        train_on(c.model, x.__getitem__, y, c.settings, c.generator, penalty=c.penalty)
    return [flatten(client.model) for client in clients]


@pytest.mark.parametrize(
    "settings",
    [
        lambda k: SgdSettings(3, 5, MomentumSgd(0.1, 0.9, 1e-2)),
        lambda k: SgdSettings(1 + 2 * k % 5, 5, MomentumSgd(0.1, 0.9)),  # stragglers
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1, 0.9, 1e-2), steps=7),
        lambda k: SgdSettings(2, 64, MomentumSgd(0.1)),
    ],
)
@pytest.mark.parametrize("few", [1, 4])
def test_joint_training_equals_separate_training(
    settings: Callable[[int], SgdSettings],
    few: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All steps are joint, or the last clients train separately."""
    images, labels = IMAGES.to(device), LABELS.to(device)
    monkeypatch.setattr("fedsynth.training.many_clients.FEW", few)
    monkeypatch.setattr("fedsynth.training.many_clients.BLOCK", 2)
    clients = learners(settings, True, device=device)
    starts = [flatten(client.model) for client in clients]
    train_together(clients, lambda i: images[i], lambda i: labels[i])
    oracle = train_separately(learners(settings, True, device=device), images, labels)
    for size, client, start, expected in zip(SIZES, clients, starts, oracle, strict=True):
        torch.testing.assert_close(flatten(client.model), expected, atol=2e-6, rtol=1e-5)
        assert torch.equal(start, flatten(client.model)) == (size == 0)


@pytest.mark.parametrize("few", [1, 4])
def test_joint_training_reports_progress(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsynth.training.many_clients.FEW", few)
    monkeypatch.setattr("fedsynth.training.many_clients.BLOCK", 1)
    clients = learners(lambda k: SgdSettings(2, 5, MomentumSgd(0.1)), sizes=(0, 0))
    starts = [flatten(client.model) for client in clients]
    train_together(clients, IMAGES.__getitem__, LABELS.__getitem__)
    assert all(torch.equal(flatten(c.model), w) for c, w in zip(clients, starts, strict=True))
    progress: list[tuple[int, int]] = []
    clients = learners(lambda k: SgdSettings(1 + k, 5, MomentumSgd(0.1)), sizes=(3, 8))
    train_together(
        clients, IMAGES.__getitem__, LABELS.__getitem__, lambda *step: progress.append(step)
    )
    assert progress == ([(2, 5), (3, 5), (4, 5), (5, 5), (5, 5)] if few == 1 else [(5, 5)])


def test_pull_gradient_equals_autograd() -> None:
    model = two_layers()
    penalty = pull(3, flatten(model).numel())
    penalty(model).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    grad = torch.ones_like(expected)
    penalty.add_gradient(grad, flatten(model))
    torch.testing.assert_close(grad - 1, expected, atol=1e-5, rtol=1e-4)


def test_joint_training_needs_equal_settings() -> None:
    for settings in (
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1 + k)),
        lambda k: SgdSettings(1, 5 + k, MomentumSgd(0.1)),
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1), radius=1.0),
    ):
        with pytest.raises(ValueError, match="must have the same batch size, the same optimiser"):
            train_together(learners(settings), IMAGES.__getitem__, LABELS.__getitem__)
    client = learners(lambda k: SgdSettings(1, 5, MomentumSgd(0.1)))[0]
    fields = (client.model, client.examples, client.settings, client.generator)
    unsupported = Learner(*fields, lambda net: torch.zeros(()))
    with pytest.raises(ValueError, match="must be None or a Pull"):
        train_together([unsupported], IMAGES.__getitem__, LABELS.__getitem__)


def test_only_dense_networks_train_jointly() -> None:
    dense = nn.Linear(4, 3)
    projected = ModelSettings(width=4, depth=1, projection=8)
    supported = [
        Linear((1, 4, 4), 3),
        two_layers(),
        build_model(ModelSettings("linear", projection=8), (1, 4, 4), 3, 0),
    ]
    unsupported = [
        build_model(projected, (1, 8, 8), 3, 0),
        nn.Sequential(dense, nn.BatchNorm1d(3)),
        nn.Sequential(dense, nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        nn.Sequential(dense, nn.Dropout(0.5)),
        nn.Sequential(dense, nn.RReLU()),
        nn.Linear(4, 3).double(),
        type("Own", (nn.Sequential,), {})(dense, nn.ReLU()),  # a custom forward
    ]
    assert [trains_together(model) for model in supported + unsupported] == [True] * 3 + [False] * 7
    assert worth_batching(dense, 2**15 // 4, 4)
    assert not worth_batching(dense, 2**15 // 4 + 1, 4)


@pytest.mark.parametrize("penalties", [False, True])
def test_peak_memory_is_at_most_the_estimate(penalties: bool) -> None:
    """Compares the peak of torch's profiler with the estimate."""
    clients = learners(lambda k: SgdSettings(2, 5, MomentumSgd(0.1, 0.9)), penalties, (10,) * 6)
    estimate = sum(learner_bytes(client.model, 5, 16) for client in clients)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train_together(clients, IMAGES.__getitem__, LABELS.__getitem__)
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert 0 < peak <= estimate


FEW_DRAWS = np.random.default_rng(0)
FEW_IMAGES = torch.from_numpy(FEW_DRAWS.standard_normal((24, 1, 2, 3)).astype(np.float32))
FEW_LABELS = torch.from_numpy(FEW_DRAWS.integers(0, 3, 24))


@dataclass(frozen=True)
class Adam:
    """A custom optimiser whose state has the number of steps of each network."""

    learning_rate: float = 0.01

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(w), torch.zeros_like(w), w.new_zeros(*w.shape[:-1], 1)

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        m, v, t = state
        t.add_(1)
        m.lerp_(gradient, 0.1)
        v.lerp_(gradient.square(), 0.001)
        unbiased_m = m / (1 - 0.9**t)
        unbiased_v = v / (1 - 0.999**t)
        w.sub_(self.learning_rate * unbiased_m / (unbiased_v.sqrt() + 1e-8))


RULES: list[Optimiser] = [MomentumSgd(0.1, 0.9, 1e-2), Adam()]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 3))


def numpy_steps(rule: Optimiser, w: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Applies the optimisers above to one vector."""
    first = np.zeros_like(w)
    second = np.zeros_like(w)
    for number, g in enumerate(gradients, start=1):
        if isinstance(rule, MomentumSgd):
            first = rule.momentum * first + g + rule.weight_decay * w
            w = w - rule.learning_rate * first
        if isinstance(rule, Adam):
            first = 0.9 * first + 0.1 * g
            second = 0.999 * second + 0.001 * g**2
            root = np.sqrt(second / (1 - 0.999**number))
            w = w - rule.learning_rate * first / (1 - 0.9**number) / (root + 1e-8)
    return w


def softmax_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the gradient of `network`'s mean cross-entropy, with W [3, 6] and b [3]."""
    x = x.reshape(len(x), -1).astype(np.float64)
    logits = x @ w[:18].reshape(3, 6).T + w[18:]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x).ravel(), p.sum(axis=0)]) / len(x)


def numpy_training(rule: Optimiser, orders: list[np.ndarray]) -> np.ndarray:
    """Returns the weights of `network` after a step on each of these batches."""
    start = flatten(network()).double().numpy()
    gradients: list[np.ndarray] = []
    w = start
    for batch in orders:
        gradients.append(softmax_gradient(w, FEW_IMAGES.numpy()[batch], FEW_LABELS.numpy()[batch]))
        w = numpy_steps(rule, start, gradients)
    return w


def shuffled(seed: int, examples: Tensor, batch: int, epochs: int) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    return [
        part.numpy()
        for _ in range(epochs)
        for part in examples[torch.randperm(len(examples), generator=generator)].split(batch)
    ]


@given(
    rate=st.floats(1e-3, 2.0),
    momentum=st.floats(0, 1),
    decay=st.sampled_from([0.0, 1e-3, 0.5]),
    shape=st.sampled_from([(5,), (2, 5), (2, 1, 3, 2, 2)]),
)
def test_momentum_sgd_equals_numpy_on_any_shape(
    rate: float, momentum: float, decay: float, shape: tuple[int, ...]
) -> None:
    """Updates are in place and leave the gradient unchanged."""
    draws = np.random.default_rng(1)
    start = draws.standard_normal(shape)
    gradients = [draws.standard_normal(shape) for _ in range(4)]
    rule = MomentumSgd(rate, momentum, decay)
    w = torch.from_numpy(start.copy())
    state = rule.init(w)
    addresses = [t.data_ptr() for t in (w, *state)]
    for g in gradients:
        gradient = torch.from_numpy(g.copy())
        rule.update(w, gradient, state)
        np.testing.assert_array_equal(gradient.numpy(), g)
    assert [t.data_ptr() for t in (w, *state)] == addresses
    expected = numpy_steps(rule, start.ravel(), [g.ravel() for g in gradients])
    np.testing.assert_allclose(w.numpy().ravel(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("few", [1, 3])
def test_optimisers_train_one_network_or_many(
    rule: Optimiser, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients have unequal sizes; states stay separate when the last clients continue."""
    monkeypatch.setattr("fedsynth.training.many_clients.FEW", few)
    monkeypatch.setattr("fedsynth.training.many_clients.BLOCK", 1)
    settings, parts = SgdSettings(2, 4, rule), torch.arange(24).split([9, 3, 12])
    learners = [
        Learner(network(), part, settings, torch.Generator().manual_seed(k))
        for k, part in enumerate(parts)
    ]
    train_together(learners, FEW_IMAGES.__getitem__, FEW_LABELS.__getitem__)
    single = network()
    images, labels = FEW_IMAGES[parts[2]], FEW_LABELS[parts[2]]
    train_on(single, images.__getitem__, labels, settings, torch.Generator().manual_seed(2))
    expected = [numpy_training(rule, shuffled(k, part, 4, 2)) for k, part in enumerate(parts)]
    models = [*(learner.model for learner in learners), single]
    for model, w in zip(models, [*expected, expected[2]], strict=True):
        np.testing.assert_allclose(flatten(model).numpy(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_optimisers_train_with_dp_sgd(rule: Optimiser) -> None:
    """With σ → 0, a huge clip and full batches, steps follow the mean gradient."""
    model = network()
    size = len(flatten(model))
    noiseless = series(noise_multiplier=1e-12, sensitivity=1e6, steps=3, dimension=size)
    dp_sgd(model, lambda i: FEW_IMAGES[i], FEW_LABELS, noiseless, DpSgdSettings(rule, 24.0))
    expected = numpy_training(rule, [np.arange(24)] * 3)
    np.testing.assert_allclose(flatten(model).numpy(), expected, rtol=1e-4, atol=1e-5)
