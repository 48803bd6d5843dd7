"""The `random-process` dictionary of patches, learned by whitening and spherical k-means from
random-process images (Coates & Ng 2012, "Learning Feature Representations with K-means")."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.features.random_images import random_images
from fedsynth.features.random_process import CONTRAST, PATCH, Dictionary
from fedsynth.seeding import torch_generator

SIDE = 32


# Added to the eigenvalues of the normalised patches' covariance, whose mean is near 1.
FLOOR = 0.1


def learn_dictionary(
    seed: int = 0, images: int = 2048, patches: int = 60_000, atoms: int = 96, rounds: int = 12
) -> Dictionary:
    """Returns a dictionary, on the CPU; the defaults made the one that the package ships.

    Args:
        seed: of images, patches and start.
        images: random-process images.
        patches: of these images.
        atoms: K, vectors of the dictionary.
        rounds: of k-means.
    """
    generator = torch_generator(seed, "random-process dictionary")
    drawn = random_images(images, (3, SIDE, SIDE), generator)
    points = normalised(drawn_patches(drawn, patches, generator))
    mean = points.mean(dim=0)
    whitening = whitener(points - mean)
    white = F.normalize((points - mean) @ whitening, dim=1)
    start = white[torch.randperm(len(white), generator=generator)[:atoms]]
    return Dictionary(mean, whitening @ spherical_kmeans(white, start, rounds).T)


def drawn_patches(images_NCHW: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns patches at random places of random images, [count, 3·PATCH²]."""
    windows = images_NCHW.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    number, _, rows, columns = windows.shape[:4]
    which = torch.randint(number, (count,), generator=generator)
    row = torch.randint(rows, (count,), generator=generator)
    column = torch.randint(columns, (count,), generator=generator)
    return windows[which, :, row, column].reshape(count, -1)


def normalised(patches_NP: Tensor) -> Tensor:
    """Returns each patch with mean 0 and a deviation of about 1."""
    about = patches_NP - patches_NP.mean(dim=1, keepdim=True)
    return about / (about.square().mean(dim=1, keepdim=True) + CONTRAST).sqrt()


def whitener(centred_NP: Tensor) -> Tensor:
    """Returns (C + FLOOR)^−½ of the covariance C, symmetric [P, P]."""
    covariance = centred_NP.double().T @ centred_NP.double() / len(centred_NP)
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors / (values.clamp_min(0) + FLOOR).sqrt()) @ vectors.T
    return root.float()


def spherical_kmeans(points_NP: Tensor, start_KP: Tensor, rounds: int) -> Tensor:
    """Returns unit vectors [K, P] near to the points, of either sign."""
    atoms = start_KP
    for _ in range(rounds):
        similar = points_NP @ atoms.T
        nearest = similar.abs().argmax(dim=1)
        sign = similar.gather(1, nearest[:, None]).sign()
        members = F.one_hot(nearest, len(atoms)).to(points_NP.dtype)
        strength = similar.gather(1, nearest[:, None]).abs()
        sums = members.T @ (points_NP * sign * strength)
        atoms = F.normalize(sums + 1e-6 * atoms, dim=1)  # one without points stays
    return atoms
