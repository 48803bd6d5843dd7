"""Which files a folder of one's own images has: SITE/CLASS/files, CLASS/files, or a manifest.

A manifest is a CSV file with the columns `path` (below the manifest's folder, with `/`) and
`label`, and where they are known `site` (the hospital, the client) and `user` (the patient).
Without one, a file users.csv (`fedsynth.data.users`) may say whose each image is.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.data.folders import ENDINGS
from fedsynth.data.users import USERS_FILE, read_users
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError
from fedsynth.privacy.files import read_regular

MANIFEST = "manifest.csv"
LEDGERS = "fedsynth-ledger"
"""A folder of ledgers that may stand beside the images."""
DECLARATION = "fedsynth.toml"
_COLUMNS = ("path", "label", "site", "user")
_LAYOUT = "expected SITE/CLASS/files, CLASS/files, or a manifest.csv (path,label,site,user)"


@dataclass(frozen=True)
class OwnFiles:
    """The image files of a folder, in the order of their paths.

    Attributes:
        root: the folder.
        paths: of the images, relative to it, with `/`.
        labels: of each image the name of its class.
        sites: of each image the name of its site; None: nobody says.
        users: of each image the number of its user; None: nobody says.
        left_out: endings of files that are no images by them, with how many there are.
    """

    root: Path
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    sites: tuple[str, ...] | None
    users: tuple[int, ...] | None
    left_out: tuple[tuple[str, int], ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that there are: by number where all are numbers, else by name."""
        return in_order(self.labels)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites that there are, by name; empty where nobody says."""
        return in_order(self.sites or ())

    def without(self, rows: Iterable[int]) -> OwnFiles:
        """All images but those of these rows."""
        gone = set(rows)
        kept = [row for row in range(len(self.paths)) if row not in gone]
        return OwnFiles(
            self.root,
            tuple(self.paths[row] for row in kept),
            tuple(self.labels[row] for row in kept),
            None if self.sites is None else tuple(self.sites[row] for row in kept),
            None if self.users is None else tuple(self.users[row] for row in kept),
            self.left_out,
        )


def find_files(place: Path) -> OwnFiles:
    """The images of a folder, or of a manifest (the CSV file itself, or manifest.csv in the
    folder).

    Raises:
        DataFilesMissingError: nothing is there.
        DataFilesCorruptError: a list that cannot be read, or folders of another layout.
        DataError: two classes whose names differ in upper case alone.
    """
    if place.is_file():
        found = _listed(place)
    elif not place.is_dir():
        raise DataFilesMissingError(f"there is no folder {one_line(place)}")
    elif (place / MANIFEST).exists():
        found = _listed(place / MANIFEST)
    else:
        found = _in_folders(place)
    _refuse_near_names("classes", found.class_names)
    _refuse_near_names("sites", found.site_names)
    return found


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Different names: by number where all are numbers, else by name."""
    different = set(names)
    numbers = all(name.isascii() and name.isdigit() and len(name) < 10 for name in different)
    return tuple(sorted(different, key=lambda name: (int(name) if numbers else 0, name)))


