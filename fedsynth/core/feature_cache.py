"""A cache of resident images' features.

A method that repeatedly sums fixed features over its clients' examples would otherwise spend most
of its time on the map. The vectors are as private as the images: they stay in this process, as long
as the data set does, and are never written to disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.features.feature_map import FeatureMap
from fedsynth.models.feature_linear import Embedding
from fedsynth.privacy.passes import Note, padded, values_of_each

MAX_BYTES = 3 * 2**30
"""Largest cache of one data set's φ, and again of its z; larger ones are recomputed each time."""
PASS = 64
"""Fixed number of images mapped at a time, so that the choice of kernels does not depend on the
number of records (`fedsynth.privacy.passes`)."""
EMBEDDING_PASS = 512
"""Fixed number of vectors embedded at a time, for the same reason."""
BLOCK = 16 * EMBEDDING_PASS
"""Vectors computed before they are cached: a bound on memory besides the cache's."""


Look = Callable[[Tensor], Tensor]
"""Positions [M] in a data set -> vectors [M, d]."""


class _Table:
    """The vectors of a data set's images that have been requested so far."""

    def __init__(self, data: ImageData, features: FeatureMap) -> None:
        self.vectors = torch.zeros(len(data), features.dimension, device=data.images.device)
        self.computed = torch.zeros(len(data), dtype=torch.bool)

    def look(self, records: Tensor, compute: Look) -> Look:
        """Returns a function that looks up vectors of the positions `records` (on the CPU);
        computes the missing ones first."""
        missing = records[~self.computed[records]]
        if len(missing):
            for chunk in missing.split(BLOCK):
                vectors = compute(chunk)
                self.vectors[chunk.to(vectors.device, non_blocking=True)] = vectors
            self.computed[missing] = True
        return self.vectors.__getitem__


class _MapCache:
    """The cache of one data set and one map: φ, and z of the last requested embedding."""

    def __init__(self, data: ImageData, features: FeatureMap) -> None:
        self.features = _Table(data, features)
        self.embedded: tuple[Embedding, _Table] | None = None


_CACHES: WeakKeyDictionary[ImageData, WeakKeyDictionary[FeatureMap, _MapCache]] = (
    WeakKeyDictionary()
)
"""Keyed by the map object: two maps can share a name, a dimension and all constants."""


def _cache_of(data: ImageData, features: FeatureMap) -> _MapCache:
    caches = _CACHES.setdefault(data, WeakKeyDictionary())
    if features not in caches:
        caches[features] = _MapCache(data, features)
    return caches[features]


def feature_table(
    data: ImageData,
    features: FeatureMap,
    records: Tensor,
    embedding: Embedding | None = None,
    note: Note | None = None,
) -> Look:
    """Returns a function that looks up vectors [M, d] of positions [M] among `records` [N];
    computes the missing ones first. A look-up does not wait for the device.

    Args:
        data: the images.
        features: φ.
        records: positions, int64.
        embedding: maps φ to z. z is cached until another embedding is requested: that of fedstats
            is the same from its first step to its last.
        note: if the records are private, receives the reason for a missing φ: it is NaN for a
            record on which the map raises. None: the map's error is raised.

    Returns:
        A function of positions, to φ or z.
    """

    def compute(records: Tensor) -> Tensor:
        return _features(data, features, records, note)

    if 4 * len(data) * features.dimension > MAX_BYTES:
        if embedding is None:
            return compute
        return lambda records: _embedded(compute(records), embedding)
    cache = _cache_of(data, features)
    cpu_records = records.cpu()
    if embedding is None:
        return cache.features.look(cpu_records, compute)

    def embed(missing: Tensor) -> Tensor:
        indices = missing.to(data.images.device, non_blocking=True)
        return _embedded(cache.features.look(missing, compute)(indices), embedding)

    if cache.embedded is None or not cache.embedded[0].same(embedding):
        cache.embedded = None  # frees the previous one first
        cache.embedded = copy.deepcopy(embedding), _Table(data, features)
    return cache.embedded[1].look(cpu_records, embed)


def keep_features(data: ImageData, features: FeatureMap, vectors_Nd: Tensor) -> None:
    """Caches precomputed vectors of all of a data set's images, such as those that benchmarks keep.

    Args:
        data: the images.
        features: the map that computed the vectors.
        vectors_Nd: float32, on the data's device, in the data's order.
    """
    table = _cache_of(data, features).features
    table.vectors = vectors_Nd
    table.computed[:] = True


def _features(data: ImageData, features: FeatureMap, records: Tensor, note: Note | None) -> Tensor:
    parts = [torch.zeros(0, features.dimension, device=data.images.device)]
    with torch.no_grad():
        for chunk in records.to(data.images.device, non_blocking=True).split(PASS):
            images = padded(data.images[chunk], PASS)
            vectors = (
                features(images) if note is None else values_of_each(features, (images,), note)
            )
            parts.append(vectors[: len(chunk)])
    return torch.cat(parts)


def _embedded(features_Nd: Tensor, embedding: Embedding) -> Tensor:
    """Returns z of these features."""
    parts = [features_Nd[:0]]
    for chunk in features_Nd.split(EMBEDDING_PASS):
        parts.append(embedding(padded(chunk, EMBEDDING_PASS))[: len(chunk)])
    return torch.cat(parts)
