"""Helpers for data files: safe text for messages, safetensors files, and CSV lists of images.

The CSV files are manifest.csv and users.csv, in the forms in which spreadsheet programs save CSV
files. The module also defines `Split`, which the readers of published data sets return.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedsynth.data.images import Bytes, IntArray
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError, one_line
from fedsynth.files import (
    MAX_TENSORS_BYTES,
    decode_json,
    expand_home,
    read_regular,
    write_output,
)

# Size limit of a text file that lists images or users. The longest list of DomainNet has 5 MB.
MAX_LIST_BYTES = 2**26


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the named tensors and the metadata of a safetensors file.

    Raises:
        OSError: in the same cases as `open_regular`.
        ValueError: the file is damaged.
    """
    return unpack_tensors(read_regular(path, MAX_TENSORS_BYTES))


def unpack_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the named tensors and the metadata in the bytes of a safetensors file.

    Raises:
        ValueError: the bytes are damaged.
    """
    try:
        tensors = safetensors.torch.load(content)
        end = 8 + int.from_bytes(content[:8], "little")
        metadata = decode_json(content[8:end]).get("__metadata__") or {}
    except (SafetensorError, LookupError, RuntimeError, TypeError) as error:
        # in addition to safetensors' own errors: types and sizes that torch does not support
        raise ValueError(one_line(error)) from None
    return tensors, metadata


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Writes tensors to a safetensors file.

    Raises:
        OSError: the file cannot be written.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_output(file, _sorted(safetensors.torch.save(on_cpu, dict(metadata) or None)))


def _sorted(content: bytes) -> bytes:
    """Sorts the metadata, which safetensors writes in random order.

    A run that resumes after its last round thus writes the same files again.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def expanded(folder: str | Path) -> Path:
    """Expands `~` in the name of a data folder.

    Raises:
        DataFilesMissingError: the name contains bytes that a run's config.toml cannot store, or
            `~` is followed by an unknown user.
    """
    name = str(folder)
    if "\0" in name or name.encode(errors="replace").decode() != name:
        raise DataFilesMissingError(
            f"the name of a data folder must be UTF-8 text without zero bytes, got {name!a:.200}"
        ).with_code("data.folder_name")
    try:
        return expand_home(folder)
    except FileNotFoundError as error:
        raise DataFilesMissingError(
            f"cannot find the data folder {one_line(folder)}: {error.strerror}"
        ) from None


def missing(path: Path) -> FileNotFoundError:
    """Returns the error for a missing file that is described by a pattern, such as `*.png`."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@dataclass(frozen=True)
class Split:
    """The images and labels of one split of a data set, such as its training split.

    Images are [N, C, H, W], and labels are [N], or masks [N, H, W]. `domains` and `groups` [N] give the number of the
    domain and the group that each example comes from. They are None if the data set does not have
    domains or groups.
    """

    images: Bytes
    labels: IntArray
    domains: IntArray | None = None
    groups: IntArray | None = None


# The folders of a site's images and masks, for segmentation.
IMAGES, MASKS = "images", "masks"


def sites_with_masks(root: Path) -> list[Path]:
    """Returns the folders of the sites that have images and masks, sorted by name."""
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [f for f in folders if (f / IMAGES).is_dir() and (f / MASKS).is_dir()]


USERS_FILE = "users.csv"
_USERS = "user users patient patients person persons subject subjects participant participants"
_SITES = "site sites hospital hospitals client clients center centre"
# The accepted headings of lists, each with the name of its column.
HEADINGS = {
    **dict.fromkeys(("path", "image", "file", "filename"), "path"),
    **dict.fromkeys(("label", "class"), "label"),
    **dict.fromkeys(_SITES.split(), "site"),
    **dict.fromkeys(_USERS.split(), "user"),
}
_NUMBERED = re.compile(r"(ids?|uid|no|nr|number|code|key)$")
_SPLIT_HEADING = re.compile(r"(.*[\W_])?(splits?|folds?)|subset|is[\W_]?(train|test)\w*")
# The names of the parts of a data set, as files, folders and columns spell them.
TRAIN, TEST, VALIDATION = "train", "test", "val"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout"), TEST),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VALIDATION),
}

DELIMITERS = ",;\t|"
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)


def column_of(heading: str, headings: Mapping[str, str] = HEADINGS) -> str:
    """Returns the column that a heading names, or an empty text.

    Case, spaces and punctuation are ignored. A user or site may be named by a number.

    >>> column_of("PatientID"), column_of("patient no."), column_of("image_id"), column_of("fold")
    ('user', 'user', '', 'split')
    """
    if _SPLIT_HEADING.fullmatch(heading.strip().casefold()):
        return "split"
    plain = re.sub(r"[\W_]", "", heading.casefold())
    stem = headings.get(_NUMBERED.sub("", plain), "")
    return headings.get(plain) or (stem if stem in ("user", "site") else "")


def words_of(name: str) -> list[str]:
    """Returns the words in a name, without digits and in lower case."""
    return re.findall(r"[^\W\d_]+", name.casefold())


def csv_form(text: str) -> tuple[str, int]:
    """Returns the delimiter of a CSV file, and the length of its first line if that is `sep=;`,
    which a spreadsheet program may write.

    Args:
        text: the start of the file.
    """
    stated = _SEPARATOR_LINE.match(text)
    if stated is not None:
        return stated[1], stated.end()
    header = text.lstrip().partition("\n")[0]
    return max(DELIMITERS, key=header.count), 0


def same_name(text: str) -> str:
    """Normalises a name, so that two spellings of the name compare as equal.

    Accents are composed (Unicode NFC), and spaces at both ends are removed.
    """
    return unicodedata.normalize("NFC", text).strip()


def folded_name(text: str) -> str:
    """Returns a text that is equal for all spellings of a name, such as "T-shirt" and "t_shirt", or
    "1", "01", "+1" and "1.0", which spreadsheets and programs write.

    >>> [folded_name(name) for name in ("1", "01", "+1", "1.", "1.0", "-01", "−1", "½", "T-shirt")]
    ['1', '1', '1', '1', '1', ' 1', ' 1', '1⁄2', 't shirt']
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    folded = re.sub(r"^\+?(-?)0*(\d+)([.,]0*)?$", r"\1\2", folded)
    return re.sub(r"[\s_-]+", " ", folded)


