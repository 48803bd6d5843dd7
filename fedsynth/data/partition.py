"""Divides the examples of a data set among clients, by the rules that are common in the literature.

Every rule is reproducible from a seed. For rules with label skew, `label_skew.py` computes how many
examples of each class each client gets.

The module also handles users: the people, such as writers or patients, whose records a data set
contains. Runs that protect users need to know the user of each record, which `ImageData.groups`
states. For folders of images, a file `users.csv` with the columns `path` and `user` gives the
users. LEAF's files name the writers. `hold_out` splits the records of each client into a training
split and a test split.
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
    """Divides examples among clients. Returns a sorted array of positions for each client.

    Every example is given to exactly one client, with two exceptions. If `subset` is below 1, only
    some examples are used. If the rule is `natural` and there are fewer clients than groups, only
    some groups are used. A client may get no example if the rule is `dirichlet-plain` or
    `dirichlet-dominant`, or if `min_size` is 0 with `dirichlet` or `quantity`.

    Args:
        labels: integers [N] in [0, classes), or masks [N, H, W], which are not used.
        settings: the rule and its parameters.
        classes: the number of classes C, including classes without examples.
        domains: integers [N], the domain of each example. The rule `domain` needs them, and gives
            client k the domain k mod D, where D is the number of domains with examples.
        groups: integers [N], the group of each example. The rule `natural` makes clients of groups,
            in the order of the groups' numbers. If `groups` is None, it makes clients of domains.

    Raises:
        DataError: `labels` are not integers [N] in [0, classes).
        PartitionError: there are more clients than examples, or the rule cannot be satisfied. The
            message names the setting to change.
    """
    y = np.asarray(labels)
    if y.ndim == 3 and settings.kind in COUNTS:
        raise PartitionError(
            f"the partition {settings.kind!r} needs a class for each image, but the data have masks. "
            "Set partition.kind=domain or partition.kind=iid"
        ).with_code("partition.masks")
    y = classes_of_images(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels must be integers [N], got {y.dtype} of shape {list(y.shape)}")
    if len(y) and not 0 <= y.min() <= y.max() < classes:
        raise DataError(f"labels must be in [0, {classes}), got [{y.min()}, {y.max()}]")
    y = y.astype(np.int64)
    if settings.kind == EXPLICIT:
        raise PartitionError(
            "the partition 'given' needs the positions of each client's examples. Pass them to "
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
            f"partition.clients must be at most the number of examples ({len(y)}), got "
            f"{settings.clients}"
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
    """Draws the share `settings.subset` of the examples of each class, but at least one example.

    Returns the positions of the drawn examples, sorted.
    """
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = []
    for label in np.unique(y):
        positions = rng.permutation(np.flatnonzero(y == label))
        chosen.append(positions[: max(1, round(settings.subset * len(positions)))])
    return np.sort(np.concatenate(chosen))


def check_parts(parts: Sequence[npt.ArrayLike], examples: int) -> None:
    """Checks the positions of each client's examples.

    The positions must be integers in [0, examples). A position may occur only once, whether at one
    client or at two clients.

    Raises:
        PartitionError: the positions are not valid. The message names the client.
    """
    if not len(parts):
        raise PartitionError("parts must contain at least one client")
    assigned = np.zeros(examples, dtype=bool)
    for client, part in enumerate(parts):
        indices = np.asarray(part)
        if indices.ndim != 1 or (len(indices) and not np.issubdtype(indices.dtype, np.integer)):
            raise PartitionError(
                f"the positions of client {client} must be a vector of whole numbers, got "
                f"{indices.dtype} {indices.shape}"
            ).with_code("partition.positions")
        if len(indices) and not 0 <= indices.min() <= indices.max() < examples:
            raise PartitionError(f"the positions of client {client} must be in [0, {examples})")
        indices = indices.astype(np.int64)
        if len(np.unique(indices)) < len(indices) or assigned[indices].any():
            raise PartitionError(
                f"client {client} has an example twice, or an example of another client. Each "
                "example may occur once"
            ).with_code("partition.overlap")
        assigned[indices] = True


def classes_of_images(labels: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Returns labels [N] unchanged, and zeros [N] in place of masks [N, H, W]."""
    return np.zeros(len(labels), np.int64) if labels.ndim == 3 else labels


