"""FedHydra's Eqs. 2 to 11, the batch-norm term and the one-shot losses against numbers by hand and
plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.ensembles import (
    Stratification,
    average_of_logits,
    batch_norm_matching,
    guidance,
    has_statistics,
    share_of_classes,
    share_of_clients,
    stratified_aggregation,
    stratified_probabilities,
)
from fedsynth.synthesizer.generation.generators import make_generator
from fedsynth.synthesizer.generation.many_teachers import (
    OneShotDistillation,
    adversarial_loss,
    student_loss,
)

DIGITS = dataset_spec("digits")


def test_eqs_2_and_3_by_hand(device: torch.device) -> None:
    """Two classes, two clients, three steps; a minimum near zero is guarded."""
    first, second, third = (
        [[4.0, 2.0], [3.0, 1.0]],
        [[2.0, 2.0], [2.0, 1.0]],
        [[1.0, 1.0], [2.5, 1.0]],
    )
    series = torch.tensor([first, second, third], device=device)
    assert guidance(series, 1e-3).tolist() == [[3.0, 1.0], [0.5, 0.0]]
    guarded = guidance(torch.tensor([[[2.0]], [[0.0]]]), 0.01)
    assert guarded.tolist() == [[pytest.approx(200.0)]]


def test_eqs_4_to_7_by_hand_and_rows_of_zeros(device: torch.device) -> None:
    u = torch.tensor([[3.0, 1.0], [0.0, 0.0], [1.0, 0.0]], device=device)
    assert share_of_clients(u).tolist() == [[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]
    assert share_of_classes(u).tolist() == [[0.75, 1.0], [0.0, 0.0], [0.25, 0.0]]
    nothing = share_of_classes(torch.zeros(4, 2))
    assert nothing.tolist() == [[0.25, 0.25]] * 4


def test_eqs_8_to_11_equal_a_triple_loop(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    m, n, c = 3, 5, 4
    logits, y = rng.normal(size=(m, n, c)), rng.integers(0, c, n)
    by_class, by_client = rng.random((c, m)), rng.random((c, m))
    expected = np.zeros((n, c))
    for i in range(n):
        for k in range(m):
            for j in range(c):
                expected[i, j] += by_class[y[i], k] * logits[k, i, j] * by_client[j, k]
    tensors = [torch.tensor(a, device=device) for a in (logits, y, by_class, by_client)]
    np.testing.assert_allclose(stratified_aggregation(*tensors).cpu().numpy(), expected)  # type: ignore[arg-type]
    np.testing.assert_allclose(
        average_of_logits(tensors[0], tensors[1]).cpu().numpy(), logits.mean(0)
    )
    said = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    votes = np.zeros((n, c))
    for i in range(n):
        for k in range(m):
            votes[i] += by_class[y[i], k] * said[k, i] * by_client[:, k]
    found = stratified_probabilities(*tensors).softmax(dim=1).cpu().numpy()  # type: ignore[arg-type]
    np.testing.assert_allclose(found, votes / votes.sum(1, keepdims=True))


def models(norm: str = "batch", count: int = 2) -> list[nn.Module]:
    settings = ModelSettings(width=4, depth=2, norm=norm)
    made = [build_model(settings, (1, 8, 8), 10, seed).train() for seed in range(count)]
    x = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for model in made:
        model(x)  # so that running statistics are not the initial ones
    return [model.eval().requires_grad_(False) for model in made]


def test_the_batch_norm_term_by_hand_and_its_hooks_go(device: torch.device) -> None:
    clients: list[Any] = [model.to(device) for model in models()]
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(6, 1, 8, 8, generator=draws).to(device).requires_grad_()
    expected = torch.zeros((), device=device)
    for model in clients:
        h: Tensor = x
        for layer in model.features:
            if isinstance(layer, nn.BatchNorm2d):
                mean, variance = h.mean((0, 2, 3)), h.var((0, 2, 3), unbiased=False)
                expected = expected + (mean - layer.running_mean).norm()  # type: ignore[operator]
                expected = expected + (variance - layer.running_var).norm()  # type: ignore[operator]
            h = layer(h)
    with batch_norm_matching(clients) as loss:
        for _ in range(2):  # each call is for the passes since the last
            for model in clients:
                model(x)
            value = loss()
            torch.testing.assert_close(value, expected / 2)
        (gradient,) = torch.autograd.grad(value, x)
        assert gradient.abs().sum() > 0
    with pytest.raises(RuntimeError, match="on purpose"), batch_norm_matching(clients):
        raise RuntimeError("on purpose")
    assert not any(layer._forward_pre_hooks for model in clients for layer in model.modules())
    assert has_statistics(clients[0])
    (other,) = models("instance", 1)
    assert not has_statistics(other)
    with batch_norm_matching([other]) as loss:
        assert float(loss()) == 0


def test_eqs_15_and_17_to_19_by_hand(device: torch.device) -> None:
    def logits(*rows: tuple[float, float]) -> Tensor:
        return torch.tensor(rows, device=device).log()

    p, q = logits((0.8, 0.2), (0.3, 0.7)), logits((0.5, 0.5), (0.6, 0.4))
    kl = [0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)]
    kl.append(0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4))
    assert float(adversarial_loss(p, q, only_disagreement=False)) == pytest.approx(-sum(kl) / 2)
    q2 = logits((0.9, 0.1), (0.6, 0.4))  # agrees on the first image, not on the second
    assert float(adversarial_loss(p, q2, only_disagreement=True)) == pytest.approx(-kl[1] / 2)
    ce = -(math.log(0.5) + math.log(0.4)) / 2  # hard labels 0 and 1
    assert float(student_loss(p, q, 0.5)) == pytest.approx(sum(kl) / 2 + 0.5 * ce)


@pytest.mark.parametrize("batched", [True, False])
def test_stratification_equals_separate_loops(batched: bool, device: torch.device) -> None:
    """Algorithm 2 pair by pair, with the public generator: same weights and noise for all."""
    clients = [model.to(device) for model in models("instance", 3)]
    settings = Stratification(steps=4, batch=5, learning_rate=1e-2, latent=6, width=4)
    u = settings.measure(clients, DIGITS, 7, device, batched=batched)
    draws = torch_generator(7, "stratification noise", device=device)
    z = torch.randn(5, 6, generator=draws, device=device)
    for k, model in enumerate(clients):
        for j in range(0, 10, 4):
            generator = make_generator(DIGITS, 7, latent=6, width=4).to(device)
            adam = torch.optim.Adam(generator.parameters(), 1e-2)
            series, labels = [], torch.full((5,), j, device=device)
            for _ in range(4):
                loss = F.cross_entropy(model(generator.normalised(z)), labels)
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                series.append(float(loss.detach()))
            expected = (max(series) - min(series)) / min(series)
            assert float(u[j, k]) == pytest.approx(expected, rel=2e-2, abs=1e-3)


class Knows(nn.Module):
    """A classifier that tells two classes by the brightness of the image's halves, and says nothing
    of others."""

    def __init__(self, classes: tuple[int, int]) -> None:
        super().__init__()
        self.classes = classes
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        difference = 3 * (x[..., :4].mean((1, 2, 3)) - x[..., 4:].mean((1, 2, 3))) * self.scale
        z = x.new_full((len(x), 10), -5.0)
        z = z.index_fill(1, torch.tensor(self.classes, device=x.device), 0.0)
        a, b = (F.one_hot(torch.tensor(c, device=x.device), 10).to(x.dtype) for c in self.classes)
        return z + difference[:, None] * (a - b)


@pytest.mark.slow
def test_u_is_concentrated_on_the_classes_that_a_client_has() -> None:
    """2c/c in small: only a model's own classes can be reached by its generator."""
    clients = [Knows((2 * k, 2 * k + 1)).eval().requires_grad_(False) for k in range(3)]
    settings = Stratification(steps=25, batch=8, learning_rate=2e-2, latent=8, width=4)
    shares = share_of_clients(settings.measure(clients, DIGITS, 0, torch.device("cpu")))
    for j in range(6):
        assert shares[j].argmax() == j // 2
        assert float(shares[j, j // 2]) > 0.6


def test_a_student_learns_the_ensemble_and_says_where_there_is_no_batch_norm() -> None:
    clients, student = models(), build_model(ModelSettings(width=4, depth=2), (1, 8, 8), 10, 9)
    small: dict[str, Any] = {"generator_steps": 2, "batch": 16, "width": 4, "latent": 5}
    settings = OneShotDistillation(
        epochs=8, learning_rate=0.05, images="last", replay=True, **small
    )
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(3))

    def apart() -> float:
        with torch.no_grad():
            answer = torch.stack([model(x) for model in clients]).mean(0)
            return float(student_loss(answer, student(x), 1.0))

    before, weights = apart(), [p.clone() for model in clients for p in model.state_dict().values()]
    assert settings.fit(clients, student, average_of_logits, DIGITS, 0).notes == ()
    assert apart() < before
    after = [p for model in clients for p in model.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))
    mixed = [*clients, *models("instance", 1)]
    assert settings.fit(mixed, student, average_of_logits, DIGITS, 0).notes == (
        "no batch-norm term for models 2: they have no batch norm with running statistics",
    )


def test_settings_are_checked() -> None:
    with pytest.raises(SettingError, match="generator_steps"):
        OneShotDistillation(generator_steps=0)
    with pytest.raises(SettingError, match="crop"):
        OneShotDistillation(crop=0.6)
    with pytest.raises(UnknownNameError, match="images cannot be"):
        OneShotDistillation(images="some")
