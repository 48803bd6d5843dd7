"""Computes FID and KID between synthetic and real images with torchmetrics.

Both distances compare the features that a fixed network computes for the images. FID (Heusel et al.
2017, arXiv 1706.08500) is the Fréchet distance of two normal distributions with the means and
covariances of the features. It has a bias that decreases with the number of images. KID (Bińkowski
et al. 2018, arXiv 1801.01401) is the squared maximum mean discrepancy of the features with the
kernel (x·y/d + 1)³. Its estimate has no bias, so it suits small sets.

Values are comparable only if they have the same features and the same numbers of images.
DPImageBench (arXiv 2503.14681) compares 60,000 synthetic images, as 8-bit images, by the 2048
features of StyleGAN3's Inception network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsynth.errors import DataError
from fedsynth.seeding import torch_generator

# The number of subsets for KID, and the number of images in a subset.
SUBSETS, SUBSET_SIZE = 100, 1000


@dataclass(frozen=True)
class Fidelity:
    """FID and KID between synthetic and real images, and the number of images in each set.

    Attributes:
        fid: the Fréchet distance of the features, at least 0 up to rounding.
        kid: the mean of the kernel distance over subsets. It can be negative.
        kid_std: the standard deviation of the kernel distance over subsets. None if the smaller set
            is a subset itself.
        subset_size: the number of real and of synthetic images in a subset.
        synthetic, real: the numbers of images.
        features: the number of features d.
    """

    fid: float
    kid: float
    kid_std: float | None
    subset_size: int
    synthetic: int
    real: int
    features: int


def fidelity(synthetic_Nd: Tensor, real_Md: Tensor) -> Fidelity:
    """Computes FID and KID from the features of synthetic and real images.

    KID is the mean over 100 pairs of subsets with 1000 images, or fewer if a set is smaller. The
    subsets are the same in every call.

    Args:
        synthetic_Nd, real_Md: the features of N ≥ 2 synthetic and M ≥ 2 real images.

    Raises:
        DataError: there are fewer than two synthetic or real images, or a feature is not finite.

    >>> real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> round(fidelity(real + 2, real).fid, 3)
    4.0
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import poly_mmd

    synthetic, real = synthetic_Nd.double().cpu(), real_Md.double().cpu()
    smaller = min(len(synthetic), len(real))
    if smaller < 2:
        raise DataError(
            f"FID and KID need at least 2 real and 2 synthetic images, got {len(real)} real and "
            f"{len(synthetic)} synthetic images. Add images"
        )
    if not (synthetic.isfinite().all() and real.isfinite().all()):
        raise DataError(
            "FID and KID need finite features, got NaN or infinity. Use another network"
        )
    identity = nn.Identity()
    identity.num_features = synthetic.shape[1]  # type: ignore[assignment]
    metric = FrechetInceptionDistance(identity)
    metric.update(synthetic, real=False)
    metric.update(real, real=True)
    size = min(smaller, SUBSET_SIZE)
    generator = torch_generator(0, "subsets of KID")
    values = []
    for _ in range(SUBSETS):
        real_subset = real[torch.randperm(len(real), generator=generator)[:size]]
        rows = torch.randperm(len(synthetic), generator=generator)[:size]
        values.append(poly_mmd(real_subset, synthetic[rows]))
    kid = torch.stack(values)
    return Fidelity(
        fid=float(metric.compute()),
        kid=float(kid.mean()),
        kid_std=float(kid.std(unbiased=False)) if size < smaller else None,
        subset_size=size,
        synthetic=len(synthetic),
        real=len(real),
        features=synthetic.shape[1],
    )
