"""The condensation loop: T steps of gradient descent on the synthetic images of a group of clients (FedDM, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsynth.synthesizer.matching import FeatureMap, Matcher

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""(images, segment of each) -> transformed images."""


def feature_map(network: nn.Module, logit_weight: float, augment: Augmentation | None) -> FeatureMap:
    """u_w(x) = [h_w(x); b·z_w(x)]: embedding and logits from one forward pass, after the siamese augmentation if there is one."""

    def features(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        x = x_NCHW if augment is None else augment(x_NCHW, segment_N)
        h = network.embed(x)  # type: ignore[operator]
        return torch.cat([h, logit_weight * network.classifier(h)], dim=1)  # type: ignore[operator]

    return features


def condense(
    synthetic_SICHW: Tensor,
    draw_network: Callable[[], nn.Module],
    matcher: Matcher,
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.0,
    logit_weight: float = 1.0,
    draw_augmentation: Callable[[], Augmentation] | None = None,
    report: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """Moves the synthetic images towards the real distribution and returns them, [S, ipc, C, H, W].

    Args:
        synthetic_SICHW: start images, in normalised pixel units; not changed.
        draw_network: a network with `embed` and `classifier` and frozen weights, drawn anew for each step.
        matcher: makes the gradient; with DP on it is the only thing that touches private data.
        report: hears the number of steps done; the loop itself never waits for the device.
    """
    synthetic = synthetic_SICHW.detach().clone()
    if not len(synthetic):  # no client of the group has a class to send
        return synthetic
    velocity = torch.zeros_like(synthetic)
    for step in range(steps):
        augment = draw_augmentation() if draw_augmentation is not None else None
        features = feature_map(draw_network(), logit_weight, augment)
        velocity.mul_(momentum).add_(matcher.gradient(step, features, synthetic))
        synthetic.add_(velocity, alpha=-learning_rate)
        report(step + 1)
    return synthetic
