"""Images as uint8 tensors with their labels, and conversion between pixels and model inputs.

Keyed hashes of records' bytes, which identify a record regardless of its position and owner.

Without the key, a hash reveals nothing about its record. With the key, anyone who has the record
can recompute it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError

IntArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


Array = Tensor | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class ImageData:
    """uint8 images [N, C, H, W] and int64 labels [N] on the images' device, checked on creation.

    Two objects are equal only if they are the same object (comparing tensors has no single
    answer).

    Args:
        images: uint8 [N, C, H, W].
        labels: integers [N] in [0, classes); become int64.
        spec: the images' specification.
        domains: positions [N] in `spec.domains` (few, with names), if the data set has domains;
            become int64.
        groups: numbers [N] ≥ 0 of writers, devices or patients (many, without names), not
            necessarily all of them; become int64.
        may_be_empty: whether zero examples are allowed, for runs in which an error would reveal
            that a data owner has none.

    Raises:
        DataError: the shapes do not match each other or `spec`, the types are wrong, labels,
            domains or groups are out of range, or there is no example.

    >>> from fedsynth import load_dataset
    >>> train, test = load_dataset("digits")
    >>> few = train.subset([0, 1, 2, 2])
    >>> few, few.labels.tolist()
    (ImageData(4 images of 'digits' on cpu), [0, 1, 2, 2])
    >>> few.class_counts().tolist()
    [1, 1, 2, 0, 0, 0, 0, 0, 0, 0]
    """

    images: Tensor
    labels: Tensor
    spec: DatasetSpec
    domains: Tensor | None = None
    groups: Tensor | None = None
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        spec = self.spec
        if self.images.dtype != torch.uint8:
            raise DataError(
                f"{spec.name}: images must be uint8, or floating point in [0, 1] for from_arrays, "
                f"got {_dtype(self.images)}"
            )
        if self.images.dim() != 4 or self.images.shape[1:] != spec.image_shape:
            raise DataError(
                f"{spec.name}: images must have shape [N, {', '.join(map(str, spec.image_shape))}], "
                f"channels first, got {list(self.images.shape)}"
            )
        count = len(self.images)
        if not count and not self.may_be_empty:
            raise DataError(f"{spec.name}: there must be at least one example")
        limits = {"labels": spec.classes, "domains": len(spec.domains), "groups": math.inf}
        for what, limit in limits.items():
            numbers = getattr(self, what)
            if numbers is not None:
                checked = _checked_numbers(what, numbers, count, spec, limit)
                object.__setattr__(self, what, checked.to(self.images.device))

    def __repr__(self) -> str:
        # never shows the images themselves
        return f"ImageData({len(self)} images of {self.spec.name!r} on {self.labels.device})"

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> ImageData:
        """Returns the examples on `device`; returns this object if they are already there."""
        if self.images.device == self.labels.device == torch.device(device):
            return self
        return self._map(lambda array: array.to(device))

    def subset(self, indices: Array) -> ImageData:
        """Returns the examples at `indices` (integers [M], in this order, repeats allowed).

        Raises:
            DataError: `indices` is not a vector of integers in [0, N), or is empty.
        """
        index = torch.as_tensor(indices)
        index = _checked_numbers("indices", index, index.numel(), self.spec, len(self))
        index = index.to(self.labels.device)
        return self._map(lambda array: array[index])

    def _map(self, change: Callable[[Tensor], Tensor]) -> ImageData:
        changed: dict[str, Any] = {}
        for name in ("images", "labels", "domains", "groups"):
            array = getattr(self, name)
            if array is not None:
                changed[name] = change(array)
        return replace(self, **changed)

    def origins(self) -> tuple[IntArray | None, IntArray | None]:
        """Returns `domains` and `groups` for `partition`, int64 [N] on the CPU."""
        domains = self.domains.cpu().numpy() if self.domains is not None else None
        groups = self.groups.cpu().numpy() if self.groups is not None else None
        return domains, groups

    def class_counts(self) -> Tensor:
        """Returns the number of examples of each class: int64 [classes], on the data's device."""
        return torch.bincount(self.labels, minlength=self.spec.classes)


