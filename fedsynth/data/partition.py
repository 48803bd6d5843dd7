"""Who has which examples: partitions of a label array over clients, as the field makes them. Every
rule is seeded.

`dirichlet` and `quantity` are rules of NIID-Bench (Li et al., ICDE 2022, arXiv 2102.02079), the
former behind FedDM's tables and many others; `dominant` and `missing` are FedFM's (Ye et al., 2023,
arXiv 2210.07615). Matrices of who has how many of which class are made in `label_skew.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.data.label_skew import dominant_classes, dominated_dirichlet, held_classes
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.users import user_digests
from fedsynth.errors import DataError, PartitionError, SettingError, unknown_value
from fedsynth.seeding import numpy_generator

IntArray = npt.NDArray[np.int64]
Rng = np.random.Generator

GIVEN = "given"  # the kind of a partition that the caller of `simulate` brings along
DOMAIN, NATURAL = "domain", "natural"
# How often the whole partition is drawn anew before giving up: 1.5 s for 10 classes, some 15 s for
# 100.
MAX_TRIES = 5_000
MOST_CLIENTS = 200_000
# Beyond this the draws are 1/K to six digits, and NumPy's gamma sampler would overflow.
_ALPHA_CAP = 1e12


@dataclass(frozen=True)
class PartitionSettings:
    """How to divide the examples.

    Args:
        kind: the rule.
            `iid`: at random, sizes equal (±1).
            `dirichlet`: Dirichlet shares of each class, with balance mask and redraws;
            `dirichlet-plain`: with neither.
            `dirichlet-dominant`: Dirichlet shares of each class, the largest for a client that
            dominates none yet (FedKF's public code, and so its paper's tables).
            `classes`: c classes per client, each class split evenly among those that have it.
            `missing`: the complement: m classes are missing at each client, every class at about
            equally many clients.
            `dominant`: clients of one size, a share of it of the client's few dominant classes and
            the rest of all others.
            `quantity`: quantity skew: Dirichlet sizes, classes mixed alike.
            `domain`: feature skew: each client has examples of one domain; several clients of a
            domain share its examples evenly.
            `natural`: clients come with the data (writers, devices; domains where the data set has
            no such groups): each is one group. With fewer clients than groups, groups are drawn by
            the seed and the others are left out, as LEAF subsamples writers.
        clients: number of clients K ≥ 1.
        alpha: concentration of the three Dirichlet kinds and of `quantity`, > 0; small is skewed.
        classes_per_client: c of `classes`, ≥ 1.
        missing_classes: m of `missing`, ≥ 1.
        dominant_classes: number of a client's dominant classes in `dominant`, ≥ 1.
        dominant_share: share in (0, 1) of a client's examples that is of its dominant classes.
            FedFM's public code, for 10 clients: 0.46 of 1, 10 and 20 classes on CIFAR-10, CIFAR-100
            and Tiny-ImageNet, 0.5 of 1 class on CINIC-10.
        min_size: `dirichlet` and `quantity` only: the fewest examples a client may have, ≥ 0.
        subset: share of each class's examples that are divided at all, drawn at random (FedKF takes
            10 % of EMNIST).
        local_test: share of each client's examples, drawn one by one, that are its own test split;
            FedKF: 0.2. The data set's test set stays as it is (the paper does not say whether it
            pools the two).
        seed: None takes the run's seed (0 outside a run).

    Raises:
        UnknownNameError: for `kind`.
        SettingError: a number outside its range.

    >>> import numpy as np
    >>> labels = np.repeat(np.arange(4), 100)
    >>> two_of_four = PartitionSettings("classes", clients=4, classes_per_client=2)
    >>> [np.unique(labels[part]).size for part in partition(labels, two_of_four, classes=4)]
    [2, 2, 2, 2]
    """

    section: ClassVar[str] = "partition"  # of a config file

    kind: str = "dirichlet"
    clients: int = 10
    alpha: float = 0.5
    classes_per_client: int = 2
    missing_classes: int = 1
    dominant_classes: int = 1
    dominant_share: float = 0.46
    min_size: int = 10
    subset: float = 1.0
    local_test: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*_RULES, DOMAIN, NATURAL, GIVEN):
            raise unknown_value("partition", "kind", self.kind, (*_RULES, DOMAIN, NATURAL))
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise SettingError("partition", "alpha", f"must be a positive number, got {self.alpha}")
        for name in ("clients", "classes_per_client", "missing_classes", "dominant_classes"):
            if getattr(self, name) < 1:
                raise SettingError(
                    "partition", name, f"must be at least 1, got {getattr(self, name)}"
                )
        if self.clients > MOST_CLIENTS:
            raise SettingError(
                "partition", "clients", f"must be at most {MOST_CLIENTS:,}, got {self.clients:,}"
            )
        for name, inside, interval in (
            ("dominant_share", 0 < self.dominant_share < 1, "(0, 1)"),
            ("subset", 0 < self.subset <= 1, "(0, 1]"),
            ("local_test", 0 <= self.local_test < 1, "[0, 1)"),
        ):
            if not inside:
                raise SettingError(
                    "partition", name, f"must be in {interval}, got {getattr(self, name)}"
                )
        if self.min_size < 0:
            raise SettingError("partition", "min_size", f"must be at least 0, got {self.min_size}")


def clients_or_groups(settings: PartitionSettings, spec: DatasetSpec) -> int:
    """How many pieces the data set falls into: K, or the published number of groups where clients
    are some of them (`natural`)."""
    return max(
        settings.clients, (spec.groups or len(spec.domains)) if settings.kind == NATURAL else 0
    )


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
        return [np.sort(part) for part in _domain(domains, settings, rng)]
    if settings.kind == NATURAL:
        return _natural(domains if groups is None else groups, settings, rng)
    parts = _RULES[settings.kind](y, settings, classes, rng)
    return [np.sort(part) for part in parts]


def _subset(y: IntArray, settings: PartitionSettings) -> IntArray:
    """The positions, ascending, of round(subset · n_c) random examples of each class."""
    rng = numpy_generator(settings.seed or 0, "subset")
    chosen = [rng.permutation(np.flatnonzero(y == c)) for c in np.unique(y)]
    return np.sort(np.concatenate([c[: max(1, round(settings.subset * len(c)))] for c in chosen]))


def hold_out(
    parts: Sequence[IntArray], share: float, seed: int, data: ImageData, by_user: bool = False
) -> tuple[list[IntArray], list[IntArray]]:
    """(training split, test split) of each client, sorted: each record tests with probability
    `share`.

    On which side a record stands follows from the seed and from its own bytes, not from its place:
    with differential privacy one record more, anywhere in the data, must not move others from one
    split to the other. Equal records stand on the same side, so none of a test split is also
    trained on.

    Args:
        parts: for each client the positions of its records in `data`.
        seed: public; another one gives another split.
        by_user: all records of a user (`data.groups`) stand on the same side, by a hash of all of
            them: users are protected.
    """
    positions = [np.asarray(part, np.int64) for part in parts]
    key = hashlib.blake2b(f"local test split {seed}".encode(), digest_size=32).digest()
    digests = user_digests if by_user else record_digests
    training = []
    testing = []
    for part in positions:
        drawn = digests(data, part, key, 8).view("<u8")[:, 0] / 2.0**64
        training.append(np.sort(part[drawn >= share]))
        testing.append(np.sort(part[drawn < share]))
    return training, testing


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


def _domain(
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


def _natural(
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


_Rule = Callable[[IntArray, PartitionSettings, int, Rng], list[IntArray]]
_RULES: dict[str, _Rule] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-plain": _dirichlet_plain,
    "dirichlet-dominant": _dirichlet_dominant,
    "classes": _classes,
    "missing": _missing,
    "dominant": _dominant,
    "quantity": _quantity,
}
