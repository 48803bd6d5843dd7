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

MOST_BYTES = 3 * 2**30
"""Largest cache of one data set's φ, and again of its z; larger ones are recomputed each time."""
PASS = 64
"""Fixed number of images mapped at a time, so that the choice of kernels does not depend on the
number of records (`fedsynth.privacy.passes`)."""
EMBEDDING_PASS = 512
"""Fixed number of vectors embedded at a time, for the same reason."""
AT_ONCE = 16 * EMBEDDING_PASS
"""Vectors computed before they are cached: a bound on memory besides the cache's."""


Look = Callable[[Tensor], Tensor]
"""Positions [M] in a data set -> vectors [M, d]."""


class _Table:
    """The vectors of a data set's images that have been requested so far."""

    def __init__(self, data: ImageData, features: FeatureMap) -> None:
        self.vectors = torch.zeros(len(data), features.dimension, device=data.images.device)
        self.there = torch.zeros(len(data), dtype=torch.bool)

    def look(self, records: Tensor, make: Look) -> Look:
        """Returns a function that looks up vectors of the positions `records` (on the CPU);
        computes the missing ones first."""
        missing = records[~self.there[records]]
        for chunk in missing.split(AT_ONCE) if len(missing) else ():
            vectors = make(chunk)
            self.vectors[chunk.to(vectors.device, non_blocking=True)] = vectors
        self.there[missing] = True
        return self.vectors.__getitem__


class _Kept:
    """The cache of one data set and one map: φ, and z of the last requested embedding."""

    def __init__(self, features: _Table) -> None:
        self.features = features
        self.embedded: tuple[Embedding, _Table] | None = None


_KEPT: WeakKeyDictionary[ImageData, WeakKeyDictionary[FeatureMap, _Kept]] = WeakKeyDictionary()
"""Keyed by the map object: two maps can share a name, a dimension and all constants."""


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
    if 4 * len(data) * features.dimension > MOST_BYTES:
        return lambda chunk: _turned(_made(data, features, chunk, note), embedding)
    maps = _KEPT.setdefault(data, WeakKeyDictionary())
    cached = maps.get(features)
    if cached is None:
        cached = maps[features] = _Kept(_Table(data, features))
    phi = cached.features

    def make(missing: Tensor) -> Tensor:
        return _made(data, features, missing, note)

    def embed(missing: Tensor) -> Tensor:
        indices = missing.to(data.images.device, non_blocking=True)
        return _turned(phi.look(missing, make)(indices), embedding)

    cpu_records = records.cpu()
    if embedding is None:
        return phi.look(cpu_records, make)
    last = cached.embedded
    if last is None or not last[0].same(embedding):
        cached.embedded = last = None  # frees the previous one first
        last = cached.embedded = (copy.deepcopy(embedding), _Table(data, features))
    return last[1].look(cpu_records, embed)


def keep_features(data: ImageData, features: FeatureMap, vectors_Nd: Tensor) -> None:
    """Caches precomputed vectors of all of a data set's images, such as those that benchmarks keep.

    Args:
        data: the images.
        features: the map that computed the vectors.
        vectors_Nd: float32, on the data's device, in the data's order.
    """
    table = _Table.__new__(_Table)
    table.vectors = vectors_Nd
    table.there = torch.ones(len(data), dtype=torch.bool)
    _KEPT.setdefault(data, WeakKeyDictionary())[features] = _Kept(table)


def _made(data: ImageData, features: FeatureMap, records: Tensor, note: Note | None) -> Tensor:
    parts = [torch.zeros(0, features.dimension, device=data.images.device)]
    with torch.no_grad():
        for chunk in records.to(data.images.device, non_blocking=True).split(PASS):
            images = padded(data.images[chunk], PASS)
            vectors = (
                features(images) if note is None else values_of_each(features, (images,), note)
            )
            parts.append(vectors[: len(chunk)])
    return torch.cat(parts)


def _turned(features_Nd: Tensor, embedding: Embedding | None) -> Tensor:
    """Returns z of these features; without an embedding, the features."""
    if embedding is None:
        return features_Nd
    parts = [features_Nd[:0]]
    for chunk in features_Nd.split(EMBEDDING_PASS):
        parts.append(embedding(padded(chunk, EMBEDDING_PASS))[: len(chunk)])
    return torch.cat(parts)