def from_arrays(
    images: Array,
    labels: Array,
    spec: DatasetSpec,
    domains: Array | None = None,
    groups: Array | None = None,
) -> ImageData:
    """Builds `ImageData` from arrays of images and labels.

    Args:
        images: [N, C, H, W], or [N, H, W] when the spec has one channel. uint8, or floating point
            in [0, 1] (rounded to the nearest of the 256 levels).
        labels: integers [N] in [0, classes).
        spec: the specification that the images must match.
        domains: integers [N], positions in `spec.domains`: the hospital, scanner or style that each
            image comes from.
        groups: integers [N] ≥ 0: the writer, device or patient that each image comes from;
            partition `natural` makes each a client.

    Raises:
        DataError: the arrays are anything else, or have NaN or infinite pixels; the message gives
            actual and expected values.

    >>> import numpy as np
    >>> from fedsynth.data.registry import dataset_spec
    >>> grey = np.full((2, 8, 8), 0.5)
    >>> data = from_arrays(grey, [3, 7], dataset_spec("digits"))
    >>> list(data.images.shape), int(data.images.max())
    ([2, 1, 8, 8], 128)
    """
    x = _as_tensor(images, f"{spec.name}: images")
    if x.dim() == 3 and spec.channels == 1:
        x = x.unsqueeze(1)
    data = ImageData(_to_uint8(x, spec), _as_tensor(labels, f"{spec.name}: labels"), spec)
    if domains is not None:
        data = replace(data, domains=_as_tensor(domains, f"{spec.name}: domains"))
    if groups is not None:
        data = replace(data, groups=_as_tensor(groups, f"{spec.name}: groups"))
    return data


def require_all_classes(data: ImageData) -> None:
    """Raises an error if a class has no training example.

    It reads exact counts, so it is only for runs without differential privacy.

    Raises:
        DataError: a class has no example; the message names the absent classes.
    """
    absent = (data.class_counts() == 0).nonzero().flatten().tolist()
    if absent:
        names = map(data.spec.class_names.__getitem__, absent[:5])
        raise DataError(
            f"{data.spec.name}: the training set has no example of {len(absent)} of the classes: "
            f"{', '.join(names)}"
        )


