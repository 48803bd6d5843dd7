"""Damaged, hostile or missing data files: each raises a one-line error that names it, and oversized
files are rejected by their headers, before decoding or decompression."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from PIL import Image, ImageFile

from fedsynth.data import pixels
from fedsynth.data.load import load_dataset
from fedsynth.data.pixels import read_images
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError
from tests.data.conftest import WNIDS, OfficialFiles, idx, leaf, leaf_path, png, writer
from tests.data.fuzz_readers import KINDS
from tests.fuzz.mutations import Fuzzer, replaced_content, time_limit
from tests.raising import raises

MEGABYTE = 2**20
OFFICE, CINIC = map(dataset_spec, ("office-caltech-10", "cinic10"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a folder with valid files of most data sets."""
    root = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        files = OfficialFiles(root, patch)
        files.write_digits_five()
        files.write_idx("EMNIST", ("emnist-letters-train", "emnist-letters-test"), first=1)
        files.write_cifar10()
        files.write_femnist()
        files.write_tiny_imagenet()
        files.write_domainnet()
        yield root


def zeros(*shape: int) -> bytes:
    return idx(np.zeros(shape, np.uint8))


def counted(first: int) -> bytes:
    return idx((np.arange(20) % 10 + first).astype(np.uint8))


def writers(**changes: Any) -> bytes:
    """Returns a file of one writer with changed `x`, `y` or keys of the file."""
    content = leaf({"w": writer(2)})
    for key, value in changes.items():
        target = content["user_data"]["w"] if key in ("x", "y") else content
        target[key] = value
    return json.dumps(content).encode()


IMAGES = zeros(20, 28, 28)
ROW = [0.5] * 784
MISSING_CLASS = sorted(WNIDS)[50]
Content = bytes | None | Callable[[bytes], bytes]
CASES: dict[tuple[str, str], list[tuple[Content, str]]] = {
    ("mnist", "MNIST/raw/train-images-idx3-ubyte"): [
        (b"", "is not an idx file of bytes"),
        (IMAGES[:-1], "15,679 bytes of data, .* declares 15,680"),
        (IMAGES + b"x", "15,681 bytes of data, .* declares 15,680"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], "is not an idx file of bytes"),
        (zeros(20) + b"padding of some length", "is not an idx file of bytes"),
        (zeros(20, 32, 32), r"cannot be used: .*got \[20, 1, 32, 32\]"),
        (zeros(19, 28, 28), "cannot be used: .*labels .* shape"),
        (IMAGES[:4] + b"\xff" * 12, "at most 54,880,000"),
    ],
    ("mnist", "MNIST/raw/train-labels-idx1-ubyte"): [
        (counted(1), r"2 labels .* outside \[0, 10\), such as 10"),
    ],
    ("emnist-letters", "EMNIST/raw/emnist-letters-train-labels-idx1-ubyte"): [
        (counted(0), "such as -1"),
    ],
    ("cifar10", "cifar-10-batches-py/data_batch_3"): [
        (lambda data: data[:-1], "is not the published file"),
        (None, "cifar-10-batches-py/data_batch_3 of cifar10 is missing"),
    ],
    # SciPy's reader crashes on some damaged files: they are rejected before it reads them
    ("svhn", "train_32x32.mat"): [
        (b"", "is not the published file"),
        (lambda data: data[:-1], "is not the published file"),
        (lambda data: data[:200] + b"x" + data[201:], "is not the published file"),
    ],
    **{
        ("digits-five", file): [(lambda data: data + b"x", "is not the published file")]
        for file in ("usps.t.bz2", "synth_train_32x32.mat")
    },
    ("digits-five", "MNIST/raw/train-images-idx3-ubyte"): [
        (zeros(19, 28, 28), "cannot be used: .*labels .* shape")
    ],
    ("digits-five", "mnist_m/mnist_m_test_labels.txt"): [
        *(
            (line.encode(), "line 1 of .* must be 'NUMBER.png LABEL'")
            for line in ("../1.png 3", "1.png 10", "1.png", "1.png ٣")
        ),
        (b"\n", "lists no image"),
    ],
    ("femnist", leaf_path("train", 2)): [
        (b'{"user_data": {}}', "user_data is invalid: Dictionary should have at least 1"),
        (writers(y=[1]), "writer 'w' in .* must have images of 784 numbers"),
        (writers(x=[ROW, ROW[1:]]), "must have images of 784 numbers"),
        (writers(x=[], y=[]), "user_data.w.x is invalid: List should have at least 1 item"),
        *(
            (writers(x=[ROW, [*ROW[1:], value]]), "user_data.w.x.1.783 is invalid: Input should be")
            for value in (None, True, float("nan"), float("inf"), -1e-9, 255)
        ),
        (writers(y=[0, 62]), r"cannot be used: .* outside \[0, 62\)"),
        *(
            (writers(y=[0, value]), "user_data.w.y.1 is invalid: Input should be")
            for value in (-1, 1.5, 2**70, True)
        ),
        (json.dumps(leaf({"f0100_00": writer(1)})).encode(), "contain user 'f0100_00'"),
    ],
    ("femnist", leaf_path("test", 5)): [
        (b"<html>404</html>", "is not a LEAF file: the content is invalid: Invalid JSON")
    ],
    ("tiny-imagenet", "tiny-imagenet-200/wnids.txt"): [
        ("\n".join(names).encode(), "does not list 200 different WordNet numbers")
        for names in (WNIDS[1:], [*WNIDS[1:], WNIDS[5]], ["<html>404</html>"], [*WNIDS[1:], "n1"])
    ],
    ("tiny-imagenet", "tiny-imagenet-200/val/val_annotations.txt"): [
        *(
            (b"val_1.JPEG\tn10000001\t0\n\n" + line, "line 3 of .* must be a file name, a tab")
            for line in (b"v.JPEG", b"v\tn99999999\t0", b"../x\tn10000001\t0", b"\tn10000001\t0")
        ),
        (b"\n", "lists no image"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
    ("tiny-imagenet", "tiny-imagenet-200/val/images/val_3.JPEG"): [
        (png(32, 48), "the image is 32×48, not 64×64 as in tiny-imagenet"),
        (None, "cannot be read as an image: the file does not exist"),
    ],
    ("tiny-imagenet", f"tiny-imagenet-200/train/{MISSING_CLASS}/images/{MISSING_CLASS}_0.JPEG"): [
        (None, rf"{MISSING_CLASS}/images/\*.png .*missing.*Unpack http://cs231n"),
    ],
    ("domainnet-10", "domainnet/clipart_train.txt"): [
        (line.encode(), "line 1 of .* must be 'clipart/CLASS/FILE NUMBER'")
        for line in ("sketch/bird/x.jpg 3", "clipart/../x.jpg 3", "clipart/bird/x.jpg ٣")
    ],
}


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        pytest.param(*named_path, *case, id=f"{'-'.join(named_path)}-{number}")
        for named_path, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_damaged_or_missing_files_raise_one_line_errors(
    root: Path, name: str, file: str, content: Content, message: str
) -> None:
    path = root / file
    if callable(content):
        content = content(path.read_bytes())
    expected = (DataFilesMissingError, DataFilesCorruptError)
    with replaced_content(path, content), pytest.raises(expected, match=message) as error:
        load_dataset(name, root)
    assert "\n" not in str(error.value)
    named_path = file if content is not None else path.parent.name
    assert named_path in str(error.value) or "cannot be used: " in str(error.value)


@dataclass
class MaliciousObject:
    """An object whose pickle calls a function with an argument when it is read."""

    function: Callable[..., Any]
    argument: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return self.function, (self.argument,)


def test_malicious_pickles_are_not_executed(root: Path, tmp_path: Path) -> None:
    content = pickle.dumps(MaliciousObject(os.mkdir, str(tmp_path / "trace")))
    path = root / "cifar-10-batches-py" / "data_batch_1"
    with replaced_content(path, content), raises(DataFilesCorruptError, "data.hash"):
        load_dataset("cifar10", root)
    assert not (tmp_path / "trace").exists()
    pickle.loads(content)  # the attack is real
    assert (tmp_path / "trace").exists()


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Fails if Python and NumPy allocate more than `size` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak / MEGABYTE:.0f} MB"


