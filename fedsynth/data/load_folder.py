"""Loading a folder of images as data for a run: `load_folder`."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedsynth.data.arrays import IntArray
from fedsynth.data.declaration import MEAN, STD, Declaration
from fedsynth.data.files import one_line
from fedsynth.data.folder_checks import (
    Note,
    Skip,
    check_apart,
    files_of,
    require_declared,
    require_declared_counts,
)
from fedsynth.data.folder_settings import FolderSettings, name_of
from fedsynth.data.folder_tree import Unread, counted
from fedsynth.data.images import ImageData
from fedsynth.data.own_files import OwnFiles, find_declared, in_order
from fedsynth.data.own_pixels import Look, look_at, read_pixels
from fedsynth.data.record_table import numbered
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError

NAMED = 5
"""The maximum number of files that an error message names."""


@dataclass(frozen=True, eq=False)
class FolderData:
    """A folder of images as `simulate(settings, data=...)` takes it.

    Attributes:
        train: the training images, with their users if known.
        test: the test images, or None.
        test_kind: "public", "private" or "none".
        sites: for each site, the positions of its images; None if the folder has no sites. The
            run's partition then divides the images.
        names: the sites' names as used in ledger names.
        skipped: image files that could not be read.
        not_read: counts of folder entries that are not images.
        declaration: the public facts about the images, or None.

    >>> from fedsynth import FolderData, load_dataset
    >>> train, test = load_dataset("digits")
    >>> FolderData(train, test, "public")
    FolderData(1438 images of 'digits', no sites)
    """

    train: ImageData
    test: ImageData | None = None
    test_kind: str = "none"
    sites: tuple[IntArray, ...] | None = None
    names: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()
    not_read: tuple[Unread, ...] = ()
    declaration: Declaration | None = None

    @property
    def left_out(self) -> str:
        """Describes what was left out of the data; empty if nothing was."""
        parts = [f"{len(self.skipped)} images that cannot be read"] if self.skipped else []
        return ", ".join([*parts, *map(str, self.not_read)])

    def __repr__(self) -> str:
        sites = "no sites" if self.sites is None else f"{len(self.sites)} sites"
        return f"FolderData({len(self.train)} images of {self.train.spec.name!r}, {sites})"


def load_folder(
    folder: str | Path,
    *,
    image_size: int | str | None = None,
    channels: int | None = None,
    test_folder: str | Path | None = None,
    test: str | None = None,
    skip_corrupt: bool = False,
    skip_other: bool = False,
    declaration: str | Path | None = None,
) -> FolderData:
    """Loads a folder of images for `simulate(settings, data=...)`.

    Args:
        folder: SITE/CLASS/files (each site is a client), CLASS/files, or a folder with a
            manifest.csv of the columns path, label and, optionally, site and user; also the
            manifest itself. JPEG, PNG, BMP and WebP of any size, grey or colour.
        image_size: the size that every image is resized to: 64, or "64x48" (height x width). None:
            the declared size, or that of the images if all have the same.
        channels: 1 or 3. None: the declared number, or 1 if all images are grey.
        test_folder: the test images, in the same layouts.
        test: "public" or "private" (default) test images.
        skip_corrupt: skip image files that cannot be read; a warning names them.
        skip_other: skip everything that is not an image (other files, broken links, empty folders);
            a warning gives the count.
        declaration: the file that states what is public about the images (`fedsynth data describe`
            proposes it). None: fedsynth.toml in the folder, if it exists. A private run needs one.

    Raises:
        DataFilesMissingError: the folder does not exist or contains no image.
        DataFilesCorruptError: a file or list cannot be read, or the layout is unknown.
        DataError: a file is not an image; sizes differ and `image_size` is not set; classes, sites
            or counts differ from the declaration; or a file is in both the training and test set.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for place, size in (("north/ill", 20), ("north/well", 24), ("south/ill", 16)):
    ...     (folder / place).mkdir(parents=True)
    ...     Image.new("L", (size, size)).save(folder / place / "1.png")
    >>> load_folder(folder, image_size=16).names
    ('north', 'south')
    """
    settings = FolderSettings(
        str(folder),
        str(test_folder or ""),
        test or "",
        str(image_size or ""),
        channels or 0,
        skip_corrupt,
        str(declaration or ""),
        skip_other,
    )
    return read_folder(settings, lambda text: warnings.warn(str(text), stacklevel=2))


def read_folder(
    settings: FolderSettings, note: Note, name: str = "", *, declared: bool = True
) -> FolderData:
    """Reads the images that the settings name; raises the same errors as `load_folder`.

    Args:
        settings: the folder's settings.
        note: receives warnings about skipped files and other problems.
        name: the data set's name if no declaration gives one; empty: the folder's name.
        declared: whether to look for a declaration.
    """
    declaration = settings.declared() if declared else None
    skip = Skip.of(settings)
    files = files_of(Path(settings.folder), skip, note, declaration)
    test_files = None
    kind = settings.test or ("private" if settings.test_folder else "none")
    if settings.test_folder and kind != "none":
        test_files = files_of(Path(settings.test_folder), skip, note)
        check_apart(files, test_files, note)
    if declaration is not None:
        require_declared(files, declaration)
    spec = _specification(settings, files, declaration, name)
    train, files, skipped = _read(files, spec, skip, note)
    if declaration is None:
        spec = replace(spec, train_size=len(train))
        train = replace(train, spec=spec)
    else:
        require_declared(files, declaration)  # now without the skipped files
        require_declared_counts(train, declaration)
    test = None
    not_read = files.not_read
    if test_files is not None:
        test, more = _read_as(test_files, spec, skip, note)
        test = replace(test, groups=None)
        skipped += more
        not_read += test_files.not_read
    sites, names = _by_site(files, declaration)
    return FolderData(train, test, kind, sites, names, skipped, not_read, declaration)


# ------------------------------------------------------------------------------ specification


def _specification(
    settings: FolderSettings, files: OwnFiles, declaration: Declaration | None, name: str
) -> DatasetSpec:
    """Returns the declared specification, or else one derived from the files."""
    if declaration is not None:
        spec = declaration.spec
        for key, value, declared in (
            ("image_size", settings.size(), (spec.height, spec.width)),
            ("channels", settings.channels or None, spec.channels),
        ):
            if value is not None and value != declared:
                raise SettingError(
                    "data", key, f"differs from the value in {declaration.path}: {declared}"
                )
        return spec
    size = settings.size()
    channels = settings.channels
    if size is None or not channels:
        looks = _looks(files, Skip.of(settings))
        size = size or _one_size(looks, settings.folder)
        channels = channels or (1 if all(look.grey for look in looks) else 3)
    return DatasetSpec(
        name=name or name_of(Path(settings.folder)),
        channels=channels,
        height=size[0],
        width=size[1],
        classes=len(files.class_names),
        train_size=len(files.paths),
        test_size=1,
        mean=(MEAN,) * channels,
        std=(STD,) * channels,
        class_names=files.class_names,
        source="images in a folder",
    )


def _looks(files: OwnFiles, skip: Skip) -> list[Look]:
    """Returns the header information of all readable files.

    Raises:
        DataFilesCorruptError: a file cannot be read and may not be skipped, or no file can be read.
    """
    results = look_at(files.places)
    failed = {row: result for row, result in enumerate(results) if isinstance(result, str)}
    _refuse_failed(files, failed, skip)
    return [result for result in results if isinstance(result, Look)]


def _one_size(looks: Sequence[Look], folder: str) -> tuple[int, int]:
    sizes = Counter((look.height, look.width) for look in looks)
    if len(sizes) == 1:
        return next(iter(sizes))
    listed = ", ".join(f"{height}×{width}" for (height, width), _ in sizes.most_common(3))
    raise DataError(
        f"the images in {folder} have {len(sizes)} sizes ({listed}, …): set the size to "
        "resize them to, such as data.image_size=64"
    )


# ----------------------------------------------------------------------------------- the images


def _read(
    files: OwnFiles, spec: DatasetSpec, skip: Skip, note: Note
) -> tuple[ImageData, OwnFiles, tuple[str, ...]]:
    """Returns the images, the files they were read from, and the skipped files."""
    images, failed = read_pixels(files.places, spec.channels, spec.height, spec.width)
    skipped = tuple(files.paths[row] for row in failed)
    if failed:
        _refuse_failed(files, failed, skip)
        # Lists every skipped file, one a line, because a user who skips files wants to know which.
        head = f"{_how_many(files, failed)} and are skipped:"
        note("\n".join([head, *(f"  {line}" for line in _reasons(files, failed))]))
        rows = np.setdiff1d(np.arange(len(files.paths)), list(failed))
        images = images[rows]
        files = files.without(failed)
    number = {name: label for label, name in enumerate(spec.class_names)}
    labels = torch.tensor([number[name] for name in files.labels], dtype=torch.int64)
    groups = None if files.users is None else torch.from_numpy(numbered(files.users))
    pixels = torch.from_numpy(images)
    data = ImageData(pixels, labels, spec, groups=groups, may_be_empty=skip.all)
    return data, files, skipped


def _refuse_failed(files: OwnFiles, failed: Mapping[int, str], skip: Skip) -> None:
    """Raises an error for unreadable files, unless they may be skipped and others are readable."""
    if not failed or skip.all or (skip.corrupt and len(failed) < len(files.paths)):
        return
    reasons = _reasons(files, failed)
    names = "; ".join(reasons[:NAMED]) + (" …" if len(reasons) > NAMED else "")
    hint = ""
    if any("\\" in files.paths[row] for row in failed):
        hint = "; separate the parts of a path with /"
    raise DataFilesCorruptError(
        f"{_how_many(files, failed)}: {names}{hint}; repair or remove them, or skip them "
        "with --skip-corrupt (data.skip_corrupt=True)"
    )


def _how_many(files: OwnFiles, failed: Mapping[int, str]) -> str:
    return f"{len(failed)} of {len(files.paths)} files in {files.root} cannot be read"


def _reasons(files: OwnFiles, failed: Mapping[int, str]) -> list[str]:
    return [f"{one_line(files.paths[row])} ({reason})" for row, reason in failed.items()]


def read_as(
    folder: Path, spec: DatasetSpec, note: Note, skip: Skip | None = None
) -> tuple[ImageData, tuple[str, ...]]:
    """Reads a folder's images with the size and channels of a given specification.

    A class of the specification that the folder lacks has no images.

    Args:
        folder: as for `load_folder`.
        spec: the specification; its class names are only compared with the folder's, never used as
            paths.
        note: see `read_folder`.
        skip: what may be skipped; None: nothing.

    Returns:
        The images, and the unreadable files that were skipped.

    Raises:
        DataError: the folder has a class that the specification lacks, or as for `load_folder`.
    """
    if spec.channels not in (1, 3):
        raise DataError(f"{spec.name} has {spec.channels} channels: image files have 1 or 3")
    skip = skip or Skip()
    return _read_as(files_of(folder, skip, note), spec, skip, note)


def read_records(folder: Path, spec: DatasetSpec, note: Note, *, by_user: bool) -> ImageData:
    """Reads a data owner's images for a private run; the result may be empty.

    Each file is accepted or skipped independently: one that cannot be read, or has no declared
    class, is skipped without an error, because an error would reveal that the file exists.

    Args:
        folder, spec, note: see `read_as`.
        by_user: skip images without a known user.

    Raises:
        DataFilesCorruptError: a list or a folder cannot be read.
    """
    if spec.channels not in (1, 3):
        raise DataError(f"{spec.name} has {spec.channels} channels: image files have 1 or 3")
    files = find_declared(folder, spec.class_names, by_user=by_user)
    if files.not_read:
        note(f"skipped in {one_line(folder)}: {counted(files.not_read)}")
    data, _, _ = _read(files, spec, Skip(corrupt=True, other=True, all=True), note)
    if not len(data):
        note(f"{one_line(folder)} has no image of the run's classes: this client adds only noise")
    return data


def _read_as(
    files: OwnFiles, spec: DatasetSpec, skip: Skip, note: Note
) -> tuple[ImageData, tuple[str, ...]]:
    strange = [name for name in files.class_names if name not in spec.class_names]
    if strange:
        raise DataError(
            f"{files.root} has a class {one_line(strange[0])!r} that {spec.name} does not have"
        )
    data, _, skipped = _read(files, spec, skip, note)
    return data, skipped


def _by_site(
    files: OwnFiles, declaration: Declaration | None
) -> tuple[tuple[IntArray, ...] | None, tuple[str, ...] | None]:
    """Returns each site's image positions, and its name as used in ledger names."""
    if files.sites is None:
        return None, None
    if declaration is not None and not declaration.sites:
        return None, None  # declared to be one owner's
    names = in_order(files.sites) if declaration is None else declaration.sites
    sites = np.array(files.sites)
    return tuple(np.flatnonzero(sites == name) for name in names), site_names(names)


def site_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns sites' names for clients and ledgers, with `_` for each character not allowed there.

    A changed name ends with a hash of the original name. Sites added later therefore do not change
    it, and each ledger stays with its site.

    >>> site_names(["Nord", "Süd"])
    ('Nord', 'S_d-be833b')
    """
    plain = [re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64] for name in names]
    plain = [name if name[0].isalnum() else f"x{name}"[:64] for name in plain]
    folded = [name.casefold() for name in plain]
    return tuple(
        new
        if new == name and folded.count(new.casefold()) == 1
        else f"{new[:57]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        for name, new in zip(names, plain, strict=True)
    )
