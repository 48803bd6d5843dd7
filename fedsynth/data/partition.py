"""Partitions of a label array over clients, by the field's common rules. Every rule is seeded.

`label_skew.py` computes matrices of class counts per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedsynth.data.images import IntArray
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
    """Returns sorted index arrays, one per client. Every example is assigned exactly once, except
    by `natural` with fewer clients than groups, and with `subset` below 1.

    With `dirichlet-plain` and `dirichlet-dominant`, and with `dirichlet` and `quantity` at
    `min_size` 0, a client's array may be empty.

    Args:
        labels: integers [N] in [0, classes).
        settings: the rule and its numbers.
        classes: number of classes C, including those without examples.
        domains: integers [N], for `domain`; client k has domain k mod D of the D that occur.
        groups: integers [N], for `natural`, which uses `domains` if this is None; clients are in
            the order of their groups' numbers.

    Raises:
        DataError: labels are not integers [N] in [0, classes).
        PartitionError: there are more clients than examples, or the rule cannot be satisfied; the
            message names what to change.
    """
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels must be integers [N], got {y.dtype} of shape {list(y.shape)}")
    if len(y) and not 0 <= y.min() <= y.max() < classes:
        raise DataError(f"labels must be in [0, {classes}), got [{y.min()}, {y.max()}]")
    y = y.astype(np.int64)
    if settings.kind == EXPLICIT:
        raise PartitionError(
            "the partition 'given' needs the clients' indices: pass them to simulate(parts=...)"
        )
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
            f"there are {settings.clients} clients but only {len(y)} examples: lower clients"
        )
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
    """Returns the sorted positions of round(subset · n_c) random examples of each class, at least
    one."""
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = []
    for label in np.unique(y):
        positions = rng.permutation(np.flatnonzero(y == label))
        chosen.append(positions[: max(1, round(settings.subset * len(positions)))])
    return np.sort(np.concatenate(chosen))


def check_parts(parts: Sequence[npt.ArrayLike], examples: int) -> None:
    """Checks that clients' index arrays are disjoint integers in [0, examples), without duplicates.

    Raises:
        PartitionError: they are not; the message names the client.
    """
    if not len(parts):
        raise PartitionError("parts must name at least one client")
    assigned = np.zeros(examples, dtype=bool)
    for client, part in enumerate(parts):
        indices = np.asarray(part)
        if indices.ndim != 1 or (len(indices) and not np.issubdtype(indices.dtype, np.integer)):
            raise PartitionError(
                f"client {client}: indices must be a vector of whole numbers, got "
                f"{indices.dtype} {indices.shape}"
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < examples:
            raise PartitionError(f"client {client}: indices must be in [0, {examples})")
        indices = indices.astype(np.int64)
        if len(np.unique(indices)) < len(indices) or assigned[indices].any():
            raise PartitionError(
                f"client {client}: an index occurs twice: each example belongs to at most "
                "one client"
            )
        assigned[indices] = True


def count_matrix(
    labels: npt.NDArray[np.integer], parts: Sequence[npt.NDArray[np.integer]], classes: int
) -> IntArray:
    """Returns the number of examples by client and class: int64 [K, C]."""
    counts = np.zeros((len(parts), classes), dtype=np.int64)
    for row, part in zip(counts, parts, strict=True):
        row[:] = np.bincount(labels[part], minlength=classes)
    return counts


def _of_domains(
    domains: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Gives client k examples of domain k mod D; a domain's examples are split evenly (±1) among
    its clients."""
    if domains is None:
        raise PartitionError(
            "this data set has no domains: choose another partition than domain, or a data "
            "set with domains"
        )
    present = np.unique(domains)
    if settings.clients % len(present):
        raise PartitionError(
            f"{settings.clients} clients cannot share {len(present)} domains evenly: use a "
            f"multiple of {len(present)}"
        )
    parts: list[IntArray] = [np.empty(0, np.int64)] * settings.clients
    for number, domain in enumerate(present):
        domain_clients = range(number, settings.clients, len(present))
        pieces = np.array_split(
            rng.permutation(np.flatnonzero(domains == domain)), len(domain_clients)
        )
        for client, piece in zip(domain_clients, pieces, strict=True):
            parts[client] = piece
    return parts


def _of_groups(
    groups: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Gives client k the k-th group, in order of number, of K random groups."""
    if groups is None:
        raise PartitionError(
            "this data set has no groups: choose another partition than natural, or a data "
            "set with groups, such as femnist or synthetic(1,1)"
        )
    present = np.unique(groups)
    if settings.clients > len(present):
        raise PartitionError(
            f"there are {settings.clients} clients but only {len(present)} groups in this "
            f"data set: lower clients to at most {len(present)}"
        )
    chosen = np.sort(rng.permutation(present)[: settings.clients])
    order = np.argsort(groups, kind="stable")  # stable: positions stay ascending within a group
    _, first = np.unique(groups[order], return_index=True)
    pieces = np.split(order, first[1:])
    return list(map(pieces.__getitem__, np.searchsorted(present, chosen)))


def _deal(y: IntArray, counts: IntArray, rng: Rng) -> list[IntArray]:
    """Deals each class's examples, shuffled, to the clients, as many as `counts` [K, C] gives."""
    pieces = []
    for c, class_counts in enumerate(counts.T):
        positions = rng.permutation(np.flatnonzero(y == c))
        pieces.append(np.split(positions, np.cumsum(class_counts[:-1])))
    return list(map(np.concatenate, zip(*pieces, strict=True)))
