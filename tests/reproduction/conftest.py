"""Small data sets of random pixels in the official files, in the place of the papers' own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsynth.data.registry import dataset_spec
from tests.data.conftest import idx

TRAIN, TEST = 200, 40
IDX = {
    "MNIST": (("train", "t10k"), 0, 10),
    "FashionMNIST": (("train", "t10k"), 0, 10),
    "EMNIST": (("emnist-letters-train", "emnist-letters-test"), 1, 26),
}


def write_idx(root: Path, folder: str) -> None:
    splits, first, classes = IDX[folder]
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, n in zip(splits, (TRAIN, TEST), strict=True):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = (np.arange(n) % classes + first).astype(np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))


def write_cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        labels = [k % 10 for k in range(TRAIN // 5)]
        data = rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        batch = {b"batch_label": name.encode(), b"labels": labels, b"data": data}
        (folder / name).write_bytes(pickle.dumps(batch, 2))


def write_office(root: Path) -> None:
    """Six images a class and domain, of which one tests."""
    spec = dataset_spec("office-caltech-10")
    for number, domain in enumerate(spec.domains):
        for label, name in enumerate(spec.class_names):
            folder = root / "office_caltech_10" / domain / name
            folder.mkdir(parents=True)
            for k in range(6):
                colour = (50 * number, 20 * label, 30 * k)
                Image.new("RGB", (64, 64), colour).save(folder / f"frame_{k:04}.png")


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    root = tmp_path_factory.mktemp("data")
    for folder in IDX:
        write_idx(root, folder)
    write_cifar10(root)
    write_office(root)
    return root


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
