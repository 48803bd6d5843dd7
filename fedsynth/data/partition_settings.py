"""The settings of a partition of a data set over clients: its kind and parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError, unknown_value

EXPLICIT = "given"  # the kind of a partition that the caller passes to `simulate`
DOMAIN, NATURAL = "domain", "natural"
BY_LABELS = (
    "iid",
    "dirichlet",
    "dirichlet-plain",
    "dirichlet-dominant",
    "classes",
    "missing",
    "dominant",
    "quantity",
)
"""The kinds that need only labels."""
MOST_CLIENTS = 200_000


@dataclass(frozen=True)
class PartitionSettings:
    """The settings of a partition of examples over clients.

    Args:
        kind: the rule.
            `iid`: at random, sizes equal (±1).
            `dirichlet`: Dirichlet shares of each class, with balance mask and redraws.
            `dirichlet-plain`: the same without balance mask and redraws.
            `dirichlet-dominant`: Dirichlet shares of each class, the largest for a client that
            dominates none yet (FedKF's public code, and so its paper's tables).
            `classes`: c classes per client, each class split evenly among those that have it.
            `missing`: the complement: m classes are missing at each client, every class at about
            equally many clients.
            `dominant`: clients of equal size; a fixed share of each client's examples is of its few
            dominant classes, the rest of all others.
            `quantity`: quantity skew: Dirichlet sizes, the same class mix for all.
            `domain`: feature skew: each client has examples of one domain; several clients of a
            domain share its examples evenly.
            `natural`: clients come with the data (writers, devices; domains if the data set has
            no such groups): each is one group. With fewer clients than groups, a random subset of
            the groups is used, as LEAF subsamples writers.
        clients: number of clients K ≥ 1.
        alpha: concentration > 0 of the three Dirichlet kinds and of `quantity`; smaller is more
            skewed.
        classes_per_client: classes of each client in `classes`, ≥ 1.
        missing_classes: classes that each client lacks in `missing`, ≥ 1.
        dominant_classes: number of a client's dominant classes in `dominant`, ≥ 1.
        dominant_share: share in (0, 1) of a client's examples in its dominant classes.
            FedFM's public code, for 10 clients: 0.46 of 1, 10 and 20 classes on CIFAR-10, CIFAR-100
            and Tiny-ImageNet, 0.5 of 1 class on CINIC-10.
        min_size: minimum number of examples ≥ 0 of a client, in `dirichlet` and `quantity`.
        subset: share of each class's examples that is used, drawn at random. FedKF uses 10 % of
            EMNIST.
        local_test: share of each client's examples in its own test split (for AMP, FM, WLP).
            They are drawn one by one; FedKF: 0.2. The data set's test set is unchanged (the paper
            does not state whether it pools the two).
        seed: the partition's seed; None uses the run's seed (0 outside a run).

    Raises:
        UnknownNameError: `kind` is unknown.
        SettingError: a number is outside its range.

    >>> import numpy as np
    >>> from fedsynth.data.partition import partition
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
        if self.kind not in (*BY_LABELS, DOMAIN, NATURAL, EXPLICIT):
            raise unknown_value("partition", "kind", self.kind, (*BY_LABELS, DOMAIN, NATURAL))
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
    """Returns the number of pieces of the data set: K, or the published number of groups if the
    clients are a subset of them (`natural`)."""
    return max(
        settings.clients, (spec.groups or len(spec.domains)) if settings.kind == NATURAL else 0
    )
