"""Divides a data set's examples among clients, by common rules from the literature.

Every rule is reproducible from a seed. For label skew, `label_skew.py` computes the clients' class
counts.

The module also handles users: the people, such as writers or patients, whose records a data set
contains. Runs that protect users read each record's user from `ImageData.groups`. Image folders
name users in a file `users.csv` with the columns `path` and `user`. LEAF's files name the writers.
`hold_out` divides each client's records into a training and a test split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import USERS_FILE
from fedsynth.data.images import ImageData, IntArray, record_digests
from fedsynth.data.label_skew import COUNTS, dirichlet
from fedsynth.data.partition_settings import DOMAIN, EXPLICIT, NATURAL, PartitionSettings
from fedsynth.errors import DataError, PartitionError
from fedsynth.seeding import numpy_generator

Rng = np.random.Generator


def partition(
    labels: npt.NDArray[np.integer],
    settings: PartitionSettings,
    classes: int,
    domains: npt.NDArray[np.integer] | None = None,
    groups: npt.NDArray[np.integer] | None = None,
) -> list[IntArray]:
    """Divides examples among clients. Returns a sorted index array for each client.

    Every example is given to exactly one client, with two exceptions: `subset` below 1, and
    `natural` with fewer clients than groups, which use only some examples or groups. Clients may
    get no examples with `dirichlet-plain` and `dirichlet-dominant`, and with `dirichlet` and
    `quantity` if `min_size` is 0.

    Args:
        labels: integers [N] in [0, classes), or masks [N, H, W], which are not used.
        settings: the rule and its parameters.
        classes: the number of classes C, including classes without examples.
        domains: integers [N], the example domains. The rule `domain` needs them, and gives client k
            the domain k mod D, where D is the number of domains with examples.
        groups: integers [N], the example groups. The rule `natural` turns groups into clients, in
            group order. If `groups` is None, it turns domains into clients.

    Raises:
        DataError: `labels` are not integers [N] in [0, classes).
        PartitionError: there are more clients than examples, or the rule cannot be satisfied. The
            message names the setting to change.
    """
    y = np.asarray(labels)
    if y.ndim == 3 and settings.kind in COUNTS:
        raise PartitionError(
            f"the partition {settings.kind!r} divides images by class, but the data have masks. "
            "Set partition.kind=domain or partition.kind=iid"
        ).with_code("partition.masks")
    y = classes_of_images(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels must be integers [N], got {y.dtype} of shape {list(y.shape)}")
    if len(y) and not 0 <= y.min() <= y.max() < classes:
        raise DataError(
            f"labels must be in [0, {classes}), got {y.min()} to {y.max()}. Correct them"
        )
    y = y.astype(np.int64)
    if settings.kind == EXPLICIT:
        raise PartitionError(
            "the partition 'given' is missing the clients' example indices. Pass them to "
            "simulate(parts=...)"
        ).with_code("partition.given")
    if settings.subset < 1:
        subset = _subset(y, settings)
        if domains is not None:
            domains = domains[subset]
        if groups is not None:
            groups = groups[subset]
        parts = partition(y[subset], replace(settings, subset=1.0), classes, domains, groups)
        return list(map(subset.__getitem__, parts))
    if settings.clients > len(y):
        raise PartitionError(
            f"partition.clients must be at most {len(y)}, the number of examples, got "
            f"{settings.clients}. Lower it"
        ).with_code("partition.clients")
    rng = numpy_generator(settings.seed or 0, "partition")
    if settings.kind == NATURAL:
        return _of_groups(domains if groups is None else groups, settings, rng)
    if settings.kind == DOMAIN:
        parts = _of_domains(domains, settings, rng)
    elif settings.kind == "iid":
        parts = np.array_split(rng.permutation(len(y)), settings.clients)
    elif settings.kind == "quantity":  # NIID-Bench's quantity skew: one class of all examples
        counts = dirichlet(np.array([len(y)]), settings, rng)
        parts = _deal(np.zeros_like(y), counts, rng)
    else:
        counts = COUNTS[settings.kind](np.bincount(y, minlength=classes), settings, rng)
        parts = _deal(y, counts, rng)
    return list(map(np.sort, parts))


def _subset(y: IntArray, settings: PartitionSettings) -> IntArray:
    """Draws a random subset of each class's examples, and returns their sorted indices.

    The subset is the share `settings.subset` of the class, but at least one example.
    """
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = []
    for label in np.unique(y):
        positions = rng.permutation(np.flatnonzero(y == label))
        chosen.append(positions[: max(1, round(settings.subset * len(positions)))])
    return np.sort(np.concatenate(chosen))


def check_parts(parts: Sequence[npt.ArrayLike], examples: int) -> None:
    """Checks the example indices that a partition assigns to the clients.

    They must be integers in [0, examples), without repetitions at or between clients.

    Raises:
        PartitionError: an index is invalid. The message names the client.
    """
    if not len(parts):
        raise PartitionError("parts is empty. Pass the example indices of at least one client")
    assigned = np.zeros(examples, dtype=bool)
    for client, part in enumerate(parts):
        indices = np.asarray(part)
        if indices.ndim != 1 or (len(indices) and not np.issubdtype(indices.dtype, np.integer)):
            raise PartitionError(
                f"client {client}'s example indices must be a vector of integers, got "
                f"{indices.dtype} {indices.shape}. Convert them"
            ).with_code("partition.positions")
        if len(indices) and not 0 <= indices.min() <= indices.max() < examples:
            raise PartitionError(
                f"client {client}'s example indices must be in [0, {examples}), got indices from "
                f"{indices.min()} to {indices.max()}. Correct them"
            )
        indices = indices.astype(np.int64)
        if len(np.unique(indices)) < len(indices) or assigned[indices].any():
            raise PartitionError(
                f"client {client}'s example indices contain an example twice, or an example of "
                "another client. Remove repeated indices"
            ).with_code("partition.overlap")
        assigned[indices] = True


def classes_of_images(labels: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Returns the class of each image, [N]. Images with masks [N, H, W] all have class 0."""
    return np.zeros(len(labels), np.int64) if labels.ndim == 3 else labels


