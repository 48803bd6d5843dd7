"""Loads a folder of images, an array file, a table or a data set of a hub as the data of a run.

Each gives a table of records (`Records`). Images of bytes (uint8) stay bytes. All other numbers
become float32 and are scaled by public bounds, which come from a declaration or a setting, and
never from the data.

Private runs on images in folders skip what they cannot use (`read_private_records`), because an
error would reveal private content. All other runs refuse it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from fedsynth.data.declaration import (
    Declaration,
    FolderSettings,
    default_name,
    require_declared,
    require_declared_counts,
)
from fedsynth.data.files import TEST, TRAIN, sites_with_masks
from fedsynth.data.folders import find_declared_files, find_files, with_patients
from fedsynth.data.images import Bytes, ImageData, IntArray, from_arrays, image_shape_of
from fedsynth.data.masks import read_masked_folder
from fedsynth.data.medical import Decoding
from fedsynth.data.pixels import file_hashes, read_headers, read_pixels
from fedsynth.data.records import (
    Note,
    Records,
    by_site,
    counted,
    note_shared_users,
    site_names,
    with_classes,
)
from fedsynth.data.registry import DatasetSpec, custom_spec
from fedsynth.data.tables import is_record_file, parts_of, read_part
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError, one_line

# Functions that read the records of each split: "train" and, for some files, "val" and "test".
Splits = dict[str, Callable[[], Records]]


@dataclass(frozen=True, eq=False)
class OwnerData:
    """The records of an owner, in the form that `simulate(settings, data=...)` accepts.

    Attributes:
        train: the training records, with their users if known.
        test: the test records, or None.
        test_kind: whether the test records are "public" or "private", or "none" without test
            records.
        sites: the positions of each site's records in `train`, or None if there are no sites.
            Without sites, the run's partition divides the records.
        names: the name of each site. `site_names` makes these names valid as names of ledgers.
        skipped: the image files that could not be read.
        left_out: a description of everything that was left out, or an empty string.
        declaration: the public facts about the records, or None.

    >>> from fedsynth import OwnerData, load_dataset
    >>> train, test = load_dataset("digits")
    >>> OwnerData(train, test, "public")
    OwnerData(1438 images of 'digits', no sites)
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
        return f"OwnerData({len(self.train)} images of {self.train.spec.name!r}, {sites})"


def load_records(place: str | Path, **settings: Any) -> OwnerData:
    """Loads a folder of images or a file for `simulate(settings, data=...)`.

    Args:
        place: a folder with the layout SITE/CLASS/files or CLASS/files, or with a manifest.csv, or
            the manifest itself. Each site is a client. For segmentation, the layout is
            SITE/images/files and SITE/masks/files (`fedsynth.data.masks`). A manifest has the columns path and label
            and, optionally, site and user. Images are JPEG, PNG, BMP, WebP, TIFF, DICOM or NIfTI
            files of any size, in grey or colour. Or a file .npz, .npy, .safetensors, .parquet or
            .csv, or `hf:` with a folder of Parquet files or with the name of a data set on the
            Hugging Face hub.
        settings: further fields of `FolderSettings`, such as `image_size`, `channels`,
            `test_folder`, `skip_corrupt`, `skip_other`, `declaration`, `window`, `label_column` and
            `bounds`.

    Raises:
        DataFilesMissingError: the folder or file does not exist, or contains no image.
        DataFilesCorruptError: a file, column or list is damaged or contains Python objects, or the
            layout of the folder is unknown.
        DataError: a file is not an image, the images have several sizes and `image_size` is not
            set, a column is missing or has values that cannot be used, bounds are missing, the
            classes, sites or counts differ from the declaration, or a file is in both the training
            set and the test set.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for place, size in (("north/ill", 20), ("north/well", 24), ("south/ill", 16)):
    ...     (folder / place).mkdir(parents=True)
    ...     Image.new("L", (size, size)).save(folder / place / "1.png")
    >>> load_records(folder, image_size=16).names
    ('north', 'south')
    """
    chosen = FolderSettings(str(place), **settings)
    return read_own_data(chosen, warnings.warn, declaration=chosen.declared())


