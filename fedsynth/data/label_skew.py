"""Label skew: the matrices of class counts per client [K, C] for the partitions of `COUNTS`.

`dirichlet` and `quantity` are rules of NIID-Bench (Li et al., ICDE 2022, arXiv 2102.02079); the
former is used for FedDM's tables and many others. `dominant` and `missing` are FedFM's (Ye et al.,
2023, arXiv 2210.07615).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedsynth.data.images import Floats, IntArray
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.errors import PartitionError

Rng = np.random.Generator

MAX_TRIES = 5_000
"""The maximum number of draws of the whole partition: 1.5 s for 10 classes, about 15 s for 100."""
_MAX_ALPHA = 1e12
"""Above this the draws are 1/K to six digits, and NumPy's gamma sampler would overflow."""
_FITTING_STEPS = 3_000
_SUM_TOLERANCE = 1e-6
"""Tolerance of fitted sums, in examples; below 1, the rounding has a solution."""
_INTEGER_TOLERANCE = 1e-6
"""A number this close to an integer counts as one."""


def dirichlet(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """NIID-Bench's label skew: Dirichlet shares of each class, none for clients with ≥ N/K
    examples; redrawn while a client has fewer than `min_size` examples.

    Raises:
        PartitionError: no draw satisfies `min_size`.
    """
    K = settings.clients
    min_size = settings.min_size
    total = int(sizes.sum())
    if K * min_size > total:
        raise PartitionError(
            f"{K} clients of at least {min_size} examples need {K * min_size}, but there are "
            f"{total}: lower min_size or clients"
        )
    masked = settings.kind == "dirichlet"
    for _ in range(MAX_TRIES):
        counts = dirichlet_once(sizes, settings, rng, masked=masked)
        if counts.sum(axis=1).min() >= min_size:
            return counts
    raise PartitionError(
        f"no Dirichlet partition with at least {min_size} examples for each of {K} clients in "
        f"{MAX_TRIES} tries at alpha={settings.alpha:g}: raise alpha, or lower min_size or clients"
    )


def dirichlet_once(
    sizes: IntArray, settings: PartitionSettings, rng: Rng, *, masked: bool = False
) -> IntArray:
    """Draws counts [K, C]: for each class p ~ Dir(α·1_K), cut at ⌊cumsum(p)·n_c⌋. If `masked`,
    p = 0 for clients with ≥ N/K examples."""
    K = settings.clients
    total = int(sizes.sum())
    counts = np.zeros((K, len(sizes)), dtype=np.int64)
    client_sizes = np.zeros(K, dtype=np.int64)
    concentration = np.full(K, min(settings.alpha, _MAX_ALPHA))
    for c, size in enumerate(sizes):
        if size == 0:
            continue
        p = rng.dirichlet(concentration)
        # Compared as integers, because N/K would be rounded.
        is_open = (client_sizes * K < total) | (not masked)
        reached = np.cumsum(np.where(is_open, p, 0.0))
        if not reached[-1] > 0:
            # All of p, to the last bit, went to closed clients. A random open client is the limit
            # of Dir(α) for α → 0.
            reached = np.cumsum(np.arange(K) == rng.choice(np.flatnonzero(is_open)))
        # Divided by its last entry, so that it is exactly 1 from the last open client on. A
        # rounded sum would leave an example to the closed clients after it.
        cuts = (reached[:-1] / reached[-1] * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0, append=size)
        client_sizes += counts[:, c]
    return counts


def classes_per_client(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Gives each client c classes."""
    return _held_classes(
        sizes, settings.clients, settings.classes_per_client, "classes_per_client", rng
    )


def missing_classes(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Gives each client all classes but m. A class is missing at ⌊Km/C⌋ or ⌈Km/C⌉ clients, and
    never at all of them."""
    per_client = int(np.count_nonzero(sizes)) - settings.missing_classes
    return _held_classes(sizes, settings.clients, per_client, "missing_classes", rng)


def dominant_classes(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Returns counts of clients of equal size, with the fraction `dominant_share` of each client's
    examples in its `dominant_classes` dominant classes: FedFM's NIID-2.

    A client has N/K examples, share·N/(K·m) of them in each of its m dominant classes. The rest is
    spread over the other classes as evenly as the classes' totals allow: equal numbers, fitted to
    the sums by iterative proportional fitting (Deming and Stephan, 1940). All numbers, including
    the clients' sizes, are then rounded up or down such that every example is assigned. If classes
    have equal sizes and each dominates equally often, the fit changes nothing.

    Raises:
        PartitionError: the share is not above the even one, or the class totals do not allow it.
    """
    clients = settings.clients
    per_client = settings.dominant_classes
    share = settings.dominant_share
    present = np.flatnonzero(sizes)
    C = len(present)
    totals = sizes[present]
    size = sizes.sum() / clients
    if per_client >= C:
        raise PartitionError(
            f"dominant_classes is {per_client}, but only {C} classes have examples: lower it"
        )
    if share <= per_client / C:
        raise PartitionError(
            f"dominant_share {share:g} must be above {per_client / C:g}, the even share of "
            f"{per_client} of {C} classes: raise it"
        )
    holds = _take(_places(clients, per_client, C, rng), clients, per_client, rng)
    dominant = holds * (share * size / per_client)
    remaining = totals - dominant.sum(axis=0)
    if remaining.min() < -_SUM_TOLERANCE:
        j = int(remaining.argmin())
        raise PartitionError(
            f"class {int(present[j])} has {int(totals[j])} examples, but dominating "
            f"{int(holds[:, j].sum())} of {clients} clients takes "
            f"{totals[j] - remaining[j]:.0f}: lower dominant_share, or raise "
            "dominant_classes or clients"
        )
    rest = _spread(np.full(clients, (1 - share) * size), remaining.clip(0), ~holds)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    counts[:, present] = _rounded(dominant + rest, totals)
    return counts


def dominated_dirichlet(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Returns counts as in FedKF's public code: Dirichlet shares of each class, with the
    largest share for a client that dominates no class yet.

    For each class, p ~ Dir(α·1) over the clients. The largest share goes to a client that is not
    yet the largest holder of a class; once every client is one, all are eligible again. So with
    K ≤ C every client dominates at least one class, whereas plain Dirichlet leaves some clients
    with almost nothing. With K > C, clients form groups of C (the last has the rest). Each group
    gets its share of every class, and the rule holds within the group. A client gets ⌊p·n_c⌋
    examples, and one random client gets the few left over by rounding.

    The public code redraws p until its largest entry belongs to an eligible client. As the entries
    are exchangeable, a single draw has the same distribution if its largest entry is swapped with
    that of a random eligible client.
    """
    K = settings.clients
    alpha = min(settings.alpha, _MAX_ALPHA)
    present = np.flatnonzero(sizes)
    edges = [*range(0, K, len(present)), K]
    groups = np.diff(edges)
    counts = np.zeros((K, len(sizes)), dtype=np.int64)
    group_sizes = np.zeros((len(groups), len(sizes)), dtype=np.int64)
    for label in present.tolist():
        group_sizes[:, label] = _floored(groups / K, int(sizes[label]), rng)
    for number, members in enumerate(groups):
        group_counts = counts[edges[number] : edges[number + 1]]
        free = np.ones(members, dtype=bool)
        for label in present.tolist():
            p = rng.dirichlet(np.full(members, alpha))
            largest = int(p.argmax())
            chosen = int(rng.choice(np.flatnonzero(free)))
            p[[largest, chosen]] = p[[chosen, largest]]
            free[chosen] = False
            if not free.any():
                free[:] = True
            group_counts[:, label] = _floored(p, int(group_sizes[number, label]), rng)
    return counts


def _floored(shares: Floats, total: int, rng: Rng) -> IntArray:
    """Returns ⌊share·total⌋ for each share; a random entry gets the remainder."""
    numbers: IntArray = np.floor(shares * total).astype(np.int64)
    numbers[rng.integers(len(numbers))] += total - numbers.sum()
    return numbers


def _held_classes(
    sizes: IntArray, clients: int, per_client: int, setting: str, rng: Rng
) -> IntArray:
    """Returns counts [K, C] in which every client has `per_client` classes, and a class's examples
    are split evenly (±1) among its holders.

    Every class with examples has ⌊Kc/C⌋ or ⌈Kc/C⌉ holders.

    Args:
        sizes: examples of each class [C]; only classes with examples count.
        clients: K.
        per_client: c.
        setting: the setting that determines c, for the error messages.

    Raises:
        PartitionError: there are too few classes, clients or examples.
    """
    present = np.flatnonzero(sizes)
    C = len(present)
    if not 1 <= per_client <= C:
        raise PartitionError(f"only {C} classes have examples: lower {setting}")
    if clients * per_client < C:
        raise PartitionError(
            f"{clients} clients with {per_client} classes each cannot cover {C} classes: raise "
            f"clients to at least {math.ceil(C / per_client)}, or change {setting}"
        )
    places = _places(clients, per_client, C, rng)
    short = np.flatnonzero(sizes[present] < places)
    if len(short):
        label = int(present[short[0]])
        raise PartitionError(
            f"class {label} has {int(sizes[label])} examples for the {int(places[short[0]])} "
            f"clients that must hold it: lower clients or change {setting}"
        )
    holds = _take(places, clients, per_client, rng)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for j, label in enumerate(present.tolist()):
        holders = rng.permutation(np.flatnonzero(holds[:, j]))
        size, larger = divmod(int(sizes[label]), len(holders))
        counts[holders, label] = size
        counts[holders[:larger], label] += 1
    return counts


def _places(clients: int, per_client: int, classes: int, rng: Rng) -> IntArray:
    """Returns the number of holders of each class: equal up to one, with the larger ones drawn at
    random."""
    places = np.full(classes, clients * per_client // classes)
    places[rng.permutation(classes)[: clients * per_client % classes]] += 1
    return places


def _take(places: IntArray, clients: int, per_client: int, rng: Rng) -> npt.NDArray[np.bool_]:
    """Assigns classes to clients, bool [K, C].

    Clients, in random order, take the classes with the most places left; ties are broken at random.
    This keeps the numbers of places left within one of each other, so every client gets
    `per_client` different classes. With K·c = C the clients' classes are disjoint.
    """
    remaining = places.copy()
    classes = len(places)
    holds = np.zeros((clients, classes), dtype=bool)
    for k in rng.permutation(clients):
        chosen = np.lexsort((rng.random(classes), -remaining))[:per_client]
        holds[k, chosen] = True
        remaining[chosen] -= 1
    return holds


def _spread(rows: Floats, columns: Floats, allowed: npt.NDArray[np.bool_]) -> Floats:
    """Returns numbers ≥ 0 [K, C] with these sums, as even as possible, and zero where not
    `allowed`."""
    x = allowed.astype(np.float64)
    for _ in range(_FITTING_STEPS):
        x *= _ratio(columns, x.sum(axis=0))
        x *= _ratio(rows, x.sum(axis=1))[:, None]
        if (
            np.abs(x.sum(axis=0) - columns).sum() < _SUM_TOLERANCE
            and np.abs(x.sum(axis=1) - rows).sum() < _SUM_TOLERANCE
        ):
            return x
    raise PartitionError(
        "the class sizes are too small for this share of dominant classes with clients of "
        "equal size: lower dominant_share, or raise dominant_classes or clients"
    )


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Returns `numerator` / `denominator`, and 0 where `denominator` is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 0)


def _rounded(x: Floats, columns: IntArray) -> IntArray:
    """Rounds `x` [K, C] up or down, such that its column sums are `columns` and its row sums differ
    by at most one. All rows of `x` have the same sum.

    The units lost by rounding down are a flow from clients to classes, of at most one unit per
    cell. Every client has ⌊N/K⌋ examples in total, and N mod K of them have one more. The
    fractional parts of `x` are such a flow of full size, so an integral maximum flow has that size.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    K, C = x.shape
    total = int(columns.sum())
    down = np.floor(x + _INTEGER_TOLERANCE).astype(np.int64)
    source = 0
    extra = 1
    sink = K + C + 2
    clients = slice(2, K + 2)
    classes = slice(K + 2, sink)
    capacity = np.zeros((sink + 1, sink + 1), dtype=np.int32)
    capacity[source, clients] = total // K - down.sum(axis=1)
    capacity[source, extra] = total % K
    capacity[extra, clients] = 1
    capacity[classes, sink] = columns - down.sum(axis=0)
    # Integers stay unchanged at first. Many almost integral cells together can hide a unit; then
    # they may be rounded up, too.
    for cells in (
        x - down > _INTEGER_TOLERANCE,
        x > 0,
    ):
        capacity[clients, classes] = cells
        result = maximum_flow(csr_array(capacity), source, sink)
        if result.flow_value == total - down.sum():
            break
    added: IntArray = result.flow[clients, classes].toarray().astype(np.int64)
    return down + added


COUNTS: dict[str, Callable[[IntArray, PartitionSettings, Rng], IntArray]] = {
    "dirichlet": dirichlet,
    "dirichlet-plain": dirichlet_once,
    "dirichlet-dominant": dominated_dirichlet,
    "classes": classes_per_client,
    "missing": missing_classes,
    "dominant": dominant_classes,
}
"""The functions from class sizes [C] to counts [K, C], by kind."""
