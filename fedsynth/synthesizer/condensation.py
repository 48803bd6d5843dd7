"""The condensation loop: T steps of gradient descent on the synthetic images of a group of clients (FedDM, Algorithm 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsynth.synthesizer.matching import Matcher

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""(images, segment of each) -> transformed images."""

CPU_BYTES = 8 * 2**20
GPU_IMAGES = 4096


class NetworkFeatures:
    """u_w(x) = [h_w(x); b·z_w(x)]: embedding and logits from one forward pass, after the siamese augmentation if there is one.

    Args:
        network: has `embed` and `classifier`; its weights are frozen.
        precision: of the real images' embedding; synthetic images, and the classifier, are always float32.
    """

    def __init__(
        self, network: nn.Module, logit_weight: float, augment: Augmentation | None, precision: torch.dtype = torch.float32
    ) -> None:
        self._network, self._logit_weight, self._augment, self._precision = network, logit_weight, augment, precision
        self._real = network if precision == torch.float32 else copy.deepcopy(network).to(precision)

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """[N, D] with the graph to the images."""
        return self._with_logits(self._network.embed(self._augmented(x_NCHW, segment_N)))  # type: ignore[operator]

    def real(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """[N, D] without graph: channels-last, in small batches that stay in the cache on a CPU, and in the reduced precision."""
        rows = []
        with torch.no_grad():
            at_once = self.images_at_once(x_NCHW, self._precision)
            for x, segment in zip(x_NCHW.split(at_once), segment_N.split(at_once), strict=True):
                x = self._augmented(x, segment).to(self._precision, memory_format=torch.channels_last)
                rows.append(self._real.embed(x).float())  # type: ignore[operator]
            return self._with_logits(torch.cat(rows))

    def _augmented(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        return x_NCHW if self._augment is None else self._augment(x_NCHW, segment_N)

    def _with_logits(self, h_ND: Tensor) -> Tensor:
        return torch.cat([h_ND, self._logit_weight * self._network.classifier(h_ND)], dim=1)  # type: ignore[operator]

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        """Images in one pass: on a CPU as many as keep the largest activation within 8 MB, where caches and the allocator reuse it."""
        scalars = getattr(self._network, "largest_activation", x_NCHW[0].numel())
        return GPU_IMAGES if x_NCHW.is_cuda else max(1, CPU_BYTES // (scalars * precision.itemsize))


def condense(
    synthetic_SICHW: Tensor,
    draw_network: Callable[[], nn.Module],
    matcher: Matcher,
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.0,
    logit_weight: float = 1.0,
    precision: torch.dtype = torch.float32,
    draw_augmentation: Callable[[], Augmentation] | None = None,
    report: Callable[[int], None] = lambda step: None,
) -> Tensor:
    """Moves the synthetic images towards the real distribution and returns them, [S, ipc, C, H, W].

    Args:
        synthetic_SICHW: start images, in normalised pixel units; not changed.
        draw_network: a network with `embed` and `classifier` and frozen weights, drawn anew for each step.
        matcher: makes the gradient; with DP on it is the only thing that touches private data.
        precision: of the real images' pass; synthetic images, sums and updates are float32.
        report: hears the number of steps done; the loop itself never waits for the device.
    """
    synthetic = synthetic_SICHW.detach().clone()
    if not len(synthetic):  # no client of the group has a class to send
        return synthetic
    velocity = torch.zeros_like(synthetic)
    for step in range(steps):
        augment = draw_augmentation() if draw_augmentation is not None else None
        features = NetworkFeatures(draw_network(), logit_weight, augment, precision)
        velocity.mul_(momentum).add_(matcher.gradient(step, features, synthetic))
        synthetic.add_(velocity, alpha=-learning_rate)
        report(step + 1)
    return synthetic
