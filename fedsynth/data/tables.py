"""Reads records from array files (.npz, .npy, .safetensors), tables (.parquet, .csv, .tsv) and
the Hugging Face hub.

A file's columns are arrays or table columns. Usual names are recognised, such as `x` and `y`, or
MedMNIST's `train_images` and `test_labels`. A .npy file is read together with its neighbours of the
same prefix: `scans_x.npy` with `scans_y.npy`.

Files are untrusted input. Pickled Python objects are refused, sizes are checked before memory is
allocated, and a damaged file raises a one-line error. No code from files or the hub is executed.
"""

from __future__ import annotations

import codecs
import importlib
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from io import BufferedReader
from itertools import chain, starmap
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
import torch
from numpy.lib import format as npy_format

from fedsynth.data.files import (
    HEADINGS,
    SPLITS,
    TRAIN,
    column_of,
    csv_form,
    folded_name,
    read_tensors,
    same_name,
    words_of,
)
from fedsynth.data.medical import Decoding
from fedsynth.data.pixels import ImageHeader, read_headers, read_pixels
from fedsynth.data.records import (
    Array,
    Names,
    Records,
    check_names,
    check_splits,
    names_array,
    note_losses,
)
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    DataFilesMissingError,
    FedsynthError,
    one_line,
)
from fedsynth.files import decode_json, open_regular, read_regular
from fedsynth.large_arrays import ROWS, as_float32, new_array, read_array

# A file's columns by name. Each function reads one column, [N, …].
Readers = dict[str, Callable[[], Array]]

HUB = "hf:"
CSV = (".csv", ".tsv")
SUFFIXES = (".npz", ".npy", ".safetensors", ".parquet", *CSV)
_NO_RECORDS = "the data contain no records"
_PLAIN = Decoding()
# The size limit for an array in memory.
MAX_ARRAY_BYTES = 2**34
# The size limit for decompressed data that are larger than their file.
MAX_EXPANDED_BYTES = 2**31

