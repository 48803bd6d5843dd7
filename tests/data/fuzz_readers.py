"""Valid and hostile files of each reader of data, and the reader: `KINDS`."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import nibabel
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import safetensors.numpy
import torch
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGBaseline8Bit, RLELossless

from fedsynth.data.folders import with_listed_users
from fedsynth.data.load import read_idx
from fedsynth.data.masks import Pair, examples_in, stacked
from fedsynth.data.medical import Decoding
from fedsynth.data.pixels import read_images, read_patients, read_pixels
from fedsynth.data.published_folders import (
    read_domainnet_list,
    read_femnist,
    read_mnist_m_list,
)
from fedsynth.data.records import Records
from fedsynth.data.registry import dataset_spec
from fedsynth.data.tables import parts_of, read_part
from fedsynth.data.text import GLOVE, leaf_form, read_sent140, read_shakespeare, read_vectors
from fedsynth.errors import DataFilesCorruptError
from fedsynth.features.pretrained import read_weights
from tests.data.test_medical import write_dicom
from tests.fuzz.mutations import altered, altered_json, json_bytes

# two images of no known class, site or user
IMAGES = np.array([["a.png", "b.png"], *[["", ""]] * 3], object)
OFFICE, FEMNIST, DOMAINNET = map(dataset_spec, ("office-caltech-10", "femnist", "domainnet-10"))
SHAPES = dataset_spec("shapes")


def saved(save: Callable[..., Any], *content: Any, **options: Any) -> bytes:
    """Returns the bytes of a file that `save(file, *content)` writes."""
    file = io.BytesIO()
    save(file, *content, **options)
    return file.getvalue()


def pictures() -> list[bytes]:
    picture = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))
    formats = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
    return [saved(picture.save, name, progressive=True) for name in formats]


def dicom_files() -> list[bytes]:
    """Returns a DICOM file of each compression that the readers decode."""
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    jpeg = saved(Image.fromarray(grey).save, "JPEG")
    rle = struct.pack("<16I", 1, 64, *[0] * 14) + bytes([63]) + grey.tobytes()  # of literal bytes
    changes: list[dict[str, Any]] = [
        {"WindowCenter": 30, "WindowWidth": 40},
        {"NumberOfFrames": 3, "PixelData": grey.tobytes() * 3},
        {"syntax": JPEGBaseline8Bit, "PixelData": encapsulate([jpeg])},
        {"syntax": RLELossless, "PixelData": encapsulate([rle])},
    ]
    with TemporaryDirectory() as folder:
        file = Path(folder, "valid.dcm")
        return [write_dicom(file, grey, **each).read_bytes() for each in changes]


def leaves(rng: random.Random) -> bytes:
    """Returns a damaged LEAF file of one image."""
    row = [0.5] * 784
    user = {"x": [rng.choice((row, "row"))], "y": [3]}
    file = {"users": ["a"], "num_samples": [1], "user_data": {"a": user}}
    changed = json_bytes(altered_json(file, rng), rng)
    return changed.replace(b'"row"', json.dumps(row).encode())


def record_files() -> dict[str, bytes]:
    """Returns a valid file of six records for each ending that `read_part` reads."""
    x, y, site = np.arange(24, dtype=np.float32).reshape(6, 4), np.arange(6) % 2, ["a", "b"] * 3
    table = pyarrow.table({"x": list(x), "f": x[:, 0], "y": y, "site": site})
    return {
        "npz": saved(np.savez_compressed, x=x, y=y, site=np.array(site)),
        "npy": saved(np.save, x),
        "safetensors": safetensors.numpy.save({"x": x, "y": y}),
        "csv": saved(lambda file: pyarrow.csv.write_csv(table.drop_columns("x"), file)),
        "parquet": saved(lambda file: pyarrow.parquet.write_table(table, file)),
    }


def read_record_file(path: Path) -> None:
    if path.suffix == ".npy":
        np.save(path.with_name("y.npy"), np.arange(6) % 2)
    for part in parts_of(str(path)).values():
        records = read_part(part, dict.fromkeys(("feature", "label", "user", "site"), ""), str)
        if not len(records.values) == len(records.labels) == len(records.sites):
            raise ValueError(f"accepted as {records.values.shape}")
        float(records.values.sum())  # touches all of it


def read_image(path: Path) -> None:
    assert read_images([path], OFFICE, resize=True).shape == (1, 3, 64, 64)


def read_user_image(path: Path) -> None:
    x, faults, _ = read_pixels([path], 3, 16, 16, Decoding())
    for fault in faults.values():
        raise DataFilesCorruptError(fault)
    assert x.shape == (1, 3, 16, 16)
    read_patients([path])


def read_mask(path: Path) -> None:
    image = path.with_name(f"image of {path.name}")
    image.write_bytes(MASKED[path.suffix])
    examples = list(examples_in(Pair(image, path)))
    if examples:
        images, masks = stacked(examples, SHAPES)
        assert (images.shape[1:], masks.shape[1:]) == ((1, 32, 32), (32, 32))
        assert masks.max() < SHAPES.classes


def read_passages(path: Path) -> None:
    folder = path.parent / "shakespeare"
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_bytes(path.read_bytes())
    read_shakespeare(dataset_spec("shakespeare"), path.parent)


def read_tweets(path: Path) -> None:
    folder = path.parent / "sent140"
    folder.mkdir(exist_ok=True)
    (folder / path.name).write_bytes(path.read_bytes())
    read_sent140(dataset_spec("sent140"), path.parent)


def read_words(path: Path) -> None:
    read_vectors(path, {"good": 1}, 300)


def read_writer(path: Path) -> None:
    for split in ("train", "test"):
        copy = path.parent / "femnist" / split / "a.json"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert read_femnist(FEMNIST, path.parent)[0].images.shape[1:] == (1, 28, 28)


def read_list(path: Path) -> None:
    for file, label, domain in read_domainnet_list(path.parent, "train", 0, DOMAINNET):
        assert file.is_relative_to(path.parent)
        assert ".." not in file.parts
        assert (label in range(10), domain) == (True, 0)


def read_numbered_list(path: Path) -> None:
    for file, label, _ in read_mnist_m_list(path.parent, "train"):
        assert file.parent == path.parent / "mnist_m_train"
        assert label in range(10)


class Kind(NamedTuple):
    """The files of one reader: valid ones to damage, or a function that returns a damaged one."""

    file: str
    read: Callable[[Path], Any]
    valid: list[bytes] | Callable[[random.Random], bytes]
    first: Iterable[bytes] = ()
    starts: Callable[[bytes], Sequence[int]] = lambda content: range(len(content))

    def cases(self, rng: random.Random) -> Iterator[bytes]:
        """Yields the hostile files, and then damaged copies of the valid ones."""
        yield from self.first
        while True:
            if callable(self.valid):
                yield self.valid(rng)
                continue
            content = rng.choice(self.valid)
            packed = self.file.endswith(".gz") and rng.random() < 0.6
            changed = altered(content, rng, *self.valid, starts=self.starts(content))
            yield gzip.compress(changed, 1) if packed else changed


def in_head(content: bytes) -> Sequence[int]:
    return range(min(len(content), 400))


RECORDS = record_files()
OBJECTS = np.array([os.system], object)
SHAPE_OF_THE_HEADER = (b"(6, 4), }       ", b"(6, 99999999), }")
HOSTILE_RECORDS = {
    "npz": [saved(np.savez, x=OBJECTS, y=[0]), RECORDS["npz"].replace(*SHAPE_OF_THE_HEADER)],
    "npy": [saved(np.save, OBJECTS), RECORDS["npy"].replace(*SHAPE_OF_THE_HEADER)],
}
VOLUME = np.arange(6 * 7 * 5, dtype=np.int16).reshape(6, 7, 5)
NIFTI = nibabel.Nifti1Image(VOLUME, np.eye(4)).to_bytes()
IDX = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(1568)
MASK = Image.fromarray(np.eye(16, dtype=np.uint8))
MASKS = [
    saved(MASK.convert(mode).save, name) for mode in ("L", "1", "P") for name in ("PNG", "TIFF")
]
MASKED = {".png": MASKS[0], ".gz": gzip.compress(NIFTI)}
BINARY = nibabel.Nifti1Image((VOLUME % 2).astype(np.uint8), np.eye(4)).to_bytes()
KINDS = {
    "mask": Kind("mask.png", read_mask, MASKS, (), in_head),
    "mask volume": Kind("mask.nii.gz", read_mask, [BINARY, gzip.compress(BINARY)], (), in_head),
    "image": Kind(
        *("image.png", read_image, pictures()),
        [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n"],
        in_head,
    ),
    "dicom": Kind(
        *("image.dcm", read_user_image, dicom_files(), ()), lambda file: range(128, len(file))
    ),
    "nifti": Kind("volume.nii.gz", read_user_image, [NIFTI, gzip.compress(NIFTI)], (), in_head),
    "leaf": Kind("leaf", read_writer, leaves),
    "passages": Kind(
        "all_data.json", read_passages, [json.dumps(leaf_form("a\t" + 82 * "b")).encode()]
    ),
    "tweets": Kind(
        *("all_data.json", read_tweets),
        [
            json.dumps(
                {"user_data": {"w": {"x": [["", "", "", "", "good day"]], "y": ["4"]}}}
            ).encode()
        ],
    ),
    "vectors": Kind(
        GLOVE, read_words, [b"good " + b" ".join([b"0.1"] * 300) + b"\nday 1 2\n"], (), in_head
    ),
    "list": Kind(
        *("clipart_train.txt", read_list),
        [
            b"clipart/clock/a.png 1\nclipart/zebra/b.png 3\n",
            b"clipart/bird/b.jpg 3\r\n\r\nclipart/bird/c.jpg 3\n",
        ],
        [
            *("clipart/clock/²\n".encode(), "clipart/clock/a.png ²\n".encode()),
            *(b"clipart/clock/../../etc/passwd 1\n", b"clipart/" * 200_000),
        ],
    ),
    "numbered-list": Kind(
        *("mnist_m_train_labels.txt", read_numbered_list),
        [b"00000000.png 5\n00000001.png 0\n\n"],
        [b"../1.png 1\n", "1.png ²\n".encode()],
    ),
    "users": Kind(
        *("users.csv", lambda path: with_listed_users(Records(path.parent, *IMAGES))),
        [
            b"path,user\na.png,Ada\nb.png,Bob\n",
            b"user,path,x\r\nAda,a.png,1\r\n\r\nBob,b.png,2\r\n",
        ],
        [
            b"path,user" + b",x" * 200_000 + b"\n" + b"a,b\n" * 2000,
            b"path,user\n" + b'"' + b"x" * 500_000,
        ],
    ),
    "weights": Kind(
        *("network.pt", lambda path: read_weights(str(path))),
        [saved(lambda file: torch.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, file))],
    ),
    "idx": Kind("images", lambda path: read_idx(path, 3, 10_000), [IDX], (), in_head),
    **{
        kind: Kind(f"x.{kind}", read_record_file, [valid], HOSTILE_RECORDS.get(kind, ()))
        for kind, valid in RECORDS.items()
    },
}
