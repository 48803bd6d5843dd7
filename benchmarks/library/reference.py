"""Straightforward steps, written for comparison: what a careful reader of the papers would write
first.

Fair: float32, weights frozen, real features detached, batches of the paper's size. Plain: one
client and one class at a time, one call for the embedding and one for the logits, a fresh perturbed
copy of the model at every step; a loop over examples where gradients are clipped. They share no
code with the engine but the network.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def perturbed(model: nn.Module, radius: float, generator: torch.Generator) -> nn.Module:
    """Returns a copy of the model with Gaussian noise rescaled to the ball."""
    network = copy.deepcopy(model)
    noises = [
        torch.randn(p.shape, generator=generator, device=p.device) for p in network.parameters()
    ]
    norm = torch.sqrt(
        sum((n.square().sum() for n in noises), torch.zeros((), device=noises[0].device))
    )
    for p, noise in zip(network.parameters(), noises, strict=True):
        p.data += noise * torch.clamp(radius / norm, max=1.0)
        p.requires_grad_(False)
    return network


def class_loss(network: nn.Module, real_NCHW: Tensor, synthetic_ICHW: Tensor) -> Tensor:
    """Returns Eq. 9 for one class."""
    with torch.no_grad():
        real_h = network.embed(real_NCHW).mean(dim=0)  # type: ignore[operator]
        real_z = network(real_NCHW).mean(dim=0)
    h = network.embed(synthetic_ICHW).mean(dim=0)  # type: ignore[operator]
    z = network(synthetic_ICHW).mean(dim=0)
    loss: Tensor = (real_h - h).square().sum() + (real_z - z).square().sum()
    return loss


def client_step(
    model: nn.Module,
    images_by_class: list[Tensor],
    synthetic: list[Tensor],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    radius: float,
    generator: torch.Generator,
) -> list[Tensor]:
    """Condenses one client's images.

    Args:
        images_by_class: normalised images [n_c, C, H, W] of each class.
        synthetic: [ipc, C, H, W] of each class.
    """
    synthetic = [s.clone().requires_grad_() for s in synthetic]
    optimiser = torch.optim.SGD(synthetic, lr=learning_rate)
    for _ in range(steps):
        network = perturbed(model, radius, generator)
        loss = torch.zeros((), device=synthetic[0].device)
        for real, images in zip(images_by_class, synthetic, strict=True):
            chosen = torch.randperm(len(real), generator=generator, device=real.device)[:batch]
            loss = loss + class_loss(network, real[chosen], images)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [s.detach() for s in synthetic]


def gradient_step(
    network: nn.Module,
    images_by_class: list[Tensor],
    synthetic: list[Tensor],
    clip: float,
    noise: float,
) -> list[Tensor]:
    """Returns noisy sums of clipped image gradients (Eq. 15), one for each class, by a loop over
    examples.
    """
    sums = []
    for real, images in zip(images_by_class, synthetic, strict=True):
        total = torch.zeros_like(images)
        for x in real:
            leaf = images.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(class_loss(network, x[None], leaf), leaf)
            total += gradient / (gradient.norm() / clip).clamp_min(1)
        sums.append(total + noise * clip * torch.randn_like(total))
    return sums