def read_table(
    file: Path, required: Collection[str], optional: Collection[str] = ()
) -> tuple[list[tuple[str, dict[str, str]]], tuple[str, ...]]:
    """Reads a CSV file that lists images.

    The file may start with a byte-order mark and a line such as `sep=;`. Its columns may be
    separated by commas, semicolons, tabs or vertical bars. Blank lines are skipped.

    Args:
        file: the CSV file.
        required: the required columns, from the values of `HEADINGS`.
        optional: the optional columns.

    Returns:
        The rows, and a note if there are other columns. A row is a text with the file and line, for
        error messages, and a dictionary from the column to its cell. Cells are normalised by
        `same_name`, and users by `folded_name`. Paths are relative, with `/`, and spelled as in the
        file.

    Raises:
        DataFilesCorruptError: the file cannot be read, lacks a required column, has an empty cell,
            or has a path that leads out of the file's folder. The message names the line.
    """
    try:
        text = read_regular(file, MAX_LIST_BYTES).decode("utf-8-sig")
        delimiter, start = csv_form(text)
        reader = csv.reader(io.StringIO(text[start:], newline=""), delimiter=delimiter)
        lines = [
            (f"line {reader.line_num + (start > 0)} of {file}", cells)
            for cells in reader
            if "".join(cells).strip()
        ]
    except UnicodeDecodeError:
        raise DataFilesCorruptError(f"{file} is not UTF-8 text. Save it as CSV UTF-8") from None
    except (OSError, csv.Error) as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    if not lines:
        columns = " and ".join(required)
        raise DataFilesCorruptError(f"{file} is empty. It must have the columns {columns}")
    (location, headings), *rows = lines
    positions = _positions(headings, required, optional, location)
    used = positions.values()
    unused = [name for number, name in enumerate(headings) if number not in used and name.strip()]
    note = f"columns of {one_line(file)} that are not used: {one_line(', '.join(unused))}"
    table = [(location, _row(cells, positions, location)) for location, cells in rows]
    return table, (note,) * bool(unused)


def _positions(
    cells: Sequence[str], required: Collection[str], optional: Collection[str], location: str
) -> dict[str, int]:
    """Returns the position of each required or optional column in the header line."""
    positions: dict[str, int] = {}
    for position, cell in enumerate(cells):
        column = column_of(cell)
        if column in positions:
            raise DataFilesCorruptError(
                f"{location} has two columns for the {column}. Remove one of these columns"
            ).with_code("data.two_columns")
        if column in required or column in optional:
            positions[column] = position
    if not positions.keys() >= set(required):
        raise DataFilesCorruptError(
            f"{location} must have the columns {' and '.join(required)}, got "
            f"{one_line(', '.join(cells))}"
        ).with_code("data.columns")
    return positions


def _row(cells: Sequence[str], positions: dict[str, int], location: str) -> dict[str, str]:
    row: dict[str, str] = {}
    for column, position in positions.items():
        row[column] = same_name("".join(cells[position : position + 1]))
        if not row[column]:
            raise DataFilesCorruptError(f"{location} has an empty cell in the column {column}")
    if "user" in row:
        row["user"] = folded_name(row["user"])
    path = PurePosixPath(cells[positions["path"]].strip())
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise DataFilesCorruptError(
            f"{location} has the path {one_line(path)}, which leads out of the folder of this file"
        ).with_code("data.path")
    row["path"] = path.as_posix()
    return row
