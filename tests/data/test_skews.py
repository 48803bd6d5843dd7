"""The partitions `dominant`, `missing`, `quantity` and `natural`: against FedFM's and NIID-Bench's
public code, in numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.data.label_skew import dominated_dirichlet
from fedsynth.data.partition import count_matrix, partition
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.errors import PartitionError
from fedsynth.seeding import numpy_generator

IntArray = npt.NDArray[np.int64]
MNIST = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def counts_of(sizes: npt.ArrayLike, wish: PartitionSettings) -> IntArray:
    y = np.repeat(np.arange(len(np.asarray(sizes))), sizes)
    return count_matrix(y, partition(y, wish, len(np.asarray(sizes))), len(np.asarray(sizes)))


@pytest.mark.parametrize(
    ("classes", "each", "dominant", "many", "few"),
    [(10, 5000, 1, 2300, 300), (200, 500, 20, 230, 30)],
)
def test_dominant_gives_the_counts_of_fedfms_code(
    classes: int, each: int, dominant: int, many: int, few: int
) -> None:
    """CIFAR-10 and Tiny-ImageNet over 10 clients, by pytorch/utils.py, noniid-2."""
    wish = PartitionSettings(kind="dominant", dominant_classes=dominant, seed=3)
    counts = counts_of(np.full(classes, each), wish)
    assert set(counts.flatten().tolist()) == {many, few}
    assert ((counts == many).sum(axis=1) == dominant).all()
    assert ((counts == many).sum(axis=0) == 1).all()  # each class dominates one client, as there


def test_dominant_of_uneven_classes_has_its_shares_and_sizes() -> None:
    wish = PartitionSettings(kind="dominant", clients=10, dominant_share=0.5, seed=1)
    counts = counts_of(MNIST, wish)
    assert (counts.sum(axis=1) == 6000).all()
    assert np.array_equal(counts.sum(axis=0), MNIST)
    assert (counts.max(axis=1) == 3000).all()
    owner = counts.argmax(axis=1)
    assert sorted(owner) == list(range(10))
    # What is left of a class spreads over the nine others: rows of 3,000, columns of n_c − 3,000,
    # and as even as these allow, which is to say x_kc = a_k·b_c outside the dominant cells: cross
    # ratios are 1, but for the rounding of numbers around 330.
    x = counts[np.argsort(owner)].astype(float)
    for i, j, k, m in ((0, 1, 2, 3), (4, 7, 5, 9), (8, 2, 6, 1), (3, 9, 0, 5)):
        assert x[i, k] * x[j, m] / (x[i, m] * x[j, k]) == pytest.approx(1, abs=4 / 300)
    assert x[0, 1] > x[0, 5] + 50  # of the larger class there is more


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 1000))
def test_missing_is_balanced(clients: int, missing: int, seed: int) -> None:
    wish = PartitionSettings(kind="missing", clients=clients, missing_classes=missing, seed=seed)
    if clients * (10 - missing) < 10:
        with pytest.raises(PartitionError, match="cannot cover 10 classes: raise clients to"):
            counts_of(np.full(10, 61), wish)
        return
    lacks = counts_of(np.full(10, 61), wish) == 0
    assert (lacks.sum(axis=1) == missing).all()
    assert np.ptp(lacks.sum(axis=0)) <= 1
    assert lacks.sum(axis=0).max() < clients


def test_quantity_is_niid_benchs_rule() -> None:
    """utils.py, iid-diff-quantity: shares from Dir(β) until the smallest is large enough, cut at
    ⌊cumsum(p)·N⌋."""
    y, redraws = np.arange(2000) % 7, 0
    for seed in range(20):
        wish = PartitionSettings(kind="quantity", clients=6, alpha=0.5, min_size=15, seed=seed)
        rng, sizes = numpy_generator(seed, "partition"), np.zeros(6)
        while sizes.min() < 15:
            cuts = (np.cumsum(rng.dirichlet(np.full(6, 0.5))) * 2000).astype(int)
            sizes, redraws = np.diff(cuts[:-1], prepend=0, append=2000), redraws + 1
        assert [len(part) for part in partition(y, wish, 7)] == sizes.tolist()
    assert redraws > 40  # the least size is what decides here


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0])
def test_every_client_dominates_a_class_before_any_dominates_two(alpha: float) -> None:
    """EMNIST's 26 letters over 20 clients: the first 20 letters have different largest holders, the
    last six too."""
    for seed in range(5):
        wish = {"clients": 20, "alpha": alpha, "seed": seed}
        counts = counts_of(np.full(26, 1000), PartitionSettings(kind="dirichlet-dominant", **wish))
        largest = counts.argmax(axis=0).tolist()
        assert sorted(largest[:20]) == list(range(20))
        assert len(set(largest[20:])) == 6
        plain = counts_of(np.full(26, 1000), PartitionSettings(kind="dirichlet-plain", **wish))
        assert len(set(plain.argmax(axis=0).tolist()[:20])) < 20  # some client dominates nothing


def test_more_clients_than_classes_come_in_groups() -> None:
    """Ten clients, four classes: groups of 4, 4 and 2, with 400, 400 and 200 of each class of
    1000."""
    counts = counts_of(
        np.full(4, 1000), PartitionSettings(kind="dirichlet-dominant", clients=10, alpha=0.1)
    )
    for group, share in ((slice(0, 4), 400), (slice(4, 8), 400), (slice(8, 10), 200)):
        assert counts[group].sum(axis=0).tolist() == [share] * 4
    assert sorted(counts[:4].argmax(axis=0).tolist()) == [0, 1, 2, 3]
    assert sorted(counts[4:8].argmax(axis=0).tolist()) == [0, 1, 2, 3]
    last = counts[8:].argmax(axis=0).tolist()
    assert sorted(last[:2]) == sorted(last[2:]) == [0, 1]


def test_dominated_dirichlet_is_the_redrawn_one_of_fedkfs_code() -> None:
    """Its rule word by word, with redraws: the same means of each class's sorted shares, and of the
    largest's square."""
    rng, draws, K, size = np.random.default_rng(0), 3000, 3, 10_000

    def redrawn() -> IntArray:
        counts, flags = np.zeros((K, 4), np.int64), np.zeros(K, bool)
        for label in range(4):
            p = rng.dirichlet(np.full(K, 0.5))
            while flags[p.argmax()]:
                p = rng.dirichlet(np.full(K, 0.5))
            flags[p.argmax()] = True
            if flags.all():
                flags[:] = False
            counts[:, label] = p * size
        return counts

    def moments(made: list[IntArray]) -> npt.NDArray[np.float64]:
        shares = np.array(made) / size
        by_rank = np.sort(shares, axis=1).mean(axis=0)
        apart = np.abs(shares[:, :, 0] - shares[:, :, 1]).mean()
        return np.array([*by_rank.ravel(), (shares.max(axis=1) ** 2).mean(), apart])

    sizes = np.full(4, size)
    wish = PartitionSettings(clients=K, alpha=0.5)
    mine = [dominated_dirichlet(sizes, wish, rng) for _ in range(draws)]
    np.testing.assert_allclose(moments(mine), moments([redrawn() for _ in range(draws)]), atol=0.02)


