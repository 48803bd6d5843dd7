"""Draws partition tables and heat maps, and image grids, with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from fedsynth.errors import writing

Counts = npt.NDArray[np.integer] | Sequence[Sequence[int]]
Numbers = npt.NDArray[Any]

MAX_ROWS, MAX_COLUMNS = 40, 26
# The number of classes listed in a row if there are too many for one column each.
TOP_CLASSES = 6

GREY, WHITE, DARK_BLUE = 200, (255, 255, 255), (8, 48, 107)
FONT_SIZE, TITLE_HEIGHT, CELL_SIDE, MARGIN = 16, 40, 26, 12
# The maximum length of a name in a picture.
MAX_NAME = 12

MIN_IMAGE_SIDE = 48
_FONT = ImageFont.load_default(FONT_SIZE)


def partition_table(counts: Counts) -> str:
    """Formats a count matrix [K, C] as a text table with a row for each client.

    Each class has a column. With more than 26 classes, a row lists the client's largest classes
    instead. With more than 40 clients, the rows in the middle are omitted. The last line summarises
    all clients.
    """
    matrix = np.asarray(counts)
    K, C = matrix.shape
    width = len(str(matrix.max(initial=C - 1)))
    lines = ["client  examples"]
    if C <= MAX_COLUMNS:
        lines[0] += "".join(map(f"  {{:>{width}}}".format, range(C)))
    else:
        lines[0] += f"  classes  largest {TOP_CLASSES} (class: examples)"
    for client, row in enumerate(matrix):
        line = f"{client:6}  {row.sum():8}"
        if C <= MAX_COLUMNS:
            for number in row:
                line += f"  {number or '·':>{width}}"
        else:
            line += f"  {np.count_nonzero(row):7}"
            top = np.argsort(-row, kind="stable")[:TOP_CLASSES]
            for label in top[row[top] > 0]:
                line += f"  {label}: {row[label]}"
        lines.append(line)
    if K > MAX_ROWS:
        half = MAX_ROWS // 2
        lines[half + 1 : -half] = [f"… {K - MAX_ROWS} more"]
    sizes = matrix.sum(axis=1)
    lines.append(
        f"{K} clients, {sizes.sum()} examples: {_spread(sizes)} and "
        f"{_spread(np.count_nonzero(matrix, axis=1))} classes each (minimum – median – maximum)"
    )
    return "\n".join(lines)


def _spread(values: Numbers) -> str:
    return f"{values.min()} – {np.median(values):g} – {values.max()}"


def partition_png(counts: Counts, path: Path) -> None:
    """Draws a count matrix [K, C] as a heat map, with clients as rows and classes as columns.

    Darker cells have larger counts, and white cells have none.

    Args:
        counts: the example counts of (client, class) pairs.
        path: the PNG file.

    Raises:
        OutputError: `path` cannot be written.
    """
    matrix = np.asarray(counts)
    K, C = matrix.shape
    largest = matrix.max(initial=0)
    title = f"{K} clients (rows), {C} classes (columns); darkest: {largest} examples"
    # the square root keeps small counts visible next to large ones
    shares = np.sqrt(matrix / max(largest, 1))
    colours = np.rint(WHITE + shares[..., None] * np.subtract(DARK_BLUE, WHITE)).astype(np.uint8)
    side = max(4, min(CELL_SIDE, 1000 // max(K, C)))
    cells = Image.fromarray(colours).resize((C * side, K * side), Image.Resampling.NEAREST)
    width = max(cells.width, math.ceil(_FONT.getlength(title))) + 2 * MARGIN
    picture = Image.new("RGB", (width, TITLE_HEIGHT + cells.height + MARGIN), "white")
    ImageDraw.Draw(picture).text((MARGIN, 8), title, "black", _FONT)
    picture.paste(cells, (MARGIN, TITLE_HEIGHT))
    with writing(path):
        picture.save(path, format="PNG")


def by_class(
    images_uint8_NCHW: Tensor, labels_N: Tensor, class_names: Sequence[str], columns: int
) -> tuple[Tensor, list[str]]:
    """Arranges images in a grid, with one row per class. Classes without images have no row.

    Args:
        images_uint8_NCHW: the images.
        labels_N: the image classes.
        class_names: the names of all classes.
        columns: the number of images in a row. Only the first images of larger classes are shown,
            and rows of smaller classes are filled with grey.

    Returns:
        The images [rows · columns, C, H, W], and the name of each row.
    """
    labels = labels_N.unique().tolist()
    rows = images_uint8_NCHW.new_full((len(labels), columns, *images_uint8_NCHW.shape[1:]), GREY)
    names = []
    for row, label in zip(rows, labels, strict=True):
        class_images = images_uint8_NCHW[labels_N == label][:columns]
        row[: len(class_images)] = class_images
        names.append(str(class_names[label]))
    return rows.flatten(0, 1), names


def image_grid_png(
    images_uint8_NCHW: Tensor, path: Path, columns: int, row_names: Sequence[str] = ()
) -> None:
    """Draws images as a grid in one picture, with `columns` images per row.

    Images may be grey or coloured. Thin lines separate them, and small images are scaled up. The
    names of the rows are on the left.

    Raises:
        OutputError: `path` cannot be written.
    """
    height, width = images_uint8_NCHW.shape[2:]
    scale = max(1, math.ceil(MIN_IMAGE_SIDE / max(height, width)))
    images = images_uint8_NCHW.cpu().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    picture = Image.fromarray(_grid(images, columns).permute(1, 2, 0).numpy())
    if row_names:
        names = list(map(_shortened, row_names))
        label_width = math.ceil(max(map(_FONT.getlength, names))) + 2 * MARGIN
        labelled = Image.new("RGB", (label_width + picture.width, picture.height), "white")
        labelled.paste(picture, (label_width, 0))
        draw = ImageDraw.Draw(labelled)
        for row, name in enumerate(names):
            middle = (row + 0.5) * (height * scale + 1)
            draw.text((label_width - MARGIN, middle), name, "black", _FONT, anchor="rm")
        picture = labelled
    with writing(path):
        picture.save(path, format="PNG")


def _grid(images_NCHW: Tensor, columns: int) -> Tensor:
    """Arranges colour images in a grid [3, H, W], with a one-pixel border around each image.

    The result equals `torchvision.utils.make_grid`, whose import takes seconds.
    """
    count, _, height, width = images_NCHW.shape
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    cells = images_NCHW.new_full((rows * columns, 3, height + 1, width + 1), GREY)
    cells[:count, :, 1:, 1:] = images_NCHW
    grid = cells.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)
    return F.pad(grid.flatten(1, 2).flatten(2), (0, 1, 0, 1), value=GREY)


def _shortened(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 1]}…"
