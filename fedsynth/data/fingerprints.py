"""A keyed hash of each record's own bytes: what a record is, wherever it stands and whoever has it.

Without the key a hash tells nothing about its record; with it, anybody who has the record can
compute it again.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.images import ImageData

DIGEST_BYTES = 16
_PURPOSE = b"fedsynth record"
_AT_ONCE = 4096  # records that are copied to the CPU at a time: a memory bound


def record_digests(
    data: ImageData,
    positions: IntArray,
    key: bytes,
    size: int = DIGEST_BYTES,
    *,
    labels: bool = True,
) -> npt.NDArray[np.uint8]:
    """The keyed hash of each of some records.

    It is of the record's pixels as they are stored (uint8, row by row) and its label (or, without
    `labels`, of the pixels alone), and depends on nothing else: not on the record's position, on
    other records, or on the device.

    Args:
        data: the images and labels, on any device.
        positions: integers [N], which of them.
        key: up to 64 bytes. Secret where the hashes must not be computed by others.
        size: bytes of a hash, 1 to 64; two records of one set of 10⁶ collide at 16 with probability
            about 10⁻²⁷.

    Returns:
        BLAKE2b (RFC 7693), keyed: uint8 [N, size].
    """
    chosen = np.asarray(positions, np.int64)
    digests = np.empty((len(chosen), size), np.uint8)
    empty = hashlib.blake2b(key=key, digest_size=size, person=_PURPOSE)
    for first in range(0, len(chosen), _AT_ONCE):
        some = data.subset(chosen[first : first + _AT_ONCE])
        pixels = some.images.cpu().flatten(1).numpy()
        if labels:
            own = some.labels.cpu().numpy().astype("<i8").view(np.uint8).reshape(len(pixels), -1)
            pixels = np.concatenate([pixels, own], axis=1)
        for row, record in enumerate(np.ascontiguousarray(pixels), start=first):
            hashed = empty.copy()
            hashed.update(record)
            digests[row] = np.frombuffer(hashed.digest(), np.uint8)
    return digests
