"""An exported synthetic set, as `fedsynth synthesize` and `fedsynth export` write it.

README.md                   a description, and how to train on the set
images/NN-CLASS/NNNN.png    each image, for viewing: pixels are clipped to black and white
synthetic.safetensors       the images for training: `images`, `labels`, and optionally
                            `soft_labels` and the `client` that made each image
model.safetensors           the run's model, if it was requested (`fedsynth.load_model`)
privacy_report.json, .md, .html    the guarantee; only with differential privacy
SHA256SUMS                  the hashes of all files, for `sha256sum -c`
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsynth.data.files import MAX_LIST_BYTES, one_line, read_tensors, save_tensors
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError, FedsynthError
from fedsynth.privacy.files import decode_json, expand_home, file_hash, plain_files, read_regular
from fedsynth.privacy.report.formatting import format_epsilon

TENSORS, SUMS, README = "synthetic.safetensors", "SHA256SUMS", "README.md"
FORMAT = "fedsynth synthetic set 1"
UNITS = "float32; 0 is black, 1 is white; values outside are not cut off"
NORMALISED = "float32, normalised: (x - mean) / std of x whose black is 0 and white 1"
BYTES = "uint8; 0 is black, 255 is white"
MAX_VALUE = 1e6
"""Limit of absolute pixel values, both raw and normalised: larger ones are not images, and would
overflow in training."""
SUM_TOLERANCE = 0.01
"""Tolerance of the sum of an image's soft labels, which is 1: they may be rounded to 16 bits."""
_TENSORS = {"images", "labels", "soft_labels", "client"}
_SUM = re.compile(r"([0-9a-f]{64})  ([^\\\0]+)")


@dataclass(frozen=True, eq=False)
class SharedSet:
    """A synthetic set.

    Attributes:
        images: float32 [N, C, H, W] in pixel units: 0 is black and 1 is white. Learned images may
            have values outside [0, 1]; they are not clipped, as models train better that way.
        labels: int64 [N].
        soft_labels: float32 [N, classes], or None.
        clients: int64 [N], the client that made each image; None: one owner made all.
        spec: the images' specification; `train_size` is the number of synthetic images.
        epsilon, delta: the guarantee for each example (or user) of the private data; None: there is
            no guarantee.

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
        """Returns the images as model inputs: (x − mean)/std by channel, float32 [N, C, H, W]."""
        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.spec.mean).view(shape)
        return (self.images - mean) / torch.tensor(self.spec.std).view(shape)

    def __repr__(self) -> str:
        guarantee = (
            "no guarantee" if self.epsilon is None else f"ε = {format_epsilon(self.epsilon)}"
        )
        return f"SharedSet({len(self.labels)} images of {self.spec.name!r}, {guarantee})"


def load_synthetic(folder: str | Path) -> SharedSet:
    """Loads the synthetic set in an exported folder, and checks its files' hashes.

    Raises:
        DataFilesMissingError: the folder or a listed file does not exist.
        DataFilesCorruptError: a file was changed or is not listed, or the tensors are damaged.

    >>> load_synthetic("/no/such/folder")
    Traceback (most recent call last):
    fedsynth.errors.DataFilesMissingError: ...
    """
    root = expand_home(folder)
    if not (root / SUMS).is_file():
        raise DataFilesMissingError(
            f"{one_line(root)} is not a synthetic set: it has no {SUMS} (fedsynth export RUN "
            "creates one)"
        )
    check_hashes(root)
    try:
        return shared_set(*read_tensors(root / TENSORS))
    except (OSError, ValueError) as error:
        raise DataFilesCorruptError(f"{root / TENSORS} is damaged: {one_line(error)}") from None


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
    """Writes a synthetic set in the format that `shared_set` reads.

    Args:
        file: the safetensors file.
        images: [N, C, H, W], in the units of `pixels`.
        labels: int64 [N].
        spec: the images' specification.
        pixels: `UNITS`, `NORMALISED` or `BYTES`.
        clients: int64 [N], the client that made each image.
        soft_labels: float32 [N, classes].
        facts: more metadata.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    tensors = {"images": images, "labels": labels, "client": clients, "soft_labels": soft_labels}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_tensors(present, file, {**set_facts(spec, pixels), **(facts or {})})


def set_facts(spec: DatasetSpec, pixels: str) -> dict[str, str]:
    """Returns the metadata about the images for a set's file."""
    return {
        "format": FORMAT,
        "pixels": pixels,
        "data_set": spec.name,
        "class_names": json.dumps(spec.class_names),
        "mean": json.dumps(spec.mean),
        "std": json.dumps(spec.std),
    }


