"""Opening data files that anybody may have made: regular files only, no more bytes than such a file
may have, errors of one line."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fedsynth.errors import DataFilesMissingError

MOST_LIST_BYTES = 2**26
"""Of a text file that lists images or users: DomainNet's longest has 5 MB."""


def open_regular(path: Path, most: int) -> BinaryIO:
    """The file at `path`, open for reading bytes.

    Args:
        most: bytes that such a file may have.

    Raises:
        OSError: there is no such file, it is a folder, pipe or device, or it is larger. A pipe is
            not waited for.
    """
    try:
        # Looked at once it is open, so that nothing else can stand there by then; without
        # O_NONBLOCK a pipe would block until somebody writes.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a zero byte in the name
        raise OSError(str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > most:
            raise OSError(f"it has {status.st_size:,} bytes, and such a file no more than {most:,}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of the regular file at `path`; errors as of `open_regular`."""
    with open_regular(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def one_line(given: object, most: int = 200) -> str:
    """Text from a file, or an error that quotes some, as at most `most` printable characters on one
    line."""
    text = " ".join(str(given).split()) or type(given).__name__
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def expanded(folder: str | Path) -> Path:
    """A data folder as a user names it, with `~` in place.

    Raises:
        DataFilesMissingError: a name that no folder can have, or the home of somebody who is not
            there.
    """
    if "\0" in str(folder):
        raise DataFilesMissingError("the data folder's name has a zero byte in it")
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise DataFilesMissingError(
            f"the data folder's name, {one_line(ascii(str(folder)))}, is no UTF-8, as a run's "
            "config.toml is"
        ) from None
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise DataFilesMissingError(
            f"the data folder {one_line(folder)}: there is no such user's home; give the folder's "
            "whole path"
        ) from None
