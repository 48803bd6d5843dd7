"""A client's own test split, by what its records are and not by where they stand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fedsynth.data.arrays import IntArray
from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.data.users import user_digests


def hold_out(
    parts: Sequence[IntArray], share: float, seed: int, data: ImageData, by_user: bool = False
) -> tuple[list[IntArray], list[IntArray]]:
    """(training split, test split) of each client, sorted: each record tests with probability
    `share`.

    On which side a record stands follows from the seed and from its own bytes, not from its place:
    with differential privacy one record more, anywhere in the data, must not move others from one
    split to the other. Equal records stand on the same side, so none of a test split is also
    trained on.

    Args:
        parts: for each client the positions of its records in `data`.
        seed: public; another one gives another split.
        by_user: all records of a user (`data.groups`) stand on the same side, by a hash of all of
            them: users are protected.
    """
    positions = [np.asarray(part, np.int64) for part in parts]
    key = hashlib.blake2b(f"local test split {seed}".encode(), digest_size=32).digest()
    digests = user_digests if by_user else record_digests
    training = []
    testing = []
    for part in positions:
        drawn = digests(data, part, key, 8).view("<u8")[:, 0] / 2.0**64
        training.append(np.sort(part[drawn >= share]))
        testing.append(np.sort(part[drawn < share]))
    return training, testing
