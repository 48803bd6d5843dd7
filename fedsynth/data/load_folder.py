"""Loads a folder of images as the data of a run."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from fedsynth.data.folder_files import (
    FolderFiles,
    counted,
    find_declared_files,
    find_files,
    with_patients,
)
from fedsynth.data.folder_settings import (
    Declaration,
    FolderSettings,
    default_name,
    require_declared,
    require_declared_counts,
)
from fedsynth.data.image_files import file_hashes, read_headers, read_pixels
from fedsynth.data.images import Bytes, ImageData, IntArray
from fedsynth.data.medical_files import Decoding
from fedsynth.data.registry import DatasetSpec, custom_spec
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError, one_line

Note = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class FolderData:
    """The images of a folder, in the form that `simulate(settings, data=...)` accepts.

    Attributes:
        train: the training images, with their users if known.
        test: the test images, or None.
        test_kind: whether the test images are "public" or "private", or "none" without test images.
        sites: the positions of each site's images in `train`, or None if the folder has no sites.
            Without sites, the run's partition divides the images.
        names: the name of each site. `site_names` makes these names valid as names of ledgers.
        skipped: the image files that could not be read.
        left_out: a description of everything that was left out, or an empty string.
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
    left_out: str = ""
    declaration: Declaration | None = None

    def __repr__(self) -> str:
        sites = f"{len(self.sites or ()) or 'no'} sites"
        return f"FolderData({len(self.train)} images of {self.train.spec.name!r}, {sites})"


