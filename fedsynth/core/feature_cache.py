"""Features of resident images, made once and kept beside them.

A method that sums fixed features over its clients' examples again and again would spend its time on
the map. The vectors are as private as the images: they are kept in this process, as long as the
data set is, and nothing writes them down.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.features.feature_map import FeatureMap
from fedsynth.privacy.passes import padded

MOST_BYTES = 3 * 2**30
"""Of one data set's vectors; those of a larger one are made anew each time."""
PASS = 64
"""Images that are mapped at a time, always as many: kernels then do not go by how many records
there are (`fedsynth.privacy.passes`)."""


class _Kept:
    """The vectors of one data set by one map, as far as they were asked for."""

    def __init__(self, data: ImageData, features: FeatureMap) -> None:
        self.vectors = torch.zeros(len(data), features.dimension, device=data.images.device)
        self.there = torch.zeros(len(data), dtype=torch.bool)


_KEPT: WeakKeyDictionary[ImageData, WeakKeyDictionary[FeatureMap, _Kept]] = WeakKeyDictionary()
"""By the map itself: two maps can share a name, a dimension and all constants."""


def kept_features(data: ImageData, features: FeatureMap, records: Tensor) -> Tensor:
    """Vectors [N, d] of the data set's images at these positions [N], float32, on its device."""
    return feature_table(data, features, records)(records)


def feature_table(
    data: ImageData, features: FeatureMap, records: Tensor
) -> Callable[[Tensor], Tensor]:
    """What looks up the vectors [M, d] of positions [M] among `records` [N], which it has made where
    they were missing; a look-up waits for nothing on the device."""
    if 4 * len(data) * features.dimension > MOST_BYTES:
        return lambda some: _made(data, features, some)
    kept = _KEPT.setdefault(data, WeakKeyDictionary()).get(features)
    if kept is None:
        kept = _KEPT[data][features] = _Kept(data, features)
    where = records.cpu()
    missing = where[~kept.there[where]]
    if len(missing):
        made = _made(data, features, missing)
        kept.vectors[missing.to(made.device, non_blocking=True)] = made
        kept.there[missing] = True
    return kept.vectors.__getitem__


def keep_features(data: ImageData, features: FeatureMap, vectors_Nd: Tensor) -> None:
    """Takes vectors of all of a data set's images that were made before, as benchmarks keep them.

    Args:
        data: whose.
        features: what made them.
        vectors_Nd: float32, on the data's device, in the data's order.
    """
    kept = _Kept.__new__(_Kept)
    kept.vectors = vectors_Nd
    kept.there = torch.ones(len(data), dtype=torch.bool)
    _KEPT.setdefault(data, WeakKeyDictionary())[features] = kept


def _made(data: ImageData, features: FeatureMap, records: Tensor) -> Tensor:
    parts = [torch.zeros(0, features.dimension, device=data.images.device)]
    with torch.no_grad():
        for some in records.to(data.images.device, non_blocking=True).split(PASS):
            parts.append(features(padded(data.images[some], PASS))[: len(some)])
    return torch.cat(parts)
