"""Fuzzes the readers with damaged data files in a separate process: `python fuzz_readers.py SEED
'{"KIND": CASES, …}'`.

Prints one JSON object with an entry for each kind: the number of rejected and accepted cases, the
largest traced memory beyond ten times the file's size, the longest time, and the faults, which are
neither one-line errors nor valid results. The file CASE of the current folder contains the kind and
the number of the running case, to identify a crash by a signal.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import pickletools
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pyarrow.csv
import pyarrow.parquet
import safetensors.numpy
import torch
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGBaseline8Bit, RLELossless

from fedsynth.data.array_files import read_cifar_batch, read_idx
from fedsynth.data.files import users_of_images
from fedsynth.data.image_files import read_images, read_patients, read_pixels
from fedsynth.data.image_folders import read_domainnet_list, read_femnist
from fedsynth.data.medical_files import Decoding
from fedsynth.data.record_files import parts_of, read_part
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError
from fedsynth.features.pretrained import read_weights
from tests.data.test_medical_files import write_dicom
from tests.fuzz.mutations import altered, altered_json, json_bytes

ROWS = np.arange(3072 * 2, dtype=np.uint8).reshape(2, 3072)
RECORD_FILES = ("npz", "npy", "safetensors", "parquet", "csv")
OFFICE, FEMNIST = map(dataset_spec, ("office-caltech-10", "femnist"))
DOMAINNET = dataset_spec("domainnet-10")


def python2(
    code: bytes = b"u1", raw: bytes = ROWS.tobytes(), shape: bytes = b"K\x02M\x00\x0c\x86"
) -> bytes:
    """Returns a batch of two images as Python 2 pickled it, with the given type, bytes and shape of
    the array."""
    kind = b"U" + bytes([len(code)]) + code
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01" + shape + b"cnumpy\ndtype\n" + kind + b"K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tbU\x06labels](K\x03K\x04eu."
    )


def hostile_pickles() -> Iterator[bytes]:
    """Yields attacks on single instructions of a pickle interpreter."""
    pointers = struct.pack("<Q", 0xDEADBEEF) * 768
    for code in (b"O8", b"O", b"V8", b"M8", b"S8", b"U2", b"c16", b"u1,O", b"i16", b"f8"):
        yield python2(code, pointers)
    for raw in (b"", b"x" * 6143):
        yield python2(raw=raw)
    for shape in (b"J\xff\xff\xff\xff\x85", b"\x8a\x09" + b"\x7f" * 9 + b"\x85", b"NNN\x87", b"N"):
        yield python2(shape=shape)
    for length in (2**31 - 1, 2**32 - 1):
        for opcode in (b"T", b"B", b"X", b"\x8b"):
            yield b"\x80\x03" + opcode + struct.pack("<I", length) + b"abc."
    for length in (2**32, 2**63 - 1, 2**64 - 1):
        for opcode in (b"\x8d", b"\x8e", b"\x96", b"\x95"):
            yield b"\x80\x05" + opcode + struct.pack("<Q", length) + b"abc."
    for opcodes in (b"(", b"]", b"}", b")", b")\x85", b"N\x94", b"]q\x00", b"h\x00", b"0", b"2"):
        yield b"\x80\x04" + opcodes * 100_000 + b"."
    yield b"\x80\x04]\x94" + b"h\x00h\x00a" * 50_000 + b"."
    yield b"\x80\x04]\x94(" + b"h\x00" * 100_000 + b"e."
    collisions = (struct.pack("<q", n * (2**61 - 1)) for n in range(4))
    yield b"\x80\x02}(" + b"".join(b"\x8a\x08" + number + b"N" for number in collisions) + b"u."
    for digits in (b"I%b\n.", b"L%bL\n.", b"p%b\n."):
        yield digits % (b"9" * 100_000)
    for name in (b"os\nsystem", b"numpy._core.numeric\n_frombuffer", b"\x1b[31m\nx"):
        for use in (b")R", b"(tR", b"}b", b")\x81", b")}\x92", b"o", b"}U\x01aK\x01sb"):
            yield b"c" + name + b"\n" + use + b"."
    for instruction in (b"P1\n", b"Q", b"\x82\x01", b"\x84\x01\0\0\0", b"\x97", b"\x98", b"\x8f"):
        yield b"\x80\x05N" + instruction + b"."


def batches() -> list[bytes]:
    """Returns valid pickles of Python 2 and of each later protocol."""
    batch = {b"labels": [3, 4], b"data": ROWS, b"filenames": [b"a.png", b"b.png"]}
    fortran = {b"labels": [3, 4], b"data": np.asfortranarray(ROWS)}
    return [python2(), *(pickle.dumps(b, p) for b in (batch, fortran) for p in range(2, 6))]


def mutated(
    valid: list[bytes], rng: random.Random, offsets: Callable[[bytes], list[int]] | None = None
) -> bytes:
    """Returns a damaged copy of one of the valid files: at the offsets that `offsets` returns, by
    default in the first 400 bytes."""
    content = rng.choice(valid)
    starts = offsets(content) if offsets else range(min(len(content), 400))
    return altered(content, rng, *valid, starts=starts)


def pickles(rng: random.Random) -> Iterator[bytes]:
    yield from hostile_pickles()
    valid = batches()
    while True:
        yield mutated(valid, rng, lambda file: [at or 0 for *_, at in pickletools.genops(file)])


def images(rng: random.Random) -> Iterator[bytes]:
    picture = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))
    valid = []
    for name in ("PNG", "JPEG", "BMP", "WEBP", "TIFF"):
        file = io.BytesIO()
        picture.save(file, name, progressive=True)
        valid.append(file.getvalue())
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n"
    while True:
        yield mutated(valid, rng)


def dicom_files(rng: random.Random) -> Iterator[bytes]:
    """Yields damaged DICOM files of each compression that the readers decode."""
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    jpeg = io.BytesIO()
    Image.fromarray(grey).save(jpeg, "JPEG")
    valid = []
    for name, changes in {
        "plain": {"WindowCenter": 30, "WindowWidth": 40},
        "frames": {"NumberOfFrames": 3, "PixelData": grey.tobytes() * 3},
        "jpeg": {"syntax": JPEGBaseline8Bit, "PixelData": encapsulate([jpeg.getvalue()])},
        "rle": {"syntax": RLELossless, "PixelData": encapsulate([rle_encode(grey)])},
    }.items():
        valid.append(write_dicom(Path(name), grey, **changes).read_bytes())
    while True:
        yield mutated(valid, rng, lambda file: list(range(128, len(file))))


def rle_encode(grey: npt.NDArray[np.uint8]) -> bytes:
    """Returns one RLE segment of literal bytes, after its header of 64 bytes."""
    header = struct.pack("<16I", 1, 64, *[0] * 14)
    return header + bytes([grey.size - 1]) + grey.tobytes()


def nifti_files(rng: random.Random) -> Iterator[bytes]:
    volume = np.arange(6 * 7 * 5, dtype=np.int16).reshape(6, 7, 5)
    plain = nibabel.Nifti1Image(volume, np.eye(4)).to_bytes()
    while True:
        changed = mutated([plain], rng)
        yield changed if rng.random() < 0.2 else gzip.compress(changed, 1)
        yield mutated([gzip.compress(plain)], rng)


def leaves(rng: random.Random) -> Iterator[bytes]:
    row = [0.5] * 784

    def file(x: Any) -> Any:
        return {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [x], "y": [3]}}}

    yield json.dumps(file(row)).encode()
    while True:
        changed = json_bytes(altered_json(file(rng.choice((row, "row"))), rng), rng)
        yield changed.replace(b'"row"', json.dumps(row).encode())


def user_files(rng: random.Random) -> Iterator[bytes]:
    yield b"path,user" + b",x" * 200_000 + b"\n" + b"a,b\n" * 2000
    yield b"path,user\n" + b'"' + b"x" * 500_000
    valid = [
        b"path,user\na.png,Ada\nb.png,Bob\n",
        b"user,path,x\r\nAda,a.png,1\r\n\r\nBob,b.png,2\r\n",
    ]
    while True:
        yield mutated(valid, rng)


def lists(rng: random.Random) -> Iterator[bytes]:
    """Yields damaged lists of DomainNet's images."""
    yield "clipart/clock/²".encode() + b"\n"
    yield "clipart/clock/a.png ²\n".encode()
    yield b"clipart/clock/../../etc/passwd 1\n"
    yield b"clipart/" * 200_000
    valid = [
        b"clipart/clock/a.png 1\nclipart/zebra/b.png 3\n",
        b"clipart/bird/b.jpg 3\r\n\r\nclipart/bird/c.jpg 3\n",
    ]
    while True:
        yield mutated(valid, rng)


