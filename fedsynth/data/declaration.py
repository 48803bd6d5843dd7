"""The public declaration of a user's images: the facts that a private run may use in addition to
its releases.

It is a TOML file that a person checks and signs. Divisors, sampling rates, the shape of the
releases and the privacy report depend on the declaration and never on the images themselves, so
everything in it is public. `fedsynth data describe` proposes one.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedsynth.data.files import first_fault, one_line
from fedsynth.data.folder_files import FolderFiles
from fedsynth.data.images import ImageData
from fedsynth.data.record_table import same_name
from fedsynth.data.registry import DatasetSpec, custom_spec
from fedsynth.errors import DataError, DataFilesCorruptError, FedsynthError
from fedsynth.privacy.files import expand_home
from fedsynth.toml_file import read_sections

MEAN, STD = 0.5, 0.25
"""Default mean and standard deviation of pixels in [0, 1]. They are constants because a computed
mean is an exact function of the images."""
MAX_RATIO = 4
"""The ratio from which a declared number no longer counts as a rounding of the true one."""


def _distinct(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("contains a name twice")
    return names


def _iso_date(text: str) -> str:
    try:
        return text.strip() and datetime.date.fromisoformat(text.strip()).isoformat()
    except ValueError:
        raise ValueError("must be a date such as 2026-11-23") from None


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(same_name)]
Names = Annotated[list[Name], AfterValidator(_distinct)]
Count = Annotated[int, Field(ge=1, lt=10**15)]
Side = Annotated[int, Field(ge=1, le=4096)]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Images(_Section):
    name: Name
    class_names: Names
    sites: Names = []
    channels: Annotated[int, Field(ge=1, le=3)]
    height: Side
    width: Side
    mean: list[float]
    std: list[float]
    source: str
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
    """The public facts about a user's images.

    Attributes:
        spec: the data set's specification; `train_size` is the nominal number of images over all
            sites, and `groups` the nominal number of users (0: not declared).
        sites: the sites' names; empty if there are no sites.
        most_images: an upper bound on the number of images over all sites.
        ledger: the folder of the privacy ledgers for these images; None if not declared.
        person: the word for one person in the images, such as "patient".
        signed_by: name and date of the person who checked it; empty if unsigned.
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
        DataFilesCorruptError: the file cannot be read or is not a valid declaration; the error
            names the key.
    """
    try:
        declared = _File.model_validate(read_sections(path))
        images = declared.images
        spec = custom_spec(
            images.name,
            (images.channels, images.height, images.width),
            images.class_names,
            mean=tuple(images.mean),
            std=tuple(images.std),
            source=images.source,
            train_size=declared.sizes.images,
            groups=declared.sizes.users,
        )
    except ValidationError as error:
        raise DataFilesCorruptError(
            f"{path} is not a valid declaration of images: {first_fault(error)}"
        ) from None
    except FedsynthError as error:
        raise DataFilesCorruptError(
            f"{path} is not a valid declaration of images: {error}"
        ) from None
    if declared.sizes.most_images < declared.sizes.images:
        raise DataFilesCorruptError(
            f"{path}: sizes.most_images is an upper bound: it must be at least sizes.images"
        )
    ledger = None
    if declared.privacy.ledger.strip():
        ledger = (path.parent / expand_home(declared.privacy.ledger.strip())).absolute()
    signed_by = ""
    if declared.signed_off.by.strip() and declared.signed_off.date:
        signed_by = f"{declared.signed_off.by.strip()}, {declared.signed_off.date}"
    return Declaration(
        spec,
        tuple(images.sites),
        declared.sizes.most_images,
        ledger,
        images.person,
        signed_by,
        path,
    )


def require_signed(declaration: Declaration) -> None:
    """Raises an error if the declaration is unsigned.

    Raises:
        DataError: the declaration is unsigned; the message explains how to sign it.
    """
    if not declaration.signed_by:
        raise DataError(
            f"{declaration.path} is not signed: all of it is public, so a person must check "
            "each line and enter name and date under [signed_off]"
        )


def require_declared(files: FolderFiles, declaration: Declaration) -> None:
    """Checks that the classes and sites are those of the declaration.

    Raises:
        DataError: one is not declared, or a declared one has no image.
    """
    for kind, names, declared in (
        ("class", files.class_names, declaration.spec.class_names),
        ("site", files.site_names, declaration.sites or files.site_names),
    ):
        undeclared = sorted(set(names).difference(declared))
        if undeclared:
            raise DataError(
                f"there is a {kind} {one_line(undeclared[0])!r} that {declaration.path} does not "
                f"declare; declared: {one_line(', '.join(declared))}"
            )
        missing = sorted(set(declared).difference(names))
        if missing:
            raise DataError(
                f"there is no image of the {kind} {one_line(missing[0])!r}, which "
                f"{declaration.path} declares"
            )


def require_declared_counts(train: ImageData, declaration: Declaration) -> None:
    """Checks that there are no more images than the declared bound, and not far fewer images or
    users than declared.

    Raises:
        DataError: a count does not match; the message names the declaration's key.
    """
    if len(train) > declaration.most_images:
        raise DataError(
            f"there are more images than sizes.most_images in {declaration.path}: correct "
            "the bound, and sign again"
        )
    users = declaration.spec.groups
    if train.groups is not None:
        users = len(train.groups.unique())
    for key, count, declared in (
        ("images", len(train), declaration.spec.train_size),
        ("users", users, declaration.spec.groups),
    ):
        if count * MAX_RATIO < declared:
            raise DataError(
                f"there are {count} {key}, but {declaration.path} declares {declared} in "
                f"sizes.{key}: add the missing ones, or correct the number and sign again"
            )
