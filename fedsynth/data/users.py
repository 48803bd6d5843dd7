"""Handles the users of a data set: the people, such as writers or patients, whose records it has.

Runs that protect users need to know the user of each record, which `ImageData.groups` states. For
folders of images, a file `users.csv` with the columns `path` and `user` gives the users. LEAF's
files name the writers.

The module also splits the records of each client into a training split and a test split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsynth.data.images import ImageData, IntArray, record_digests
from fedsynth.data.record_table import USERS_FILE
from fedsynth.errors import DataError, PartitionError


def users_of(data: ImageData) -> IntArray:
    """Returns the user of each record, int64 [N].

    Raises:
        DataError: the data set does not state the users of its records.
    """
    if data.groups is None:
        raise DataError(
            f"{data.spec.name} must state each record's user, because this run protects users: "
            f"pass groups= to from_arrays, or put a file {USERS_FILE} next to the image folders"
        )
    users: IntArray = data.groups.cpu().numpy()
    return users


def check_one_client_each(parts: Sequence[IntArray], data: ImageData) -> None:
    """Checks that no user has records at two clients.

    The guarantee for users holds only if all records of a user are at one client.

    Raises:
        PartitionError: a user has records at two clients. The message names both clients.
        DataError: the data set does not state the users of its records.
    """
    users = users_of(data)
    home: dict[int, int] = {}
    for client, part in enumerate(parts):
        for user in np.unique(users[part]).tolist():
            other = home.setdefault(user, client)
            if other != client:
                raise PartitionError(
                    f"clients {other} and {client} have records of the same user, so the guarantee "
                    "would not hold for all records of this user: divide the data by user "
                    "(partition.kind=natural or domain, or custom `parts`)"
                )


def bounded(part: IntArray, data: ImageData, limit: int, seed: int) -> IntArray:
    """Chooses at most `limit` records of each user. Returns their positions, sorted.

    The records with the smallest keyed hashes are chosen. The choice for a user depends only on the
    records of this user and on the public seed, so an additional user does not change it. If a user
    has equal records, the first ones are chosen.
    """
    part = np.asarray(part, np.int64)
    users = users_of(data)[part]
    key = hashlib.blake2b(f"contributions {seed}".encode(), digest_size=32).digest()
    drawn = record_digests(data, part, key, 8).view("<u8")[:, 0]
    order = np.lexsort((drawn, users))
    users = users[order]
    starts = np.flatnonzero(np.r_[True, users[1:] != users[:-1]])
    rank = np.arange(len(users)) - np.repeat(starts, np.diff(np.r_[starts, len(users)]))
    return np.sort(part[order[rank < limit]])


def user_digests(
    data: ImageData, positions: IntArray, key: bytes, size: int = 16
) -> npt.NDArray[np.uint8]:
    """Computes a keyed hash of the user of each record at `positions`, uint8 [N, size].

    The hash is computed from all records at `positions` that belong to the user, in any order. It
    does not depend on the number of the user, because an additional user may change the numbers of
    the others.
    """
    chosen = np.asarray(positions, np.int64)
    users = users_of(data)[chosen]
    records = record_digests(data, chosen, key)
    order = np.argsort(users, kind="stable")
    digests = np.empty((len(users), size), np.uint8)
    for user_rows in np.split(order, np.flatnonzero(np.diff(users[order])) + 1):
        content = b"".join(sorted(records[row].tobytes() for row in user_rows))
        hashed = hashlib.blake2b(content, key=key, digest_size=size, person=b"fedsynth user")
        digests[user_rows] = np.frombuffer(hashed.digest(), np.uint8)
    return digests


def hold_out(
    parts: Sequence[IntArray], share: float, seed: int, data: ImageData, by_user: bool = False
) -> tuple[list[IntArray], list[IntArray]]:
    """Divides the records of each client into a training split and a test split.

    Each record is put into the test split with probability `share`. The split of a record depends
    on the seed and on the record's bytes, but not on its position. With differential privacy, an
    additional record must not move other records between the splits. Equal records are in the same
    split, so no test record is used for training.

    Args:
        parts: the positions of each client's records in `data`.
        share: the probability with which a record is put into the test split.
        seed: the public seed of the split.
        data: the images of all clients.
        by_user: whether all records of a user (`data.groups`) stay in one split, for runs that
            protect users. The split then depends on a hash of all of them.

    Returns:
        The training positions and the test positions of each client, sorted.
    """
    key = hashlib.blake2b(f"local test split {seed}".encode(), digest_size=32).digest()
    digests = {True: user_digests, False: record_digests}[by_user]
    training = []
    testing = []
    for part in parts:
        drawn = digests(data, part, key, 8).view("<u8")[:, 0] / 2.0**64
        training.append(np.sort(part[drawn >= share]))
        testing.append(np.sort(part[drawn < share]))
    return training, testing
