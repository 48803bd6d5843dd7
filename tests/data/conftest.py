"""The fixture `files` writes data sets in their official formats for the tests of the loaders."""

from __future__ import annotations

import bz2
import functools
import hashlib
import json
import struct
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from fedsynth.data import load
from fedsynth.data.registry import dataset_spec
from fedsynth.files import file_hash

Bytes = npt.NDArray[np.uint8]
Writers = dict[str, tuple[Bytes, list[int]]]
RNG = np.random.default_rng(0)
# Tiny-ImageNet's classes, unsorted as in the official list.
WNIDS = [f"n{10_000_000 + (37 * i) % 200:08}" for i in range(200)]


def idx(array: Bytes) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def python2(rows: Bytes, labels: list[int]) -> bytes:
    """Returns a batch of CIFAR-10 of fewer than 256 images, as Python 2 pickled it."""
    raw = rows.tobytes()
    count = bytes([len(rows)])
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01K" + count + b"M\x00\x0c\x86cnumpy\ndtype\nU"
        b"\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + (b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tbU\x06labels](")
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eu."
    )


@functools.cache
def png(width: int, height: int) -> bytes:
    """Returns a valid black PNG of less than ten kilobytes for each megapixel."""
    file = BytesIO()
    Image.new("L", (width, height)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def write_colour(path: Path, colour: tuple[int, int, int] | int, size: tuple[int, int]) -> None:
    """Writes an image of one colour or of one grey level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def writer(n: int) -> tuple[Bytes, list[int]]:
    """Returns a FEMNIST writer's pixels and labels."""
    return RNG.integers(0, 256, (n, 784), dtype=np.uint8), RNG.integers(0, 62, n).tolist()


def leaf(writers: Writers) -> dict[str, Any]:
    """Returns the content of a LEAF file, of grey levels ± 0.4 divided by 255."""
    user_data = {}
    for name, (x, y) in writers.items():
        inexact = np.clip(x + 0.4 * np.resize([1, -1], x.shape), 0, 255) / 255
        user_data[name] = {"x": inexact.tolist(), "y": y}
    sizes = [len(y) for _, y in writers.values()]
    return {"users": list(writers), "num_samples": sizes, "user_data": user_data}


def leaf_path(split: str, number: int) -> str:
    return f"femnist/{split}/all_data_{number}_niid_0_keep_0_{split}_9.json"


@dataclass(frozen=True)
class OfficialFiles:
    """Writes small data sets below `root`, and returns what it wrote."""

    root: Path
    patch: pytest.MonkeyPatch

    def write_idx(
        self, name: str, splits: tuple[str, str], first: int = 0, sizes: tuple[int, int] = (20, 10)
    ) -> list[Bytes]:
        raw = self.root / name / "raw"
        raw.mkdir(parents=True)
        written = []
        for split, n in zip(splits, sizes, strict=True):
            images = RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
            labels = (np.arange(n) % 10 + first).astype(np.uint8)
            (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
            (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
            written += [images, labels]
        return written

    def write_cifar10(self) -> Bytes:
        """Writes batches of four images, and registers their checksums as the published ones."""
        data = RNG.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
        names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
        labels = [[(i + k) % 10 for k in range(4)] for i in range(6)]
        self.write_cifar("CIFAR10", dict(zip(names, map(python2, data, labels), strict=True)))
        return data

    def write_cifar(self, name: str, batches: dict[str, bytes]) -> None:
        published = getattr(datasets, name)
        folder = self.root / published.base_folder
        folder.mkdir()
        md5s = []
        for file, content in batches.items():
            (folder / file).write_bytes(content)
            md5s.append([file, hashlib.md5(content).hexdigest()])
        self.patch.setattr(published, "train_list", md5s[:-1])
        self.patch.setattr(published, "test_list", md5s[-1:])

    def write_svhn(self) -> Bytes:
        """Writes both files and registers their checksums as the published ones."""
        x = RNG.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
        for split in ("train", "test"):
            file = self.root / f"{split}_32x32.mat"
            savemat(file, {"X": x, "y": np.array([[10], [1], [9], [10]], np.uint8)})
            md5 = hashlib.md5(file.read_bytes()).hexdigest()
            self.patch.setitem(datasets.SVHN.split_list, split, ["", file.name, md5])
        return x

    def write_digits_five(self) -> dict[str, tuple[Bytes, list[int]]]:
        """Writes a few images of each domain, and returns both splits of each, [N, C, H, W]."""
        x, y, x_test, y_test = self.write_idx("MNIST", ("train", "t10k"))
        svhn = np.concatenate([self.write_svhn().transpose(3, 2, 0, 1)] * 2)
        written = {"mnist": (np.concatenate([x, x_test])[:, None], [*y, *y_test])}
        written["svhn"] = (svhn, [0, 1, 9, 0] * 2)
        usps = RNG.integers(0, 256, (15, 1, 16, 16), dtype=np.uint8)
        written["usps"] = (usps, [n % 10 for n in range(15)])
        for split, rows in (("train", range(10)), ("test", range(10, 15))):
            lines = []
            for n in rows:
                values = usps[n].flatten() / 127.5 - 1 + 1e-4  # torchvision rounds down
                pixels = (f"{i}:{value:.6f}" for i, value in enumerate(values, 1))
                lines.append(" ".join([str(n % 10 + 1), *pixels]))
            name = "usps.bz2" if split == "train" else "usps.t.bz2"
            content = bz2.compress("\n".join(lines).encode())
            (self.root / name).write_bytes(content)
            md5 = hashlib.md5(content).hexdigest()
            self.patch.setitem(datasets.USPS.split_list, split, ["", name, md5])
        synth = RNG.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
        written["synth"] = (np.concatenate([synth, synth]), [*range(10)] * 2)
        variables = {"X": synth.transpose(2, 3, 1, 0), "y": np.arange(10, dtype=np.uint8)}
        for name in load.SYNTHETIC_DIGITS:
            savemat(self.root / name, variables)
            self.patch.setitem(load.SYNTHETIC_DIGITS, name, file_hash(self.root / name))
        for split in ("train", "test"):
            folder = self.root / "mnist_m" / f"mnist_m_{split}"
            for n in range(10):
                write_colour(folder / f"{n:08}.png", (20 * n, 0, 255 - n), (32, 32))
            lines = [f"{n:08}.png {n}\n" for n in range(10)]
            folder.with_name(f"mnist_m_{split}_labels.txt").write_text("".join(lines))
        colours = np.array([(20 * n, 0, 255 - n) for n in range(10)] * 2, np.uint8)
        flat = np.broadcast_to(colours[:, :, None, None], (20, 3, 32, 32))
        written["mnist-m"] = (flat, [*range(10)] * 2)
        return written

    def write_leaf(self, split: str, number: int, content: object) -> None:
        path = self.root / leaf_path(split, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))

    def write_femnist(self) -> tuple[Writers, Writers]:
        """Writes four writers in two files, and one that only the test split contains."""
        sizes = {"f0100_00": 2, "f0011_13": 4, "f0009_02": 3, "f0001_41": 5}
        train = {name: writer(n) for name, n in sizes.items()}
        test = {name: writer(1) for name in list(sizes)[1:]} | {"f0000_14": writer(2)}
        for number in (0, 1):
            half = dict(list(train.items())[2 * number : 2 * number + 2])
            self.write_leaf("train", number, leaf(half))
        self.write_leaf("test", 0, leaf(test))
        return train, test

    def write_tiny_imagenet(self) -> None:
        """Writes one training image per class, whose red is the class number; class 7 is grey.
        The ten test images are of the classes 190 to 199."""
        root = self.root / "tiny-imagenet-200"
        for c, name in enumerate(sorted(WNIDS)):
            colour = 77 if c == 7 else (c, 100, 200)
            write_colour(root / "train" / name / "images" / f"{name}_0.JPEG", colour, (64, 64))
            (root / "train" / name / f"{name}_boxes.txt").write_text("none\n")
        lines = []
        for i in range(10):
            write_colour(root / "val" / "images" / f"val_{i}.JPEG", (190 + i, 0, 0), (64, 64))
            lines.append(f"val_{i}.JPEG\t{sorted(WNIDS)[190 + i]}\t0\t32\t44\t62\n")
        (root / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
        (root / "words.txt").write_text("n00001740\tentity\n")
        (root / "val" / "val_annotations.txt").write_text("".join(lines))

    def write_cinic10(self) -> None:
        """Writes three images per class and split: red is the class, green the split, blue the
        position among the sorted names."""
        for s, split in enumerate(("train", "valid", "test")):
            for c, name in enumerate(dataset_spec("cinic10").class_names):
                folder = self.root / "CINIC-10" / split / name
                for i, file in enumerate(("cifar10-test-7", "cifar10-train-44", "n02687172_9")):
                    write_colour(folder / f"{file}.png", (20 * c, 50 * s, i), (32, 32))

    def write_office_caltech(self) -> None:
        """Writes six images per class and domain. Those of webcam are larger, and its backpacks are
        in the folder of other releases."""
        spec = dataset_spec("office-caltech-10")
        for number, domain in enumerate(spec.domains):
            size = (100, 80) if domain == "webcam" else (64, 64)
            for label, name in enumerate(spec.class_names):
                folder = "back_pack" if (domain, name) == ("webcam", "backpack") else name
                level = 50 * number + 5 * label
                for i in range(6):
                    path = self.root / "office_caltech_10" / domain / folder / f"frame_{i:04}.png"
                    write_colour(path, (level, 0, 255 - level), size)

    def write_domainnet(self) -> None:
        """Writes JPEG files and official lists with two of the ten classes and one other."""
        root = self.root / "domainnet"
        for number, domain in enumerate(dataset_spec("domainnet-10").domains):
            for place, split in enumerate(("train", "test"), 1):
                lines = []
                for name, label in (("zebra", 344), ("bird", 23), ("axe", 12)):
                    file = f"{domain}/{name}/{domain}_{label + 1:03}_0{place}.jpg"
                    write_colour(root / file, (40 * number, 0, 255 - 40 * number), (130, 90))
                    lines.append(f"{file} {label}")
                (root / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfficialFiles:
    return OfficialFiles(tmp_path, monkeypatch)