def _refuse_near_names(kind: str, names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise DataError(
                f"two {kind} are called {other!r} and {name!r}: rename one of the folders (or "
                "labels) if they are the same"
            )


def _name(text: str) -> str:
    """A name as it is compared: the same whatever way an accent is encoded in."""
    return unicodedata.normalize("NFC", text).strip()


# --------------------------------------------------------------------------------------- folders


def _in_folders(root: Path) -> OwnFiles:
    images: list[tuple[str, ...]] = []
    others: Counter[str] = Counter()
    for parts in _walk(root):
        if Path(parts[-1]).suffix.lower() in ENDINGS:
            images.append(parts)
        elif parts not in ((USERS_FILE,), (DECLARATION,)):
            others[Path(parts[-1]).suffix.lower() or "no ending"] += 1
    left_out = tuple(sorted(others.items()))
    if not images:
        there = f" (there are files of {_endings(left_out)})" if left_out else ""
        raise DataFilesMissingError(
            f"no image ({', '.join(ENDINGS)}) in {one_line(root)}{there}; {_LAYOUT}"
        )
    images.sort()
    depths = {len(parts) for parts in images}
    for parts in images:
        if len(parts) not in (2, 3) or (len(depths) > 1 and len(parts) != len(images[0])):
            first = "/".join(images[0])
            beside = f" beside {first}" if parts != images[0] else ""
            raise DataFilesCorruptError(
                f"{one_line(root)} has {one_line('/'.join(parts))}{beside}; {_LAYOUT}, all alike"
            )
    paths = tuple("/".join(parts) for parts in images)
    users = None
    if (root / USERS_FILE).exists():
        users = tuple(read_users(root / USERS_FILE, paths).tolist())
    return OwnFiles(
        root,
        paths,
        tuple(_name(parts[-2]) for parts in images),
        tuple(_name(parts[0]) for parts in images) if depths == {3} else None,
        users,
        left_out,
    )


def _walk(root: Path) -> Iterator[tuple[str, ...]]:
    """The parts of each file's path below the folder; hidden ones, and ledgers, are left alone."""

    def refuse(error: OSError) -> None:
        raise DataFilesCorruptError(
            f"{one_line(error.filename)} cannot be listed: {one_line(error.strerror)}"
        )

    for where, folders, names in os.walk(root, onerror=refuse, followlinks=False):
        below = Path(where).relative_to(root).parts
        folders[:] = sorted(name for name in folders if not _hidden(name, top=not below))
        for name in names:
            if not _hidden(name, top=False):
                yield (*below, name)


def _hidden(name: str, *, top: bool) -> bool:
    return name.startswith(".") or name in ("__MACOSX", "Thumbs.db") or (top and name == LEDGERS)


def _endings(left_out: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{one_line(ending, 20)}: {count}" for ending, count in left_out[:8])


def left_out_in_words(files: OwnFiles) -> str:
    """What was left out, for a note; empty for nothing."""
    if not files.left_out:
        return ""
    return f"left alone, as they are no images by their endings: {_endings(files.left_out)}"


# -------------------------------------------------------------------------------------- manifests


def _listed(file: Path) -> OwnFiles:
    try:
        text = read_regular(file, MAX_LIST_BYTES).decode("utf-8-sig")
        rows = list(_rows(text, file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFilesCorruptError(f"cannot read {file}: {one_line(error)}") from None
    if not rows:
        raise DataFilesMissingError(f"{file} lists no image")
    rows.sort(key=lambda row: row["path"])
    for one, next_one in itertools.pairwise(rows):
        if one["path"] == next_one["path"]:
            raise DataFilesCorruptError(f"{file} lists {one_line(one['path'])} twice")
    users = None
    if "user" in rows[0]:
        number = {name: n for n, name in enumerate(sorted({row["user"] for row in rows}))}
        users = tuple(number[row["user"]] for row in rows)
    return OwnFiles(
        file.parent,
        tuple(row["path"] for row in rows),
        tuple(row["label"] for row in rows),
        tuple(row["site"] for row in rows) if "site" in rows[0] else None,
        users,
    )


def _rows(text: str, file: Path) -> Iterator[dict[str, str]]:
    """The rows by column; each column that there is must be filled."""
    first = text.partition("\n")[0]
    delimiter = ";" if ";" in first and "," not in first else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header = [name.strip().lower() for name in next(reader, [])]
    columns = {name: header.index(name) for name in _COLUMNS if name in header}
    if not {"path", "label"} <= columns.keys():
        raise DataFilesCorruptError(
            f"{file}: the first line must name the columns path and label, and may name site and "
            f"user; got {one_line(first)!r}"
        )
    for number, cells in enumerate(reader, start=2):
        if not any(cell.strip() for cell in cells):
            continue
        row = {name: _name(cells[at]) for name, at in columns.items() if at < len(cells)}
        empty = [name for name in columns if not row.get(name)]
        if empty:
            raise DataFilesCorruptError(f"{file}, line {number}: {empty[0]} is empty")
        path = cells[columns["path"]].strip()
        given = PurePosixPath(path)
        if given.is_absolute() or ".." in given.parts or "\0" in path:
            raise DataFilesCorruptError(
                f"{file}, line {number}: {one_line(path)} must be a path below {file.parent}"
            )
        yield {**row, "path": given.as_posix()}
