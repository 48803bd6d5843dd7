"""Who has which examples: partitions of a label array over clients, as the field makes them. Every
rule is seeded.

Here is what every rule shares: checks, and a subset of each class. The rules themselves are in
`partition_rules.py`, and their numbers in `partition_settings.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.partition_rules import RULES, of_domains, of_groups
from fedsynth.data.partition_settings import DOMAIN, GIVEN, NATURAL, PartitionSettings
from fedsynth.errors import DataError, PartitionError
from fedsynth.seeding import numpy_generator


def partition(
    labels: npt.NDArray[np.integer],
    settings: PartitionSettings,
    classes: int,
    domains: npt.NDArray[np.integer] | None = None,
    groups: npt.NDArray[np.integer] | None = None,
) -> list[IntArray]:
    """Sorted index arrays, one per client; every example is assigned exactly once, but by `natural`
    with fewer clients than groups.

    With `dirichlet-plain` and `dirichlet-dominant`, and with `dirichlet` and `quantity` at
    `min_size` 0, a client's array may be empty.

    Args:
        labels: integers [N] in [0, classes).
        settings: the rule and its numbers.
        classes: number of classes C, also of those without an example here.
        domains: integers [N], for `domain`; client k has domain k mod D of the D that occur.
        groups: integers [N], for `natural`, which takes `domains` where this is None; clients are
            in the order of their groups' numbers.

    Raises:
        DataError: labels that are not integers [N] in [0, classes), domains or groups that are not
            integers [N].
        PartitionError: more clients than examples, or a rule that cannot be kept; the message says
            what to change.
    """
    y = _checked_labels(labels, classes)
    _check_origins("domains", domains, len(y))
    _check_origins("groups", groups, len(y))
    if settings.subset < 1:
        kept = _subset(y, settings)
        whole = dataclasses.replace(settings, subset=1.0)
        origins = (None if array is None else array[kept] for array in (domains, groups))
        return [kept[part] for part in partition(y[kept], whole, classes, *origins)]
    if settings.clients > len(y):
        raise PartitionError(
            f"{settings.clients} clients are more than the {len(y)} examples: lower clients"
        )
    if settings.kind == GIVEN:
        raise PartitionError(
            "the partition 'given' has no rule: pass the clients' positions to simulate(parts=...)"
        )
    rng = numpy_generator(settings.seed or 0, "partition")
    if settings.kind == DOMAIN:
        return [np.sort(part) for part in of_domains(domains, settings, rng)]
    if settings.kind == NATURAL:
        return of_groups(domains if groups is None else groups, settings, rng)
    parts = RULES[settings.kind](y, settings, classes, rng)
    return [np.sort(part) for part in parts]


def _subset(y: IntArray, settings: PartitionSettings) -> IntArray:
    """The positions, ascending, of round(subset · n_c) random examples of each class."""
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    return np.sort(np.concatenate([c[: max(1, round(settings.subset * len(c)))] for c in chosen]))


def check_parts(parts: Sequence[npt.ArrayLike], examples: int) -> None:
    """Refuses clients' index arrays that are not whole numbers in [0, examples), or give an example
    to two clients.

    Raises:
        PartitionError: names the client.
    """
    if not len(parts):
        raise PartitionError("parts must name at least one client")
    taken = np.zeros(examples, dtype=bool)
    for client, part in enumerate(parts):
        indices = np.asarray(part)
        if indices.ndim != 1 or (len(indices) and not np.issubdtype(indices.dtype, np.integer)):
            raise PartitionError(
                f"client {client}: positions must be a vector of whole numbers, got "
                f"{indices.dtype} {indices.shape}"
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < examples:
            raise PartitionError(f"client {client}: positions must lie in [0, {examples})")
        indices = indices.astype(np.int64)
        if len(np.unique(indices)) < len(indices) or taken[indices].any():
            raise PartitionError(
                f"client {client}: an example is given twice; each belongs to one client at most"
            )
        taken[indices] = True


def count_matrix(
    labels: npt.NDArray[np.integer], parts: Sequence[npt.NDArray[np.integer]], classes: int
) -> IntArray:
    """How many examples of each class each client has: int64 [K, C]."""
    y = _checked_labels(labels, classes)
    rows = [np.bincount(y[part], minlength=classes) for part in parts]
    return np.array(rows, dtype=np.int64).reshape(len(parts), classes)


def _checked_labels(labels: npt.NDArray[np.integer], classes: int) -> IntArray:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels must be integers [N], got {y.dtype} of shape {list(y.shape)}")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise DataError(f"labels must lie in [0, {classes}), got [{int(y.min())}, {int(y.max())}]")
    return y.astype(np.int64)


def _check_origins(what: str, array: npt.NDArray[np.integer] | None, examples: int) -> None:
    if array is not None and (
        array.shape != (examples,) or not np.issubdtype(array.dtype, np.integer)
    ):
        raise DataError(
            f"{what} must be integers [{examples}], got {array.dtype} of shape {list(array.shape)}"
        )
