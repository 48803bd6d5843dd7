"""Holds images with their labels, converts pixels to model inputs, and hashes records.

`ImageData` holds images as uint8 tensors. Sequences of tokens are images of one row. `normalise`
and `denormalise` convert between pixels and model inputs. `proxy_images` converts images from
another data set for FedDF's distillation. `record_digests` computes keyed record hashes that do not
depend on a record's index or owner. Without the key, a hash reveals nothing about its record. With
the key, anyone who has the record can compute its hash.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedsynth.data.registry import SEGMENTATION, DatasetSpec, custom_spec, in_order
from fedsynth.errors import DataError
from fedsynth.large_arrays import ROWS, converted, is_mapped, new_array, selected, some_rows
from fedsynth.seeding import torch_generator

IntArray = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]


MAX_CHANNELS = 4  # of a cube that counts as an image, not a volume
# The source in a derived specification.
DERIVED = "derived from the arrays"

Array = Tensor | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images with their labels and, optionally, domains and groups.

    The tensors are checked on creation. Labels, domains and groups are converted to int64 and moved
    to the images' device. `ImageData` objects compare by identity.

    Args:
        images: uint8 [N, C, H, W], or float32 in [0, 1] if the specification has bounds. Tokens are
            integers [N, 1, 1, T] in [0, vocabulary), with the type `stored_dtype`.
        labels: integers [N] in [0, classes), or masks [N, H, W] if the specification's task is
            segmentation. Masks are stored as uint8.
        spec: the specification of the images.
        domains: integers [N], the index of each image's domain in `spec.domains`. Only for data
            sets with domains, such as hospitals or styles.
        groups: integers [N] ≥ 0, the index of each image's writer, device or patient. Indices may
            be unused.
        may_be_empty: whether zero examples are allowed. Private runs allow an empty data set,
            because an error would reveal that a data owner has no examples.
        record_bytes: uint8 [N, B], the bytes by which ledgers recognise records: image file hashes,
            or float32 values before scaling. None uses the images' bytes.

    Raises:
        DataError: the shapes do not match each other or `spec`, the types are wrong, labels,
            domains or groups are out of range, or there are no examples.

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
    record_bytes: Tensor | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        expected = stored_dtype(spec)
        if self.images.dtype != expected:
            raise DataError(
                f"the images of {spec.name} must be {_text(expected)}, got "
                f"{_text(self.images.dtype)}. Use from_arrays to convert them"
            ).with_code("data.dtype")
        if spec.vocabulary and not _is_within(self.images, spec.vocabulary - 1):
            raise DataError(
                f"the tokens of {spec.name} must be in [0, {spec.vocabulary}), got values from "
                f"{int(self.images.min())} to {int(self.images.max())}. Correct them"
            ).with_code("data.tokens")
        if expected.is_floating_point and not _is_within(self.images, 1):
            raise DataError(
                f"some stored values of {spec.name} are outside [0, 1]. Use from_arrays, which "
                "scales values from `spec.bounds`"
            ).with_code("data.values")
        if self.images.dim() != 4 or self.images.shape[1:] != spec.image_shape:
            raise DataError(
                f"the images of {spec.name} must have the shape [N, C, H, W] with [C, H, W] = "
                f"{list(spec.image_shape)}, got {list(self.images.shape)}"
            ).with_code("data.shape")
        count = len(self.images)
        if not count and not self.may_be_empty:
            raise DataError(f"{spec.name} contains no examples. Pass at least one")
        limits = {"labels": spec.classes, "domains": len(spec.domains), "groups": math.inf}
        for what, limit in limits.items():
            numbers = getattr(self, what)
            if numbers is not None:
                shape = (count, *spec.label_shape) if what == "labels" else (count,)
                checked = _checked_numbers(what, numbers, shape, spec, limit)
                object.__setattr__(self, what, checked.to(self.images.device))

    def __repr__(self) -> str:
        # never shows the images themselves
        return f"ImageData({len(self)} images of {self.spec.name!r} on {self.labels.device})"

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> ImageData:
        """Returns the examples on `device`, without a copy if they are already there."""
        if self.images.device == self.labels.device == torch.device(device):
            return self
        return self._map(lambda array: array.to(device))

    def subset(self, indices: Array) -> ImageData:
        """Returns the examples at the given indices, in the given order.

        Args:
            indices: integers [M] in [0, N), which may repeat.

        Raises:
            DataError: `indices` is not a vector of integers in [0, N), or is empty.
        """
        index = torch.as_tensor(indices)
        index = _checked_numbers("indices", index, (index.numel(),), self.spec, len(self))
        index = index.to(self.labels.device)
        return self._map(lambda array: selected(array, index))

    def _map(self, change: Callable[[Tensor], Tensor]) -> ImageData:
        changed: dict[str, Any] = {}
        for name in ("images", "labels", "domains", "groups", "record_bytes"):
            array = getattr(self, name)
            if array is not None:
                changed[name] = change(array)
        return replace(self, **changed)

    def origins(self) -> tuple[IntArray | None, IntArray | None]:
        """Returns `domains` and `groups` as NumPy arrays, as `partition` expects them.

        Both arrays are int64 [N]. Missing domains or groups are None.
        """
        domains = self.domains.cpu().numpy() if self.domains is not None else None
        groups = self.groups.cpu().numpy() if self.groups is not None else None
        return domains, groups

    def class_counts(self) -> Tensor:
        """Counts each class's examples. With masks, counts each class's pixels.

        Returns int64 [classes], on the data's device.
        """
        return torch.bincount(self.labels.flatten(), minlength=self.spec.classes)


def from_arrays(
    images: Any,
    labels: Any = None,
    spec: DatasetSpec | None = None,
    domains: Any = None,
    groups: Any = None,
    *,
    bounds: tuple[float, float] | None = None,
) -> ImageData:
    """Builds `ImageData` from arrays, a PyTorch data set or a data frame.

    Args:
        images: [N, C, H, W] or [N, H, W, C], [N, H, W] for one channel, or [N, D] for one channel
            and height 1. Pixels are uint8, or floating point in [0, 1]. Floating-point pixels are
            rounded to 256 levels. If the specification has bounds, values may have any numeric
            type, and are clipped, because an error would reveal an outlier. With a vocabulary,
            `images` are tokens, integers [N, T]. A `torch.utils.data.Dataset` or `DataLoader` of
            pairs (image, label), or a data frame whose other columns are numbers, may replace the
            arrays. The columns' order counts, not their names: use the same order in every frame.
        labels: integers [N] in [0, classes), class names, or integer masks [N, H, W] for
            segmentation. For a data frame, a column name. None for a data set of pairs.
        spec: the specification that the images must match. None derives a specification from the
            arrays. Runs with differential privacy refuse derived ones, because they may reveal
            private facts.
        domains: each image's hospital, scanner or style, as integers [N] (indices in
            `spec.domains`), names, or a data-frame column. The partition `domain` makes each domain
            a client.
        groups: each image's writer, device or patient, as integers [N] ≥ 0, names, or a data-frame
            column. The partition `natural` makes each group a client.
        bounds: the smallest and the largest value, if `spec` is None.

    Raises:
        DataError: an array has a wrong type, shape or range, a pixel is NaN or infinite, or a name
            is not in the specification. The message gives the actual and expected values.

    >>> import numpy as np
    >>> from fedsynth.data.registry import dataset_spec
    >>> grey = np.full((2, 8, 8), 0.5)
    >>> data = from_arrays(grey, [3, 7], dataset_spec("digits"))
    >>> list(data.images.shape), int(data.images.max())
    ([2, 1, 8, 8], 128)
    >>> vectors = np.eye(3)
    >>> data = from_arrays(vectors, ["ill", "well", "ill"], domains=["a", "b", "b"], bounds=(-1, 1))
    >>> data.spec.class_names, data.labels.tolist(), data.domains.tolist()
    (('ill', 'well'), [0, 1, 0], [0, 1, 1])
    """
    if hasattr(images, "columns"):
        images, labels, domains, groups = _of_frame(images, labels, domains, groups)
    elif labels is None:
        if isinstance(images, DataLoader) and (groups is not None or domains is not None):
            raise DataError(
                "groups and domains cannot be matched to a DataLoader, whose order may change. "
                "Pass the loader's data set instead"
            )
        images, labels = _stacked(images)
    x = _as_tensor(images, "images")
    if spec is None:
        names = () if domains is None else in_order(_texts(domains, "domains"))
        facts = {"source": DERIVED, "train_size": max(1, len(x)), "bounds": bounds}
        if np.ndim(labels) == 3:
            facts["task"] = SEGMENTATION
            classes = tuple(map(str, range(max(2, int(np.max(np.asarray(labels), initial=0)) + 1))))
        else:
            classes = in_order(_texts(labels, "labels"))
        spec = custom_spec("arrays", image_shape_of(x.shape), classes, domains=names, **facts)
    if tuple(x.shape[1:]) != spec.image_shape and image_shape_of(x.shape) == spec.image_shape:
        if x.dim() == 4:
            x = converted(x.permute(0, 3, 1, 2), lambda rows: rows, x.dtype)
        x = x.reshape(len(x), *spec.image_shape)
    y = _positions(labels, spec.class_names, spec, "labels")
    data = ImageData(_scaled(x, spec), _as_tensor(y, "labels"), spec)
    if spec.bounds is not None:
        # -0.0 and 0.0 are the same value
        values = converted(x.flatten(1), lambda rows: rows.float() + 0.0, torch.float32)
        data = replace(data, record_bytes=values.view(torch.uint8))
    if domains is not None:
        domains = _positions(domains, spec.domains, spec, "domains")
        data = replace(data, domains=_as_tensor(domains, "domains"))
    if groups is not None:
        if not isinstance(groups, Tensor) and np.asarray(groups).dtype.kind in "UO":
            groups = np.unique(_texts(groups, "groups"), return_inverse=True)[1]
        data = replace(data, groups=_as_tensor(groups, "groups"))
    return data


def _stacked(dataset: Any) -> tuple[Any, Any]:
    """Stacks the examples of a PyTorch data set or `DataLoader` into an image and a label array."""
    images, labels = [], []
    try:
        for image, label in dataset:
            images.append(np.asarray(image))
            labels.append(np.asarray(label))
        types = sorted({str(image.dtype) for image in images})
        if len(types) > 1:  # stacking would convert some of them
            raise TypeError(f"the arrays have different types, {' and '.join(types)}")
        join = np.concatenate if isinstance(dataset, DataLoader) else np.stack
        return join(images), join(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            "the data set's items must be (array, label) pairs, with arrays of one shape and type: "
            f"{' '.join(str(error).split())}. Correct the items"
        ).with_code("data.pairs") from None


def _of_frame(frame: Any, *columns: Any) -> tuple[Any, ...]:
    """Splits a data frame into an array of features and arrays of the named columns.

    All other columns are features. Arrays in `columns` are returned unchanged.
    """
    names = [column for column in columns if isinstance(column, str)]
    for name in names:
        if name not in frame.columns:
            raise DataError(
                f"the column {name!r} is missing from the data frame. Name one of its columns: "
                f"{', '.join(map(str, frame.columns))}"
            ).with_code("data.column")
    repeated = [name for name, count in Counter(frame.columns).items() if count > 1]
    if repeated:
        raise DataError(
            f"the data frame contains several columns named {repeated[0]!r}. Rename or remove them"
        ).with_code("data.several_columns")
    features = frame[[name for name in frame.columns if name not in names]].to_numpy()
    return features, *(frame[c].to_numpy() if isinstance(c, str) else c for c in columns)


def _texts(values: Any, what: str) -> list[str]:
    """Converts integers or names to text.

    Raises:
        DataError: a value is neither, or is missing. As text, all missing names would be equal.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "biuUO":
        raise DataError(f"the {what} must be integers or text, got {array.dtype}")
    if array.dtype.kind in "UO":
        # NumPy converts the NaN in a list of text to the text "nan"
        names = values if isinstance(values, list | tuple) else array.tolist()
        for number, item in enumerate(names):
            if _is_missing(item):
                raise DataError(
                    f"the {what} have no value for example {number}, got {item!r}. Enter the "
                    "value, or remove the example"
                ).with_code("data.missing_name")
    return list(map(str, array.tolist()))


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    # pandas.NA is not comparable, and NaN is not equal to itself
    return value is None or type(value).__name__ == "NAType" or value != value


