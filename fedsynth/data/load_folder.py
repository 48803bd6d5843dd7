"""Folders of one's own images as data for a run: `load_folder`."""

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
"""Files that a message names."""


@dataclass(frozen=True, eq=False)
class FolderData:
    """A folder of images as `simulate(settings, data=...)` takes it.

    Attributes:
        train: the images, with whose they are where that is known.
        test: the images to test on; None: there are none.
        test_kind: "public", "private" or "none".
        sites: of each site the positions of its images; None: the folder has no sites, and the
            run's partition divides the images.
        names: the sites' names, as they name ledgers.
        skipped: image files that could not be read.
        not_read: counts of what the folders have beside images.
        declaration: what is public of the images; None: nobody has said.

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
        """What the folders have and the data have not, as text; empty for nothing."""
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
    """A folder of one's own images, ready for `simulate(settings, data=...)`.

    Args:
        folder: SITE/CLASS/files (each site is a client), CLASS/files, or with a manifest.csv of the
            columns path, label, and where known site and user; also that file itself. JPEG, PNG,
            BMP and WebP of any size, grey or colour.
        image_size: every image is resized to it: 64, or "64x48" (height x width). None: the
            declaration's, or that of all images, where it is one.
        channels: 1 or 3. None: the declaration's, or 1 where all images are grey.
        test_folder: images to test on, likewise.
        test: what these are: "public" or "private" (if not given).
        skip_corrupt: leave image files out that cannot be read; a warning names them.
        skip_other: skip what is no image (other files, links to nothing, empty folders); a warning
            counts it.
        declaration: the file that says what is public of the images (`fedsynth data describe`
            proposes it). None: fedsynth.toml in the folder, if it is there. A private run needs
            one.

    Raises:
        DataFilesMissingError: no folder, or no image in it.
        DataFilesCorruptError: a file or list that cannot be read, another layout.
        DataError: something that is no image, sizes that differ where none is given, classes, sites
            or counts that are not as declared, a file that would train and test.

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
    """Reads the images that settings name; errors as `load_folder`.

    Args:
        settings: the folder's.
        note: receives what is left out, and what is doubtful.
        name: of the data set, where no declaration names it; empty: the folder's.
        declared: False does not look for a declaration.
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
        require_declared(files, declaration)  # without those that were skipped
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


# ------------------------------------------------------------------------------ what images are


def _specification(
    settings: FolderSettings, files: OwnFiles, declaration: Declaration | None, name: str
) -> DatasetSpec:
    """The declared specification, or one that follows from the files."""
    if declaration is not None:
        spec = declaration.spec
        for key, given, said in (
            ("image_size", settings.size(), (spec.height, spec.width)),
            ("channels", settings.channels or None, spec.channels),
        ):
            if given is not None and given != said:
                raise SettingError(
                    "data", key, f"is another than {declaration.path} declares: {said}"
                )
        return spec
    size = settings.size()
    channels = settings.channels
    if size is None or not channels:
        looks = _looks(files, Skip.of(settings))
        size = size or _one_size(looks, settings.folder)
        channels = channels or (1 if all(one.grey for one in looks) else 3)
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
    """Returns what the headers of the files say that can be read.

    Raises:
        DataFilesCorruptError: one cannot be read and may not be skipped, or none can.
    """
    found = look_at(files.places)
    failed = {row: one for row, one in enumerate(found) if isinstance(one, str)}
    _refuse_failed(files, failed, skip)
    return [one for one in found if isinstance(one, Look)]


def _one_size(looks: Sequence[Look], folder: str) -> tuple[int, int]:
    sizes = Counter((one.height, one.width) for one in looks)
    if len(sizes) == 1:
        return next(iter(sizes))
    shown = ", ".join(f"{height}×{width}" for (height, width), _ in sizes.most_common(3))
    raise DataError(
        f"the images in {folder} have {len(sizes)} sizes ({shown}, …): say to which they are "
        "resized with data.image_size=64"
    )


# ----------------------------------------------------------------------------------- the images


def _read(
    files: OwnFiles, spec: DatasetSpec, skip: Skip, note: Note
) -> tuple[ImageData, OwnFiles, tuple[str, ...]]:
    """Returns the images, the files that they are of, and those that were skipped."""
    images, failed = read_pixels(files.places, spec.channels, spec.height, spec.width)
    skipped = tuple(files.paths[row] for row in failed)
    if failed:
        _refuse_failed(files, failed, skip)
        # all of them, a line each: who skips files wants to know which
        head = f"{_how_many(files, failed)} and are left out:"
        note("\n".join([head, *(f"  {line}" for line in _reasons(files, failed))]))
        kept = np.setdiff1d(np.arange(len(files.paths)), list(failed))
        images = images[kept]
        files = files.without(failed)
    number = {name: label for label, name in enumerate(spec.class_names)}
    labels = torch.tensor([number[name] for name in files.labels], dtype=torch.int64)
    groups = None if files.users is None else torch.from_numpy(numbered(files.users))
    pixels = torch.from_numpy(images)
    data = ImageData(pixels, labels, spec, groups=groups, may_be_empty=skip.all)
    return data, files, skipped


def _refuse_failed(files: OwnFiles, failed: Mapping[int, str], skip: Skip) -> None:
    """Refuses files that cannot be read, unless they may be skipped and others can."""
    if not failed or skip.all or (skip.corrupt and len(failed) < len(files.paths)):
        return
    reasons = _reasons(files, failed)
    names = "; ".join(reasons[:NAMED]) + (" …" if len(reasons) > NAMED else "")
    hint = ""
    if any("\\" in files.paths[row] for row in failed):
        hint = "; paths are written with /"
    raise DataFilesCorruptError(
        f"{_how_many(files, failed)}: {names}{hint}; repair or remove them, or leave them out "
        "with --skip-corrupt (data.skip_corrupt=True)"
    )


def _how_many(files: OwnFiles, failed: Mapping[int, str]) -> str:
    return f"{len(failed)} of {len(files.paths)} files in {files.root} cannot be read"


def _reasons(files: OwnFiles, failed: Mapping[int, str]) -> list[str]:
    return [f"{one_line(files.paths[row])} ({one})" for row, one in failed.items()]


def read_as(
    folder: Path, spec: DatasetSpec, note: Note, skip: Skip | None = None
) -> tuple[ImageData, tuple[str, ...]]:
    """Reads the images of a folder by a specification that is known, in its size and channels; a
    class of it that the folder does not have has no images.

    Args:
        folder: as `load_folder` takes it.
        spec: the specification; its classes' names are compared with the folder's, and never
            followed.
        note: see `read_folder`.
        skip: what may be left out; None: nothing.

    Returns:
        The images, and the files that were skipped as they cannot be read.

    Raises:
        DataError: a class that the specification does not have, or as `load_folder`.
    """
    if spec.channels not in (1, 3):
        raise DataError(f"{spec.name} has {spec.channels} channels: image files have 1 or 3")
    skip = skip or Skip()
    return _read_as(files_of(folder, skip, note), spec, skip, note)


def read_records(folder: Path, spec: DatasetSpec, note: Note, *, by_user: bool) -> ImageData:
    """Reads an owner's images for a private run; there may be none.

    Each file is a record or none by itself: one that cannot be read, or is of no declared class, is
    left out, and does not make the others be refused. A refusal would show that it is there.

    Args:
        folder, spec, note: see `read_as`.
        by_user: images of no known user are left out.

    Raises:
        DataFilesCorruptError: a list or a folder that cannot be read.
    """
    if spec.channels not in (1, 3):
        raise DataError(f"{spec.name} has {spec.channels} channels: image files have 1 or 3")
    files = find_declared(folder, spec.class_names, by_user=by_user)
    if files.not_read:
        note(f"left out in {one_line(folder)}: {counted(files.not_read)}")
    data, _, _ = _read(files, spec, Skip(corrupt=True, other=True, all=True), note)
    if not len(data):
        note(f"{one_line(folder)} has no image of the run's classes: nothing but noise is added")
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
    """Of each site the positions of its images, and its name as ledgers have it."""
    if files.sites is None:
        return None, None
    if declaration is not None and not declaration.sites:
        return None, None  # declared to be one owner's
    names = in_order(files.sites) if declaration is None else declaration.sites
    where = np.array(files.sites)
    return tuple(np.flatnonzero(where == name) for name in names), site_names(names)


def site_names(names: Sequence[str]) -> tuple[str, ...]:
    """Sites' names as they name clients and ledgers: what neither may have is written as `_`.

    A name that is changed so ends with a hash of its own: sites that are added later change no
    other's, and a ledger stays its site's.

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
