"""Loads a run's data from an image folder, an array file, a table or the Hugging Face hub.

Each source gives a table of records (`Records`). Byte images (uint8) stay bytes. All other numbers
become float32 and are scaled by public bounds from a declaration or a setting, never from the data.

Private runs on image folders skip unusable files (`read_private_records`), because an error would
reveal private content. All other runs refuse them.
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
from fedsynth.data.pixels import decode_files, read_headers, read_pixels
from fedsynth.data.records import (
    Note,
    Records,
    by_site,
    counted,
    note_losses,
    note_shared_users,
    site_names,
    with_classes,
    with_features,
)
from fedsynth.data.registry import DatasetSpec, custom_spec
from fedsynth.data.tables import is_record_file, parts_of, read_part
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError, one_line

# The readers of each split's records: "train" and, for some files, "val" and "test".
Splits = dict[str, Callable[[], Records]]


@dataclass(frozen=True, eq=False)
class OwnerData:
    """An owner's records, as accepted by `simulate(settings, data=...)`.

    Attributes:
        train: the training records, with their users if known.
        test: the test records, or None.
        test_kind: "public" or "private" test records, or "none" without any.
        sites: the indices of each site's records in `train`, or None without sites. The run's
            partition then divides the records.
        names: the site names, which `site_names` makes valid as ledger names.
        skipped: the unreadable image files.
        left_out: a description of everything left out, or an empty string.
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
    """Loads an image folder or a file for `simulate(settings, data=...)`.

    Args:
        place: a folder with the layout SITE/CLASS/files or CLASS/files, or with a manifest.csv, or
            the manifest itself. Each site is a client. For segmentation, the layout is
            SITE/images/files and SITE/masks/files (`fedsynth.data.masks`). A manifest has the
            columns path and label and, optionally, site and user. Images are JPEG, PNG, BMP, WebP,
            TIFF, DICOM or NIfTI files of any size, in grey or colour. Or a file .npz, .npy,
            .safetensors, .parquet, .csv or .tsv, or `hf:` with a folder of Parquet files or
            with the name of a data set on the Hugging Face hub.
        settings: further fields of `FolderSettings`, such as `image_size`, `channels`,
            `test_folder`, `skip_corrupt`, `skip_other`, `declaration`, `window`, `label_column` and
            `bounds`.

    Raises:
        DataFilesMissingError: the folder or file does not exist, or contains no images.
        DataFilesCorruptError: a file, column or list is damaged or contains Python objects, or the
            layout of the folder is unknown.
        DataError: a file is not an image, the images have several sizes and `image_size` is not
            set, a column is missing or contains unusable values, bounds are missing, classes, sites
            or counts do not match the declaration, or a file is in both the training set and the
            test set.

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
    """Reads the training and test records named by the settings.

    The errors are those of `load_records`.

    Args:
        settings: the folders or files, and the rules for reading them.
        note: a function that receives warnings about skipped files and other problems, and notes
            about unused columns.
        name: the data set's name, used only without a declaration. If empty, the folder's name is
            used.
        declaration: the declaration of the training records, or None.
    """
    if sites_with_masks(Path(settings.folder)):
        return _with_masks(settings, name or default_name(settings.folder), declaration, note)
    decoding = settings.decoding(declaration)
    columns = () if declaration is None else declaration.spec.features
    if not settings.feature_columns and not set(",[").intersection("".join(columns)):
        settings = replace(settings, feature_columns=",".join(columns))  # no others are read
    ledger = getattr(declaration, "ledger", None)
    splits = splits_of(settings.folder, settings, note, decoding, settings.revision, ledger)
    records = training_records(splits, settings, note)
    if declaration is None:
        records = _decoded_once(records, settings)
    else:
        records = with_features(records, declaration.spec.features)
    tables = [records]
    tests = splits if {TEST, TRAIN} <= splits.keys() else {}
    if settings.test_folder:
        tests = splits_of(settings.test_folder, settings, note, decoding)
    kind = settings.test or ("private" if tests else "none")
    if kind != "none":
        if not tests:
            reason = "has no effect without test records. Set data.test_folder"
            raise SettingError("data", "test", reason, value=kind)
        tested = tests[_split_of(tests, TEST, settings.test_folder)]()
        tables.append(with_features(tested, records.features))
        _check_disjoint(*tables, note=note)
    if declaration is None:
        spec = spec_of(records, settings, name or default_name(settings.folder))
    else:
        spec = declared_spec(settings, declaration)
        require_declared(with_classes(records, spec.class_names), declaration)
    # test labels may be indices only if the training labels are, or if the file states an order
    is_ordered = bool(records.stated) or all(map(str.isdigit, records.class_names))
    train, *test_data = (as_data(table, spec, note, is_ordered=is_ordered) for table in tables)
    if declaration is not None:
        require_declared_counts(train, declaration)
    test = replace(test_data[0], groups=None) if test_data else None
    sites, names = by_site(records, getattr(declaration, "sites", None))
    skipped = sum((table.skipped for table in tables), ())
    excluded = sum((table.excluded for table in tables), ())
    left_out = []
    if skipped:
        left_out.append(f"{len(skipped)} images that cannot be read")
    if excluded:
        left_out.append(counted(excluded))
    return OwnerData(train, test, kind, sites, names, skipped, ", ".join(left_out), declaration)


def _with_masks(
    settings: FolderSettings, name: str, declaration: Declaration | None, note: Note
) -> OwnerData:
    """Reads sites with images and masks.

    Raises:
        DataError: the folder has a declaration, which only private runs need.
    """
    if declaration is not None:
        raise DataError(
            f"{one_line(settings.folder)} contains images with masks, which private runs cannot "
            "use. Remove the declaration, or arrange the images in class folders"
        ).with_code("data.masks")
    train = read_masked_folder(settings, settings.folder, name, note)
    test = None
    if settings.test_folder:
        test = read_masked_folder(settings, settings.test_folder, name, note, train.spec)
    domains, _ = train.origins()
    sites = tuple(np.flatnonzero(domains == site) for site in range(len(train.spec.domains)))
    kind = settings.test or ("none" if test is None else "private")
    return OwnerData(train, test, kind, sites, site_names(train.spec.domains))


def read_as(settings: FolderSettings, spec: DatasetSpec, note: Note, split: str) -> ImageData:
    """Reads records with the image size, window and slice that a specification sets.

    Some classes may have no records. Class names are never used as paths.

    Args:
        settings: the folder or file, and the rules for reading it.
        spec: the specification.
        note: a function that receives warnings about skipped files.
        split: the split to read from a file with several splits.

    Raises:
        DataError: the records do not match the specification, or as for `load_records`.
    """
    decoding = Decoding(spec.window, spec.slice)
    splits = splits_of(settings.folder, settings, note, decoding, settings.revision)
    records = splits[_split_of(splits, split, settings.folder)]()
    return as_data(with_features(records, spec.features), spec, note)


def read_private_records(
    folder: Path, spec: DatasetSpec, note: Note, *, by_user: bool
) -> ImageData:
    """Reads one data owner's images for a private run.

    The result may be empty. Unreadable files and undeclared classes are skipped without an error,
    because an error would reveal that a file exists. Whether a file is skipped does not depend on
    other files.

    Args:
        folder, spec, note: see `read_as`.
        by_user: whether to skip images with an unknown user.

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
            f"{one_line(folder)} contains no images of the run's classes. The client contributes "
            "only noise"
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
    """Returns a mapping from split names to functions that read the splits.

    An image folder has only the split "train", even if it is used for tests.

    Args:
        place: the folder or file.
        settings: the rules for reading it.
        note: a function that receives warnings.
        decoding: the conversion of file values to pixels.
        revision: the revision of a hub data set.
        ledger: the ledger folder, which is not searched for images.

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
    """Reads the training records, and tells the user about unused splits.

    Raises:
        DataError: the records cannot be read.
    """
    split = _split_of(splits, TRAIN, settings.folder)
    if split != TRAIN:
        note(
            f"{one_line(settings.folder)} contains only {split} records, which are used for "
            "training"
        )
    for unused in sorted(splits.keys() - {split, TEST}):
        note(f"the {unused} records in {one_line(settings.folder)} are not used")
    return splits[split]()


def _split_of(splits: Splits, split: str, place: str) -> str:
    """Returns the name of the split to read: `split` if it exists, otherwise the only one."""
    if split in splits:
        return split
    if len(splits) > 1:
        raise DataError(
            f"{one_line(place)} contains only {' and '.join(sorted(splits))} records, but "
            f"{split} records are needed. Save them in a separate file"
        ).with_code("data.parts")
    return min(splits)


def _images_in(
    folder: Path, settings: FolderSettings, note: Note, decoding: Decoding, ledger: Path | None
) -> Records:
    """Finds a folder's images, and counts the folder's other files.

    With `skip_corrupt`, all files are decoded first, so that skipped files do not affect classes,
    sites and patients.

    Raises:
        DataError: the folder contains other files and `skip_other` is false, or as for
            `find_files`.
        DataFilesCorruptError: no file is readable.
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
                f"{problem}. Remove them, convert them to PNG, or skip them with --skip-other "
                "(data.skip_other=True)"
            ).with_code("data.other_files")
        note(f"{problem}. These files are skipped")
    if settings.skip_corrupt:
        _, faults, _ = read_pixels(files.paths, 1, 1, 1, decoding)
        if len(faults) == len(files):
            _refuse_faults(files, faults)
        files = _without(files, faults, note)
    return _with_known_patients(files, note)


