"""Reads and writes safetensors files, and reads CSV lists of images.

The CSV lists are manifest.csv and users.csv, in the CSV variants of common spreadsheet programs.
The module also defines `Split`, the result of the readers for published data sets.
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

# Size limit for a text file that lists images or users. DomainNet's longest list takes 5 MB.
MAX_LIST_BYTES = 2**26


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the named tensors and the metadata in a safetensors file.

    Raises:
        OSError: in the same cases as `open_regular`.
        ValueError: the file is damaged.
    """
    return unpack_tensors(read_regular(path, MAX_TENSORS_BYTES))


def unpack_tensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parses the bytes of a safetensors file into named tensors and metadata.

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
    """Sorts a safetensors file's metadata, to make the file's bytes reproducible.

    A run resumed after its last round therefore writes identical files.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def expanded(folder: str | Path) -> Path:
    """Expands `~` in a data folder's path.

    Raises:
        DataFilesMissingError: config.toml cannot store the name, or an unknown user follows `~`.
    """
    name = str(folder)
    if "\0" in name or name.encode(errors="replace").decode() != name:
        raise DataFilesMissingError(
            f"the data folder's name {name!a:.200} is not UTF-8 text, or contains a zero byte. "
            "Rename the folder"
        ).with_code("data.folder_name")
    try:
        return expand_home(folder)
    except FileNotFoundError as error:
        raise DataFilesMissingError(
            f"cannot find the data folder {one_line(folder)}: {error.strerror}"
        ) from None


def missing(path: Path) -> FileNotFoundError:
    """Creates the error for a missing file. The file name may be a pattern, such as `*.png`."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@dataclass(frozen=True)
class Split:
    """The images and labels in one split, such as the training split.

    Images are [N, C, H, W], and labels are [N], or masks [N, H, W]. `domains` and `groups` [N] are
    the domain and group indices of the examples, or None without domains or groups.
    """

    images: Bytes
    labels: IntArray
    domains: IntArray | None = None
    groups: IntArray | None = None


# The ledger folder's name. The folder may be inside the image folder.
LEDGERS = "fedsynth-ledger"
_SYSTEM_FILES = {"__macosx", "thumbs.db", "desktop.ini", "dicomdir"}


def is_hidden(name: str) -> bool:
    """Returns True for hidden files and those of operating systems, which are no images."""
    return name.startswith(".") or name.casefold() in _SYSTEM_FILES


# The image and mask folders of a site, for segmentation.
IMAGES, MASKS = "images", "masks"


def sites_with_masks(root: Path) -> list[Path]:
    """Returns the folders of sites with images and masks, sorted by name.

    Raises:
        DataFilesCorruptError: only some of the folders have images and masks.
    """
    folders = [f for f in sorted(root.iterdir()) if f.is_dir()] if root.is_dir() else []
    sites = [f for f in folders if (f / IMAGES).is_dir() and (f / MASKS).is_dir()]
    ignored = {f for f in folders if is_hidden(f.name) or f.name == LEDGERS}
    incomplete = [f for f in folders if f not in sites and f not in ignored]
    if sites and incomplete:
        raise DataFilesCorruptError(
            f"{one_line(incomplete[0])} does not have the folders {IMAGES} and {MASKS}, as "
            f"{one_line(sites[0])} has. Rename its folders, or remove it"
        ).with_code("data.mask_folders")
    return sites


USERS_FILE = "users.csv"
_USERS = "user users patient patients person persons subject subjects participant participants"
_SITES = "site sites hospital hospitals client clients center centre"
# The accepted headings in lists, with their column names.
HEADINGS = {
    **dict.fromkeys(("path", "image", "file", "filename"), "path"),
    **dict.fromkeys(("label", "class"), "label"),
    **dict.fromkeys(_SITES.split(), "site"),
    **dict.fromkeys(_USERS.split(), "user"),
}
_NUMBERED = re.compile(r"(ids?|uid|no|nr|number|code|key)$")
_SPLIT_HEADING = re.compile(r"(.*[\W_])?(splits?|folds?)|subset|is[\W_]?(train|test)\w*")
# The spellings of split names in files, folders and columns.
TRAIN, TEST, VALIDATION = "train", "test", "val"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout"), TEST),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VALIDATION),
}

