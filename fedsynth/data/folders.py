"""Finds the images in a user's folder, with their classes, sites and users.

The folder has the layout SITE/CLASS/files or CLASS/files, or it contains a manifest. A manifest is
a CSV file with the columns `path` and `label`, and optionally `site` (the hospital or client) and
`user` (the patient). Without a manifest, a users.csv may name each image's user. Without either
list, a DICOM file's patient ID is the user. Files other than images are counted for the report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NoReturn

import numpy as np

from fedsynth.data.files import (
    LEDGERS,
    USERS_FILE,
    is_hidden,
    read_table,
    same_name,
    sites_with_masks,
)
from fedsynth.data.medical import DICOM_EXTENSIONS, NIFTI_EXTENSIONS
from fedsynth.data.pixels import EXTENSIONS, is_image, read_patients
from fedsynth.data.records import Entry, Records, check_names, check_splits, counted, names_array
from fedsynth.data.tables import CSV, SUFFIXES
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError, one_line

MANIFEST = "manifest.csv"
DECLARATION = "fedsynth.toml"
IMAGE = "image"
HIDDEN = "hidden"
BROKEN_LINK = "broken links"
EMPTY = "empty folders"
NO_EXTENSION = "no extension"
NOT_DECLARED = "images of no declared class"
NO_USER = "images of no known user"
_LAYOUT = "Save all images as SITE/CLASS/FILE or all as CLASS/FILE, or list them in a manifest.csv"
_KINDS = (*EXTENSIONS, *DICOM_EXTENSIONS, *NIFTI_EXTENSIONS)


def find_files(folder: Path, ledger: Path | None = None) -> Records:
    """Finds the images in a folder, or the images listed in the folder's manifest.

    Args:
        folder: the folder (with or without a manifest.csv), or the manifest itself.
        ledger: the ledger folder, which is not searched for images.

    Raises:
        DataFilesMissingError: the folder does not exist, or contains no images.
        DataFilesCorruptError: a list cannot be read, or the folder layout is unknown.
        DataError: two class or site names are spellings of one name, or are split names ("train"
            and "test").
    """
    if not folder.exists():
        raise DataFilesMissingError(f"the folder {one_line(folder)} does not exist. Check its path")
    if sites_with_masks(folder):
        raise DataError(
            f"{one_line(folder)} contains images with masks, which private runs cannot use. Use "
            "fedsynth train --data, or arrange the images in class folders"
        ).with_code("data.masks")
    manifest = manifest_of(folder)
    if folder.is_file() and folder.suffix.lower() not in CSV:
        raise DataError(
            f"{one_line(folder)} is not a data file of a known type. Use a folder of images, or a "
            f"file with one of the endings {', '.join(SUFFIXES)}"
        ).with_code("data.file_type")
    if manifest.exists():
        files = _files_in_manifest(manifest)
        if not len(files):
            raise DataFilesMissingError(f"{manifest} lists no images. Add a line for each image")
        if not any(path.exists() for path in files.paths):
            raise DataFilesMissingError(
                f"no image that {one_line(manifest)} lists exists, such as "
                f"{one_line(files.paths[0])}. Correct the paths or, for a table of numbers, rename "
                "the column of file names"
            ).with_code("data.listed_images")
    else:
        files = _files_in_folders(folder, ledger or folder / LEDGERS)
    files = with_listed_users(files)
    check_names(files)
    return files


def find_declared_files(folder: Path, classes: Collection[str], *, by_user: bool) -> Records:
    """Finds the images of declared classes for a private run.

    Sites are ignored, and the result may be empty. Whether a file is included depends only on the
    file itself, and no image file causes an error. Skipped files are listed in `excluded`.

    Args:
        folder: see `find_files`.
        classes: the names of the declared classes.
        by_user: whether to keep only images with a known user. If false, all images are kept and
            user names are dropped.

    Raises:
        DataFilesCorruptError: a list or a folder cannot be read.
    """
    manifest = manifest_of(folder)
    if manifest.exists():
        files = _files_in_manifest(manifest)
    else:
        files = _labelled_files(folder, list_files(folder, {folder / LEDGERS}))
    if by_user:
        files = with_listed_users(files, private=True)
        if not (files.users.any() or (files.root / USERS_FILE).exists()):
            files = with_patients(files)
    declared = np.isin(files.labels, list(classes))
    has_user = files.users != ""
    if not by_user:
        has_user[:] = True
        files = replace(files, users=names_array(("",) * len(files)))
    skipped = list(files.excluded)
    for kind, rows in ((NOT_DECLARED, ~declared), (NO_USER, declared & ~has_user)):
        skipped += [Entry(kind, PurePosixPath(path)) for path in files.values[rows]]
    return replace(files.select(declared & has_user), excluded=tuple(skipped))


def with_listed_users(files: Records, *, private: bool = False) -> Records:
    """Adds each image's user from the folder's users.csv.

    The result is unchanged if there is no users.csv, or if any user is already known.

    Args:
        files: the files of a folder, which may contain a users.csv.
        private: whether images without a user are allowed. Splits are then not checked, because the
            result for one image must not depend on other images.

    Raises:
        DataFilesCorruptError: the list cannot be read, names two users for one image, or is missing
            an image.
        DataError: the list has the images in several splits.
    """
    file = files.root / USERS_FILE
    if files.users.any() or not file.exists():
        return files
    rows, notes = read_table(file, ("path", "user"), () if private else ("split",))
    listed: dict[str, dict[str, str]] = {}
    for location, row in rows:
        path = same_name(row["path"])
        if listed.setdefault(path, row)["user"] != row["user"]:
            raise DataFilesCorruptError(
                f"{location} names a second user for the image {one_line(path)}. Remove the "
                "wrong line"
            ).with_code("data.second_user")
    entries = [listed.get(same_name(path), {}) for path in files.values]
    if not private:
        if {} in entries:
            path = one_line(files.values[entries.index({})])
            raise DataFilesCorruptError(
                f"{file} does not list the image {path}. Add a line with this path (with / between "
                "folders) and its user"
            )
        check_splits((row.get("split", "") for row in entries), f" in {one_line(file)}")
    users = names_array(row.get("user", "") for row in entries)
    return replace(files, users=users, notes=(*files.notes, *notes))


def with_patients(files: Records) -> Records:
    """Sets the users of DICOM files to their hashed patient IDs (`patient_of`).

    Use it only if no list names users: a person listed under another name would count twice.
    """
    return replace(files, users=names_array(read_patients(files.paths)))


def manifest_of(folder: Path) -> Path:
    """Returns the path of a folder's manifest.csv. If `folder` is a file, returns it unchanged."""
    return folder if folder.is_file() else folder / MANIFEST