_SPLIT_NAMES = "|".join(SPLITS)
_SPLIT = re.compile(rf"({_SPLIT_NAMES})[_./-](.+)|(.+)[_./-]({_SPLIT_NAMES})", re.IGNORECASE)
_FEATURES = ("x", "images", "image", "features", "embeddings", "embedding", "data")
# The headings with a role, by role name.
_ROLES = {name: role for name, role in HEADINGS.items() if role != "path"}
_ROLES |= {"labels": "label", "y": "label", "target": "label", "targets": "label"}
_ROLES |= {"group": "user", "groups": "user"}
# The names of row index or row name columns, as written by pandas and R.
_IDENTIFIER = re.compile(
    r"(?i:|index|level_[0-9]+|__index_level_[0-9]+__|unnamed: ?[0-9]+|rownames?"
    r"|row[\W_]?nr|mrn|pid|eid|(.*[\W_])?(id|ids|idx|uid|uuid))|.*[a-z]ID"
)
# float64 represents all whole numbers up to this one
LARGEST_WHOLE = 2.0**53
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_NUMBER_WITH_UNIT = re.compile(
    r"[<>~€$£]?\s?[+-]?([0-9]*[.,]?[0-9]+(e[+-]?[0-9]+)?|[0-9]{1,3}([.,' ][0-9]{3})+([.,][0-9]+)?)"
    r"\s*(%|€|eur|usd|gbp|chf)?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Part:
    """One part of a file, such as the training records.

    Attributes:
        place: the file name for messages.
        readers: the part's columns.
        numbers: a table's numeric columns, which are its default features. None for an array file,
            whose features are one array.
        stated: the names of a column's values 0, 1, …, if stated in the file.
        faults: for CSV columns, functions that explain why a column may be a damaged numeric
            column, or return an empty string.
        losses: the number of images that have lost information when they were decoded, by kind.
        default_columns: for a table, a function that reads its default features, [N] or [N, …]
            each. Empty cells are NaN, and damaged lists are left out.
    """

    place: str
    readers: Readers
    numbers: tuple[str, ...] | None = None
    stated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    faults: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    default_columns: Callable[[], list[Array]] = list

    def feature_names(self, chosen: str) -> list[str]:
        """Returns the names of the feature columns.

        Args:
            chosen: the user's column names, separated by commas. If empty, an array with a usual
                name is used, or all numeric columns of a table.

        Raises:
            DataError: a chosen column does not exist.
        """
        names = filter(None, map(str.strip, chosen.split(",")))
        if columns := [self._existing(name, "feature-columns") for name in names]:
            return columns
        if self.numbers is not None:
            return list(self.numbers)
        # of names that differ in their case only, the first one counts: the given file
        folded = {name.casefold(): name for name in reversed([*self.readers])}
        return list(filter(None, map(folded.get, _FEATURES)))[:1]

    def column(self, role: str, chosen: str) -> str:
        """Returns the name of the label, user or site column, or an empty string.

        Args:
            role: "label", "user" or "site".
            chosen: the user's column name. If empty, a usual name is used.

        Raises:
            DataError: the chosen column does not exist, or several columns have usual names.
        """
        if chosen.strip():
            return self._existing(chosen.strip(), f"{role}-column")
        usual = [name for name in self.readers if column_of(name, _ROLES) == role]
        if len(usual) > 1:
            raise DataError(
                f"{self.place} contains several columns that may be the {role} column: "
                f"{one_line(', '.join(usual))}. Choose one with --{role}-column"
            ).with_code("data.several_columns")
        return "".join(usual)

    def _existing(self, name: str, option: str) -> str:
        """Returns a column's name in this part. `name` may contain the name of another split."""
        if name not in self.readers and self.numbers is None:
            name = _split_of(name)[1]
        if name not in self.readers:
            raise DataError(
                f"the column {one_line(name)!r} is missing from {self.place}, which contains "
                f"{self.listed(name)}. Name another column with --{option}"
            ).with_code("data.column")
        return name

    def listed(self, column: str) -> str:
        """Lists the columns for an error message.

        Names similar to `column` come first, and numbered ones such as e0, e1, … last.
        """
        similar = get_close_matches(column, self.readers, cutoff=0.5)
        rest = sorted(self.readers, key=lambda name: name[-1:].isdigit())
        return one_line(", ".join(dict.fromkeys((*similar, *rest))))

    def read(self, name: str) -> Array:
        """Reads one column.

        Raises:
            DataFilesCorruptError: the column is damaged, or contains neither numbers nor text.
        """
        with file_errors(f"{one_line(name)!r} in {self.place}"):
            array = self.readers[name]()
            if array.dtype.kind not in "biufUO":
                raise ValueError(f"the values must be numbers or text, got the type {array.dtype}")
            if not array.ndim:
                raise ValueError("the array must contain one value per record, got a single value")
            if not len(array):
                raise ValueError(_NO_RECORDS)
            return array


def is_record_file(path: str | Path) -> bool:
    """Returns True for an array file, a table or a hub data set, False for images.

    A CSV file with a path column is a list of image files, not a table.
    """
    if str(path).startswith(HUB):
        return True
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in CSV:
        return suffix in SUFFIXES and not path.is_dir()
    if not path.is_file():
        return False
    with file_errors(one_line(path)), BufferedReader(open_regular(path)) as file:
        text = file.read(2**20).decode("utf-8-sig", errors="replace")
    delimiter, start = csv_form(text)
    header = text[start:].lstrip().partition("\n")[0]
    return "path" not in map(column_of, header.split(delimiter))


def parts_of(place: str, revision: str = "", decoding: Decoding = _PLAIN) -> dict[str, Part]:
    """Finds a file's parts: "train" and, if present, "val" and "test".

    Args:
        place: a file path, or `hf:` with a folder path or data set name.
        revision: the revision of a hub data set (see `downloaded`).
        decoding: the conversion of image file values to pixels.

    Raises:
        DataFilesMissingError: the file does not exist.
        DataFilesCorruptError: the file is damaged.
        DataError: an optional package is missing.
    """
    path = Path(downloaded(place, revision)[0].removeprefix(HUB))
    kind = path.suffix.lower()
    with file_errors(one_line(place)):
        if place.startswith(HUB):
            return _hub_parts(path, decoding)
        if kind == ".parquet":
            return {TRAIN: _parquet_part([path], one_line(place), decoding)}
        if kind in CSV:
            table = _read_csv(path)
            part = _table_part(one_line(place), table.schema, table.select)
            faults = {name: partial(_fault_of_numbers, table[name]) for name in part.readers}
            return {TRAIN: replace(part, faults=faults)}
        if kind == ".npy":
            return {TRAIN: Part(one_line(place), _npy_readers(path))}
        readers = {".npz": _npz_readers, ".safetensors": _tensor_readers}[kind](path)
    parts: dict[str, Part] = {}
    for name, reader in readers.items():
        split, plain = _split_of(name)
        readers_of_split = parts.setdefault(split, Part(one_line(place), {})).readers
        if plain in readers_of_split:
            raise DataError(
                f"{one_line(place)} contains two arrays {one_line(plain)!r} of {split} records, "
                f"one of them named {one_line(name)!r}. Remove one of them"
            ).with_code("data.two_arrays")
        readers_of_split[plain] = reader
    return parts or {TRAIN: Part(one_line(place), {})}


def read_part(part: Part, columns: Mapping[str, str], note: Callable[[str], None]) -> Records:
    """Reads a part's records.

    Args:
        part: the part.
        columns: the user's names for the columns "feature", "label", "user" and "site".
        note: a function that receives a line about the used table columns.

    Raises:
        DataFilesCorruptError: a column is damaged.
        DataError: a column is missing, or the columns have different lengths.
    """
    roles = {role: part.column(role, columns[role]) for role in ("label", "site", "user")}
    if not roles["label"]:
        raise DataError(
            f"{part.place} contains no column with a usual name for labels, only "
            f"{part.listed('label')}. Name the column with --label-column"
        ).with_code("data.label_column")
    values, features, stored = _features(part, columns["feature"], roles, note)
    note_losses(part.losses, part.place, note)
    for name in sorted(part.readers.keys() - set(roles.values())):
        if column_of(name) == "split":
            place = f" in the column {one_line(name)!r} of {part.place}"
            check_splits(_facts(part, name, len(values)), place)
    labels, sites, users = (_facts(part, name, len(values)) for name in roles.values())
    users = names_array(map(folded_name, users))
    stated = part.stated.get(roles["label"], ())
    records = Records(Path(part.place), values, labels, sites, users, stated, features, stored)
    check_names(records)
    return records


def _features(
    part: Part, chosen: str, roles: Mapping[str, str], note: Callable[[str], None]
) -> tuple[Array, tuple[str, ...], Array | None]:
    """Reads the features: one array, or numeric columns side by side.

    Also returns a table's feature names (none for one column of lists), and the bytes by which
    ledgers recognise its records: those of its default feature columns, whichever a run uses. They
    are None if the features are these columns, so that the values themselves are compared.
    """
    used = set(roles.values())
    names = [name for name in part.feature_names(chosen) if chosen or name not in used]
    unused = sorted(part.readers.keys() - used.union(names))
    for name in () if chosen else unused:
        if not has_meaning(name) and (fault := part.faults.get(name, str)()):
            raise DataError(
                f"the column {one_line(name)!r} of {part.place} {fault}. Correct or remove it, or "
                "name the feature columns with --feature-columns"
            ).with_code("data.column_values")
    columns = {name: part.read(name) for name in names}
    if not columns or any(array.dtype.kind not in "biuf" for array in columns.values()):
        raise DataError(
            f"the features of {part.place} are missing or not numeric. Name numeric columns "
            f"({part.listed('features')}) with --feature-columns"
        ).with_code("data.features")
    if part.numbers is not None:
        uses = {f"features in {part.place}": ", ".join(columns), **roles}
        uses["not used"] = ", ".join(unused)
        note("; ".join(f"{use}: {one_line(name or 'none')}" for use, name in uses.items()))
    if {array.dtype for array in columns.values()} != {np.dtype(np.uint8)}:
        columns = {name: as_float32(array) for name, array in columns.items()}
    listed: tuple[str, ...] = ()
    stored = None
    is_one_list = len(columns) == 1 and next(iter(columns.values())).ndim > 1
    if part.numbers is not None and not is_one_list:
        listed = tuple(chain.from_iterable(starmap(_feature_names, columns.items())))
    if tuple(columns) != part.numbers:
        with file_errors(part.place):
            defaults = part.default_columns()
        if defaults:
            stored = np.concatenate(list(map(_row_bytes, defaults)), axis=1)
    if len(columns) == 1:
        return next(iter(columns.values())), listed, stored
    shapes = {name: list(array.shape) for name, array in columns.items()}
    if len({shape[0] for shape in shapes.values()}) > 1 or max(map(len, shapes.values())) > 2:
        raise DataError(
            f"the features of {part.place} must be one array, or columns of the same length, got "
            f"{one_line(shapes)}. Name some of them with --feature-columns"
        ).with_code("data.features_shape")
    return np.column_stack(list(columns.values())), listed, stored


def _feature_names(name: str, column: Array) -> Iterator[str]:
    """Yields a column's name, or for lists of n numbers, the names NAME[0] to NAME[n − 1]."""
    if column.ndim == 1:
        yield same_name(name)
    elif column.ndim == 2:
        yield from (f"{same_name(name)}[{position}]" for position in range(column.shape[1]))


def _row_bytes(rows: Array) -> Array:
    """Returns the bytes of each row, [N, B]. −0.0 and 0.0 have the same bytes."""
    flat = rows.reshape(len(rows), -1)
    return np.ascontiguousarray(flat + flat.dtype.type(0)).view(np.uint8)


def _facts(part: Part, name: str, count: int) -> Names:
    """Reads the label, site or user of each record. Without a column, returns empty strings."""
    if not name:
        return np.full(count, "", object)
    what = f"{one_line(name)!r} in {part.place}"
    facts = _names_in(part.read(name), what, part.stated.get(name, ()))
    if len(facts) != count:
        raise DataError(
            f"{what} must contain {count} values, one for each record, got {len(facts)}"
        ).with_code("data.record_count")
    return facts


def _names_in(array: Array, what: str, stated: tuple[str, ...]) -> Names:
    """Converts an array of numbers or text, [N] or [N, 1], to names.

    The numbers 1 and 1.0 become "1". If the file states names, whole numbers are their indices.
    """
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"{what} must contain one value for each record, got the shape {list(array.shape)}"
        )
    if array.dtype.kind == "f":
        is_whole = np.isfinite(array) & (array == np.rint(array)) & (abs(array) <= LARGEST_WHOLE)
        if not is_whole.all():
            wrong = array[~is_whole][0]
            raise DataError(
                f"{what} must contain text, or whole numbers up to 2^53, got {wrong:g}. Correct it"
            )
        array = array.astype(np.int64)
    if stated and array.dtype.kind in "iu":
        wrong = array[(array < 0) | (array >= len(stated))]
        if len(wrong):
            raise DataError(
                f"{what} must be indices of the file's class names, from 0 to {len(stated) - 1}, "
                f"got {wrong[0]}. Remove the rows with other numbers"
            ).with_code("data.label_numbers")
        return np.array(stated, object)[array]
    if not all(isinstance(value, Hashable) for value in array[:1]):
        raise DataError(f"{what} must contain one number or text per row, got several values")
    if any(isinstance(value, bytes) for value in array[:1].tolist()):
        raise DataError(f"{what} must contain numbers or text, got bytes. Convert them to text")
    distinct, positions = np.unique(array, return_inverse=True)
    names = np.array([same_name(str(value)) for value in distinct], object)
    if "" in names:
        raise DataError(f"{what} contain empty cells. Fill in the cells, or remove their rows")
    return np.asarray(names[positions], object)


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Converts errors from reading a damaged file to one-line errors with the file's name.

    Args:
        what: the name of the file or column.

    Raises:
        DataFilesMissingError: the file does not exist.
        DataFilesCorruptError: any other error, because a damaged file may raise anything.
    """
    try:
        yield
    except FedsynthError:
        raise
    except FileNotFoundError:
        raise DataFilesMissingError(f"the file {what} does not exist. Check the path") from None
    except Exception as error:
        raise DataFilesCorruptError(f"{what} cannot be read: {one_line(error)}") from None


def _split_of(name: str) -> tuple[str, str]:
    """Splits an array name such as `train_images` or `x_test` into split and plain name."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return TRAIN, name
    return SPLITS[(match[1] or match[4]).casefold()], match[2] or match[3]


