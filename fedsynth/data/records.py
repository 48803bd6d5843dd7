"""The table of an owner's records, with their origins, labels, sites and users.

Folders, files and hubs all give a table, which `own_data` converts to a run's data.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedsynth.data.files import SPLITS, folded_name, words_of
from fedsynth.data.images import IntArray
from fedsynth.data.pixels import DecodedFiles
from fedsynth.data.registry import in_order
from fedsynth.errors import DataError, one_line

Note = Callable[[str], None]
Array = npt.NDArray[Any]
# An array of N strings, stored as Python objects.
Names = npt.NDArray[Any]
_WORDS_OF_SPLITS = {"set", "data", "image", "images", "split"}


class Entry(NamedTuple):
    """A file, link or empty folder below the image folder.

    Attributes:
        kind: one of the constants `IMAGE`, `HIDDEN`, `BROKEN_LINK`, `EMPTY`, `NO_EXTENSION`,
            `NOT_DECLARED` and `NO_USER`. Otherwise, the kind is the file's extension.
        path: the path relative to the image folder.
    """

    kind: str
    path: PurePosixPath


@dataclass(frozen=True, eq=False)
class Records:
    """An owner's records, as a table.

    Attributes:
        root: the folder or file.
        values: image paths relative to the folder, with `/`, as an object array. For a file, the
            features [N, …], uint8 or float32.
        labels: the records' class names.
        sites: the records' site names, which are empty strings without sites.
        users: the records' user names, or empty strings if unknown.
        stated: the class names in the order stated in a file, or an empty tuple.
        features: the names of a table's feature columns. Empty for arrays and images.
        record_bytes: the bytes by which ledgers recognise a table's records, uint8 [N, B]. None for
            arrays and images.
        excluded: files other than images. A run refuses them unless a setting skips them.
        ignored: hidden files, and empty folders of classes with images elsewhere. Always skipped.
        skipped: the paths of skipped unreadable images.
        notes: sentences about unused list columns.
        decoded: the images of all files, if they are decoded already.
    """

    root: Path
    values: Array
    labels: Names
    sites: Names
    users: Names
    stated: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    record_bytes: Array | None = None
    excluded: tuple[Entry, ...] = ()
    ignored: tuple[Entry, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    decoded: DecodedFiles | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def are_images(self) -> bool:
        """True if the records are image files, not values."""
        return self.values.dtype == object

    @property
    def class_names(self) -> tuple[str, ...]:
        """The distinct class names, sorted by `in_order`."""
        return in_order(self.labels)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The distinct site names, sorted by `in_order`.

        The result is empty without sites.
        """
        return in_order(self.sites[self.sites != ""])

    @cached_property
    def paths(self) -> list[Path]:
        """The full path of each image."""
        return list(map(self.root.joinpath, self.values))

    def select(self, rows: npt.NDArray[Any]) -> Records:
        """Selects records.

        `rows` contains record indices, or a boolean for each record.
        """
        columns = {
            name: getattr(self, name)[rows] for name in ("values", "labels", "sites", "users")
        }
        stored = None if self.record_bytes is None else self.record_bytes[rows]
        return replace(self, **columns, record_bytes=stored, decoded=None)


def with_features(records: Records, names: tuple[str, ...]) -> Records:
    """Arranges a table's feature columns in the given order. Other columns are left out.

    Raises:
        DataError: a column is missing.
    """
    if records.features in ((), names) or not names:
        return records
    for name in names:
        if name not in records.features:
            raise DataError(
                f"the feature {one_line(name)!r} is missing from {one_line(records.root)}, whose "
                f"features are {one_line(', '.join(records.features))}. Add or rename the column, "
                "or choose the features of all files with --feature-columns"
            ).with_code("data.test_features")
    values = records.values[:, [records.features.index(name) for name in names]]
    return replace(records, values=values if len(names) > 1 else values[:, 0], features=names)


def with_classes(records: Records, class_names: tuple[str, ...]) -> Records:
    """Replaces labels that are class indices by the class names.

    Names and out-of-range numbers are not changed. If some class names are numbers, or the records
    are images in folders, all labels are names.

    Args:
        records: the records.
        class_names: the class names, in a stated order.
    """
    numbers = set(map(str, range(len(class_names))))
    named_by_numbers = any(name.strip("+-").isdigit() for name in class_names)
    if records.are_images or named_by_numbers or not set(records.labels) <= numbers:
        return records
    return replace(records, labels=np.array(class_names, object)[records.labels.astype(np.int64)])


