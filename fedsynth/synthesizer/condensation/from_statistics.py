"""Makes images from released class statistics of fixed features.

The module reads no private data. All of it is post-processing of released values.

The released sum Σ (e_y − 1/C) ⊗ z over n examples is multiplied by C/n. If classes are about
equally frequent, the result is the class means of z minus their common mean. The common mean is
about 0, because z is centred with the released mean of the features.

The start images are public or derived from released images. The optimisation has three aims: their
class means of z match, the released classifier assigns each image its class, and neighbouring
pixels are similar. The last term is the total variation, as in Mahendran & Vedaldi 2015 (arXiv
1412.0035):

    Σ_c ‖mean_c z − t_c‖² / Σ_c ‖t_c‖²  +  a·cross-entropy  +  b·total variation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.messages import Tensors
from fedsynth.features.random_images import random_images
from fedsynth.validation import in_range

# The number of random-process images drawn for each selected start image.
CANDIDATES = 10

AT_ONCE = 48

# A function that yields the results of parts of the images, each as `compute_part`.
Parts = Callable[[Sequence[Tensors]], Iterator[Tensors]]


def compute_part(embed: Callable[[Tensor], Tensor], part: Tensors) -> Tensors:
    """Computes the embeddings z of a part of the images.

    With a pull, the loss's gradient with respect to the pixels is computed, too.

    Args:
        embed: a differentiable function, pixels in [0, 1] [N, C, H, W] -> z [N, d].
        part: "pixels" [N, C, H, W], and optionally "pull" [N, d], the loss's gradient with respect
            to z, and "roughness", the weight of the total variation.

    Returns:
        "z", and with a pull "gradient" [N, C, H, W].
    """
    if "pull" not in part:
        with torch.no_grad():
            return {"z": embed(part["pixels"])}
    leaf = part["pixels"].clone().requires_grad_(True)
    with torch.enable_grad():
        z = embed(leaf)
        rough = float(part["roughness"]) * total_variation(leaf)
        (gradient,) = torch.autograd.grad((z * part["pull"]).sum() + rough, leaf)
    return {"z": z.detach(), "gradient": gradient}


def embedded(compute: Parts, pixels_NCHW: Tensor) -> Tensor:
    """Computes the embeddings z of images in parts, [N, d]."""
    parts = [{"pixels": part} for part in pixels_NCHW.split(AT_ONCE)]
    return torch.cat([result["z"] for result in compute(parts)])


@dataclass(frozen=True, eq=False)
class ReleasedStatistics:
    """Public values for synthesising images: an embedding, a classifier and class means.

    Attributes:
        compute: computes the embeddings z of images, and gradients (`compute_part`).
        weight: the weight of the released classifier of z, [classes, d].
        class_means: t_c, the class means of z minus their common mean, [classes, d]. The common
            mean is about 0 if z is centred with the released mean of the features.
    """

    compute: Parts
    weight: Tensor
    class_means: Tensor

    def distance(self, z_CId: Tensor) -> Tensor:
        """Returns the squared distance between the class means of z and the released class means.

        It is relative to the squared norm of `class_means`. If all class means are 0, because noise
        hides them, the distance is 0.

        Args:
            z_CId: z of I images per class, [classes, I, d].
        """
        size = self.class_means.square().sum()
        distance = (z_CId.mean(dim=1) - self.class_means).square().sum()
        return torch.where(size > 0, distance / size.clamp_min(1e-12), 0 * distance)


@dataclass(frozen=True)
class ImageSteps:
    """The settings of the image optimisation.

    Args:
        image_steps: number of Adam's steps on the images.
        image_lr: Adam's learning rate on the images, in pixel units, where 1 is white.
        teacher_weight: a, the weight of the released classifier's cross-entropy. The distance to
            the class means has the weight 1.
        smoothness: b, the weight of the total variation.
    """

    image_steps: int = in_range(12, 0)
    image_lr: float = in_range(0.05, 0)
    teacher_weight: float = in_range(0.03, 0)
    smoothness: float = in_range(0.3, 0)


def shrunk(class_means_Cd: Tensor, noise_std: float) -> Tensor:
    """Shrinks noisy class means towards 0 with the positive-part James-Stein estimator.

    The estimate is max(0, 1 − d·σ²/‖t_c‖²)·t_c, where t_c is a class mean of d coordinates.

    Args:
        class_means_Cd: released class means minus their common mean.
        noise_std: the noise's public standard deviation σ in each coordinate.

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
    """Selects each class's start images among public images from random processes.

    It takes the images that the released classifier assigns to a class most confidently. No image
    is used twice.

    Args:
        statistics: the released statistics, whose classifier selects the images.
        ipc: the number of images per class.
        image_shape: the shape (C, H, W).
        generator: the random generator that draws the images.
        candidates: the number of images drawn for each selected image.

    Returns:
        Pixels [classes, ipc, C, H, W] in [0, 1], on the device of the classifier's weight.
    """
    device = statistics.weight.device
    classes = len(statistics.weight)
    drawn = random_images(candidates * classes * ipc, image_shape, generator).to(device)
    parts = [{"pixels": part} for part in drawn.split(AT_ONCE)]
    logits = [result["z"] @ statistics.weight.T for result in statistics.compute(parts)]
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
    """Optimises start images to match released statistics.

    Args:
        statistics: the released statistics.
        start_CICHW: the start images, [classes, ipc, C, H, W] in [0, 1]. They are not modified.
        settings: the settings of the optimisation.
        report: receives the number of finished steps and the total number.

    Returns:
        Pixels [classes, ipc, C, H, W] in [0, 1].
    """
    shape = start_CICHW.shape
    pixels = start_CICHW.flatten(0, 1).clone().requires_grad_(True)
    labels = torch.arange(shape[0], device=pixels.device).repeat_interleave(shape[1])
    z = embedded(statistics.compute, pixels.detach())
    adam = torch.optim.Adam([pixels], lr=settings.image_lr)
    for step in range(settings.image_steps):
        adam.param_groups[0]["lr"] = settings.image_lr * (1 - step / settings.image_steps)
        pulled = _pull(statistics, z, labels, settings)
        pixels.grad, z = _gradient(statistics, pixels.detach(), pulled, settings)
        adam.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
        report(step + 1, settings.image_steps)
    return pixels.detach().view(shape)


