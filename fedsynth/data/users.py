"""Users: the people (writers, patients, card holders) whose records a data set holds, where they
are to be protected as a whole.

A data set says whose each record is in `ImageData.groups`. For folders of images a file `users.csv`
says it, with the columns `path` and `user`; LEAF's files name their writers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.data.record_table import USERS_FILE
from fedsynth.errors import DataError, PartitionError


def users_of(data: ImageData) -> IntArray:
    """Whose each record is, int64 [N].

    Raises:
        DataError: the data do not say.
    """
    if data.groups is None:
        raise DataError(
            f"{data.spec.name} does not say whose its records are: protecting users needs groups= "
            "of from_arrays, "
            f"or a file {USERS_FILE} beside folders of images"
        )
    users: IntArray = data.groups.cpu().numpy()
    return users


def check_one_client_each(parts: Sequence[IntArray], data: ImageData) -> None:
    """Refuses a partition that gives records of one user to two clients: the guarantee is for a
    user of one client.

    Raises:
        PartitionError: names the two clients.
        DataError: the data do not say whose their records are.
    """
    users = users_of(data)
    home: dict[int, int] = {}
    for client, part in enumerate(parts):
        for user in np.unique(users[part]).tolist():
            other = home.setdefault(user, client)
            if other != client:
                raise PartitionError(
                    f"clients {other} and {client} both have records of one user, who would be "
                    "protected at each of them separately: divide the data by user "
                    "(partition.kind=natural or domain, or `parts` of your own)"
                )


def bounded(part: IntArray, data: ImageData, most: int, seed: int) -> IntArray:
    """At most `most` records of each user, sorted; those with the smallest keyed hashes.

    The choice depends on a user's own records and the public seed alone, so that a user more moves
    no other's; of equal records the first ones are kept.
    """
    part = np.asarray(part, np.int64)
    users = users_of(data)[part]
    key = hashlib.blake2b(f"contributions {seed}".encode(), digest_size=32).digest()
    drawn = record_digests(data, part, key, 8).view("<u8")[:, 0]
    order = np.lexsort((drawn, users))
    users = users[order]
    starts = np.flatnonzero(np.r_[True, users[1:] != users[:-1]])
    rank = np.arange(len(users)) - np.repeat(starts, np.diff(np.r_[starts, len(users)]))
    return np.sort(part[order[rank < most]])


def user_digests(
    data: ImageData, positions: IntArray, key: bytes, size: int = 16
) -> npt.NDArray[np.uint8]:
    """The keyed hash of all that a user has among some records, for each of these: uint8 [N, size],
    equal for all records of a user.

    It is of the hashes of the user's own records, in no order, and not of the user's number:
    numbers go by the sorted names of all users, so that a user more would renumber others.
    """
    chosen = np.asarray(positions, np.int64)
    users = users_of(data)[chosen]
    records = record_digests(data, chosen, key)
    order = np.argsort(users, kind="stable")
    digests = np.empty((len(users), size), np.uint8)
    for mine in np.split(order, np.flatnonzero(np.diff(users[order])) + 1):
        own = b"".join(sorted(records[one].tobytes() for one in mine))
        hashed = hashlib.blake2b(own, key=key, digest_size=size, person=b"fedsynth user")
        digests[mine] = np.frombuffer(hashed.digest(), np.uint8)
    return digests


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
