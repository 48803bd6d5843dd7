"""Who has what, as text and as a picture, and image sets as one picture. Pillow only."""

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

MAX_ROWS, MAX_COLUMNS = 40, 26
_GREY = (200, 200, 200)
FONT, CELL = 16, 26
"""Pixels: of letters, and of a cell that has a number."""
NAME = 18
"""Letters of a name."""
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def partition_table(counts: Counts) -> str:
    """A plain text table of a count matrix [K, C]: clients are rows, classes columns.

    With more than 26 classes a row lists the client's largest classes instead; with more than 40
    clients the middle ones are left out. The last line sums up all clients.

    Raises:
        DataError: not a matrix of counts.
    """
    matrix = _checked_counts(counts)
    body = _wide_rows(matrix) if matrix.shape[1] <= MAX_COLUMNS else _largest_rows(matrix)
    head = body[0]
    rows = body[1:]
    if len(rows) > MAX_ROWS:
        hidden = len(rows) - MAX_ROWS
        half = MAX_ROWS // 2
        rows = [*rows[:half], [f"… {hidden} more"], *rows[-half:]]
    sizes = matrix.sum(axis=1)
    held = (matrix > 0).sum(axis=1)
    summary = (
        f"{len(matrix)} clients, {int(sizes.sum())} examples: {_spread(sizes)} each, of "
        f"{_spread(held)} classes "
        "(fewest – median – most)"
    )
    return "\n".join([*_aligned([head, *rows]), summary])


