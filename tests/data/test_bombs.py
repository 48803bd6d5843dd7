"""Small files that ask for much: refused by what they announce, before anything is decoded or
unpacked. And what is no file at all."""

from __future__ import annotations

import gzip
import json
import os
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFile

from fedsynth.config.resolve import resolve
from fedsynth.data import folders
from fedsynth.data.array_files import read_idx
from fedsynth.data.folders import read_images
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError
from tests.data.conftest import png
from tests.fuzz.mutations import at_most as within

MEGABYTE = 2**20
OFFICE, CINIC = map(dataset_spec, ("office-caltech-10", "cinic10"))


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Fails where more than `size` bytes are taken at once, of those that Python and NumPy hand
    out."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak / MEGABYTE:.0f} MB"


@pytest.mark.parametrize(
    ("spec", "resize", "message"),
    [
        (OFFICE, True, "is 9000×9000, more than 33,554,432 pixels: reduce it or leave it out"),
        (CINIC, False, r"is 9000×9000, images of cinic10 are 32×32"),
    ],
)
def test_large_pictures_are_refused_by_their_header(
    spec: Any, resize: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda image: (decoded.append(image), load(image))[1]
    )
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        path.write_bytes(png(9000, 9000))
    assert paths[0].stat().st_size < MEGABYTE / 2
    with at_most(4 * MEGABYTE), pytest.raises(DataFilesCorruptError, match=message):
        read_images(paths, spec, resize=resize)
    assert decoded == []
    paths[0].write_bytes(png(64, 64))
    assert read_images(paths[:1], OFFICE).shape == (1, 3, 64, 64)
    assert decoded != []


def test_large_pictures_are_decoded_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, most = threading.Semaphore(0), []
    colour = folders._colour

    def counted(image: Image.Image, spec: Any) -> Any:
        at_work.release()
        most.append(at_work._value)
        try:
            return colour(image, spec)
        finally:
            at_work.acquire()

    monkeypatch.setattr(folders, "_colour", counted)
    paths = [tmp_path / f"{number}.png" for number in range(8)]
    for path in paths:
        path.write_bytes(png(2000, 1000))
    assert not read_images(paths, OFFICE, resize=True).any()
    assert most == [1] * 8


def test_postscript_is_no_picture(tmp_path: Path) -> None:
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, "EPS")
    path = tmp_path / "a.png"
    path.write_bytes(file.getvalue())
    with pytest.raises(DataFilesCorruptError, match="cannot identify image file"):
        read_images([path], OFFICE, resize=True)


def test_a_jpeg_of_a_thousand_scans(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (64, 64)).save(path, progressive=True)
    assert read_images([path], OFFICE).shape == (1, 3, 64, 64)
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xda\0\2" * 1000)
    with pytest.raises(DataFilesCorruptError, match="more than 100 scans"):
        read_images([path], OFFICE)


IDX = bytes([0, 0, 8, 3])


@pytest.mark.parametrize("zipped", [False, True])
def test_a_header_that_announces_too_much(zipped: bool, tmp_path: Path) -> None:
    content = IDX + struct.pack(">III", 100_000, 28, 28) + bytes(78_400_000 if zipped else 10)
    path = tmp_path / ("x.gz" if zipped else "x")
    path.write_bytes(gzip.compress(content, 1) if zipped else content)
    with (
        at_most(4 * MEGABYTE),
        pytest.raises(DataFilesCorruptError, match="such a file has at most 784,000"),
    ):
        read_idx(path, 3, 1000 * 784)


def leaf_file(root: Path, x: Any) -> None:
    content = {"users": ["w"], "num_samples": [2], "user_data": {"w": {"x": x, "y": [1, 2]}}}
    for split in ("train", "test"):
        (root / "femnist" / split).mkdir(parents=True)
        (root / "femnist" / split / "a.json").write_text(json.dumps(content))


@pytest.mark.parametrize("value", ["x" * MEGABYTE, 10**4000])
def test_text_among_the_pixels_is_not_made_an_array(value: Any, tmp_path: Path) -> None:
    leaf_file(tmp_path, [[0.5] * 784, [value] + [0.5] * 783])
    with (
        at_most(8 * MEGABYTE),
        pytest.raises(DataFilesCorruptError, match="x must hold numbers only"),
    ):
        load_dataset("femnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte"),
        ("cifar10", "cifar-10-batches-py/data_batch_2"),
        ("svhn", "test_32x32.mat"),
        ("femnist", "femnist/test/a.json"),
        ("domainnet-10", "domainnet/clipart_train.txt"),
    ],
)
def test_a_pipe_is_not_waited_for(files: Any, name: str, file: str, tmp_path: Path) -> None:
    files.write_idx("MNIST", ("train", "t10k"))
    files.write_cifar10()
    files.write_svhn()
    leaf_file(tmp_path, [[0.5] * 784] * 2)
    (tmp_path / "domainnet").mkdir()
    path = tmp_path / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with (
        within(30),
        pytest.raises(DataFilesCorruptError, match="it is not a regular file") as error,
    ):
        load_dataset(name, tmp_path)
    assert str(path) in str(error.value)
    with within(30), pytest.raises(DataFilesCorruptError, match="as an image: it is not a regular"):
        read_images([path], OFFICE)


@pytest.mark.parametrize("root", ["~nobody-of-that-name", "a\0b", "x" * 300, "a\udcff"])
def test_folders_that_cannot_be(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mnist", "femnist"):
        with pytest.raises(DataFilesMissingError):
            load_dataset(name, Path(root))
    with pytest.raises(DataFilesMissingError):
        # Settings make the folder absolute before any data are read.
        load_dataset("mnist", resolve({"data": {"data_root": root}}).data_root)
    monkeypatch.setenv("FEDSYNTH_DATA", root.replace("\0", "/"))
    with pytest.raises(DataFilesMissingError):
        load_dataset("mnist")
