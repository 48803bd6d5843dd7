"""Users: the people (writers, patients, card holders) whose records a data set holds, where they
are to be protected as a whole.

A data set says whose each record is in `ImageData.groups`. For folders of images a file `users.csv`
says it, with the columns `path` and `user`; LEAF's files name their writers.
"""

from __future__ import annotations

import csv
import hashlib
import io
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.errors import DataError, DataFilesCorruptError, PartitionError, Setting, Text
from fedsynth.privacy.files import read_regular

USERS_FILE = "users.csv"


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
                    Text(
                        f"clients {other} and {client} both have records of one user, who would be "
                        "protected at each of them alone: divide the data by user (",
                        Setting("partition", "kind", "natural"),
                        " or domain, or `parts` of your own)",
                    )
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


def read_users(file: Path, paths: Sequence[str]) -> IntArray:
    """Whose each image is, by a CSV file with the columns `path` (relative, with `/`) and `user`
    (any text).

    Args:
        paths: of the images, in the data set's order.

    Returns:
        int64 [N], users numbered in the sorted order of their names. Spaces around a name, and the
        way in which an accent is encoded, do not
        make another user.

    Raises:
        DataFilesCorruptError: the file cannot be read, lacks a column, names an image twice or not
            at all, or leaves a user empty.
    """
    try:
        text = io.StringIO(read_regular(file, MAX_LIST_BYTES).decode("utf-8-sig"), newline="")
        owner = _owners(csv.reader(text), file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    missing = [path for path in paths if path not in owner]
    if missing:
        raise DataFilesCorruptError(
            f"{file} does not say whose {missing[0]} is ({len(missing)} such images)"
        )
    names = sorted({owner[path] for path in paths})
    number_of = {name: number for number, name in enumerate(names)}
    return np.array([number_of[owner[path]] for path in paths], np.int64)


def _owners(rows: Iterator[list[str]], file: Path) -> dict[str, str]:
    """The user of each path. Row by row and not by `csv.DictReader`, which would make a dict of
    every column for each row."""
    header = next(rows, [])
    columns = [header.index(name) for name in ("path", "user") if name in header]
    owner: dict[str, str] = {}
    for number, row in enumerate((row for row in rows if row), start=2):
        cells = [row[column] for column in columns if column < len(row)]
        if len(cells) == 2:
            cells[1] = _same_spelling(cells[1])
        if len(cells) != 2 or not all(cells):
            raise DataFilesCorruptError(
                f"{file}, line {number}: needs the columns path and user, both filled"
            )
        path, user = cells
        if owner.setdefault(path, user) != user:
            raise DataFilesCorruptError(
                f"{file}, line {number}: {one_line(path)} is given to two users"
            )
    return owner


def _same_spelling(name: str) -> str:
    """A name as it is compared: one person must not be two users because of how a table was
    saved."""
    return unicodedata.normalize("NFC", name).strip()
