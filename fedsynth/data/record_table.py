"""CSV files that list images, as saved by spreadsheets: manifest.csv and users.csv."""

from __future__ import annotations

import codecs
import csv
import io
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from fedsynth.data.arrays import IntArray
from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import read_regular

HEADINGS = {
    "path": ("path", "image", "file", "filename"),
    "label": ("label", "class"),
    "site": ("site", "hospital", "client"),
    "user": ("user", "patient", "person"),
}
"""The accepted headings of each column; case is ignored."""
USERS_FILE = "users.csv"
DELIMITERS = ",;\t|"
_EXCEL_HINT = re.compile(r"sep=.\r?\n", re.IGNORECASE)


def same_name(text: str) -> str:
    """Returns the normal form of a name for comparison: with composed accents, and without
    surrounding spaces."""
    return unicodedata.normalize("NFC", text).strip()


def read_table(
    file: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Reads a table of images row by row.

    The file may have a byte-order mark, be separated by commas, semicolons, tabs or bars, and begin
    with Excel's `sep=` line. Blank lines are skipped.

    Args:
        file: the CSV file.
        required: the required columns, from `HEADINGS`.
        optional: the optional columns.

    Yields:
        The line number, and the cells by column, normalised by `same_name`. Paths are relative,
        with `/`, and spelled as in the file.

    Raises:
        DataFilesCorruptError: the file cannot be read, lacks a column, leaves a cell empty, or has
            a path that leads out of the file's folder. The message gives the line.
    """
    text, skipped = _text(file)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, required))
    columns: dict[str, int] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            line = reader.line_num + skipped
            location = f"{file}, line {line}"
            if columns is None:
                columns = _columns(cells, required, optional, location)
            else:
                yield line, _row(cells, columns, location)
    except csv.Error as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    if columns is None:
        raise DataFilesCorruptError(f"{file} is empty: it needs the columns {_listed(required)}")


def _text(file: Path) -> tuple[str, int]:
    """Returns the file's text, and the number of lines before the table."""
    try:
        content = read_regular(file, MAX_LIST_BYTES)
    except OSError as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if utf_16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise DataFilesCorruptError(
            f"cannot read {file}: it is not UTF-8 text: save it as CSV UTF-8"
        ) from None
    hint = _EXCEL_HINT.match(text)
    return (text, 0) if hint is None else (text[hint.end() :], 1)


def _delimiter(text: str, required: Sequence[str]) -> str:
    """Returns the delimiter with which the first line has the most required columns."""
    first = text.lstrip().partition("\n")[0]
    headings = {heading for name in required for heading in HEADINGS[name]}

    def known(delimiter: str) -> int:
        return sum(_heading(cell) in headings for cell in first.split(delimiter))

    return max(DELIMITERS, key=known)


def _heading(cell: str) -> str:
    return cell.strip().strip('"').strip().casefold()


def _columns(
    cells: Sequence[str], required: Sequence[str], optional: Sequence[str], location: str
) -> dict[str, int]:
    """Returns the position of each known column."""
    headings = [_heading(cell) for cell in cells]
    columns: dict[str, int] = {}
    for name in (*required, *optional):
        positions = [at for at, heading in enumerate(headings) if heading in HEADINGS[name]]
        if len(positions) > 1:
            twice = " and ".join(one_line(cells[at], 40) for at in positions)
            raise DataFilesCorruptError(f"{location}: two columns contain the {name}: {twice}")
        if positions:
            columns[name] = positions[0]
    if any(name not in columns for name in required):
        headings_shown = ", ".join(one_line(cell, 40) for cell in cells[:10])
        raise DataFilesCorruptError(
            f"{location}: the columns {_listed(required)} are required, got {headings_shown}"
        )
    return columns


def _listed(names: Sequence[str]) -> str:
    """Describes the columns, with the alternative headings of each."""
    return " and ".join(f"{name} (or {', '.join(HEADINGS[name][1:])})" for name in names)


def _row(cells: Sequence[str], columns: dict[str, int], location: str) -> dict[str, str]:
    row = {name: same_name(cells[at]) for name, at in columns.items() if at < len(cells)}
    for name in columns:
        if not row.get(name):
            raise DataFilesCorruptError(f"{location}: {name} is empty")
    path = PurePosixPath(cells[columns["path"]].strip())
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise DataFilesCorruptError(
            f"{location}: {one_line(path)} must be a path inside the file's folder"
        )
    return {**row, "path": path.as_posix()}


def read_users(file: Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the name of each image's user, from a CSV file with the columns `path` and `user`.

    Spaces around a name and the encoding of accents in names and paths are ignored.

    Args:
        file: see `fedsynth.data.record_table`.
        paths: the images' paths, relative to the file's folder, with `/`.

    Raises:
        DataFilesCorruptError: the file cannot be read, lacks a column, gives an image to two users
            or to none, or leaves a user empty.
    """
    owner = read_owners(file)
    names = [same_name(path) for path in paths]
    missing = [path for path in names if path not in owner]
    if missing:
        strange = min(owner.keys() - set(names), default=None)
        hint = (
            ""
            if strange is None
            else (f"; it lists {one_line(strange)}, which is not an image in this folder")
        )
        raise DataFilesCorruptError(
            f"{file} names no user of {one_line(missing[0])} ({len(missing)} such images){hint}"
        )
    return tuple(owner[path] for path in names)


def read_owners(file: Path) -> dict[str, str]:
    """Returns the users in such a file by path; paths are normalised by `same_name`.

    Raises:
        DataFilesCorruptError: as for `read_users`, except that images may be missing.
    """
    owner: dict[str, str] = {}
    for line, row in read_table(file, ("path", "user")):
        path = same_name(row["path"])
        if owner.setdefault(path, row["user"]) != row["user"]:
            raise DataFilesCorruptError(
                f"{file}, line {line}: {one_line(path)} is listed for two users"
            )
    return owner


def numbered(names: Sequence[str]) -> IntArray:
    """Returns the number of each user, int64 [N]: the position among the sorted names."""
    number = {name: position for position, name in enumerate(sorted(set(names)))}
    return np.array([number[name] for name in names], np.int64)