def counted(entries: Iterable[Entry]) -> str:
    """Counts entries by kind, and returns a line with the counts and an example of each kind."""
    paths: dict[str, list[PurePosixPath]] = {}
    for kind, path in sorted(entries):
        paths.setdefault(kind, []).append(path)
    texts = []
    for kind, examples in paths.items():
        more = " …" * (len(examples) > 1)
        texts.append(f"{kind}: {len(examples)} ({one_line(examples[0])}{more})")
    return one_line(", ".join(texts), 600) if texts else ""


def note_losses(losses: Mapping[str, int], place: Path | str, note: Note) -> None:
    """Notes how many images have lost each kind of information when they were decoded."""
    if losses:
        lost = ", ".join(f"{count} {loss}" for loss, count in sorted(losses.items()))
        note(f"converted in {one_line(place)}: {lost}")


def names_array(values: Iterable[str]) -> Names:
    """Converts strings to an object array."""
    return np.array(list(values), dtype=object)


def check_names(records: Records) -> None:
    """Checks that class names and site names are unambiguous.

    Two names must not be spellings of one name, such as "T-shirt" and "t_shirt". They must not name
    several splits, such as "train" and "test".

    Raises:
        DataError: two names are spellings of one name, or split names such as "train" and "test".
    """
    for kind, names in (("classes", records.class_names), ("sites", records.site_names)):
        spellings: dict[str, str] = {}
        splits: dict[str, str] = {}
        for name in names:
            other = spellings.setdefault(folded_name(name), name)
            if other != name:
                raise DataError(
                    f"the {kind} {other!r} and {name!r} are spellings of one name. Rename one of "
                    "them"
                ).with_code("data.names")
            tokens = set(words_of(name)) - _WORDS_OF_SPLITS
            if tokens and tokens <= SPLITS.keys():
                splits.setdefault(SPLITS[min(tokens)], name)
        check_splits(splits.values(), kind=kind)


def check_splits(names: Iterable[str], place: str = "", kind: str = "splits") -> None:
    """Checks that all records belong to one split.

    Args:
        names: the split names in the data.
        place: where the names are, such as " in manifest.csv".
        kind: what the names are.

    Raises:
        DataError: several splits exist, so a run would train on the test records.
    """
    splits = in_order(names)
    if len(splits) > 1:
        raise DataError(
            f"the data contain the {kind} {one_line(', '.join(splits))}{place}, and a run would "
            "train on all of them. Pass only the training records as data.folder, and the test "
            "records as data.test_folder"
        ).with_code("data.splits")


def note_shared_users(train: Records, test: Records, note: Note) -> None:
    """Warns if the same people may have both training and test records.

    Two lists may also use the same names, such as 0, 1, …, for different people.

    Args:
        train, test: the training and test records.
        note: a function that receives the warning.
    """
    people = set(test.users) - {""}
    in_both = people & set(train.users)
    if in_both:
        note(
            f"warning: {len(in_both)} of {len(people)} user names in the test images also occur in "
            "the training images. If they are the same people, the accuracy for new users may be "
            "lower"
        )


def by_site(
    records: Records, declared: Sequence[str] | None
) -> tuple[tuple[IntArray, ...] | None, tuple[str, ...] | None]:
    """Returns the indices of each site's records.

    Returns the record indices and site names. `site_names` makes the names valid as ledger names.
    Without sites, the result is (None, None). `declared` are the declaration's site names, or None
    without a declaration.
    """
    names = records.site_names
    if declared is not None and names:
        names = tuple(declared)  # empty if the declaration names one owner
    if not names:
        return None, None
    positions = tuple(np.flatnonzero(records.sites == name) for name in names)
    return positions, site_names(names)


def site_names(names: Sequence[str]) -> tuple[str, ...]:
    """Converts site names to valid names for clients and their privacy ledgers.

    Forbidden characters become `_`, and a hash of the original name is appended to changed names. A
    site's result does not depend on other sites, unless two names differ only in case or in
    forbidden characters.

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
