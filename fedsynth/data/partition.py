"""Who has which examples: partitions of a label array over clients, as the field makes them. Every
rule is seeded.

The settings, and what every rule shares: checks, and a subset of each class. The rules themselves
are in `partition_rules.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsynth.data.partition_rules import RULES, IntArray, of_domains, of_groups
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError, PartitionError, SettingError, unknown_value
from fedsynth.seeding import numpy_generator

GIVEN = "given"  # the kind of a partition that the caller of `simulate` brings along
DOMAIN, NATURAL = "domain", "natural"
MOST_CLIENTS = 200_000


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
        if self.kind not in (*RULES, DOMAIN, NATURAL, GIVEN):
            raise unknown_value("partition", "kind", self.kind, (*RULES, DOMAIN, NATURAL))
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
