"""Measures how much released images reveal about the real images.

All results are exact functions of the real images, without noise, so no guarantee covers them. They
may only be computed for images that are public or simulated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsynth.evaluation.fidelity import Fidelity
from fedsynth.privacy.report.figures import Part
from fedsynth.seeding import torch_generator

ROUNDING = 1e-6  # distances are equal if they differ by less than this share of the norm
FOLDS = 5
RIDGE = 0.1  # in units of an image's mean squared norm
_RELEASED_AT_ONCE = 512


class Attack(Part):
    """The success of an attack on released images.

    Attributes:
        rate: the share of images for which the attack succeeds.
        low, high: the 95 % interval of the rate (Clopper and Pearson).
        chance: the expected rate if the images do not depend on what is attacked.
        can_show, cannot_show: what follows from an interval above chance, and from one with chance.
    """

    rate: float
    low: float
    high: float
    chance: float
    can_show: str
    cannot_show: str


class Membership(Attack):
    """An attack that compares each released image with its nearest real images.

    It succeeds if the nearest real image is a training image and not a held-out one.
    """

    nearest_training: list[float]
    nearest_held_out: list[float]
    can_show: str = (
        "An interval above chance: the released images are nearer to training images than new ones "
        "would be, as copies are."
    )
    cannot_show: str = (
        "An interval with chance: no proof of privacy. Attacks on single records, with other "
        "features, on the model or on many releases may succeed. Held-out images of another "
        "distribution, or persons with images in both sets, shift the rate."
    )


class SiteInference(Attack):
    """An attack in which a linear classifier predicts which owner released an image."""

    owners: int
    can_show: str = (
        "An interval above chance: the images carry marks of their owners, such as those of a "
        "scanner. It names no person."
    )
    cannot_show: str = (
        "An interval with chance: networks, other features or more images may tell the owners."
    )


class Evidence(Part):
    """Attack results and fidelity of a synthetic set, as stored in evidence.json.

    `site_inference` is None unless there are two or more owners, each with two or more images.
    `fidelity` compares the set with the held-out images.

    >>> Evidence.model_json_schema()["properties"]["schema_version"]["const"]
    1
    """

    schema_version: Literal[1] = 1
    notice: str = (
        "The exporter stated that the real images are public or simulated. If they are private, "
        "this page must not leave their owner, because its numbers are exact and no guarantee "
        "covers them."
    )
    features: str
    training_images: int
    held_out_images: int
    label_counts: dict[str, int]
    membership: Membership
    site_inference: SiteInference | None
    fidelity: Fidelity
    fidelity_shows: str = (
        "Small distances: the images resemble new real ones. Copies do, too, so the distances say "
        "nothing about privacy, and little about models that are trained on the images."
    )


def interval(rate: float, trials: float) -> tuple[float, float]:
    """Returns the 95 % Clopper-Pearson confidence interval of a success rate.

    >>> low, high = interval(1.0, 20)
    >>> round(low, 3), high
    (0.832, 1.0)
    """
    from scipy.stats import beta

    right, wrong = rate * trials, (1 - rate) * trials
    low = float(beta.ppf(0.025, right, wrong + 1)) if right else 0.0
    return low, float(beta.ppf(0.975, right + 1, wrong)) if wrong else 1.0


def membership(
    released_ND: Tensor, training: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]
) -> Membership:
    """Compares the distances of released images to training images and to held-out ones.

    If the released images do not depend on which real images are training images, the real images
    of a class are exchangeable: a neighbour of a class is a training image with the probability
    m/(m + k), for the class's m training and k held-out images. Images with the same neighbour are
    dependent, so the interval counts n images with c_j neighbours j as n²/Σ c_j² trials. If several
    real images are equally near, such as copies, the share of training images among them counts.

    Args:
        released_ND: the features of the released images.
        training, held_out: features [M, D] and labels [M] of the real images.

    >>> real = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    >>> labels = torch.zeros(20, dtype=torch.int64)
    >>> copied = membership(real[:20], (real[:20], labels), (real[20:], labels))
    >>> copied.rate, copied.chance, copied.low > copied.chance
    (1.0, 0.5, True)
    """
    real_MD = torch.cat([training[0], held_out[0]]).double()
    chunks = released_ND.double().split(_RELEASED_AT_ONCE)
    nearest = zip(*(_nearest(chunk, real_MD, len(training[0])) for chunk in chunks), strict=True)
    rate_N, rows_N, training_N, held_out_N = map(torch.cat, nearest)
    rate = float(rate_N.mean())
    shared = rows_N.unique(return_counts=True)[1].square().sum()
    low, high = interval(rate, len(rows_N) ** 2 / float(shared))
    labels = torch.cat([training[1], held_out[1]])
    portions = training[1].bincount(minlength=int(labels.max()) + 1) / labels.bincount()
    return Membership(
        rate=rate,
        low=low,
        high=high,
        chance=float(portions[labels[rows_N]].mean()),
        nearest_training=training_N.tolist(),
        nearest_held_out=held_out_N.tolist(),
    )


def _nearest(
    released_ND: Tensor, real_MD: Tensor, training: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the real images nearest to each released image.

    The first `training` real images are the training images.

    Returns:
        The share of training images among the nearest ones [N], the row of one of these [N], and
        the distances to the nearest training image [N] and to the nearest held-out image [N].
    """
    distances_NM = torch.cdist(released_ND, real_MD)
    rounding_N1 = ROUNDING * (1 + released_ND.norm(dim=1, keepdim=True))  # of `cdist`
    is_nearest_NM = distances_NM <= distances_NM.amin(dim=1, keepdim=True) + rounding_N1
    share_N = is_nearest_NM[:, :training].sum(dim=1) / is_nearest_NM.sum(dim=1)
    rows_N = is_nearest_NM.float().argmax(dim=1)
    to_training_N = distances_NM[:, :training].amin(dim=1)
    return share_N, rows_N, to_training_N, distances_NM[:, training:].amin(dim=1)


