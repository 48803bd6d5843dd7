"""The interface of the data sets that are read from folders."""

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
        required: the required files and folders in the data folder.
        instructions: tells the user what to put there and where to get it.
        read: returns the training and test splits, given the specification and the data folder.
    """

    required: tuple[str, ...]
    instructions: str
    read: Callable[[DatasetSpec, Path], tuple[Split, Split]]


def read_lines(path: Path, name: str, instructions: str) -> list[str]:
    """Returns the lines of a text file of the data set `name`.

    Raises:
        DataFilesMissingError: no such file; the message includes the instructions.
        DataFilesCorruptError: not a text file.
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