def load_folder(folder: str | Path, **settings: Any) -> FolderData:
    """Loads a folder of images for `simulate(settings, data=...)`.

    Args:
        folder: a folder with the layout SITE/CLASS/files or CLASS/files, or with a manifest.csv, or
            the manifest itself. Each site is a client. A manifest has the columns path and label
            and, optionally, site and user. Images are JPEG, PNG, BMP, WebP, TIFF, DICOM or NIfTI
            files of any size, in grey or colour.
        settings: further fields of `FolderSettings`, such as `image_size`, `channels`,
            `test_folder`, `skip_corrupt`, `skip_other`, `declaration` and `window`.

    Raises:
        DataFilesMissingError: the folder does not exist or contains no image.
        DataFilesCorruptError: a file or list cannot be read, or the layout is unknown.
        DataError: a file is not an image, the images have several sizes and `image_size` is not
            set, the classes, sites or counts differ from the declaration, or a file is in both the
            training set and the test set.

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
    chosen = FolderSettings(str(folder), **settings)
    return read_folder(chosen, warnings.warn, declaration=chosen.declared())


def read_folder(
    settings: FolderSettings, note: Note, name: str = "", *, declaration: Declaration | None
) -> FolderData:
    """Reads the training and test images that the settings name.

    The errors are those of `load_folder`.

    Args:
        settings: the folders, and the rules for reading them.
        note: a function that receives warnings about skipped files and other problems.
        name: the name of the data set, which is used only without a declaration. If it is empty,
            the folder's name is used.
        declaration: the declaration of the training images, or None.
    """
    decoding = settings.decoding(declaration)
    skip = {"skip_other": settings.skip_other, "skip_corrupt": settings.skip_corrupt}
    ledger = getattr(declaration, "ledger", None)
    files, skipped = _find(Path(settings.folder), note, decoding, ledger, **skip)
    kind = settings.test or ("private" if settings.test_folder else "none")
    test = test_files = None
    if kind != "none":
        test_files, skipped_tests = _find(Path(settings.test_folder), note, decoding, None, **skip)
        skipped += skipped_tests
        _check_disjoint(files, test_files, note)
    if declaration is None:
        spec = _derived_spec(settings, files, name or default_name(settings.folder))
    else:
        require_declared(files, declaration)
        spec = declared_spec(settings, declaration)
    train, files = _read(files, spec, note)
    if declaration is not None:
        require_declared_counts(train, declaration)
    excluded = files.excluded
    if test_files is not None:
        test = replace(_read(test_files, train.spec, note)[0], groups=None)
        excluded += test_files.excluded
    left_out = []
    if skipped:
        left_out.append(f"{len(skipped)} images that cannot be read")
    if excluded:
        left_out.append(counted(excluded))
    sites, names = by_site(files, declaration)
    return FolderData(train, test, kind, sites, names, skipped, ", ".join(left_out), declaration)


def _find(
    folder: Path,
    note: Note,
    decoding: Decoding,
    ledger: Path | None = None,
    /,
    *,
    skip_other: bool = False,
    skip_corrupt: bool = False,
) -> tuple[FolderFiles, tuple[str, ...]]:
    """Finds the images of a folder, and reports how many files are not images.

    If `skip_corrupt` is true, all files are decoded first, so that classes, sites and patients do not
    depend on a file that is then skipped.

    Returns:
        The images with their users, and the names of skipped images.

    Raises:
        DataError: the folder contains files that are not images and `skip_other` is false, or
            `find_files` refuses the folder.
        DataFilesCorruptError: no file can be read.
    """
    files = find_files(folder, ledger)
    for text in files.notes:
        note(text)
    if files.ignored:
        note(f"skipped in {one_line(folder)}: {counted(files.ignored)}")
    if files.excluded:
        others = counted(files.excluded)
        problem = f"{one_line(folder)} contains files that are not images: {others}"
        if not skip_other:
            raise DataError(
                f"{problem}. Remove these files, convert them to PNG, or skip them with "
                "--skip-other (data.skip_other=True)"
            ).with_code("data.other_files")
        note(f"{problem}. These files are skipped")
    faults: dict[int, str] = {}
    if skip_corrupt:
        _, faults, _ = read_pixels(files.full_paths, 1, 1, 1, decoding)
        if len(faults) == len(files.paths):
            _refuse_faults(files, faults)
    skipped = tuple(files.paths[list(faults)])
    return _with_known_patients(_without(files, faults, note), note), skipped


def _with_known_patients(files: FolderFiles, note: Note) -> FolderFiles:
    """Returns files with the patients in DICOM headers, if no list names users and all are known."""
    if files.users.any():
        return files
    by_patient = with_patients(files)
    unknown = int((by_patient.users == "").sum())
    if not unknown:
        _note_one_person(by_patient, note)
        return by_patient
    if unknown < len(files.users):
        note(
            f"warning: {unknown} of {len(files.users)} images in {one_line(files.root)} have no "
            "patient ID, so no patients are known. List them in users.csv"
        )
    return files


def _note_one_person(files: FolderFiles, note: Note) -> None:
    """Warns the user if all images of a site, or all images, have one person's name.

    Programs that anonymise DICOM files may give all files the same patient ID.
    """
    for site in np.unique(files.sites):
        here = files.users[files.sites == site]
        if len(here) > 1 and (here == here[0]).all():
            place = f"site {one_line(site)} of {one_line(files.root)}" if site else files.root
            note(
                f"warning: all {len(here)} images in {one_line(place)} have one patient ID, so they "
                "count as one person. If the files are anonymised, list the patients in users.csv"
            )


def _check_disjoint(train: FolderFiles, test: FolderFiles, note: Note) -> None:
    """Checks that no image file is in both the training set and the test set.

    A warning gives the number of people who have images in both sets.

    Raises:
        DataError: the two sets have a file in common. The message names the first such file.
    """
    shared = set(map(Path.resolve, train.full_paths)) & set(map(Path.resolve, test.full_paths))
    if shared:
        raise DataError(
            f"{len(shared)} of {len(test.paths)} test images are also training images, such as "
            f"{one_line(min(shared))}. Use a test folder without training images"
        ).with_code("data.shared_images")
    note_shared_users(train.users, test.users, note)


def note_shared_users(train: Iterable[str], test: Iterable[str], note: Note) -> None:
    """Warns the user if people may have both training and test records.

    Two lists may use the same name for different people, such as the numbers 0, 1, ….

    Args:
        train, test: the name of the person of each record, or an empty string.
        note: a function that receives the warning.
    """
    people = set(test) - {""}
    in_both = people & set(train)
    if in_both:
        note(
            f"warning: {len(in_both)} of {len(people)} users in the test images have the name of a "
            "user in the training images. If they are the same people, the accuracy for new users "
            "may be lower"
        )


# ------------------------------------------------------------------------------ specification


def declared_spec(settings: FolderSettings, declaration: Declaration) -> DatasetSpec:
    """Returns the declared specification, after a check that the settings agree with it.

    Raises:
        SettingError: a setting of the images differs from the declared value.
    """
    spec = declaration.spec
    size = (spec.height, spec.width)
    stated = settings.decoding()
    for key, value, unset, declared in (
        ("image_size", settings.size(), None, size),
        ("channels", settings.channels, 0, spec.channels),
        ("window", stated.window, None, spec.window),
        ("slice", stated.slice, -1, spec.slice),
        ("bounds", settings.limits(), None, spec.bounds),
    ):
        if value in (unset, declared):
            continue
        reason = f"must be left unset. Enter `{key}` under [images] in {declaration.path} instead"
        if declared != unset:
            numbers = declared if isinstance(declared, tuple) else (declared,)
            text = ("x" if key == "image_size" else ",").join(f"{n:.15g}" for n in numbers)
            reason = f"must be {text}, as {declaration.path} declares, or left unset"
        raise SettingError("data", key, reason)
    return spec


def _derived_spec(settings: FolderSettings, files: FolderFiles, name: str) -> DatasetSpec:
    """Derives a specification from the files of a folder that has no declaration.

    The classes are those of the files. The image size and the channels come from the settings or,
    if they are not set, from the headers of the files.

    Raises:
        DataFilesCorruptError: a file cannot be read.
        DataError: the images have several sizes, and `image_size` is not set.
    """
    size = settings.size()
    channels = settings.channels
    if size is None or not channels:
        headers, faults = read_headers(files.full_paths)
        if faults:
            _refuse_faults(files, faults)
        heights, widths, are_grey = zip(*headers, strict=True)
        sizes = Counter(zip(heights, widths, strict=True))
        if size is None and len(sizes) > 1:
            (height, width), _ = sizes.most_common(1)[0]
            raise DataError(
                f"the images in {settings.folder} have {len(sizes)} different sizes. Most are "
                f"{height}×{width}. Set a common size, such as --image-size {height}x{width} "
                "(data.image_size)"
            ).with_code("data.sizes")
        size = size or (heights[0], widths[0])
        channels = channels or (1 if all(are_grey) else 3)
    return custom_spec(
        name,
        (channels, *size),
        files.class_names,
        source="images in a folder",
        train_size=len(files.paths),
        **asdict(settings.decoding()),
    )


# ----------------------------------------------------------------------------------- the images


def _read(
    files: FolderFiles,
    spec: DatasetSpec,
    note: Note,
    *,
    private: bool = False,
) -> tuple[ImageData, FolderFiles]:
    """Reads the images of `files`, and returns them with the files that could be read.

    Only private data may have files that cannot be read, or no file.
    """
    undefined = sorted(set(files.class_names).difference(spec.class_names))
    if undefined:
        raise DataError(
            f"the folder {files.root} has the class {one_line(undefined[0])!r}, which the data set "
            f"{spec.name} does not have"
        ).with_code("data.unknown_class")
    if spec.channels not in (1, 3):
        raise DataError(
            f"the data set {spec.name} must have 1 or 3 channels to be read from image files, got "
            f"{spec.channels}"
        ).with_code("data.channels")
    decoding = Decoding(spec.window, spec.slice)
    images, faults, losses = read_pixels(files.full_paths, *spec.image_shape, decoding)
    if faults and not private:
        _refuse_faults(files, faults)
    if losses:
        lost = ", ".join(f"{count} {loss}" for loss, count in sorted(losses.items()))
        note(f"converted in {one_line(files.root)}: {lost}")
    images = np.delete(images, list(faults), axis=0)
    files = _without(files, faults, note)
    numbers = list(map(spec.class_names.index, files.labels))
    labels = torch.tensor(numbers, dtype=torch.int64)
    groups = None
    if files.users.any():
        groups = torch.from_numpy(np.unique(files.users, return_inverse=True)[1])
    hashes = file_hashes(files.full_paths)
    _note_copies(files, hashes, note)
    pixels = torch.from_numpy(images)
    data = ImageData(pixels, labels, spec, None, groups, private, torch.from_numpy(hashes))
    return data, files


def _note_copies(files: FolderFiles, hashes: Bytes, note: Note) -> None:
    """Warns the user of images that are links to others, or have the same content."""
    first: dict[bytes, str] = {}
    pairs = [
        (path, first.setdefault(digest.tobytes(), path))
        for path, digest in zip(files.paths, hashes, strict=True)
    ]
    copies = [pair for pair in pairs if pair[0] != pair[1]]
    if copies:
        copy, original = map(one_line, copies[0])
        note(
            f"warning: {len(copies)} of {len(pairs)} images in {one_line(files.root)} are links to or "
            f"copies of others, such as {copy} of {original}, and count as records. Remove them"
        )


def _without(files: FolderFiles, faults: dict[int, str], note: Note) -> FolderFiles:
    """Returns the files without faults. A note lists the others, because a user who skips files
    wants to know which.
    """
    if not faults:
        return files
    note("\n  ".join((f"skipped in {one_line(files.root)}:", *_descriptions(files, faults))))
    return files.select(np.delete(np.arange(len(files.paths)), list(faults)))


def _refuse_faults(files: FolderFiles, faults: dict[int, str]) -> NoReturn:
    raise DataFilesCorruptError(
        f"{len(faults)} of {len(files.paths)} files in {files.root} cannot be read, such as "
        f"{', '.join(_descriptions(files, faults)[:5])}. Repair or remove these files, or skip "
        "them with --skip-corrupt (data.skip_corrupt=True)"
    ).with_code("data.unreadable_images")


def _descriptions(files: FolderFiles, faults: dict[int, str]) -> list[str]:
    return [f"{one_line(files.paths[row])} ({fault})" for row, fault in faults.items()]


def read_as(folder: Path, spec: DatasetSpec, note: Note, **skip: bool) -> ImageData:
    """Reads the images of a folder, at the size, window and slice of a given specification.

    The folder may lack some of the specification's classes.

    Args:
        folder: see `load_folder`.
        spec: the specification. Its class names are compared with those of the folder, and are
            never used as paths.
        note: a function that receives warnings about skipped files.
        skip: `skip_corrupt` and `skip_other` (see `load_folder`).

    Raises:
        DataError: the folder has a class that the specification does not have, or the folder cannot
            be read for a reason that `load_folder` lists.
    """
    decoding = Decoding(spec.window, spec.slice)
    return _read(_find(folder, note, decoding, None, **skip)[0], spec, note)[0]


def read_records(folder: Path, spec: DatasetSpec, note: Note, *, by_user: bool) -> ImageData:
    """Reads the images of one data owner for a private run.

    The result may be empty. A file is skipped without an error if it cannot be read or if its class
    is not declared, because an error would reveal that the file exists. Whether a file is skipped
    does not depend on other files.

    Args:
        folder, spec, note: see `read_as`.
        by_user: whether to skip images whose user is not known.

    Raises:
        DataFilesCorruptError: a list or a folder cannot be read.
    """
    files = find_declared_files(folder, spec.class_names, by_user=by_user)
    for text in files.notes:
        note(text)
    if files.excluded:
        note(f"skipped in {one_line(folder)}: {counted(files.excluded)}")
    data, _ = _read(files, spec, note, private=True)
    if not len(data):
        note(
            f"{one_line(folder)} has no image of the run's classes. The client contributes only "
            "noise"
        )
    return data


def by_site(
    files: FolderFiles, declaration: Declaration | None
) -> tuple[tuple[IntArray, ...] | None, tuple[str, ...] | None]:
    """Groups the images by site. Returns the positions of each site's images, and the sites' names.

    `site_names` makes the names valid as names of ledgers. The result is (None, None) if the images
    have no sites.
    """
    names = files.site_names
    if declaration is not None and names:
        names = declaration.sites  # none if all images are declared to be one owner's
    if not names:
        return None, None
    positions = tuple(np.flatnonzero(files.sites == name) for name in names)
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
