"""The public declaration of a user's images: the facts that a private run may use in addition to
its releases.

It is a TOML file that a person checks and signs. Divisors, sampling rates, the shape of the
releases and the privacy report depend on the declaration and never on the images themselves, so
everything in it is public. `fedsynth data describe` proposes one.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedsynth.data.own_files import LEDGERS
from fedsynth.data.record_table import same_name
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError, DataFilesCorruptError, FedsynthError
from fedsynth.privacy.files import expand_home
from fedsynth.toml_file import read_sections

MEAN, STD = 0.5, 0.25
"""Default mean and standard deviation of pixels in [0, 1]. They are constants because a computed
mean is an exact function of the images."""
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(same_name)]
Count = Annotated[int, Field(ge=1, lt=10**15)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Images(_Part):
    name: Name
    class_names: Annotated[list[Name], Field(min_length=1)]
    sites: list[Name] = []
    channels: Annotated[int, Field(ge=1, le=3)]
    height: Annotated[int, Field(ge=1, le=4096)]
    width: Annotated[int, Field(ge=1, le=4096)]
    mean: list[float]
    std: list[float]
    source: str
    person: Annotated[str, Field(min_length=1, max_length=40)] = "person"


class _Sizes(_Part):
    images: Count
    most_images: Count
    users: Annotated[int, Field(ge=0, lt=10**15)] = 0


def _iso_date(text: str) -> str:
    if text.strip():
        try:
            datetime.date.fromisoformat(text.strip())
        except ValueError:
            raise ValueError("must be a date such as 2026-11-23") from None
    return text


class _Kept(_Part):
    ledger: str = ""


class _Signed(_Part):
    by: str = ""
    date: Annotated[str, AfterValidator(_iso_date)] = ""


class _File(_Part):
    images: _Images
    sizes: _Sizes
    privacy: _Kept = _Kept()
    signed_off: _Signed = _Signed()


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

    @property
    def signed(self) -> bool:
        """Returns whether a person has signed the declaration."""
        return bool(self.signed_by)


def read_declaration(path: Path) -> Declaration:
    """Reads a declaration file.

    Raises:
        DataFilesCorruptError: the file cannot be read or is not a valid declaration; the error
            names the key.
    """
    try:
        read = _File.model_validate(read_sections(path))
        spec = _spec(read)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, first["loc"]))[:80]
        raise DataFilesCorruptError(
            f"{path} is not a valid declaration of images: {location}: {first['msg'][:200]}"
        ) from None
    except FedsynthError as error:
        raise DataFilesCorruptError(
            f"{path} is not a valid declaration of images: {error}"
        ) from None
    if read.sizes.most_images < read.sizes.images:
        raise DataFilesCorruptError(
            f"{path}: sizes.most_images is an upper bound: it must be at least sizes.images"
        )
    for key, names in (("class_names", read.images.class_names), ("sites", read.images.sites)):
        if len(set(names)) < len(names):
            raise DataFilesCorruptError(f"{path}: images.{key} contains a name twice")
    signed = read.signed_off
    both = signed.by.strip() and signed.date.strip()
    ledger = read.privacy.ledger.strip()
    return Declaration(
        spec,
        tuple(read.images.sites),
        read.sizes.most_images,
        (path.parent / expand_home(ledger)).absolute() if ledger else None,
        read.images.person,
        f"{signed.by.strip()}, {signed.date.strip()}" if both else "",
        path,
    )


def _spec(read: _File) -> DatasetSpec:
    images = read.images
    return DatasetSpec(
        name=images.name,
        channels=images.channels,
        height=images.height,
        width=images.width,
        classes=len(images.class_names),
        train_size=read.sizes.images,
        test_size=1,
        mean=tuple(images.mean),
        std=tuple(images.std),
        class_names=tuple(images.class_names),
        source=images.source,
        groups=read.sizes.users,
    )


# ---------------------------------------------------------------------------------- proposals


def coarse(count: float, *, up: bool = False) -> int:
    """Rounds `count` to 1, 2 or 5 times a power of ten: the nearest, or the next higher if `up`.

    >>> coarse(570), coarse(640, up=True), coarse(3)
    (500, 1000, 2)
    """
    steps = [int(s * 10**e) for e in range(15) for s in (1, 2, 5)]
    if up:
        return next(step for step in steps if step >= count)
    return min(steps, key=lambda step: abs(math.log(step / max(count, 1))))


def proposal(
    spec: DatasetSpec,
    sites: Sequence[str],
    images: int,
    users: int,
) -> str:
    """Returns a proposed declaration as TOML text, for a person to check.

    Args:
        spec: the specification read from the images.
        sites: the sites' names.
        images: the number of images; it is rounded before it is written.
        users: the number of people in the images (0: unknown); also rounded.
    """

    def listed(values: Sequence[Any]) -> str:
        return json.dumps(list(values), ensure_ascii=False)

    return f"""\
# What is PUBLIC of the images in this folder, proposed by `fedsynth data describe`.
#
# Everyone may know this: it appears in privacy reports, and it determines divisors, sampling rates
# and the shapes of exported tensors. Nothing else about the images is public.
# The values below were read from the folder. A PERSON MUST CHECK EACH LINE: enter what you would
# publish, not exact counts. Then fill in [signed_off]: without it, no run with differential
# privacy starts.

[images]
name = {json.dumps(spec.name, ensure_ascii=False)}
class_names = {listed(spec.class_names)}  # in this order; include classes that some sites lack
sites = {listed(sites)}  # public names; [] if the data have a single owner
channels = {spec.channels}  # 1: grey, 3: colour
height = {spec.height}  # every image is resized to this
width = {spec.width}
mean = {listed(spec.mean)}  # of pixels in [0, 1]: constants, not computed from these images
std = {listed(spec.std)}
source = {json.dumps(spec.source, ensure_ascii=False)}
person = "person"  # the word for one person in the privacy report, such as "patient"

[sizes]
# Rounded public estimates. A wrong `images` makes results worse, but not less private.
# `most_images` must be a true upper bound (δ is checked against it).
images = {coarse(images)}  # approximate number at all sites together
most_images = {coarse(2 * images, up=True)}  # upper bound of the number of images
# Approximate number of people in the images; 0: unknown. (A run that protects users, privacy.unit,
# still needs the number of users per client: privacy.nominal_size.)
users = {coarse(users) if users else 0}

[privacy]
# The folder of the ledgers, which record the ε spent on these images over all runs. Do not delete
# it, and give no one access to its folder `private`. Relative to this file.
ledger = {json.dumps(LEDGERS)}

[signed_off]
by = ""  # the person who checked all of the above
date = ""  # such as 2026-11-23
"""


def require_signed(declaration: Declaration) -> None:
    """Raises an error if the declaration is unsigned.

    Raises:
        DataError: the declaration is unsigned; the message explains how to sign it.
    """
    if not declaration.signed:
        raise DataError(
            f"{declaration.path} is not signed: all of it is public, so a person must check "
            "each line and enter name and date under [signed_off]"
        )
