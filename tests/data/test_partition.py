"""The partition rules: properties for all label arrays, the errors, and FedDM's Table 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.data import label_skew
from fedsynth.data.partition import count_matrix, partition
from fedsynth.data.partition_settings import BY_LABELS, PartitionSettings
from fedsynth.errors import DataError, PartitionError

IntArray = npt.NDArray[np.int64]
CLASSES = 6
KINDS = BY_LABELS

label_arrays = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=200).map(
    lambda y: np.array(y, dtype=np.int64)
)
wishes = st.builds(
    PartitionSettings,
    kind=st.sampled_from(KINDS),
    clients=st.integers(1, 12),
    alpha=st.floats(1e-6, 1e6),
    classes_per_client=st.integers(1, CLASSES),
    missing_classes=st.integers(1, CLASSES),
    dominant_classes=st.integers(1, CLASSES),
    dominant_share=st.floats(0.01, 0.99),
    min_size=st.integers(0, 5),
    seed=st.integers(0, 2**40),
)


def balanced(classes: int, each: int) -> IntArray:
    return np.repeat(np.arange(classes), each)


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impossible wishes should cost the tests little."""
    monkeypatch.setattr(label_skew, "MAX_TRIES", 300)


@settings(max_examples=200, deadline=None)
@given(label_arrays, wishes)
def test_every_example_is_assigned_exactly_once(y: IntArray, wish: PartitionSettings) -> None:
    try:
        parts = partition(y, wish, CLASSES)
    except PartitionError:
        even = ("iid", "dirichlet-plain", "dirichlet-dominant")
        assert wish.kind not in even or wish.clients > len(y)
        return  # which other wishes may be refused is tested below
    assert len(parts) == wish.clients
    assert all(part.dtype == np.int64 and np.array_equal(part, np.unique(part)) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    counts = count_matrix(y, parts, CLASSES)
    assert np.array_equal(counts.sum(axis=0), np.bincount(y, minlength=CLASSES))
    assert np.array_equal(counts.sum(axis=1), [len(part) for part in parts])
    if wish.kind in ("dirichlet", "quantity"):
        assert min(map(len, parts)) >= wish.min_size
    if wish.kind in ("iid", "dominant"):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    y = balanced(CLASSES, 50)

    def parts(seed: int) -> list[list[int]]:
        wish = PartitionSettings(kind=kind, clients=4, classes_per_client=3, seed=seed)
        return [part.tolist() for part in partition(y, wish, CLASSES)]

    state = np.random.get_state()  # noqa: NPY002 (it is what must not change)
    assert parts(5) == parts(5)
    assert parts(5) != parts(6)
    assert np.array_equal(np.random.get_state()[1], state[1])  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-plain", "dirichlet-dominant"])
@pytest.mark.parametrize("alpha", [1e7, 1e300])
def test_large_alpha_tends_to_iid(kind: str, alpha: float) -> None:
    # A share has mean 1/K and standard deviation below 1/sqrt(α K) ~ 2e-4 at α = 1e7, so of 1,000
    # examples the counts differ from 1000/K by the rounding of two cuts and little else. The mask
    # can act in the last class only, because nobody holds N/K before.
    K, each = 5, 1000
    for seed in range(10):
        wish = PartitionSettings(kind=kind, clients=K, alpha=alpha, seed=seed)
        counts = count_matrix(balanced(10, each), partition(balanced(10, each), wish, 10), 10)
        left = K - 1 if kind == "dirichlet-dominant" else 0  # of rounding: one client gets it all
        assert np.abs(counts[:, :9] - each / K).max() <= 3 + left
        assert np.abs(counts.sum(axis=1) - 10 * each / K).max() <= 30


def test_the_balance_mask_closes_full_clients() -> None:
    # A client that reached N/K gets nothing of later classes, so what it has beyond N/K comes from
    # one class.
    y = balanced(10, 500)
    for seed in range(20):
        counts = count_matrix(
            y, partition(y, PartitionSettings(clients=8, alpha=0.3, seed=seed), 10), 10
        )
        before = np.cumsum(counts, axis=1) - counts
        assert not counts[before >= len(y) / 8].any()


@pytest.mark.parametrize("alpha", [1e-300, 1e-9, 1e-5])
def test_vanishing_alpha_gives_each_class_to_one_client(alpha: float) -> None:
    for kind in ("dirichlet", "dirichlet-plain", "dirichlet-dominant"):
        wish = PartitionSettings(kind=kind, clients=5, alpha=alpha, min_size=0)
        counts = count_matrix(balanced(10, 100), partition(balanced(10, 100), wish, 10), 10)
        assert (counts.max(axis=0) > 95).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 1000))