def count_matrix(
    labels: npt.NDArray[np.integer], parts: Sequence[npt.NDArray[np.integer]], classes: int
) -> IntArray:
    """Counts the examples of each class at each client, int64 [K, C].

    Images with masks are counted as of one class.
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
    """Gives each client the examples of one domain: client k gets the domain k mod D.

    D is the number of domains. If several clients have the same domain, the examples of this domain
    are split evenly (±1) among these clients.
    """
    if domains is None:
        raise PartitionError(
            "the partition 'domain' needs a data set with domains. Choose another partition"
        ).with_code("partition.domain")
    present = np.unique(domains)
    if settings.clients % len(present):
        raise PartitionError(
            f"partition.clients must be a multiple of the number of domains ({len(present)}), got "
            f"{settings.clients}"
        ).with_code("partition.domains")
    parts: list[IntArray] = [np.empty(0, np.int64)] * settings.clients
    for number, domain in enumerate(present):
        positions = rng.permutation(np.flatnonzero(domains == domain))
        parts[number :: len(present)] = np.array_split(positions, settings.clients // len(present))
    return parts


def _of_groups(
    groups: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Draws K random groups, and gives one to each client, in the order of the groups' numbers."""
    if groups is None:
        raise PartitionError(
            "the partition 'natural' needs a data set with groups, such as femnist. Choose another "
            "partition"
        ).with_code("partition.natural")
    present, sizes = np.unique(groups, return_counts=True)
    large = present[sizes >= settings.min_group]
    if settings.clients > len(large):
        raise PartitionError(
            f"partition.clients must be at most the number of groups ({len(large)}) with at least "
            f"partition.min_group={settings.min_group} examples, got {settings.clients}"
        ).with_code("partition.groups")
    chosen = np.sort(rng.permutation(large)[: settings.clients])
    order = np.argsort(groups, kind="stable")  # stable: positions stay ascending within a group
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    return list(map(pieces.__getitem__, np.searchsorted(present, chosen)))


def _deal(y: IntArray, counts: IntArray, rng: Rng) -> list[IntArray]:
    """Gives each client random examples of each class. Their numbers are in `counts` [K, C]."""
    pieces = []
    for c, class_counts in enumerate(counts.T):
        positions = rng.permutation(np.flatnonzero(y == c))
        pieces.append(np.split(positions, np.cumsum(class_counts[:-1])))
    return list(map(np.concatenate, zip(*pieces, strict=True)))


def users_of(data: ImageData) -> IntArray:
    """Returns the number of the user of each record, int64 [N].

    Raises:
        DataError: the data set does not state the users of its records.
    """
    if data.groups is None:
        raise DataError(
            f"{data.spec.name} must state the user of each record, because the run protects users. "
            "Name their column with --user-column, pass groups= to from_arrays, or put a file "
            f"{USERS_FILE} next to the image folders"
        ).with_code("data.users")
    users: IntArray = data.groups.cpu().numpy()
    return users


def check_one_client_each(parts: Sequence[IntArray], data: ImageData) -> None:
    """Checks that no user has records at two clients, so that the guarantee for users holds.

    The guarantee holds only if all records of a user are at one client.

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
                    "for users would not hold. Set partition.kind=iid and partition.clients=1, or "
                    "run `fedsynth synthesize`. Other names for the user at each client would make "
                    "ε hold at each client separately"
                ).with_code("partition.users")


def bounded(part: IntArray, data: ImageData, limit: int, seed: int) -> IntArray:
    """Limits the records of each user to `limit`. Returns the sorted positions of the chosen
    records.

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
    """Divides the records of each client into a training split and a test split at random.

    Each record is put into the test split with probability `share`. The split of a record depends
    on the seed, its image and its label, but not on its position. With differential privacy, an
    additional record must not move other records between the splits. Equal records are in the same
    split, so no test record is used for training.

    Args:
        parts: the positions of each client's records in `data`.
        share: the probability with which a record is put into the test split.
        seed: the public seed of the split.
        data: the images of all clients.
        by_user: whether all records of a user (`data.groups`) stay in one split, for runs that
            protect users. The split of a user then depends on a hash of all records of this user.

    Returns:
        The training positions and the test positions of each client, sorted.
    """
    key = hashlib.blake2b(f"local test split {seed}".encode(), digest_size=32).digest()
    data = replace(data, record_bytes=None)  # equal images from different files are equal records
    digests = {True: user_digests, False: record_digests}[by_user]
    training = []
    testing = []
    for part in parts:
        drawn = digests(data, part, key, 8).view("<u8")[:, 0] / 2.0**64
        training.append(np.sort(part[drawn >= share]))
        testing.append(np.sort(part[drawn < share]))
    return training, testing
