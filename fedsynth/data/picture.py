"""Tables and heat maps of partitions, and grids of images; needs only Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedsynth.errors import DataError, OutputError, SettingError

Counts = npt.NDArray[np.integer] | Sequence[Sequence[int]]
Numbers = npt.NDArray[Any]

MAX_ROWS, MAX_COLUMNS = 40, 26
LARGEST = 6
"""Classes that a row lists if there are too many for columns."""
GREY, WHITE, DARK = (200, 200, 200), (255, 255, 255), (8, 48, 107)
FONT_SIZE, CELL_HEIGHT, LEFT, GAP = 16, 26, 90, 8
MAX_NAME = 18
"""The maximum number of characters of a name in a picture."""
MAX_WIDTH, MAX_HEIGHT = 1500, 2000
"""The largest heat map, in pixels, that prints the number in each cell."""
_FONT = ImageFont.load_default(FONT_SIZE)


def partition_table(counts: Counts) -> str:
    """Returns a plain text table of a count matrix [K, C]: clients are rows, classes columns.

    With more than 26 classes, a row lists the client's largest classes instead. With more than 40
    clients, the middle ones are omitted. The last line is the total of all clients.

    Raises:
        DataError: `counts` is not a matrix of counts.
    """
    matrix = _checked_counts(counts)
    K, C = matrix.shape
    if C <= MAX_COLUMNS:
        head = ["client", "examples", *map(str, range(C))]
        last = [[str(n) if n else "·" for n in row] for row in matrix]
    else:
        head = ["client", "examples", "classes", f"largest {LARGEST} (class: examples)"]
        last = [[str((row > 0).sum()), _largest(row)] for row in matrix]
    sizes = matrix.sum(axis=1)
    rows = [[str(k), str(sizes[k]), *last[k]] for k in range(K)]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if C > MAX_COLUMNS:
        widths[-1] = 0  # the last column is text
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    if K > MAX_ROWS:
        half = MAX_ROWS // 2
        lines[half + 1 : -half] = [f"… {K - MAX_ROWS} more"]
    summary = (
        f"{K} clients, {int(sizes.sum())} examples: {_spread(sizes)} and "
        f"{_spread((matrix > 0).sum(axis=1))} classes each (minimum – median – maximum)"
    )
    return "\n".join([*lines, summary])


def _largest(row: Numbers) -> str:
    order = [c for c in np.argsort(-row, kind="stable")[:LARGEST] if row[c]]
    return "  ".join(f"{c}: {row[c]}" for c in order)


def _spread(values: Numbers) -> str:
    return f"{int(values.min())} – {float(np.median(values)):g} – {int(values.max())}"


def partition_png(counts: Counts, path: Path, class_names: Sequence[str] = ()) -> None:
    """Draws a heat map of a count matrix [K, C]: clients are rows, classes columns. Darker cells
    have larger counts; white is zero.

    Args:
        counts: examples of each class at each client.
        path: the PNG file.
        class_names: column labels, rotated if they are wider than the columns. If there are none,
            or there is no room for them, the classes' numbers are used.

    Raises:
        DataError: `counts` is not a matrix of counts.
        OutputError: `path` cannot be written.
    """
    matrix = _checked_counts(counts)
    K, C = matrix.shape
    largest = int(matrix.max(initial=0))
    width = max(36, math.ceil(_FONT.getlength(f"{largest}")) + 10)
    names = list(class_names) if len(class_names) == C else [str(c) for c in range(C)]
    title = f"{K} clients (rows), {C} classes (columns); darkest: {largest} examples"
    rows = [f"client {k}" for k in range(K)]
    # the square root keeps small counts visible next to large ones
    shares = np.sqrt(matrix / (largest or 1))
    if C * width <= MAX_WIDTH and K * CELL_HEIGHT <= MAX_HEIGHT:
        texts = [[str(n) if n else "" for n in row] for row in matrix]
        _heat_map(shares, path, title, rows, names, (width, CELL_HEIGHT), texts)
    else:
        side = max(4, min(16, 1000 // max(K, C)))
        _heat_map(shares, path, title, rows, [str(c) for c in range(C)], (side, side))


def shares_png(matrix_CM: Numbers, path: Path, title: str, class_names: Sequence[str] = ()) -> None:
    """Draws a heat map of non-negative numbers, [classes, clients]: classes are rows, labelled by
    name if names are given. Darker cells are larger; numbers have two digits."""
    C, M = matrix_CM.shape
    finite = np.where(np.isfinite(matrix_CM), matrix_CM, 0.0)
    names = list(class_names) if len(class_names) == C else [str(c) for c in range(C)]
    head = f"{title}: {C} classes (rows), {M} clients (columns)"
    texts = [[f"{value:.2g}" for value in row] for row in matrix_CM]
    shares = finite / (float(finite.max(initial=0.0)) or 1.0)
    _heat_map(shares, path, head, names, [str(k) for k in range(M)], (56, CELL_HEIGHT), texts)


def _heat_map(
    shares_RC: Numbers,
    path: Path,
    title: str,
    row_names: Sequence[str],
    column_names: Sequence[str],
    cell: tuple[int, int],
    texts: Sequence[Sequence[str]] | None = None,
) -> None:
    """Draws numbers from 0 (white) to 1 (dark) as cells of (width, height) pixels."""
    w, h = cell
    rows, columns = (_shortened(names) for names in (row_names, column_names))
    longest = max(map(_FONT.getlength, columns))
    upright = texts is not None and longest > w - 4
    left = max(LEFT, math.ceil(max(map(_FONT.getlength, rows))) + 20)
    top = 48 + (math.ceil(longest) if upright else FONT_SIZE)
    width = max(left + len(columns) * w + 12, math.ceil(_FONT.getlength(title)) + 24)
    picture = Image.new("RGB", (width, top + len(rows) * h + 12), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((10, 8), title, "black", _FONT)
    for r, c in np.ndindex(*shares_RC.shape):
        share = float(shares_RC[r, c])
        x, y = left + c * w, top + r * h
        outline = GREY if min(w, h) >= 12 else None
        draw.rectangle((x, y, x + w - 1, y + h - 1), _blue(share), outline)
        if texts is not None:
            ink = "white" if share > 0.55 else "black"
            draw.text((x + w / 2, y + h / 2), texts[r][c], ink, _FONT, anchor="mm")
    for r in range(0, len(rows), _tick(h, 18)):
        draw.text((left - GAP, top + (r + 0.5) * h), rows[r], "black", _FONT, anchor="rm")
    for c in range(0, len(columns), 1 if upright else _tick(w, min(28, math.ceil(longest)))):
        centre = left + (c + 0.5) * w
        if upright:
            _upright(picture, columns[c], (round(centre), top - 6))
        else:
            draw.text((centre, top - 6), columns[c], "black", _FONT, anchor="mb")
    _save(picture, path)


def by_class(
    images_uint8_NCHW: Tensor, labels_N: Tensor, class_names: Sequence[str], columns: int
) -> tuple[Tensor, list[str]]:
    """Lays images out as a grid, with a row for each class that has images.

    Args:
        images_uint8_NCHW: the images.
        labels_N: their classes.
        class_names: the names of all classes.
        columns: the maximum number of images in a row. Only a class's first images are shown;
            shorter rows are filled with grey.

    Returns:
        The images [rows · columns, C, H, W], and the rows' names.
    """
    rows: list[Tensor] = []
    names = []
    for label in labels_N.unique().tolist():
        class_images = images_uint8_NCHW[labels_N == label][:columns]
        blank = class_images.new_full(
            (columns - len(class_images), *class_images.shape[1:]), GREY[0]
        )
        rows.append(torch.cat([class_images, blank]))
        names.append(str(class_names[label]))
    return torch.cat(rows), names


def image_grid_png(
    images_uint8_NCHW: Tensor | npt.NDArray[np.uint8],
    path: Path,
    columns: int,
    row_names: Sequence[str] = (),
) -> None:
    """Draws all images in one picture, `columns` in a row, with thin lines between them. Small
    images are scaled up; row names are on the left.

    Raises:
        DataError: the images are not uint8 [N, 1, H, W] or [N, 3, H, W] with N > 0.
        SettingError: `columns` is below 1.
        OutputError: `path` cannot be written.
    """
    if columns < 1:
        raise SettingError(None, "columns", f"must be at least 1, got {columns}")
    images = images_uint8_NCHW
    x = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asarray(images)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3) or x.size == 0:
        raise DataError(
            f"a picture grid needs uint8 [N, 1 or 3, H, W], got {x.dtype} {list(x.shape)}"
        )
    n, _, h, w = x.shape
    scale = max(1, math.ceil(48 / max(h, w)))
    tiles = x.transpose(0, 2, 3, 1).repeat(scale, axis=1).repeat(scale, axis=2)
    columns = min(columns, n)
    step_y = h * scale + 1
    step_x = w * scale + 1
    canvas = np.full((math.ceil(n / columns) * step_y + 1, columns * step_x + 1, 3), GREY, np.uint8)
    for i, tile in enumerate(tiles):
        y = (i // columns) * step_y + 1
        left = (i % columns) * step_x + 1
        canvas[y : y + h * scale, left : left + w * scale] = tile
    grid = Image.fromarray(canvas)
    _save(_with_row_names(grid, row_names, step_y) if row_names else grid, path)


def _with_row_names(grid: Image.Image, names: Sequence[str], step: int) -> Image.Image:
    short = _shortened(names)
    left = math.ceil(max(map(_FONT.getlength, short))) + 4 * GAP
    picture = Image.new("RGB", (left + grid.width, grid.height), "white")
    picture.paste(grid, (left, 0))
    draw = ImageDraw.Draw(picture)
    for row, name in enumerate(short):
        place = (left - 2 * GAP, (row + 0.5) * step)
        draw.text(place, name, "black", _FONT, anchor="rm")
    return picture


def _upright(picture: Image.Image, text: str, foot: tuple[int, int]) -> None:
    """Draws text that reads from bottom to top, starting at `foot`."""
    strip = Image.new("RGB", (math.ceil(_FONT.getlength(text)) + 2, FONT_SIZE + 6), "white")
    ImageDraw.Draw(strip).text((0, strip.height / 2), text, "black", _FONT, anchor="lm")
    turned = strip.rotate(90, expand=True)
    picture.paste(turned, (foot[0] - turned.width // 2, foot[1] - turned.height))


def _shortened(names: Sequence[str]) -> list[str]:
    return [name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…" for name in names]


def _checked_counts(counts: Counts) -> Numbers:
    matrix = np.asarray(counts)
    valid = matrix.ndim == 2 and 0 not in matrix.shape and np.issubdtype(matrix.dtype, np.integer)
    if not valid or matrix.min() < 0:
        raise DataError(
            f"counts must be integers ≥ 0 [clients, classes], got {matrix.dtype} "
            f"{list(matrix.shape)}"
        )
    return matrix


def _blue(share: float) -> tuple[int, int, int]:
    """Returns white at 0, dark blue at 1."""
    r, g, b = (round(a + (z - a) * share) for a, z in zip(WHITE, DARK, strict=True))
    return r, g, b


def _tick(step: int, room: int) -> int:
    """Returns the interval between labelled cells that leaves room for labels: 1, 5, 10, 20, …"""
    return next(n for n in (1, 5, 10, 20, 50, 100, 1000) if n * step >= room or n == 1000)


def _save(picture: Image.Image, path: Path) -> None:
    try:
        picture.save(path, format="PNG")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from None
