"""Records of users: bounded contributions, splits by user and by record, and hashes of records."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsynth.data.images import ImageData, from_arrays, record_digests
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import bounded, check_one_client_each, hold_out
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, PartitionError
from fedsynth.federation.run_data import Clients

SPEC = dataset_spec("digits")


def people(users: np.ndarray, seed: int = 0) -> ImageData:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (len(users), 1, 8, 8)).astype(np.uint8)
    data = from_arrays(images, rng.integers(0, 10, len(users)), SPEC)
    return ImageData(data.images, data.labels, SPEC, None, torch.from_numpy(users))


def test_bounded_keeps_at_most_m_records_per_user() -> None:
    users = np.repeat([3, 0, 8], [10, 2, 5])
    data = people(users)
    selected = bounded(np.arange(17), data, 4, 0)
    assert np.bincount(users[selected], minlength=9)[[3, 0, 8]].tolist() == [4, 2, 4]
    assert bounded(np.arange(17), data, 10, 0).tolist() == list(range(17))
    assert bounded(np.arange(17), data, 4, 1).tolist() != selected.tolist()
    assert bounded(np.arange(0), data, 4, 0).tolist() == []


def test_bounded_is_independent_of_other_users() -> None:
    """Removing another user and reordering the records keep the selection."""
    users = np.repeat([0, 1, 2], [30, 20, 30])
    data = people(users)
    selected = set(bounded(np.arange(80), data, 5, 0).tolist())
    rest = np.flatnonzero(users != 1)[::-1].copy()
    reduced = rest[bounded(np.arange(60), data.subset(rest), 5, 0)]
    assert set(reduced.tolist()) == {i for i in selected if users[i] != 1}


def test_local_splits_are_disjoint_with_given_share() -> None:
    """Equal records are in the same split, also from different files; the label is part of a record."""
    data = people(np.zeros(3000, np.int64))
    parts = [np.arange(2000), np.array([2001]), np.array([], np.int64), np.arange(2100, 3000)]
    training, testing = hold_out(parts, 0.2, 0, data)
    for part, a, b in zip(parts, training, testing, strict=True):
        assert sorted([*a, *b]) == part.tolist()
    assert 330 < len(testing[0]) < 470
    assert hold_out(parts, 0.2, 1, data)[1][0].tolist() != testing[0].tolist()
    labelled = ImageData(data.images, (data.labels + 1) % 10, data.spec)
    assert hold_out(parts, 0.2, 0, labelled)[1][0].tolist() != testing[0].tolist()
    twice = data.subset(np.concatenate([np.arange(200)[::-1], np.arange(200)]))
    files = torch.arange(400).view(-1, 1).view(torch.uint8)
    for side in hold_out([np.arange(400)], 0.3, 0, replace(twice, record_bytes=files)):
        assert len(side[0]) > 0
        assert set((399 - side[0]).tolist()) == set(side[0].tolist())


@pytest.mark.parametrize("by_user", [False, True])
def test_removing_record_or_user_keeps_other_splits(by_user: bool) -> None:
    """Later records are renumbered; users are numbered by sorted names (users.csv, LEAF)."""
    users = np.repeat(np.arange(100), 3) if by_user else np.zeros(300, np.int64)
    data = people(users)
    (training,), (testing,) = hold_out([np.arange(300)], 0.3, 0, data, by_user=by_user)
    assert 0.15 < len(testing) / 300 < 0.45
    assert not by_user or not set(users[training]) & set(users[testing])
    for removed in (0, 50, 99):
        drop = np.flatnonzero(users == removed) if by_user else np.array([removed])
        rest = np.delete(np.arange(300), drop)[::-1].copy()
        subset = data.subset(rest)
        groups = subset.groups - (subset.groups > removed).long()
        renumbered = ImageData(subset.images, subset.labels, SPEC, None, groups)
        (train,), _ = hold_out([np.arange(len(rest))], 0.3, 0, renumbered, by_user=by_user)
        assert set(rest[train].tolist()) == set(training.tolist()) - set(drop.tolist())
    assert hold_out([np.arange(0)], 0.3, 0, data, by_user=by_user)[0][0].tolist() == []


def test_users_of_two_clients_are_rejected() -> None:
    data = people(np.array([0, 0, 1, 1]))
    check_one_client_each([np.array([0, 1]), np.array([2, 3])], data)
    with pytest.raises(DataError, match=r"groups= to from_arrays, or put a file users\.csv"):
        bounded(np.arange(3), ImageData(data.images, data.labels, SPEC), 1, 0)
    with pytest.raises(PartitionError, match="clients 0 and 1 have records of the same user"):
        check_one_client_each([np.array([0]), np.array([1, 2, 3])], data)


# ------------------------------------------------------------------------------- hashes of records


KEY = bytes(range(32))


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load_dataset("digits")[0]


def test_digests_are_blake2b_of_pixels_and_label(digits: ImageData, device: torch.device) -> None:
    positions = np.array([3, 0, 1437, 3])
    digests = record_digests(digits.to(device), positions, KEY, 20)
    assert digests.shape == (4, 20)
    for position, digest in zip(positions, digests, strict=True):
        label = int(digits.labels[position]).to_bytes(8, "little")
        record = digits.images[position].numpy().tobytes() + label
        by_hand = hashlib.blake2b(record, key=KEY, digest_size=20, person=b"fedsynth record")
        assert digest.tobytes() == by_hand.digest()


def test_digests_are_independent_of_position(digits: ImageData) -> None:
    """Also across the chunks in which records are copied."""
    order = np.random.default_rng(0).permutation(5000) % len(digits)
    repeated = ImageData(digits.images[order], digits.labels[order], digits.spec)
    expected = record_digests(digits, np.arange(len(digits)), KEY)
    assert np.array_equal(record_digests(repeated, np.arange(5000), KEY), expected[order])
    assert len(np.unique(expected, axis=0)) == len(digits)  # all digits differ
    assert record_digests(digits, np.arange(0), KEY).shape == (0, 16)


def test_label_pixel_and_key_change_digest(digits: ImageData) -> None:
    images = digits.images[:1].repeat(3, 1, 1, 1)
    images[1, 0, 7, 7] ^= 1
    labels = digits.labels[:1].repeat(3)
    labels[2] = (labels[2] + 1) % 10
    data = ImageData(images, labels, digits.spec)
    digests = np.concatenate(
        [record_digests(data, np.arange(3), key) for key in (KEY, b"another key")]
    )
    assert len(np.unique(digests, axis=0)) == 6
    unlabelled = record_digests(data, np.arange(3), KEY, labels=False)
    assert np.array_equal(unlabelled[0], unlabelled[2])
    assert len(np.unique(unlabelled, axis=0)) == 2


def test_client_digests_ignore_labels(digits: ImageData) -> None:
    """A second study on the same images continues their spent budget."""
    relabelled = ImageData(digits.images, 9 - digits.labels, digits.spec)
    parts = [np.arange(5), np.arange(5, 9)]
    digests = Clients(digits, parts).digests(KEY)
    assert [len(first) for first in digests] == [5, 4]
    for first, second in zip(digests, Clients(relabelled, parts).digests(KEY), strict=True):
        assert np.array_equal(first, second)