def site_inference(released_ND: Tensor, owners_N: Tensor, labels_N: Tensor) -> SiteInference | None:
    """Predicts each released image's owner by cross-validated ridge regression.

    Chance is the accuracy of the best guess from the image's class.

    Args:
        released_ND: the features of the released images.
        owners_N, labels_N: the owner and the class of each image.

    >>> owners = torch.arange(40) % 2
    >>> found = site_inference(torch.arange(40)[:, None] + 100 * owners[:, None], owners, owners * 0)
    >>> found.rate, found.chance
    (1.0, 0.5)
    """
    owners, numbers_N = owners_N.unique(return_inverse=True)
    table = one_hot(labels_N).T @ one_hot(numbers_N)
    if len(owners) < 2 or int(table.sum(0).min()) < 2:
        return None
    order = torch.randperm(len(labels_N), generator=torch_generator(0, "folds of owners"))
    order = order[(numbers_N * len(table) + labels_N)[order].argsort(stable=True)]
    right = 0
    for tested in (order[fold::FOLDS] for fold in range(FOLDS)):
        used = order[~torch.isin(order, tested)]
        scores = _ridge(released_ND[used].double(), numbers_N[used], released_ND[tested].double())
        right += int((scores.argmax(1) == numbers_N[tested]).sum())
    rate, chance = right / len(order), int(table.max(1).values.sum()) / len(order)
    low, high = interval(rate, len(order))
    return SiteInference(rate=rate, low=low, high=high, chance=chance, owners=len(owners))


def _ridge(x_ND: Tensor, owners_N: Tensor, tested_MD: Tensor) -> Tensor:
    """Returns the scores [M, owners] of a ridge regression on the standardised features."""
    mean, std = x_ND.mean(0), x_ND.std(0)
    std[std == 0] = 1
    x, tested = (x_ND - mean) / std, (tested_MD - mean) / std
    targets = one_hot(owners_N).double()
    kernel = x @ x.T
    kernel.diagonal().mul_(1 + RIDGE)
    prior = targets.mean(0)
    return prior + tested @ (x.T @ torch.linalg.solve(kernel, targets - prior))
