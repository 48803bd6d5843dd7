"""ImageData, `from_arrays`, normalisation and its inverse, and pictures of images and counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from fedsynth.data.images import ImageData, denormalise, from_arrays, normalise, require_all_classes
from fedsynth.data.picture import (
    by_class,
    image_grid_png,
    partition_png,
    partition_table,
)
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError

DIGITS, CIFAR = dataset_spec("digits"), dataset_spec("cifar10")
RNG = np.random.default_rng(0)


def random_digits(n: int = 20) -> ImageData:
    images = RNG.integers(0, 256, (n, 8, 8), dtype=np.uint8)
    return from_arrays(images, np.arange(n) % 10, DIGITS)


@pytest.mark.parametrize("label_type", [np.uint8, np.int16, np.uint64])
def test_from_arrays_accepts_numpy_and_torch(label_type: npt.DTypeLike) -> None:
    grey = RNG.integers(0, 256, (5, 8, 8), dtype=np.uint8)
    labels = np.array([0, 9, 3, 3, 1])
    data = from_arrays(grey, labels.astype(label_type), DIGITS)
    assert (data.images.dtype, data.labels.dtype) == (torch.uint8, torch.int64)
    assert np.array_equal(data.images[:, 0].numpy(), grey)
    assert np.array_equal(data.labels.numpy(), labels)
    same = from_arrays(torch.from_numpy(grey).unsqueeze(1), torch.from_numpy(labels).int(), DIGITS)
    assert torch.equal(data.images, same.images)


def test_from_arrays_rounds_floats_to_nearest_level() -> None:
    levels = torch.arange(256, dtype=torch.float64).view(4, 1, 8, 8)
    for nudge in (-0.4, 0.0, 0.4):
        x = ((levels + nudge) / 255).clamp(0, 1)
        assert torch.equal(
            from_arrays(x, torch.zeros(4, dtype=torch.int64), DIGITS).images, levels.to(torch.uint8)
        )


def floats(value: float) -> npt.NDArray[np.float32]:
    x = np.zeros((3, 8, 8), np.float32)
    x[1, 2, 3:5] = value
    return x


VALID = np.zeros((3, 8, 8), np.uint8)
LABELS = np.array([0, 1, 2])


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (floats(np.nan), LABELS, "2 of 192 are NaN or infinite"),
        (floats(-np.inf), LABELS, "2 of 192 are NaN or infinite"),
        (floats(1.5), LABELS, r"must be in \[0, 1\].* 2 of 192"),
        (VALID.astype(np.int64), LABELS, "must be uint8, got int64"),
        (VALID[:, :7], LABELS, r"\[1, 8, 8\], got \[3, 7, 8\]"),
        (VALID[0], LABELS, r"got \[8, 8\]"),
        (VALID[..., None, None], LABELS, r"got \[3, 8, 8, 1, 1\]"),
        (VALID, LABELS[:2], r"labels .* shape \[3\], got \[2\]"),
        (VALID, np.array([0, 1, 10]), r"labels .* in \[0, 10\), but 1 .* such as 10"),
        (VALID, np.array([0, -1, 1]), "such as -1"),
        (VALID, np.array([0, 1, 2**64 - 1], np.uint64), "labels .* must be in"),
        (VALID, LABELS.astype(float), "labels .* integers, got float64"),
        (VALID, np.array([True, False, True]), "labels .* integers, got bool"),
        (VALID, LABELS[:, None], r"labels .* shape \[3\], got \[3, 1\]"),
        (VALID[:0], LABELS[:0], "at least one example"),
        (np.array([["a"]]), LABELS, "must be a NumPy array or a tensor of numbers"),
        ([[1, 2], [3]], LABELS, "must be a NumPy array or a tensor of numbers"),
    ],
)
def test_invalid_arrays_raise_one_line_errors(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        from_arrays(images, labels, DIGITS)
    assert "\n" not in str(caught.value)


def test_subsets_keep_domains_and_groups() -> None:
    images = RNG.integers(0, 256, (6, 8, 8), dtype=np.uint8)
    users = np.array([7, 7, 0, 3000, 0, 7], np.int32)
    hospitals = dataclasses.replace(DIGITS, name="scans", domains=("A", "B"))
    sites = np.arange(6, dtype=np.uint64) % 2
    data = from_arrays(images, np.arange(6), hospitals, sites, groups=users)
    part = data.to("cpu").subset(torch.tensor([3, 0, 3], dtype=torch.int32))
    assert part.labels.tolist() == [3, 0, 3]
    assert part.class_counts().tolist() == [1, 0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert torch.equal(part.images[0], data.images[3])
    assert [origin.tolist() for origin in part.origins()] == [[1, 0, 1], [3000, 7, 3000]]
    assert random_digits().domains is None
    for invalid in (np.full(6, 3), np.zeros(6), np.zeros(2, np.int64), np.zeros(6, complex)):
        with pytest.raises(DataError, match=r"domains .* must"):
            from_arrays(images, np.arange(6), hospitals, invalid)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (np.zeros((6, 1), int), " must have the shape"),
        (np.zeros(6), " must be integers, got float64"),
        (np.zeros(6, bool), " must be integers, got bool"),
        (np.array([0, 1, 2, -3, 4, 5]), " must be in .* such as -3"),
        (np.full(6, 2**64 - 1, np.uint64), " must be in"),
        (np.array([], int), "at least one example|groups .* shape"),
    ],
)
def test_invalid_groups_and_indices_are_rejected(indices: npt.NDArray[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(np.zeros((6, 8, 8), np.uint8), np.arange(6), DIGITS, groups=indices)
    with pytest.raises(DataError, match=message):
        random_digits(20).subset(indices)
    with pytest.raises(DataError, match=r"indices .* in \[0, 20\).* such as 20"):
        random_digits(20).subset([20])
    with pytest.raises(DataError, match=r"labels of digits must be among 0, 1, .*, got 'a'"):
        from_arrays(np.zeros((1, 8, 8), np.uint8), ["a"], DIGITS)


def test_classes_without_examples_are_named() -> None:
    data = random_digits(20)
    require_all_classes(data)
    with pytest.raises(DataError, match="no example of 1 classes, such as 4"):
        require_all_classes(data.subset(np.flatnonzero(np.arange(20) % 10 != 4)))


@pytest.mark.parametrize("spec", [DIGITS, CIFAR, dataset_spec("svhn")], ids=lambda spec: spec.name)
def test_denormalise_inverts_normalise_at_every_level(spec: Any) -> None:
    square = dataclasses.replace(spec, height=16, width=16)
    level = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, spec.channels, 16, 16)
    x = normalise(level, square)
    assert torch.equal(denormalise(x, square), level)
    mean, std = torch.tensor(spec.mean).view(1, -1, 1, 1), torch.tensor(spec.std).view(1, -1, 1, 1)
    torch.testing.assert_close(x, (level / 255 - mean) / std)


def test_normalise_keeps_input_and_returns_requested_dtype() -> None:
    data = random_digits()
    original = data.images.clone()
    assert denormalise(torch.full((1, 1, 8, 8), 100.0), DIGITS).unique().tolist() == [255]
    assert denormalise(torch.full((1, 1, 8, 8), -100.0), DIGITS).unique().tolist() == [0]
    x = normalise(data.images, DIGITS, torch.bfloat16)
    assert x.dtype == torch.bfloat16
    assert torch.equal(data.images, original)
    torch.testing.assert_close(x, normalise(data.images, DIGITS).bfloat16())


def test_constants_of_inference_mode_work_in_training() -> None:
    spec = dataclasses.replace(DIGITS, mean=(0.123,))
    with torch.inference_mode():
        normalise(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), spec)
    weight = torch.ones(1, 1, 8, 8, requires_grad=True)
    (normalise(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), spec) * weight).sum().backward()
    assert weight.grad is not None


# ---------------------------------------------------------------------------------------- pictures


def test_small_partition_table_is_complete() -> None:
    assert partition_table([[5, 0, 120], [0, 7, 0]]).splitlines() == [
        "client  examples    0    1    2",
        "     0       125    5    ·  120",
        "     1         7    ·    7    ·",
        "2 clients, 132 examples: 7 – 66 – 125 and 1 – 1.5 – 2 classes each (minimum – median – "
        "maximum)",
    ]


@pytest.mark.parametrize(("clients", "classes"), [(100, 10), (10, 100), (1, 1), (500, 26)])
def test_large_tables_and_pictures_are_bounded(clients: int, classes: int, tmp_path: Path) -> None:
    counts = RNG.integers(0, 500, (clients, classes))
    lines = partition_table(counts).splitlines()
    assert len(lines) <= 43
    assert max(map(len, lines)) <= 160
    assert ("… 60 more" in lines) == (clients == 100)
    partition_png(counts, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.format == "PNG"
        assert max(picture.size) <= 2100


def test_partition_picture_is_shaded_by_count(tmp_path: Path) -> None:
    partition_png([[0, 1_000_000], [250_000, 0]], tmp_path / "p.png")
    pixels = np.asarray(Image.open(tmp_path / "p.png").convert("RGB"))
    # the cells begin at (12, 40) and are 26 wide
    assert pixels[40 + 1, [13, 39]].tolist() == [[255, 255, 255], [8, 48, 107]]
    halfway = [132, 152, 181]  # sqrt(1/4) = 1/2
    assert pixels[40 + 27, [13, 39]].tolist() == [halfway, [255, 255, 255]]


def test_picture_rows_are_labelled(tmp_path: Path) -> None:
    grid = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    image_grid_png(grid, tmp_path / "g.png", 1, ("ill", "healthy"))
    pixels = np.asarray(Image.open(tmp_path / "g.png"))
    margin = pixels.shape[1] - 50
    for row in range(2):  # letters before each row, and the image behind them
        assert pixels[49 * row : 49 * (row + 1), :margin].min() < 100
        assert pixels[49 * row + 24, margin + 24].max() == 0


def test_image_grid_is_ordered_by_class() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    labels = torch.tensor([2, 0, 2, 2, 0])
    rows, names = by_class(images, labels, ("a", "b", "c"), columns=3)
    assert names == ["a", "c"]
    assert rows.flatten().tolist() == [1, 4, 200, 0, 2, 3]
