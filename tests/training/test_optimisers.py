"""One rule moves all weights: momentum SGD against NumPy, and others wherever it stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsynth.models.flat import flatten
from fedsynth.privacy.dpsgd import DpSgdSettings, Optimiser, dp_sgd
from fedsynth.training.many_clients import Learner, train_together
from fedsynth.training.sgd import MomentumSgd, SgdSettings, train_on
from tests.privacy.support import series

DRAWS = np.random.default_rng(0)
IMAGES = torch.from_numpy(DRAWS.standard_normal((24, 1, 2, 3)).astype(np.float32))
LABELS = torch.from_numpy(DRAWS.integers(0, 3, 24))


@dataclass(frozen=True)
class Adam:
    """A rule of one's own, with a step's number among what it keeps, one for each network."""

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
    """The rules above, written out for one vector."""
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
    """Of the mean cross-entropy of `network`, whose parameters are W [3, 6] and b [3]."""
    x = x.reshape(len(x), -1).astype(np.float64)
    logits = x @ w[:18].reshape(3, 6).T + w[18:]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x).ravel(), p.sum(axis=0)]) / len(x)


def numpy_training(rule: Optimiser, orders: list[np.ndarray]) -> np.ndarray:
    """`network` after a step on each of these batches."""
    start = flatten(network()).double().numpy()
    gradients: list[np.ndarray] = []
    w = start
    for batch in orders:
        gradients.append(softmax_gradient(w, IMAGES.numpy()[batch], LABELS.numpy()[batch]))
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
def test_momentum_sgd_is_its_formula_on_any_shape(
    rate: float, momentum: float, decay: float, shape: tuple[int, ...]
) -> None:
    """In place: the same tensors are moved at every step, and the gradient is left as it is."""
    draws = np.random.default_rng(1)
    start = draws.standard_normal(shape)
    gradients = [draws.standard_normal(shape) for _ in range(4)]
    rule = MomentumSgd(rate, momentum, decay)
    w = torch.from_numpy(start.copy())
    state = rule.init(w)
    places = [t.data_ptr() for t in (w, *state)]
    for g in gradients:
        given_g = torch.from_numpy(g.copy())
        rule.update(w, given_g, state)
        np.testing.assert_array_equal(given_g.numpy(), g)
    assert [t.data_ptr() for t in (w, *state)] == places
    expected = numpy_steps(rule, start.ravel(), [g.ravel() for g in gradients])
    np.testing.assert_allclose(w.numpy().ravel(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("few", [1, 3])
def test_training_of_one_network_and_of_many_clients(
    rule: Optimiser, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged: rules keep rows apart, also where the last clients go on alone with what was kept."""
    monkeypatch.setattr("fedsynth.training.many_clients.FEW", few)
    monkeypatch.setattr("fedsynth.training.many_clients.BLOCK", 1)
    settings, parts = SgdSettings(2, 4, rule), torch.arange(24).split([9, 3, 12])
    learners = [
        Learner(network(), part, settings, torch.Generator().manual_seed(k))
        for k, part in enumerate(parts)
    ]
    train_together(learners, IMAGES.__getitem__, LABELS.__getitem__)
    single = network()
    images, labels = IMAGES[parts[2]], LABELS[parts[2]]
    train_on(single, images.__getitem__, labels, settings, torch.Generator().manual_seed(2))
    expected = [numpy_training(rule, shuffled(k, part, 4, 2)) for k, part in enumerate(parts)]
    models = [*(one.model for one in learners), single]
    for model, w in zip(models, [*expected, expected[2]], strict=True):
        np.testing.assert_allclose(flatten(model).numpy(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_training_with_dp_sgd(rule: Optimiser) -> None:
    """σ → 0, a clip that nothing reaches, all records at every step: steps on the mean gradient."""
    model = network()
    size = len(flatten(model))
    noiseless = series(noise_multiplier=1e-12, sensitivity=1e6, steps=3, dimension=size)
    dp_sgd(model, lambda i: IMAGES[i], LABELS, noiseless, 3, DpSgdSettings(rule, 24.0))
    expected = numpy_training(rule, [np.arange(24)] * 3)
    np.testing.assert_allclose(flatten(model).numpy(), expected, rtol=1e-4, atol=1e-5)
