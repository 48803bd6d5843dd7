"""A cache for the feature vectors of images.

Some methods sum the same features over their clients' examples many times. Without the cache they
would spend most of their time computing the feature map. The cached vectors are as private as the
images. They stay in memory as long as the data set does, and are written to disk only if
the user names a folder for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.features.encoding import cached
from fedsynth.features.feature_map import FeatureMap
from fedsynth.large_arrays import new_tensor
from fedsynth.models.on_features import Embedding
from fedsynth.privacy.passes import MIN_LENGTH, Note, padded, values_of_each

# The largest size in bytes of a data set's cache for features φ. The cache for embeddings z has
# the same limit. Vectors that need more memory are not cached and are computed again at each use.
MAX_BYTES = 3 * 2**30
# The fixed number of images whose features are computed at a time. It is fixed so that the choice
# of kernels does not depend on the number of records (`fedsynth.privacy.passes`).
PASS = 64
# The fixed number of feature vectors that are embedded at a time. It is fixed so that the choice
# of kernels does not depend on the number of records, as for `PASS`.
EMBEDDING_PASS = 512
# The number of vectors that are computed before they are copied into the cache. It bounds the
# memory that is needed in addition to the cache.
BLOCK = 16 * EMBEDDING_PASS


# The type of functions that return the vectors [M, d] at the positions [M] of a data set.
Look = Callable[[Tensor], Tensor]


class _Table:
    """The feature vectors computed so far for a data set's images.

    A table of features φ also has the table of the embedding z that was requested last.
    """

    def __init__(self, data: ImageData, features: FeatureMap) -> None:
        shape = (len(data), features.dimension)
        self.vectors = new_tensor(shape, torch.float32, data.images.device)
        self.computed = torch.zeros(len(data), dtype=torch.bool)
        self.embedded: tuple[Embedding, _Table] | None = None

    def look(self, records: Tensor, compute: Look) -> Look:
        """Computes the missing vectors of `records`, and returns a function that reads the table.

        Args:
            records: positions in the data set, on the CPU.
            compute: computes the vectors of given positions.
        """
        missing = records[~self.computed[records]]
        if len(missing):
            for chunk in missing.split(BLOCK):
                vectors = compute(chunk)
                self.vectors[chunk.to(vectors.device, non_blocking=True)] = vectors
            self.computed[missing] = True
        # twice as fast as indexing
        return lambda records: self.vectors.index_select(0, records.to(self.vectors.device))


# The table of cached vectors for each data set and each feature map. The map object is the key,
# because two maps can have the same name, dimension and constants.
_CACHES: WeakKeyDictionary[ImageData, WeakKeyDictionary[FeatureMap, _Table]] = WeakKeyDictionary()


def _cache_of(data: ImageData, features: FeatureMap) -> _Table:
    caches = _CACHES.setdefault(data, WeakKeyDictionary())
    if features not in caches:
        caches[features] = _Table(data, features)
    return caches[features]


def feature_table(
    data: ImageData,
    features: FeatureMap,
    records: Tensor,
    embedding: Embedding | None = None,
    note: Note | None = None,
    *,
    isolated: bool = False,
) -> Look:
    """Returns a function from positions in a data set to feature vectors.

    Vectors of `records` that are not in the cache are first computed. The returned function maps
    positions [M], which must be among `records` [N], to vectors [M, d]. A look-up does not wait for
    the device.

    Args:
        data: the images.
        features: the feature map φ.
        records: positions in the data set, int64.
        embedding: maps φ to z. The vectors z are cached until another embedding is requested.
            fedstats uses the same embedding from its first step to its last.
        note: a function that is needed if the records are private. It receives the reason if the
            feature map raises an error on a record, and the record's φ is then NaN. If None, the
            error is raised.
        isolated: whether each pass has only one record (`fedsynth.privacy.passes`).

    Returns:
        A function from positions to φ, or to z if `embedding` is given.
    """

    def compute(records: Tensor) -> Tensor:
        return _features(data, features, records, note, isolated=isolated)

    if not _fits(data, features):
        if embedding is None:
            return compute
        return lambda records: _embedded(compute(records), embedding, isolated=isolated)
    cache = _cache_of(data, features)
    cpu_records = records.cpu()
    if embedding is None:
        return cache.look(cpu_records, compute)

    def embed(missing: Tensor) -> Tensor:
        indices = missing.to(data.images.device, non_blocking=True)
        return _embedded(cache.look(missing, compute)(indices), embedding, isolated=isolated)

    if cache.embedded is None or not cache.embedded[0].same(embedding):
        cache.embedded = None  # frees the previous one first
        cache.embedded = copy.deepcopy(embedding), _Table(data, features)
    return cache.embedded[1].look(cpu_records, embed)


def _fits(data: ImageData, features: FeatureMap) -> bool:
    return 4 * len(data) * features.dimension <= MAX_BYTES


def keep_on_disk(
    folder: Path, data: ImageData, features: FeatureMap, records: Tensor, note: Note | None = None
) -> None:
    """Loads a data set's vectors from a folder. If they are not there, computes and stores them.

    Only the user can open the folder. Vectors that do not fit into the cache are not stored.

    Args:
        folder: the folder.
        data, features, records, note: as for `feature_table`.

    Raises:
        OutputError: the folder is readable by others, or cannot be written.
    """

    if not _fits(data, features):
        return

    def compute() -> Tensor:
        return feature_table(data, features, records, note=note)(records).cpu()

    vectors = cached(folder, data.subset(records.cpu().numpy()), features, compute)
    table = _cache_of(data, features)
    table.vectors[records] = vectors.to(table.vectors.device)
    table.computed[records.cpu()] = True


def _features(
    data: ImageData, features: FeatureMap, records: Tensor, note: Note | None, *, isolated: bool
) -> Tensor:
    length, count = (MIN_LENGTH, 1) if isolated else (PASS, PASS)
    parts = [torch.zeros(0, features.dimension, device=data.images.device)]
    with torch.no_grad():
        for chunk in records.to(data.images.device, non_blocking=True).split(count):
            x = padded(data.images[chunk], length)
            vectors = features(x) if note is None else values_of_each(features, (x,), note)
            parts.append(vectors[: len(chunk)])
    return torch.cat(parts)


def _embedded(features_Nd: Tensor, embedding: Embedding, *, isolated: bool) -> Tensor:
    """Computes the embedding z of each feature vector."""
    length, count = (MIN_LENGTH, 1) if isolated else (EMBEDDING_PASS, EMBEDDING_PASS)
    parts = [features_Nd[:0]]
    for chunk in features_Nd.split(count):
        parts.append(embedding(padded(chunk, length))[: len(chunk)])
    return torch.cat(parts)
