"""Folders of one's own images as data for a run: `load_folder`."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedsynth.data.arrays import IntArray
from fedsynth.data.declaration import MEAN, STD, Declaration
from fedsynth.data.files import one_line
from fedsynth.data.folder_settings import FolderSettings, name_of
from fedsynth.data.images import ImageData
from fedsynth.data.own_files import OwnFiles, find_files, in_order, left_out_in_words
from fedsynth.data.own_pixels import Failed, Look, look_at, read_pixels
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError, DataFilesCorruptError, Setting, SettingError, Text

NAMED = 5
"""Files that a message names."""
Note = Callable[[str], None]


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
        skipped: files that could not be read.
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
    declaration: Declaration | None = None

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
        skip_corrupt: leave files out that cannot be read; a warning names them.
        declaration: the file that says what is public of the images (`fedsynth data describe`
            proposes it). None: fedsynth.toml in the folder, if it is there. A private run needs
            one.

    Raises:
        DataFilesMissingError: no folder, or no image in it.
        DataFilesCorruptError: a file or list that cannot be read, another layout.
        DataError: sizes that differ where none is given, or a class or site that is not declared.

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
    )
    return read_folder(settings, lambda text: warnings.warn(str(text), stacklevel=2))


def read_folder(
    settings: FolderSettings, note: Note, name: str = "", *, declared: bool = True
) -> FolderData:
    """The images that settings name; errors as `load_folder`.

    Args:
        settings: the folder's.
        note: told of files that were left out.
        name: of the data set, where no declaration names it; empty: the folder's.
        declared: False does not look for a declaration.
    """
    declaration = settings.declared() if declared else None
    files = find_files(Path(settings.folder))
    if words := left_out_in_words(files):
        note(words)
    if declaration is not None:
        _require_declared(files, declaration)
    spec = _specification(settings, files, declaration, name)
    train, files, skipped = _read(files, spec, settings.skip_corrupt, note)
    if declaration is None:
        spec = replace(spec, train_size=len(train))
        train = replace(train, spec=spec)
    elif len(train) > declaration.most_images:
        raise DataError(
            f"{settings.folder} has more images than {declaration.path} declares in "
            "sizes.most_images: correct the bound, and sign again"
        )
    test = None
    kind = settings.test or ("private" if settings.test_folder else "none")
    if settings.test_folder and kind != "none":
        test, more = _read_test(Path(settings.test_folder), spec, settings.skip_corrupt, note)
        skipped += more
    sites, names = _by_site(files, declaration)
    return FolderData(train, test, kind, sites, names, skipped, declaration)


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
        looks = [one for one in look_at(_paths(files)) if isinstance(one, Look)]
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


def _one_size(looks: Sequence[Look], folder: str) -> tuple[int, int]:
    sizes = Counter((one.height, one.width) for one in looks)
    if len(sizes) == 1:
        return next(iter(sizes))
    shown = ", ".join(f"{height}×{width}" for (height, width), _ in sizes.most_common(3))
    raise DataError(
        Text(
            f"the images in {folder} have {len(sizes)} sizes ({shown}, …): say to which they are "
            "resized with ",
            Setting("data", "image_size", "64"),
        )
    )


def _require_declared(files: OwnFiles, declaration: Declaration) -> None:
    """Refuses a class or site that the declaration does not know, or a site without images."""
    for kind, there, declared in (
        ("class", files.class_names, declaration.spec.class_names),
        ("site", files.site_names, declaration.sites),
    ):
        strange = [name for name in there if name not in declared]
        if strange and (kind == "class" or declared):
            raise DataError(
                f"{files.root} has a {kind} {one_line(strange[0])!r} that {declaration.path} does "
                f"not declare; declared: {one_line(', '.join(declared))}"
            )
    missing = [name for name in declaration.sites if name not in files.site_names]
    if missing:
        raise DataError(
            f"{files.root} has no image of the site {one_line(missing[0])!r}, which "
            f"{declaration.path} declares"
        )


# ----------------------------------------------------------------------------------- the images


def _paths(files: OwnFiles) -> list[Path]:
    return [files.root / path for path in files.paths]


def _read(
    files: OwnFiles, spec: DatasetSpec, skip_corrupt: bool, note: Note
) -> tuple[ImageData, OwnFiles, tuple[str, ...]]:
    """The images, the files that they are of, and those that were skipped."""
    images, failed = read_pixels(_paths(files), spec.channels, spec.height, spec.width)
    skipped = tuple(files.paths[row] for row in failed)
    if failed:
        _say_failed(files, failed, skip_corrupt, note)
        kept = np.setdiff1d(np.arange(len(files.paths)), list(failed))
        images = images[kept]
        files = files.without(failed)
    number = {name: label for label, name in enumerate(spec.class_names)}
    labels = torch.tensor([number[name] for name in files.labels], dtype=torch.int64)
    groups = None if files.users is None else torch.tensor(files.users, dtype=torch.int64)
    return ImageData(torch.from_numpy(images), labels, spec, None, groups), files, skipped


def _say_failed(files: OwnFiles, failed: dict[int, Failed], skip_corrupt: bool, note: Note) -> None:
    shown = [f"{one_line(files.paths[row])} ({one.reason})" for row, one in failed.items()]
    count = f"{len(failed)} of {len(files.paths)} files in {files.root} cannot be read"
    names = "; ".join(shown[:NAMED]) + (" …" if len(shown) > NAMED else "")
    if not skip_corrupt or len(failed) == len(files.paths):
        raise DataFilesCorruptError(
            Text(
                f"{count}: {names}; repair or remove them, or leave them out with ",
                Setting("data", "skip_corrupt", "True"),
            )
        )
    # all of them, a line each: who skips files wants to know which
    note("\n".join([f"{count} and are left out:", *(f"  {one}" for one in shown)]))


def _read_test(
    folder: Path, spec: DatasetSpec, skip_corrupt: bool, note: Note
) -> tuple[ImageData, tuple[str, ...]]:
    data, skipped = read_as(folder, spec, note, skip_corrupt=skip_corrupt)
    return replace(data, groups=None), skipped


def read_as(
    folder: Path, spec: DatasetSpec, note: Note, *, skip_corrupt: bool = False
) -> tuple[ImageData, tuple[str, ...]]:
    """The images of a folder by a specification that is known, and the files that were skipped: in
    its size and channels; a class of it that the folder has not has no images.

    Args:
        folder: as `load_folder` takes it.
        spec: the specification; its classes' names are compared with the folder's, and never
            followed.
        note, skip_corrupt: see `read_folder`.

    Raises:
        DataError: a class that the specification has not, or as `load_folder`.
    """
    if spec.channels not in (1, 3):
        raise DataError(f"{spec.name} has {spec.channels} channels: image files have 1 or 3")
    files = find_files(folder)
    strange = [name for name in files.class_names if name not in spec.class_names]
    if strange:
        raise DataError(
            f"{folder} has a class {one_line(strange[0])!r} that {spec.name} does not have"
        )
    data, _, skipped = _read(files, spec, skip_corrupt, note)
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
