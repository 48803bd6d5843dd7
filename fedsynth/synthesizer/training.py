"""SGD on images that are resident on the device: the server's training on synthetic sets, and clients' local training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsynth.models.flat import FlatNetwork, load_flat


@dataclass(frozen=True)
class SgdSettings:
    """Plain SGD with cross-entropy.

    Args:
        radius: project onto the ball ‖w − w_start‖₂ ≤ radius after every step (FedDM, Eqs. 3 and 23); None: no projection.
    """

    epochs: int
    batch: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    radius: float | None = None


def train_on(
    model: nn.Module,
    images: Callable[[Tensor], Tensor],
    labels_N: Tensor,
    settings: SgdSettings,
    generator: torch.Generator,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains `model` in place.

    Args:
        images: normalised images [M, C, H, W] of the given positions [M] (int64, on the labels' device).
        labels_N: labels of all examples.
        generator: a CPU generator; shuffles every epoch.
    """
    if not len(labels_N):
        return
    network = FlatNetwork(model, requires_grad=True)
    network.module.train()
    flat, grad = network.flat, network.grad
    start = flat.clone()
    velocity = torch.zeros_like(flat)
    for epoch in range(settings.epochs):
        order = torch.randperm(len(labels_N), generator=generator).to(labels_N.device)
        for part in order.split(settings.batch):
            grad.zero_()
            nn.functional.cross_entropy(network.module(images(part)), labels_N[part]).backward()
            with torch.no_grad():
                velocity.mul_(settings.momentum).add_(grad).add_(flat, alpha=settings.weight_decay)
                flat.add_(velocity, alpha=-settings.learning_rate)
                if settings.radius is not None:
                    project_to_ball(flat, start, settings.radius)
        report(epoch + 1, settings.epochs)
    load_flat(model, flat)
    for name, buffer in model.named_buffers():
        buffer.copy_(network.module.get_buffer(name))


def project_to_ball(flat_P: Tensor, center_P: Tensor, radius: float) -> None:
    """Moves `flat_P`, in place, to the nearest point with ‖flat − center‖₂ ≤ radius; does not wait for the device."""
    offset = flat_P - center_P
    scale = (radius / torch.linalg.vector_norm(offset).clamp_min(1e-12)).clamp_max(1.0)
    torch.addcmul(center_P, offset, scale, out=flat_P)
