"""Divides the examples of a data set among clients, by the rules that are common in the literature.

Every rule is reproducible from a seed. For rules with label skew, `label_skew.py` computes how many
examples of each class each client gets.
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
    """Divides examples among clients. Returns a sorted array of positions for each client.

    Every example is given to exactly one client, with two exceptions. If `subset` is below 1, only
    some examples are used. If the rule is `natural` and there are fewer clients than groups, only
    some groups are used. A client may get no example if the rule is `dirichlet-plain` or
    `dirichlet-dominant`, or if `min_size` is 0 with `dirichlet` or `quantity`.

    Args:
        labels: integers [N] in [0, classes).
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
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels must be integers [N], got {y.dtype} of shape {list(y.shape)}")
    if len(y) and not 0 <= y.min() <= y.max() < classes:
        raise DataError(f"labels must be in [0, {classes}), got [{y.min()}, {y.max()}]")
    y = y.astype(np.int64)
    if settings.kind == EXPLICIT:
        raise PartitionError(
            "the partition 'given' needs the positions of each client's examples: pass them to "
            "simulate(parts=...)"
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
    """Draws round(subset · n_c) examples of each class, but at least one.

    Returns their sorted positions.
    """
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = []
    for label in np.unique(y):
        positions = rng.permutation(np.flatnonzero(y == label))
        chosen.append(positions[: max(1, round(settings.subset * len(positions)))])
    return np.sort(np.concatenate(chosen))


def check_parts(parts: Sequence[npt.ArrayLike], examples: int) -> None:
    """Checks the positions of each client's examples.

    They must be integers in [0, examples), and no position may occur twice, neither at one client
    nor at two.

    Raises:
        PartitionError: the positions are not valid. The message names the client.
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
                f"client {client}: an index occurs twice, but each example may belong to only one "
                "client, and only once"
            )
        assigned[indices] = True


def count_matrix(
    labels: npt.NDArray[np.integer], parts: Sequence[npt.NDArray[np.integer]], classes: int
) -> IntArray:
    """Counts the examples of each class at each client, int64 [K, C]."""
    counts = np.zeros((len(parts), classes), dtype=np.int64)
    for row, part in zip(counts, parts, strict=True):
        row[:] = np.bincount(labels[part], minlength=classes)
    return counts


def _of_domains(
    domains: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Gives client k examples of domain k mod D.

    If several clients have the same domain, its examples are split evenly (±1) among them.
    """
    if domains is None:
        raise PartitionError(
            "the partition 'domain' needs a data set with domains, which this data set does not "
            "have: choose another partition or data set"
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
    """Draws K random groups, and gives one to each client, in the order of the groups' numbers."""
    if groups is None:
        raise PartitionError(
            "the partition 'natural' needs a data set with groups, which this data set does not "
            "have: choose another partition, or a data set such as femnist or synthetic(1,1)"
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
    """Gives each client as many random examples of each class as `counts` [K, C] states."""
    pieces = []
    for c, class_counts in enumerate(counts.T):
        positions = rng.permutation(np.flatnonzero(y == c))
        pieces.append(np.split(positions, np.cumsum(class_counts[:-1])))
    return list(map(np.concatenate, zip(*pieces, strict=True)))
