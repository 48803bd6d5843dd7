"""The settings for dividing a data set among clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import unknown_value
from fedsynth.validation import check_fields, in_range

EXPLICIT = "given"  # the kind of a partition passed to `simulate`
DOMAIN, NATURAL = "domain", "natural"
# The kinds that need only labels.
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

MAX_CLIENTS = 200_000


@dataclass(frozen=True)
class PartitionSettings:
    """The settings for dividing examples among clients.

    Args:
        kind: the rule by which the examples are divided.
            `iid` divides them at random into equal sizes (±1).
            `dirichlet` draws Dirichlet shares of each class. Clients that already have N/K examples
            get no more classes, and the partition is drawn again until each has `min_size`.
            `dirichlet-plain` draws Dirichlet shares of each class once, without these two rules.
            `dirichlet-dominant` draws Dirichlet shares of each class, and gives the largest share
            to a client that does not yet have the largest share of a class. FedKF's public code
            does this, and therefore the tables in its paper.
            `classes` gives each client a fixed number of classes, and splits each class evenly
            among the clients that have it.
            `missing` gives each client all classes except a fixed number. Every class is missing at
            about equally many clients.
            `dominant` makes clients of equal size. A fixed share of each client's examples comes
            from its few dominant classes, and the rest comes from all other classes.
            `quantity` draws the sizes of the clients from a Dirichlet distribution. All clients
            have about the same mix of classes.
            `domain` gives each client examples of one domain. Several clients with the same domain
            share its examples evenly.
            `natural` makes a client of each group in the data, such as a writer or device. If the
            data set has no groups, it makes a client of each domain. With fewer clients than
            groups, it draws the groups at random, as LEAF draws writers. It draws among the groups
            with at least `min_group` examples.
        clients: the number of clients K ≥ 1.
        alpha: the concentration > 0 of the Dirichlet kinds and of `quantity`. A smaller value gives
            a more skewed partition.
        classes_per_client: the number of classes ≥ 1 per client, for `classes`.
        missing_classes: the number of missing classes ≥ 1 per client, for `missing`.
        dominant_classes: the number of dominant classes ≥ 1 per client, for `dominant`.
        dominant_share: the share from 0 to 1 of a client's examples in its dominant classes.
            FedFM's public code, with 10 clients, uses a share of 0.46 with 1, 10 and 20 dominant
            classes on CIFAR-10, CIFAR-100 and Tiny-ImageNet, and 0.5 with 1 class on CINIC-10.
        min_size: the minimum number of examples ≥ 0 of a client, for `dirichlet` and `quantity`.
        min_group: the minimum number of examples ≥ 0 of a group, for `natural`, as LEAF's option
            -k.
        subset: the share of each class's examples that is used, drawn at random. FedKF uses 10 % of
            EMNIST.
        local_test: the share of each client's examples in its local test split (for AMP, FM, WLP).
            The choice is made independently for each example, or for each user if the data name
            users (`fedsynth.federation.run_data.divided`). FedKF uses 0.2. The test set of the
            data set stays unchanged. The paper does not state whether it merges the two.
        seed: the seed of the partition. None uses the run's seed, or 0 outside a run.

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
    clients: int = in_range(10, 1, MAX_CLIENTS)
    alpha: float = in_range(0.5, 1e-300)
    classes_per_client: int = in_range(2, 1)
    missing_classes: int = in_range(1, 1)
    dominant_classes: int = in_range(1, 1)
    dominant_share: float = in_range(0.46, 0, 1)
    min_size: int = in_range(10, 0)
    min_group: int = in_range(0, 0)
    subset: float = in_range(1.0, 1e-12, 1)
    local_test: float = in_range(0.0, 0, 0.999)
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*BY_LABELS, DOMAIN, NATURAL, EXPLICIT):
            raise unknown_value("partition", "kind", self.kind, (*BY_LABELS, DOMAIN, NATURAL))
        check_fields(self)


def clients_or_groups(settings: PartitionSettings, spec: DatasetSpec) -> int:
    """Returns the number of clients that a run may choose from.

    It is the number of clients K or, with `natural`, the published number of groups (or domains) if
    that is larger, because clients are then sampled from the groups.
    """
    return max(
        settings.clients, (spec.groups or len(spec.domains)) if settings.kind == NATURAL else 0
    )
