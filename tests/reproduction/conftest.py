"""Small data sets of random pixels in the official formats, instead of the papers' data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.conftest import OfficialFiles


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the folder of the data sets."""
    root = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        files = OfficialFiles(root, patch)
        for folder in ("MNIST", "FashionMNIST"):
            files.write_idx(folder, ("train", "t10k"), sizes=(200, 40))
        letters = ("emnist-letters-train", "emnist-letters-test")
        files.write_idx("EMNIST", letters, first=1, sizes=(200, 40), classes=26)
        files.write_cifar10(per_batch=40)
        files.write_office_caltech()
        yield root