def _with_known_patients(files: Records, note: Note) -> Records:
    """Sets each DICOM image's user to its patient, if all patients are known.

    Records with users from a list are returned unchanged.
    """
    if files.users.any():
        return files
    by_patient = with_patients(files)
    unknown = int((by_patient.users == "").sum())
    if not unknown:
        _note_one_person(by_patient, note)
        return by_patient
    if unknown < len(files.users):
        note(
            f"warning: {unknown} of {len(files.users)} images in {one_line(files.root)} contain no "
            "patient ID, so all patient IDs are ignored. List the patients in users.csv"
        )
    return files


def _note_one_person(files: Records, note: Note) -> None:
    """Warns if all images, or all images at one site, belong to one person.

    Anonymisation programs may give all DICOM files the same patient ID.
    """
    for site in np.unique(files.sites):
        users = files.users[files.sites == site]
        if len(users) > 1 and (users == users[0]).all():
            place = f"site {one_line(site)} of {one_line(files.root)}" if site else files.root
            note(
                f"warning: all {len(users)} images in {one_line(place)} have one patient ID, so "
                "they count as one person. If the files are anonymised, list the patients in "
                "users.csv"
            )


def _check_disjoint(train: Records, test: Records, *, note: Note) -> None:
    """Checks that no image file is in both the training set and the test set.

    A warning counts the people with records in both sets.

    Raises:
        DataError: both sets contain the same file. The message names the first such file.
    """
    if train.are_images and test.are_images:
        shared = set(map(Path.resolve, train.paths)) & set(map(Path.resolve, test.paths))
        if shared:
            raise DataError(
                f"{len(shared)} of {len(test)} test images are also training images, such as "
                f"{one_line(min(shared))}. Remove them from the test folder"
            ).with_code("data.shared_images")
    note_shared_users(train, test, note)