# ------------------------------------------------------------------------------------ array files


def _read_npy(file: IO[bytes], length: int) -> Array:
    """Reads an array in NumPy's format from a file of `length` bytes.

    The header's size is checked before memory is allocated.
    """
    headers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    version = npy_format.read_magic(file)
    if version not in headers:
        raise ValueError(
            f"the format version {version} is not read. Save numbers or text in version 1 or 2"
        )
    shape, by_columns, dtype = headers[version](file)
    if dtype.hasobject:
        raise ValueError(
            "Python objects are not read, as they may execute code. Save numbers or text"
        )
    size = math.prod(shape) * dtype.itemsize
    if not 0 <= size == length - file.tell() <= MAX_ARRAY_BYTES:
        raise ValueError(f"the data's size is not the {size:,} bytes declared in the header")
    return read_array(file, size).view(dtype).reshape(shape, order="F" if by_columns else "C")


def _check_expanded(size: int, path: Path) -> None:
    limit = max(path.stat().st_size, MAX_EXPANDED_BYTES)
    if size > limit:
        raise ValueError(f"decompressed data exceed {limit:,} bytes. Split or decompress the file")


def _npz_readers(path: Path) -> Readers:
    with BufferedReader(open_regular(path)) as file, ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
    return {name.removesuffix(".npy"): partial(_read_array, path, name) for name in names}


