"""Partitions of a label array over clients, by the field's common rules. Every rule is seeded.

`dirichlet` and `quantity` are rules of NIID-Bench (Li et al., ICDE 2022, arXiv 2102.02079); the
former is used for FedDM's tables and many others. `dominant` and `missing` are FedFM's (Ye et al.,
2023, arXiv 2210.07615). `label_skew.py` computes matrices of class counts per client.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.label_skew import dominant_classes, dominated_dirichlet, held_classes
from fedsynth.data.partition_settings import DOMAIN, GIVEN, NATURAL, PartitionSettings
from fedsynth.errors import DataError, PartitionError
from fedsynth.seeding import numpy_generator

Rng = np.random.Generator

# The maximum number of draws of the whole partition: 1.5 s for 10 classes, about 15 s for 100.
MAX_TRIES = 5_000
# Above this the draws are 1/K to six digits, and NumPy's gamma sampler would overflow.
_ALPHA_CAP = 1e12


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
        DataError: labels are not integers [N] in [0, classes), or domains or groups are not
            integers [N].
        PartitionError: there are more clients than examples, or the rule cannot be satisfied; the
            message names what to change.
    """
    y = _checked_labels(labels, classes)
    _check_origins("domains", domains, len(y))
    _check_origins("groups", groups, len(y))
    if settings.subset < 1:
        subset = _subset(y, settings)
        full = dataclasses.replace(settings, subset=1.0)
        origins = (None if array is None else array[subset] for array in (domains, groups))
        return [subset[part] for part in partition(y[subset], full, classes, *origins)]
    if settings.clients > len(y):
        raise PartitionError(
            f"there are {settings.clients} clients but only {len(y)} examples: lower clients"
        )
    if settings.kind == GIVEN:
        raise PartitionError(
            "the partition 'given' needs the clients' indices: pass them to simulate(parts=...)"
        )
    rng = numpy_generator(settings.seed or 0, "partition")
    if settings.kind == NATURAL:
        return _of_groups(domains if groups is None else groups, settings, rng)
    if settings.kind == DOMAIN:
        parts = _of_domains(domains, settings, rng)
    elif settings.kind == "iid":
        parts = np.array_split(rng.permutation(len(y)), settings.clients)
    elif settings.kind == "quantity":
        sizes = _quantity_sizes(len(y), settings, rng)
        parts = np.split(rng.permutation(len(y)), np.cumsum(sizes[:-1]))
    else:
        counts = COUNTS[settings.kind](np.bincount(y, minlength=classes), settings, rng)
        parts = _deal(y, counts, rng)
    return [np.sort(part) for part in parts]


def _subset(y: IntArray, settings: PartitionSettings) -> IntArray:
    """Returns the sorted positions of round(subset · n_c) random examples of each class, at least
    one."""
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    return np.sort(np.concatenate([c[: max(1, round(settings.subset * len(c)))] for c in chosen]))


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
    y = _checked_labels(labels, classes)
    rows = [np.bincount(y[part], minlength=classes) for part in parts]
    return np.array(rows, dtype=np.int64).reshape(len(parts), classes)


def _checked_labels(labels: npt.NDArray[np.integer], classes: int) -> IntArray:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels must be integers [N], got {y.dtype} of shape {list(y.shape)}")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise DataError(f"labels must be in [0, {classes}), got [{int(y.min())}, {int(y.max())}]")
    return y.astype(np.int64)


def _check_origins(what: str, array: npt.NDArray[np.integer] | None, examples: int) -> None:
    if array is not None and (
        array.shape != (examples,) or not np.issubdtype(array.dtype, np.integer)
    ):
        raise DataError(
            f"{what} must be integers [{examples}], got {array.dtype} of shape {list(array.shape)}"
        )


# ---------------------------------------------------------------------------- client counts