def test_c_classes_per_client(clients: int, c: int, seed: int) -> None:
    each = 61
    y = balanced(10, each)
    wish = PartitionSettings(kind="classes", clients=clients, classes_per_client=c, seed=seed)
    if clients * c < 10:
        with pytest.raises(PartitionError, match="cannot cover 10 classes"):
            partition(y, wish, 10)
        return
    counts = count_matrix(y, partition(y, wish, 10), 10)
    held = counts > 0
    assert (held.sum(axis=1) == c).all()
    holders = held.sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for label in range(10):
        shares = counts[held[:, label], label]
        assert shares.max() - shares.min() <= 1
        assert shares.sum() == each


@pytest.mark.parametrize(
    ("sizes", "wish", "message"),
    [
        ([2] * 6, {"kind": "iid", "clients": 20}, "there are 20 clients but only 12 examples"),
        (
            [10] * 9,
            {"min_size": 10},
            "need 100 in total, but there are 90: lower min_size or clients",
        ),
        # nearly one client per class at α = 0.001: 40 clients cannot all have 10 examples
        ([100] * 10, {"clients": 40, "alpha": 0.001}, r"in 300 tries at alpha=0\.001: raise alpha"),
        (
            [0, 30, 30, 30],
            {"kind": "classes", "clients": 3, "classes_per_client": 4},
            "only 3 classes have examples",
        ),
        (
            [50, 3],
            {"kind": "classes", "clients": 8, "classes_per_client": 2},
            "class 1 has 3 examples, too few for the 8 clients",
        ),
        (
            [100] * 10,
            {"kind": "dominant", "clients": 4},
            r"class \d has 100 examples, but needs 115 to dominate at 1 of 4 clients: lower",
        ),
        (
            [100, 0, 100],
            {"kind": "dominant", "dominant_classes": 2},
            "dominant_classes must be below 2, the number of classes with examples, got 2",
        ),
        (
            [100] * 4,
            {"kind": "dominant", "dominant_share": 0.25},
            "dominant_share must be above 0.25, the share of 1 of 4 classes in an even partition",
        ),
        (
            [220, 40, 40],
            {"kind": "dominant", "clients": 3, "dominant_share": 0.4},
            "no partition with clients of equal size has this dominant_share",
        ),
        (
            [9, 0, 9, 9],
            {"kind": "missing", "clients": 3, "missing_classes": 3},
            "only 3 classes have examples: lower missing_classes",
        ),
        (
            [90, 3],
            {"kind": "missing", "clients": 18, "missing_classes": 1},
            r"class 1 has 3 examples, too few for the 9 clients .* lower clients or change missing_classes",
        ),
        ([900], {"kind": "quantity", "alpha": 0.001}, r"at alpha=0\.001: raise alpha, or lower"),
    ],
)
def test_wishes_that_cannot_be_met(sizes: list[int], wish: dict[str, Any], message: str) -> None:
    y = np.repeat(np.arange(len(sizes)), sizes)
    with pytest.raises(PartitionError, match=message):
        partition(y, PartitionSettings(**wish), len(sizes))


@pytest.mark.parametrize(
    "labels", [np.zeros(9), np.zeros((3, 3), int), np.array([0, 10]), np.array([-1, 0])]
)
def test_labels_that_are_none(labels: npt.NDArray[np.integer]) -> None:
    with pytest.raises(DataError, match="labels must"):
        partition(labels, PartitionSettings(clients=1), 10)


# The training sets' class sizes: CIFAR's are balanced, MNIST's are public.
CIFAR100, CIFAR10 = balanced(100, 500), balanced(10, 5000)
MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


@pytest.mark.parametrize(
    ("y", "alpha", "published"),
    [
        (CIFAR100, 0.5, 654), (CIFAR100, 0.1, 310), (CIFAR100, 0.01, 139),
        (CIFAR10, 0.5, 87), (CIFAR10, 0.1, 44), (CIFAR10, 0.01, 15),
        (MNIST, 0.5, 81), (MNIST, 0.1, 47), (MNIST, 0.01, 14),
    ],
)  # fmt: skip
def test_the_rule_gives_the_upload_sizes_of_feddms_table_3(
    y: IntArray, alpha: float, published: int
) -> None:
    """Table 3 ÷ (ipc × image size) is the number of (client, class) pairs with at least 10
    examples, K = 10.

    The paper's is one partition with an unknown seed, so it must lie within the spread over seeds.
    Over 200 seeds its nine numbers lie at most 1.9 standard deviations from our means; 2.5 leaves
    room for having 20 seeds here. The rule is not loose: to count every pair with an example gives
    887, 512 and 198 for CIFAR-100, more than ten deviations away.
    """
    classes = int(y.max()) + 1
    partitions = (
        partition(y, PartitionSettings(alpha=alpha, seed=seed), classes) for seed in range(20)
    )
    pairs = [int((count_matrix(y, parts, classes) >= 10).sum()) for parts in partitions]
    assert abs(np.mean(pairs) - published) < 2.5 * np.std(pairs, ddof=1)
