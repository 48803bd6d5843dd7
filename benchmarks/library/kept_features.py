"""Scattering coefficients of whole data sets, made once and kept as files.

They are what a FedStats run takes nearly all of its time for, and the same in every run. They are
kept in 16 bits, which is 5e-4 of a coefficient, far below any noise.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.public_statistics import Whitening
from fedsynth.features.scattering import scattering

AT_ONCE = 64


def vectors(folder: Path, split: str, data: ImageData, features: FeatureMap) -> Tensor:
    """`features` of all images of a split, [N, d], float32; coefficients are made if they are not
    in the folder.

    Args:
        folder: of the files.
        split: "train" or "test", for the name.
        data: the whole split.
        features: scattering, or whitened scattering.
    """
    path = folder / f"{data.spec.name}-{split}-scattering.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        base = scattering(data.spec.image_shape)
        made = np.empty((len(data), base.dimension), np.float16)
        with torch.no_grad():
            for start in range(0, len(data), AT_ONCE):
                made[start : start + AT_ONCE] = base(data.images[start : start + AT_ONCE]).cpu()
        np.save(path, made)
    raw = np.load(path, mmap_mode="r")
    white = features.function if isinstance(features.function, Whitening) else None
    found = torch.empty(raw.shape)
    for start in range(0, len(raw), 4096):
        part = torch.from_numpy(raw[start : start + 4096].astype(np.float32))
        found[start : start + 4096] = part if white is None else white.applied(part)
    return found
