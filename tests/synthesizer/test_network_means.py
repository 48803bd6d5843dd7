"""FedDM with a few networks a round: against a plain loop, after an interruption, and refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import OpenClients
from fedsynth.core.context import RoundContext
from fedsynth.errors import SettingError
from fedsynth.keeping import KeepsNothing
from fedsynth.methods.feddm import FedDM, perturbed
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.sets import real_start
from tests.digits import CPU, context, convnet, digits, sent

LABELS = np.array([0] * 25 + [1] * 12 + [2] * 3 + [7] * 20)
PARTS = [torch.arange(0, 40), torch.arange(40, 60)]
METHOD = FedDM(ipc=2, iterations=7, image_lr=0.5, networks_per_round=3)


def clients(device: torch.device = CPU) -> OpenClients:
    return OpenClients((0, 1), digits(LABELS, device=device), [part.to(device) for part in PARTS])


def uploads(method: FedDM, ctx: RoundContext, group: OpenClients) -> list[Tensor]:
    return [one.images for one in sent(method, ctx, group)]


def plain_loop(ctx: RoundContext, group: OpenClients, method: FedDM) -> Tensor:
    """T steps down Σ_c ‖mean_{D_c} u − mean_{S_c} u‖², network t mod M, by autograd."""
    model = ctx.architecture.requires_grad_(False).eval()
    draws = perturbed(model, method.radius, "sphere", ctx)
    networks: list[Any] = [copy.deepcopy(next(draws)) for _ in range(method.networks_per_round)]
    segments = group.segments(method.min_examples)
    images = real_start(group, segments, method.ipc, 0)
    pairs = list(zip(segments.position.tolist(), segments.label.tolist(), strict=True))

    def u(network: Any, x: Tensor) -> Tensor:
        h = network.embed(x)
        return torch.cat([h, network.classifier(h)], dim=1).mean(dim=0)

    for step in range(method.iterations):
        network = networks[step % len(networks)]
        images = images.detach().requires_grad_()
        losses = [
            (u(network, group.images(group.examples(*pair))) - u(network, images[s])).square().sum()
            for s, pair in enumerate(pairs)
        ]
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), images)
        images = images.detach() - method.image_lr * gradient
    return images.flatten(0, 1)


def test_the_images_are_those_of_a_plain_loop(device: torch.device) -> None:
    """Catches: minibatches, networks out of turn, means that are made anew or of another class."""
    ctx, group = context(network=convnet().to(device), device=device), clients(device)
    made = torch.cat(uploads(METHOD, ctx, group))
    expected = plain_loop(ctx, group, METHOD)
    start = real_start(group, group.segments(10), 2, 0).flatten(0, 1)
    assert (expected - start).abs().max() > 0.01  # they do move
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


class Keeps(KeepsNothing):
    """What a loop offers at one step, and gives it back."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.kept: tuple[int, dict[str, Tensor]] | None = None

    def found(self, name: str) -> tuple[int, dict[str, Tensor]] | None:
        return self.kept

    def offer(self, name: str, done: int, tensors: Any) -> None:
        if done == self._at and self.kept is None:
            self.kept = done, {key: value.clone() for key, value in tensors().items()}


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_loop_that_was_cut_off_ends_with_the_same_images(at: int) -> None:
    """Catches: means that only the first M steps make."""
    keeper = Keeps(at)
    ctx, group = replace(context(), keeper=keeper), clients()
    whole = uploads(METHOD, ctx, group)
    assert keeper.kept is not None
    again = uploads(METHOD, ctx, group)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_where_it_is_refused() -> None:
    with pytest.raises(SettingError, match=r"method\.networks_per_round must be 0 unless"):
        FedDM(networks_per_round=2, matching="energy")
    with pytest.raises(SettingError, match="at least 0"):
        FedDM(networks_per_round=-1)
    run = {"run": {"method": "feddm", "rounds": 1}, "method": {"networks_per_round": 2}}
    private = resolve({**run, "privacy": {"epsilon": 8.0}})
    with pytest.raises(SettingError, match=r"with differential privacy.*features"):
        simulate(private)
    normed = resolve({**run, "model": {"norm": "batch", "width": 8, "depth": 2}})
    with pytest.raises(SettingError, match="must be 0 with batch norm"):
        simulate(normed)