def count_matrix(
    labels: npt.NDArray[np.integer], parts: Sequence[npt.NDArray[np.integer]], classes: int
) -> IntArray:
    """Counts examples for each (client, class) pair, int64 [K, C].

    Images with masks count as class 0.
    """
    classes = 1 if labels.ndim == 3 else classes
    labels = classes_of_images(labels)
    counts = np.zeros((len(parts), classes), dtype=np.int64)
    for row, part in zip(counts, parts, strict=True):
        row[:] = np.bincount(labels[part], minlength=classes)
    return counts


def _of_domains(
    domains: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Assigns one domain's examples to each client: domain k mod D to client k.

    D is the number of domains. Clients with the same domain share its examples evenly (±1).
    """
    if domains is None:
        raise PartitionError(
            "the partition 'domain' cannot divide a data set without domains. Choose another "
            "partition"
        ).with_code("partition.domain")
    present = np.unique(domains)
    if settings.clients % len(present):
        raise PartitionError(
            f"partition.clients must be a multiple of {len(present)}, the number of domains, got "
            f"{settings.clients}. Change it"
        ).with_code("partition.domains")
    parts: list[IntArray] = [np.empty(0, np.int64)] * settings.clients
    for number, domain in enumerate(present):
        positions = rng.permutation(np.flatnonzero(domains == domain))
        parts[number :: len(present)] = np.array_split(positions, settings.clients // len(present))
    return parts


def _of_groups(
    groups: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Draws K groups at random, one for each client, and returns them in group order."""
    if groups is None:
        raise PartitionError(
            "the partition 'natural' cannot divide a data set without groups. Choose another "
            "partition"
        ).with_code("partition.natural")
    present, sizes = np.unique(groups, return_counts=True)
    large = present[sizes >= settings.min_group]
    if settings.clients > len(large):
        raise PartitionError(
            f"partition.clients must be at most {len(large)}, the number of groups with "
            f"partition.min_group={settings.min_group} or more examples, got {settings.clients}. "
            "Lower one of them"
        ).with_code("partition.groups")
    chosen = np.sort(rng.permutation(large)[: settings.clients])
    order = np.argsort(groups, kind="stable")  # stable: positions stay ascending within a group
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    return list(map(pieces.__getitem__, np.searchsorted(present, chosen)))


def _deal(y: IntArray, counts: IntArray, rng: Rng) -> list[IntArray]:
    """Draws random examples for the clients, according to the class counts [K, C]."""
    pieces = []
    for c, class_counts in enumerate(counts.T):
        positions = rng.permutation(np.flatnonzero(y == c))
        pieces.append(np.split(positions, np.cumsum(class_counts[:-1])))
    return list(map(np.concatenate, zip(*pieces, strict=True)))


def users_of(data: ImageData) -> IntArray:
    """Returns each record's user index, int64 [N].

    Raises:
        DataError: the data set does not state the users of its records.
    """
    if data.groups is None:
        raise DataError(
            f"the run protects users, but {data.spec.name} contains no user IDs. Add them by "
            f"--user-column (tables), {USERS_FILE} (image folders) or groups= (from_arrays)"
        ).with_code("data.users")
    users: IntArray = data.groups.cpu().numpy()
    return users


def check_one_client_each(parts: Sequence[IntArray], data: ImageData) -> None:
    """Checks that no user has records at two clients.

    Otherwise, the guarantee for users would not hold.

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
                    f"clients {other} and {client} have records of the same user, so the "
                    "guarantee for users would not hold. Train on one client (partition.kind=iid, "
                    "partition.clients=1), or rename the user at each client to get a separate "
                    "guarantee at each client"
                ).with_code("partition.users")


def bounded(part: IntArray, data: ImageData, limit: int, seed: int) -> IntArray:
    """Keeps at most `limit` random records of each user, and returns their sorted indices.

    The records with the smallest keyed hashes are chosen. The choice for a user depends only on the
    user's own records and on the public seed, so an additional user does not change it. Among equal
    records, the first ones are chosen.
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
    """Computes a keyed hash of each record's user, for the records at `positions`.

    The hash covers all of the user's records at `positions`, in any order. It does not depend on
    the user's index, because an additional user may change the indices of others. Returns uint8
    [N, size].
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
    parts: Sequence[IntArray],
    share: float,
    seed: int,
    data: ImageData,
    by_user: bool | Sequence[bool] = False,
) -> tuple[list[IntArray], list[IntArray]]:
    """Divides each client's records into a training and a test split at random.

    Each record is put into the test split with probability `share`. A record's split depends on the
    seed, its image and its label, but not on its index, because an additional record must not move
    other records between splits. Equal records share a split, so no test record is used for
    training.

    Args:
        parts: the indices of each client's records in `data`.
        share: the probability of the test split.
        seed: the public seed of the split.
        data: the images of all clients.
        by_user: whether each user's records (`data.groups`) stay in one split, for all clients or
            for each of them. A user's split then depends on a hash of all of the user's records.

    Returns:
        The sorted training and test indices of each client.
    """
    key = hashlib.blake2b(f"local test split {seed}".encode(), digest_size=32).digest()
    data = replace(data, record_bytes=None)  # equal images from different files are equal records
    flags = [by_user] * len(parts) if isinstance(by_user, bool) else by_user
    training = []
    testing = []
    for part, flag in zip(parts, flags, strict=True):
        digests = user_digests if flag else record_digests
        drawn = digests(data, part, key, 8).view("<u8")[:, 0] / 2.0**64
        training.append(np.sort(part[drawn >= share]))
        testing.append(np.sort(part[drawn < share]))
    return training, testing
