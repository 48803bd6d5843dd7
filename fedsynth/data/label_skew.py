"""Computes the clients' class counts for partitions with label skew.

Each rule returns a count matrix [K, C] with a row for each client. `dirichlet` and `quantity` are
from NIID-Bench (Li et al., ICDE 2022, arXiv 2102.02079). Many papers use `dirichlet`, among them
FedDM. `dominant` and `missing` are from FedFM (Ye et al., 2023, arXiv 2210.07615).
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

# The maximum number of draws of a whole partition, which take 1.5 s for 10 classes, and about 15 s
# for 100.
MAX_TRIES = 5_000
# The largest effective α. Above it, all shares are 1/K to six digits, and NumPy's gamma sampler
# would overflow.
_MAX_ALPHA = 1e12

_FITTING_STEPS = 3_000
# Tolerance of fitted sums, in examples. It must be below 1, so that rounding has a solution.
_SUM_TOLERANCE = 1e-6
# A number this close to an integer counts as one.
_INTEGER_TOLERANCE = 1e-6


def dirichlet(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Draws class counts [K, C] by NIID-Bench's Dirichlet rule.

    The rule is `dirichlet` or `quantity`.

    Each class is divided by Dirichlet shares (`dirichlet_once`). With `dirichlet`, clients that
    already have N/K examples get no further classes. The whole partition is redrawn until every
    client has at least `min_size` examples.

    Raises:
        PartitionError: no draw gives each client `min_size` examples.
    """
    K = settings.clients
    min_size = settings.min_size
    total = int(sizes.sum())
    if K * min_size > total:
        raise PartitionError(
            f"the data set contains {total} examples, too few for {K} clients with at least "
            f"{min_size} (partition.min_size). Lower partition.min_size or partition.clients"
        ).with_code("partition.min_size")
    masked = settings.kind == "dirichlet"
    for _ in range(MAX_TRIES):
        counts = dirichlet_once(sizes, settings, rng, masked=masked)
        if counts.sum(axis=1).min() >= min_size:
            return counts
    raise PartitionError(
        f"none of {MAX_TRIES} Dirichlet draws gave all {K} clients at least {min_size} examples. "
        "Raise partition.alpha, or lower partition.min_size or partition.clients"
    ).with_code("partition.alpha")


def dirichlet_once(
    sizes: IntArray, settings: PartitionSettings, rng: Rng, *, masked: bool = False
) -> IntArray:
    """Draws each class's Dirichlet shares once, and returns class counts [K, C].

    For each class c, the shares are p ~ Dir(α·1_K), and the n_c examples are cut at
    ⌊cumsum(p)·n_c⌋. If `masked` is true, clients that already have N/K examples get the share 0.
    """
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
            # Closed clients received all of p. A random open client is the limit of Dir(α) for α →
            # 0.
            reached = np.cumsum(np.arange(K) == rng.choice(np.flatnonzero(is_open)))
        # Divided by its last entry, so that it is exactly 1 from the last open client on. A
        # rounded sum would leave an example to the closed clients after it.
        cuts = (reached[:-1] / reached[-1] * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0, append=size)
        client_sizes += counts[:, c]
    return counts