# ------------------------------------------------------------------------------ specification


def declared_spec(settings: FolderSettings, declaration: Declaration) -> DatasetSpec:
    """Checks the settings against the declared specification, and returns the specification.

    Raises:
        SettingError: an image setting does not match the declared value.
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
        reason = (
            f"has no effect on declared images. Enter `{key}` under [images] in {declaration.path} "
            "instead"
        )
        if declared != unset:
            numbers = declared if isinstance(declared, tuple) else (declared,)
            text = ("x" if key == "image_size" else ",").join(f"{n:.15g}" for n in numbers)
            reason = f"must be unset, or {text} as in {declaration.path}. Remove it"
        raise SettingError("data", key, reason)
    return spec


def spec_of(records: Records, settings: FolderSettings, name: str) -> DatasetSpec:
    """Derives a specification from records without a declaration.

    Classes come from the records, and bounds from the settings.

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
        _refuse_image_settings(settings)
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
        features=records.features,
        **asdict(decoding),
    )


def _refuse_image_settings(settings: FolderSettings) -> None:
    """Raises SettingError if a setting is set that applies to image files only."""
    for key in ("image_size", "channels", "skip_corrupt", "skip_other"):
        if getattr(settings, key):
            reason = "has no effect on arrays and tables, only on image files. Remove it"
            raise SettingError("data", key, reason)


