"""The loaders, on files that the tests write in the official formats: what is read, and what is
missing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import numpy.typing as npt
import pytest
import torchvision

from fedsynth.data.load import DIGITS, load_dataset
from fedsynth.data.svhn import MD5
from fedsynth.errors import DataFilesMissingError

Bytes = npt.NDArray[np.uint8]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSYNTH_DATA", raising=False)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_idx_files_plain_and_compressed(
    files: Any, name: str, folder: str, zipped: bool, tmp_path: Path
) -> None:
    x, y, x_test, y_test = files.write_idx(folder, ("train", "t10k"), zipped=zipped)
    train, test = load_dataset(name, tmp_path)
    assert np.array_equal(train.images[:, 0].numpy(), x)
    assert np.array_equal(train.labels.numpy(), y)
    assert np.array_equal(test.images[:, 0].numpy(), x_test)
    assert np.array_equal(test.labels.numpy(), y_test)
    assert train.spec.train_size == 60_000  # the published constant, not what the files hold


def test_emnist_letters_are_turned_upright_and_counted_from_zero(
    files: Any, tmp_path: Path
) -> None:
    x, y, *_ = files.write_idx("EMNIST", ("emnist-letters-train", "emnist-letters-test"), first=1)
    train, _ = load_dataset("emnist-letters", tmp_path)
    assert np.array_equal(train.images[:, 0].numpy(), x.transpose(0, 2, 1))
    assert np.array_equal(train.labels.numpy(), y - 1)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
def test_cifar10_of_every_pickle_protocol(
    files: Any, protocol: int, key: Callable[[str], Any], tmp_path: Path
) -> None:
    data = files.write_cifar10(protocol, key)
    train, test = load_dataset("cifar10", tmp_path)
    assert np.array_equal(train.images.numpy(), data[:5].reshape(20, 3, 32, 32))
    assert train.labels.tolist() == [n for i in range(5) for n in (i, 1, 2, 9)]
    assert np.array_equal(test.images.numpy(), data[5].reshape(4, 3, 32, 32))


def python2_cifar_batch(rows: Bytes, label: int) -> bytes:
    """The opcodes that Python 2 wrote into the official files: strings of bytes, and NumPy's
    modules by their old names."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def int4(n: int) -> bytes:
        return b"J" + n.to_bytes(4, "little", signed=True)

    raw = rows.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
        b"(K\x01" + int4(rows.shape[0]) + int4(rows.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + short(b"|") + b"NNN" + int4(-1) + int4(-1) + b"K\x00tb"
        b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )
    labels = b"](" + b"".join(int4(label) for _ in rows) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + labels + b"u."


def test_cifar10_as_python_2_wrote_it(files: Any, tmp_path: Path) -> None:
    data = files.write_cifar10()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(python2_cifar_batch(data[5], 7))
    _, test = load_dataset("cifar10", tmp_path)
    assert np.array_equal(test.images.numpy(), data[5].reshape(4, 3, 32, 32))
    assert test.labels.tolist() == [7, 7, 7, 7]


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    rows = RNG.integers(0, 256, (3, 3072), dtype=np.uint8)
    for name in ("train", "test"):
        batch = {b"fine_labels": [99, 0, 50], b"coarse_labels": [1, 2, 3], b"data": rows}
        (folder / name).write_bytes(pickle.dumps(batch, 2))
    train, _ = load_dataset("cifar100", tmp_path)
    assert train.labels.tolist() == [99, 0, 50]
    assert np.array_equal(train.images.numpy(), rows.reshape(3, 3, 32, 32))


def test_svhn_files_are_those_that_torchvision_lists() -> None:
    listed = {name: md5 for _, name, md5 in torchvision.datasets.SVHN.split_list.values()}
    assert {name: listed[name] for name in MD5} == MD5


def test_digits_need_no_files() -> None:
    train, test = load_dataset("digits")
    assert (len(train), len(test)) == (train.spec.train_size, train.spec.test_size)
    assert int(train.images.max()) == 255
    assert set(train.images.unique().tolist()) <= {round(level * 255 / 16) for level in range(17)}
    pixels = train.images.double() / 255
    assert train.spec.mean[0] == pytest.approx(float(pixels.mean()), abs=1e-4)
    assert train.spec.std[0] == pytest.approx(float(pixels.std()), abs=1e-4)
    assert test.labels[:2].tolist() == [4, 9]  # examples 4 and 9 of scikit-learn's list


def test_digits_are_those_of_scikit_learn() -> None:
    bundled = pytest.importorskip("sklearn.datasets").load_digits()
    with np.load(DIGITS) as file:
        assert np.array_equal(file["images"], bundled.images)
        assert np.array_equal(file["labels"], bundled.target)


def test_the_environment_names_the_folder(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_idx("MNIST", ("train", "t10k"))
    monkeypatch.setenv("FEDSYNTH_DATA", str(tmp_path))
    assert len(load_dataset("mnist")[0]) == 20


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("name", "looked_for"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte"),
        ("fashion-mnist", "FashionMNIST/raw/train-images-idx3-ubyte"),
        ("emnist-letters", "EMNIST/raw/emnist-letters-train-images-idx3-ubyte"),
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar100", "cifar-100-python/train"),
        ("svhn", "train_32x32.mat"),
    ],
)
def test_what_was_looked_for_where_and_how_to_get_it(
    name: str, looked_for: str, tmp_path: Path
) -> None:
    with pytest.raises(DataFilesMissingError) as error:
        load_dataset(name, tmp_path)
    text = one_line(error)
    with pytest.raises(DataFilesMissingError, match="no data folder was given to look for"):
        load_dataset(name)
    for part in (
        name,
        looked_for,
        str(tmp_path),
        "download=True",
        "data.data_root",
        "FEDSYNTH_DATA",
    ):
        assert part in text


def test_one_missing_batch_is_named(files: Any, tmp_path: Path) -> None:
    files.write_cifar10()
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(DataFilesMissingError, match="no cifar-10-batches-py/data_batch_4 in"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "torchvision_name", "failure"),
    [
        ("mnist", "MNIST", URLError("no\nnetwork")),
        ("fashion-mnist", "FashionMNIST", RuntimeError("no\nnetwork")),
        ("emnist-letters", "EMNIST", OSError("no\nnetwork")),
        ("cifar10", "CIFAR10", URLError("no\nnetwork")),
        ("cifar100", "CIFAR100", RuntimeError("no\nnetwork")),
        ("svhn", "SVHN", OSError("no\nnetwork")),
    ],
)
def test_a_failed_download(
    name: str,
    torchvision_name: str,
    failure: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(root: str, *args: object, download: bool) -> None:
        assert root == str(tmp_path)
        assert download
        raise failure

    monkeypatch.setattr(torchvision.datasets, torchvision_name, fail)
    with pytest.raises(
        DataFilesMissingError, match=r"download into .* failed: .*no network"
    ) as error:
        load_dataset(name, tmp_path, download=True)
    one_line(error)


def test_a_download_fetches_only_what_is_missing(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fetch(root: str, *, download: bool) -> None:
        calls.append(download)
        files.write_idx("MNIST", ("train", "t10k"))

    monkeypatch.setattr(torchvision.datasets, "MNIST", fetch)
    assert len(load_dataset("mnist", tmp_path, download=True)[0]) == 20
    assert len(load_dataset("mnist", tmp_path, download=True)[0]) == 20
    assert calls == [True]