def _read_array(path: Path, member: str = "") -> Array:
    with BufferedReader(open_regular(path)) as file:
        if not member:
            return _read_npy(file, path.stat().st_size)
        with ZipFile(file) as archive, archive.open(member) as content:
            size = archive.getinfo(member).file_size
            _check_expanded(size, path)
            return _read_npy(content, size)


def _npy_readers(path: Path) -> Readers:
    """Returns functions that read a .npy file and the related files in its folder.

    The given file is the array "x". The others are named without the given file's prefix: the array
    "labels" is the file `train_labels.npy`, if the given file is `train_images.npy`.
    """
    prefix = path.stem[: path.stem.rfind("_") + 1]
    if path.stem.removeprefix(prefix).casefold() not in _FEATURES:
        prefix = ""
    readers: Readers = {"x": partial(_read_array, path)}
    for other in sorted(path.parent.glob("*.npy")):
        if other.stem.startswith(prefix):
            readers.setdefault(other.stem.removeprefix(prefix), partial(_read_array, other))
    return readers


def _tensor_readers(path: Path) -> Readers:
    readers: Readers = {}
    for name, tensor in read_tensors(path)[0].items():
        readers[name] = tensor.numpy
        if tensor.dtype == torch.bfloat16:  # which NumPy does not support
            readers[name] = tensor.float().numpy
    return readers


