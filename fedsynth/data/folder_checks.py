"""Checks of a folder of images before anything is read or charged: no content is ignored silently,
and the folder matches its declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsynth.data.declaration import Declaration
from fedsynth.data.files import one_line
from fedsynth.data.folder_settings import FolderSettings
from fedsynth.data.folder_tree import counted
from fedsynth.data.images import ImageData
from fedsynth.data.own_files import OwnFiles, find_files
from fedsynth.errors import DataError

FAR_FEWER = 4
"""The ratio from which a declared number no longer counts as a rounding of the true one."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Skip:
    """The contents of a folder that may be skipped.

    Args:
        corrupt: image files that cannot be read.
        other: everything that is not an image.
        all: every file, so that there may be no image.
    """

    corrupt: bool = False
    other: bool = False
    all: bool = False

    @classmethod
    def of(cls, settings: FolderSettings) -> Skip:
        """Returns what the settings allow to skip."""
        return cls(settings.skip_corrupt, settings.skip_other)


def files_of(
    folder: Path, skip: Skip, note: Note, declaration: Declaration | None = None
) -> OwnFiles:
    """Finds a folder's images, and counts its other contents.

    Args:
        folder: see `find_files`.
        skip: what may be skipped.
        note: receives messages about skipped contents.
        declaration: the images' declaration, if any: its ledgers may be in the folder.

    Raises:
        DataError: the folder has other contents that may not be skipped, or as for `find_files`.
    """
    files = find_files(folder, None if declaration is None else declaration.ledger)
    if files.ignored:
        note(f"skipped in {one_line(folder)}: {counted(files.ignored)}")
    if not files.not_read:
        return files
    problem = (
        f"{one_line(folder)} contains files that cannot be read as images: "
        f"{counted(files.not_read)}"
    )
    if not skip.other:
        raise DataError(
            f"{problem}; convert them to PNG, remove them, list the images in a "
            "manifest.csv, or skip them with --skip-other (data.skip_other=True)"
        )
    note(f"{problem}; they are skipped")
    return files


def check_apart(train: OwnFiles, test: OwnFiles, note: Note) -> None:
    """Checks that no file is both a training and a test image; notes people who are in both sets.

    Raises:
        DataError: the sets overlap; the message names the first file.
    """
    training = {place.resolve() for place in train.places}
    both = [place for place in test.places if place.resolve() in training]
    if both:
        raise DataError(
            f"{len(both)} of {len(test.paths)} test images are among the training images, such as "
            f"{one_line(both[0])}: name folders that do not overlap"
        )
    people = set(train.users or ()) & set(test.users or ())
    if people:
        note(
            f"warning: {len(people)} of {len(set(test.users or ()))} people (users, "
            "patients) in the test images also have training images: the accuracy may not "
            "hold for new people"
        )


def require_declared(files: OwnFiles, declaration: Declaration) -> None:
    """Checks that the classes and sites are those of the declaration.

    Raises:
        DataError: one is not declared, or a declared one has no image.
    """
    for kind, names, declared in (
        ("class", files.class_names, declaration.spec.class_names),
        ("site", files.site_names, declaration.sites),
    ):
        strange = [name for name in names if name not in declared]
        if strange and (kind == "class" or declared):
            raise DataError(
                f"{files.root} has a {kind} {one_line(strange[0])!r} that {declaration.path} does "
                f"not declare; declared: {one_line(', '.join(declared))}"
            )
        missing = [name for name in declared if name not in names]
        if missing:
            raise DataError(
                f"{files.root} has no image of the {kind} {one_line(missing[0])!r}, which "
                f"{declaration.path} declares"
            )


def require_declared_counts(train: ImageData, declaration: Declaration) -> None:
    """Checks that there are no more images than the declared bound, and not far fewer images or
    users than declared.

    Raises:
        DataError: a count does not match; the message names the declaration's key.
    """
    if len(train) > declaration.most_images:
        raise DataError(
            f"there are more images than sizes.most_images in {declaration.path}: correct "
            "the bound, and sign again"
        )
    users = 0 if train.groups is None else len(train.groups.unique())
    for key, count, declared in (
        ("images", len(train), declaration.spec.train_size),
        ("users", users, declaration.spec.groups if users else 0),
    ):
        if count * FAR_FEWER < declared:
            raise DataError(
                f"there are {count} {key}, but {declaration.path} declares {declared} in "
                f"sizes.{key}: add the missing ones, or correct the number and sign again"
            )
