"""Trains a student network on a synthetic set only.

The set and the teacher are released or public, so all results are post-processing.

With few images, a student sees little variety. A teacher can label any image, so it labels shifted,
rotated and deformed copies, and mixtures of pairs (after Asano & Saeed 2023, arXiv 2112.00725).
Without a teacher, copies keep the original image's label, and labels are mixed in the same shares
as images (mixup: Zhang et al. 2018, arXiv 1710.09412).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.features.feature_map import Shape
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.augmentation import SiameseAugmentation, blended, warped
from fedsynth.validation import check_fields, in_range

AT_ONCE = 48


@dataclass(frozen=True)
class StudentSettings:
    """The settings of a student's training.

    Args:
        steps: the number of AdamW's steps. The learning rate falls to 0 along a cosine.
        batch: the number of images in a step.
        learning_rate: the initial learning rate.
        weight_decay: AdamW's weight decay.
        mixup: whether pairs of images are mixed, in shares uniform on [0, 1]. With a teacher and
            copies, every second copy is a mixture, labelled by the teacher. Otherwise batches and
            their labels are mixed.
        views: the number of augmented copies of each image.
        temperature: T of soft labels p, which become p^(1/T) up to a factor. The student's logits
            are divided by T and the loss is multiplied by T² (Hinton et al. 2015, arXiv
            1503.02531). Without soft labels, T is 1.
        flip: whether copies may be mirrored. It should be False if mirroring may change the class.
        seed: the seed of copies, batches and mixing.

    >>> StudentSettings(views=0).mixup
    True
    """

    steps: int = in_range(1000, 1, 10**7)
    batch: int = in_range(64, 2, 10**6)
    learning_rate: float = in_range(2e-3, 0, 10)
    weight_decay: float = in_range(1e-2, 0, 10)
    mixup: bool = True
    views: int = in_range(6, 0, 10**4)
    temperature: float = in_range(3.0, 0.01, 100)
    flip: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


def settings_for(image_shape: Shape, **chosen: Any) -> StudentSettings:
    """Returns default settings for an image shape, for a training of a few minutes.

    Above 32×32 pixels, there are fewer steps, at least 200, to process the same number of pixels.

    Args:
        image_shape: the shape of an image, (channels, height, width).
        chosen: settings that replace the default values.

    >>> settings_for((1, 28, 28)).steps, settings_for((1, 64, 64)).steps
    (1000, 250)
    """
    steps = StudentSettings.steps * 32 * 32 // max(image_shape[1] * image_shape[2], 32 * 32)
    return StudentSettings(**{"steps": max(200, steps), **chosen})


def train_student(
    student: nn.Module,
    images_NCHW: Tensor,
    labels: Tensor,
    settings: StudentSettings | None = None,
    *,
    teacher: nn.Module | None = None,
    report: Callable[[int, int], None] = lambda completed, total: None,
) -> None:
    """Trains a network in place, on synthetic images only.

    Args:
        student: any network from normalised images to logits.
        images_NCHW: normalised images, for example `SharedSet.normalised()`.
        labels: classes [N], or soft labels [N, classes].
        settings: the settings of the training. With None, they are `StudentSettings()`.
        teacher: a network whose softmax labels the augmented copies. With None, copies keep the
            original image's label.
        report: receives the number of finished steps and the total number.

    >>> from fedsynth import ModelSettings
    >>> from fedsynth.models.registry import build_model
    >>> student = build_model(ModelSettings("linear"), (1, 8, 8), classes=2, seed=0)
    >>> images = torch.ones(2, 1, 8, 8) * torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)
    >>> train_student(student, images, torch.tensor([0, 1]), StudentSettings(steps=50, views=0))
    >>> student(images).argmax(dim=1).tolist()
    [0, 1]
    """
    settings = settings or StudentSettings()
    shares = as_shares(labels, student, images_NCHW)
    x, y = augmented(images_NCHW, shares, settings, teacher)
    is_soft = bool((y.amax(dim=1) < 1).any())
    temperature = settings.temperature if is_soft else 1.0
    y = softened(y, temperature)
    draws = torch_generator(settings.seed, "student training")
    optimiser = torch.optim.AdamW(
        student.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings.steps)
    mode = student.training
    student.train()
    for step in range(settings.steps):
        rows = torch.randint(len(x), (2, settings.batch), generator=draws).to(x.device)
        share = None
        if settings.mixup and (teacher is None or settings.views == 0):
            share = torch.rand(settings.batch, generator=draws).to(x.device)
        optimiser.zero_grad()
        with torch.enable_grad():
            logits = student(mixed(x, rows, share)) / temperature
            loss = temperature**2 * F.cross_entropy(logits, mixed(y, rows, share))
            loss.backward()
        optimiser.step()
        schedule.step()
        report(step + 1, settings.steps)
    student.train(mode)


def as_shares(labels: Tensor, student: nn.Module, images_NCHW: Tensor) -> Tensor:
    """Converts labels [N] to one-hot rows with one column for each class of the student.

    Rows [N, C] are returned unchanged.
    """
    if labels.dim() == 2:
        return labels.float()
    mode = student.training
    with torch.no_grad():
        classes = student.eval()(images_NCHW[:1]).shape[1]
    student.train(mode)
    return F.one_hot(labels, classes).float()


def softened(shares_NC: Tensor, temperature: float) -> Tensor:
    """Returns the softmax of log(p)/T for rows p of labels. Rows of zeros stay as they are.

    >>> softened(torch.tensor([[0.64, 0.36], [1.0, 0.0]]), temperature=2.0)
    tensor([[0.5714, 0.4286],
            [1.0000, 0.0000]])
    """
    softer = torch.softmax(shares_NC.log() / temperature, dim=1)
    return torch.where(shares_NC.sum(dim=1, keepdim=True) > 0, softer, shares_NC)


def augmented(
    images_NCHW: Tensor, shares_NC: Tensor, settings: StudentSettings, teacher: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Appends `views` augmented copies of each image. Returns all images and their labels.

    The images are [(1 + views)·N, C, H, W], and the labels [(1 + views)·N, classes].
    """
    draws = torch_generator(settings.seed, "student's copies", device=images_NCHW.device)
    images, rows = [images_NCHW], [shares_NC]
    pairs = torch.arange(len(images_NCHW), device=images_NCHW.device)
    for view in range(settings.views):
        if teacher is None:
            change = SiameseAugmentation(len(images_NCHW), draws, flip=settings.flip)
            images.append(change(images_NCHW, pairs))
            rows.append(shares_NC)
            continue
        transform = blended if settings.mixup and view % 2 else warped
        copies = transform(images_NCHW, draws)
        if settings.flip:
            mirrored = torch.rand(len(copies), 1, 1, 1, generator=draws, device=copies.device) < 0.5
            copies = torch.where(mirrored, copies.flip(-1), copies)
        images.append(copies)
        rows.append(soft_labels(teacher, copies))
    return torch.cat(images), torch.cat(rows)


def soft_labels(teacher: nn.Module, images_NCHW: Tensor) -> Tensor:
    """Returns the teacher's softmax for the images, [N, classes].

    The teacher's training mode is restored afterwards.
    """
    mode = teacher.training
    teacher.eval()
    with torch.no_grad():
        parts = [torch.softmax(teacher(part), dim=1) for part in images_NCHW.split(AT_ONCE)]
    teacher.train(mode)
    return torch.cat(parts)


def mixed(values: Tensor, rows_2B: Tensor, share_B: Tensor | None) -> Tensor:
    """Computes weighted averages of row pairs (mixup).

    Returns share·values[first] + (1 − share)·values[second]. Without shares, returns values[first].

    >>> mixed(torch.tensor([2.0, 4.0]), torch.tensor([[1], [0]]), torch.tensor([0.25]))
    tensor([2.5000])
    """
    first = values[rows_2B[0]]
    if share_B is None:
        return first
    share = share_B.view(-1, *[1] * (values.dim() - 1))
    return share * first + (1 - share) * values[rows_2B[1]]
