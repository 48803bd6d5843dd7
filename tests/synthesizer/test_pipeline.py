"""Condensation of plain tensors: gradients against autograd, charges and refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor, nn

from fedsynth.errors import DataError, DivergedError
from fedsynth.models.convnet import ConvNet
from fedsynth.privacy import BudgetExceededError, DataOwner, PrivacyError
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer import (
    FeatureMatching,
    GradientMatching,
    ResidualMatching,
    condense,
    mean_distance,
    sliced_wasserstein,
)
from fedsynth.synthesizer.pipeline import Networks, Objective

CLASSES = 3


def records(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % CLASSES


def fixed_network() -> nn.Module:
    with forked_rng(1, "network"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())


def convnet() -> nn.Module:
    with forked_rng(1, "network"):
        return ConvNet((1, 8, 8), CLASSES, width=16, depth=2)


def owner(count: int = 60, epsilon: float = 5.0) -> DataOwner:
    x, y = records(count)
    return DataOwner(
        "a", x, y, classes=CLASSES, nominal_size=60, epsilon=epsilon, delta=1e-5, bounds=(0, 1)
    )


def autograd_gradient(network: nn.Module, synthetic: Tensor) -> Tensor:
    """Returns the gradient of Σ_c ‖mean u(B_c) − mean u(S_c)‖², with all records as B_c."""
    x, y = records()
    leaf = synthetic.clone().requires_grad_()
    if isinstance(network, ConvNet):
        embedded = [network.embed(x), network.embed(leaf.flatten(0, 1))]
        real, fake = [torch.cat([h, network.classifier(h)], dim=1) for h in embedded]
    else:
        real, fake = network(x), network(leaf.flatten(0, 1))
    fake = fake.view(CLASSES, synthetic.shape[1], -1)
    loss = sum(
        (real[y == label].mean(dim=0) - fake[label].mean(dim=0)).square().sum()
        for label in range(CLASSES)
    )
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("open", convnet),
        ("residual", convnet),
        ("residual", fixed_network),
        ("gradient", convnet),
        ("loss", fixed_network),
    ],
)
def test_objectives_have_the_gradient_of_the_loss(
    kind: str, network: Networks, without_noise: None
) -> None:
    """Private objectives have no noise, and a clip that no record reaches."""
    x, y = records()
    plan = {"clip": 1e3, "steps": 1}
    factories: dict[str, Callable[[], Objective]] = {
        "open": lambda: FeatureMatching(x, y, network, classes=CLASSES, steps=1),
        "residual": lambda: ResidualMatching(owner(), network, **plan),
        "gradient": lambda: GradientMatching(owner(), network, **plan),
        "loss": lambda: GradientMatching(
            owner(), network, loss=lambda r, s: mean_distance(r, s), **plan
        ),
    }
    objective = factories[kind]()
    synthetic = objective.start(2, seed=0)
    objective.begin()
    gradient = objective.gradient(0, synthetic)
    expected = autograd_gradient(network(), synthetic)
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_charges_are_independent_of_the_number_of_records() -> None:
    charges = {}
    for count in (60, 61):
        data_owner = owner(count, epsilon=2.0)
        objective = ResidualMatching(data_owner, fixed_network, clip=1.0, steps=3, sample_rate=0.5)
        condense(objective, per_class=2, lr=0.1)
        charges[count] = (data_owner._ledger.releases, objective._divisor, data_owner.spent())
    assert charges[60] == charges[61]
    assert 1.99 < charges[60][2] <= 2.0


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :16] - x.mean()


def test_only_the_loop_charges_the_budget() -> None:
    data_owner = owner(epsilon=2.0)
    objective = ResidualMatching(data_owner, fixed_network, clip=1.0, steps=2)
    assert data_owner.spent() == 0
    condense(objective, per_class=1, lr=0.1)
    with pytest.raises(BudgetExceededError):
        condense(objective, per_class=1, lr=0.1)
    other_owner = owner(epsilon=2.0)
    with pytest.raises(PrivacyError, match="mixes the examples"):
        condense(ResidualMatching(other_owner, Mixing, clip=1.0, steps=2), per_class=1, lr=0.1)
    assert other_owner.spent() == 0


def test_networks_and_losses_are_checked_before_use() -> None:
    drawn: list[nn.Module] = []

    def networks() -> nn.Module:
        drawn.append(fixed_network() if len(drawn) < 2 else Mixing())
        return drawn[-1]

    objective = ResidualMatching(owner(), networks, clip=1.0, steps=3)
    with pytest.raises(PrivacyError, match="mixes the examples"):
        condense(objective, per_class=1, lr=0.1)

    def noisy(real: Tensor, synthetic: Tensor) -> Tensor:
        return mean_distance(real, synthetic) * torch.rand(())

    data_owner = owner()
    random_loss = GradientMatching(data_owner, fixed_network, loss=noisy, clip=1.0, steps=1)
    with pytest.raises(PrivacyError, match="draws random numbers"):
        condense(random_loss, per_class=1, lr=0.1)
    assert data_owner.spent() == 0
    with pytest.raises(ValueError, match="start must have shape"):
        condense(random_loss, per_class=2, lr=0.1, start=torch.zeros(3, 1, 1, 8, 8))
    with pytest.raises(TypeError, match="a function that returns a network"):
        ResidualMatching(data_owner, fixed_network(), clip=1.0, steps=1).begin()


def test_condensation_is_reproducible_and_bounded() -> None:
    x, y = records()
    state = torch.get_rng_state()

    def random_network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16))

    objective = FeatureMatching(x, y, random_network, classes=CLASSES, steps=5, bounds=(0, 1))
    first, second = (condense(objective, per_class=2, lr=50.0) for _ in range(2))
    assert torch.equal(first.x, second.x)
    assert torch.equal(state, torch.get_rng_state())
    assert 0 <= first.x.min() <= first.x.max() <= 1
    assert first.y.tolist() == [0, 0, 1, 1, 2, 2]


def test_missing_classes_and_divergence_are_errors() -> None:
    x, y = records()
    with pytest.raises(DataError, match="class 3 has none"):
        FeatureMatching(x, y, fixed_network, classes=4, steps=1)
    unbounded = FeatureMatching(x, y, fixed_network, classes=CLASSES, steps=20)
    with pytest.raises(DivergedError, match="lr"):
        condense(unbounded, per_class=1, lr=1e30)


def test_sliced_distance_equals_scipy_along_directions() -> None:
    u, v = torch.randn(7, 3), torch.randn(4, 3) + 1
    directions = torch.randn(3, 5, generator=torch_generator(2, "slicing directions"))
    directions /= directions.norm(dim=0)
    expected = np.mean(
        [
            wasserstein_distance((u @ direction).numpy(), (v @ direction).numpy())
            for direction in directions.T
        ]
    )
    actual = sliced_wasserstein(u, v, projections=5, seed=2)
    assert float(actual) == pytest.approx(expected, rel=1e-5)
    leaf = v.clone().requires_grad_()
    sliced_wasserstein(u, leaf).backward()
    assert bool(leaf.grad.abs().sum() > 0)