@pytest.mark.parametrize(("spec", "resize"), [(OFFICE, True), (CINIC, False)])
def test_oversized_images_are_rejected_before_decoding(
    spec: Any, resize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = create_autospec(ImageFile.ImageFile.load, side_effect=ImageFile.ImageFile.load)
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        path.write_bytes(png(9000, 9000))
    assert paths[0].stat().st_size < MEGABYTE / 2
    message = "data.damaged"
    with memory_limit(4 * MEGABYTE), raises(DataFilesCorruptError, message):
        read_images(paths, spec, resize=resize)
    assert not load.called
    paths[0].write_bytes(png(64, 64))
    assert read_images(paths[:1], OFFICE).shape == (1, 3, 64, 64)
    assert load.called


def test_large_images_are_decoded_singly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active, concurrent = threading.Semaphore(0), []
    decoded = pixels.decoded

    def counted(*arguments: Any) -> Any:
        active.release()
        concurrent.append(active._value)
        try:
            return decoded(*arguments)
        finally:
            active.acquire()

    monkeypatch.setattr(pixels, "decoded", counted)
    paths = [tmp_path / f"{number}.png" for number in range(8)]
    for path in paths:
        path.write_bytes(png(2000, 1000))
    assert not read_images(paths, OFFICE, resize=True).any()
    assert concurrent == [1] * 8


def test_postscript_and_jpegs_of_many_scans_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (64, 64)).save(path, "EPS")
    with pytest.raises(DataFilesCorruptError, match="is not a JPEG, PNG, BMP, WEBP, TIFF file"):
        read_images([path], OFFICE, resize=True)
    Image.new("RGB", (64, 64)).save(path, progressive=True)
    assert read_images([path], OFFICE).shape == (1, 3, 64, 64)
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xda\0\2" * 1000)
    with pytest.raises(DataFilesCorruptError, match="more than 100 scans"):
        read_images([path], OFFICE)


@pytest.mark.parametrize(("name", "file"), dict(CASES.keys()).items())
def test_pipes_are_rejected_without_blocking(root: Path, name: str, file: str) -> None:
    path = root / file
    with replaced_content(path, None), time_limit(30):
        os.mkfifo(path)
        with pytest.raises(DataFilesCorruptError, match=f"{path}.*regular file"):
            load_dataset(name, root)
        with pytest.raises(DataFilesCorruptError, match=r"as an image: .*regular file"):
            read_images([path], OFFICE)


# ------------------------------------------------------------------------------------ fuzzed files


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [1, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_fuzzed_files_raise_errors(kind: str, share: int, tmp_path: Path) -> None:
    path, cases = tmp_path / KINDS[kind].file, KINDS[kind].cases(random.Random(share))
    count = share * 40
    fuzzer = Fuzzer(tmp_path, range(count))
    for number, content in zip(fuzzer.numbers, cases, strict=False):
        path.write_bytes(content)
        # beyond ten times the file's size: the memory of a million one-byte instructions
        with memory_limit(24 * MEGABYTE + 10 * len(content)):
            fuzzer.run(number, KINDS[kind].read, path)
    fuzzer.check(1 / 3, 1 / count)  # some changes are harmless
