"""The files of a user's folder of images: SITE/CLASS/files, CLASS/files, or a manifest.

A manifest is a CSV file (`fedsynth.data.record_table`) with the columns `path` and `label`, and
optionally `site` (the hospital, the client) and `user` (the patient). Without a manifest, a file
users.csv may give each image's user. Every file in it that is not read is counted, so that
nothing is ignored silently.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import one_line
from fedsynth.data.image_files import EXTENSIONS
from fedsynth.data.record_table import (
    USERS_FILE,
    read_table,
    read_users,
    same_name,
    users_of_images,
)
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError

MANIFEST = "manifest.csv"
LEDGERS = "fedsynth-ledger"
"""The ledger folder, which may be inside the images' folder."""
DECLARATION = "fedsynth.toml"
IMAGE = "image"
HIDDEN = "hidden"
BROKEN_LINK = "broken links"
EMPTY = "empty folders"
NO_EXTENSION = "no extension"
NOT_DECLARED = "images of no declared class"
NO_USER = "images of no known user"
_LAYOUT = "expected SITE/CLASS/files, CLASS/files, or a manifest.csv (path,label,site,user)"
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}
_SYSTEM_FILES = {"__macosx", "thumbs.db", "desktop.ini"}
_NUMBER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?")

Names = npt.NDArray[Any]
"""Strings [N], an array of Python objects."""


