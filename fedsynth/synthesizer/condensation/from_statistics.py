"""Images from class statistics of fixed features: post-processing of released values, without data.

The released sum Σ (e_y − 1/C) ⊗ z over n examples, times C/n, is, if classes are about equally
frequent, the class means of z minus their common mean. That common mean is about 0, since z is
centred with the released mean of the features. Start images, which are public or derived from
released images, are moved until their class means of z match, the released classifier assigns each
image its class, and neighbouring pixels are similar (total variation, as in Mahendran & Vedaldi
2015, arXiv 1412.0035):

    Σ_c ‖mean_c z − t_c‖² / Σ_c ‖t_c‖²  +  a·cross-entropy  +  b·total variation

No function here takes private data as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.random_images import random_images

CANDIDATES = 10
"""Random-process images that are drawn for each start image that is selected."""
AT_ONCE = 48


@dataclass(frozen=True, eq=False)
class ReleasedStatistics:
    """The public and released values that images are made from.

    Attributes:
        embed: pixels in [0, 1] [N, C, H, W] -> z [N, d], differentiable.
        weight: of the released classifier on z, [classes, d].
        class_means: t_c, the class means of z minus their common mean, [classes, d]. The common
            mean is about 0 if z is centred with the released mean of the features.
    """

    embed: Callable[[Tensor], Tensor]
    weight: Tensor
    class_means: Tensor

    def distance(self, z_CId: Tensor) -> Tensor:
        """Returns the squared distance of the class means of z [classes, I, d] from `class_means`,
        relative to the squared norm of these; a scalar."""
        size = self.class_means.square().sum().clamp_min(1e-12)
        return (z_CId.mean(dim=1) - self.class_means).square().sum() / size


@dataclass(frozen=True)
class ImageSteps:
    """Settings of the image optimisation.

    Args:
        steps: of Adam.
        learning_rate: in pixel units, where 1 is white.
        teacher_weight: a, of the classifier's cross-entropy.
        smoothness: b, of the mean absolute difference of neighbouring pixels.
    """

    steps: int = 12
    learning_rate: float = 0.05
    teacher_weight: float = 0.03
    smoothness: float = 0.3


def shrunk(class_means_Cd: Tensor, noise_std: float) -> Tensor:
    """Returns noisy means shrunk towards 0 according to their noise: the positive-part James-Stein
    estimate (1 − d·σ²/‖t_c‖²)₊ t_c of each class.

    Args:
        class_means_Cd: released class means minus their common mean.
        noise_std: σ of the noise in each coordinate, which is public.

    >>> shrunk(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), noise_std=1.0).norm(dim=1)
    tensor([4.6000, 0.0000])
    """
    size = class_means_Cd.square().sum(dim=1, keepdim=True).clamp_min(1e-12)
    noise = class_means_Cd.shape[1] * noise_std**2
    return class_means_Cd * (1 - noise / size).clamp_min(0)


def public_start(
    statistics: ReleasedStatistics,
    ipc: int,
    image_shape: tuple[int, int, int],
    generator: torch.Generator,
    candidates: int = CANDIDATES,
) -> Tensor:
    """Returns, for each class, the random-process images that the classifier assigns to it with the
    highest confidence; no image is used twice.

    Args:
        statistics: released.
        ipc: images per class.
        image_shape: C, H, W.
        generator: of the images.
        candidates: images drawn for each one that is selected.

    Returns:
        Pixels [classes, ipc, C, H, W] in [0, 1], on the weight's device.
    """
    device = statistics.weight.device
    classes = len(statistics.weight)
    drawn = random_images(candidates * classes * ipc, image_shape, generator).to(device)
    with torch.no_grad():
        logits = [statistics.embed(part) @ statistics.weight.T for part in drawn.split(AT_ONCE)]
    scores = torch.log_softmax(torch.cat(logits), dim=1)
    chosen = []
    for label in range(classes):
        best = scores[:, label].topk(ipc).indices
        chosen.append(drawn[best])
        scores[best] = -torch.inf  # not selected again
    return torch.stack(chosen)


def images_from_statistics(
    statistics: ReleasedStatistics,
    start_CICHW: Tensor,
    settings: ImageSteps,
    report: Callable[[int, int], None] = lambda completed, total: None,
) -> Tensor:
    """Moves start images towards released statistics.

    Args:
        statistics: released.
        start_CICHW: [classes, ipc, C, H, W] in [0, 1]; not modified.
        settings: of the optimisation.
        report: receives the number of finished steps and the total.

    Returns:
        Pixels [classes, ipc, C, H, W] in [0, 1].
    """
    shape = start_CICHW.shape
    pixels = start_CICHW.flatten(0, 1).clone().requires_grad_(True)
    labels = torch.arange(shape[0], device=pixels.device).repeat_interleave(shape[1])
    with torch.no_grad():
        z = torch.cat([statistics.embed(part) for part in pixels.split(AT_ONCE)])
    adam = torch.optim.Adam([pixels], lr=settings.learning_rate)
    for step in range(settings.steps):
        adam.param_groups[0]["lr"] = settings.learning_rate * (1 - step / settings.steps)
        pulled = _pull(statistics, z, labels, settings)
        pixels.grad, z = _gradient(statistics, pixels.detach(), pulled, settings)
        adam.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
        report(step + 1, settings.steps)
    return pixels.detach().view(shape)


def _pull(
    statistics: ReleasedStatistics, z_Nd: Tensor, labels: Tensor, settings: ImageSteps
) -> Tensor:
    """Returns the loss's derivative with respect to z, [N, d]."""
    z = z_Nd.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = statistics.distance(z.view(len(statistics.weight), -1, z.shape[1]))
        wrong = F.cross_entropy(z @ statistics.weight.T, labels)
        (by_z,) = torch.autograd.grad(loss + settings.teacher_weight * wrong, z)
    return by_z


def _gradient(
    statistics: ReleasedStatistics, pixels: Tensor, pulled_Nd: Tensor, settings: ImageSteps
) -> tuple[Tensor, Tensor]:
    """Returns the gradient with respect to the pixels, and the pixels' z. Only the graph of
    `AT_ONCE` images is in memory at a time.

    The derivative with respect to z is that of the previous step, so that features are computed
    once per step.
    """
    gradients, embedded = [], []
    for part, pull in zip(pixels.split(AT_ONCE), pulled_Nd.split(AT_ONCE), strict=True):
        leaf = part.clone().requires_grad_(True)
        with torch.enable_grad():
            z = statistics.embed(leaf)
            rough = settings.smoothness * len(part) / len(pixels) * total_variation(leaf)
            gradients += torch.autograd.grad((z * pull).sum() + rough, leaf)
        embedded.append(z.detach())
    return torch.cat(gradients), torch.cat(embedded)


def total_variation(x_NCHW: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbouring pixels, vertically and horizontally, a
    scalar.

    >>> float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])))
    1.0
    """
    down = (x_NCHW[..., 1:, :] - x_NCHW[..., :-1, :]).abs()
    across = (x_NCHW[..., 1:] - x_NCHW[..., :-1]).abs()
    return down.mean() + across.mean()
