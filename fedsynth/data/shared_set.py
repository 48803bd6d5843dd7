"""Reads and writes the synthetic sets of `fedsynth synthesize` and `fedsynth export`.

An exported set's folder contains the following files:

README.md                   a description, and how to train on the set
images/NN-CLASS/NNNN.png    each image, for viewing: pixels are clipped to black and white
values.csv                  the labels and values, only for data that cannot be drawn
croissant.json              a description of the files in the format Croissant
synthetic.safetensors       the images for training: `images`, `labels`, and optionally
                            `soft_labels` and the `client` that made each image
model.safetensors           the run's model, if it was requested (`fedsynth.load_model`)
privacy_report.json, .md, .html    the guarantee; only with differential privacy
SHA256SUMS                  the hashes of all files, for `sha256sum -c`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, Json
from torch import Tensor

from fedsynth.data.files import MAX_LIST_BYTES, read_tensors, save_tensors
from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec, custom_spec
from fedsynth.errors import (
    DataFilesCorruptError,
    DataFilesMissingError,
    FedsynthError,
    faults_as,
    one_line,
)
from fedsynth.files import expand_home, file_hash, plain_files, read_text
from fedsynth.formatting import format_epsilon

TENSORS, SUMS, README = "synthetic.safetensors", "SHA256SUMS", "README.md"
FORMAT = "fedsynth synthetic set 1"
UNITS = "float32; 0 is black, 1 is white; values outside are not cut off"
NORMALISED = "float32, normalised: (x - mean) / std of x whose black is 0 and white 1"
BYTES = "uint8; 0 is black, 255 is white"
# The largest absolute pixel value, raw or normalised. Larger values would overflow in training.
MAX_VALUE = 1e6
# The tolerance for the sum of an image's soft labels, which may be rounded.
SUM_TOLERANCE = 0.01

_SUM = re.compile(r"([0-9a-f]{64})  (.+)")
_FACTS = {
    "class_names", "mean", "std", "bounds", "encoder", "encoded_shape", "window", "slice",
    "features",
}  # fmt: skip
_TENSORS = {"images", "labels", "soft_labels", "client"}


@dataclass(frozen=True, eq=False)
class SharedSet:
    """Synthetic images with labels.

    Attributes:
        images: float32 [N, C, H, W], where 0 is black and 1 is white. For data with bounds, 0 and 1
            are the bounds. Learned images may have values outside [0, 1]. Values are not clipped,
            because models then train better.
        labels: int64 [N], the class of each image.
        soft_labels: float32 [N, classes], the images' class probabilities, or None.
        clients: int64 [N], the clients that made the images, or None if one owner made all images.
        spec: the specification of the images. `train_size` is the number of synthetic images.
        epsilon, delta: the guarantee for each private example (or user). Both are None without a
            guarantee.

    >>> import tempfile
    >>> from fedsynth import load_synthetic, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> result = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> found = load_synthetic(f"{place}/share")
    >>> list(found.images.shape), found.epsilon <= 8
    ([100, 1, 8, 8], True)
    """

    images: Tensor
    labels: Tensor
    soft_labels: Tensor | None
    clients: Tensor | None
    spec: DatasetSpec
    epsilon: float | None
    delta: float | None

    def normalised(self) -> Tensor:
        """Returns the images as model inputs, float32 [N, C, H, W].

        Each channel is normalised as (x − mean)/std.
        """
        mean, std = pixel_constants(self.spec, self.images.device)
        return (self.images - mean) / std

    def values(self) -> Tensor:
        """Returns the images or vectors in their original units, float32 [N, C, H, W].

        Without bounds, the values are the images.
        """
        low, high = self.spec.bounds or (0.0, 1.0)
        return low + (high - low) * self.images

    def __repr__(self) -> str:
        guarantee = "no guarantee"
        if self.epsilon is not None:
            guarantee = f"ε = {format_epsilon(self.epsilon)}"
        return f"SharedSet({len(self.labels)} images of {self.spec.name!r}, {guarantee})"


def load_synthetic(folder: str | Path) -> SharedSet:
    """Loads the synthetic set in an exported folder, and checks all file hashes.

    Raises:
        DataFilesMissingError: the folder, or a file listed in SHA256SUMS, does not exist.
        DataFilesCorruptError: a file was changed or is missing from SHA256SUMS, or the tensors are
            damaged.

    >>> load_synthetic("/no/such/folder")
    Traceback (most recent call last):
    fedsynth.errors.DataFilesMissingError: ...
    """
    root = expand_home(folder)
    if not (root / SUMS).is_file():
        raise DataFilesMissingError(
            f"{one_line(root)} is not a synthetic set: the file {SUMS} is missing. Name an "
            "exported folder"
        ).with_code("files.synthetic_set")
    check_hashes(root)
    return read_set(root / TENSORS)


def read_set(file: Path) -> SharedSet:
    """Reads a synthetic set from a file written by `write_set`.

    Raises:
        DataFilesCorruptError: the file cannot be read or is damaged.
    """
    try:
        return shared_set(*read_tensors(file))
    except (OSError, ValueError) as error:
        raise DataFilesCorruptError(
            f"{file} is damaged: {one_line(error)}. Export the set again"
        ) from None


def write_set(
    file: Path,
    images: Tensor,
    labels: Tensor,
    spec: DatasetSpec,
    *,
    pixels: str,
    clients: Tensor | None = None,
    soft_labels: Tensor | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Writes a synthetic set's images, labels and metadata to a safetensors file.

    Args:
        file: the safetensors file.
        images: the images [N, C, H, W], with values described by `pixels`.
        labels: int64 [N], the class of each image.
        spec: the specification of the images.
        pixels: the meaning of pixel values: `UNITS`, `NORMALISED` or `BYTES`.
        clients: int64 [N], the client that made each image.
        soft_labels: float32 [N, classes], the class probabilities of each image.
        facts: additional metadata.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {"images": images, "labels": labels}
    if clients is not None:
        tensors["client"] = clients
    if soft_labels is not None:
        tensors["soft_labels"] = soft_labels
    save_tensors(tensors, file, {**set_facts(spec, pixels), **(facts or {})})


def set_facts(spec: DatasetSpec, pixels: str) -> dict[str, str]:
    """Returns the metadata to be stored in a synthetic set's file."""
    facts = {"format": FORMAT, "pixels": pixels, "data_set": spec.name, "encoder": spec.encoder}
    for name in sorted(_FACTS - {"encoder"}):
        facts[name] = json.dumps(getattr(spec, name))
    return facts