class Entry(NamedTuple):
    """A file, link or empty folder: its path relative to the root, and its kind (`IMAGE`, `HIDDEN`,
    `BROKEN_LINK`, `EMPTY`, or the extension of another file)."""

    kind: str
    path: PurePosixPath


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """The image files of a folder, in the order of their paths.

    Attributes:
        root: the folder.
        paths: the images' paths, relative to the folder, with `/`.
        labels: the class name of each image.
        sites: the site name of each image; empty strings if the folder has no sites.
        users: the user name of each image; empty strings if unknown.
        excluded: the other contents of the folder; a run refuses them unless a setting skips them.
        ignored: contents that are always skipped: hidden files, and empty folders of classes that other
            sites have.
    """

    root: Path
    paths: Names
    labels: Names
    sites: Names
    users: Names
    excluded: tuple[Entry, ...] = ()
    ignored: tuple[Entry, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Returns the class names, in order."""
        return in_order(self.labels)

    @property
    def site_names(self) -> tuple[str, ...]:
        """Returns the site names, in order; empty if the folder has no sites."""
        return in_order(self.sites[self.sites != ""])

    @property
    def full_paths(self) -> list[Path]:
        """Returns the files' full paths."""
        return list(map(self.root.joinpath, self.paths))

    def select(self, rows: npt.NDArray[Any]) -> FolderFiles:
        """Returns the images at the given positions, or where a mask is true."""
        return replace(
            self,
            paths=self.paths[rows],
            labels=self.labels[rows],
            sites=self.sites[rows],
            users=self.users[rows],
        )


def find_files(folder: Path, ledger: Path | None = None) -> FolderFiles:
    """Finds the images of a folder, or of a manifest.

    Args:
        folder: the folder (with or without a manifest.csv), or the manifest itself.
        ledger: a folder that may be inside it and contains no images.

    Raises:
        DataFilesMissingError: there is no folder, or no image in it.
        DataFilesCorruptError: a list cannot be read, or the folder layout is unknown.
        DataError: two classes or sites have almost the same name, or sites are named like splits.
    """
    if not folder.exists():
        raise DataFilesMissingError(f"the folder {one_line(folder)} does not exist")
    manifest = manifest_of(folder)
    if manifest.exists():
        files = _files_in_manifest(manifest)
        if not len(files.paths):
            raise DataFilesMissingError(f"{manifest} lists no image")
    else:
        files = _files_in_folders(folder, ledger or folder / LEDGERS)
    _refuse_similar_names("classes", files.class_names)
    _refuse_similar_names("sites", files.site_names)
    return files


def find_declared_files(folder: Path, classes: Collection[str], *, by_user: bool) -> FolderFiles:
    """Finds the images of declared classes for a private run; ignores sites, and may find none.

    Whether a file is included depends only on that file, and no file causes an error for the
    others. Skipped files are counted in `excluded`.

    Args:
        folder: see `find_files`.
        classes: the names of the declared classes.
        by_user: keep only images with a known user; otherwise user names are dropped.

    Raises:
        DataFilesCorruptError: a list or a folder cannot be read.
    """
    manifest = manifest_of(folder)
    if manifest.exists():
        files = _files_in_manifest(manifest)
    else:
        files = _labelled_files(folder, list_files(folder, {folder / LEDGERS}))
    users_file = files.root / USERS_FILE
    if by_user and not files.users.any() and users_file.exists():
        users = read_users(users_file)
        files = replace(files, users=_names(users.get(same_name(p), "") for p in files.paths))
    skipped = list(files.excluded)
    included = np.ones(len(files.paths), bool)
    for row, (path, label, user) in enumerate(
        zip(files.paths, files.labels, files.users, strict=True)
    ):
        if label not in classes:
            skipped.append(Entry(NOT_DECLARED, PurePosixPath(path)))
        elif by_user and not user:
            skipped.append(Entry(NO_USER, PurePosixPath(path)))
        else:
            continue
        included[row] = False
    if not by_user:
        files = replace(files, users=_names(("",) * len(files.paths)))
    return replace(files.select(included), excluded=tuple(skipped))


def manifest_of(folder: Path) -> Path:
    """Returns the path of a folder's manifest, which may be the given path itself."""
    return folder if folder.is_file() else folder / MANIFEST


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the distinct names, sorted as numbers if all are numbers, else by name."""
    distinct = sorted(set(names))
    if all(map(_NUMBER.fullmatch, distinct)):
        distinct.sort(key=int)
    return tuple(distinct)


def counted(entries: Iterable[Entry]) -> str:
    """Describes entries by kind, with the number of each and an example."""
    paths: dict[str, list[PurePosixPath]] = {}
    for kind, path in sorted(entries):
        paths.setdefault(kind, []).append(path)
    texts = []
    for kind, examples in paths.items():
        more = " …" * (len(examples) > 1)
        texts.append(f"{kind}: {len(examples)} ({one_line(examples[0])}{more})")
    return one_line(", ".join(texts), 600)


def _names(values: Iterable[str]) -> Names:
    return np.array(list(values), dtype=object)


def _refuse_similar_names(kind: str, names: Sequence[str]) -> None:
    """Raises an error for two spellings of a name, such as "T-shirt" and "t_shirt", or "0" and
    "0.0"."""
    spellings: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        spelling = re.sub(r"[\s_-]+", " ", folded)
        if _DECIMAL.fullmatch(folded):
            spelling = str(Fraction(folded.replace(",", ".")))
        other = spellings.setdefault(spelling, name)
        if other != name:
            raise DataError(
                f"two {kind} have the names {other!r} and {name!r}: if they are the same, "
                "rename one of the folders (or labels)"
            )


# --------------------------------------------------------------------------------------- folders


def list_files(root: Path, omitted: Collection[Path]) -> list[Entry]:
    """Lists all files below a folder, by path. Linked folders are followed.

    Args:
        root: the folder. Its declaration and its list of users are not listed.
        omitted: folders that are omitted.

    Raises:
        DataFilesCorruptError: a folder cannot be listed, or is reached twice (by a link to another
            folder in the tree, or to one that contains the link).
    """
    entries: list[Entry] = []
    visited: dict[tuple[int, int], str] = {}
    for folder, subfolders, files in os.walk(root, onerror=_refuse, followlinks=True):
        status = os.stat(folder)
        other = visited.setdefault((status.st_dev, status.st_ino), folder)
        if other != folder:
            raise DataFilesCorruptError(
                f"a link makes {one_line(folder)} and {one_line(other)} the same folder, so its "
                "images would count twice: remove the link"
            )
        path = PurePosixPath(Path(folder).relative_to(root))
        names = [*subfolders, *files]
        hidden = set(filter(_is_hidden, names))
        entries += [Entry(HIDDEN, path / name) for name in hidden]
        if len(hidden) == len(names) and path.parts:
            entries.append(Entry(EMPTY, path))
        subfolders[:] = [
            name for name in subfolders if name not in hidden and Path(folder, name) not in omitted
        ]
        for name in set(files) - hidden:
            if path.parts or name not in (DECLARATION, USERS_FILE):
                entries.append(Entry(_kind(Path(folder, name)), path / name))
    return sorted(entries, key=lambda entry: entry.path.parts)


def _refuse(error: OSError) -> NoReturn:
    raise DataFilesCorruptError(
        f"{one_line(error.filename)} cannot be listed: {one_line(error.strerror)}"
    )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in _SYSTEM_FILES


def _kind(file: Path) -> str:
    if not file.exists():
        return BROKEN_LINK
    extension = file.suffix.lower()
    return IMAGE if extension in EXTENSIONS else extension or NO_EXTENSION


def _labelled_files(root: Path, entries: Iterable[Entry]) -> FolderFiles:
    """Returns the images, labelled by their folders' names, and the other entries."""
    paths = []
    labels = []
    excluded = []
    for entry in entries:
        if entry.kind == IMAGE and len(entry.path.parts) > 1:
            paths.append(entry.path.as_posix())
            labels.append(same_name(entry.path.parent.name))
        else:
            excluded.append(entry)
    unknown = _names(("",) * len(paths))
    return FolderFiles(root, _names(paths), _names(labels), unknown, unknown, tuple(excluded))


def _files_in_folders(root: Path, ledger: Path) -> FolderFiles:
    entries = list_files(root, {root / LEDGERS, ledger})
    depth = _depth(root, entries)
    files = _labelled_files(root, entries)
    sites = files.sites
    if depth == 3:
        sites = _names(same_name(path.partition("/")[0]) for path in files.paths)
        _refuse_splits(root, set(sites))
    users = files.users
    if (root / USERS_FILE).exists():
        users = _names(users_of_images(root / USERS_FILE, list(files.paths)))
    classes = set(files.labels)
    ignored = []
    excluded = []
    for entry in files.excluded:
        empty_class = entry.kind == EMPTY and same_name(entry.path.name) in classes
        if entry.kind == HIDDEN or empty_class:
            ignored.append(entry)
        else:
            excluded.append(entry)
    return replace(
        files, sites=sites, users=users, excluded=tuple(excluded), ignored=tuple(ignored)
    )


def _refuse_splits(root: Path, sites: Collection[str]) -> None:
    """Raises an error if the sites look like splits: a run would then train on test images."""
    if _SPLITS.issuperset(map(str.casefold, sites)):
        raise DataError(
            f"{one_line(root)} has the folders {', '.join(in_order(sites))}, which would be "
            "sites: if they are splits, use one as training folder and the other as test "
            "folder"
        )


def _depth(root: Path, entries: Sequence[Entry]) -> int:
    """Returns the depth of the images: 2 (CLASS/file) or 3 (SITE/CLASS/file)."""
    images: dict[int, PurePosixPath] = {}  # an image of each depth
    for entry in entries:
        if entry.kind == IMAGE:
            images.setdefault(len(entry.path.parts), entry.path)
    if not images:
        raise DataFilesMissingError(
            f"no image ({', '.join(EXTENSIONS)}) in {one_line(root)} ("
            f"{counted(entries) or 'it is empty'}); {_LAYOUT}"
        )
    if len(images) > 1 or not images.keys() <= {2, 3}:
        raise DataFilesCorruptError(
            f"{one_line(root)} has {one_line(' and '.join(map(str, images.values())))}; {_LAYOUT}, "
            "the same layout everywhere"
        )
    return min(images)


# -------------------------------------------------------------------------------------- manifests


def _files_in_manifest(file: Path) -> FolderFiles:
    root = file.parent
    rows: dict[str, tuple[str, str, str]] = {}  # label, site, user
    for location, row in read_table(file, ("path", "label"), ("site", "user")):
        path = _path_on_disk(root, row["path"])
        if path in rows:
            raise DataFilesCorruptError(f"{location}: lists {one_line(path)} twice")
        rows[path] = (row["label"], row.get("site", ""), row.get("user", ""))
    paths = sorted(rows)
    facts = np.array(list(map(rows.__getitem__, paths)), dtype=object).reshape(-1, 3)
    return FolderFiles(root, _names(paths), *facts.T)


def _path_on_disk(root: Path, path: str) -> str:
    """Returns a path with its accents encoded as on disk; unchanged if no such file exists."""
    for form in ("NFC", "NFD"):
        candidate = unicodedata.normalize(form, path)
        if (root / candidate).exists():
            return candidate
    return path
