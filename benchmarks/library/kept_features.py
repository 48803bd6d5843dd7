"""Fixed features of whole data sets, made once and kept as files.

They take nearly all of a FedStats run's time, and are the same in every run. Files have 16 bits a
number: errors of 5e-4 of a coordinate, far below any noise. A file is named after its map: delete
the files of a map that you change.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.features.feature_map import FeatureMap

AT_ONCE = 64


def vectors(folder: Path, split: str, data: ImageData, features: FeatureMap) -> Tensor:
    """Returns the features of all images of a split, [N, d], from the folder where they are there.

    Args:
        folder: of the files.
        split: "train" or "test", for the name.
        data: the whole split.
        features: the map.
    """
    path = folder / f"{data.spec.name}-{split}-{features.name}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        vectors_16_bit = np.empty((len(data), features.dimension), np.float16)
        with torch.no_grad():
            for start in range(0, len(data), AT_ONCE):
                vectors_16_bit[start : start + AT_ONCE] = features(
                    data.images[start : start + AT_ONCE]
                ).cpu()
        np.save(path, vectors_16_bit)
    raw = np.load(path, mmap_mode="r")
    vectors_Nd = torch.empty(raw.shape)
    for start in range(0, len(raw), 4096):
        vectors_Nd[start : start + 4096] = torch.from_numpy(
            raw[start : start + 4096].astype(np.float32)
        )
    return vectors_Nd