GROUPS = np.array([5, 2, 9, 2, 5, 5, 9, 0])
ZEROS = np.zeros(8, np.int64)


def natural(clients: int, seed: int = 0, **origins: IntArray) -> list[list[int]]:
    wish = PartitionSettings(kind="natural", clients=clients, seed=seed)
    return [part.tolist() for part in partition(ZEROS, wish, 1, **origins)]


def test_natural_with_some_groups_leaves_the_others_out() -> None:
    everyone = natural(4, groups=GROUPS)
    assert everyone == [[7], [1, 3], [0, 4, 5], [2, 6]]  # of groups 0, 2, 5 and 9
    assert natural(4, domains=GROUPS) == natural(4, groups=GROUPS, domains=ZEROS) == everyone
    drawn = {tuple(map(everyone.index, natural(2, seed, groups=GROUPS))) for seed in range(200)}
    assert drawn == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 2**40)
)
def test_natural_clients_are_groups(groups: list[int], clients: int, seed: int) -> None:
    y, g = np.zeros(len(groups), np.int64), np.array(groups)
    wish = PartitionSettings(kind="natural", clients=clients, seed=seed)
    if clients > len(set(groups)):
        with pytest.raises(PartitionError, match="but only"):
            partition(y, wish, 1, groups=g)
        return
    parts = partition(y, wish, 1, groups=g)
    whose = [set(g[part].tolist()) for part in parts]
    assert len(whose) == clients == len(set.union(*whose))
    for part, (group,) in zip(parts, whose, strict=True):
        assert part.dtype == np.int64
        assert np.array_equal(part, np.flatnonzero(g == group))


def test_natural_of_a_subset_has_the_groups_that_are_left() -> None:
    wish = PartitionSettings(kind="natural", clients=2, subset=0.5)
    groups = np.repeat([3, 8], 50)
    parts = partition(np.zeros(100, np.int64), wish, 1, groups=groups)
    assert [set(groups[part].tolist()) for part in parts] == [{3}, {8}]
    assert sum(map(len, parts)) == 50
    both = partition(np.zeros(100, np.int64), wish, 1, domains=np.arange(100) % 2, groups=groups)
    assert [part.tolist() for part in both] == [part.tolist() for part in parts]


def test_natural_that_cannot_be() -> None:
    with pytest.raises(
        PartitionError,
        match="there are 5 clients but only 4 groups in this data set: lower clients to at most 4",
    ):
        natural(5, groups=GROUPS)
    with pytest.raises(PartitionError, match="needs a data set with groups"):
        natural(2)