DELIMITERS = ",;\t|"
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)


def column_of(heading: str, headings: Mapping[str, str] = HEADINGS) -> str:
    """Returns a column's role, such as "user", from its heading, or "" for an unknown heading.

    Case, spaces and punctuation are ignored. User and site headings may contain a word such as
    "no.".

    >>> column_of("PatientID"), column_of("patient no."), column_of("image_id"), column_of("fold")
    ('user', 'user', '', 'split')
    """
    if _SPLIT_HEADING.fullmatch(heading.strip().casefold()):
        return "split"
    plain = re.sub(r"[\W_]", "", heading.casefold())
    stem = headings.get(_NUMBERED.sub("", plain), "")
    return headings.get(plain) or (stem if stem in ("user", "site") else "")


def words_of(name: str) -> list[str]:
    """Splits a name into its words, in lower case and without digits."""
    return re.findall(r"[^\W\d_]+", name.casefold())


def csv_form(text: str) -> tuple[str, int]:
    """Returns a CSV file's delimiter, and the length of its separator line.

    A separator line, such as `sep=;`, is the first line in files from some spreadsheet programs.
    Without it, the length is 0.

    Args:
        text: the start of the file.
    """
    stated = _SEPARATOR_LINE.match(text)
    if stated is not None:
        return stated[1], stated.end()
    header = re.sub(r'"[^"]*"', "", text.lstrip().partition("\n")[0])  # without quoted headings
    return max(DELIMITERS, key=header.count), 0


def same_name(text: str) -> str:
    """Normalises the spelling of a name, so that names can be compared.

    Accents are composed (Unicode NFC), and leading and trailing spaces are removed.
    """
    return unicodedata.normalize("NFC", text).strip()


def folded_name(text: str) -> str:
    """Maps all spellings of a name to the same text.

    For example, "T-shirt" and "t_shirt" are spellings of one name.

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

    The file may start with a byte-order mark and a line such as `sep=;`. The delimiter may be a
    comma, semicolon, tab or vertical bar. Blank lines are skipped.

    Args:
        file: the CSV file.
        required: the required columns, from the values of `HEADINGS`.
        optional: the optional columns.

    Returns:
        The rows, and a note about unused columns. A row consists of its location (line and file,
        for error messages) and a dictionary from columns to cells. Cells are normalised by
        `same_name`, and users by `folded_name`. Paths are relative, with `/`, and spelled as in the
        file.

    Raises:
        DataFilesCorruptError: the file cannot be read, a required column is missing, a cell is
            empty, or a path leads out of the file's folder. The message names the line.
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
        raise DataFilesCorruptError(
            f"{file} is empty. Add a header line with the columns {columns}"
        )
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
    """Returns the indices of required and optional columns in the header line."""
    positions: dict[str, int] = {}
    for position, cell in enumerate(cells):
        column = column_of(cell)
        if column in positions:
            raise DataFilesCorruptError(
                f"{location} contains two {column} columns. Remove one of them"
            ).with_code("data.two_columns")
        if column in required or column in optional:
            positions[column] = position
    if not positions.keys() >= set(required):
        raise DataFilesCorruptError(
            f"{location} must contain the columns {' and '.join(required)}, got "
            f"{one_line(', '.join(cells))}. Rename or add the missing columns"
        ).with_code("data.columns")
    return positions


def _row(cells: Sequence[str], positions: dict[str, int], location: str) -> dict[str, str]:
    row: dict[str, str] = {}
    for column, position in positions.items():
        row[column] = same_name("".join(cells[position : position + 1]))
        if not row[column]:
            raise DataFilesCorruptError(
                f"{location} contains an empty cell in the column {column}. Fill in the cell, or "
                "remove the line"
            )
    if "user" in row:
        row["user"] = folded_name(row["user"])
    path = PurePosixPath(cells[positions["path"]].strip())
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise DataFilesCorruptError(
            f"{location} contains the path {one_line(path)}, which leads out of the list's folder. "
            "Use a relative path inside the folder"
        ).with_code("data.path")
    row["path"] = path.as_posix()
    return row