def idx_files(rng: random.Random) -> Iterator[bytes]:
    plain = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(1568)
    while True:
        changed = mutated([plain], rng)
        if rng.random() < 0.7:
            yield gzip.compress(changed, 1)
        else:
            yield mutated([gzip.compress(plain)], rng)


def record_file(kind: str) -> bytes:
    """Returns a valid file of six records in a format of `read_part`."""
    x, y = np.arange(24, dtype=np.float32).reshape(6, 4), np.arange(6) % 2
    file = io.BytesIO()
    if kind == "npz":
        np.savez_compressed(file, x=x, y=y, site=np.array(["a", "b"] * 3))
    elif kind == "npy":
        np.save(file, x)
    elif kind == "safetensors":
        return safetensors.numpy.save({"x": x, "y": y})
    else:
        table = pyarrow.table({"x": list(x), "f": x[:, 0], "y": y, "site": ["a", "b"] * 3})
        if kind == "csv":
            pyarrow.csv.write_csv(table.drop_columns("x"), file)
        else:
            pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def record_files(rng: random.Random, kind: str) -> Iterator[bytes]:
    valid = [record_file(kind)]
    if kind in ("npz", "npy"):
        objects = io.BytesIO()
        items = np.array([os.system], object)
        if kind == "npz":
            np.savez(objects, x=items, y=[0])
        else:
            np.save(objects, items)
        yield objects.getvalue()
        yield valid[0].replace(b"(6, 4), }       ", b"(6, 99999999), }")
    while True:
        yield mutated(valid, rng, lambda content: list(range(len(content))))


