"""How the `random-process` encoder is trained: alignment and uniformity on random-process images.

Wang & Isola 2020, "Understanding Contrastive Representation Learning through Alignment and
Uniformity on the Hypersphere" (arXiv 2005.10242). With two augmented views of each image and unit
vectors f,

    L = mean ‖f(x) − f(x′)‖² + ½·Σ_{views} log mean_{i≠j} exp(−2‖f_i − f_j‖²).

Everything is drawn from one seed; no data set is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.features.random_images import random_images
from fedsynth.features.random_process import SIDE, WIDTHS, Encoder
from fedsynth.seeding import forked_rng, torch_generator


@dataclass(frozen=True)
class Recipe:
    """How the encoder is trained; the defaults made the weights that the package ships.

    Args:
        seed: of everything.
        images: random-process images that views are drawn of.
        side: of these images; views are crops of them.
        steps: of AdamW, each on `batch` images with two views.
        batch: images in a step.
        lr: peak learning rate of a cosine schedule after a warm-up of a twentieth of the steps.
        weight_decay: of AdamW.
        projection: size of the vectors on the sphere.
    """

    seed: int = 0
    images: int = 16_384
    side: int = 40
    steps: int = 1000
    batch: int = 256
    lr: float = 2e-3
    weight_decay: float = 0.01
    projection: int = 128


def alignment(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    """Mean squared distance of the two views of an image."""
    return (a_ND - b_ND).square().sum(dim=1).mean()


def uniformity(a_ND: Tensor) -> Tensor:
    """Log of the mean Gaussian potential exp(−2‖a_i − a_j‖²) of all pairs of unit vectors."""
    apart = (2 - 2 * a_ND @ a_ND.T).clamp_min(0)
    count = len(a_ND)
    pairs = torch.triu_indices(count, count, 1, device=a_ND.device)
    return (-2 * apart[pairs[0], pairs[1]]).logsumexp(dim=0) - math.log(pairs.shape[1])


def view(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """A random view of each image, [N, 3, 32, 32]: a crop of a fifth of the area or more, mirrored
    or not, with other brightness, contrast and colours, or none."""
    count = len(x_NCHW)
    draw = torch.rand(count, 8, generator=generator, device=x_NCHW.device)
    scale = (0.2 + 0.8 * draw[:, 0]).sqrt()
    ratio = torch.exp(0.3 * (2 * draw[:, 1] - 1))
    mirror = torch.where(draw[:, 2] < 0.5, -1.0, 1.0)
    across = (scale * ratio).clamp_max(1)
    down = (scale / ratio).clamp_max(1)
    zero = torch.zeros_like(scale)
    theta = torch.stack(
        [
            torch.stack([mirror * across, zero, (1 - across) * (2 * draw[:, 3] - 1)], dim=1),
            torch.stack([zero, down, (1 - down) * (2 * draw[:, 4] - 1)], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(theta, [count, 3, SIDE, SIDE], align_corners=False)
    x = F.grid_sample(x_NCHW, grid, padding_mode="reflection", align_corners=False)
    grey = x.mean(dim=1, keepdim=True)
    saturation = torch.where(draw[:, 5] < 0.2, 0.0, 2 * draw[:, 5] - 0.4).view(-1, 1, 1, 1)
    x = grey + saturation * (x - grey)
    contrast = (0.5 + draw[:, 6]).view(-1, 1, 1, 1)
    tint = 0.15 * torch.randn(count, 3, 1, 1, generator=generator, device=x.device)
    level = x.mean(dim=(1, 2, 3), keepdim=True)
    brightness = 0.4 * (draw[:, 7] - 0.5).view(-1, 1, 1, 1)
    return ((x - level) * contrast + level + brightness + tint).clamp(0, 1)


def image_bank(recipe: Recipe, device: torch.device | str = "cpu") -> Tensor:
    """The images that views are drawn of, uint8 [images, 3, side, side]."""
    generator = torch_generator(recipe.seed, "random-process images", device=device)
    shape = (3, recipe.side, recipe.side)
    parts = [
        random_images(min(1024, recipe.images - start), shape, generator).mul(255).round().byte()
        for start in range(0, recipe.images, 1024)
    ]
    return torch.cat(parts)


def train_encoder(
    recipe: Recipe,
    device: torch.device | str = "cpu",
    report: Callable[[int, float, Encoder], None] = lambda step, loss, encoder: None,
) -> Encoder:
    """The encoder, trained by this recipe, in evaluation mode.

    Args:
        recipe: see `Recipe`.
        device: of training.
        report: told the number of steps done, the last loss, and the encoder.
    """
    with forked_rng(recipe.seed, "random-process encoder"):
        encoder = Encoder()
        head = nn.Sequential(
            nn.Linear(WIDTHS[-1], 2 * WIDTHS[-1]),
            nn.ReLU(),
            nn.Linear(2 * WIDTHS[-1], recipe.projection),
        )
    encoder.to(device).to(memory_format=torch.channels_last)
    head.to(device)
    bank = image_bank(recipe, device)
    weights = [*encoder.parameters(), *head.parameters()]
    adam = torch.optim.AdamW(weights, recipe.lr, weight_decay=recipe.weight_decay)
    generator = torch_generator(recipe.seed, "random-process views", device=device)
    for step in range(recipe.steps):
        adam.param_groups[0]["lr"] = recipe.lr * schedule(step, recipe.steps)
        where = torch.randint(len(bank), (recipe.batch,), generator=generator, device=device)
        images = bank[where].float() / 255
        both = torch.cat([view(images, generator), view(images, generator)])
        maps = encoder(both.to(memory_format=torch.channels_last))
        made = F.normalize(head(maps.mean(dim=(2, 3))), dim=1)
        first, second = made.chunk(2)
        loss = alignment(first, second) + (uniformity(first) + uniformity(second)) / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
        report(step + 1, float(loss.detach()), encoder)
    return encoder.eval()


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate at this step: a linear warm-up, then a half cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
