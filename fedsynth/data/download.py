"""Fetching the named data sets through torchvision, which knows the addresses and verifies what it
fetches."""

from __future__ import annotations

import http.client
import tarfile
import zipfile
import zlib
from pathlib import Path

from fedsynth.errors import DataFilesMissingError

_FAILURES = (
    OSError,  # no network, no place on the disk, a folder that cannot be written
    RuntimeError,  # torchvision's own: no mirror answered, or the checksum is wrong
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def download_dataset(name: str, root: Path) -> None:
    """Fetches both splits of `name` into `root`, where torchvision puts them.

    Raises:
        DataFilesMissingError: the download failed; the reason is in the message.
    """
    try:
        _fetch(name, str(root))
    except _FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataFilesMissingError(f"{name}: the download into {root} failed: {reason}") from None


def _fetch(name: str, root: str) -> None:
    from torchvision import datasets

    match name:
        case "mnist":
            datasets.MNIST(root, download=True)
        case "fashion-mnist":
            datasets.FashionMNIST(root, download=True)
        case "emnist-letters":
            datasets.EMNIST(root, "letters", download=True)
        case "cifar10":
            datasets.CIFAR10(root, download=True)
        case "cifar100":
            datasets.CIFAR100(root, download=True)
        case "svhn":
            datasets.SVHN(root, "train", download=True)
            datasets.SVHN(root, "test", download=True)
        case _:
            raise DataFilesMissingError(f"{name}: nothing to download")
