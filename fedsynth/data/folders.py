"""What the data sets that lie in folders of their own share: what a reader says and gives, and how image files become arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@dataclass(frozen=True)
class Split:
    """Images [N, C, H, W] and labels [N] of one split; `domains` and `groups` [N] where the data set says where examples come from."""

    images: Bytes
    labels: IntArray
    domains: IntArray | None = None
    groups: IntArray | None = None


@dataclass(frozen=True)
class Reader:
    """How a data set in a folder is read.

    Attributes:
        needs: files and folders below the data folder that must be there.
        where: what a user has to put there, and where it comes from.
        read: the training and the test split, from the specification and the data folder.
    """

    needs: tuple[str, ...]
    where: str
    read: Callable[[DatasetSpec, Path], tuple[Split, Split]]


def read_lines(path: Path, name: str, where: str) -> list[str]:
    """The lines of a text file of the data set `name`.

    Raises:
        DataFilesMissingError: no such file; says `where` to get it. DataFilesCorruptError: not a text file.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise DataFilesMissingError(f"{name}: no {path.name} in {path.parent}; {where}") from None
    except UnicodeDecodeError:
        raise DataFilesCorruptError(f"{path} is not a text file") from None


def images_in(folder: Path) -> list[Path]:
    """The image files of a folder, by name; none if there is no such folder."""
    return (
        sorted(f for f in folder.iterdir() if f.suffix.lower() in ENDINGS)
        if folder.is_dir()
        else []
    )


def read_images(paths: Sequence[Path], spec: DatasetSpec, *, resize: bool = False) -> Bytes:
    """The images of these files in RGB, [N, 3, H, W]; those of another size are resized (Lanczos) if `resize`, else refused.

    Raises:
        DataFilesMissingError: a file is not there. DataFilesCorruptError: a file is no image, or not of the data set's size.
    """
    images = np.empty((len(paths), *spec.image_shape), np.uint8)

    def read(position: int) -> None:
        images[position] = _pixels(paths[position], spec, resize)

    with ThreadPoolExecutor() as pool:  # decoding releases the interpreter's lock
        for _ in pool.map(
            read, range(len(paths))
        ):  # asked for one by one, so that the first error ends the reading
            pass
    return images


def _pixels(path: Path, spec: DatasetSpec, resize: bool) -> Bytes:
    size = (spec.width, spec.height)
    try:
        with Image.open(path) as image:
            colour = image.convert("RGB")
    except FileNotFoundError:
        raise DataFilesMissingError(f"{spec.name}: {path} is listed but not there") from None
    except Exception as error:  # a damaged image may raise anything
        raise DataFilesCorruptError(
            f"{path} cannot be read as an image: {' '.join(str(error).split())}"
        ) from None
    if colour.size != size:
        if not resize:
            raise DataFilesCorruptError(
                f"{path} is {colour.width}×{colour.height}, images of {spec.name} are {spec.width}×{spec.height}: unpack it anew"
            )
        colour = colour.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(colour, np.uint8).transpose(2, 0, 1)