def read_own_data(
    settings: FolderSettings, note: Note, name: str = "", *, declaration: Declaration | None
) -> OwnerData:
    """Reads the training and test records that the settings name.

    The errors are those of `load_records`.

    Args:
        settings: the folders or files, and the rules for reading them.
        note: a function that receives warnings about skipped files and other problems, and notes
            about columns that are not used.
        name: the name of the data set, which is used only without a declaration. If it is empty,
            the folder's name is used.
        declaration: the declaration of the training records, or None.
    """
    if sites_with_masks(Path(settings.folder)):
        return _with_masks(settings, name or default_name(settings.folder), declaration)
    decoding = settings.decoding(declaration)
    ledger = getattr(declaration, "ledger", None)
    splits = splits_of(settings.folder, settings, note, decoding, settings.revision, ledger)
    records = training_records(splits, settings, note)
    tables = [records]
    tests = splits if {TEST, TRAIN} <= splits.keys() else {}
    if settings.test_folder:
        tests = splits_of(settings.test_folder, settings, note, decoding)
    kind = settings.test or ("private" if tests else "none")
    if kind != "none":
        if not tests:
            reason = "requires test records. Set data.test_folder"
            raise SettingError("data", "test", reason, value=kind)
        tables.append(tests[_split_of(tests, TEST, settings.test_folder)]())
        _check_disjoint(*tables, note=note)
    if declaration is None:
        spec = spec_of(records, settings, name or default_name(settings.folder))
    else:
        spec = declared_spec(settings, declaration)
        require_declared(with_classes(records, spec.class_names), declaration)
    train, *tested = (as_data(table, spec, note) for table in tables)
    if declaration is not None:
        require_declared_counts(train, declaration)
    test = replace(tested[0], groups=None) if tested else None
    sites, names = by_site(records, getattr(declaration, "sites", None))
    skipped = sum((table.skipped for table in tables), ())
    excluded = sum((table.excluded for table in tables), ())
    left_out = []
    if skipped:
        left_out.append(f"{len(skipped)} images that cannot be read")
    if excluded:
        left_out.append(counted(excluded))
    return OwnerData(train, test, kind, sites, names, skipped, ", ".join(left_out), declaration)


def _with_masks(settings: FolderSettings, name: str, declaration: Declaration | None) -> OwnerData:
    """Reads a folder of sites with images and masks.

    Raises:
        DataError: the folder has a declaration, which only private runs need.
    """
    if declaration is not None:
        raise DataError(
            f"{one_line(settings.folder)} has images with masks, on which runs cannot be private. "
            "Remove the declaration, or use folders of classes"
        ).with_code("data.masks")
    train = read_masked_folder(settings, settings.folder, name)
    test = None
    if settings.test_folder:
        test = read_masked_folder(settings, settings.test_folder, name, train.spec)
    domains, _ = train.origins()
    sites = tuple(np.flatnonzero(domains == site) for site in range(len(train.spec.domains)))
    kind = settings.test or ("none" if test is None else "private")
    return OwnerData(train, test, kind, sites, site_names(train.spec.domains))


def read_as(settings: FolderSettings, spec: DatasetSpec, note: Note, split: str) -> ImageData:
    """Reads records at the size, window and slice of a given specification.

    The records may lack some of the specification's classes. Its class names are never used as
    paths.

    Args:
        settings: the folder or file, and the rules for reading it.
        spec: the specification.
        note: a function that receives warnings about skipped files.
        split: the part of a file that is read, if it has several.

    Raises:
        DataError: the records do not fit the specification, or cannot be read for a reason that
            `load_records` lists.
    """
    decoding = Decoding(spec.window, spec.slice)
    splits = splits_of(settings.folder, settings, note, decoding, settings.revision)
    return as_data(splits[_split_of(splits, split, settings.folder)](), spec, note)


def read_private_records(
    folder: Path, spec: DatasetSpec, note: Note, *, by_user: bool
) -> ImageData:
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
    data = as_data(files, spec, note, private=True)
    if not len(data):
        note(
            f"{one_line(folder)} has no image of the run's classes. The client contributes only "
            "noise"
        )
    return data


# ------------------------------------------------------------------------------------ the tables