def _dirichlet(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """NIID-Bench's label skew: Dirichlet shares of each class, none for clients with ≥ N/K
    examples; redrawn while a client has fewer than `min_size` examples."""
    return _redrawn(
        lambda: _dirichlet_counts(sizes, settings, rng, masked=True),
        int(sizes.sum()),
        settings,
        " (or use dirichlet-plain)",
    )


def _quantity_sizes(total: int, settings: PartitionSettings, rng: Rng) -> IntArray:
    """NIID-Bench's quantity skew: sizes cut at ⌊cumsum(p)·N⌋ with p ~ Dir(α·1_K), redrawn while one
    is below `min_size`."""
    everything = np.array([total])
    return _redrawn(
        lambda: _dirichlet_counts(everything, settings, rng, masked=False)[:, 0], total, settings
    )


def _redrawn(
    draw: Callable[[], IntArray], total: int, settings: PartitionSettings, instead: str = ""
) -> IntArray:
    """Returns the first counts [K, ...] of `draw` with at least `min_size` examples per client."""
    K = settings.clients
    min_size = settings.min_size
    if K * min_size > total:
        raise PartitionError(
            f"{K} clients of at least {min_size} examples need {K * min_size}, but there are "
            f"{total}: lower min_size or clients"
        )
    for _ in range(MAX_TRIES):
        counts = draw()
        if counts.reshape(K, -1).sum(axis=1).min() >= min_size:
            return counts
    raise PartitionError(
        f"no Dirichlet partition with at least {min_size} examples for each of {K} clients in "
        f"{MAX_TRIES} tries at "
        f"alpha={settings.alpha:g}: raise alpha, or lower min_size or clients{instead}"
    )


def _dirichlet_counts(
    sizes: npt.NDArray[np.integer], settings: PartitionSettings, rng: Rng, *, masked: bool
) -> IntArray:
    """Draws counts [K, C]: for each class p ~ Dir(α·1_K), cut at ⌊cumsum(p)·n_c⌋. If `masked`,
    p = 0 for clients with ≥ N/K examples."""
    K = settings.clients
    total = int(sizes.sum())
    counts = np.zeros((K, len(sizes)), dtype=np.int64)
    client_sizes = np.zeros(K, dtype=np.int64)
    concentration = np.full(K, min(settings.alpha, _ALPHA_CAP))
    for c, size in enumerate(sizes):
        if size == 0:
            continue
        p = rng.dirichlet(concentration)
        # Compared as integers, because N/K would be rounded.
        open_ = client_sizes * K < total if masked else np.ones(K, dtype=bool)
        reached = np.cumsum(np.where(open_, p, 0.0))
        if not reached[-1] > 0:
            # All of p, to the last bit, went to closed clients. A random open client is the limit
            # of Dir(α) for α → 0.
            reached = np.cumsum(np.arange(K) == rng.choice(np.flatnonzero(open_)))
        # Divided by its last entry, so that it is exactly 1 from the last open client on. A
        # rounded sum would leave an example to the closed clients after it.
        cuts = (reached[:-1] / reached[-1] * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0, append=size)
        client_sizes += counts[:, c]
    return counts


def _classes(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Returns counts [K, C] with exactly c classes per client (`held_classes`)."""
    K = settings.clients
    c = settings.classes_per_client
    C = int(np.count_nonzero(sizes))
    if c > C:
        raise PartitionError(
            f"classes_per_client is {c}, but only {C} classes have examples: lower it"
        )
    if K * c < C:
        raise PartitionError(
            f"{K} clients × {c} classes cannot cover {C} classes: raise clients or "
            f"classes_per_client to at least {math.ceil(C / K)}"
        )
    return held_classes(sizes, K, c, rng, "lower clients or classes_per_client")


def _missing(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Returns counts [K, C] in which each client lacks m classes. A class is missing at ⌊Km/C⌋ or
    ⌈Km/C⌉ clients, and never at all of them."""
    K = settings.clients
    m = settings.missing_classes
    C = int(np.count_nonzero(sizes))
    if m >= C:
        raise PartitionError(
            f"missing_classes is {m}, but only {C} classes have examples: lower it"
        )
    if K * (C - m) < C:
        raise PartitionError(
            f"{K} clients that lack {m} of {C} classes cannot cover them all: raise clients to at "
            f"least {math.ceil(C / (C - m))} or lower missing_classes"
        )
    return held_classes(sizes, K, C - m, rng, "lower clients or raise missing_classes")


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
    first, last = (np.searchsorted(groups[order], chosen, side=side) for side in ("left", "right"))
    return [order[a:b].astype(np.int64) for a, b in zip(first, last, strict=True)]


def _deal(y: IntArray, counts: IntArray, rng: Rng) -> list[IntArray]:
    """Deals each class's examples, shuffled, to the clients, as many as `counts` [K, C] gives."""
    pieces: list[list[IntArray]] = [[] for _ in counts]
    for c in range(counts.shape[1]):
        index = rng.permutation(np.flatnonzero(y == c))
        for client_pieces, piece in zip(
            pieces, np.split(index, np.cumsum(counts[:-1, c])), strict=True
        ):
            client_pieces.append(piece)
    return [np.concatenate(client_pieces) for client_pieces in pieces]


COUNTS: dict[str, Callable[[IntArray, PartitionSettings, Rng], IntArray]] = {
    "dirichlet": _dirichlet,
    "dirichlet-plain": lambda sizes, s, rng: _dirichlet_counts(sizes, s, rng, masked=False),
    "dirichlet-dominant": lambda sizes, s, rng: dominated_dirichlet(
        sizes, s.clients, min(s.alpha, _ALPHA_CAP), rng
    ),
    "classes": _classes,
    "missing": _missing,
    "dominant": lambda sizes, s, rng: dominant_classes(
        sizes, s.clients, s.dominant_classes, s.dominant_share, rng
    ),
}
"""The functions from class sizes [C] to counts [K, C], by kind."""