def _pull(target: ReleasedStatistics, z_Nd: Tensor, labels: Tensor, settings: ImageSteps) -> Tensor:
    """Computes the loss's gradient with respect to the embeddings z, [N, d]."""
    z = z_Nd.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = target.distance(z.view(len(target.weight), -1, z.shape[1]))
        wrong = F.cross_entropy(z @ target.weight.T, labels)
        (by_z,) = torch.autograd.grad(loss + settings.teacher_weight * wrong, z)
    return by_z


def _gradient(
    statistics: ReleasedStatistics, pixels: Tensor, pulled_Nd: Tensor, settings: ImageSteps
) -> tuple[Tensor, Tensor]:
    """Computes the loss's gradient with respect to the pixels. Also returns the embeddings z.

    Only `AT_ONCE` images' graph is in memory at a time. The derivative with respect to z comes from
    the previous step, so each step computes features only once.
    """
    parts = []
    for part, pull in zip(pixels.split(AT_ONCE), pulled_Nd.split(AT_ONCE), strict=True):
        roughness = settings.smoothness * len(part) / len(pixels)
        weight = torch.tensor(roughness, dtype=torch.float64)
        parts.append({"pixels": part, "pull": pull, "roughness": weight})
    results = list(statistics.compute(parts))
    return torch.cat([r["gradient"] for r in results]), torch.cat([r["z"] for r in results])


def total_variation(x_NCHW: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbouring pixels, vertically plus horizontally, as
    a scalar.

    >>> float(total_variation(torch.tensor([[[[0.0, 2.0], [1.0, 4.0]]]])))
    4.0
    """
    down = (x_NCHW[..., 1:, :] - x_NCHW[..., :-1, :]).abs()
    across = (x_NCHW[..., 1:] - x_NCHW[..., :-1]).abs()
    return down.mean() + across.mean()