def splits_of(
    place: str,
    settings: FolderSettings,
    note: Note,
    decoding: Decoding,
    revision: str = "",
    ledger: Path | None = None,
) -> Splits:
    """Returns functions that read the records of each split of a folder or file.

    A folder of images has only the split "train", also if its images are used for tests.

    Args:
        place: the folder or file.
        settings: the rules for reading it.
        note: a function that receives warnings.
        decoding: how the values in image files become pixels.
        revision: the revision of a data set of the hub.
        ledger: the folder of the ledgers. It is not searched for images.

    Raises:
        DataError: the file cannot be read.
    """
    if not is_record_file(place):
        return {TRAIN: partial(_images_in, Path(place), settings, note, decoding, ledger)}
    parts = parts_of(place, revision, decoding)
    return {
        split: partial(read_part, part, settings.columns, note) for split, part in parts.items()
    }


def training_records(splits: Splits, settings: FolderSettings, note: Note) -> Records:
    """Reads the training records, and notes which splits are not used.

    Raises:
        DataError: the records cannot be read.
    """
    split = _split_of(splits, TRAIN, settings.folder)
    if split != TRAIN:
        note(f"{one_line(settings.folder)} has only {split} records, which a run trains on")
    for unused in sorted(splits.keys() - {split, TEST}):
        note(f"the {unused} records in {one_line(settings.folder)} are not used")
    return splits[split]()


def _split_of(splits: Splits, split: str, place: str) -> str:
    """Returns the name of a split: the given one if there is one, or the only one."""
    if split in splits:
        return split
    if len(splits) > 1:
        raise DataError(
            f"{one_line(place)} has {' and '.join(sorted(splits))} records, but no {split} records. "
            "Save these records in a file of their own"
        ).with_code("data.parts")
    return min(splits)


