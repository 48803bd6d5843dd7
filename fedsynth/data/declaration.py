"""Settings for training on an image folder, and the folder's signed declaration.

The settings are the section `data` of a config file. The declaration is a TOML file with public
facts about the images. A person checks and signs it. A private run takes divisors, sampling rates,
tensor shapes and the facts in its privacy report from the declaration, and never from the images.
Everything in the declaration is therefore public. `fedsynth data describe` proposes a declaration
for a folder.
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedsynth.data.files import expanded, same_name
from fedsynth.data.folders import DECLARATION, manifest_of
from fedsynth.data.images import ImageData
from fedsynth.data.medical import Decoding, parsed_window
from fedsynth.data.records import Records
from fedsynth.data.registry import MEAN, STD, DatasetSpec, custom_spec, is_known
from fedsynth.data.tables import HUB, SUFFIXES, is_record_file
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    FedsynthError,
    SettingError,
    faults,
    one_line,
)
from fedsynth.files import expand_home
from fedsynth.validation import check_choice, check_number, read_sections

# The maximum ratio of a declared count to the true count. Rounding cannot cause a larger ratio.
MAX_RATIO = 4


def _distinct(names: list[str]) -> list[str]:
    repeated = [name for name, uses in Counter(names).items() if uses > 1]
    if repeated:
        raise ValueError(f"contains the name {repeated[0]!r} twice. Remove one of them")
    return names


def _iso_date(text: str) -> str:
    try:
        return text and datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"must be a date such as 2026-11-23, got {text!r}") from None


def _window(text: str) -> str:
    parsed_window(text)
    return text


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(same_name)]
Names = Annotated[list[Name], AfterValidator(_distinct)]
Count = Annotated[int, Field(ge=1, lt=10**15)]
Side = Annotated[int, Field(ge=1, le=2**16)]


class _Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, str_strip_whitespace=True
    )


class _Images(_Section):
    name: Name
    class_names: Names
    sites: Names = []
    features: Names = []
    channels: Side
    height: Side
    width: Side
    mean: list[float] = [MEAN]
    std: list[float] = [STD]
    window: Annotated[str, AfterValidator(_window)] = ""
    slice: Annotated[int, Field(ge=-1)] = -1
    source: str
    bounds: Annotated[list[float], Field(max_length=2)] = []
    person: Annotated[str, Field(min_length=1, max_length=40)] = "person"


class _Sizes(_Section):
    images: Count
    most_images: Count
    users: Annotated[int, Field(ge=0, lt=10**15)] = 0


class _Privacy(_Section):
    ledger: str = ""


class _SignedOff(_Section):
    by: str = ""
    date: Annotated[str, AfterValidator(_iso_date)] = ""


class _File(_Section):
    images: _Images
    sizes: _Sizes
    privacy: _Privacy = _Privacy()
    signed_off: _SignedOff = _SignedOff()


@dataclass(frozen=True)
class Declaration:
    """The public facts about a user's images, read from a declaration file.

    Attributes:
        spec: the data set's specification. `train_size` is the declared total number of images at
            all sites. `groups` is the declared number of users, or 0 if none is declared.
        sites: the site names. Empty if the data have no sites.
        most_images: an upper bound on the total number of images at all sites.
        ledger: the images' ledger folder, or None if none is declared.
        person: the word for one person in the images, such as "patient".
        signed_by: the name of the person who checked the declaration, and the date. Empty if
            unsigned.
        path: the declaration file.
    """

    spec: DatasetSpec
    sites: tuple[str, ...]
    most_images: int
    ledger: Path | None
    person: str
    signed_by: str
    path: Path


def read_declaration(path: Path) -> Declaration:
    """Reads a declaration file.

    Raises:
        DataFilesCorruptError: the file cannot be read or is not a valid declaration. The message
            names the invalid key.
    """
    try:
        declared = _File.model_validate(read_sections(path))
        images = declared.images
        spec = custom_spec(
            images.name,
            (images.channels, images.height, images.width),
            images.class_names,
            mean=_for_channels(images.mean, images.channels),
            std=_for_channels(images.std, images.channels),
            source=images.source,
            train_size=declared.sizes.images,
            groups=declared.sizes.users,
            bounds=tuple(images.bounds) or None,
            window=parsed_window(images.window),
            slice=images.slice,
            features=tuple(images.features),
        )
    except ValidationError as error:
        reason = f"{path} is not a valid declaration: {faults(error)[0]}"
        raise DataFilesCorruptError(reason) from None
    except FedsynthError as error:
        raise DataFilesCorruptError(f"{path} is not a valid declaration: {error}") from None
    upper_bound = declared.sizes.most_images
    if upper_bound < declared.sizes.images:
        raise DataFilesCorruptError(
            f"sizes.most_images={upper_bound} in {path} is below "
            f"sizes.images={declared.sizes.images}. Raise sizes.most_images"
        ).with_code("declaration.sizes")
    ledger = None
    if declared.privacy.ledger:
        ledger = (path.parent / expand_home(declared.privacy.ledger)).absolute()
    signed_by = ""
    if declared.signed_off.by and declared.signed_off.date:
        signed_by = f"{declared.signed_off.by}, {declared.signed_off.date}"
    return Declaration(
        spec, tuple(images.sites), upper_bound, ledger, images.person, signed_by, path
    )


def _for_channels(values: list[float], channels: int) -> tuple[float, ...]:
    """Repeats a single value once per channel."""
    return tuple(values) * (channels if len(values) == 1 else 1)


def require_signed(declaration: Declaration) -> None:
    """Raises an error if no person has signed the declaration.

    Raises:
        DataError: the declaration is unsigned. The message explains how to sign it.
    """
    if not declaration.signed_by:
        raise DataError(
            f"{declaration.path} is not signed. Check that all its content may be published, and "
            "enter your name and the date under [signed_off]"
        ).with_code("declaration.signature")


def require_declared(records: Records, declaration: Declaration) -> None:
    """Checks that a folder has the classes and sites that its declaration states.

    Raises:
        DataError: a class or site is not declared, or a declared one contains no images.
    """
    for kind, names, declared in (
        ("class", records.class_names, declaration.spec.class_names),
        ("site", records.site_names, declaration.sites or records.site_names),
    ):
        undeclared = sorted(set(names).difference(declared))
        if undeclared:
            raise DataError(
                f"the {kind} {one_line(undeclared[0])!r} in the folder is missing from "
                f"{declaration.path}, which declares {one_line(', '.join(declared))}. Declare it "
                "and sign the file again, or remove its images"
            ).with_code("declaration.undeclared")
        missing = sorted(set(declared).difference(names))
        if missing:
            raise DataError(
                f"the folder contains no images of the {kind} {one_line(missing[0])!r}, which "
                f"{declaration.path} declares. Add images, or remove the {kind} and sign the file "
                "again"
            ).with_code("declaration.absent")


def require_declared_counts(train: ImageData, declaration: Declaration) -> None:
    """Checks that image and user counts roughly agree with the declaration.

    The declared upper bound on images must hold. Both counts must be at least a quarter
    (1/`MAX_RATIO`) of the declared counts.

    Raises:
        DataError: a count does not match. The message names the key in the declaration.
    """
    if len(train) > declaration.most_images:
        raise DataError(
            f"the data contain more than sizes.most_images={declaration.most_images} images, the "
            f"limit in {declaration.path}. Raise sizes.most_images, and sign the file again"
        ).with_code("declaration.most_images")
    users = declaration.spec.groups
    if train.groups is not None:
        users = len(train.groups.unique())
    for key, count, declared in (
        ("images", len(train), declaration.spec.train_size),
        ("users", users, declaration.spec.groups),
    ):
        if count * MAX_RATIO < declared:
            raise DataError(
                f"the data contain {count} {key}, but {declaration.path} declares "
                f"sizes.{key}={declared}. Correct the number, and sign the file again"
            ).with_code("declaration.sizes")


TEST_KINDS = ("public", "private", "none")
MAX_SIDE = 4096
_SIZE = re.compile(r"([0-9]{1,4})(?:[x×]([0-9]{1,4}))?")


@dataclass(frozen=True)
class FolderSettings:
    """The settings of a run that trains on images in a folder.

    Args:
        folder: the folder with your own images, as SITE/CLASS/files, CLASS/files or a manifest.csv,
            or your own .npz, .npy, .safetensors, .parquet, .csv or .tsv file. In the first layout,
            each site is a client, and in the second the partition divides the images. A manifest
            has the columns path, label, site and patient, and may itself be the path. Images may be
            JPEG, PNG, BMP, WebP, TIFF, DICOM or NIfTI files.
        test_folder: the folder or file with your own test images, in one of the layouts of
            `folder`. Sites are ignored.
        test: whether your test images are "public" or "private" (the default), or "none" to use
            none. With differential privacy, metrics on private test images are reported only as
            `simulation_only`.
        image_size: the size to which all images are resized, such as 64, or 64x48 (height x width).
            The default is the declared size or, without a declaration, the size that all images
            have.
        channels: the number of channels, 1 (grey) or 3 (colour). The default, 0, takes the declared
            number or, without a declaration, 1 if all images are grey and otherwise 3.
        skip_corrupt: skip files that cannot be read, and list them.
        declaration: the file that states what is public about the images (default: fedsynth.toml in
            their folder). `fedsynth data describe` proposes it. A run with differential privacy
            requires a signed declaration.
        skip_other: skip everything that is not an image (other files, broken links, empty folders),
            and report how many there are.
        window: the range of levels that is shown from black to white, as CENTER,WIDTH, for images
            with more than 8 bits. The default is the declared window or, without one, the window
            in the file.
        slice: the slice of NIfTI volumes and the frame of DICOM files with several frames, counted
            from 0. The default, -1, is the declared slice or the middle one.
        feature_columns: the array of features in a file, or the columns, separated by commas
            (default: `x`, `images` and similar names, or all columns of numbers in a table that are
            not IDs).
        label_column: the array or column of labels in a file (default: `y`, `label` and similar).
        user_column: the array or column that names the person of each record in a file (default:
            `user`, `patient`, `group` and similar).
        site_column: the array or column that names the site of each record in a file (default:
            `site`, `hospital`, `client` and similar).
        bounds: the public smallest and largest value of numbers that are not bytes, such as
            "-8,8". Values outside are clipped. Never compute bounds from private data.
        revision: the commit, tag or branch of a data set of the Hugging Face hub. A run records the
            commit.

    Raises:
        SettingError: a value is invalid.

    >>> from fedsynth import FedAvg, PartitionSettings, RunSettings
    >>> scans = FolderSettings("/data/scans", image_size="64x48")
    >>> settings = RunSettings(FedAvg(), folder=scans, partition=PartitionSettings("given"))
    >>> scans.size(), settings.folder.folder
    ((64, 48), '/data/scans')
    """

    section: ClassVar[str] = "data"  # of a config file

    folder: str
    test_folder: str = ""
    test: str = ""
    image_size: str = ""
    channels: int = 0
    skip_corrupt: bool = False
    declaration: str = ""
    skip_other: bool = False
    window: str = ""
    slice: int = -1
    feature_columns: str = ""
    label_column: str = ""
    user_column: str = ""
    site_column: str = ""
    bounds: str = ""
    revision: str = ""

    def __post_init__(self) -> None:
        for name in ("folder", "test_folder", "declaration"):
            path = str(getattr(self, name))
            local = path.removeprefix(HUB)
            if path and (local == path or expanded(local).exists()):
                place = f"{path[: -len(local)]}{expanded(local).absolute()}"
                object.__setattr__(self, name, place)
        object.__setattr__(self, "image_size", str(self.image_size or ""))
        if not self.folder:
            raise SettingError("data", "folder", "is not set. Name a folder of images")
        if self.test:
            check_choice("data", "test", self.test, TEST_KINDS)
        tested = self.test_folder or is_record_file(self.folder)
        if self.test in ("public", "private") and not tested:
            reason = "has no effect without test images. Set data.test_folder"
            raise SettingError("data", "test", reason, value=self.test)
        if self.channels not in (0, 1, 3):
            raise SettingError("data", "channels", f"must be 1 or 3, got {self.channels}")
        check_number("data", "slice", self.slice, -1, 10**6)
        self.size()
        self.decoding()
        self.limits()

    def limits(self) -> tuple[float, float] | None:
        """Returns the smallest and largest possible value, or None if `bounds` is not set.

        Raises:
            SettingError: `bounds` are not two ascending numbers.
        """
        if not self.bounds:
            return None
        try:
            low, high = map(float, self.bounds.split(","))
        except ValueError:
            low = high = math.nan
        if not (math.isfinite(high - low) and low < high):
            reason = f"must be two ascending numbers, got {self.bounds!r}. Write them like -8,8"
            raise SettingError("data", "bounds", reason)
        return low, high

    @property
    def columns(self) -> dict[str, str]:
        """The column names in the settings, by role: feature, label, user and site."""
        names = {"feature": self.feature_columns, "label": self.label_column}
        return {**names, "user": self.user_column, "site": self.site_column}

    def size(self) -> tuple[int, int] | None:
        """Returns the image height and width, or None if `image_size` is not set.

        Raises:
            SettingError: `image_size` is invalid.
        """
        if not self.image_size:
            return None
        match = _SIZE.fullmatch(self.image_size.strip())
        if match is None:
            reason = f"must be a size in pixels, got {self.image_size!r}. Write it like 64 or 64x48"
            raise SettingError("data", "image_size", reason)
        height = int(match[1])
        width = int(match[2] or height)
        for side in (height, width):
            check_number("data", "image_size", side, 1, MAX_SIDE)
        return height, width

    def decoding(self, declaration: Declaration | None = None) -> Decoding:
        """Returns the grey-level window and the slice for decoding images.

        A declaration's values override the settings.

        Raises:
            SettingError: `window` is invalid.
        """
        if declaration is not None:
            return Decoding(declaration.spec.window, declaration.spec.slice)
        try:
            return Decoding(parsed_window(self.window), self.slice)
        except ValueError as error:
            raise SettingError("data", "window", str(error)) from None

    def declared(self) -> Declaration | None:
        """Reads the images' declaration, or returns None if there is none.

        Raises:
            DataFilesCorruptError: the declaration is damaged, or the declaration named by the
                settings does not exist.
        """
        path = default_declaration(Path(self.folder))
        if self.declaration:
            path = Path(self.declaration)
        elif not path.exists():
            return None
        return read_declaration(path)


def default_declaration(folder: Path) -> Path:
    """Returns the default path of the declaration for an image folder, a manifest or a data file.

    For a folder, the declaration is in the folder. For a file, it is next to the file. A data
    file's declaration starts with the file's name: `scans.fedsynth.toml` for `scans.npz`.
    """
    if is_record_file(folder):
        return Path(str(folder).removeprefix(HUB)).with_suffix(f".{DECLARATION}")
    return manifest_of(folder).with_name(DECLARATION)


def default_name(folder: str) -> str:
    """Returns a default name for a data set without a declaration.

    The result is the name of the folder, manifest or file, preceded by "own" if a published data
    set has the same name.
    """
    name = one_line(Path(folder).name or "images")
    if Path(name).suffix.lower() in SUFFIXES:
        name = Path(name).stem
    if is_known(name):
        return f"own {name}"
    return name
