"""Tables and pictures of partitions, and picture grids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsynth.data.picture import (
    by_class,
    image_grid_png,
    partition_png,
    partition_table,
    shares_png,
)

RNG = np.random.default_rng(0)


def test_a_small_table_in_full() -> None:
    assert partition_table([[5, 0, 120], [0, 7, 0]]).splitlines() == [
        "client  examples    0    1    2",
        "     0       125    5    ·  120",
        "     1         7    ·    7    ·",
        "2 clients, 132 examples: 7 – 66 – 125 and 1 – 1.5 – 2 classes each (minimum – median – "
        "maximum)",
    ]


@pytest.mark.parametrize(("clients", "classes"), [(100, 10), (10, 100), (1, 1), (500, 26)])
def test_tables_and_pictures_stay_of_a_size_to_look_at(
    clients: int, classes: int, tmp_path: Path
) -> None:
    counts = RNG.integers(0, 500, (clients, classes))
    lines = partition_table(counts).splitlines()
    assert len(lines) <= 43
    assert max(map(len, lines)) <= 160
    assert ("… 60 more" in lines) == (clients == 100)
    partition_png(counts, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.format == "PNG"
        assert max(picture.size) <= 2100


def test_the_picture_is_white_for_none_and_darkest_for_most(tmp_path: Path) -> None:
    partition_png([[0, 1_000_000], [250_000, 0]], tmp_path / "p.png", ("first", "second"))
    pixels = np.asarray(Image.open(tmp_path / "p.png").convert("RGB"))
    # The first row of cells begins at 64; cells are 26 high. A line clear of the numbers.
    row1, row2 = pixels[64 + 2].tolist(), pixels[64 + 26 + 2].tolist()
    assert [8, 48, 107] in row1
    assert [132, 152, 181] in row2  # halfway, as sqrt(1/4) = 1/2
    assert row2.index([132, 152, 181]) < row1.index([8, 48, 107])


def test_names_label_columns_and_rows(tmp_path: Path) -> None:
    many = np.ones((2, 400), int)
    partition_png(many, tmp_path / "p.png", [f"class {c}" for c in range(400)])
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size[1] < 100
    shares_png(np.eye(2), tmp_path / "s.png", "who can teach", ("the first of all", "b"))
    letters = np.asarray(Image.open(tmp_path / "s.png").convert("L"))[66:84, 10:120]
    assert letters.min() < 100
    grid = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    image_grid_png(grid, tmp_path / "g.png", 1, ("ill", "healthy"))
    pixels = np.asarray(Image.open(tmp_path / "g.png"))
    assert pixels.shape[0] == 2 * 49 + 1
    left = pixels.shape[1] - 50
    for row in range(2):  # letters before each row, and the image behind them
        assert pixels[49 * row : 49 * (row + 1), :left].min() < 100
        assert pixels[49 * row + 24, left + 24].max() == 0


def test_images_are_laid_out_by_class() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    labels = torch.tensor([2, 0, 2, 2, 0])
    rows, names = by_class(images, labels, ("a", "b", "c"), columns=3)
    assert names == ["a", "c"]
    assert rows.flatten().tolist() == [1, 4, 200, 0, 2, 3]
    rows, _ = by_class(images, labels, ("a", "b", "c"), columns=2)
    assert rows.flatten().tolist() == [1, 4, 0, 2]