def _images_in(
    folder: Path, settings: FolderSettings, note: Note, decoding: Decoding, ledger: Path | None
) -> Records:
    """Finds the images of a folder, and reports how many files are not images.

    With `skip_corrupt`, all files are decoded first, so that classes, sites and patients do not
    depend on a file that is then skipped.

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
        kinds = counted(files.excluded)
        problem = f"{one_line(folder)} contains files that are not images: {kinds}"
        if not settings.skip_other:
            raise DataError(
                f"{problem}. Remove these files, convert them to PNG, or skip them with "
                "--skip-other (data.skip_other=True)"
            ).with_code("data.other_files")
        note(f"{problem}. These files are skipped")
    if settings.skip_corrupt:
        _, faults, _ = read_pixels(files.paths, 1, 1, 1, decoding)
        if len(faults) == len(files):
            _refuse_faults(files, faults)
        files = _without(files, faults, note)
    return _with_known_patients(files, note)


def _with_known_patients(files: Records, note: Note) -> Records:
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


def _note_one_person(files: Records, note: Note) -> None:
    """Warns the user if all images of a site, or all images, have one person's name.

    Programs that anonymise DICOM files may give all files the same patient ID.
    """
    for site in np.unique(files.sites):
        users = files.users[files.sites == site]
        if len(users) > 1 and (users == users[0]).all():
            place = f"site {one_line(site)} of {one_line(files.root)}" if site else files.root
            note(
                f"warning: all {len(users)} images in {one_line(place)} have one patient ID, so they "
                "count as one person. If the files are anonymised, list the patients in users.csv"
            )


def _check_disjoint(train: Records, test: Records, *, note: Note) -> None:
    """Checks that no image file is in both the training set and the test set.

    A warning gives the number of people who have records in both sets.

    Raises:
        DataError: the two sets have a file in common. The message names the first such file.
    """
    if train.are_images and test.are_images:
        shared = set(map(Path.resolve, train.paths)) & set(map(Path.resolve, test.paths))
        if shared:
            raise DataError(
                f"{len(shared)} of {len(test)} test images are also training images, such as "
                f"{one_line(min(shared))}. Use a test folder without training images"
            ).with_code("data.shared_images")
    note_shared_users(train, test, note)


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


def spec_of(records: Records, settings: FolderSettings, name: str) -> DatasetSpec:
    """Derives a specification from records that have no declaration.

    The classes are those of the records, and the bounds of values are those of the settings.

    Raises:
        DataFilesCorruptError: a file cannot be read.
        DataError: the images have several sizes, and `image_size` is not set.
    """
    decoding = settings.decoding()
    if records.are_images:
        bounds = None
        shape = _image_shape(records, settings)
        source = "images in a folder"
    else:
        bounds = settings.limits()
        shape = image_shape_of(_slices(records.values, decoding.slice).shape)
        source = "records in a file"
    return custom_spec(
        name,
        shape,
        records.stated or records.class_names,
        source=source,
        train_size=len(records),
        bounds=bounds,
        **asdict(decoding),
    )


def _image_shape(records: Records, settings: FolderSettings) -> tuple[int, int, int]:
    """Returns the channels, height and width of the images: those of the settings or, if they are
    not set, of the headers of the files.
    """
    size = settings.size()
    channels = settings.channels
    if size is None or not channels:
        headers, faults = read_headers(records.paths)
        if faults:
            _refuse_faults(records, faults)
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
    return channels, *size


# --------------------------------------------------------------------------------- the run's data


def as_data(records: Records, spec: DatasetSpec, note: Note, *, private: bool = False) -> ImageData:
    """Reads images, or converts values, as data with a given specification.

    Only private images may have files that cannot be read, or no file.

    Raises:
        DataError: the shape or a class differs from the specification, or the values are not bytes
            and the specification has no bounds.
        DataFilesCorruptError: an image cannot be read.
    """
    if records.are_images:
        return _images_as_data(records, spec, note, private)
    if records.values.dtype != np.uint8 and spec.bounds is None:
        raise DataError(
            f"the values in {one_line(records.root)} are not bytes, so they need public bounds that "
            "you know without these data. Fill in `bounds` in the declaration or, without a "
            "declaration, set data.bounds (--bounds=-8,8)"
        ).with_code("data.bounds")
    values = _slices(records.values, spec.slice)
    records = with_classes(records, spec.class_names)
    groups = records.users if records.users.any() else None
    data = from_arrays(values, records.labels, spec, groups=groups)
    if values is records.values:
        return data
    # ledgers recognise a volume whichever of its slices is used
    stored = torch.from_numpy(records.values + records.values.dtype.type(0)).flatten(1)
    return replace(data, record_bytes=stored.contiguous().view(torch.uint8))


def _slices(values: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
    """Takes a slice of each volume [N, D, H, W]. Values without slices are returned unchanged."""
    if position < 0 or values.ndim != 4 or {1, 3} & {values.shape[1], values.shape[3]}:
        return values
    if position >= values.shape[1]:
        reason = f"must be less than {values.shape[1]}, the number of slices, got {position}"
        raise SettingError("data", "slice", reason)
    return values[:, position]


def _images_as_data(files: Records, spec: DatasetSpec, note: Note, private: bool) -> ImageData:
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
    images, faults, losses = read_pixels(files.paths, *spec.image_shape, decoding)
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
    hashes = file_hashes(files.paths)
    _note_copies(files, hashes, note)
    pixels = torch.from_numpy(images)
    return ImageData(pixels, labels, spec, None, groups, private, torch.from_numpy(hashes))


def _note_copies(files: Records, hashes: Bytes, note: Note) -> None:
    """Warns the user of images that are links to others, or have the same content."""
    first: dict[bytes, str] = {}
    pairs = [
        (path, first.setdefault(digest.tobytes(), path))
        for path, digest in zip(files.values, hashes, strict=True)
    ]
    copies = [pair for pair in pairs if pair[0] != pair[1]]
    if copies:
        copy, original = map(one_line, copies[0])
        note(
            f"warning: {len(copies)} of {len(pairs)} images in {one_line(files.root)} are links to or "
            f"copies of others, such as {copy} of {original}, and count as records. Remove them"
        )


def _without(files: Records, faults: dict[int, str], note: Note) -> Records:
    """Returns the files without faults. A note lists the others, because a user who skips files
    wants to know which.
    """
    if not faults:
        return files
    note("\n  ".join((f"skipped in {one_line(files.root)}:", *_descriptions(files, faults))))
    skipped = tuple(files.values[list(faults)])
    return replace(files.select(np.delete(np.arange(len(files)), list(faults))), skipped=skipped)


def _refuse_faults(files: Records, faults: dict[int, str]) -> NoReturn:
    raise DataFilesCorruptError(
        f"{len(faults)} of {len(files)} files in {files.root} cannot be read, such as "
        f"{', '.join(_descriptions(files, faults)[:5])}. Repair or remove these files, or skip "
        "them with --skip-corrupt (data.skip_corrupt=True)"
    ).with_code("data.unreadable_images")


def _descriptions(files: Records, faults: dict[int, str]) -> list[str]:
    return [f"{one_line(files.values[row])} ({fault})" for row, fault in faults.items()]
