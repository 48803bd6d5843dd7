"""Decoding of image files, which are untrusted input, into arrays of one size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedsynth.data.files import one_line
from fedsynth.data.images import Bytes
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import read_regular

T = TypeVar("T")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
"""The formats that Pillow may decode. Pillow detects the format from the content, whatever the
file's extension, and would start Ghostscript for some others."""
MAX_PIXELS = 2**25
"""The maximum size of an image: a photograph of 33 megapixels, 134 MB decoded."""
MAX_IMAGE_BYTES = 3 * MAX_PIXELS
MAX_SCANS = 100
"""The maximum number of scans in a JPEG file. Each scan is one more pass over the whole image;
cameras and editors write about ten."""
_LARGE_PIXELS = 2**20
_LARGE_IMAGE_LOCK = Lock()
_LEVELS_OF_16_BITS = 65535 / 255
"""One 8-bit level in 16-bit levels."""
_EXIF_ORIENTATION = 0x0112


class ImageHeader(NamedTuple):
    """The header of an image file: its upright size in pixels, and whether it is grey."""

    height: int
    width: int
    grey: bool


def images_in(folder: Path) -> list[Path]:
    """Returns the image files of a folder, sorted by name and without hidden files. Returns an
    empty list if the folder does not exist.

    Raises:
        DataFilesCorruptError: the folder cannot be listed.
    """
    if not folder.is_dir():
        return []
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise DataFilesCorruptError(f"{folder} cannot be listed: {one_line(error)}") from None
    return [f for f in files if f.suffix.lower() in EXTENSIONS and not f.name.startswith(".")]


def read_headers(paths: Sequence[Path]) -> tuple[list[ImageHeader], dict[int, str]]:
    """Returns the headers of the readable files, and the other files' faults by position."""
    headers, faults = _attempt(_read_header, paths)
    return list(filter(None, headers)), faults


def read_pixels(
    paths: Sequence[Path], channels: int, height: int, width: int
) -> tuple[Bytes, dict[int, str]]:
    """Reads images as [N, channels, height, width]; also returns the faults of unreadable files,
    by position. Unreadable images are black.

    Images of another size are resized (Lanczos), without keeping their aspect ratio. Grey images
    are converted to colour with three equal channels, colour images to grey by luma, and 16-bit
    levels to 8 bits. Transparency is dropped; photographs are turned upright by their EXIF data.
    """
    images = np.zeros((len(paths), channels, height, width), np.uint8)

    def read(position: int) -> None:
        with opened_image(paths[position]) as image:
            upright = ImageOps.exif_transpose(image)
            images[position] = _decoded(_in_8_bits(upright), channels, height, width)

    _, faults = _attempt(read, range(len(paths)))
    return images, faults


def read_images(paths: Sequence[Path], spec: DatasetSpec, *, resize: bool = False) -> Bytes:
    """Reads a published data set's images, [N, C, H, W].

    Images of another size are resized (Lanczos) if `resize`, else refused.

    Raises:
        DataFilesCorruptError: a file is not an image, or does not have the data set's size.
    """
    images = np.empty((len(paths), *spec.image_shape), np.uint8)

    def read(position: int) -> None:
        with opened_image(paths[position]) as image:
            if not resize and image.size != (spec.width, spec.height):
                raise ValueError(
                    f"it is {image.width}×{image.height}, but images of {spec.name} must be "
                    f"{spec.width}×{spec.height}: unpack the data set again"
                )
            images[position] = _decoded(image, *spec.image_shape)

    _, faults = _attempt(read, range(len(paths)))
    for position, fault in faults.items():
        raise DataFilesCorruptError(f"{paths[position]} cannot be read as an image: {fault}")
    return images


@contextmanager
def opened_image(path: Path) -> Iterator[Image.Image]:
    """Opens an image file and reads its header; large images are decoded one at a time.

    Raises:
        OSError: the file cannot be read, or is not an image. A damaged file may raise any
            exception, both here and when it is decoded.
    """
    content = read_regular(path, MAX_IMAGE_BYTES)
    if not content:
        raise ValueError("it is empty: 0 bytes")
    if content.count(b"\xff\xda") > MAX_SCANS and content.startswith(b"\xff\xd8"):
        raise ValueError(f"it is a JPEG file of more than {MAX_SCANS} scans")
    with Image.open(BytesIO(content), formats=FORMATS) as image:  # reads only the header
        pixels = image.width * image.height
        if pixels > MAX_PIXELS:
            raise ValueError(
                f"it is {image.width}×{image.height}, more than {MAX_PIXELS:,} pixels: reduce it"
            )
        with _LARGE_IMAGE_LOCK if pixels > _LARGE_PIXELS else nullcontext():
            yield image


def _attempt(read: Callable[[T], Any], items: Iterable[T]) -> tuple[list[Any], dict[int, str]]:
    """Returns the results of `read`, None where it failed, and the faults by position. Uses
    threads, because decoding releases the interpreter's lock."""
    faults: dict[int, str] = {}

    def read_or_note(numbered: tuple[int, T]) -> Any:
        position, item = numbered
        try:
            return read(item)
        except FileNotFoundError:
            faults[position] = "the file does not exist"
        except UnidentifiedImageError:  # its text contains a memory address
            faults[position] = f"it is not a {', '.join(FORMATS)} file"
        except Exception as error:  # a damaged image may raise anything
            faults[position] = one_line(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(read_or_note, enumerate(items)))
    return results, dict(sorted(faults.items()))


def _read_header(path: Path) -> ImageHeader:
    with opened_image(path) as image:
        grey = image.mode in ("L", "1", "LA", "La") or _has_16_bits(image)
        if image.getexif().get(_EXIF_ORIENTATION) in (5, 6, 7, 8):  # rotated by 90°
            return ImageHeader(image.width, image.height, grey)
        return ImageHeader(image.height, image.width, grey)


def _decoded(image: Image.Image, channels: int, height: int, width: int) -> Bytes:
    """Decodes an image in the requested mode and size: [channels, height, width]."""
    mode = {1: "L", 3: "RGB"}[channels]
    plain = image.convert(mode).resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(plain, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I")


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Scales 16-bit levels to 8 bits: Pillow's own conversion would clip all above 255."""
    if not _has_16_bits(image):
        return image
    levels = np.asarray(image).astype(np.float64).clip(0, 65535)
    return Image.fromarray(np.rint(levels / _LEVELS_OF_16_BITS).astype(np.uint8))