def shared_set(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SharedSet:
    """Builds a synthetic set, in pixel units, from a file's tensors and metadata.

    Raises:
        ValueError: something is missing, inconsistent, or has invalid values.
    """
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, but should be {FORMAT!r}")
    try:
        images = _in_units(tensors["images"], metadata)
        spec = _spec_of(images, metadata)
        epsilon = _promised(metadata.get("epsilon", "null"))
        delta = _promised(metadata.get("delta", "null"))
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    except (TypeError, FedsynthError) as error:
        raise ValueError(f"it does not describe its images: {one_line(error)}") from None
    if (epsilon is None) != (delta is None):
        raise ValueError("it has only one of ε and δ")
    if delta is not None and delta >= 1:
        raise ValueError(f"its δ is {delta:g}, but must be below 1")
    _check_labels(tensors, len(images), spec.classes)
    synthetic = SharedSet(
        images,
        tensors["labels"],
        tensors.get("soft_labels"),
        tensors.get("client"),
        spec,
        epsilon,
        delta,
    )
    for values in (images, synthetic.normalised()):
        if not (values.abs() <= MAX_VALUE).all():  # also true for NaN
            raise ValueError(f"its images have values that are not finite, or above {MAX_VALUE:g}")
    return synthetic


def _in_units(pixels_NCHW: Tensor, metadata: Mapping[str, str]) -> Tensor:
    """Returns images float32 [N, C, H, W] in which black is 0 and white is 1."""
    pixels = metadata["pixels"]
    as_stated = (
        pixels_NCHW.dtype == torch.uint8 if pixels == BYTES else pixels_NCHW.is_floating_point()
    )
    if pixels_NCHW.dim() != 4 or not as_stated:
        kind = "bytes" if pixels == BYTES else "floating-point numbers"
        raise ValueError(f"its images are not {kind} [N, C, H, W]")
    if not pixels_NCHW.numel():
        raise ValueError("it has no images")
    if pixels == BYTES:
        return pixels_NCHW.float() / 255
    if pixels != NORMALISED:
        return pixels_NCHW.float()
    mean, std = (
        torch.tensor(decode_json(metadata[key])).view(1, -1, 1, 1) for key in ("mean", "std")
    )
    return (pixels_NCHW.float() * std + mean).contiguous()


def _check_labels(tensors: Mapping[str, Tensor], count: int, classes: int) -> None:
    """Checks the labels, soft labels and clients of the images.

    Raises:
        ValueError: as for `shared_set`.
    """
    if unknown := sorted(set(tensors) - _TENSORS):
        raise ValueError(
            f"it has {one_line(unknown[0], 80)!r}, which is not part of a synthetic set"
        )
    for name in ("labels", "client"):
        values = tensors.get(name)
        if values is None and name == "client":
            continue
        if values is None or values.shape != (count,) or values.dtype != torch.int64:
            raise ValueError(f"its {name} are not one whole number for each image")
    labels = tensors["labels"]
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError("its labels contain classes that do not exist")
    soft = tensors.get("soft_labels")
    if soft is None:
        return
    if soft.shape != (count, classes) or not soft.is_floating_point():
        raise ValueError("its soft labels must have one probability per class and image")
    shares = soft.float()
    sums = shares.sum(dim=1)
    if not (shares >= 0).all() or not ((sums - 1).abs() <= SUM_TOLERANCE).all():  # true for NaN
        raise ValueError("its soft labels are negative, not finite, or do not sum to 1")


def _promised(text: str) -> float | None:
    """Parses ε or δ from a file's metadata."""
    value = decode_json(text)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"its guarantee is not a number: {value!r:.40}")
    return float(value)


def _spec_of(images_NCHW: Tensor, facts: Mapping[str, str]) -> DatasetSpec:
    """Returns the images' specification according to the file's metadata."""
    count, channels, height, width = images_NCHW.shape
    names = tuple(decode_json(facts["class_names"]))
    return DatasetSpec(
        name=facts["data_set"],
        channels=channels,
        height=height,
        width=width,
        classes=len(names),
        train_size=max(1, count),
        test_size=1,
        mean=tuple(decode_json(facts["mean"])),
        std=tuple(decode_json(facts["std"])),
        class_names=names,
        source=f"synthetic, made by {facts.get('made_by', 'fedsynth')}",
    )


# ---------------------------------------------------------------------------------------- hashes


def write_hashes(root: Path) -> None:
    """Writes SHA256SUMS for all other files of a folder."""
    names = plain_files(root, leave_out=(SUMS,))
    lines = [f"{file_hash(root / name)}  {name}\n" for name in names]
    (root / SUMS).write_text("".join(lines), encoding="utf-8")


def check_hashes(root: Path) -> None:
    """Raises an error if a folder's files differ from its SHA256SUMS.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: as for `load_synthetic`.
    """
    try:
        text = read_regular(root / SUMS, MAX_LIST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFilesCorruptError(f"cannot read {root / SUMS}: {one_line(error)}") from None
    listed = {}
    for line in text.splitlines():
        match = _SUM.fullmatch(line)
        if match is None or ".." in match[2].split("/") or match[2].startswith("/"):
            raise DataFilesCorruptError(f"{root / SUMS} is damaged: {one_line(line)!r}")
        listed[match[2]] = match[1]
    try:
        present = set(plain_files(root, leave_out=(SUMS,)))
    except OSError as error:
        raise DataFilesCorruptError(f"cannot read {root}: {one_line(error)}") from None
    for name in sorted(listed.keys() | present):
        if name not in present:
            raise DataFilesMissingError(f"{root} lacks {one_line(name)}, which {SUMS} lists")
        if name not in listed:
            raise DataFilesCorruptError(f"{root} has {one_line(name)}, which {SUMS} does not list")
        try:
            same = file_hash(root / name) == listed[name]
        except OSError as error:
            raise DataFilesCorruptError(
                f"cannot read {one_line(root / name)}: {one_line(error)}"
            ) from None
        if not same:
            raise DataFilesCorruptError(f"{one_line(root / name)} was changed since it was written")
