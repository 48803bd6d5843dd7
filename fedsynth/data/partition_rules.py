"""The rules by which examples are divided over clients: each takes labels [N], the settings, the
number of classes and a generator, and gives every client its positions.

`dirichlet` and `quantity` are rules of NIID-Bench (Li et al., ICDE 2022, arXiv 2102.02079), the
former behind FedDM's tables and many others; `dominant` and `missing` are FedFM's (Ye et al., 2023,
arXiv 2210.07615). Matrices of who has how many of which class are made in `label_skew.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.data.label_skew import dominant_classes, dominated_dirichlet, held_classes
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.errors import PartitionError

Rng = np.random.Generator

# How often the whole partition is drawn anew before giving up: 1.5 s for 10 classes, some 15 s for
# 100.
MAX_TRIES = 5_000
# Beyond this the draws are 1/K to six digits, and NumPy's gamma sampler would overflow.
_ALPHA_CAP = 1e12


def _iid(y: IntArray, settings: PartitionSettings, classes: int, rng: Rng) -> list[IntArray]:
    """A random permutation cut into K pieces whose sizes differ by at most one."""
    return np.array_split(rng.permutation(len(y)), settings.clients)


def _dirichlet(y: IntArray, settings: PartitionSettings, classes: int, rng: Rng) -> list[IntArray]:
    """NIID-Bench: Dirichlet shares of each class, none for clients with ≥ N/K examples; redrawn if
    one has few."""
    sizes = np.bincount(y, minlength=classes)
    # Only numbers are drawn until they pass; the examples are shuffled once, at the end.
    counts = _redrawn(
        lambda: _dirichlet_counts(sizes, settings, rng, masked=True),
        len(y),
        settings,
        " (or use dirichlet-plain)",
    )
    return _deal(y, counts, rng)


def _quantity(y: IntArray, settings: PartitionSettings, classes: int, rng: Rng) -> list[IntArray]:
    """NIID-Bench's quantity skew: sizes cut at ⌊cumsum(p)·N⌋ with p ~ Dir(α·1_K), redrawn if one is
    small; examples at random."""
    everything = np.array([len(y)])
    sizes = _redrawn(
        lambda: _dirichlet_counts(everything, settings, rng, masked=False), len(y), settings
    )[:, 0]
    return np.split(rng.permutation(len(y)), np.cumsum(sizes[:-1]))


def _redrawn(
    draw: Callable[[], IntArray], total: int, settings: PartitionSettings, instead: str = ""
) -> IntArray:
    """The first counts [K, ...] of `draw` that give every client at least `min_size` examples."""
    K = settings.clients
    least = settings.min_size
    if K * least > total:
        raise PartitionError(
            f"{K} clients of at least {least} examples need {K * least}, there are {total}: lower "
            "min_size or clients"
        )
    for _ in range(MAX_TRIES):
        counts = draw()
        if counts.sum(axis=1).min() >= least:
            return counts
    raise PartitionError(
        f"no Dirichlet partition with at least {least} examples for each of {K} clients in "
        f"{MAX_TRIES} tries at "
        f"alpha={settings.alpha:g}: raise alpha, or lower min_size or clients{instead}"
    )


def _dirichlet_plain(
    y: IntArray, settings: PartitionSettings, classes: int, rng: Rng
) -> list[IntArray]:
    """Dirichlet shares of each class, as they fall: clients may have many examples or none."""
    sizes = np.bincount(y, minlength=classes)
    return _deal(y, _dirichlet_counts(sizes, settings, rng, masked=False), rng)


def _dirichlet_dominant(
    y: IntArray, settings: PartitionSettings, classes: int, rng: Rng
) -> list[IntArray]:
    """Dirichlet shares of each class, each with a largest holder of its own
    (`dominated_dirichlet`)."""
    sizes = np.bincount(y, minlength=classes)
    alpha = min(settings.alpha, _ALPHA_CAP)
    return _deal(y, dominated_dirichlet(sizes, settings.clients, alpha, rng), rng)


def _dirichlet_counts(
    sizes: npt.NDArray[np.integer], settings: PartitionSettings, rng: Rng, *, masked: bool
) -> IntArray:
    """[K, C]: for each class p ~ Dir(α·1_K), cut at ⌊cumsum(p)·n_c⌋. `masked`: p = 0 for those with
    ≥ N/K examples."""
    K = settings.clients
    total = int(sizes.sum())
    counts = np.zeros((K, len(sizes)), dtype=np.int64)
    held = np.zeros(K, dtype=np.int64)
    concentration = np.full(K, min(settings.alpha, _ALPHA_CAP))
    for c, size in enumerate(sizes):
        if size == 0:
            continue
        p = rng.dirichlet(concentration)
        # Compared in whole numbers: N/K itself would be rounded.
        open_ = held * K < total if masked else np.ones(K, dtype=bool)
        reached = np.cumsum(np.where(open_, p, 0.0))
        if not reached[-1] > 0:
            # All of p went, to the last bit, to clients that take no more. One open client at
            # random is the limit of Dir(α) for α → 0.
            reached = np.cumsum(np.arange(K) == rng.choice(np.flatnonzero(open_)))
        # Divided by its own last entry, so that it is exactly 1 from the last open client on: a
        # rounded sum would leave an example for the closed clients after it.
        cuts = (reached[:-1] / reached[-1] * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0, append=size)
        held += counts[:, c]
    return counts


def _classes(y: IntArray, settings: PartitionSettings, classes: int, rng: Rng) -> list[IntArray]:
    """Exactly c classes per client (`held_classes`)."""
    sizes = np.bincount(y, minlength=classes)
    K = settings.clients
    c = settings.classes_per_client
    C = int(np.count_nonzero(sizes))
    if c > C:
        raise PartitionError(
            f"classes_per_client is {c} but there are examples of {C} classes only: lower it"
        )
    if K * c < C:
        raise PartitionError(
            f"{K} clients × {c} classes cannot cover {C} classes: raise clients or "
            "classes_per_client to at least "
            f"{math.ceil(C / K)}"
        )
    return _deal(y, held_classes(sizes, K, c, rng, "lower clients or classes_per_client"), rng)


def _missing(y: IntArray, settings: PartitionSettings, classes: int, rng: Rng) -> list[IntArray]:
    """No example of m classes: a client has C − m, so that a class is missing at ⌊Km/C⌋ or ⌈Km/C⌉
    clients and never at all of them."""
    sizes = np.bincount(y, minlength=classes)
    K = settings.clients
    m = settings.missing_classes
    C = int(np.count_nonzero(sizes))
    if m >= C:
        raise PartitionError(
            f"missing_classes is {m} but there are examples of {C} classes only: lower it"
        )
    if K * (C - m) < C:
        raise PartitionError(
            f"{K} clients that lack {m} of {C} classes cannot cover them all: raise clients to at "
            f"least {math.ceil(C / (C - m))}"
            " or lower missing_classes"
        )
    return _deal(
        y, held_classes(sizes, K, C - m, rng, "lower clients or raise missing_classes"), rng
    )


def _dominant(y: IntArray, settings: PartitionSettings, classes: int, rng: Rng) -> list[IntArray]:
    """Clients of one size with a few classes in the foreground (`dominant_classes`)."""
    sizes = np.bincount(y, minlength=classes)
    counts = dominant_classes(
        sizes, settings.clients, settings.dominant_classes, settings.dominant_share, rng
    )
    return _deal(y, counts, rng)


def of_domains(
    domains: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Client k has domain k mod D; the examples of a domain are split evenly (±1) among its
    clients."""
    if domains is None:
        raise PartitionError(
            "this data set does not say which domain an example comes from: partition domain needs "
            "one that does"
        )
    present = np.unique(domains)
    if settings.clients % len(present):
        raise PartitionError(
            f"{settings.clients} clients cannot share {len(present)} domains evenly: use a "
            f"multiple of {len(present)}"
        )
    parts: list[IntArray] = [np.empty(0, np.int64)] * settings.clients
    for number, domain in enumerate(present):
        mine = range(number, settings.clients, len(present))
        pieces = np.array_split(rng.permutation(np.flatnonzero(domains == domain)), len(mine))
        for client, piece in zip(mine, pieces, strict=True):
            parts[client] = piece
    return parts


