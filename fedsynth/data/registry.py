"""The data sets known by name. The module does not import torch, so that `--help` is fast.

Every value in a published data set's `DatasetSpec` is a published constant from datasets.toml. No
value is computed from the examples, so runs with differential privacy may use all of them. For
example, they divide by the training set's size, and normalise by mean and standard deviation.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

from pydantic import ConfigDict, TypeAdapter

from fedsynth.errors import SettingError, faults_as, short_repr, unknown_name

MAX_NAME = 200
MAX_BOUND = 1e30  # of floating-point values, so that float32 does not overflow
# The tasks: an image's label is a class, or a mask with a class for each pixel.
CLASSIFICATION, SEGMENTATION = "classification", "segmentation"
MAX_MASK_CLASSES = 255  # masks are stored as bytes
MAX_VOCABULARY = 2**24  # float32, the network input type, represents all such tokens exactly
# Default pixel mean and standard deviation, for pixels in [0, 1]. Constants, because a mean
# computed from the images would reveal exact information about them.
MEAN, STD = 0.5, 0.25

_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class DatasetSpec:
    """A data set's shape, sizes and constants.

    To use custom images, pass their specification to `from_arrays`.

    Args:
        name: the name in reports and file names.
        channels: the number of channels C in an image [C, H, W].
        height: the image height H in pixels.
        width: the image width W in pixels.
        classes: the number of classes.
        train_size: the published number of training examples, never read from the data.
        test_size: the published number of test examples, never read from the data.
        mean: the mean of each channel, for pixels in [0, 1].
        std: the standard deviation of each channel, for pixels in [0, 1].
        class_names: the class names.
        source: the origin of the data.
        domains: the domain names, if the data set has domains.
        groups: the published number of writers or devices, or 0 if unknown. It determines a
            writer's nominal number of examples.
        bounds: the smallest and the largest value of floating-point data, such as embeddings or
            time series. fedsynth stores them as float32, scaled to [0, 1] by these bounds. Bounds
            are public, so they must not be computed from the data. Byte images have none.
        encoder: a description of the encoder that computed the data, with a hash of its weights.
            Empty for other data.
        encoded_shape: the shape (C, H, W) of the encoder's input images.
        window: the centre and width of the level range shown from black to white, for image files
            with more than 8 bits. None takes the window in each file.
        slice: the index of the slice in a volume or the frame in a file, from 0. −1 takes the
            middle one.
        task: "classification", or "segmentation" if labels are masks [H, W] of classes.
        vocabulary: the number of different tokens (characters or words) in token sequences, and 0
            for other data. The shape is (1, 1, T) for sequences of length T. Network inputs are the
            tokens themselves, from 0 to `vocabulary` - 1.
        features: the column names of a table's values, in their order. Empty for other data.

    Raises:
        SettingError: a size is not positive, the window has no width, constants or names do not
            match `channels` and `classes`, or a name is not printable.

    >>> sizes = {"channels": 3, "height": 32, "width": 32, "train_size": 5000, "test_size": 500}
    >>> half = (0.5, 0.5, 0.5)
    >>> two = {"classes": 2, "class_names": ("healthy", "ill")}
    >>> spec = DatasetSpec("scans", **sizes, **two, mean=half, std=half, source="our clinic")
    >>> spec.image_shape
    (3, 32, 32)
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    channels: int
    height: int
    width: int
    classes: int
    train_size: int
    test_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    source: str
    domains: tuple[str, ...] = ()
    groups: int = 0
    bounds: tuple[float, float] | None = None
    encoder: str = ""
    encoded_shape: tuple[int, int, int] | None = None
    window: tuple[float, float] | None = None
    slice: int = -1
    task: str = CLASSIFICATION
    vocabulary: int = 0
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (self.name, *self.class_names, *self.domains, *self.features)
        for name in names:  # in reports and config.toml
            if not (0 < len(name) <= MAX_NAME and name.isprintable()):
                reason = f"of a data set, class, domain or feature must have 1 to {MAX_NAME} "
                raise SettingError(
                    None, "name", f"{reason}printable characters, got {short_repr(name)}"
                )
        for field in ("channels", "height", "width", "classes", "train_size", "test_size"):
            value = getattr(self, field)
            if value < 1:
                self._refuse(field, "must be at least 1", value)
        for field in ("mean", "std"):
            values = getattr(self, field)
            if len(values) != self.channels:
                rule = f"must have one number for each of {self.channels} channels"
                self._refuse(field, rule, values)
            if not all(map(math.isfinite, values)):
                self._refuse(field, "must be finite", values)
        if min(self.std) <= 0:
            self._refuse("std", "must be positive", self.std)
        if self.bounds is not None:
            values = tuple(map(float, self.bounds))
            object.__setattr__(self, "bounds", values)
            if len(values) != 2 or not -MAX_BOUND <= values[0] < values[1] <= MAX_BOUND:
                rule = f"must be two ascending numbers within ±{MAX_BOUND:g}"
                self._refuse("bounds", rule, values)
        if self.window is not None:
            center, width = self.window
            if not (abs(center) <= MAX_BOUND and 0 < width <= MAX_BOUND):
                self._refuse("window", "must be a centre and a positive width", self.window)
        if self.slice < -1:
            self._refuse("slice", "must be at least -1", self.slice)
        if self.task not in (CLASSIFICATION, SEGMENTATION):
            rule = f"must be {CLASSIFICATION!r} or {SEGMENTATION!r}"
            self._refuse("task", rule, self.task)
        if self.has_masks and self.classes > MAX_MASK_CLASSES:
            rule = f"must be at most {MAX_MASK_CLASSES} for masks"
            self._refuse("classes", rule, self.classes)
        if not 0 <= self.vocabulary <= MAX_VOCABULARY:
            self._refuse("vocabulary", f"must be in [0, {MAX_VOCABULARY}]", self.vocabulary)
        if self.vocabulary and (self.bounds or self.has_masks or self.image_shape[:2] != (1, 1)):
            rule = "requires the shape (1, 1, T) without bounds or masks"
            self._refuse("vocabulary", rule, self.vocabulary)
        if len(self.class_names) != self.classes:
            rule = f"must have one name for each of {self.classes} classes"
            self._refuse("class_names", rule, self.class_names)

    def _refuse(self, field: str, rule: str, value: object) -> NoReturn:
        raise SettingError(
            None, field, f"of data set {short_repr(self.name)} {rule}, got {short_repr(value)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, with lists in place of tuples.

        Bounds, encoder, window, slice, vocabulary and features are left out if unset, and the task
        if it is classification.
        """
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for name in ("bounds", "encoder", "encoded_shape", "window", "slice", "task"):
            if values[name] in (None, "", -1, CLASSIFICATION):
                del values[name]
        for name in ("vocabulary", "features"):
            if not values[name]:
                del values[name]
        return values

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns (channels, height, width)."""
        return self.channels, self.height, self.width

    @property
    def has_masks(self) -> bool:
        """True if labels are masks with a class for each pixel."""
        return self.task == SEGMENTATION

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of an image's label: () for a class, (height, width) for a mask."""
        return (self.height, self.width) if self.has_masks else ()

    @property
    def can_be_drawn(self) -> bool:
        """True for grey or colour images, False for vectors or other arrays."""
        return self.channels in (1, 3) and min(self.height, self.width) > 1

    @property
    def examples(self) -> str:
        """The word for examples in messages: "images", or "examples" if they are not images."""
        return "images" if self.can_be_drawn else "examples"


def custom_spec(
    name: str, image_shape: tuple[int, int, int], class_names: Iterable[str], **facts: Any
) -> DatasetSpec:
    """Creates a specification for custom images.

    `facts` are further fields of `DatasetSpec`. Mean and standard deviation have defaults.
    """
    channels, height, width = image_shape
    names = tuple(class_names)
    defaults = {
        "classes": len(names),
        "train_size": 1,
        "test_size": 1,
        "mean": (MEAN,) * channels,
        "std": (STD,) * channels,
    }
    return DatasetSpec(name, channels, height, width, class_names=names, **{**defaults, **facts})


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Removes duplicate names and sorts the rest. If all are numbers, sorts by value."""
    distinct = sorted(set(names))
    if all(map(_WHOLE_NUMBER.fullmatch, distinct)):
        distinct.sort(key=int)
    return tuple(distinct)


def as_spec(images: DatasetSpec | tuple[int, int, int]) -> DatasetSpec:
    """Converts an image shape (C, H, W) to a specification.

    Returns a specification unchanged. For a shape, network inputs are pixels in [0, 1] without
    normalisation.

    >>> as_spec((1, 28, 28)).image_shape
    (1, 28, 28)
    """
    if isinstance(images, DatasetSpec):
        return images
    C = images[0]
    return custom_spec("images", images, "0", mean=(0.0,) * C, std=(1.0,) * C, source="tensors")


def spec_from_json(stated: Mapping[str, Any]) -> DatasetSpec:
    """Builds a specification from JSON or TOML values.

    Raises:
        TypeError, ValueError, SettingError: the specification is invalid.
    """
    with faults_as(ValueError, "the specification of a data set is invalid"):
        return TypeAdapter(DatasetSpec).validate_json(json.dumps(stated), strict=True)


class Download(NamedTuple):
    """The download source of a published data set.

    Attributes:
        instructions: a text on where to get the files, and where to put them.
        torchvision: the torchvision class that downloads the files, or an empty string.
        variants: the arguments for each call of the torchvision class.
    """

    instructions: str
    torchvision: str
    variants: list[list[str]]


DOWNLOADS: dict[str, Download] = {}


def _published_specs() -> list[DatasetSpec]:
    """Reads the specifications in datasets.toml."""
    text = (files("fedsynth.data") / "datasets.toml").read_text(encoding="utf-8")
    specs = []
    for values in tomllib.loads(text)["dataset"]:
        command = f"fedsynth partition --dataset {values['name']} --data-root DIR --download"
        defaults: tuple[Any, ...] = (f"Run `{command}`, or pass download=True", "", [[]])
        DOWNLOADS[values["name"]] = Download(*map(values.pop, Download._fields, defaults))
        if isinstance(values["class_names"], str):  # a template for numbered classes
            template = values["class_names"]
            values["class_names"] = list(map(template.format, range(values["classes"])))
        for name in ("mean", "std"):
            if len(values[name]) == 1:  # of all channels
                values[name] *= values["channels"]
        specs.append(spec_from_json(values))
    return specs


# α and β in synthetic(α,β): only numbers that `{:g}` reproduces exactly, so that a run's config
# names its data set exactly.
_NUMBER = r"([0-9]{1,2}(?:\.[0-9]{1,4})?)"
_SYNTHETIC = re.compile(rf"synthetic\( *(?:iid|{_NUMBER} *, *{_NUMBER}) *\)")


def synthetic_parameters(name: str) -> tuple[float, float] | tuple[None, None] | None:
    """Parses (α, β) from a synthetic data set's name, such as `synthetic(1,1)`.

    Returns (None, None) for `synthetic(iid)`, and None for other data sets.
    """
    match = _SYNTHETIC.fullmatch(name)
    if match is None:
        return None
    if match[1] is None:
        return None, None
    return float(match[1]), float(match[2])


def _synthetic_spec(alpha: float | None, beta: float | None) -> DatasetSpec:
    """Returns a FedProx synthetic data set's specification.

    `fedsynth.data.load` generates the data. Device sizes are the same for all α and β.
    """
    iid = _PUBLISHED["synthetic(iid)"]
    if alpha is None or beta is None:
        return iid
    deviation = math.sqrt(beta**2 + 2)  # of the first feature over all devices
    std = (1 / (2 * (4 * deviation)),)  # pixels reach four deviations
    return replace(iid, name=f"synthetic({alpha:g},{beta:g})", std=std)


_PUBLISHED = {spec.name: spec for spec in _published_specs()}
_ENCODED = (
    "channels", "height", "width", "mean", "std", "bounds", "encoder", "encoded_shape"
)  # fmt: skip
DEFAULT_DATASET = "digits"
# Published data sets of which some images are the same. Digits-Five has images of MNIST and SVHN,
# CINIC-10 has those of CIFAR-10 and reduced ones of ImageNet, and the others are made from the
# forms of NIST Special Database 19.
_SHARED_IMAGES = (
    {"digits-five", "svhn"},
    {"digits-five", "mnist", "femnist"},
    {"emnist-letters", "femnist"},
    {"cinic10", "cifar10"},
    {"cinic10", "tiny-imagenet"},
)
_SYNTHETIC_SPECS = (_synthetic_spec(alpha, alpha) for alpha in (0.0, 0.5, 1.0))
# The specifications by name, with only the paper's synthetic(α,β). `dataset_spec` accepts all
# numbers from 0 to 99.9999.
DATASETS: Mapping[str, DatasetSpec] = MappingProxyType(
    _PUBLISHED | {spec.name: spec for spec in _SYNTHETIC_SPECS}
)


def is_known(name: str) -> bool:
    """Returns True if `name` names a published data set."""
    return name in DATASETS or synthetic_parameters(name) is not None


def share_images(name: str, other: str) -> bool:
    """Returns True if two named data sets have images in common.

    Data sets with different names are compared only if both are published.

    >>> share_images("digits-five", "mnist"), share_images("cifar10", "cifar100")
    (True, False)
    """
    return name == other or any({name, other} <= names for names in _SHARED_IMAGES)


def is_published(spec: DatasetSpec) -> bool:
    """Returns True for published data sets, whose records are public.

    An encoder's vectors for published images are published, too.
    """
    return is_known(spec.name) and published_spec(spec) == spec


def published_spec(spec: DatasetSpec) -> DatasetSpec:
    """Returns the specification of the published data set with the same name as `spec`.

    For encoded data, fields determined by the encoder are taken from `spec`.

    Raises:
        UnknownNameError: no data set has this name.
    """
    published = dataset_spec(spec.name)
    if spec.encoded_shape != published.image_shape:
        return published
    return replace(published, **{name: getattr(spec, name) for name in _ENCODED})


def dataset_spec(name: str) -> DatasetSpec:
    """Returns the specification of a named data set.

    The name is one of `DATASETS`, or `synthetic(α,β)` with up to four decimals.

    Raises:
        UnknownNameError: no data set has this name. The message suggests similar names.
    """
    parameters = synthetic_parameters(name)
    if parameters is not None:
        return _synthetic_spec(*parameters)
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS, "data", "dataset")
    return DATASETS[name]
