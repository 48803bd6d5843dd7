"""Label skew: the matrices of class counts per client for the partitions `classes`, `missing`,
`dominant` and `dirichlet-dominant`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsynth.data.arrays import IntArray
from fedsynth.errors import PartitionError

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator

_FITTING_STEPS = 3_000
_FITTED = 1e-6  # tolerance of fitted sums, in examples; below 1, the rounding has a solution
_WHOLE = 1e-6  # a number this close to an integer counts as one


def held_classes(sizes: IntArray, clients: int, per_client: int, rng: Rng, advice: str) -> IntArray:
    """Returns counts [K, C] in which every client has `per_client` classes, and a class's examples
    are split evenly (±1) among its holders.

    Every class with examples has ⌊Kc/C⌋ or ⌈Kc/C⌉ holders.

    Args:
        sizes: examples of each class [C]; only classes with examples count.
        clients: K, with K·each at least the number of those classes.
        per_client: c, at most the number of those classes.
        advice: what the user can change, for the error message.

    Raises:
        PartitionError: a class has fewer examples than holders.
    """
    present = np.flatnonzero(sizes)
    places = _places(clients, per_client, len(present), rng)
    short = np.flatnonzero(sizes[present] < places)
    if len(short):
        label = int(present[short[0]])
        holders = int(places[short[0]])
        raise PartitionError(
            f"class {label} has {int(sizes[label])} examples for the {holders} clients that must "
            f"hold it: {advice}"
        )
    holds = _take(places, clients, per_client, rng)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for j, label in enumerate(present.tolist()):
        having = rng.permutation(np.flatnonzero(holds[:, j]))
        counts[having, label] = _even(int(sizes[label]), len(having))
    return counts


def dominant_classes(
    sizes: IntArray, clients: int, per_client: int, share: float, rng: Rng
) -> IntArray:
    """Returns counts [K, C] of clients of equal size, with the fraction `share` of each client's
    examples in its `per_client` dominant classes: FedFM's NIID-2.

    A client has N/K examples, share·N/(K·m) of them in each of its m dominant classes. The rest is
    spread over the other classes as evenly as the classes' totals allow: equal numbers, fitted to
    the sums by iterative proportional fitting (Deming and Stephan, 1940). All numbers, including
    the clients' sizes, are then rounded up or down such that every example is assigned. If classes
    have equal sizes and each dominates equally often, the fit changes nothing.

    Raises:
        PartitionError: the share is not above the even one, or the class totals do not allow it.
    """
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
    if remaining.min() < -_FITTED:
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


def dominated_dirichlet(sizes: IntArray, clients: int, alpha: float, rng: Rng) -> IntArray:
    """Returns counts [K, C] as in FedKF's public code: Dirichlet shares of each class, with the
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
    present = np.flatnonzero(sizes)
    full, rest = divmod(clients, len(present))
    groups = [len(present)] * full + ([rest] if rest else [])
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    shares = np.array(groups) / clients
    of_group = {label: _floored(shares, int(sizes[label]), rng) for label in present.tolist()}
    first = 0
    for number, members in enumerate(groups):
        free = np.ones(members, dtype=bool)
        for label in present.tolist():
            p = rng.dirichlet(np.full(members, alpha))
            largest = int(p.argmax())
            chosen = int(rng.choice(np.flatnonzero(free)))
            p[[largest, chosen]] = p[[chosen, largest]]
            free[chosen] = False
            if not free.any():
                free[:] = True
            group_clients = slice(first, first + members)
            counts[group_clients, label] = _floored(p, int(of_group[label][number]), rng)
        first += members
    return counts


def _floored(shares: Floats, total: int, rng: Rng) -> IntArray:
    """Returns ⌊share·total⌋ for each share; a random entry gets the remainder."""
    numbers: IntArray = np.floor(shares * total).astype(np.int64)
    numbers[rng.integers(len(numbers))] += total - numbers.sum()
    return numbers


def _even(total: int, pieces: int) -> IntArray:
    """Splits `total` into integers that differ by at most one, the larger ones first."""
    size, over = divmod(total, pieces)
    return np.where(np.arange(pieces) < over, size + 1, size)


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
            np.abs(x.sum(axis=0) - columns).sum() < _FITTED
            and np.abs(x.sum(axis=1) - rows).sum() < _FITTED
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
    down = np.floor(x + _WHOLE).astype(np.int64)
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
        x - down > _WHOLE,
        x > 0,
    ):
        capacity[clients, classes] = cells
        result = maximum_flow(csr_array(capacity), source, sink)
        if result.flow_value == total - down.sum():
            break
    added: IntArray = result.flow[clients, classes].toarray().astype(np.int64)
    return down + added