def of_groups(
    groups: npt.NDArray[np.integer] | None, settings: PartitionSettings, rng: Rng
) -> list[IntArray]:
    """Client k is the k-th of the groups that occur, or of K that are drawn, by their numbers."""
    if groups is None:
        raise PartitionError(
            "this data set does not say whose an example is: partition natural needs one that "
            "does, such as femnist or synthetic(1,1)"
        )
    present = np.unique(groups)
    if settings.clients > len(present):
        raise PartitionError(
            f"{settings.clients} clients are more than the {len(present)} groups of this data set: "
            "lower clients to at most "
            f"{len(present)}"
        )
    chosen = np.sort(rng.permutation(present)[: settings.clients])
    order = np.argsort(groups, kind="stable")  # within a group, positions stay ascending
    first, last = (np.searchsorted(groups[order], chosen, side=side) for side in ("left", "right"))
    return [order[a:b].astype(np.int64) for a, b in zip(first, last, strict=True)]


def _deal(y: IntArray, counts: IntArray, rng: Rng) -> list[IntArray]:
    """Deals each class's examples, shuffled, to the clients: `counts` [K, C] says how many each
    gets."""
    pieces: list[list[IntArray]] = [[] for _ in counts]
    for c in range(counts.shape[1]):
        index = rng.permutation(np.flatnonzero(y == c))
        for mine, piece in zip(pieces, np.split(index, np.cumsum(counts[:-1, c])), strict=True):
            mine.append(piece)
    return [np.concatenate(mine) for mine in pieces]


Rule = Callable[[IntArray, PartitionSettings, int, Rng], list[IntArray]]
RULES: dict[str, Rule] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-plain": _dirichlet_plain,
    "dirichlet-dominant": _dirichlet_dominant,
    "classes": _classes,
    "missing": _missing,
    "dominant": _dominant,
    "quantity": _quantity,
}