def read_record_file(path: Path) -> None:
    if path.suffix == ".npy":
        np.save(path.with_name("y.npy"), np.arange(6) % 2)
    for part in parts_of(str(path)).values():
        records = read_part(part, dict.fromkeys(("feature", "label", "user", "site"), ""), str)
        if not len(records.values) == len(records.names.labels) == len(records.names.sites):
            raise ValueError(f"accepted as {records.values.shape}")
        float(records.values.sum())  # touches all of it


def weight_files(rng: random.Random) -> Iterator[bytes]:
    """Yields damaged files of a network's weights that torch saved."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, buffer)
    valid = [buffer.getvalue()]
    while True:
        yield mutated(valid, rng, lambda content: list(range(len(content))))


def read_weight_file(path: Path) -> None:
    try:
        read_weights(str(path))
    except SettingError as error:
        raise DataError(str(error)) from None


def read_image(path: Path) -> None:
    x = read_images([path], OFFICE, resize=True)
    if x.shape != (1, 3, 64, 64):
        raise ValueError(f"accepted as {x.shape}")


def read_user_image(path: Path) -> None:
    x, faults, _ = read_pixels([path], 3, 16, 16, Decoding())
    for fault in faults.values():
        raise DataFilesCorruptError(fault)
    if x.shape != (1, 3, 16, 16):
        raise ValueError(f"accepted as {x.shape}")
    read_patients([path])


def read_batch(path: Path) -> None:
    x, y = read_cifar_batch(path, "labels")
    if x.dtype != np.uint8 or x.shape != (len(y), 3, 32, 32) or y.dtype != np.int64:
        raise ValueError(f"accepted as {x.dtype} {x.shape}")
    int(x.sum())  # touches all of it


def read_writer(path: Path) -> None:
    root = path.parent
    for split in ("train", "test"):
        (root / "femnist" / split).mkdir(parents=True, exist_ok=True)
        (root / "femnist" / split / "a.json").write_bytes(path.read_bytes())
    train, _ = read_femnist(FEMNIST, root)
    if train.images.shape[1:] != (1, 28, 28):
        raise ValueError(f"accepted as {train.images.shape}")


def read_list(path: Path) -> None:
    for file, label, domain in read_domainnet_list(path.parent, "train", 0, DOMAINNET):
        inside = file.is_relative_to(path.parent) and ".." not in file.parts
        if not inside or not 0 <= label < 10 or domain != 0:
            raise ValueError(f"accepted {file} as {label}")


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[bytes]], str, Callable[[Path], Any]]] = {
    "pickle": (pickles, "batch", read_batch),
    "image": (images, "image.png", read_image),
    "dicom": (dicom_files, "image.dcm", read_user_image),
    "nifti": (nifti_files, "volume.nii.gz", read_user_image),
    "leaf": (leaves, "leaf", read_writer),
    "list": (lists, "clipart_train.txt", read_list),
    "users": (user_files, "users.csv", lambda path: users_of_images(path, ["a.png", "b.png"])),
    "weights": (weight_files, "network.pt", read_weight_file),
    "idx": (idx_files, "images-idx3-ubyte.gz", lambda path: read_idx(path, 3, 10_000)),
    **{
        kind: (partial(record_files, kind=kind), f"x.{kind}", read_record_file)
        for kind in RECORD_FILES
    },
}


def fuzz(kind: str, seed: int, count: int) -> dict[str, Any]:
    """Reads `count` damaged files of a kind and counts the results."""
    cases, name, read = KINDS[kind]
    path, outcomes = Path(name).absolute(), {"refused": 0, "accepted": 0}
    faults: list[str] = []
    beyond, slowest = 0, 0.0
    for number, content in zip(range(count), cases(random.Random(seed)), strict=False):
        Path("CASE").write_text(f"{kind} {number}")
        path.write_bytes(content)
        tracemalloc.reset_peak()
        memory_before, started = tracemalloc.get_traced_memory()[0], time.perf_counter()
        try:
            read(path)
            outcomes["accepted"] += 1
        except DataError as error:
            outcomes["refused"] += 1
            if "\n" in str(error) or len(str(error)) > 600 or not str(error).isprintable():
                faults.append(f"case {number}: message {str(error)[:700]!r}")
        except BaseException as error:
            faults.append(f"case {number}: {type(error).__name__}: {str(error)[:200]}")
        slowest = max(slowest, time.perf_counter() - started)
        peak = tracemalloc.get_traced_memory()[1] - memory_before
        beyond = max(beyond, peak - 10 * len(content))
    return {**outcomes, "beyond": beyond, "slowest": slowest, "faults": faults}


if __name__ == "__main__":
    tracemalloc.start()
    counts = json.loads(sys.argv[2])
    print(json.dumps({kind: fuzz(kind, int(sys.argv[1]), counts[kind]) for kind in counts}))
