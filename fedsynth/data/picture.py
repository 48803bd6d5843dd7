"""Who has what, as text and as a picture, and image sets as one picture. Pillow only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fedsynth.errors import DataError, OutputError, SettingError

Counts = npt.NDArray[np.integer] | Sequence[Sequence[int]]

MAX_ROWS, MAX_COLUMNS = 40, 26
_GREY = (200, 200, 200)


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


def partition_png(counts: Counts, path: Path) -> None:
    """A heat map of a count matrix [K, C]: clients are rows, classes columns; the darker, the more;
    white is none.

    Raises:
        DataError: not a matrix of counts. OutputError: `path` cannot be written.
    """
    matrix = _checked_counts(counts)
    K, C = matrix.shape
    font = ImageFont.load_default()
    most = int(matrix.max(initial=0))
    number_width = math.ceil(font.getlength(str(most))) + 6
    # Numbers where a row of them is still a picture; else squares, small when there are many.
    with_numbers = C * number_width <= 1000 and K * 16 <= 1600
    side = max(4, min(16, 1000 // max(K, C)))
    w, h = (max(number_width, 20), 16) if with_numbers else (side, side)
    left = 40
    top = 34
    picture = Image.new("RGB", (max(left + C * w + 10, 330), top + K * h + 10), "white")
    draw = ImageDraw.Draw(picture)
    draw.text(
        (6, 4),
        f"{K} clients (rows), {C} classes (columns); darkest: {most} examples",
        "black",
        font,
    )
    for k, c in np.ndindex(K, C):
        n = int(matrix[k, c])
        x = left + c * w
        y = top + k * h
        # The square root keeps small counts visible beside large ones.
        share = math.sqrt(n / most) if most else 0.0
        draw.rectangle(
            (x, y, x + w - 1, y + h - 1), _blue(share), _GREY if min(w, h) >= 12 else None
        )
        if with_numbers and n:
            draw.text(
                (x + w / 2, y + h / 2),
                str(n),
                "white" if share > 0.6 else "black",
                font,
                anchor="mm",
            )
    for k in range(0, K, _tick(h, 12)):
        draw.text((left - 4, top + (k + 0.5) * h), str(k), "black", font, anchor="rm")
    for c in range(0, C, _tick(w, 20)):
        draw.text((left + (c + 0.5) * w, top - 3), str(c), "black", font, anchor="mb")
    _save(picture, path)


def shares_png(matrix_CM: npt.NDArray[Any], path: Path, title: str) -> None:
    """A heat map of non-negative numbers, [classes, clients]: classes are rows; the darker, the
    larger; with two digits."""
    C, M = matrix_CM.shape
    font = ImageFont.load_default()
    most = float(matrix_CM.max(initial=0.0)) or 1.0
    w = 40
    h = 18
    left = 40
    top = 34
    picture = Image.new("RGB", (max(left + M * w + 10, 330), top + C * h + 10), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((6, 4), f"{title}: {C} classes (rows), {M} clients (columns)", "black", font)
    for c, k in np.ndindex(C, M):
        share = float(matrix_CM[c, k]) / most
        x = left + k * w
        y = top + c * h
        draw.rectangle((x, y, x + w - 2, y + h - 2), fill=_blue(share))
        draw.text(
            (x + 4, y + 2), f"{matrix_CM[c, k]:.2g}", "white" if share > 0.5 else "black", font
        )
    for c in range(C):
        draw.text((6, top + c * h + 2), str(c), "black", font)
    _save(picture, path)


def image_grid_png(
    images_uint8_NCHW: Tensor | npt.NDArray[np.uint8], path: Path, columns: int
) -> None:
    """All images in one picture, row by row with `columns` a row, thin lines between them; small
    images are scaled up.

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
    _save(Image.fromarray(canvas), path)


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
