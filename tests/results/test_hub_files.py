"""Tests of exported sets in the library datasets and in the format Croissant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import SharedSet
from fedsynth.privacy.files import file_hash
from fedsynth.results.export import Share, _write

datasets = pytest.importorskip("datasets")
LABELS = torch.tensor([1, 0, 1, 0, 2, 0])


def export(folder: Path, shape: tuple[int, int, int], **more: Any) -> SharedSet:
    """Writes a set of six random images and returns the set."""
    images = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0)) * 1.5 - 0.25
    names = ("a/b", 'c "d"', "e: f")
    spec = DatasetSpec(
        "a: b", *shape, 3, 6, 6, (0.5,) * shape[0], (0.2,) * shape[0], names, "", **more
    )
    soft = torch.eye(3)[LABELS] * 0.7 + 0.1
    synthetic = SharedSet(images, LABELS, soft, None, spec, 1.5, 1e-5)
    folder.mkdir()
    _write(Share(synthetic, "fedsynth", None, None, False, None, False), folder)
    return synthetic


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def card_of(folder: Path) -> Any:
    """Returns the Croissant card, after checking its files against the folder."""
    card = json.loads((folder / "croissant.json").read_text())
    assert card["@type"] == "sc:Dataset"
    assert card["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    assert "ε = 1.5 at δ = 1e-05" in card["description"]
    for entry in card["distribution"]:
        if entry["@type"] == "cr:FileObject":
            assert entry["sha256"] == file_hash(folder / entry["contentUrl"])
        else:
            assert len(list(folder.glob(entry["includes"]))) == 6
    identifiers = {entry["@id"] for entry in card["distribution"]}
    for field in card["recordSet"][0]["field"]:
        (source,) = (value for key, value in field["source"].items() if key.startswith("file"))
        assert source["@id"] in identifiers
    return card


def test_exported_images_load_with_datasets(tmp_path: Path) -> None:
    synthetic = export(tmp_path / "share", (3, 5, 4))
    rows = datasets.load_dataset(str(tmp_path / "share"))["train"]
    order = LABELS.argsort(stable=True)
    assert rows["label"] == LABELS[order].tolist()
    expected = (synthetic.images[order].permute(0, 2, 3, 1) * 255).round().clamp(0, 255)
    for row, image in zip(rows, expected, strict=True):
        assert np.array_equal(np.asarray(row["image"]), image)
    image, label = card_of(tmp_path / "share")["recordSet"][0]["field"]
    assert image["source"]["extract"] == {"fileProperty": "content"}
    regex = label["source"]["transform"]["regex"]
    paths = sorted((tmp_path / "share" / "images").rglob("*.png"))
    assert [int(re.match(regex, str(path))[1]) for path in paths] == rows["label"]


def test_exported_vectors_load_with_datasets(tmp_path: Path) -> None:
    """A broken version would write scaled values, or lose digits of float32."""
    synthetic = export(tmp_path / "share", (1, 1, 7), bounds=(-4.0, 4.0))
    rows = datasets.load_dataset(str(tmp_path / "share"))["train"].with_format("numpy")
    assert rows["label"][:].tolist() == LABELS.tolist()
    values = np.stack([rows[f"x{column}"][:] for column in range(7)], axis=1)
    original = synthetic.images.flatten(1).numpy() * np.float32(8) - np.float32(4)
    assert values.astype(np.float32) == pytest.approx(original, abs=1e-6)
    assert np.array_equal(values.astype(np.float32), synthetic.values().flatten(1).numpy())
    soft = np.stack([rows[f"p{label}"][:] for label in range(3)], axis=1)
    assert np.array_equal(soft.astype(np.float32), synthetic.soft_labels.numpy())
    fields = card_of(tmp_path / "share")["recordSet"][0]["field"]
    assert [field["source"]["extract"]["column"] for field in fields] == rows.column_names
