"""Data files that are there but are not what they claim to be, also on purpose."""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsynth.data.load import load_dataset
from fedsynth.errors import DataFilesCorruptError


def idx(shape: tuple[int, ...]) -> bytes:
    """An idx file of zeros."""
    sizes = b"".join(n.to_bytes(4, "big") for n in shape)
    return bytes([0, 0, 8, len(shape)]) + sizes + bytes(math.prod(shape))


def refused(name: str, root: Path, file: str, message: str) -> None:
    with pytest.raises(DataFilesCorruptError) as error:
        load_dataset(name, root)
    text = str(error.value)
    assert "\n" not in text
    assert file in text
    assert re.search(message, text), text


GOOD = idx((20, 28, 28))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no idx file of bytes: it starts with ,"),
        (GOOD[:-1], "its header .*15,680 bytes; it is truncated: it has 15679"),
        (GOOD + b"x", "has bytes left over"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "is no idx file of bytes"),
        (idx((20,)) + b"padding of some length", "is no idx file of bytes"),
        (idx((20, 32, 32)), r"cannot be used: .*got \[20, 1, 32, 32\]"),
        (idx((19, 28, 28)), "has 19 images but .* has 20 labels"),
        (GOOD[:4] + b"\xff" * 12, "announces .* such a file has at most 54,880,000"),
    ],
)
def test_corrupt_idx_images(files: Any, content: bytes, message: str, tmp_path: Path) -> None:
    files.write_idx("MNIST", ("train", "t10k"))
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(content)
    refused("mnist", tmp_path, "MNIST/raw/train-images-idx3-ubyte", message)


def test_idx_labels_outside_the_classes(files: Any, tmp_path: Path) -> None:
    files.write_idx("MNIST", ("train", "t10k"), first=1)
    message = r"labels must lie in \[0, 10\), 2 do not, the first is 10"
    refused("mnist", tmp_path, "train-labels-idx1-ubyte", message)
    files.write_idx("EMNIST", ("emnist-letters-train", "emnist-letters-test"), first=0)
    refused("emnist-letters", tmp_path, "emnist-letters-train-labels", "the first is -1")


def test_damaged_gzip(files: Any, tmp_path: Path) -> None:
    files.write_idx("MNIST", ("train", "t10k"), zipped=True)
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (whole[:-20], b"no gzip at all", bytes(flipped)):
        path.write_bytes(content)
        refused("mnist", tmp_path, path.name, "cannot be read")


ROWS = np.zeros((4, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a CIFAR batch"),
        (pickle.dumps([1, 2]), "holds a list, not a dict"),
        (pickle.dumps({b"data": ROWS}), "must be a list of integers"),
        (
            pickle.dumps({b"data": ROWS[:, 1:], b"labels": [0] * 4}),
            r"must be uint8 \[N, 3072\], got uint8 \[4, 3071\]",
        ),
        (
            pickle.dumps({b"data": ROWS.astype(float), b"labels": [0] * 4}),
            "it has an array of type f8",
        ),
        (pickle.dumps({b"data": b"", b"labels": []}), "got bytes"),
        (pickle.dumps({b"data": ROWS, b"labels": [0] * 3}), "4 images but 3 labels"),
        (pickle.dumps({b"data": ROWS, b"labels": ["a"] * 4}), "must be a list of integers"),
        (pickle.dumps({b"data": ROWS, b"labels": [0, 1, 2, 10]}), r"labels must lie in \[0, 10\)"),
        (pickle.dumps({b"data": ROWS, b"labels": [0, 1, 2, 2**70]}), "beyond 64 bits"),
        (pickle.dumps({b"data": ROWS[:0], b"labels": []}), "at least one example"),
    ],
)
def test_corrupt_cifar_batches(files: Any, content: bytes, message: str, tmp_path: Path) -> None:
    files.write_cifar10()
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    refused("cifar10", tmp_path, "cifar-10-batches-py/data_batch_3", message)


def test_a_cifar_file_that_stops_anywhere_is_refused(files: Any, tmp_path: Path) -> None:
    files.write_cifar10()
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    whole = path.read_bytes()
    for length in range(0, len(whole), 3001):
        path.write_bytes(whole[:length])
        refused("cifar10", tmp_path, path.name, "cannot be read as a CIFAR batch")


class Evil:
    """Pickled, this asks the reader to call a function with arguments of its choice."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_malicious_pickle_is_refused_and_does_not_run(
    files: Any, protocol: int, tmp_path: Path
) -> None:
    files.write_cifar10()
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    trace = tmp_path / "trace"
    attacks = (
        Evil(os.mkdir, str(trace)),
        Evil(eval, f"open({str(trace)!r}, 'w')"),
        Evil(getattr, np.ndarray, "tofile"),
        Evil(np.fromfile, str(path)),
    )
    for evil in attacks:
        content = pickle.dumps({b"data": ROWS, b"labels": [0] * 4, b"x": evil}, protocol)
        path.write_bytes(content)
        refused("cifar10", tmp_path, path.name, "it asks for .*, which image files do not use")
        assert not trace.exists()
    # the standard unpickler does run it: the attack is a real one
    pickle.loads(pickle.dumps(attacks[0], protocol))
    assert trace.exists()


def test_only_the_published_svhn_files_are_read(files: Any, tmp_path: Path) -> None:
    """SciPy's reader crashes on some damaged files: it sees none of them."""
    x = files.write_svhn()
    train, test = load_dataset("svhn", tmp_path)
    assert train.labels.tolist() == test.labels.tolist() == [0, 1, 9, 0]  # 10 stands for 0
    assert np.array_equal(train.images.numpy(), x.transpose(3, 2, 0, 1))
    path = tmp_path / "train_32x32.mat"
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole + b"x", whole[:200] + b"x" + whole[201:]):
        path.write_bytes(content)
        refused("svhn", tmp_path, path.name, "is not the published file: its MD5 is")
