"""The table of an owner's records: where each comes from, and its label, site and user.

Folders, files and hubs all give this table. `own_data` makes the data of a run from it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import SPLITS, folded_name, words_of
from fedsynth.data.images import IntArray
from fedsynth.data.registry import in_order
from fedsynth.errors import DataError, one_line

Note = Callable[[str], None]
Array = npt.NDArray[Any]
# An array of N strings, stored as Python objects.
Names = npt.NDArray[Any]
_WORDS_OF_SPLITS = {"set", "data", "image", "images", "split"}


class Entry(NamedTuple):
    """A file, link or empty folder below the folder of images.

    Attributes:
        kind: one of the constants `IMAGE`, `HIDDEN`, `BROKEN_LINK`, `EMPTY`, `NO_EXTENSION`,
            `NOT_DECLARED` and `NO_USER`. If none of them applies, the kind is the file's extension.
        path: the path relative to the folder of images.
    """

    kind: str
    path: PurePosixPath


@dataclass(frozen=True, eq=False)
class Records:
    """The records of an owner, as a table.

    Attributes:
        root: the folder or file.
        values: the path of each image relative to the folder, with `/`, in an array of objects. For
            a file, the features [N, …], uint8 or float32.
        labels: the class name of each record.
        sites: the site name of each record. The names are empty strings if there are no sites.
        users: the user name of each record, or an empty string if it is not known.
        stated: the names of the classes in the order that a file states, or an empty tuple.
        excluded: the files that are not images. A run refuses the folder because of them, unless a
            setting skips them.
        ignored: the hidden files, and the empty folders of classes that have images elsewhere. They
            are always skipped.
        skipped: the paths of images that cannot be read and were skipped.
        notes: sentences about columns of the lists that are not used.
    """

    root: Path
    values: Array
    labels: Names
    sites: Names
    users: Names
    stated: tuple[str, ...] = ()
    excluded: tuple[Entry, ...] = ()
    ignored: tuple[Entry, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def are_images(self) -> bool:
        """True if the records are image files, and not values."""
        return self.values.dtype == object

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes without repetition, in the order of `in_order`."""
        return in_order(self.labels)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The names of the sites without repetition, in the order of `in_order`.

        The result is empty if there are no sites.
        """
        return in_order(self.sites[self.sites != ""])

    @property
    def paths(self) -> list[Path]:
        """The full path of each image."""
        return list(map(self.root.joinpath, self.values))

    def select(self, rows: npt.NDArray[Any]) -> Records:
        """Returns the records that `rows` selects.

        `rows` contains positions of records, or a boolean for each record.
        """
        columns = {
            name: getattr(self, name)[rows] for name in ("values", "labels", "sites", "users")
        }
        return replace(self, **columns)


def with_classes(records: Records, class_names: tuple[str, ...]) -> Records:
    """Replaces labels 0, 1, … with the names of the classes at these positions.

    Labels that are names, or other numbers, are not changed. If some names are numbers, or the
    records are images in folders, all labels are names.
    """
    numbers = set(map(str, range(len(class_names))))
    if records.are_images or numbers & set(class_names) or not set(records.labels) <= numbers:
        return records
    return replace(records, labels=np.array(class_names, object)[records.labels.astype(np.int64)])


def counted(entries: Iterable[Entry]) -> str:
    """Describes in one line how many entries there are of each kind, with one example each."""
    paths: dict[str, list[PurePosixPath]] = {}
    for kind, path in sorted(entries):
        paths.setdefault(kind, []).append(path)
    texts = []
    for kind, examples in paths.items():
        more = " …" * (len(examples) > 1)
        texts.append(f"{kind}: {len(examples)} ({one_line(examples[0])}{more})")
    return one_line(", ".join(texts), 600)


def names_array(values: Iterable[str]) -> Names:
    """Stores texts as an array of objects."""
    return np.array(list(values), dtype=object)


def check_names(records: Records) -> None:
    """Checks that no two names of classes or of sites are spellings of one name, such as "T-shirt"
    and "t_shirt", and that the names are not those of splits.

    Raises:
        DataError: two names are spellings of one name, or two names are such as "train" and "test".
    """
    for kind, names in (("classes", records.class_names), ("sites", records.site_names)):
        spellings: dict[str, str] = {}
        splits: dict[str, str] = {}
        for name in names:
            other = spellings.setdefault(folded_name(name), name)
            if other != name:
                raise DataError(
                    f"two {kind} have the similar names {other!r} and {name!r}. Rename the folder or "
                    "label of one of them"
                ).with_code("data.names")
            tokens = set(words_of(name)) - _WORDS_OF_SPLITS
            if tokens and tokens <= SPLITS.keys():
                splits.setdefault(SPLITS[min(tokens)], name)
        check_splits(splits.values(), kind=kind)


def check_splits(names: Iterable[str], place: str = "", kind: str = "splits") -> None:
    """Checks that all records are of one split.

    Args:
        names: the names that the data have for their splits.
        place: where the names are, such as " in manifest.csv".
        kind: what the names are.

    Raises:
        DataError: there are several names, and a run would train on the test records.
    """
    splits = in_order(names)
    if len(splits) > 1:
        raise DataError(
            f"the {kind} {one_line(', '.join(splits))}{place} are parts of a data set, and a run "
            "would train on all of them. Pass the training records alone as data.folder, and the "
            "test records as data.test_folder"
        ).with_code("data.splits")


def note_shared_users(train: Records, test: Records, note: Note) -> None:
    """Warns the user if people may have both training and test records.

    Two lists may use the same name for different people, such as the numbers 0, 1, ….

    Args:
        train, test: the training and test records.
        note: a function that receives the warning.
    """
    people = set(test.users) - {""}
    in_both = people & set(train.users)
    if in_both:
        note(
            f"warning: {len(in_both)} of {len(people)} users in the test images have the name of a "
            "user in the training images. If they are the same people, the accuracy for new users "
            "may be lower"
        )


def by_site(
    records: Records, declared: Sequence[str] | None
) -> tuple[tuple[IntArray, ...] | None, tuple[str, ...] | None]:
    """Groups the records by site. Returns the positions of each site's records, and the sites' names.

    `site_names` makes the names valid as names of ledgers. The result is (None, None) if the records
    have no sites. `declared` are the names in the declaration, or None without one.
    """
    names = records.site_names
    if declared is not None and names:
        names = tuple(declared)  # none if all images are declared to be one owner's
    if not names:
        return None, None
    positions = tuple(np.flatnonzero(records.sites == name) for name in names)
    return positions, site_names(names)


def site_names(names: Sequence[str]) -> tuple[str, ...]:
    """Converts the names of sites to valid names of clients and ledgers.

    Each character that is not allowed becomes `_`, and a hash of the original name is appended to
    each changed name. The result for a site does not depend on the other sites, unless two names
    differ only in case or in characters that are not allowed.

    >>> site_names(["Nord", "Süd"])
    ('Nord', 'S_d-be833b')
    """
    allowed: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        allowed[name] = re.sub(r"^(?![A-Za-z0-9])", "x", plain)[:64]
    uses = Counter(map(str.casefold, allowed.values()))
    for name, plain in allowed.items():
        if plain != name or uses[plain.casefold()] > 1:
            digest = hashlib.sha256(name.encode()).hexdigest()
            allowed[name] = f"{plain[:57]}-{digest[:6]}"
    return tuple(allowed.values())
