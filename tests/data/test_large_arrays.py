"""Arrays in temporary files: the same values as in memory, from every kind of file."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsynth import large_arrays
from fedsynth.data.images import from_arrays
from fedsynth.data.own_data import load_records
from fedsynth.data.registry import custom_spec
from fedsynth.errors import DataFilesCorruptError, OutputError
from fedsynth.features.encoding import encode
from fedsynth.features.registry import feature_map
from tests.raising import raises

LABELS = ["ill", "well"] * 4
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 5, 6, 3)).astype(np.uint8)


def _folder(place: Path) -> Path:
    for number, (label, pixels) in enumerate(zip(LABELS, PIXELS, strict=True)):
        (place / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / label / f"{number}.png")
    return place


def _npy(place: Path) -> Path:
    place.mkdir()
    np.save(place / "x.npy", PIXELS)
    np.save(place / "y.npy", LABELS)
    return place / "x.npy"


def _by_columns(place: Path) -> Path:
    path = _npy(place)
    np.save(path, np.asfortranarray(PIXELS))
    return path


def _npz(place: Path) -> Path:
    np.savez(place.with_suffix(".npz"), x=PIXELS, y=LABELS)
    return place.with_suffix(".npz")


def _values(place: Path) -> Path:
    np.savez(place.with_suffix(".npz"), x=PIXELS.astype(np.float32), y=LABELS)
    return place.with_suffix(".npz")


def _parquet(place: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    cells = []
    for pixels in PIXELS:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        cells.append({"bytes": buffer.getvalue(), "path": None})
    columns = datasets.Features(image=datasets.Image(), label=datasets.Value("string"))
    table = datasets.Dataset.from_dict({"image": cells, "label": LABELS}, columns)
    table.to_parquet(str(place.with_suffix(".parquet")), batch_size=3)
    return place.with_suffix(".parquet")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps arrays from 1 byte on."""
    monkeypatch.setattr(large_arrays, "MAPPED_BYTES", 1)


@pytest.mark.parametrize("write", [_folder, _npy, _by_columns, _npz, _values, _parquet])
def test_mapped_records_and_vectors_are_those_in_memory(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write(tmp_path / "scans")
    settings = {"bounds": "0,300"} if write is _values else {}
    created: list[Any] = []
    create = tempfile.TemporaryFile

    def counting() -> Any:
        created.append(create())
        return created[-1]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", counting)
    results = []
    for limit in (2**29, 1):
        monkeypatch.setattr(large_arrays, "MAPPED_BYTES", limit)
        train = load_records(place, **settings).train
        features = feature_map("pixels", train.spec.image_shape)
        vectors = encode(train.subset([1, 3, 4]), features, torch.device("cpu")).images
        results.append((train.images, train.labels, train.record_bytes, vectors))
        assert bool(created) == (limit == 1)
    for in_memory, in_file in zip(*results, strict=True):
        assert in_memory is in_file is None or torch.equal(in_memory, in_file)
    assert not list((tmp_path / "temporary").iterdir())  # no file has a name


def test_arrays_of_the_caller_are_copied(small: None) -> None:
    given = PIXELS.copy()
    spec = custom_spec("scans", (3, 5, 6), ("ill", "well"), source="test")
    data = from_arrays(given, LABELS, spec)
    given[:] = 0
    assert torch.equal(data.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))


def test_full_disk_is_one_error(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with raises(OutputError, "files.space"):
        large_arrays.new_array((2, 2))


def test_shortened_file_is_refused(small: None, tmp_path: Path) -> None:
    path = _npz(tmp_path / "scans")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"'shape': (8,", b"'shape': (9,"))
    with pytest.raises(DataFilesCorruptError):
        load_records(path)
    with pytest.raises(ValueError, match="2 bytes too early"):
        large_arrays.read_array(io.BytesIO(b"abc"), 5)
