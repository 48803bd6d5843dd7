"""FEMNIST, on JSON files as LEAF's scripts write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fedsynth.data.load import load_dataset
from fedsynth.errors import DataFilesCorruptError

RNG = np.random.default_rng(0)
Content = dict[str, Any]


def writer(n: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    return RNG.integers(0, 256, (n, 784), dtype=np.uint8), RNG.integers(0, 62, n).tolist()


def leaf(writers: dict[str, tuple[npt.NDArray[np.uint8], list[int]]]) -> Content:
    """LEAF divides grey levels by 255."""
    data = {name: {"x": (x / 255).tolist(), "y": y} for name, (x, y) in writers.items()}
    return {
        "users": list(writers),
        "num_samples": [len(y) for _, y in writers.values()],
        "user_data": data,
    }


def save(root: Path, split: str, number: int, content: object) -> Path:
    path = root / "femnist" / split / f"all_data_{number}_niid_0_keep_0_{split}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


TRAIN = {
    name: writer(n)
    for name, n in (("f0009_02", 3), ("f0001_41", 5), ("f0100_00", 2), ("f0011_13", 4))
}
TEST = {name: writer(1) for name in ("f0011_13", "f0009_02", "f0001_41")} | {"f0000_14": writer(2)}


@pytest.fixture
def femnist(tmp_path: Path) -> Path:
    """Four writers in two files; one of the test split's did not train."""
    first, second = (dict(list(TRAIN.items())[k : k + 2]) for k in (0, 2))
    save(tmp_path, "train", 0, leaf(second))
    save(tmp_path, "train", 1, leaf(first))
    save(tmp_path, "test", 0, leaf(TEST))
    return tmp_path


def test_writers_by_name_and_pixels_as_leaf_has_them(femnist: Path) -> None:
    train, test = load_dataset("femnist", femnist)
    order = ["f0001_41", "f0009_02", "f0011_13", "f0100_00"]
    assert train.groups is not None
    assert train.groups.tolist() == [0] * 5 + [1] * 3 + [2] * 4 + [3] * 2
    assert np.array_equal(
        train.images.reshape(14, 784).numpy(), np.concatenate([TRAIN[name][0] for name in order])
    )
    assert train.labels.tolist() == [label for name in order for label in TRAIN[name][1]]
    assert train.images.dtype == torch.uint8
    assert test.groups is not None
    # the writer who did not train comes after those who did
    assert test.groups.tolist() == [
        0,
        1,
        2,
        4,
        4,
    ]
    assert test.labels.tolist()[-2:] == TEST["f0000_14"][1]


def test_pixels_are_rounded_and_white_stays_white(tmp_path: Path) -> None:
    content = leaf({"w": writer(1)})
    content["user_data"]["w"]["x"][0][:5] = [1, 0, 0.5, 0.4999 / 255, 254.5001 / 255]
    for split in ("train", "test"):
        save(tmp_path, split, 0, content)
    train, _ = load_dataset("femnist", tmp_path)
    assert train.images[0, 0, 0, :5].tolist() == [255, 0, 128, 0, 255]


def damaged(**changes: Any) -> Content:
    """One writer's file with something else in its place: `x` or `y`, or a key of the file."""
    content = leaf({"w": writer(2)})
    for key, value in changes.items():
        if key in ("x", "y"):
            content["user_data"]["w"][key] = value
        else:
            content[key] = value
    return content


ROW = [0.5] * 784


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "is no file of LEAF"),
        (damaged(users={"w": 1}), "is no file of LEAF"),
        (damaged(users=["v"]), "must speak of the same writers"),
        (damaged(num_samples=[2, 3]), "must speak of the same writers, got 1, 2 and 1"),
        (damaged(user_data={"w": [1]}), "writer 'w': must have x and y"),
        (damaged(num_samples=[3]), r"got \[2, 784\], \[2\] and 3"),
        (damaged(y=[1]), r"got \[2, 784\], \[1\] and 2"),
        (
            damaged(x=[ROW[1:]] * 2),
            r"x must be n images of 784 numbers and y n labels, n = num_samples; got \[2, 783\]",
        ),
        (damaged(x=[ROW, ROW[1:]]), "the rows of x have several lengths"),
        (
            damaged(x=[], y=[], num_samples=[0]),
            "x is empty or no list; a writer without examples does not belong in the file",
        ),
        (damaged(x=[ROW, [*ROW[1:], None]]), "x must hold numbers only"),
        (damaged(x=[ROW, [*ROW[1:], float("nan")]]), "1 of 1568 pixels are not numbers in"),
        (damaged(x=[ROW, [*ROW[2:], float("inf"), -1e-9]]), "2 of 1568 pixels are not numbers in"),
        (damaged(x=[ROW, [*ROW[1:], 255]]), "1 of 1568 pixels are not numbers in"),
        (damaged(y=[0, 62]), r"labels must be whole numbers in \[0, 62\)"),
        (damaged(y=[0, 1.5]), "labels must be whole numbers"),
        (damaged(y=[0, 2**70]), "y must hold numbers only"),
        (damaged(y=[True, False]), "y must hold numbers only"),
    ],
)
def test_a_file_that_is_none(femnist: Path, content: object, message: str) -> None:
    path = save(femnist, "train", 2, content)
    with pytest.raises(DataFilesCorruptError, match=message) as error:
        load_dataset("femnist", femnist)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"<html>404</html>", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json(femnist: Path, content: bytes) -> None:
    path = save(femnist, "test", 5, {})
    path.write_bytes(content)
    with pytest.raises(DataFilesCorruptError, match=r"test_9.json cannot be read as JSON"):
        load_dataset("femnist", femnist)


def test_a_writer_in_two_files(femnist: Path) -> None:
    save(femnist, "train", 2, leaf({"f0100_00": writer(1)}))
    with pytest.raises(
        DataFilesCorruptError, match=r"writer 'f0100_00' is in another file of .*train too"
    ):
        load_dataset("femnist", femnist)