def _image_shape(records: Records, settings: FolderSettings) -> tuple[int, int, int]:
    """Returns the image shape (C, H, W) from the settings or, if unset, from the file headers."""
    size = settings.size()
    channels = settings.channels
    if size is None or not channels:
        read = records.decoded
        headers, faults = (read.headers, read.faults) if read else read_headers(records.paths)
        if faults:
            _refuse_faults(records, faults)
        heights, widths, are_grey = zip(*headers, strict=True)
        sizes = Counter(zip(heights, widths, strict=True))
        if size is None and len(sizes) > 1:
            (height, width), _ = sizes.most_common(1)[0]
            raise DataError(
                f"the images in {settings.folder} have {len(sizes)} different sizes, mostly "
                f"{height}×{width}. Set a common size, such as --image-size {height}x{width} "
                "(data.image_size)"
            ).with_code("data.sizes")
        size = size or (heights[0], widths[0])
        channels = channels or (1 if all(are_grey) else 3)
    return channels, *size


def _decoded_once(records: Records, settings: FolderSettings) -> Records:
    """Decodes all images to the shape of the first one. Each file is read only once.

    If another shape is needed, `as_data` decodes them again.
    """
    for first in read_headers(records.paths[:1])[0] if records.are_images else ():
        shape = (settings.channels or (1 if first.grey else 3), *(settings.size() or first[:2]))
        decoded = decode_files(records.paths, shape, settings.decoding())
        return replace(records, decoded=decoded)
    return records


# --------------------------------------------------------------------------------- the run's data


def as_data(
    records: Records,
    spec: DatasetSpec,
    note: Note,
    *,
    private: bool = False,
    is_ordered: bool = True,
) -> ImageData:
    """Builds `ImageData` with a given specification from image files or arrays.

    Args:
        records: the records.
        spec: the specification.
        note: a function that receives notes about converted images.
        private: whether the images may contain unreadable files, or no files.
        is_ordered: whether the order of the classes is stated, so that labels may be class indices.
            Names sorted from the training labels have no such order.

    Raises:
        DataError: the shape or a class does not match the specification, or bounds are missing for
            non-byte values.
        DataFilesCorruptError: an image cannot be read.
    """
    if is_ordered:
        labels = records.class_names
        records = with_classes(records, spec.class_names)
        if records.class_names != labels:
            first = one_line(spec.class_names[0])
            note(f"the labels in {one_line(records.root)} are class indices, and 0 is {first}")
    undefined = sorted(set(records.class_names).difference(spec.class_names))
    if undefined:
        raise DataError(
            f"{one_line(records.root)} contains the class {one_line(undefined[0])!r}, which data "
            f"set {spec.name} does not have ({one_line(', '.join(spec.class_names))}). Rename or "
            "remove the class"
        ).with_code("data.unknown_class")
    if records.are_images:
        return _images_as_data(records, spec, note, private)
    if records.values.dtype != np.uint8 and spec.bounds is None:
        raise DataError(
            f"the {records.values.dtype} values in {one_line(records.root)} need public bounds, "
            "not computed from the data. Enter `bounds` in the declaration. Without a declaration, "
            "set data.bounds (--bounds=-8,8)"
        ).with_code("data.bounds")
    values = _slices(records.values, spec.slice)
    groups = records.users if records.users.any() else None
    data = from_arrays(values, records.labels, spec, groups=groups)
    if records.record_bytes is not None:
        return replace(data, record_bytes=torch.from_numpy(records.record_bytes))
    if values is records.values:
        return data
    # ledgers recognise a volume by all of its slices
    stored = torch.from_numpy(records.values + records.values.dtype.type(0)).flatten(1)
    return replace(data, record_bytes=stored.contiguous().view(torch.uint8))