# --------------------------------------------------------------------------------- tables and hub


def _optional(module: str, extra: str) -> Any:
    """Imports a module from an optional package.

    Raises:
        DataError: the package is missing. The message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"the package {module.partition('.')[0]} is missing. Run pip install "
            f"'fedsynth[{extra}]'"
        ).with_code("data.package") from None


def _parquet_schema(path: Path) -> Any:
    with BufferedReader(open_regular(path)) as file:
        return _optional("pyarrow.parquet", "tables").read_schema(file)


def _parquet_batches(
    paths: list[Path], names: list[str], *, are_kept: bool = False
) -> Iterator[Any]:
    """Reads columns from Parquet files, at most one row group at a time.

    Repeated text is stored once, because a small file may repeat a large text many times. Declared
    sizes are checked before memory is allocated, and real sizes while reading: of each batch, or of
    all batches of a file if the batches are kept.
    """
    parquet = _optional("pyarrow.parquet", "tables")
    types: dict[str, Any] = {}
    for path in paths:
        with BufferedReader(open_regular(path)) as file:
            metadata = parquet.read_metadata(file)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            _check_expanded(sum(max(0, group.total_byte_size) for group in groups), path)
            _check_expanded(4 * metadata.num_rows * metadata.num_columns, path)
            leaves = map(metadata.schema.column, range(metadata.num_columns))
            texts = {leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"}
            size = 0
            schema = parquet.read_schema(file)
            for name in names:
                if name not in schema.names:
                    raise ValueError(
                        f"one part has no column {one_line(name)!r}. Write all parts with the same "
                        "columns"
                    )
                kind = schema.field(name).type
                if types.setdefault(name, kind) != kind:
                    raise ValueError(
                        f"the column {one_line(name)!r} has the types {types[name]} and {kind} in "
                        "two parts. Write all parts with the same types"
                    )
            for group in range(metadata.num_row_groups):
                # a reader keeps the texts of all groups that it has read
                table = parquet.ParquetFile(file, metadata=metadata, read_dictionary=texts)
                batches = table.iter_batches(ROWS, [group], columns=names, use_threads=False)
                for batch in batches:
                    size = batch.nbytes + (size if are_kept else 0)
                    _check_expanded(size, path)
                    yield batch


def _read_parquet(paths: list[Path], names: list[str]) -> Any:
    batches = list(_parquet_batches(paths, names, are_kept=True))
    if not batches:
        raise ValueError(_NO_RECORDS)
    return _optional("pyarrow", "tables").Table.from_batches(batches)


def _read_csv(path: Path) -> Any:
    csv = _optional("pyarrow.csv", "tables")
    content = read_regular(path, MAX_ARRAY_BYTES)
    try:
        start_of_file = codecs.getincrementaldecoder("utf-8-sig")().decode(content[: 2**16])
    except UnicodeDecodeError:
        raise ValueError("the text is not UTF-8. Save it as CSV UTF-8") from None
    delimiter, start = csv_form(start_of_file)
    read = csv.ReadOptions(use_threads=False, skip_rows=int(start > 0))
    buffer = _optional("pyarrow", "tables").BufferReader(content)
    # without threads, which may go on after an error and crash the process
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    table = csv.read_csv(buffer, read, parse)
    if not table.num_rows:
        raise ValueError(_NO_RECORDS)
    return table


def _fault_of_numbers(column: Any) -> str:
    """Describes the fault of a text column that was probably meant to be numeric.

    Returns an empty string for other columns.
    """
    if not _optional("pyarrow", "tables").types.is_string(column.type):
        return ""
    cells = column.drop_null().to_pylist()
    texts = [cell for cell in cells if not _NUMBER.fullmatch(cell)] or cells
    if 2 * sum(map(bool, map(_NUMBER_WITH_UNIT.fullmatch, cells))) <= len(cells):
        return ""
    return f"contains numbers, but also {one_line(texts[0])!r}"


def _stated_features(schema: Any) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Reads the class names and the image columns that the package `datasets` has stored."""
    stated, images = {}, []
    try:
        content = decode_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        for name, feature in content.get("info", {}).get("features", {}).items():
            kind = isinstance(feature, dict) and feature.get("_type")
            if kind == "ClassLabel":
                stated[name] = tuple(same_name(str(value)) for value in feature["names"])
            elif kind == "Image":
                images.append(name)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise ValueError("the column types are damaged. Write the file again") from None
    return stated, images


