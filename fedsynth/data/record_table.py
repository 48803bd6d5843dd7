"""Reads CSV files that list images, as spreadsheets save them: manifest.csv and users.csv."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.errors import DataFilesCorruptError
from fedsynth.privacy.files import read_regular

USERS_FILE = "users.csv"
HEADINGS = {
    **dict.fromkeys(("path", "image", "file", "filename"), "path"),
    **dict.fromkeys(("label", "class"), "label"),
    **dict.fromkeys(("site", "hospital", "client"), "site"),
    **dict.fromkeys(("user", "patient", "person"), "user"),
}
"""The accepted headings, each with the column that it stands for. Case is ignored."""
DELIMITERS = ",;\t|"


def same_name(text: str) -> str:
    """Returns a name in the form in which names are compared.

    Accents are composed (Unicode NFC), and spaces at both ends are removed.
    """
    return unicodedata.normalize("NFC", text).strip()


def read_table(
    file: Path, required: Collection[str], optional: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Reads a table of images row by row.

    The file may start with a byte-order mark. Its columns may be separated by commas, semicolons,
    tabs or vertical bars. Blank lines are skipped.

    Args:
        file: the CSV file.
        required: the required columns, from the values of `HEADINGS`.
        optional: the optional columns.

    Yields:
        A text with the file and line, for error messages, and a dictionary from the column to its
        cell. Cells are normalised by `same_name`, except paths, which are spelled as in the file.
        Paths are relative, with `/`.

    Raises:
        DataFilesCorruptError: the file cannot be read, lacks a required column, has an empty cell,
            or has a path that leads out of the file's folder. The message names the line.
    """
    try:
        text = read_regular(file, MAX_LIST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataFilesCorruptError(
            f"cannot read {file}, because it is not UTF-8 text: save it as CSV UTF-8"
        ) from None
    except OSError as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    header = text.lstrip().partition("\n")[0]
    delimiter = max(DELIMITERS, key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    positions: dict[str, int] = {}
    try:
        for cells in reader:
            location = f"{file}, line {reader.line_num}"
            if not "".join(cells).strip():
                continue
            if positions:
                yield location, _row(cells, positions, location)
            else:
                positions = _positions(cells, required, optional, location)
    except csv.Error as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    if not positions:
        raise DataFilesCorruptError(
            f"{file} is empty: it must have the columns {' and '.join(required)}"
        )


def _positions(
    cells: Sequence[str], required: Collection[str], optional: Collection[str], location: str
) -> dict[str, int]:
    """Returns the position of each required or optional column in the header line."""
    positions: dict[str, int] = {}
    for position, cell in enumerate(cells):
        column = HEADINGS.get(cell.strip().casefold(), "")
        if column in positions:
            raise DataFilesCorruptError(f"{location}: two columns contain the {column}: remove one")
        if column in required or column in optional:
            positions[column] = position
    if not positions.keys() >= set(required):
        raise DataFilesCorruptError(
            f"{location}: the columns {' and '.join(required)} are required, got "
            f"{one_line(', '.join(cells))}"
        )
    return positions


def _row(cells: Sequence[str], positions: dict[str, int], location: str) -> dict[str, str]:
    row: dict[str, str] = {}
    for column, position in positions.items():
        row[column] = same_name("".join(cells[position : position + 1]))
        if not row[column]:
            raise DataFilesCorruptError(f"{location}: the cell of the column {column} is empty")
    path = PurePosixPath(cells[positions["path"]].strip())
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise DataFilesCorruptError(
            f"{location}: the path {one_line(path)} must be a path inside the folder of the table"
        )
    row["path"] = path.as_posix()
    return row


def read_users(file: Path) -> dict[str, str]:
    """Reads the user of each image from a CSV file with the columns `path` and `user`.

    Spaces around a name, and the encoding of accents in names and paths, make no difference.

    Args:
        file: a CSV file that `read_table` accepts.

    Returns:
        A dictionary from the image's path to the name of its user. Paths are relative to the file's
        folder and normalised by `same_name`.

    Raises:
        DataFilesCorruptError: the file cannot be read, lacks a column, names two users for one
            image, or has an empty cell.
    """
    users: dict[str, str] = {}
    for location, row in read_table(file, ("path", "user")):
        path = same_name(row["path"])
        if users.setdefault(path, row["user"]) != row["user"]:
            raise DataFilesCorruptError(
                f"{location}: {one_line(path)} is listed for two users: remove one"
            )
    return users


def users_of_images(file: Path, paths: Sequence[str]) -> list[str]:
    """Returns the name of the user of each image, in the order of `paths`.

    Args:
        file: a CSV file that `read_users` accepts.
        paths: the path of each image relative to the file's folder, with `/`.

    Raises:
        DataFilesCorruptError: `read_users` refuses the file, or the file names no user of an image.
    """
    users = read_users(file)
    names = []
    for path in paths:
        name = users.get(same_name(path))
        if name is None:
            raise DataFilesCorruptError(
                f"{file} names no user of {one_line(path)}: add a line for this image"
            )
        names.append(name)
    return names