def _slices(values: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
    """Selects a slice from each volume [N, D, H, W]. Values without slices are returned
    unchanged."""
    if position < 0 or values.ndim != 4 or {1, 3} & {values.shape[1], values.shape[3]}:
        return values
    if position >= values.shape[1]:
        reason = f"must be below the number of slices, {values.shape[1]}, got {position}. Lower it"
        raise SettingError("data", "slice", reason)
    return values[:, position]


def _images_as_data(files: Records, spec: DatasetSpec, note: Note, private: bool) -> ImageData:
    if spec.channels not in (1, 3):
        raise DataError(
            f"the data set {spec.name} has {spec.channels} channels, but image files have 1 or 3. "
            "Save the data as an array file"
        ).with_code("data.channels")
    decoding = Decoding(spec.window, spec.slice)
    decoded = files.decoded
    if decoded is None or decoded.images.shape[1:] != spec.image_shape:
        decoded = decode_files(files.paths, spec.image_shape, decoding)
    images, faults, losses = decoded.images, decoded.faults, decoded.losses
    if faults and not private:
        _refuse_faults(files, faults)
    note_losses(losses, files.root, note)
    hashes = decoded.hashes
    if faults:
        images, hashes = (np.delete(rows, list(faults), axis=0) for rows in (images, hashes))
    files = _without(files, faults, note)
    numbers = list(map(spec.class_names.index, files.labels))
    labels = torch.tensor(numbers, dtype=torch.int64)
    groups = None
    if files.users.any():
        groups = torch.from_numpy(np.unique(files.users, return_inverse=True)[1])
    _note_copies(files, hashes, note)
    pixels = torch.from_numpy(images)
    return ImageData(pixels, labels, spec, None, groups, private, torch.from_numpy(hashes))


def _note_copies(files: Records, hashes: Bytes, note: Note) -> None:
    """Warns about images that are links to, or copies of, others."""
    first: dict[bytes, str] = {}
    pairs = [
        (path, first.setdefault(digest.tobytes(), path))
        for path, digest in zip(files.values, hashes, strict=True)
    ]
    copies = [pair for pair in pairs if pair[0] != pair[1]]
    if copies:
        copy, original = map(one_line, copies[0])
        note(
            f"warning: {len(copies)} of {len(pairs)} images in {one_line(files.root)} are links "
            f"to, or copies of, others (such as {copy} of {original}), but count as records. "
            "Remove them"
        )


def _without(files: Records, faults: dict[int, str], note: Note) -> Records:
    """Returns the readable files, and tells the user which ones were skipped."""
    if not faults:
        return files
    note("\n  ".join((f"skipped in {one_line(files.root)}:", *_descriptions(files, faults))))
    skipped = tuple(files.values[list(faults)])
    return replace(files.select(np.delete(np.arange(len(files)), list(faults))), skipped=skipped)


def _refuse_faults(files: Records, faults: dict[int, str]) -> NoReturn:
    raise DataFilesCorruptError(
        f"{len(faults)} of {len(files)} files in {files.root} cannot be read, such as "
        f"{', '.join(_descriptions(files, faults)[:5])}. Repair or remove them, or skip them with "
        "--skip-corrupt (data.skip_corrupt=True)"
    ).with_code("data.unreadable_images")


def _descriptions(files: Records, faults: dict[int, str]) -> list[str]:
    return [f"{one_line(files.values[row])} ({fault})" for row, fault in faults.items()]