def normalise(
    images_uint8: Tensor, spec: DatasetSpec, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns (x/255 − mean)/std per channel: uint8 [N, C, H, W] → `dtype` [N, C, H, W] on the same
    device. The computation is in float32, whatever `dtype` is.

    Raises:
        DataError: the images are not uint8, or do not have the spec's number of channels.
    """
    _check_channels(images_uint8, spec, "uint8", images_uint8.dtype == torch.uint8)
    mean, std = pixel_constants(spec, images_uint8.device)
    return images_uint8.float().div_(255).sub_(mean).div_(std).to(dtype)


def denormalise(x: Tensor, spec: DatasetSpec) -> Tensor:
    """Inverts `normalise`: floating point [N, C, H, W] → uint8 [N, C, H, W], clamped to [0, 255]
    and rounded.

    Raises:
        DataError: `x` is not floating point, does not have the spec's number of channels, or has
            NaN or infinite values.
    """
    _check_channels(x, spec, "floating point", x.is_floating_point())
    _check_finite(x, spec)
    mean, std = pixel_constants(spec, x.device)
    return x.detach().float().mul(std).add_(mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def pixel_constants(spec: DatasetSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of pixels in [0, 1] by channel, float32 [1, C, 1, 1]
    each; cached for each device."""
    return _constants(spec.mean, spec.std, device)


@functools.lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns tensors [1, C, 1, 1]. They are cached, because copying them to a GPU again would
    synchronise inside the training loop."""
    # a tensor created in inference mode could not be used by autograd later
    with torch.inference_mode(False):
        shape = (1, len(mean), 1, 1)
        return (
            torch.tensor(mean, device=device).view(shape),
            torch.tensor(std, device=device).view(shape),
        )


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _as_tensor(array: Array, what: str) -> Tensor:
    """Returns a copy, so that later writes to the array do not change the data set."""
    if isinstance(array, Tensor):
        return array.detach().clone()
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} must be a NumPy array or a tensor of numbers: {' '.join(str(error).split())}"
        ) from None


def _checked_numbers(
    what: str, numbers: Tensor, count: int, spec: DatasetSpec, limit: float
) -> Tensor:
    """Returns numbers [count] in [0, limit) as int64."""
    if numbers.shape != (count,):
        raise DataError(f"{spec.name}: {what} must have shape [{count}], got {list(numbers.shape)}")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(f"{spec.name}: {what} must be integers, got {_dtype(numbers)}")
    wide = numbers.long()  # a too large uint64 becomes negative, and is then refused
    wrong = wide[(wide < 0) | (wide >= limit)]
    if len(wrong):
        raise DataError(
            f"{spec.name}: {what} must be in [0, {limit}); {len(wrong)} are not, the first is "
            f"{int(wrong[0])}"
        )
    return wide


def _check_channels(x: Tensor, spec: DatasetSpec, kind: str, is_kind: bool) -> None:
    if not is_kind or x.dim() != 4 or x.shape[1] != spec.channels:
        raise DataError(
            f"{spec.name}: expected {kind} [N, {spec.channels}, H, W], got {_dtype(x)} "
            f"{list(x.shape)}"
        )


def _check_finite(x: Tensor, spec: DatasetSpec) -> None:
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise DataError(f"{spec.name}: {bad} of {x.numel()} pixel values are NaN or infinite")


def _to_uint8(x: Tensor, spec: DatasetSpec) -> Tensor:
    if not x.is_floating_point():
        return x
    _check_finite(x, spec)
    outside = int(((x < 0) | (x > 1)).sum())
    if outside:
        raise DataError(
            f"{spec.name}: floating-point images must be in [0, 1]; {outside} of {x.numel()} "
            "values are not"
        )
    return (x.float() * 255).round().to(torch.uint8)


DIGEST_BYTES = 16
_PURPOSE = b"fedsynth record"
_AT_ONCE = 4096  # records copied to the CPU at a time: bounds memory


def record_digests(
    data: ImageData,
    positions: IntArray,
    key: bytes,
    size: int = DIGEST_BYTES,
    *,
    labels: bool = True,
) -> npt.NDArray[np.uint8]:
    """Returns the keyed hash of each record at `positions`.

    It depends only on the record's stored pixels (uint8, row by row) and, with `labels`, its label;
    it does not depend on the record's position, on other records, or on the device.

    Args:
        data: the images and labels, on any device.
        positions: integers [N], the records' positions.
        key: up to 64 bytes; must be secret if others must not compute the hashes.
        size: bytes of a hash, 1 to 64. With 16, the probability of a collision among 10⁶ records is
            about 10⁻²⁷.

    Returns:
        BLAKE2b (RFC 7693), keyed: uint8 [N, size].
    """
    chosen = np.asarray(positions, np.int64)
    digests = np.empty((len(chosen), size), np.uint8)
    empty = hashlib.blake2b(key=key, digest_size=size, person=_PURPOSE)
    for first in range(0, len(chosen), _AT_ONCE):
        chunk = data.subset(chosen[first : first + _AT_ONCE])
        pixels = chunk.images.cpu().flatten(1).numpy()
        if labels:
            labels_bytes = (
                chunk.labels.cpu().numpy().astype("<i8").view(np.uint8).reshape(len(pixels), -1)
            )
            pixels = np.concatenate([pixels, labels_bytes], axis=1)
        for row, record in enumerate(np.ascontiguousarray(pixels), start=first):
            hashed = empty.copy()
            hashed.update(record)
            digests[row] = np.frombuffer(hashed.digest(), np.uint8)
    return digests
