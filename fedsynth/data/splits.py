"""Defines the readers of published data sets and the splits that they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.data.images import Bytes, IntArray
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError
from fedsynth.privacy.files import read_text


@dataclass(frozen=True)
class Split:
    """The images [N, C, H, W] and labels [N] of one split.

    `domains` and `groups` [N] state the origin of each example. They are None if the data set does
    not have them.
    """

    images: Bytes
    labels: IntArray
    domains: IntArray | None = None
    groups: IntArray | None = None


@dataclass(frozen=True)
class Reader:
    """The reader of a data set in a folder.

    Attributes:
        required: the files and folders that must be in the data folder.
        instructions: a text that tells the user where to get these files and where to put them.
        read: a function that reads the training and test splits. Its arguments are the
            specification and the data folder.
    """

    required: tuple[str, ...]
    instructions: str
    read: Callable[[DatasetSpec, Path], tuple[Split, Split]]


def read_lines(path: Path, name: str, instructions: str) -> list[str]:
    """Reads the lines of a text file that belongs to the data set `name`.

    Raises:
        DataFilesMissingError: the file does not exist. The message includes the instructions.
        DataFilesCorruptError: the file is not a text file.
    """
    try:
        return read_text(path, MAX_LIST_BYTES).splitlines()
    except FileNotFoundError:
        raise DataFilesMissingError(
            f"{name}: no {path.name} in {path.parent}; {instructions}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataFilesCorruptError(
            f"{path} cannot be read as a text file: {one_line(error)}"
        ) from None