# --------------------------------------------------------------------------------------- folders


def list_files(root: Path, omitted: Collection[Path]) -> list[Entry]:
    """Lists all files and empty folders below a folder, sorted by path. Links are followed.

    Args:
        root: the folder. Its declaration and its list of users are not listed.
        omitted: folders that are not searched.

    Raises:
        DataFilesCorruptError: a folder cannot be listed, or a link leads to a folder that is also
            reached without the link, so that its images would count twice.
    """
    entries: list[Entry] = []
    visited: dict[tuple[int, int], str] = {}
    for folder, subfolders, files in os.walk(root, onerror=_refuse, followlinks=True):
        status = os.stat(folder)
        other = visited.setdefault((status.st_dev, status.st_ino), folder)
        if other != folder:
            raise DataFilesCorruptError(
                f"{one_line(folder)} and {one_line(other)} are the same folder. Its images would "
                "count twice. Remove the link to the folder"
            ).with_code("data.links")
        path = PurePosixPath(Path(folder).relative_to(root))
        names = [*subfolders, *files]
        hidden = set(filter(is_hidden, names))
        entries += [Entry(HIDDEN, path / name) for name in hidden]
        if len(hidden) == len(names) and path.parts:
            entries.append(Entry(EMPTY, path))
        subfolders[:] = [
            name for name in subfolders if name not in hidden and Path(folder, name) not in omitted
        ]
        for name in set(files) - hidden:
            if path.parts or name not in (DECLARATION, USERS_FILE):
                file = path / name
                entries.append(Entry(_kind(root, file), file))
    return sorted(entries, key=lambda entry: entry.path.parts)


