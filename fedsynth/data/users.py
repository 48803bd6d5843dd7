"""Users: the people (writers, patients, card holders) whose records a data set holds, for runs with
user-level protection.

`ImageData.groups` gives the user of each record. For folders of images it is read from a file
`users.csv` with the columns `path` and `user`; LEAF's files name their writers.
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
        DataError: the data have no users.
    """
    if data.groups is None:
        raise DataError(
            f"{data.spec.name} does not name the users of its records: to protect users, "
            f"pass groups= to from_arrays, or put a file {USERS_FILE} next to the image "
            "folders"
        )
    users: IntArray = data.groups.cpu().numpy()
    return users


def check_one_client_each(parts: Sequence[IntArray], data: ImageData) -> None:
    """Checks that no user has records at two clients: the guarantee holds for users of one client.

    Raises:
        PartitionError: a user has records at two clients; the message names both.
        DataError: the data have no users.
    """
    users = users_of(data)
    home: dict[int, int] = {}
    for client, part in enumerate(parts):
        for user in np.unique(users[part]).tolist():
            other = home.setdefault(user, client)
            if other != client:
                raise PartitionError(
                    f"clients {other} and {client} have records of the same user, who would "
                    "be protected at each client separately: divide the data by user "
                    "(partition.kind=natural or domain, or custom `parts`)"
                )


def bounded(part: IntArray, data: ImageData, limit: int, seed: int) -> IntArray:
    """Returns at most `limit` records of each user, sorted: those with the smallest keyed hashes.

    The choice depends only on a user's own records and the public seed, so an additional user does
    not change it for others. Of equal records the first ones are kept.
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
    """Returns a keyed hash for each record at `positions`, computed from all of those records that
    belong to the same user: uint8 [N, size].

    The hash depends on the hashes of the user's records, in any order, and not on the user's
    number. Numbers follow the sorted names of all users, so an additional user would renumber
    others.
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
    """Returns (training split, test split) of each client, sorted; each record is in the test split
    with probability `share`.

    A record's split depends on the seed and the record's bytes, not on its position: with
    differential privacy, one additional record anywhere in the data must not move others between
    splits. Equal records are in the same split, so no test record is also trained on.

    Args:
        parts: for each client the positions of its records in `data`.
        seed: public; another one gives another split.
        by_user: keep all records of a user (`data.groups`) in one split, chosen by a hash of all of
            them: for user-level protection.
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