class _Metadata(BaseModel):
    """The metadata in a synthetic set's file."""

    model_config = ConfigDict(allow_inf_nan=False)

    format: Literal["fedsynth synthetic set 1"]
    pixels: str
    data_set: str
    class_names: Json[list[str]]
    mean: Json[tuple[float, ...]]
    std: Json[tuple[float, ...]]
    bounds: Json[tuple[float, float] | None] = None
    encoder: Annotated[str, Field(max_length=2000)] = ""
    encoded_shape: Json[tuple[int, int, int] | None] = None
    window: Json[tuple[float, float] | None] = None
    slice: Json[int] = -1
    features: Json[tuple[str, ...]] = ()
    epsilon: Json[Annotated[float, Field(ge=0)] | None] = None
    delta: Json[Annotated[float, Field(ge=0, lt=1)] | None] = None
    made_by: str = "fedsynth"


def shared_set(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SharedSet:
    """Builds a synthetic set from a file's tensors and metadata.

    Raises:
        ValueError: a tensor or metadata key is missing, inconsistent or invalid.
    """
    with faults_as(ValueError, "the metadata is invalid"):
        facts = _Metadata.model_validate(metadata)
    try:
        images = tensors["images"]
        labels = tensors["labels"]
        if images.dim() != 4 or not images.numel():
            raise ValueError("the file contains no images [N, C, H, W]")
        count, channels, height, width = images.shape
        spec = custom_spec(
            facts.data_set,
            (channels, height, width),
            **facts.model_dump(include=_FACTS),
            source=f"synthetic, made by {facts.made_by}",
            train_size=count,
        )
    except KeyError as error:
        raise ValueError(f"the tensor {error} is missing") from None
    except FedsynthError as error:
        raise ValueError(f"the metadata is invalid: {one_line(error)}") from None
    if (facts.epsilon is None) != (facts.delta is None):
        raise ValueError("the metadata contains only one of ε and δ")
    _check_labels(tensors, count, spec.classes)
    synthetic = SharedSet(
        _in_pixel_units(images, facts.pixels, spec),
        labels,
        tensors.get("soft_labels"),
        tensors.get("client"),
        spec,
        facts.epsilon,
        facts.delta,
    )
    for values in (synthetic.images, synthetic.normalised()):
        if not (values.abs() <= MAX_VALUE).all():  # also true for NaN
            raise ValueError(f"some pixels are not finite, or outside ±{MAX_VALUE:g}")
    return synthetic


def _in_pixel_units(images_NCHW: Tensor, pixels: str, spec: DatasetSpec) -> Tensor:
    """Converts images to float32 [N, C, H, W] with 0 for black and 1 for white."""
    is_bytes = images_NCHW.dtype == torch.uint8
    if is_bytes != (pixels == BYTES) or not (is_bytes or images_NCHW.is_floating_point()):
        raise ValueError(f"the images must be {pixels}, got {images_NCHW.dtype}")
    if is_bytes:
        return images_NCHW.float() / 255
    if pixels == NORMALISED:
        mean, std = pixel_constants(spec, images_NCHW.device)
        return (images_NCHW.float() * std + mean).contiguous()
    return images_NCHW.float()


def _check_labels(tensors: Mapping[str, Tensor], count: int, classes: int) -> None:
    """Checks the images' labels, soft labels and clients.

    Raises:
        ValueError: the labels, soft labels or clients are missing, inconsistent or invalid.
    """
    undefined = sorted(set(tensors) - _TENSORS)
    if undefined:
        raise ValueError(f"the file contains the unknown tensor {one_line(undefined[0], 80)!r}")
    labels = tensors["labels"]
    for name, numbers in (("labels", labels), ("client", tensors.get("client", labels))):
        if numbers.shape != (count,) or numbers.dtype != torch.int64:
            raise ValueError(f"the tensor {name} must contain one int64 for each image")
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"some labels are outside [0, {classes})")
    soft = tensors.get("soft_labels")
    if soft is None:
        return
    if soft.shape != (count, classes) or not soft.is_floating_point():
        raise ValueError(
            f"the soft labels must be floating point [{count}, {classes}], got {soft.dtype} "
            f"{list(soft.shape)}"
        )
    shares = soft.float()
    if not (shares >= 0).all() or not ((shares.sum(1) - 1).abs() <= SUM_TOLERANCE).all():
        raise ValueError("some soft labels are negative, or do not sum to 1")


