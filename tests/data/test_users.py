"""Whose records are whose: bounded contributions, splits by user, partitions, and users.csv."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.data.image_folders import read_office_caltech
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.partition import bounded, check_one_client_each, hold_out
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, PartitionError

SPEC = dataset_spec("digits")


def people(users: np.ndarray, seed: int = 0) -> ImageData:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (len(users), 1, 8, 8)).astype(np.uint8)
    data = from_arrays(images, rng.integers(0, 10, len(users)), SPEC)
    return ImageData(data.images, data.labels, SPEC, None, torch.from_numpy(users))


def test_at_most_m_records_of_a_user_stay() -> None:
    users = np.repeat([3, 0, 8], [10, 2, 5])
    data = people(users)
    kept = bounded(np.arange(17), data, 4, 0)
    assert np.bincount(users[kept], minlength=9)[[3, 0, 8]].tolist() == [4, 2, 4]
    assert bounded(np.arange(17), data, 10, 0).tolist() == list(range(17))
    assert bounded(np.arange(17), data, 4, 1).tolist() != kept.tolist()
    assert bounded(np.arange(0), data, 4, 0).tolist() == []


def test_the_choice_depends_only_on_a_users_records() -> None:
    """Without another user, and in another order, the same records stay."""
    users = np.repeat([0, 1, 2], [30, 20, 30])
    data = people(users)
    kept = set(bounded(np.arange(80), data, 5, 0).tolist())
    rest = np.flatnonzero(users != 1)[::-1].copy()
    alone = rest[bounded(np.arange(60), data.subset(rest), 5, 0)]
    assert set(alone.tolist()) == {i for i in kept if users[i] != 1}


def test_local_splits_do_not_cut_users() -> None:
    users = np.random.default_rng(1).integers(0, 200, 3000)
    data = people(users)
    (training,), (testing,) = hold_out([np.arange(3000)], 0.3, 0, data, by_user=True)
    assert not set(users[training]) & set(users[testing])
    assert 0.15 < len(testing) / 3000 < 0.45
    rest = np.flatnonzero(users != 5)
    (fewer,), _ = hold_out([np.arange(len(rest))], 0.3, 0, data.subset(rest), by_user=True)
    assert set(rest[fewer].tolist()) == set(training.tolist()) - set(np.flatnonzero(users == 5))


def test_a_user_more_moves_no_other_user_to_the_other_split() -> None:
    """Users are numbered by their sorted names (users.csv, LEAF): one whose name comes first
    renumbers all others."""
    users = np.repeat(np.arange(100), 3)
    data = people(users)
    (training,), _ = hold_out([np.arange(300)], 0.3, 0, data, by_user=True)
    rest = np.arange(3, 300)[::-1].copy()
    fewer = data.subset(rest)
    renumbered = ImageData(fewer.images, fewer.labels, SPEC, None, fewer.groups - 1)
    (less,), _ = hold_out([np.arange(297)], 0.3, 0, renumbered, by_user=True)
    assert set(rest[less].tolist()) == set(training.tolist()) - {0, 1, 2}
    assert hold_out([np.arange(0)], 0.3, 0, data, by_user=True)[0][0].tolist() == []


def test_a_user_of_two_clients_is_refused() -> None:
    data = people(np.array([0, 0, 1, 1]))
    check_one_client_each([np.array([0, 1]), np.array([2, 3])], data)
    with pytest.raises(PartitionError, match="clients 0 and 1 have records of the same user"):
        check_one_client_each([np.array([0]), np.array([1, 2, 3])], data)


def test_data_without_user_ids() -> None:
    data = people(np.zeros(3, np.int64))
    with pytest.raises(DataError, match=r"groups= to from_arrays, or put a file users\.csv"):
        bounded(np.arange(3), ImageData(data.images, data.labels, SPEC), 1, 0)


def test_folders_of_images_take_their_users_from_the_file(files: Any) -> None:
    spec = dataset_spec("office-caltech-10")
    files.write_office_caltech()
    train, _ = read_office_caltech(spec, files.root)
    assert train.groups is None
    root = files.root / "office_caltech_10"
    lines = ["path,user"]
    for path in sorted(root.rglob("*.png")):
        place = path.relative_to(root)
        lines.append(f"{place.as_posix()},{place.parts[0]}-{int(path.stem[-1]) % 2}")
    (root / "users.csv").write_text("\n".join(lines))
    train, test = read_office_caltech(spec, files.root)
    assert test.groups is None
    assert train.groups is not None
    assert len(np.unique(train.groups)) == 2 * len(spec.domains)
    assert train.groups[:4].tolist() == [0, 1, 0, 1]
