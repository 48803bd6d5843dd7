"""Steps and optimisers against torch and NumPy; one pass of many clients equals separate ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fedsynth.models.flat import flatten, replicator
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import Linear
from fedsynth.privacy.dpsgd import DpSgdSettings, Optimiser, dp_sgd
from fedsynth.privacy.passes import Units
from fedsynth.results.checkpoint import CheckpointFolder, LoopCheckpoints
from fedsynth.seeding import forked_rng
from fedsynth.training import many_clients, sgd
from fedsynth.training.many_clients import Learner, learner_bytes, train_together
from fedsynth.training.sgd import (
    CROSS_ENTROPY,
    Adam,
    MomentumSgd,
    Objective,
    Pull,
    SgdSettings,
    train_on,
)
from tests.conftest import NO_CUDA
from tests.digits import SPEC
from tests.privacy.support import mechanism
from tests.rounds import take_step


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SIZES = (7, 1, 0, 23, 10, 5)
DRAWS = seeded(0)
IMAGES, LABELS = torch.randn(60, 1, 4, 4, generator=DRAWS), torch.randint(3, (60,), generator=DRAWS)


def dense(*sizes: int) -> nn.Module:
    with forked_rng(0, "network"):
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), layers[0], *(m for x in layers[1:] for m in (nn.ReLU(), x)))


def learners(settings: Any, pulls: bool = False, sizes: Any = SIZES, device: Any = "cpu") -> Any:
    """Returns clients with separate models, as in SOLO, and parts of one tensor of data."""
    clients, order = [], torch.randperm(60, generator=seeded(1))
    for k, size in enumerate(sizes):
        model = dense(16, 5, 3).to(device)
        weights = flatten(model)
        torch.nn.utils.vector_to_parameters(weights + 0.01 * k, model.parameters())
        examples, order = order[:size].to(device), order[size:]
        center, linear = torch.randn(2, len(weights), generator=seeded(k)).to(device)
        extra = Pull(0.3 * k, center, 0.1 * linear) if pulls and k % 2 else None
        draws = seeded(10 + k)
        clients.append(Learner(model, examples, settings(k), draws, extra))
    return clients


def train(clients: list[Learner], *progress: Any) -> None:
    train_together(clients, IMAGES.__getitem__, LABELS.__getitem__, *progress)


@pytest.mark.parametrize(
    "settings",
    [
        lambda k: SgdSettings(3, 5, MomentumSgd(0.1, 0.9, 1e-2)),
        lambda k: SgdSettings(1 + 2 * k % 5, 5, MomentumSgd(0.1, 0.9)),  # stragglers
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1, 0.9, 1e-2), steps=7),
        lambda k: SgdSettings(2, 64, MomentumSgd(0.1)),
        lambda k: SgdSettings(3, 5, MomentumSgd(0.1, 0.9), drop_last=True),
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1), steps=7, drop_last=True),
    ],
)
@pytest.mark.parametrize("few", [1, 4])
def test_joint_training_equals_separate_training(
    settings: Any, few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = IMAGES.to(device), LABELS.to(device)
    monkeypatch.setattr(many_clients, "FEW", few)
    monkeypatch.setattr(many_clients, "BLOCK", 2)
    clients = learners(settings, True, device=device)
    starts = [flatten(client.model) for client in clients]
    trained = train_together(clients, lambda i: images[i], lambda i: labels[i])
    assert all(map(torch.equal, starts, [flatten(client.model) for client in clients]))
    separate = learners(settings, True, device=device)
    for size, weights, start, c in zip(SIZES, trained, starts, separate, strict=True):
        x, y = images[c.examples], labels[c.examples]
        train_on(c.model, x.__getitem__, y, c.settings, c.generator, Objective(penalty=c.penalty))
        expected = flatten(c.model)
        torch.testing.assert_close(weights, expected, atol=2e-6, rtol=1e-5)
        assert torch.equal(start, weights) == (size == 0)


def test_replicas_share_all_but_their_parameters() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 3)).requires_grad_(False)
    old, x = flatten(model), IMAGES[:5, 0, 0]
    replica = replicator(model)
    weights = [old + 1.0, old - 1.0]
    for flat, copied in zip(weights, map(replica, weights), strict=True):
        expected = copy.deepcopy(model)
        torch.nn.utils.vector_to_parameters(flat, expected.parameters())
        assert repr(copied) == repr(expected)
        assert torch.equal(copied(x), expected(x))
        assert torch.equal(flatten(copied), flat)
        assert copied.state_dict().keys() == model.state_dict().keys()
        copied.train(False).requires_grad_(True)
    assert torch.equal(flatten(model), old)
    assert model.training
    assert not any(p.requires_grad for p in model.parameters())


class Listed(nn.Module):
    """A network whose forward pass reads its layers from a list."""

    dense = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.order = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


def test_replicas_of_own_networks_use_their_own_layers() -> None:
    model, x = Listed(), IMAGES[:5, 0, 0]
    flat = flatten(model) + 1.0
    copied, expected = replicator(model)(flat), Listed()
    torch.nn.utils.vector_to_parameters(flat, expected.parameters())
    assert torch.equal(copied(x), expected(x))
    copied(x).sum().backward()
    gradients = [p.grad for p in copied.parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert torch.equal(flatten(copied), flat)


@pytest.mark.parametrize("few", [1, 4])
def test_joint_training_reports_progress(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_clients, "FEW", few)
    monkeypatch.setattr(many_clients, "BLOCK", 1)
    progress: list[tuple[int, int]] = []
    clients = learners(lambda k: SgdSettings(1 + k, 5, MomentumSgd(0.1)), sizes=(3, 8))
    train(clients, lambda *step: progress.append(step))
    assert progress == ([(2, 5), (3, 5), (4, 5), (5, 5), (5, 5)] if few == 1 else [(5, 5)])


def test_joint_training_needs_pulls_and_dense_networks() -> None:
    client = learners(lambda k: SgdSettings(1, 5, MomentumSgd(0.1)))[0]
    fields = (client.model, client.examples, client.settings, client.generator)
    learner = Learner(*fields, lambda net: torch.zeros(()))
    with pytest.raises(ValueError, match="is neither None nor a Pull"):
        train([learner])
    layer = nn.Linear(4, 3)
    projected = build_model(ModelSettings("linear", projection=8), (1, 4, 4), 3, 0)
    supported = [Linear((1, 4, 4), 3), dense(16, 5, 3), projected]
    unsupported = [
        build_model(ModelSettings(width=4, depth=1, projection=8), (1, 8, 8), 3, 0),
        nn.Sequential(layer, nn.BatchNorm1d(3)),
        nn.Sequential(layer, nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        nn.Sequential(layer, nn.Dropout(0.5)),
        nn.Sequential(layer, nn.RReLU()),
        nn.Linear(4, 3).double(),
        type("Own", (nn.Sequential,), {})(layer, nn.ReLU()),  # a custom forward
    ]
    assert all(many_clients.trains_together(model) for model in supported)
    assert not any(many_clients.trains_together(model) for model in unsupported)
    assert learner_bytes(layer, 2**15 // 64, SPEC) is not None
    assert learner_bytes(layer, 2**15 // 64 + 1, SPEC) is None
    assert learner_bytes(unsupported[0], 1, SPEC) is None


@pytest.mark.parametrize("penalties", [False, True])
def test_peak_memory_is_at_most_the_estimate(penalties: bool) -> None:
    clients = learners(lambda k: SgdSettings(2, 5, MomentumSgd(0.1, 0.9)), penalties, (10,) * 6)
    spec = replace(SPEC, height=4, width=4)
    estimate = sum(learner_bytes(client.model, 5, spec) or 0 for client in clients)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(clients)
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert 0 < peak <= estimate


@dataclass(frozen=True)
class Adaptive:
    """A custom optimiser whose state has the number of steps of each network."""

    learning_rate: float = 0.1

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(w), w.new_zeros(*w.shape[:-1], 1)

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        mean, steps = state
        mean.lerp_(gradient, 0.1)
        w.sub_(self.learning_rate * mean / (1 - 0.9 ** steps.add_(1)))


RULES: list[Optimiser] = [MomentumSgd(0.1, 0.9, 1e-2), Adam(0.1, weight_decay=1e-2), Adaptive()]


def numpy_steps(rule: Optimiser, w: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    velocity, squares = np.zeros_like(w), np.zeros_like(w)
    for number, g in enumerate(gradients, start=1):
        if isinstance(rule, MomentumSgd):
            velocity = rule.momentum * velocity + g + rule.weight_decay * w
            w = w - rule.learning_rate * velocity
        if isinstance(rule, Adam):
            decayed = g + rule.weight_decay * w
            velocity = 0.9 * velocity + 0.1 * decayed
            squares = 0.999 * squares + 0.001 * decayed**2
            root = np.sqrt(squares / (1 - 0.999**number)) + 1e-8
            w = w - rule.learning_rate * velocity / (1 - 0.9**number) / root
        if isinstance(rule, Adaptive):
            velocity = 0.9 * velocity + 0.1 * g
            w = w - rule.learning_rate * velocity / (1 - 0.9**number)
    return w


def softmax_gradient(w: np.ndarray, batch: np.ndarray) -> np.ndarray:
    x, y = IMAGES.numpy()[batch].reshape(-1, 16).astype(np.float64), LABELS.numpy()[batch]
    p = np.exp(x @ w[:48].reshape(3, 16).T + w[48:])
    r = p / p.sum(axis=1, keepdims=True) - np.eye(3)[y]
    return np.concatenate([(r.T @ x).ravel(), r.sum(axis=0)]) / len(x)


def numpy_training(rule: Optimiser, orders: list[np.ndarray]) -> np.ndarray:
    w = start = flatten(dense(16, 3)).double().numpy()
    gradients: list[np.ndarray] = []
    for batch in orders:
        gradients.append(softmax_gradient(w, batch))
        w = numpy_steps(rule, start, gradients)
    return w


def test_momentum_sgd_updates_in_place_and_keeps_the_gradient() -> None:
    rule, w, gradient = MomentumSgd(0.1, 0.9, 0.5), IMAGES[:2].clone(), IMAGES[2:4].clone()
    state = rule.init(w)
    addresses = [t.data_ptr() for t in (w, *state)]
    rule.update(w, gradient, state)
    assert [t.data_ptr() for t in (w, *state)] == addresses
    assert torch.equal(gradient, IMAGES[2:4])
    torch.testing.assert_close(w, IMAGES[:2] - 0.1 * (gradient + 0.5 * IMAGES[:2]))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("few", [1, 3])
def test_optimisers_train_one_network_or_many(
    rule: Optimiser, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_clients, "FEW", few)
    monkeypatch.setattr(many_clients, "BLOCK", 1)
    settings, parts = SgdSettings(2, 4, rule), torch.arange(24).split([9, 3, 12])
    learners = [Learner(dense(16, 3), p, settings, seeded(k)) for k, p in enumerate(parts)]
    trained = train_together(learners, IMAGES.__getitem__, LABELS.__getitem__)
    single = dense(16, 3)
    images, labels = IMAGES[parts[2]], LABELS[parts[2]]
    train_on(single, images.__getitem__, labels, settings, seeded(2))
    for k, weights in zip((0, 1, 2, 2), (*trained, flatten(single)), strict=True):
        order = seeded(k)
        epochs = [parts[k][torch.randperm(len(parts[k]), generator=order)] for _ in range(2)]
        expected = numpy_training(rule, [b.numpy() for epoch in epochs for b in epoch.split(4)])
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_optimisers_train_with_dp_sgd(rule: Optimiser) -> None:
    """With σ → 0, a huge clip and full batches, steps follow the mean gradient."""
    model = dense(16, 3)
    noiseless = mechanism(noise_multiplier=1e-12, sensitivity=1e6, steps=3, dimension=51)
    settings = DpSgdSettings(rule, 24.0)
    dp_sgd(model, lambda i: (IMAGES[i], LABELS[i]), noiseless, settings, Units(24))
    expected = numpy_training(rule, [np.arange(24)] * 3)
    np.testing.assert_allclose(flatten(model).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@NO_CUDA
@pytest.mark.parametrize(
    ("norm", "precision"),
    [("instance", torch.float32), ("batch", torch.float32), ("batch", torch.bfloat16)],
)
def test_recorded_steps_equal_eager_steps(
    norm: str, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for worth in (1, 10**9):
        draws = seeded(0)
        model = build_model(ModelSettings(width=4, depth=2, norm=norm), (1, 8, 8), 4, 0).cuda()
        x = torch.randn(30, 1, 8, 8, generator=draws).cuda()
        y = torch.randint(4, (30,), generator=draws).cuda()
        monkeypatch.setattr(sgd, "WORTH_RECORDING", worth)
        settings = SgdSettings(4, 8, MomentumSgd(0.1, 0.9, 1e-2), radius=1.0)
        order = seeded(5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_on(model, x.__getitem__, y, settings, order, precision=precision)
        trained.append(dict(model.state_dict()))
    tolerance = 1e-4 if precision == torch.float32 else 1e-2
    torch.testing.assert_close(*trained, atol=tolerance, rtol=10 * tolerance)


def test_unrecordable_steps_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(3)

    def refuse(step: Callable[[], None], device: torch.device) -> None:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(sgd, "_record", refuse)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        replay = sgd.recorded(lambda indices: state.add_(indices), 3, [state])
    assert torch.equal(state, torch.zeros(3))
    replay(torch.tensor([1, 2, 3]))
    assert state.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "examples", "sizes"),
    [
        (SgdSettings(2, 5, MomentumSgd(0.1)), 12, [5, 5, 2, 5, 5, 2]),
        (SgdSettings(2, 5, MomentumSgd(0.1), drop_last=True), 12, [5, 5, 5, 5]),
        (SgdSettings(2, 5, MomentumSgd(0.1), drop_last=True), 10, [5, 5, 5, 5]),
        (SgdSettings(2, 5, MomentumSgd(0.1), drop_last=True), 3, [3, 3]),
        (SgdSettings(1, 5, MomentumSgd(0.1), steps=3, drop_last=True), 12, [5, 5, 5]),
    ],
)
def test_incomplete_last_batches_are_dropped_on_request(
    settings: SgdSettings, examples: int, sizes: list[int]
) -> None:
    seen: list[int] = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x)

    x, y = torch.randn(examples, 4, generator=seeded(0)), torch.arange(examples) % 3
    train_on(Net(4, 3), x.__getitem__, y, settings, seeded(1))
    assert seen == sizes
    assert settings.total_steps(examples) == len(sizes)


@pytest.mark.parametrize("examples", [5, 1])
def test_last_batch_of_one_example_is_doubled(examples: int) -> None:
    """Batches of two leave one of 5 examples, whose variance over the batch would not exist."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    x = torch.randn(examples, 1, 2, 2, generator=seeded(0))
    y, expected = torch.arange(examples) % 3, copy.deepcopy(net)
    settings = SgdSettings(1, 2, MomentumSgd(0.1))
    train_on(net, x.__getitem__, y, settings, seeded(1))
    optimiser = torch.optim.SGD(expected.parameters(), 0.1)
    for part in torch.randperm(examples, generator=seeded(1)).split(2):
        part = part if len(part) == 2 else torch.cat([part, part])
        take_step(optimiser, nn.functional.cross_entropy(expected(x[part]), y[part]))
    torch.testing.assert_close(dict(net.state_dict()), dict(expected.state_dict()))


def test_dropout_depends_on_the_generator_only(tmp_path: Path) -> None:
    """Its masks are equal after an interruption, and the global generator is left as it was."""
    x, y = torch.randn(20, 4, generator=seeded(0)), torch.arange(20) % 3
    first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def trained(name: str, seed: int = 1, stop: int = 0) -> Tensor:
        net = copy.deepcopy(first)
        keeper = LoopCheckpoints(CheckpointFolder(tmp_path / name, "this run"), 1, 0.0)

        def report(completed: int, total: int) -> None:
            if completed == stop:
                raise KeyboardInterrupt

        settings = SgdSettings(3, 5, MomentumSgd(0.1))
        with forked_rng(seed + stop, "another use"):
            before = torch.get_rng_state()
            with suppress(KeyboardInterrupt):
                train_on(
                    net, x.__getitem__, y, settings, seeded(seed), CROSS_ENTROPY, report, keeper
                )
            assert torch.equal(torch.get_rng_state(), before)
        return flatten(net)

    expected = trained("whole")
    assert not torch.equal(trained("resumed", stop=8), expected)
    assert torch.equal(trained("resumed"), expected)
    assert not torch.equal(trained("other", seed=2), expected)
