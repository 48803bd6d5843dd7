"""The image files in a user's folder: SITE/CLASS/files, CLASS/files, or a manifest.

A manifest is a CSV file (`fedsynth.data.record_table`) with the columns `path` and `label`, and
optionally `site` (the hospital, the client) and `user` (the patient). Without a manifest, a file
users.csv may give each image's user. Every file that is not read is counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from fedsynth.data.files import one_line
from fedsynth.data.folder_tree import EMPTY, HIDDEN, IMAGE, Entry, Unread, by_kind, counted, walk
from fedsynth.data.folders import ENDINGS, images_in
from fedsynth.data.record_table import USERS_FILE, read_owners, read_table, read_users, same_name
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError

MANIFEST = "manifest.csv"
LEDGERS = "fedsynth-ledger"
"""The ledger folder, which may be inside the images' folder."""
DECLARATION = "fedsynth.toml"
NOT_LISTED = "images that are not listed"
NOT_DECLARED = "images of no declared class"
NO_USER = "images of no known user"
_LAYOUT = "expected SITE/CLASS/files, CLASS/files, or a manifest.csv (path,label,site,user)"
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}
_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?")


@dataclass(frozen=True)
class OwnFiles:
    """The image files of a folder, in the order of their paths.

    Attributes:
        root: the folder.
        paths: the images' paths, relative to the folder, with `/`.
        labels: the class name of each image.
        sites: the site name of each image, or None if unknown.
        users: the user name of each image, or None if unknown.
        not_read: the other contents of the folder; a run refuses them unless a setting skips them.
        ignored: contents that are always skipped: hidden files, empty folders of classes that other
            sites have, and images that the manifest does not list.
    """

    root: Path
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    sites: tuple[str, ...] | None
    users: tuple[str, ...] | None
    not_read: tuple[Unread, ...] = ()
    ignored: tuple[Unread, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Returns the class names, in order."""
        return in_order(self.labels)

    @property
    def site_names(self) -> tuple[str, ...]:
        """Returns the site names, in order; empty if unknown."""
        return in_order(self.sites or ())

    @property
    def places(self) -> list[Path]:
        """Returns the files' full paths."""
        return [self.root / path for path in self.paths]

    def without(self, rows: Iterable[int]) -> OwnFiles:
        """Returns all images except those at the given positions."""
        gone = set(rows)
        remaining = [row for row in range(len(self.paths)) if row not in gone]

        def of_kept(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[row] for row in remaining)

        return replace(
            self,
            paths=of_kept(self.paths),
            labels=of_kept(self.labels),
            sites=None if self.sites is None else of_kept(self.sites),
            users=None if self.users is None else of_kept(self.users),
        )


def find_files(place: Path, ledger: Path | None = None) -> OwnFiles:
    """Finds the images of a folder, or of a manifest.

    Args:
        place: the folder (with or without a manifest.csv), or the manifest itself.
        ledger: a folder that may be inside it and contains no images.

    Raises:
        DataFilesMissingError: there is no folder, or no image in it.
        DataFilesCorruptError: a list cannot be read, or the folder layout is unknown.
        DataError: two classes or sites have almost the same name, or sites are named like splits.
    """
    if place.is_file():
        files = _listed(place)
    elif not place.is_dir():
        raise DataFilesMissingError(f"the folder {one_line(place)} does not exist")
    elif (place / MANIFEST).exists():
        files = _listed(place / MANIFEST)
    else:
        files = _in_folders(place, ledger)
    if not files.paths:
        raise DataFilesMissingError(f"{place} lists no image")
    _refuse_near_names("classes", files.class_names)
    _refuse_near_names("sites", files.site_names)
    return files


def find_declared(place: Path, classes: Collection[str], *, by_user: bool) -> OwnFiles:
    """Finds the images of declared classes for a private run; ignores sites, and may find none.

    Whether a file is included depends only on that file, and no file causes an error for the
    others. Skipped files are counted in `not_read`.

    Args:
        place: see `find_files`.
        classes: the names of the declared classes.
        by_user: keep only images with a known user; otherwise user names are dropped.

    Raises:
        DataFilesCorruptError: a list or a folder cannot be read.
    """
    manifest = place if place.is_file() else place / MANIFEST
    if manifest.exists():
        files = _listed(manifest)
    else:
        entries = walk(place, {DECLARATION, USERS_FILE}, {place / LEDGERS})
        images = [entry.parts for entry in entries if entry.kind == IMAGE and len(entry.parts) > 1]
        paths = tuple("/".join(parts) for parts in images)
        labels = tuple(same_name(parts[-2]) for parts in images)
        unread = by_kind([entry for entry in entries if entry.parts not in set(images)])
        files = OwnFiles(place, paths, labels, None, None, unread)
    if not by_user:
        files = replace(files, users=None)
    elif files.users is None:
        files = replace(files, users=_users_or_none(files.root / USERS_FILE, files.paths))
    users = files.users or files.paths
    undeclared = {
        row: NO_USER if label in classes else NOT_DECLARED
        for row, label in enumerate(files.labels)
        if label not in classes or not users[row]
    }
    entries = [
        Entry(PurePosixPath(files.paths[row]).parts, kind) for row, kind in undeclared.items()
    ]
    return replace(files.without(undeclared), not_read=files.not_read + by_kind(entries))


def _users_or_none(file: Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the name of each image's user, or "" if unknown."""
    owner = read_owners(file) if file.exists() else {}
    return tuple(owner.get(same_name(path), "") for path in paths)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the distinct names, sorted as numbers if all are numbers, else by name."""
    different = set(names)
    numbers = all(name.isascii() and name.isdigit() and len(name) < 10 for name in different)
    return tuple(sorted(different, key=lambda name: (int(name) if numbers else 0, name)))


def _refuse_near_names(kind: str, names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(_rough(name), name)
        if other != name:
            raise DataError(
                f"two {kind} have the names {other!r} and {name!r}: if they are the same, "
                "rename one of the folders (or labels)"
            )


def _rough(name: str) -> str:
    """Returns a canonical form that is equal for two spellings of a name, such as "T-shirt" and
    "t_shirt", or "0" and "0.0"."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    if _NUMBER.fullmatch(plain):
        return repr(float(plain.replace(",", ".")))
    return re.sub(r"[\s_-]+", " ", plain)


# --------------------------------------------------------------------------------------- folders


def _in_folders(root: Path, ledger: Path | None) -> OwnFiles:
    entries = walk(root, {DECLARATION, USERS_FILE}, {root / LEDGERS, ledger or root / LEDGERS})
    images = [entry.parts for entry in entries if entry.kind == IMAGE]
    if not images:
        visible = [entry for entry in entries if entry.kind != HIDDEN]
        listing = f" (there are {counted(by_kind(visible))})" if visible else ""
        raise DataFilesMissingError(
            f"no image ({', '.join(ENDINGS)}) in {one_line(root)}{listing}; {_LAYOUT}"
        )
    depth = _depth(root, images)
    labels = tuple(same_name(parts[-2]) for parts in images)
    sites = tuple(same_name(parts[0]) for parts in images) if depth == 3 else None
    _refuse_splits(root, sites or ())
    paths = tuple("/".join(parts) for parts in images)
    users = None
    if (root / USERS_FILE).exists():
        users = read_users(root / USERS_FILE, paths)
    classes = set(labels)
    ignored = []
    not_read = []
    for entry in entries:
        if _is_harmless(entry, classes):
            ignored.append(entry)
        elif entry.kind != IMAGE:
            not_read.append(entry)
    return OwnFiles(root, paths, labels, sites, users, by_kind(not_read), by_kind(ignored))


def _is_harmless(entry: Entry, labels: Collection[str]) -> bool:
    if entry.kind == EMPTY:
        return same_name(entry.parts[-1]) in labels
    return entry.kind == HIDDEN


def _refuse_splits(root: Path, sites: Sequence[str]) -> None:
    """Raises an error if the sites look like splits: a run would then train on test images."""
    if sites and {site.casefold() for site in sites} <= _SPLITS:
        raise DataError(
            f"{one_line(root)} has the folders {', '.join(in_order(sites))}, which would be "
            "sites: if they are splits, use one as training folder and the other as test "
            "folder"
        )


def _depth(root: Path, images: Sequence[tuple[str, ...]]) -> int:
    """Returns the depth of the images: 2 (CLASS/file) or 3 (SITE/CLASS/file)."""
    first = images[0]
    for parts in images:
        if len(parts) not in (2, 3) or len(parts) != len(first):
            contrast = f" beside {'/'.join(first)}" if parts != first else ""
            raise DataFilesCorruptError(
                f"{one_line(root)} has {one_line('/'.join(parts) + contrast)}; {_LAYOUT}, "
                "the same layout everywhere"
            )
    return len(first)


# -------------------------------------------------------------------------------------- manifests


def _listed(file: Path) -> OwnFiles:
    rows: dict[str, tuple[str, str, str]] = {}  # label, site, user
    for line, row in read_table(file, ("path", "label"), ("site", "user")):
        path = _on_disk(file.parent, row["path"])
        if path in rows:
            raise DataFilesCorruptError(f"{file}, line {line}: lists {one_line(path)} twice")
        rows[path] = (row["label"], row.get("site", ""), row.get("user", ""))
    paths = tuple(sorted(rows))
    labels, sites, users = (tuple(rows[path][column] for path in paths) for column in range(3))
    return OwnFiles(
        file.parent,
        paths,
        labels,
        sites if any(sites) else None,
        users if any(users) else None,
        ignored=_unlisted(file.parent, paths),
    )


def _on_disk(root: Path, path: str) -> str:
    """Returns a path with its accents encoded as on disk; unchanged if no such file exists."""
    if (root / path).exists():
        return path
    place = PurePosixPath()
    for part in PurePosixPath(path).parts:
        forms = [part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD"))]
        existing = [form for form in forms if (root / place / form).exists()]
        place /= existing[0] if existing else part
    return place.as_posix()


def _unlisted(root: Path, paths: Sequence[str]) -> tuple[Unread, ...]:
    """Counts unlisted images in the folders of listed ones."""
    listed = set(paths)
    unlisted = []
    for folder in sorted({PurePosixPath(path).parent for path in paths}):
        if (root / folder).is_dir():
            images = [folder / image.name for image in images_in(root / folder)]
            unlisted += [image for image in images if image.as_posix() not in listed]
    return by_kind([Entry(image.parts, NOT_LISTED) for image in unlisted])
