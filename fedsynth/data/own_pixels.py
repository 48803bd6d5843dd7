"""Decoding of a user's image files, of any size and mode, to arrays of one size; reports the files
that cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from fedsynth.data.files import one_line
from fedsynth.data.folders import FORMATS, MOST_PIXELS, Bytes, opened_image

T = TypeVar("T")
SIXTEEN_BITS = 65535 / 255
"""One 8-bit level in 16-bit levels."""


class Look(NamedTuple):
    """The header of an image file: its upright size in pixels, and whether it is grey."""

    height: int
    width: int
    grey: bool


def look_at(paths: Sequence[Path]) -> list[Look | str]:
    """Returns the header of each file, or the reason why it cannot be read."""
    return _each(paths, _look)


def read_pixels(
    paths: Sequence[Path], channels: int, height: int, width: int
) -> tuple[Bytes, dict[int, str]]:
    """Reads images as [N, channels, height, width]; also returns why files cannot be read, by
    position. Unreadable images are black.

    Images of another size are resized (Lanczos), without keeping their aspect ratio. Grey images
    are converted to colour with three equal channels, colour images to grey by luma, and 16-bit
    levels to 8 bits. Transparency is dropped; photographs are turned upright by their EXIF data.
    """
    images = np.zeros((len(paths), channels, height, width), np.uint8)

    def read(position: int) -> None:
        with opened_image(paths[position], _refuse_huge) as image:
            images[position] = _scaled(image, channels, height, width)

    results = _each(range(len(paths)), read)
    return images, {row: result for row, result in enumerate(results) if isinstance(result, str)}


def _each(of: Iterable[T], read: Callable[[T], Any]) -> list[Any]:
    """Returns the results of `read`, or the reasons why it failed. Uses threads, because decoding
    releases the interpreter's lock."""

    def one(which: T) -> Any:
        try:
            return read(which)
        except FileNotFoundError:
            return "the file does not exist"
        except UnidentifiedImageError:  # its text contains a memory address
            return f"it is not a {', '.join(FORMATS)} file"
        except Exception as error:  # a damaged image may raise anything
            return one_line(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, of))


def _look(path: Path) -> Look:
    with opened_image(path, _refuse_huge) as image:
        width, height = image.size
        if image.getexif().get(0x0112) in (5, 6, 7, 8):  # EXIF orientation: rotated by 90°
            width, height = height, width
        return Look(height, width, _is_grey(image))


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA", "La", "I") or image.mode.startswith("I;16")


def _refuse_huge(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise ValueError(f"it is {width}×{height}, more than {MOST_PIXELS:,} pixels: reduce it")


def _scaled(image: Image.Image, channels: int, height: int, width: int) -> Bytes:
    """Decodes an image, upright, in the requested mode and size: [channels, height, width]."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "I" or upright.mode.startswith("I;16"):
        upright = _eight_bits(upright)
    mode = "L" if channels == 1 else "RGB"
    plain = upright if upright.mode == mode else upright.convert(mode)
    if plain.size != (width, height):
        plain = plain.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(plain, np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scales 16-bit levels to 8 bits: Pillow's own conversion would clip all above 255."""
    levels: npt.NDArray[Any] = np.asarray(image).astype(np.float64)
    return Image.fromarray(np.rint(levels.clip(0, 65535) / SIXTEEN_BITS).astype(np.uint8))
