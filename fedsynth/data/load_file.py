"""Loads an array file, a table or a data set of a hub as the data of a run.

Bytes (uint8) stay bytes. All other numbers become float32 and are scaled by public bounds, which
come from a declaration or a setting, and never from the data.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsynth.data.files import TEST, TRAIN
from fedsynth.data.folder_settings import (
    Declaration,
    FolderSettings,
    default_name,
    require_declared,
    require_declared_counts,
)
from fedsynth.data.images import ImageData, from_arrays, image_shape_of
from fedsynth.data.load_folder import (
    FolderData,
    Note,
    by_site,
    declared_spec,
    note_shared_users,
    read_as,
    read_folder,
)
from fedsynth.data.medical_files import Decoding
from fedsynth.data.record_files import (
    Part,
    Records,
    is_record_file,
    parts_of,
    read_part,
    with_classes,
)
from fedsynth.data.registry import DatasetSpec, custom_spec
from fedsynth.errors import DataError, SettingError, one_line


def load_file(file: str | Path, **settings: Any) -> FolderData:
    """Loads an array file, a table or a data set of a hub for `simulate(settings, data=...)`.

    Args:
        file: a file .npz, .npy, .safetensors, .parquet or .csv, or `hf:` with a folder of Parquet
            files or with the name of a data set on the Hugging Face hub.
        settings: further fields of `FolderSettings`, such as `label_column` and `bounds`.

    Raises:
        DataFilesMissingError: the file does not exist.
        DataFilesCorruptError: the file is damaged, or contains Python objects.
        DataError: a column is missing or has values that cannot be used, bounds are missing, or the
            classes, sites or counts differ from the declaration.

    >>> import tempfile
    >>> vectors = np.random.default_rng(0).normal(size=(6, 4))
    >>> path = Path(tempfile.mkdtemp(), "vectors.npz")
    >>> np.savez(path, x=vectors, y=[0, 1] * 3, site=["north", "south"] * 3)
    >>> load_file(path, bounds="-4,4")
    FolderData(6 images of 'vectors', 2 sites)
    """
    chosen = FolderSettings(str(file), **settings)
    return read_file(chosen, warnings.warn, declaration=chosen.declared())


def read_own_data(
    settings: FolderSettings, note: Note, name: str = "", *, declaration: Declaration | None
) -> FolderData:
    """Reads a folder of images or a file, with the arguments and errors of `read_folder`."""
    if is_record_file(settings.folder):
        return read_file(settings, note, name, declaration=declaration)
    return read_folder(settings, note, name, declaration=declaration)


def read_file(
    settings: FolderSettings, note: Note, name: str = "", *, declaration: Declaration | None
) -> FolderData:
    """Reads the training and test records that the settings name.

    Args:
        settings: the file, its columns and its public bounds.
        note: a function that receives warnings and notes about columns that are not used.
        name: the name of the data set, which is used only without a declaration.
        declaration: the declaration of the training records, or None.

    Raises:
        DataError: in the same cases as `load_file`.
    """
    parts = parts_of(settings.folder, settings.revision, settings.decoding(declaration))
    records = training_records(parts, settings, note)
    if declaration is None:
        spec = spec_of(records, settings, name or default_name(settings.folder))
    else:
        spec = declared_spec(settings, declaration)
        require_declared(with_classes(records.names, spec.class_names), declaration)
    train = as_data(records, spec)
    if declaration is not None:
        require_declared_counts(train, declaration)
    has_test = settings.test_folder or {TEST, TRAIN} <= parts.keys()
    kind = settings.test or ("private" if has_test else "none")
    test = None
    if kind != "none":
        if not has_test:
            reason = "requires test records. Set data.test_folder"
            raise SettingError("data", "test", reason, value=kind)
        place = settings.test_folder or settings.folder
        if settings.test_folder:
            parts = {}
        test = read_test(place, spec, note, settings.columns, train=records, parts=parts)
    sites, names = by_site(records.names, declaration)
    return FolderData(train, test, kind, sites, names, declaration=declaration)


def training_records(parts: Mapping[str, Part], settings: FolderSettings, note: Note) -> Records:
    """Reads the training records of a file, whose parts are given.

    Raises:
        DataError: the records cannot be read.
    """
    split = _split_of(parts, TRAIN)
    if split != TRAIN:
        note(f"{one_line(settings.folder)} has only {split} records, which a run trains on")
    for unused in sorted(parts.keys() - {split, TEST}):
        note(f"the {unused} records in {one_line(settings.folder)} are not used")
    return read_part(parts[split], settings.columns, note)


def _split_of(parts: Mapping[str, Part], split: str) -> str:
    """Returns the name of a part: the given split if there is one, or the only part."""
    if split in parts:
        return split
    if len(parts) > 1:
        raise DataError(
            f"{next(iter(parts.values())).place} has {' and '.join(sorted(parts))} records, but no "
            f"{split} records. Save these records in a file of their own"
        ).with_code("data.parts")
    return min(parts)


def read_test(
    place: str,
    spec: DatasetSpec,
    note: Note,
    columns: Mapping[str, str],
    *,
    train: Records | None = None,
    parts: Mapping[str, Part] | None = None,
    **skip: bool,
) -> ImageData:
    """Reads test records from a file, or test images from a folder.

    Args:
        place: the file or folder. If a file has test records, only they are read.
        spec: the specification of the training records.
        note: a function that receives warnings.
        columns: the names of the columns of a file (see `read_part`).
        train: the training records. A warning gives the number of people in both.
        parts: the parts of the file, if they are known.
        skip: `skip_corrupt` and `skip_other` for a folder (see `load_folder`).

    Raises:
        DataError: the records do not fit the specification, or cannot be read.
    """
    if not is_record_file(place):
        return read_as(Path(place), spec, note, **skip)
    parts = parts or parts_of(place, decoding=Decoding(spec.window, spec.slice))
    records = read_part(parts[_split_of(parts, TEST)], columns, note)
    if train is not None:
        note_shared_users(train.names.users, records.names.users, note)
    return replace(as_data(records, spec), groups=None)


def spec_of(records: Records, settings: FolderSettings, name: str) -> DatasetSpec:
    """Derives a specification from the records of a file that has no declaration.

    The bounds are those of the settings.
    """
    chosen = settings.decoding()
    return custom_spec(
        name,
        image_shape_of(_slices(records.values, chosen.slice).shape),
        records.class_names,
        source="records in a file",
        train_size=len(records.values),
        bounds=settings.limits(),
        **asdict(chosen),
    )


def _slices(values: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
    """Takes a slice of each volume [N, D, H, W]. Values without slices are returned unchanged."""
    if position < 0 or values.ndim != 4 or {1, 3} & {values.shape[1], values.shape[3]}:
        return values
    if position >= values.shape[1]:
        reason = f"must be less than {values.shape[1]}, the number of slices, got {position}"
        raise SettingError("data", "slice", reason)
    return values[:, position]


def as_data(records: Records, spec: DatasetSpec) -> ImageData:
    """Converts the records of a file to `ImageData` with a given specification.

    Raises:
        DataError: the shape or a class differs from the specification, or the values are not bytes
            and the specification has no bounds.
    """
    if records.values.dtype != np.uint8 and spec.bounds is None:
        raise DataError(
            f"the values in {one_line(records.names.root)} are not bytes, so they need public "
            "bounds that you know without these data. Fill in `bounds` in the declaration or, "
            "without a declaration, set data.bounds (--bounds=-8,8)"
        ).with_code("data.bounds")
    values = _slices(records.values, spec.slice)
    files = with_classes(records.names, spec.class_names)
    groups = files.users if files.users.any() else None
    data = from_arrays(values, files.labels, spec, groups=groups)
    if values is records.values:
        return data
    # ledgers recognise a volume whichever of its slices is used
    stored = torch.from_numpy(records.values + records.values.dtype.type(0)).flatten(1)
    return replace(data, record_bytes=stored.contiguous().view(torch.uint8))