def _table_part(
    place: str,
    schema: Any,
    read: Callable[[list[str]], Any],
    batches: Callable[[list[str]], Iterator[Any]] | None = None,
    decoding: Decoding = _PLAIN,
) -> Part:
    types = _optional("pyarrow", "tables").types
    if repeated := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise ValueError(f"several columns are named {one_line(repeated[0])!r}. Rename them")
    stated, images = _stated_features(schema)
    losses: Counter[str] = Counter()
    kinds = {name: _item_type(schema.field(name).type) for name in schema.names}
    checks = [types.is_integer, types.is_floating, types.is_boolean, types.is_decimal]
    checks.append(types.is_null)  # an empty column may be a damaged feature
    numbers = [name for name, kind in kinds.items() if any(check(kind) for check in checks)]
    readers: Readers = {
        name: partial(_column, partial(read, [name]), name) for name in schema.names
    }
    nested = [name for name in numbers if kinds[name] != schema.field(name).type]
    plain = [name for name in numbers if name not in nested or batches is None]
    read_numbers = cache(partial(read, plain))
    readers |= {name: partial(_column, read_numbers, name) for name in plain}
    if batches is not None:
        readers |= {name: partial(_large_column, partial(batches, [name]), name) for name in nested}
        readers |= {
            name: partial(_decoded, partial(batches, [name]), decoding, losses) for name in images
        }
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    usable = tuple(
        name for name in numbers if not (has_meaning(name) or name in stated or name in index)
    )
    if images:
        return Part(place, readers, None, stated, losses=losses)
    defaults = {name: readers[name] for name in usable}
    defaults |= {
        name: partial(_numbers_or_nan, read_numbers, name) for name in usable if name in plain
    }
    read_defaults = partial(_default_columns, defaults)
    return Part(place, readers, usable, stated, losses=losses, default_columns=read_defaults)


