"""Shared parts of the data sets that are read from folders: the reader interface, and decoding of
image files into arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedsynth.data.arrays import IntArray
from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError
from fedsynth.privacy.files import read_regular

Bytes = npt.NDArray[np.uint8]
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
"""The formats that Pillow may decode. Pillow detects the format from the content, whatever the
file's extension, and would start Ghostscript for some others."""

MOST_PIXELS = 2**25
"""The maximum size of an image to be resized: a photograph of 33 megapixels, 134 MB decoded."""

MOST_IMAGE_BYTES = 3 * MOST_PIXELS
MOST_SCANS = 100
"""The maximum number of scans in a JPEG file. Each scan is one more pass over the whole image;
cameras and editors write about ten."""

_LARGE_PIXELS = 2**20
_ONE_LARGE_AT_A_TIME = Lock()


@dataclass(frozen=True)
class Split:
    """Images [N, C, H, W] and labels [N] of one split; `domains` and `groups` [N] if the data set
    records where examples come from."""

    images: Bytes
    labels: IntArray
    domains: IntArray | None = None
    groups: IntArray | None = None


@dataclass(frozen=True)
class Reader:
    """The reader of a data set in a folder.

    Attributes:
        needs: the required files and folders in the data folder.
        where: tells the user what to put there and where to get it.
        read: returns the training and test splits, given the specification and the data folder.
    """

    needs: tuple[str, ...]
    where: str
    read: Callable[[DatasetSpec, Path], tuple[Split, Split]]


def read_lines(path: Path, name: str, hint: str) -> list[str]:
    """Returns the lines of a text file of the data set `name`.

    Raises:
        DataFilesMissingError: no such file; the message includes `hint` to get it.
        DataFilesCorruptError: not a text file.
    """
    try:
        return read_regular(path, MAX_LIST_BYTES).decode("utf-8").splitlines()
    except FileNotFoundError:
        raise DataFilesMissingError(f"{name}: no {path.name} in {path.parent}; {hint}") from None
    except OSError as error:
        raise DataFilesCorruptError(f"{path} cannot be read: {one_line(error)}") from None
    except UnicodeDecodeError:
        raise DataFilesCorruptError(f"{path} is not a text file") from None


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
    return [f for f in files if f.suffix.lower() in ENDINGS and not f.name.startswith(".")]


def read_images(paths: Sequence[Path], spec: DatasetSpec, *, resize: bool = False) -> Bytes:
    """Reads image files as RGB, [N, 3, H, W].

    Images of another size are resized (Lanczos) if `resize`, else refused.

    Raises:
        DataFilesMissingError: a file does not exist.
        DataFilesCorruptError: a file is not an image, or does not have the data set's size.
    """
    images = np.empty((len(paths), *spec.image_shape), np.uint8)

    def read(position: int) -> None:
        images[position] = _pixels(paths[position], spec, resize)

    with ThreadPoolExecutor() as pool:  # decoding releases the interpreter's lock
        # results are consumed one by one, so that the first error stops the reading
        for _ in pool.map(read, range(len(paths))):
            pass
    return images


def _pixels(path: Path, spec: DatasetSpec, resize: bool) -> Bytes:
    try:
        with opened_image(path, lambda size: _check_size(path, size, spec, resize)) as image:
            return _colour(image, spec)
    except FileNotFoundError:
        raise DataFilesMissingError(f"{spec.name}: {path} is listed but does not exist") from None
    except DataFilesCorruptError:
        raise
    except Exception as error:  # a damaged image may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as an image: {one_line(error)}"
        ) from None


@contextmanager
def opened_image(path: Path, check: Callable[[tuple[int, int]], None]) -> Iterator[Image.Image]:
    """Opens an image file and reads its header; large images are decoded one at a time.

    Args:
        check: called with (width, height) before anything is decoded.

    Raises:
        OSError: the file cannot be read, or is not an image. A damaged file may raise any
            exception, both here and when it is decoded.
    """
    content = read_regular(path, MOST_IMAGE_BYTES)
    if not content:
        raise ValueError("it is empty: 0 bytes")
    if content.count(b"\xff\xda") > MOST_SCANS and content.startswith(b"\xff\xd8"):
        raise ValueError(f"it is a JPEG file of more than {MOST_SCANS} scans")
    with Image.open(BytesIO(content), formats=FORMATS) as image:  # reads only the header
        check(image.size)
        large = image.width * image.height > _LARGE_PIXELS
        with _ONE_LARGE_AT_A_TIME if large else nullcontext():
            yield image


def _check_size(path: Path, size: tuple[int, int], spec: DatasetSpec, resize: bool) -> None:
    """Checks an image's size from its header, before anything is decoded."""
    width, height = size
    if resize and width * height > MOST_PIXELS:
        raise DataFilesCorruptError(
            f"{path} is {width}×{height}, more than {MOST_PIXELS:,} pixels: reduce it or leave it "
            "out"
        )
    if not resize and size != (spec.width, spec.height):
        raise DataFilesCorruptError(
            f"{path} is {width}×{height}, but images of {spec.name} must be "
            f"{spec.width}×{spec.height}: unpack the data set again"
        )


def _colour(image: Image.Image, spec: DatasetSpec) -> Bytes:
    """Decodes an image to RGB at the data set's size, [3, H, W]."""
    colour = image if image.mode == "RGB" else image.convert("RGB")
    size = (spec.width, spec.height)
    if colour.size != size:
        colour = colour.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(colour, np.uint8).transpose(2, 0, 1)