def partition_png(counts: Counts, path: Path, class_names: Sequence[str] = ()) -> None:
    """A heat map of a count matrix [K, C]: clients are rows, classes columns; the darker, the more;
    white is none.

    Args:
        counts: examples of each class at each client.
        path: of the PNG file.
        class_names: over the columns, upright where they are broader than these; without them,
            and where there is no place for them, the classes' numbers.

    Raises:
        DataError: not a matrix of counts. OutputError: `path` cannot be written.
    """
    matrix = _checked_counts(counts)
    K, C = matrix.shape
    font = _font(FONT)
    most = int(matrix.max(initial=0))
    number_width = math.ceil(font.getlength(f"{most}")) + 10
    # Numbers where a row of them is still a picture; else squares, small when there are many.
    with_numbers = C * number_width <= 1500 and K * CELL <= 2000
    side = max(4, min(16, 1000 // max(K, C)))
    w, h = (max(number_width, 36), CELL) if with_numbers else (side, side)
    names = _shortened(class_names) if with_numbers and len(class_names) == C else []
    longest = max((font.getlength(name) for name in names), default=0.0)
    upright = longest > w - 4
    left = 90
    top = 40 + (math.ceil(longest) if upright else FONT) + 8
    title = f"{K} clients (rows), {C} classes (columns); darkest: {most} examples"
    width = max(left + C * w + 12, math.ceil(font.getlength(title)) + 24)
    picture = Image.new("RGB", (width, top + K * h + 12), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((10, 8), title, "black", font)
    for k, c in np.ndindex(K, C):
        _count_cell(draw, (left + c * w, top + k * h, w, h), int(matrix[k, c]), most, font)
    for k in range(0, K, _tick(h, 18)):
        draw.text((left - 8, top + (k + 0.5) * h), f"client {k}", "black", font, anchor="rm")
    for c in range(0, C, 1 if names else _tick(w, 28)):
        centre = left + (c + 0.5) * w
        if names and upright:
            _upright(picture, names[c], (round(centre), top - 6), font)
        else:
            name = names[c] if names else str(c)
            draw.text((centre, top - 6), name, "black", font, anchor="mb")
    _save(picture, path)


def _count_cell(
    draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], n: int, most: int, font: Font
) -> None:
    """One cell of a heat map of counts, with its number where there is place."""
    x, y, w, h = box
    # The square root keeps small counts visible beside large ones.
    share = math.sqrt(n / most) if most else 0.0
    draw.rectangle((x, y, x + w - 1, y + h - 1), _blue(share), _GREY if min(w, h) >= 12 else None)
    if n and h == CELL:
        ink = "white" if share > 0.6 else "black"
        draw.text((x + w / 2, y + h / 2), str(n), ink, font, anchor="mm")


def shares_png(
    matrix_CM: npt.NDArray[Any], path: Path, title: str, class_names: Sequence[str] = ()
) -> None:
    """A heat map of non-negative numbers, [classes, clients]: classes are rows, by name where names
    are given; the darker, the larger; with two digits."""
    C, M = matrix_CM.shape
    font = _font(FONT)
    most = float(matrix_CM.max(initial=0.0)) or 1.0
    names = _shortened(class_names) if len(class_names) == C else [str(c) for c in range(C)]
    w = 56
    h = CELL
    left = math.ceil(max(font.getlength(name) for name in names)) + 20
    top = 62
    head = f"{title}: {C} classes (rows), {M} clients (columns)"
    width = max(left + M * w + 12, math.ceil(font.getlength(head)) + 24)
    picture = Image.new("RGB", (width, top + C * h + 12), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((10, 8), head, "black", font)
    for c, k in np.ndindex(C, M):
        share = float(matrix_CM[c, k]) / most
        x = left + k * w
        y = top + c * h
        draw.rectangle((x, y, x + w - 2, y + h - 2), fill=_blue(share))
        ink = "white" if share > 0.5 else "black"
        draw.text((x + w / 2, y + h / 2), f"{matrix_CM[c, k]:.2g}", ink, font, anchor="mm")
    for c in range(C):
        draw.text((left - 8, top + (c + 0.5) * h), names[c], "black", font, anchor="rm")
    for k in range(M):
        draw.text((left + (k + 0.5) * w, top - 6), str(k), "black", font, anchor="mb")
    _save(picture, path)


def by_class(
    images_uint8_NCHW: Tensor, labels_N: Tensor, class_names: Sequence[str], columns: int
) -> tuple[Tensor, list[str]]:
    """Images as the rows of a grid, a row for each class that has any, and the rows' names.

    Args:
        images_uint8_NCHW: the images.
        labels_N: their classes.
        class_names: of all classes.
        columns: the most of a row; a class with more has its first ones, a shorter row ends grey.

    Returns:
        (images [rows · columns, C, H, W], names).
    """
    rows: list[Tensor] = []
    names = []
    for label in labels_N.unique().tolist():
        own = images_uint8_NCHW[labels_N == label][:columns]
        blank = own.new_full((columns - len(own), *own.shape[1:]), _GREY[0])
        rows.append(torch.cat([own, blank]))
        names.append(str(class_names[label]))
    return torch.cat(rows), names


def image_grid_png(
    images_uint8_NCHW: Tensor | npt.NDArray[np.uint8],
    path: Path,
    columns: int,
    row_names: Sequence[str] = (),
) -> None:
    """All images in one picture, row by row with `columns` a row, thin lines between them; small
    images are scaled up, and names stand before their rows.

    Raises:
        DataError: not uint8 [N, 1, H, W] or [N, 3, H, W] with N > 0. SettingError: `columns` below
            1.
        OutputError: `path` cannot be written.
    """
    if columns < 1:
        raise SettingError(None, "columns", f"must be at least 1, got {columns}")
    given = images_uint8_NCHW
    x = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
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
    canvas = np.full(
        (math.ceil(n / columns) * step_y + 1, columns * step_x + 1, 3), _GREY, np.uint8
    )
    for i, tile in enumerate(tiles):
        y = (i // columns) * step_y + 1
        left = (i % columns) * step_x + 1
        canvas[y : y + h * scale, left : left + w * scale] = tile
    grid = Image.fromarray(canvas)
    _save(_with_row_names(grid, row_names, step_y) if row_names else grid, path)


def _with_row_names(grid: Image.Image, names: Sequence[str], step: int) -> Image.Image:
    font = _font(FONT)
    short = _shortened(names)
    left = math.ceil(max(font.getlength(name) for name in short)) + 20
    picture = Image.new("RGB", (left + grid.width, grid.height), "white")
    picture.paste(grid, (left, 0))
    draw = ImageDraw.Draw(picture)
    for row, name in enumerate(short):
        draw.text((left - 8, (row + 0.5) * step), name, "black", font, anchor="rm")
    return picture


def _upright(picture: Image.Image, text: str, foot: tuple[int, int], font: Font) -> None:
    """Text that is read from below, with its beginning at `foot`."""
    strip = Image.new("RGB", (math.ceil(font.getlength(text)) + 2, FONT + 6), "white")
    ImageDraw.Draw(strip).text((0, strip.height / 2), text, "black", font, anchor="lm")
    turned = strip.rotate(90, expand=True)
    picture.paste(turned, (foot[0] - turned.width // 2, foot[1] - turned.height))


def _shortened(names: Sequence[str]) -> list[str]:
    return [name if len(name) <= NAME else name[: NAME - 1] + "…" for name in names]


def _font(size: int) -> Font:
    return ImageFont.load_default(size)


def _checked_counts(counts: Counts) -> npt.NDArray[Any]:
    matrix = np.asarray(counts)
    if (
        matrix.ndim != 2
        or 0 in matrix.shape
        or not np.issubdtype(matrix.dtype, np.integer)
        or matrix.min() < 0
    ):
        raise DataError(
            f"counts must be integers ≥ 0 [clients, classes], got {matrix.dtype} "
            f"{list(matrix.shape)}"
        )
    return matrix


def _wide_rows(matrix: npt.NDArray[Any]) -> list[list[str]]:
    head = ["client", "examples", *map(str, range(matrix.shape[1]))]
    return [
        head,
        *(
            [str(k), str(row.sum()), *(str(n) if n else "·" for n in row)]
            for k, row in enumerate(matrix)
        ),
    ]


def _largest_rows(matrix: npt.NDArray[Any], show: int = 6) -> list[list[str]]:
    rows = [["client", "examples", "classes", f"largest {show} (class: examples)"]]
    for k, row in enumerate(matrix):
        order = [c for c in np.argsort(-row, kind="stable")[:show] if row[c]]
        rows.append(
            [
                str(k),
                str(row.sum()),
                str((row > 0).sum()),
                "  ".join(f"{c}: {row[c]}" for c in order),
            ]
        )
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    """Numbers to the right; the last column of a wide text and single-cell rows to the left."""
    full = [row for row in rows if len(row) > 1]
    widths = [max(len(row[i]) for row in full) for i in range(len(full[0]))]
    text_last = any(" " in row[-1] for row in full)
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        if len(row) == 1 or text_last:
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def _spread(values: npt.NDArray[Any]) -> str:
    return f"{int(values.min())} – {float(np.median(values)):g} – {int(values.max())}"


def _blue(share: float) -> tuple[int, int, int]:
    """White at 0, dark blue at 1."""
    white = (255, 255, 255)
    dark = (8, 48, 107)
    r, g, b = (round(a + (z - a) * share) for a, z in zip(white, dark, strict=True))
    return r, g, b


def _tick(step: int, room: int) -> int:
    """Every how many cells a label fits: 1, 5, 10, 20, …"""
    return next(n for n in (1, 5, 10, 20, 50, 100, 1000) if n * step >= room or n == 1000)


def _save(picture: Image.Image, path: Path) -> None:
    try:
        picture.save(path, format="PNG")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from None
