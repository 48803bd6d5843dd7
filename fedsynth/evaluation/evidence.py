"""Measures what released images show about the images from which they were made.

All results are exact functions of the real images, without any noise. They may only be computed for
images that are public or simulated, and no guarantee covers them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsynth.evaluation.fidelity import Fidelity
from fedsynth.privacy.report.figures import Part
from fedsynth.seeding import torch_generator

CONFIDENCE = 0.95
NOTICE = (
    "The exporter stated that the real images are public or simulated. If they are private, this "
    "page must not leave their owner, because its numbers are exact and no guarantee covers them."
)
# Two distances are equal if they differ by less, because of rounding.
ROUNDING = 1e-6
FOLDS = 5
RIDGE = 0.1  # in units of an image's mean squared norm
_RELEASED_AT_ONCE = 512

Portion = Annotated[float, Field(ge=0, le=1)]


class Membership(Part):
    """The result of the attack by nearest neighbours.

    An image's nearest neighbour among all real images is a training image or a held-out one.

    Attributes:
        nearest_training, nearest_held_out: each released image's distance to the nearest training
            and held-out image.
        share: the share of released images whose neighbour is a training image. Equal distances
            count as one half.
        low, high: the 95 % interval (Clopper and Pearson) of the share, in which neighbours
            count and not images: n images with c_j neighbours j count as n²/Σ c_j².
        chance: the expected share if the released images do not depend on which real images are
            training images. It is the share of training images among the real ones of the
            neighbours' classes.
        can_show, cannot_show: what follows from a share above chance, and from one near chance.
    """

    nearest_training: list[float]
    nearest_held_out: list[float]
    share: Portion
    low: Portion
    high: Portion
    chance: Portion
    can_show: str = (
        "An interval above chance: the released images are nearer to training images than new images "
        "would be, as copies are."
    )
    cannot_show: str = (
        "An interval with chance: no proof of privacy. Attacks on single records, with other "
        "features, on the model, or with many similar releases may succeed. Held-out images of "
        "another distribution, or persons with images in both sets, shift the share."
    )


class SiteInference(Part):
    """The result of the attack that tells the owner by whom an image was released.

    Attributes:
        owners: the number of owners.
        accuracy: the accuracy of a linear classifier of the owners, cross-validated in 5 folds.
        low, high: the 95 % interval (Clopper and Pearson) of the accuracy.
        chance: the accuracy of the best guess from an image's label.
        can_show, cannot_show: what follows from an accuracy above chance, and from one near chance.
    """

    owners: int = Field(ge=2)
    accuracy: Portion
    low: Portion
    high: Portion
    chance: Portion
    can_show: str = (
        "An interval above chance: the images carry marks of their owners, such as those of a "
        "scanner. It does not name a person."
    )
    cannot_show: str = "An interval with chance: a network, other features or more images may still tell the owners."


class Evidence(Part):
    """The evidence pack of a synthetic set, which is the file evidence.json.

    Attributes:
        notice: the condition under which the pack may be shared.
        features: the features by which images were compared, with Euclidean distance.
        training_images, held_out_images: the numbers of real images.
        label_counts: the number of released images by class.
        membership: the attack by nearest neighbours.
        site_inference: the attack on the images' owners. None if the images do not state their
            owners, or if an owner has fewer than two images.
        fidelity: FID and KID between the released and the held-out images.
        fidelity_shows: what small and large distances mean.

    >>> Evidence.model_json_schema()["properties"]["schema_version"]["const"]
    1
    """

    schema_version: Literal[1] = 1
    notice: str = NOTICE
    features: str
    training_images: int
    held_out_images: int
    label_counts: dict[str, int]
    membership: Membership
    site_inference: SiteInference | None
    fidelity: Fidelity
    fidelity_shows: str = (
        "Small distances: the images resemble new real ones. Copies do, too, so the distances say "
        "nothing about privacy, and little about the accuracy of models trained on the images."
    )


def interval(share: float, count: float) -> tuple[float, float]:
    """Returns the 95 % interval of Clopper and Pearson for a share of `count` independent trials.

    >>> low, high = interval(1.0, 20)
    >>> round(low, 3), high
    (0.832, 1.0)
    """
    from scipy.stats import beta

    right, tail = share * count, (1 - CONFIDENCE) / 2
    low = 0.0 if share <= 0 else float(beta.ppf(tail, right, count - right + 1))
    high = 1.0 if share >= 1 else float(beta.ppf(1 - tail, right + 1, count - right))
    return low, high


def membership(
    released_ND: Tensor,
    training: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
) -> Membership:
    """Compares the distances of released images to training images and to held-out ones.

    Without dependence on the training images, the records of a class are exchangeable. An image's
    neighbour of class c is then a training image with the probability m_c/(m_c + k_c), for m_c
    training and k_c held-out images of this class.

    Args:
        released_ND: the features of the released images.
        training, held_out: features [M, D] and labels [M] of the real images.

    >>> real = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    >>> labels = torch.zeros(20, dtype=torch.int64)
    >>> copied = membership(real[:20], (real[:20], labels), (real[20:], labels))
    >>> copied.share, copied.chance, copied.low > copied.chance
    (1.0, 0.5, True)
    """
    training_N, training_rows = _nearest(released_ND, training[0])
    held_out_N, held_out_rows = _nearest(released_ND, held_out[0])
    gap_N = held_out_N - training_N
    of_training_N = (gap_N.sign() * (gap_N.abs() > ROUNDING) + 1) / 2
    rows_N = torch.where(gap_N >= 0, training_rows, held_out_rows + len(training[0]))
    images_per_neighbour = rows_N.unique(return_counts=True)[1].double()
    share = float(of_training_N.mean())
    low, high = interval(share, len(rows_N) ** 2 / float(images_per_neighbour.square().sum()))
    labels = torch.cat([training[1], held_out[1]])
    classes = int(labels.max()) + 1
    portions = training[1].bincount(minlength=classes) / labels.bincount(minlength=classes)
    return Membership(
        nearest_training=training_N.tolist(),
        nearest_held_out=held_out_N.tolist(),
        share=share,
        low=low,
        high=high,
        chance=float(portions[labels[rows_N]].double().mean()),
    )


def _nearest(released_ND: Tensor, real_MD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distance and the row of each released image's nearest real image."""
    real = real_MD.double()
    parts = [
        torch.cdist(chunk.double(), real).min(1) for chunk in released_ND.split(_RELEASED_AT_ONCE)
    ]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def site_inference(released_ND: Tensor, owners_N: Tensor, labels_N: Tensor) -> SiteInference | None:
    """Tries to tell from released images which owner made them, by ridge regression.

    Args:
        released_ND: the features of the released images.
        owners_N, labels_N: the owner and the class of each image.

    Returns:
        The result, or None if there is one owner, or an owner has fewer than two images.

    >>> rng = torch.Generator().manual_seed(0)
    >>> owners = torch.arange(40) % 2
    >>> found = site_inference(torch.randn(40, 4, generator=rng) + 4 * owners[:, None], owners, owners * 0)
    >>> found.accuracy, found.chance
    (1.0, 0.5)
    """
    owners, numbers_N = owners_N.unique(return_inverse=True)
    table = torch.zeros(int(labels_N.max()) + 1, len(owners), dtype=torch.int64)
    table.index_put_((labels_N, numbers_N), torch.ones_like(numbers_N), accumulate=True)
    if len(owners) < 2 or int(table.sum(0).min()) < 2:
        return None
    order = torch.randperm(len(labels_N), generator=torch_generator(0, "folds of owners"))
    order = order[(numbers_N * len(table) + labels_N)[order].argsort(stable=True)]
    right = 0
    for fold in range(FOLDS):
        tested = order[fold::FOLDS]
        used = torch.ones(len(order), dtype=torch.bool)
        used[tested] = False
        scores = _ridge(released_ND[used].double(), numbers_N[used], released_ND[tested].double())
        right += int((scores.argmax(1) == numbers_N[tested]).sum())
    low, high = interval(right / len(order), len(order))
    return SiteInference(
        owners=len(owners),
        accuracy=right / len(order),
        low=low,
        high=high,
        chance=float(table.max(1).values.sum()) / len(order),
    )


def _ridge(x_ND: Tensor, owners_N: Tensor, tested_MD: Tensor) -> Tensor:
    """Returns the scores [M, owners] of a ridge regression on the standardised features."""
    mean, std = x_ND.mean(0), x_ND.std(0)
    std = torch.where(std > 0, std, 1.0)
    x, tested = (x_ND - mean) / std, (tested_MD - mean) / std
    targets = torch.nn.functional.one_hot(owners_N).double()
    prior = targets.mean(0)
    kernel = x @ x.T
    kernel += RIDGE * kernel.diagonal().mean() * torch.eye(len(x), dtype=x.dtype)
    return prior + tested @ (x.T @ torch.linalg.solve(kernel, targets - prior))