def classes_per_client(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Draws class counts [K, C] with `classes_per_client` classes at each client."""
    return _held_classes(
        sizes, settings.clients, settings.classes_per_client, "classes_per_client", rng
    )


def missing_classes(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Draws class counts [K, C] with all but m classes at each client (`missing_classes`).

    A class is missing at ⌊Km/C⌋ or ⌈Km/C⌉ clients, and present at one or more.
    """
    per_client = int(np.count_nonzero(sizes)) - settings.missing_classes
    return _held_classes(sizes, settings.clients, per_client, "missing_classes", rng)


def dominant_classes(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Draws class counts [K, C] with a few dominant classes at each client (FedFM's NIID-2).

    All clients have N/K examples. A client has share·N/(K·m) examples in each dominant class, where
    m is `dominant_classes` and the share is `dominant_share`. Its other examples are spread over
    the other classes as evenly as the class sizes allow. For this, equal numbers are fitted to the
    required sums by iterative proportional fitting (Deming and Stephan, 1940). All numbers,
    including the clients' sizes, are then rounded up or down so that every example is assigned. If
    all classes have equal sizes and dominate equally often, the fit changes nothing.

    Raises:
        PartitionError: the share is not larger than in an even partition, or the class sizes do not
            allow it.
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
            f"partition.dominant_classes must be below {C}, the number of classes with examples, "
            f"got {per_client}"
        ).with_code("partition.dominant_classes")
    if share <= per_client / C:
        raise PartitionError(
            f"partition.dominant_share must be above {per_client / C:g}, the share in an even "
            f"partition, got {share:g}"
        ).with_code("partition.dominant_share")
    holds = _take(_places(clients, per_client, C, rng), clients, per_client, rng)
    dominant = holds * (share * size / per_client)
    remaining = totals - dominant.sum(axis=0)
    if remaining.min() < -_SUM_TOLERANCE:
        j = int(remaining.argmin())
        raise PartitionError(
            f"class {int(present[j])} contains {int(totals[j])} examples, too few for "
            f"partition.dominant_share={share:g}, which needs {totals[j] - remaining[j]:.0f}. "
            "Lower the share, or raise partition.dominant_classes or partition.clients"
        ).with_code("partition.small_classes")
    rest = _spread(np.full(clients, (1 - share) * size), remaining.clip(0), ~holds)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    counts[:, present] = _rounded(dominant + rest, totals)
    return counts


def dominated_dirichlet(sizes: IntArray, settings: PartitionSettings, rng: Rng) -> IntArray:
    """Draws class counts [K, C] by `dirichlet-dominant`, the rule in FedKF's public code.

    For each class, p ~ Dir(α·1) over the clients. The largest share goes to a random client that
    has not yet received the largest share of a class. When every client has received one, all are
    eligible again. With K ≤ C, every client therefore dominates at least one class, whereas the
    plain Dirichlet rule leaves some clients with almost nothing. With K > C, the clients form
    groups of C, and the last group has the remaining clients. Each group gets its share of every
    class, and the rule applies within the group. A client gets ⌊p·n_c⌋ examples, and one random
    client gets the few examples that remain after rounding down.

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
    """Multiplies shares by totals, and rounds down.

    The remainder is added to a random entry, so that the entries sum to `total`.
    """
    numbers: IntArray = np.floor(shares * total).astype(np.int64)
    numbers[rng.integers(len(numbers))] += total - numbers.sum()
    return numbers


def _held_classes(
    sizes: IntArray, clients: int, per_client: int, setting: str, rng: Rng
) -> IntArray:
    """Draws class counts [K, C] with `per_client` classes at each client.

    A class's examples are split evenly (±1) among its ⌊Kc/C⌋ or ⌈Kc/C⌉ clients.

    Args:
        sizes: the class sizes [C]. Classes without examples are ignored.
        clients: the number of clients K.
        per_client: the number c of classes per client.
        setting: the setting that determines c, for error messages.
        rng: the random generator that chooses the clients.

    Raises:
        PartitionError: there are too few classes, clients or examples.
    """
    present = np.flatnonzero(sizes)
    C = len(present)
    if not 1 <= per_client <= C:
        raise PartitionError(
            f"partition.{setting} results in {per_client} classes per client, but must result in "
            f"1 to {C}, the number of classes with examples. Lower it"
        ).with_code("partition.classes")
    if clients * per_client < C:
        raise PartitionError(
            f"{clients} clients with {per_client} classes each cannot cover all {C} classes. Raise "
            f"partition.clients to {math.ceil(C / per_client)}, or change partition.{setting}"
        ).with_code("partition.coverage")
    places = _places(clients, per_client, C, rng)
    short = np.flatnonzero(sizes[present] < places)
    if len(short):
        label = int(present[short[0]])
        raise PartitionError(
            f"class {label} contains {int(sizes[label])} examples, too few for its "
            f"{int(places[short[0]])} clients. Lower partition.clients or change "
            f"partition.{setting}"
        ).with_code("partition.class_examples")
    holds = _take(places, clients, per_client, rng)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for j, label in enumerate(present.tolist()):
        holders = rng.permutation(np.flatnonzero(holds[:, j]))
        size, larger = divmod(int(sizes[label]), len(holders))
        counts[holders, label] = size
        counts[holders[:larger], label] += 1
    return counts


def _places(clients: int, per_client: int, classes: int, rng: Rng) -> IntArray:
    """Draws the number of clients that have each class.

    The numbers differ by at most one. The classes with one client more are random.
    """
    places = np.full(classes, clients * per_client // classes)
    places[rng.permutation(classes)[: clients * per_client % classes]] += 1
    return places


def _take(places: IntArray, clients: int, per_client: int, rng: Rng) -> npt.NDArray[np.bool_]:
    """Assigns classes to clients, and returns a boolean matrix of shape [K, C].

    In random order, each client takes the `per_client` classes with the most remaining places. Ties
    are broken at random. The remaining places therefore differ by at most one, so every client gets
    `per_client` different classes. If K·c = C, no two clients share a class.
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
    """Computes a non-negative matrix of shape [K, C] with the given row and column sums.

    They are as even as possible, and zero where `allowed` is false.
    """
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
        "some classes contain too few examples for the partition 'dominant'. Lower "
        "partition.dominant_share, or raise partition.dominant_classes or partition.clients"
    ).with_code("partition.small_classes")


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Divides two arrays. The result is 0 where `denominator` is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 0)


def _rounded(x: Floats, columns: IntArray) -> IntArray:
    """Rounds each entry in `x` [K, C] up or down, so that the columns sum to `columns`.

    Row sums differ by at most one after rounding.

    All rows of `x` must have the same sum. The function first rounds down, and then finds a maximum
    flow from clients to classes. The flow determines which numbers are raised by one. Every client
    has ⌊N/K⌋ examples in total, and N mod K clients have one more. The fractional parts of `x` form
    a flow of the required size, so an integral flow exists, too.
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
    for cells in (x - down > _INTEGER_TOLERANCE, x > 0):
        capacity[clients, classes] = cells
        result = maximum_flow(csr_array(capacity), source, sink)
        if result.flow_value == total - down.sum():
            break
    added: IntArray = result.flow[clients, classes].toarray().astype(np.int64)
    return down + added


# The functions from class sizes [C] to class counts [K, C], by partition kind.
COUNTS: dict[str, Callable[[IntArray, PartitionSettings, Rng], IntArray]] = {
    "dirichlet": dirichlet,
    "dirichlet-plain": dirichlet_once,
    "dirichlet-dominant": dominated_dirichlet,
    "classes": classes_per_client,
    "missing": missing_classes,
    "dominant": dominant_classes,
}
