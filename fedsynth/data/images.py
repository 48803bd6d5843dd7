"""Images as uint8 tensors with their labels, and conversion between pixels and model inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsynth.data.arrays import IntArray
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError

Array = Tensor | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class ImageData:
    """uint8 images [N, C, H, W] and int64 labels [N] on one device, checked on creation.

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
        DataError: the shapes do not match each other or `spec`, the types are wrong, the tensors
            are on two devices, labels, domains or groups are out of range, or there is no example.

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
        if self.images.dtype != torch.uint8:
            raise DataError(
                f"{self.spec.name}: images must be uint8, got {_dtype(self.images)} (from_arrays "
                "converts)"
            )
        _check_image_shape(tuple(self.images.shape), self.spec)
        name = self.spec.name
        labels = _checked_numbers("labels", self.labels, None, self.spec, self.spec.classes)
        if len(self.images) != len(labels):
            raise DataError(f"{name}: {len(self.images)} images but {len(labels)} labels")
        if len(self.images) == 0 and not self.may_be_empty:
            raise DataError(f"{name}: there must be at least one example")
        if self.images.device != labels.device:
            raise DataError(
                f"{name}: images are on {self.images.device} but labels on {labels.device}"
            )
        object.__setattr__(self, "labels", labels)
        for what, limit in (("domains", len(self.spec.domains)), ("groups", None)):
            numbers = getattr(self, what)
            if numbers is not None:
                checked = _checked_numbers(what, numbers, len(labels), self.spec, limit)
                object.__setattr__(self, what, checked.to(labels.device))

    def __repr__(self) -> str:
        # never shows the images themselves
        return f"ImageData({len(self)} images of {self.spec.name!r} on {self.labels.device})"

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> ImageData:
        """Returns the examples on `device`; returns this object if they are already there."""
        if self.images.device == self.labels.device == torch.device(device):
            return self
        return self._each(lambda array: array.to(device))

    def subset(self, indices: Array) -> ImageData:
        """Returns the examples at `indices` (integers [M], in this order, repeats allowed).

        Raises:
            DataError: `indices` is not a vector of integers in [0, N), or is empty.
        """
        index = torch.as_tensor(indices)
        if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise DataError(
                f"indices must be a vector of integers, got {_dtype(index)} of shape "
                f"{list(index.shape)}"
            )
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(self)):
            raise DataError(
                f"indices must be in [0, {len(self)}), got [{int(index.min())}, {int(index.max())}]"
            )
        index = index.to(self.labels.device, torch.int64)
        return self._each(lambda array: array[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> ImageData:
        changed: dict[str, Any] = {}
        for name in ("images", "labels", "domains", "groups"):
            array = getattr(self, name)
            changed[name] = None if array is None else change(array)
        return replace(self, **changed)

    def origins(self) -> tuple[IntArray | None, IntArray | None]:
        """Returns `domains` and `groups` for `partition`, int64 [N] on the CPU."""
        domains, groups = (
            None if array is None else array.cpu().numpy() for array in (self.domains, self.groups)
        )
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
    _check_image_shape(tuple(x.shape), spec)
    y = _as_tensor(labels, f"{spec.name}: labels")
    domain_numbers = None if domains is None else _as_tensor(domains, f"{spec.name}: domains")
    group_numbers = None if groups is None else _as_tensor(groups, f"{spec.name}: groups")
    return ImageData(_to_uint8(x, spec), y, spec, domain_numbers, group_numbers)


def require_all_classes(data: ImageData) -> None:
    """Raises an error if a class has no training example.

    It reads exact counts, so it is only for runs without differential privacy.

    Raises:
        DataError: a class has no example; the message names the absent classes.
    """
    absent = (data.class_counts() == 0).nonzero().flatten().tolist()
    if absent:
        listed = ", ".join(f"{c} ({data.spec.class_names[c]})" for c in absent[:5])
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise DataError(
            f"{data.spec.name}: the training set has no example of class {listed}{more}"
        )


def normalise(
    images_uint8: Tensor, spec: DatasetSpec, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns (x/255 − mean)/std per channel: uint8 [N, C, H, W] → `dtype` [N, C, H, W] on the same
    device. The computation is in float32, whatever `dtype` is.

    Raises:
        DataError: the images are not uint8, or do not have the spec's number of channels.
    """
    if (
        images_uint8.dtype != torch.uint8
        or images_uint8.dim() != 4
        or images_uint8.shape[1] != spec.channels
    ):
        raise DataError(
            f"{spec.name}: normalise needs uint8 [N, {spec.channels}, H, W], "
            f"got {_dtype(images_uint8)} {list(images_uint8.shape)}"
        )
    mean, std = pixel_constants(spec, images_uint8.device)
    return images_uint8.float().div_(255).sub_(mean).div_(std).to(dtype)


def denormalise(x: Tensor, spec: DatasetSpec) -> Tensor:
    """Inverts `normalise`: floating point [N, C, H, W] → uint8 [N, C, H, W], clamped to [0, 255]
    and rounded.

    Raises:
        DataError: `x` is not floating point, does not have the spec's number of channels, or has
            NaN or infinite values.
    """
    if not x.is_floating_point() or x.dim() != 4 or x.shape[1] != spec.channels:
        raise DataError(
            f"{spec.name}: denormalise needs floating point [N, {spec.channels}, H, W], got "
            f"{_dtype(x)} {list(x.shape)}"
        )
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
    try:
        # A copy, so that later writes to the array do not change the data set.
        if isinstance(array, Tensor):
            return array.detach().clone()
        # C order and native byte order, as torch requires.
        return torch.from_numpy(
            np.array(array, dtype=np.asarray(array).dtype.newbyteorder("="), order="C")
        )
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{what} must be a NumPy array or a tensor of numbers: {reason}") from None


def _check_image_shape(shape: tuple[int, ...], spec: DatasetSpec) -> None:
    if len(shape) == 4 and shape[1:] == spec.image_shape:
        return
    c, h, w = spec.image_shape
    hint = "; channels come first: permute(0, 3, 1, 2)" if shape[1:] == (h, w, c) else ""
    grey = f" or [N, {h}, {w}]" if c == 1 else ""
    raise DataError(
        f"{spec.name}: images must have shape [N, {c}, {h}, {w}]{grey}, got {list(shape)}{hint}"
    )


def _checked_numbers(
    what: str, numbers: Tensor, length: int | None, spec: DatasetSpec, limit: int | None
) -> Tensor:
    """Returns numbers [length] in [0, most) as int64; None allows any length or any bound."""
    if numbers.dim() != 1 or (length is not None and len(numbers) != length):
        expected = "N" if length is None else length
        raise DataError(
            f"{spec.name}: {what} must have shape [{expected}], got {list(numbers.shape)}"
        )
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(f"{spec.name}: {what} must be integers, got {_dtype(numbers)}")
    wide = numbers.long()  # a too large uint64 becomes negative, and is then refused
    wrong = wide[(wide < 0) | (wide >= (limit if limit is not None else torch.inf))]
    if len(wrong):
        allowed = f"be in [0, {limit})" if limit is not None else "be at least 0"
        raise DataError(
            f"{spec.name}: {what} must {allowed}; {len(wrong)} are not, the first is "
            f"{int(wrong[0])}"
        )
    return wide


def _check_finite(x: Tensor, spec: DatasetSpec) -> None:
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise DataError(f"{spec.name}: {bad} of {x.numel()} pixel values are NaN or infinite")


def _to_uint8(x: Tensor, spec: DatasetSpec) -> Tensor:
    if x.dtype == torch.uint8:
        return x
    if not x.is_floating_point():
        raise DataError(
            f"{spec.name}: images must be uint8 or floating point in [0, 1], got {_dtype(x)}"
        )
    _check_finite(x, spec)
    outside = int(((x < 0) | (x > 1)).sum())
    if outside:
        raise DataError(
            f"{spec.name}: floating-point images must be in [0, 1]; {outside} of {x.numel()} "
            "values are not"
        )
    return (x.float() * 255).round().to(torch.uint8)