def has_meaning(name: str) -> bool:
    """Returns True if a column's name, such as `patient_id`, shows that it is not a feature."""
    return bool(column_of(name, _ROLES) or _IDENTIFIER.fullmatch(name))


def _item_type(kind: Any) -> Any:
    """Returns the type of the items in nested lists. Any other type is returned unchanged."""
    while hasattr(kind, "value_type") or hasattr(kind, "storage_type"):
        kind = getattr(kind, "storage_type", None) or kind.value_type
    return kind


def _column(read: Callable[[], Any], name: str) -> Array:
    """Reads a column as an array [N], or [N, D, …] for cells with lists of equal lengths."""
    pyarrow, compute = _optional("pyarrow", "tables"), _optional("pyarrow.compute", "tables")
    cells = read()[name]
    shape = [len(cells)]
    while True:
        if hasattr(cells.type, "storage_type"):  # a type defined by `datasets`
            cells = cells.cast(cells.type.storage_type)
        if cells.null_count == len(cells) > 0:
            raise ValueError("all cells are empty. Fill in or remove the column")
        if cells.null_count:
            raise ValueError(
                f"{cells.null_count} cells are empty. Fill them in, or remove their rows"
            )
        if not (pyarrow.types.is_nested(cells.type) and hasattr(cells.type, "value_type")):
            break
        lengths = compute.list_value_length(cells).unique().to_pylist()
        if len(lengths) > 1:
            raise ValueError(
                f"the cells contain lists of different lengths, such as {lengths[0]} and "
                f"{lengths[1]} values. Make all lists equally long"
            )
        shape.append(*(lengths or [0]))
        cells = compute.list_flatten(cells)
    if pyarrow.types.is_decimal(cells.type):
        cells = cells.cast(pyarrow.float64())
    return np.asarray(cells.to_numpy()).reshape(shape)


def _default_columns(readers: Readers) -> list[Array]:
    """Reads columns as float32, or uint8 if all are bytes. Damaged lists are left out."""
    columns = []
    for read in readers.values():
        try:
            columns.append(read())
        except ValueError:  # in each run on this file, whichever columns the run uses
            continue
    if {column.dtype for column in columns} == {np.dtype(np.uint8)}:
        return columns
    return list(map(as_float32, columns))


def _numbers_or_nan(read: Callable[[], Any], name: str) -> Array:
    """Reads a column with one number a row, [N]. Empty cells are NaN."""
    pyarrow = _optional("pyarrow", "tables")
    cells = read()[name]
    if pyarrow.types.is_uint8(cells.type) and not cells.null_count:
        return np.asarray(cells.to_numpy())
    return np.asarray(cells.cast(pyarrow.float64(), safe=False).fill_null(math.nan).to_numpy())


def _large_column(batches: Callable[[], Iterator[Any]], name: str) -> Array:
    """Reads a column with lists of numbers, float32 unless they are bytes, some rows at a time.

    The column is read twice: first to count the rows.
    """
    table = _optional("pyarrow", "tables").Table
    values: Array | None = None
    rows, first = sum(batch.num_rows for batch in batches()), 0
    for batch in batches():
        part = _column(partial(table.from_batches, [batch]), name)
        if values is None:
            kind = part.dtype if part.dtype == np.uint8 else np.dtype(np.float32)
            values = new_array((rows, *part.shape[1:]), kind)
        if part.shape[1:] != values.shape[1:]:
            raise ValueError("the cells contain lists of different lengths. Make them equally long")
        values[first : first + len(part)] = part
        first += len(part)
    if values is None:
        raise ValueError(_NO_RECORDS)
    return values


def downloaded(place: str, revision: str) -> tuple[str, str]:
    """Downloads a hub data set's Parquet and safetensors files.

    The files are stored in the cache of huggingface_hub. A local folder or file path is returned
    unchanged.

    Args:
        place: `hf:NAME`, `hf:NAME/FOLDER`, `hf:FOLDER` or a file path.
        revision: the branch, tag or commit. An empty string is the newest commit.

    Returns:
        The files' place, and the downloaded commit (empty for a local folder).

    Raises:
        DataFilesMissingError: the data set cannot be downloaded.
    """
    name = place.removeprefix(HUB)
    if name == place or Path(name).is_dir():
        return place, ""
    hub = _optional("huggingface_hub", "hub")
    names = name.split("/")
    name = "/".join(names[:2])
    options = {"repo_type": "dataset", "allow_patterns": ["*.parquet", "*.safetensors"]}
    try:
        commit = str(hub.HfApi().dataset_info(name, revision=revision or None).sha)
        folder = hub.snapshot_download(name, revision=commit, **options)
    except Exception as error:  # from the network, the disk or the hub
        reason = one_line(error)
        raise DataFilesMissingError(f"cannot download {one_line(place)}: {reason}") from None
    return f"{HUB}{Path(folder, *names[2:])}", commit


