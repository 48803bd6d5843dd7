"""The ball around the global model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsynth.errors import UnknownNameError
from fedsynth.methods.feddm import FedDM, perturbed
from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.training.sgd import project_to_ball
from tests.digits import context


def draws(
    variant: str, radius: float = 5.0, steps: int = 8, period: int | None = None, **where: int
) -> tuple[Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = ConvNet((1, 8, 8), 10, width=16, depth=2)
    networks = perturbed(model, radius, variant, context(**where), period)  # type: ignore[arg-type]
    center = flatten(model)
    return center, torch.stack([flatten(next(networks)) - center for _ in range(steps)])


def test_rescaled_gaussians_lie_on_the_sphere() -> None:
    """Clip, not normalise: ‖N(0, I)‖ is about √P, and below ρ nothing is rescaled."""
    center, offsets = draws("sphere")
    torch.testing.assert_close(offsets.norm(dim=1), torch.full((8,), 5.0), rtol=1e-3, atol=0)
    norms = draws("sphere", radius=1e6)[1].norm(dim=1)
    torch.testing.assert_close(norms, torch.full((8,), len(center) ** 0.5), rtol=0.05, atol=0)


def test_the_ball_reading_has_uniform_radii() -> None:
    _, offsets = draws("ball", steps=200)
    radii = offsets.norm(dim=1) / 5
    assert radii.max() <= 1 + 1e-4
    assert radii.mean() == pytest.approx(0.5, abs=0.08)


def test_draws_depend_on_seed_and_round_alone_and_come_again_after_a_period() -> None:
    first = draws("sphere")[1]
    assert torch.equal(first, draws("sphere")[1])
    assert not torch.equal(first, draws("sphere", seed=1)[1])
    assert not torch.equal(first, draws("sphere", number=2)[1])
    again = draws("sphere", period=3)[1]
    assert all(torch.equal(again[t], first[t % 3]) for t in range(8))


def test_weights_are_frozen_and_unknown_variants_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"perturbation cannot be .*: ball, sphere"):
        FedDM(perturbation="cube")
    model = ConvNet((1, 8, 8), 10, width=4, depth=1)
    drawn = next(perturbed(model, 1.0, "sphere", context()))
    assert not any(p.requires_grad for p in drawn.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_projection() -> None:
    center = torch.tensor([1.0, 1.0])
    far, near = torch.tensor([1.0, 11.0]), torch.tensor([1.5, 1.0])
    project_to_ball(far, center, 2.0)
    project_to_ball(near, center, 2.0)
    torch.testing.assert_close(far, torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(near, torch.tensor([1.5, 1.0]))
