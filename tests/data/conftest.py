"""Writers of the data sets' files in their official formats, for the loaders' tests: the fixture
`files`."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.io import savemat

from fedsynth.data import array_files

Bytes = npt.NDArray[np.uint8]
RNG = np.random.default_rng(0)


def idx(array: Bytes) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def png(width: int, height: int) -> bytes:
    """A valid black PNG, a kilobyte for each megapixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(1)
    rows = [packer.compress(bytes(width + 1)) for _ in range(height)]
    body = b"".join([*rows, packer.flush()])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


class OfficialFiles:
    """Writes small data sets with random pixels below `root`, and returns what it wrote."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.patch = patch

    def write_idx(
        self, folder: str, splits: tuple[str, str], first: int = 0, zipped: bool = False
    ) -> list[Bytes]:
        raw = self.root / folder / "raw"
        raw.mkdir(parents=True)
        written = []
        for split, n in zip(splits, (20, 10), strict=True):
            images = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
            labels = (np.arange(n) % 10 + first).astype(np.uint8)
            for kind, content in (("images-idx3", idx(images)), ("labels-idx1", idx(labels))):
                path = raw / f"{split}-{kind}-ubyte{'.gz' if zipped else ''}"
                path.write_bytes(gzip.compress(content) if zipped else content)
            written += [images, labels]
        return written

    def write_cifar10(self) -> Bytes:
        folder = self.root / "cifar-10-batches-py"
        folder.mkdir()
        data = RNG.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
        for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
            batch = {b"labels": [i, 1, 2, 9], b"data": data[i]}
            (folder / name).write_bytes(pickle.dumps(batch, 2))
        return data

    def write_svhn(self, labels: Any = (10, 1, 9, 10)) -> Bytes:
        """Writes both files, and makes them the published ones."""
        x = RNG.integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
        for name in ("train_32x32.mat", "test_32x32.mat"):
            savemat(self.root / name, {"X": x, "y": np.array(labels, np.uint8)[:, None]})
            self.patch.setitem(
                array_files.SVHN_MD5, name, hashlib.md5((self.root / name).read_bytes()).hexdigest()
            )
        return x


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfficialFiles:
    """Writers into `tmp_path`."""
    return OfficialFiles(tmp_path, monkeypatch)