# ---------------------------------------------------------------------------------------- hashes


def write_hashes(root: Path) -> None:
    """Writes a folder's SHA256SUMS, with the hashes of all other files."""
    with (root / SUMS).open("w", encoding="utf-8") as file:
        for name in plain_files(root, leave_out=(SUMS,)):
            file.write(f"{file_hash(root / name)}  {name}\n")


def check_hashes(root: Path) -> None:
    """Compares a folder's files with its SHA256SUMS.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: in the same cases as `load_synthetic`.
    """
    listed = {}
    try:
        for line in read_text(root / SUMS, MAX_LIST_BYTES).splitlines():
            match = _SUM.fullmatch(line)
            if match is None:
                raise DataFilesCorruptError(
                    f"{root / SUMS} contains the invalid line {one_line(line)!r}. Export the set "
                    "again"
                )
            listed[match[2]] = match[1]
        present = plain_files(root, leave_out=(SUMS,))
        missing = sorted(listed.keys() - set(present))
        if missing:
            path = one_line(root / missing[0])
            raise DataFilesMissingError(
                f"the file {path}, which {SUMS} lists, is missing. Export the set again"
            )
        for name in present:
            path = one_line(root / name)
            if name not in listed:
                raise DataFilesCorruptError(
                    f"the file {path} is not listed in {SUMS}. Remove the file"
                )
            if file_hash(root / name) != listed[name]:
                raise DataFilesCorruptError(
                    f"the file {path} was changed after the export. Export the set again"
                )
    except (OSError, UnicodeDecodeError) as error:
        raise DataFilesCorruptError(f"cannot read {root}: {one_line(error)}") from None