def _hub_parts(folder: Path, decoding: Decoding) -> dict[str, Part]:
    """Finds a data set's parts in a folder with Parquet files or one safetensors file."""
    files: dict[str, list[Path]] = {}
    places = set()
    for path in sorted(folder.rglob("*.parquet")):
        split, place = _split_of_path(path.relative_to(folder))
        files.setdefault(split, []).append(path)
        places.add(place)
    if len(places) > 1:
        raise DataError(
            f"{one_line(folder)} contains several data sets: "
            f"{one_line(', '.join(sorted(places)))}. Name one of them, such as "
            f"{HUB}NAME/{one_line(min(places - {'.'}))}"
        ).with_code("data.several_sets")
    if not files:
        return parts_of(str(next(folder.rglob("*.safetensors"), folder / "train.parquet")))
    place = one_line(folder)
    return {split: _parquet_part(paths, place, decoding) for split, paths in files.items()}


def _parquet_part(paths: list[Path], place: str, decoding: Decoding) -> Part:
    read, batches = partial(_read_parquet, paths), partial(_parquet_batches, paths)
    parts = [_table_part(place, _parquet_schema(path), read, batches, decoding) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if part.stated != parts[0].stated:
            raise DataError(
                f"the class names in {one_line(paths[0])} and {one_line(path)} do not match. Write "
                "both files from one data set"
            ).with_code("data.class_names")
    return parts[0]


def _split_of_path(path: Path) -> tuple[str, str]:
    """Returns the split in a file or folder name, and the data set's folder."""
    for place in (path, *path.parents):
        for word in words_of(place.name):
            if word in SPLITS:
                return SPLITS[word], place.parent.as_posix()
    return TRAIN, path.parent.as_posix()


def _decoded(
    batches: Callable[[], Iterator[Any]], decoding: Decoding, losses: Counter[str]
) -> Array:
    """Decodes a column of equally sized image files: uint8 [N, C, H, W].

    The column is read twice, some rows at a time: first for the images' sizes and colours.
    `losses` receives how often each kind of information was lost.
    """
    headers: list[ImageHeader] = []
    for paths in _image_files(batches()):
        batch, faults = read_headers(paths)
        _refuse_images(faults, len(headers))
        headers += batch
    if not headers:
        raise ValueError(_NO_RECORDS)
    sizes = {(header.height, header.width) for header in headers}
    if len(sizes) > 1:
        raise ValueError(f"the images have {len(sizes)} different sizes. Resize them to one size")
    shape = (1 if all(header.grey for header in headers) else 3, *sizes.pop())
    pixels = new_array((len(headers), *shape))
    first = 0
    for paths in _image_files(batches()):
        pixels[first : first + len(paths)], faults, lost = read_pixels(paths, *shape, decoding)
        losses.update(lost)
        _refuse_images(faults, first)
        first += len(paths)
    return pixels


def _image_files(batches: Iterator[Any]) -> Iterator[list[Path]]:
    """Writes the images of each batch to temporary files, and yields their paths."""
    rows = 0
    for batch in batches:
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for cell in batch.column(0):
                stored = cell.as_py() or {}
                rows += 1
                if stored.get("bytes") is None:
                    place = stored.get("path")
                    has = (
                        "no image"
                        if place is None
                        else f"only the path {one_line(place)} instead of an image"
                    )
                    raise ValueError(
                        f"row {rows} contains {has}. Remove the row, or store the image's bytes"
                    )
                paths.append(Path(folder, str(rows)))
                paths[-1].write_bytes(stored["bytes"])
            yield paths


def _refuse_images(faults: Mapping[int, str], first: int) -> None:
    for row, fault in faults.items():
        raise ValueError(
            f"row {first + row + 1} contains no valid image: {fault}. Remove or replace the row"
        )