def _refuse(error: OSError) -> NoReturn:
    raise DataFilesCorruptError(
        f"{one_line(error.filename)} cannot be listed: {one_line(error.strerror)}"
    ).with_code("data.unlistable")


def _kind(root: Path, file: PurePosixPath) -> str:
    if not os.path.exists(f"{root}/{file}"):
        return BROKEN_LINK
    if file.suffix.lower() in EXTENSIONS or is_image(root / file):
        return IMAGE
    return file.suffix.lower() or NO_EXTENSION


def _labelled_files(root: Path, entries: Iterable[Entry]) -> Records:
    """Labels each image with its class folder's name.

    Other files, and images outside of subfolders, become `excluded`.
    """
    images = []
    excluded = []
    for entry in entries:
        if entry.kind == IMAGE and len(entry.path.parts) > 1:
            images.append(entry.path)
        else:
            excluded.append(entry)
    labels = names_array(same_name(path.parts[-2]) for path in images)
    unknown = names_array(("",) * len(images))
    paths = names_array(map(PurePosixPath.as_posix, images))
    return Records(root, paths, labels, unknown, unknown, excluded=tuple(excluded))


def _files_in_folders(root: Path, ledger: Path) -> Records:
    entries = list_files(root, {root / LEDGERS, ledger})
    depth = _depth(root, entries)
    files = _labelled_files(root, entries)
    sites = files.sites
    if depth == 3:
        sites = names_array(same_name(path.partition("/")[0]) for path in files.values)
    classes = set(files.labels)
    ignored = []
    excluded = []
    for entry in files.excluded:
        empty_class = entry.kind == EMPTY and same_name(entry.path.name) in classes
        if entry.kind == HIDDEN or empty_class:
            ignored.append(entry)
        else:
            excluded.append(entry)
    return replace(files, sites=sites, excluded=tuple(excluded), ignored=tuple(ignored))


def _depth(root: Path, entries: Sequence[Entry]) -> int:
    """Detects the folder layout: returns 2 for CLASS/file and 3 for SITE/CLASS/file."""
    paths = [entry.path for entry in entries if entry.kind == IMAGE]
    images = {len(path.parts): path for path in reversed(paths)}  # the first one of each depth
    if not images:
        raise DataFilesMissingError(
            f"{one_line(root)} contains no images ({', '.join(_KINDS)}), only "
            f"{counted(entries) or 'empty folders'}. {_LAYOUT}"
        ).with_code("data.no_image")
    if len(images) > 1 or not images.keys() <= {2, 3}:
        raise DataFilesCorruptError(
            f"{one_line(root)} contains images at different depths, such as "
            f"{one_line(' and '.join(map(str, images.values())))}. {_LAYOUT}"
        ).with_code("data.layout")
    return min(images)


# -------------------------------------------------------------------------------------- manifests


def _files_in_manifest(file: Path) -> Records:
    root = file.parent
    facts: dict[str, tuple[str, str, str]] = {}  # label, site, user
    rows, notes = read_table(file, ("path", "label"), ("site", "user", "split"))
    check_splits((row.get("split", "") for _, row in rows), f" in {one_line(file)}")
    spellings = cache(_spellings)
    for location, row in rows:
        path = _existing(root, row["path"], spellings)
        if path in facts:
            raise DataFilesCorruptError(
                f"{location} repeats an earlier line's path {one_line(path)}. Remove one of the "
                "lines"
            )
        facts[path] = (row["label"], row.get("site", ""), row.get("user", ""))
    paths = sorted(facts)
    labels, sites, users = (names_array(facts[path][fact] for path in paths) for fact in range(3))
    return Records(root, names_array(paths), labels, sites, users, notes=notes)


def _existing(root: Path, path: str, spellings: Callable[[Path], dict[str, str]]) -> str:
    """Converts a path to the Unicode form of the file names on disk.

    The same accented letter may be one character in a list, and two characters on disk.
    """
    if (root / path).exists():
        return path
    place = PurePosixPath()
    for name in PurePosixPath(path).parts:
        place /= spellings(root / place).get(same_name(name), name)
    return place.as_posix()


def _spellings(folder: Path) -> dict[str, str]:
    """Maps normalised file names in a folder to real file names."""
    try:
        return {same_name(name): name for name in os.listdir(folder)}
    except OSError:
        return {}
