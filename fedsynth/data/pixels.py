"""Decodes image files into arrays of one size. The files are untrusted input.

`medical` decodes DICOM and NIfTI files.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedsynth.data import medical
from fedsynth.data.files import missing
from fedsynth.data.images import Bytes
from fedsynth.data.medical import Decoding, Picture
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, one_line
from fedsynth.files import read_regular
from fedsynth.large_arrays import new_array

T = TypeVar("T")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
# The formats that Pillow may decode. Pillow detects formats by a file's content, not by its
# extension, and starts Ghostscript for some unlisted formats.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")
# The maximum number of pixels in an image. The decoded image takes up to 134 MB.
MAX_PIXELS = 2**25
NO_IMAGE = f"the file is not a {', '.join(FORMATS)} file"  # Pillow's text contains an address

MAX_IMAGE_BYTES = 3 * MAX_PIXELS
# The maximum number of scans in a JPEG file. Decoding passes over the whole image once per scan.
# Cameras and editors write about ten scans.
MAX_SCANS = 100

# Threads cost more than they save if reading a file takes less time. The first files are timed.
_SLOW_SECONDS, _TRIED = 1e-3, 16
_LARGE_PIXELS = 2**20
_LARGE_IMAGE_LOCK = Lock()
# The centre and width of the 16-bit range.
_RANGE_OF_16_BITS = (65535 / 2, 65535.0)

_EXIF_ORIENTATION = 0x0112
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0  # in TIFF files
ALPHA_LOST = "images with transparency, shown on white"
COLOUR_LOST = "colour images, converted to grey"
PAGES_LOST = "images that are the first page of several"


class ImageHeader(NamedTuple):
    """The information in an image file's header.

    Attributes:
        height, width: the size in pixels of the upright image.
        grey: whether the image is grey.
    """

    height: int
    width: int
    grey: bool


def images_in(folder: Path) -> list[Path]:
    """Lists a folder's image files by name, without hidden files.

    Raises:
        FileNotFoundError: the folder does not exist or contains no images.
        OSError: the folder cannot be listed.
    """
    files = sorted(folder.iterdir())
    images = [f for f in files if f.suffix.lower() in EXTENSIONS and not f.name.startswith(".")]
    if not images:
        raise missing(folder / "*.png")
    return images


def read_headers(paths: Sequence[Path]) -> tuple[list[ImageHeader], dict[int, str]]:
    """Reads image file headers.

    Returns the readable files' headers, and a dictionary that maps the other files' indices in
    `paths` to fault descriptions.
    """
    headers, faults = _attempt(_read_header, paths)
    return list(filter(None, headers)), faults


def is_image(path: Path) -> bool:
    """Detects image files by name or, for DICOM files without an extension, by first bytes."""
    return path.suffix.lower() in EXTENSIONS or medical.medical_reader(path) is not None


def read_pixels(
    paths: Sequence[Path], channels: int, height: int, width: int, decoding: Decoding
) -> tuple[Bytes, dict[int, str], Counter[str]]:
    """Decodes image files into one array, uint8 [N, channels, height, width].

    Images are resized (Lanczos) without keeping their aspect ratio. Grey channels are repeated for
    colour, and colour images become grey by luma. `decoding.window` scales images with more than 8
    bits. Transparent images are shown on white, and photographs are turned upright according to
    EXIF data.

    Returns the images, a dictionary that maps unreadable files' indices in `paths` to fault
    descriptions, and image counts by conversion loss. Unreadable images are black.
    """
    return decode_files(paths, (channels, height, width), decoding)[:3]


class DecodedFiles(NamedTuple):
    """The result of decoding image files: pixels, faults, losses, headers and hashes.

    Only readable files have a header. `hashes` [N, 32] contains each file's SHA-256, or 0 for
    unreadable files.
    """

    images: Bytes
    faults: dict[int, str]
    losses: Counter[str]
    headers: list[ImageHeader]
    hashes: Bytes


def decode_files(
    paths: Sequence[Path], shape: tuple[int, int, int], decoding: Decoding
) -> DecodedFiles:
    """Reads each image file once, and decodes it to `shape` as `read_pixels` does."""
    images = new_array((len(paths), *shape))
    hashes = np.zeros((len(paths), hashlib.sha256().digest_size), np.uint8)

    def read(position: int) -> tuple[ImageHeader, tuple[str, ...]]:
        digest = hashlib.sha256()
        values, lost = read_picture(paths[position], decoding, digest)
        hashes[position] = np.frombuffer(digest.digest(), np.uint8)
        if values.dtype != np.uint8:
            values = np.rint(values * 255).astype(np.uint8)
        becomes_grey = values.ndim == 3 and shape[0] == 1
        if becomes_grey:
            lost = (*lost, COLOUR_LOST)
        if becomes_grey or values.shape[:2] != shape[1:]:
            images[position] = decoded(Image.fromarray(values), *shape)
        else:  # `decoded` would change nothing; grey is repeated for colour
            images[position] = values.transpose(2, 0, 1) if values.ndim == 3 else values
        return ImageHeader(len(values), values.shape[1], values.ndim == 2), lost

    results, faults = _attempt(read, range(len(paths)))
    read_files = list(filter(None, results))
    losses = Counter(loss for _, lost in read_files for loss in lost)
    return DecodedFiles(images, faults, losses, [header for header, _ in read_files], hashes)


def read_patients(paths: Sequence[Path]) -> list[str]:
    """Returns hashed patient IDs from DICOM files.

    Files without a readable ID get an empty string.
    """

    def read(path: Path) -> str:
        return medical.patient_of(path) if medical.is_dicom(path) else ""

    patients, _ = _attempt(read, paths)
    return [patient or "" for patient in patients]


def read_images(paths: Sequence[Path], spec: DatasetSpec, *, resize: bool = False) -> Bytes:
    """Decodes a published data set's image files into one array, uint8 [N, C, H, W].

    Images of the wrong size are resized (Lanczos) if `resize` is true, and refused otherwise.

    Raises:
        DataFilesCorruptError: a file is not an image, or has the wrong size.
    """
    images = np.empty((len(paths), *spec.image_shape), np.uint8)

    def read(position: int) -> None:
        with opened_image(paths[position]) as image:
            if not resize and image.size != (spec.width, spec.height):
                raise ValueError(
                    f"the image is {image.width}×{image.height}, not {spec.width}×{spec.height} as "
                    f"in {spec.name}. Extract the data set again"
                )
            images[position] = decoded(image, *spec.image_shape)

    _, faults = _attempt(read, range(len(paths)))
    for position, fault in faults.items():
        raise DataFilesCorruptError(f"{paths[position]} cannot be read as an image: {fault}")
    return images


@contextmanager
def opened_image(path: Path) -> Iterator[Image.Image]:
    """Opens an image file and reads its header.

    With a lock, only one large image is decoded at a time.

    Raises:
        OSError: the file cannot be read or is not an image.
        ValueError: the file is empty, or has too many pixels or scans.
        Exception: a damaged file may raise any exception, here or when it is decoded.
    """
    image, lock = _opened(read_regular(path, MAX_IMAGE_BYTES))
    with lock:
        yield image


def _opened(content: bytes) -> tuple[Image.Image, AbstractContextManager[Any]]:
    """Opens an image file from its bytes, and returns the image and a lock for decoding it.

    All large images have the same lock. Errors are as for `opened_image`.
    """
    if not content:
        raise ValueError("the file is empty")
    if content.startswith(b"\xff\xd8") and content.count(b"\xff\xda") > MAX_SCANS:
        raise ValueError(f"the JPEG file has more than {MAX_SCANS} scans")
    image = Image.open(BytesIO(content), formats=FORMATS)  # reads only the header
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        size = f"{image.width}×{image.height}"
        raise ValueError(f"the image is {size}, above the limit of {MAX_PIXELS:,} pixels")
    return image, _LARGE_IMAGE_LOCK if pixels > _LARGE_PIXELS else nullcontext()


def _attempt(read: Callable[[T], Any], items: Iterable[T]) -> tuple[list[Any], dict[int, str]]:
    """Calls `read` for each item, in parallel threads.

    Failed calls do not stop others. Returns the results, with None for failed calls, and a
    dictionary that maps the failed items' indices in `items` to fault descriptions. Threads speed
    up the decoding of large images, which releases the interpreter's lock.
    """
    faults: dict[int, str] = {}

    def read_or_note(numbered: tuple[int, T]) -> Any:
        position, item = numbered
        try:
            return read(item)
        except FileNotFoundError:
            faults[position] = "the file does not exist"
        except UnidentifiedImageError:
            faults[position] = NO_IMAGE
        except Exception as error:  # a damaged image may raise anything
            faults[position] = one_line(error)
        return None

    numbered = enumerate(items)
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # pydicom's warnings quote headers
        started = time.perf_counter()
        results = list(map(read_or_note, islice(numbered, _TRIED)))
        are_slow = time.perf_counter() - started > _TRIED * _SLOW_SECONDS
        results += (pool.map if are_slow else map)(read_or_note, numbered)
    return results, dict(sorted(faults.items()))


def _read_header(path: Path) -> ImageHeader:
    if medical.medical_reader(path) is not None:
        # any window, so that a bad window in the file does not stop a run with its own
        values = read_picture(path, Decoding(window=(0.5, 1.0))).values
        return ImageHeader(len(values), values.shape[1], values.ndim == 2)
    with opened_image(path) as image:
        height, width = image.height, image.width
        on_its_side = image.getexif().get(_EXIF_ORIENTATION) in (5, 6, 7, 8)  # rotated by 90°
        if on_its_side and image.format != "TIFF":  # Pillow turns TIFF files by itself
            height, width = width, height
        return ImageHeader(height, width, _is_grey(image))


def _is_grey(image: Image.Image) -> bool:
    if image.mode == "P":
        colours = np.reshape(image.getpalette() or [], (-1, 3))
        return bool((colours == colours[:, :1]).all())
    return image.mode in ("L", "1", "LA", "La") or _has_wide_levels(image)


def read_picture(path: Path, decoding: Decoding, digest: Any = None) -> Picture:
    """Decodes an image file, applies its EXIF orientation, and describes lost information.

    `digest`, a hash of `hashlib`, receives the file's bytes.
    """
    reader = medical.medical_reader(path)
    if reader is not None:
        with _LARGE_IMAGE_LOCK:
            if digest is not None:
                digest.update(read_regular(path, medical.MAX_FILE_BYTES))
            return reader(path, decoding)
    content = read_regular(path, MAX_IMAGE_BYTES)
    if digest is not None:
        digest.update(content)
    image, lock = _opened(content)
    with lock:
        losses = []
        modes = [str(decoder[3]) for decoder in getattr(image, "tile", ())]  # of the stored data
        if _has_wide_levels(image) or any(";16" in mode for mode in modes):
            losses.append(medical.BITS_LOST)
        if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
            losses.append(PAGES_LOST)
        image.load()  # PNG files may store EXIF data after the pixels
        is_turned = bool(image.info) and _EXIF_ORIENTATION in image.getexif()
        upright = ImageOps.exif_transpose(image) if is_turned else image
        if _has_wide_levels(upright):
            window = decoding.window
            if image.format == "PNG" or upright.mode.startswith("I;16"):  # unsigned 16 bits
                window = window or _RANGE_OF_16_BITS
            if window is None:
                losses.append(medical.NO_WINDOW)
            values = medical.scaled(np.asarray(upright), window)
            # Pillow inverts 8 bits only
            is_inverted = getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == _WHITE_IS_ZERO
            return Picture(1 - values if is_inverted else values, tuple(losses))
        mode = "L" if _is_grey(upright) else "RGB"
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            if upright.getchannel(3).histogram()[:255] != [0] * 255:
                losses.append(ALPHA_LOST)
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright)
        plain = upright if upright.mode == mode else upright.convert(mode)
        values = np.frombuffer(plain.tobytes(), np.uint8)  # faster than np.asarray(plain)
        shape = (plain.height, plain.width, 3)[: 2 + (mode == "RGB")]
        return Picture(values.reshape(shape), tuple(losses))


def decoded(image: Image.Image, channels: int, height: int, width: int) -> Bytes:
    """Decodes an image to uint8 [channels, height, width]."""
    mode = {1: "L", 3: "RGB"}[channels]
    plain = image.convert(mode).resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(plain, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)


def _has_wide_levels(image: Image.Image) -> bool:
    """Returns True for grey images with more than 8 bits per pixel."""
    return image.mode.startswith(("I", "F"))