def _positions(values: Any, names: tuple[str, ...], spec: DatasetSpec, what: str) -> Any:
    """Converts names to their indices in `names`. Integers are returned unchanged."""
    is_text = not isinstance(values, Tensor) and np.asarray(values).dtype.kind in "UO"
    if not is_text and (spec.source != DERIVED or np.ndim(values) > 1):
        return values
    texts = _texts(values, what)
    unknown = sorted(set(texts).difference(names))
    if unknown:
        raise DataError(
            f"the {what} of {spec.name} must be among {', '.join(names) or 'none'}, got "
            f"{unknown[0][:100]!r}"
        ).with_code("data.unknown_label")
    positions = dict(zip(names, range(len(names)), strict=True))
    return np.array(list(map(positions.__getitem__, texts)), np.int64)


def image_shape_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns the shape (C, H, W) of one image, given the shape of an array of examples.

    Arrays contain vectors [N, D], images [N, H, W], [N, C, H, W] or [N, H, W, C] with 1 or 3
    channels, or time series [N, C, 1, L].

    Raises:
        DataError: the number of axes is wrong, or the examples are volumes.

    >>> image_shape_of((100, 28, 28, 3)), image_shape_of((100, 512))
    ((3, 28, 28), (1, 1, 512))
    """
    if len(shape) == 4 and shape[3] in (1, 3) and shape[1] not in (1, 3):
        return shape[3], shape[1], shape[2]
    if not 1 <= len(shape) <= 4:
        raise DataError(
            "examples must be vectors [N, D] or images [N, H, W], [N, C, H, W] or [N, H, W, C], "
            f"got {list(shape)}"
        ).with_code("data.shape")
    channels, height, width = (1, 1, 1, *shape[1:])[-3:]
    if channels == height == width > MAX_CHANNELS:
        raise DataError(
            f"the examples are volumes {list(shape[1:])}, not images. Select a slice with --slice "
            f"{height // 2} (data.slice), or pass x[:, {height // 2}]"
        ).with_code("data.volumes")
    return channels, height, width


def require_all_classes(data: ImageData) -> None:
    """Raises an error if a class has no training examples.

    Token classes are exempt, because rare characters occur in few texts. The check uses exact
    counts, so only runs without differential privacy may call it.

    Raises:
        DataError: a class has no examples. The message names one such class.
    """
    if data.spec.vocabulary:
        return
    absent = (data.class_counts() == 0).nonzero().flatten().tolist()
    if absent:
        raise DataError(
            f"the training set of {data.spec.name} contains no examples of {len(absent)} classes, "
            f"such as {data.spec.class_names[absent[0]]}. Add examples of each class"
        ).with_code("data.absent_classes")


def normalise(images_NCHW: Tensor, spec: DatasetSpec) -> Tensor:
    """Converts pixels to model inputs, (x − mean)/std for each channel.

    x is the pixel divided by 255, or the scaled value if the data set has bounds. Tokens are not
    changed. The result is float32, with the images' shape and device.

    Raises:
        DataError: the images' type does not match `stored_dtype`, or their channels do not match
            `spec`.
    """
    kind = stored_dtype(spec)
    _check_channels(images_NCHW, spec, _text(kind), images_NCHW.dtype == kind)
    if spec.vocabulary:
        return images_NCHW.float()
    mean, std = pixel_constants(spec, images_NCHW.device)
    if kind == torch.uint8:
        return images_NCHW.float().div_(255).sub_(mean).div_(std)
    return images_NCHW.sub(mean).div_(std)


def denormalise(x: Tensor, spec: DatasetSpec) -> Tensor:
    """Converts model inputs back to pixels (the inverse of `normalise`).

    Values are clamped to [0, 255] and rounded, or clamped to [0, 1] if the data set has bounds.

    Raises:
        DataError: `x` is not floating point, its channels do not match `spec`, or it contains NaN
            or infinite values.
    """
    _check_channels(x, spec, "floating point", x.is_floating_point())
    _check_finite(x, spec)
    mean, std = pixel_constants(spec, x.device)
    return to_stored(x.detach().float().mul(std).add_(mean), spec)


def pixel_constants(spec: DatasetSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the channels' means and standard deviations, for pixels in [0, 1].

    Both are float32 [1, C, 1, 1] on `device`. Do not change them, because they are cached.
    """
    return _constants(spec.mean, device), _constants(spec.std, device)


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Converts one constant per channel to a tensor [1, C, 1, 1], which is cached.

    Without the cache, copying to the GPU in each step would stall the training loop.
    """
    # a tensor created in inference mode could not be used by autograd later
    with torch.inference_mode(False):
        return torch.tensor(values, device=device).view(1, -1, 1, 1)


def stored_dtype(spec: DatasetSpec) -> torch.dtype:
    """Returns the dtype in which a data set's images are stored.

    Pixels are uint8, and values with `spec.bounds` are float32. Tokens are uint8, or int32 if there
    are more than 256 different ones.
    """
    if spec.vocabulary > 256:
        return torch.int32
    return torch.uint8 if spec.bounds is None else torch.float32


def to_stored(x_NCHW: Tensor, spec: DatasetSpec) -> Tensor:
    """Converts values in [0, 1] to the data set's storage type.

    Values outside [0, 1] are clamped. A value of 1 is the last token of a vocabulary.
    """
    x = x_NCHW.float().clamp(0, 1)
    if spec.vocabulary:
        return (x * (spec.vocabulary - 1)).round().to(stored_dtype(spec))
    if spec.bounds is not None:
        return x
    return (x * 255).round().to(torch.uint8)


def _is_within(x: Tensor, largest: int) -> bool:
    return not x.numel() or bool(x.min() >= 0 and x.max() <= largest)  # False for NaN


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_tensor(array: Array, what: str) -> Tensor:
    """Copies an array to a new tensor."""
    if isinstance(array, Tensor):
        return array.detach().clone()
    try:
        values = np.asarray(array)
        if is_mapped(values) and values.flags.c_contiguous:
            return torch.from_numpy(values)  # read from a file, so no caller can change it
        copy = new_array(values.shape, values.dtype)
        copy[...] = values
        return torch.from_numpy(copy)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the {what} cannot be converted to a tensor: {' '.join(str(error).split())}. Pass a "
            "NumPy array or a tensor of numbers"
        ).with_code("data.array") from None


def _checked_numbers(
    what: str, numbers: Tensor, shape: tuple[int, ...], spec: DatasetSpec, limit: float
) -> Tensor:
    """Checks the shape and range of labels, and converts them to int64 (masks to uint8)."""
    if numbers.shape != shape:
        raise DataError(
            f"the {what} of {spec.name} must have the shape {list(shape)}, got "
            f"{list(numbers.shape)}"
        ).with_code("data.label_shape")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(f"the {what} of {spec.name} must be integers, got {_text(numbers.dtype)}")
    are_masks = len(shape) > 1
    wide = numbers
    if not (are_masks and numbers.dtype == torch.uint8):  # which may be large
        wide = numbers.long()  # a too large uint64 becomes negative, and is then refused
    wrong = wide[(wide < 0) | (wide >= limit)]
    if len(wrong):
        raise DataError(
            f"{len(wrong)} {what} of {spec.name} are outside [0, {limit}), such as "
            f"{int(wrong[0])}. Correct them"
        ).with_code("data.label_range")
    return wide.to(torch.uint8) if are_masks else wide


def _check_channels(x: Tensor, spec: DatasetSpec, kind: str, is_kind: bool) -> None:
    if not is_kind or x.dim() != 4 or x.shape[1] != spec.channels:
        raise DataError(
            f"the images of {spec.name} must be {kind} [N, {spec.channels}, H, W], got "
            f"{_text(x.dtype)} {list(x.shape)}"
        ).with_code("data.shape")


def _check_finite(x: Tensor, spec: DatasetSpec) -> None:
    bad = sum(int((~torch.isfinite(rows)).sum()) for rows in some_rows(x))
    if bad:
        raise DataError(
            f"{bad} of {x.numel()} values of {spec.name} are NaN or infinite. Replace or remove "
            "them"
        ).with_code("data.finite")


def _scaled(x: Tensor, spec: DatasetSpec) -> Tensor:
    """Converts pixels, tokens or other values to the data set's storage type.

    With `spec.bounds`, values are clipped to the bounds and scaled to [0, 1].
    """
    if spec.vocabulary:
        tokens = _checked_numbers("tokens", x.flatten(), (x.numel(),), spec, spec.vocabulary)
        return tokens.view(x.shape).to(stored_dtype(spec))
    if spec.bounds is None and not x.is_floating_point():
        if x.dtype != torch.uint8:
            raise DataError(
                f"the pixels of {spec.name} must be uint8 or floating-point numbers in [0, 1], got "
                f"{_text(x.dtype)}. Convert them, or pass bounds=(lowest, highest)"
            ).with_code("data.dtype")
        return x
    _check_finite(x, spec)
    if spec.bounds is not None:
        low, high = spec.bounds
        # float32 first, so that a record has the same bytes whatever file it comes from
        return converted(
            x,
            lambda rows: rows.float().double().sub(low).div(high - low).clamp(0, 1),
            torch.float32,
        )
    outside = sum(int(((rows < 0) | (rows > 1)).sum()) for rows in some_rows(x))
    if outside:
        raise DataError(
            f"{outside} of {x.numel()} floating-point pixels of {spec.name} are outside [0, 1]. "
            "Rescale them, or set bounds in the specification"
        ).with_code("data.pixels")
    return converted(x, lambda rows: (rows.float() * 255).round(), torch.uint8)


DIGEST_BYTES = 16
_PURPOSE = b"fedsynth record"


def record_digests(
    data: ImageData,
    positions: IntArray,
    key: bytes,
    size: int = DIGEST_BYTES,
    *,
    labels: bool = True,
) -> npt.NDArray[np.uint8]:
    """Computes keyed hashes for the records at `positions`, uint8 [N, size].

    A hash is BLAKE2b (RFC 7693) over the image's bytes, row by row, or over `record_bytes`, and
    over the label if `labels` is true. It does not depend on the record's index, on other records
    or on the device.

    Args:
        data: the images and labels, on any device.
        positions: integers [N], the record indices.
        key: up to 64 bytes. Anyone who has the key can compute the hashes.
        size: the hash size, 1 to 64 bytes. With 16 bytes, two of 10⁶ records collide with a
            probability of about 10⁻²⁷.
        labels: whether the hash depends on the label.
    """
    chosen = np.asarray(positions, np.int64)
    digests = np.empty((len(chosen), size), np.uint8)
    empty = hashlib.blake2b(key=key, digest_size=size, person=_PURPOSE)
    for first in range(0, len(chosen), ROWS):
        chunk = data.subset(chosen[first : first + ROWS])
        stored = chunk.images if chunk.record_bytes is None else chunk.record_bytes
        pixels = stored.cpu().flatten(1).contiguous().view(torch.uint8).numpy()
        if labels:
            y = chunk.labels.reshape(len(chunk), -1).cpu().numpy()
            y = y.astype(y.dtype.newbyteorder("<"))
            pixels = np.concatenate([pixels, y.view(np.uint8)], axis=1)
        for row, record in enumerate(np.ascontiguousarray(pixels), start=first):
            hashed = empty.copy()
            hashed.update(record)
            digests[row] = np.frombuffer(hashed.digest(), np.uint8)
    return digests


NOISE = "noise"
NOISE_IMAGES = 10_000


def noise_images(spec: DatasetSpec, seed: int) -> ImageData:
    """Generates public images of uniform random noise.

    They depend only on the specification and the run's seed.
    """
    generator = torch_generator(seed, "noise proxy")
    pixels = torch.randint(
        256, (NOISE_IMAGES, *spec.image_shape), generator=generator, dtype=torch.uint8
    )
    return ImageData(
        to_stored(pixels / 255, spec), torch.zeros(NOISE_IMAGES, dtype=torch.int64), spec
    )


def proxy_images(data: ImageData, spec: DatasetSpec) -> ImageData:
    """Converts images to another data set's format, without their labels.

    Grey channels are repeated if `spec` has colours. Colour images become grey (ITU-R 601) if
    `spec` is grey. All images are then resized to `spec`'s size.

    Args:
        data: the images to convert.
        spec: the specification of the other data set.
    """
    converted = []
    for pixels in some_rows(data.images):
        x = pixels.float()
        if pixels.is_floating_point():
            x = x * 255
        if x.shape[1] == 3 and spec.channels == 1:
            x = (x * x.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
        if x.shape[1] != spec.channels:
            x = x.mean(dim=1, keepdim=True).expand(-1, spec.channels, -1, -1)
        if tuple(x.shape[2:]) != (spec.height, spec.width):
            x = F.interpolate(x, (spec.height, spec.width), mode="bilinear", antialias=True)
        if spec.bounds is None:
            x = x.round()
        converted.append(to_stored(x / 255, spec))
    return ImageData(torch.cat(converted), torch.zeros_like(data.labels), spec)
