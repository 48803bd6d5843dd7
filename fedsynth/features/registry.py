"""Finds feature maps by name, and registers custom feature maps.

A user registers a function that builds a `FeatureMap` for a given image shape, such as the
embedding of a hospital's encoder. Settings name custom and built-in maps in the same way. Every
party in a run has to register the same map. The map is public, like an architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.errors import FedsynthError, SettingError, one_line, unknown_name
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.random_process import (
    MIN_SIDE,
    deskewed_pair,
    mirrored_pair,
    random_process,
    scattering_and_random_process,
    whitened_pair,
)
from fedsynth.features.scattering import MIN_SIDE as SCATTERING_SIDE
from fedsynth.features.scattering import scattering, whitened_scattering
from fedsynth.own_code import load_own, names_code, unloaded_file
from fedsynth.privacy.batch_independence import ADVICE, StepInputs, dependence_on_batch
from fedsynth.seeding import forked_rng


def pixels(shape: Shape) -> FeatureMap:
    """Returns the simplest feature map: the image's pixels minus mid-grey.

    The norm is at most √d/2, because each coordinate is in [−½, ½]. The distance from the mean is
    about 0.3·√d for images with strong contrast, and up to ½·√d.

    >>> pixels((1, 8, 8)).norm_bound
    4.0
    """
    size = math.prod(shape)
    return FeatureMap(
        name="pixels",
        image_shape=shape,
        dimension=size,
        norm_bound=math.sqrt(size) / 2,
        radius=0.3 * math.sqrt(size),
        source="pixels are in [0, 1]: analytic",
        function=about_grey,
    )


def about_grey(x_NCHW: Tensor) -> Tensor:
    """Returns pixels minus mid-grey, as vectors [N, C·H·W] with values in [−½, ½]."""
    return x_NCHW.flatten(1) - 0.5


def unit_norm(shape: Shape) -> FeatureMap:
    """Returns a feature map that centres vectors and scales them to norm 1.

    The middle of the value range is subtracted first. Embeddings are usually compared by direction,
    so the map suits encoder outputs. The norm is at most 1, so clipping to 1 never changes the
    features.

    >>> unit_norm((1, 1, 2))(torch.tensor([[[[0.5 + 0.3, 0.5 - 0.4]]]])).tolist()
    [[0.6000000238418579, -0.800000011920929]]
    """
    return FeatureMap(
        name="unit-norm",
        image_shape=shape,
        dimension=math.prod(shape),
        norm_bound=1.0,
        radius=1.0,
        source="vectors of norm 1: analytic",
        function=lambda x_NCHW: F.normalize(about_grey(x_NCHW), dim=1),
    )


# A function that builds a map for an image shape (channels, height, width).
Builder = Callable[[Shape], FeatureMap]

_BUILT_IN: dict[str, Builder] = {
    "pixels": pixels,
    "unit-norm": unit_norm,
    "scattering": scattering,
    "random-process": random_process,
    "scattering+random-process": scattering_and_random_process,
    "whitened-scattering": whitened_scattering,
    "whitened-scattering+random-process": whitened_pair,
    "mirrored-scattering+random-process": mirrored_pair,
    "deskewed-scattering+random-process": deskewed_pair,
}
_CUSTOM: dict[str, Builder] = {}


def feature_names() -> tuple[str, ...]:
    """Returns the names of all built-in and registered feature maps.

    >>> "pixels" in feature_names()
    True
    """
    return (*_BUILT_IN, *_CUSTOM)


def features_for(shape: Shape) -> str:
    """Returns the default feature map's name for a given image shape.

    The defaults were chosen on held-out training images.

    >>> features_for((1, 1, 512))
    'unit-norm'
    >>> features_for((3, 32, 32))
    'mirrored-scattering+random-process'
    >>> features_for((1, 28, 28)), features_for((1, 8, 8))
    ('whitened-scattering+random-process', 'whitened-scattering')
    >>> features_for((1, 7, 9))
    'pixels'
    """
    if shape[:2] == (1, 1):
        return "unit-norm"
    if min(shape[1:]) < SCATTERING_SIDE:
        return "pixels"
    if shape[0] not in (1, 3) or min(shape[1:]) < MIN_SIDE:
        return "whitened-scattering"
    kind = "mirrored" if shape[0] == 3 else "whitened"
    return f"{kind}-scattering+random-process"


def is_own_features(name: str) -> bool:
    """Returns True if `name` is a registered custom feature map."""
    return name in _CUSTOM


def feature_map(name: str, shape: Shape) -> FeatureMap:
    """Returns the named feature map for a given image shape.

    Raises:
        UnknownNameError: no map has this name. The error lists similar names.
        SettingError: the map does not support the image shape, or a custom map mixes examples.

    >>> feature_map("pixels", (1, 28, 28)).dimension
    784
    """
    with torch.inference_mode(False):  # cached, and also used with autograd
        return _build(name, shape)


@cache
def _build(name: str, shape: Shape) -> FeatureMap:
    """Builds a feature map, or returns the cached one for the same name and image shape."""
    if name in _CUSTOM:
        return _build_custom(name, shape)
    if name not in _BUILT_IN:
        refuse_unknown_map(name, "method")
    return _BUILT_IN[name](shape)


def refuse_unknown_map(
    name: str, section: str, *other_names: str, key: str = "features"
) -> NoReturn:
    """Raises the error for an unknown feature map's name.

    For custom code, the error states how to load it.

    Args:
        name: the value of the setting.
        section, key: the setting, see `SettingError`.
        other_names: further allowed values besides map names.
    """
    if not names_code(name):
        names = (*other_names, *feature_names())
        raise unknown_name("feature map", name, names, section, key)
    raise unloaded_file(section, key, name)


@dataclass(eq=False)
class _CheckedFunction:
    """A wrapper that tests a custom feature map's function before its first use on a device.

    The test uses public images. It makes sure that an image's vector depends only on the image
    itself, not on others in the batch.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    checked_devices: set[torch.device] = field(default_factory=set)

    def __call__(self, pixels_NCHW: Tensor) -> Tensor:
        _, channels, height, width = pixels_NCHW.shape
        self.check(pixels_NCHW.device, (channels, height, width))
        return self.function(pixels_NCHW)

    def check(self, device: torch.device, shape: Shape) -> None:
        if device in self.checked_devices:
            return
        inputs = StepInputs(shape, device)
        finding = dependence_on_batch(lambda x, y: self.function(x), inputs)
        if finding:
            reason = f"{finding}, so the influence of one example is not bounded. {ADVICE}"
            raise _refused(self.name, f"the map's function {reason}")
        self.checked_devices.add(device)


def _build_custom(name: str, shape: Shape) -> FeatureMap:
    """Builds a custom feature map twice, and returns the first copy.

    Both copies are tested before any ledger is charged, since every party and every resumed run
    builds the map again.

    Raises:
        SettingError: the registered function fails, does not return a map for the shape, or returns
            a different map at the second call. Or an image's vector depends on other images.
    """
    built, copy = _call_builder(name, shape), _call_builder(name, shape)
    constants = [entry.name for entry in fields(FeatureMap) if entry.name != "function"]
    for constant in constants:
        if getattr(built, constant) != getattr(copy, constant):
            reason = f"the registered function returns another {constant} at each call"
            raise _refused(name, f"{reason}. Return a constant")
    images = torch.linspace(0, 1, 2 * math.prod(shape)).view(2, *shape)
    function = _CheckedFunction(name, built.function)
    try:
        vectors = built(images)  # checks its output
        function.check(torch.device("cpu"), shape)
        if not torch.allclose(vectors, copy(images), rtol=1e-3, atol=1e-5, equal_nan=True):
            reason = "the registered function returns a different map at each call, such as random"
            raise _refused(name, f"{reason} weights. Load the weights from a file")
    except (RuntimeError, AssertionError, NotImplementedError):
        pass  # the map may need another device, where it is checked before its first use
    return replace(built, name=name, function=function)


def _call_builder(name: str, shape: Shape) -> FeatureMap:
    """Calls the registered function with torch's global generator in a fixed state."""
    try:
        with forked_rng(0, "feature map"):
            built: object = _CUSTOM[name](shape)
    except (FedsynthError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {one_line(error)}"
        reason = f"the registered function failed for the image shape {shape} with {cause}"
        raise _refused(name, reason) from error
    if not isinstance(built, FeatureMap):
        reason = f"the registered function returned {type(built).__name__}"
        raise _refused(name, f"{reason}. Return a fedsynth.features.FeatureMap")
    if built.image_shape != shape:
        reason = (
            f"the map is for images of shape {built.image_shape}, but the data set contains images "
            f"of shape {shape}. Return a map for the given shape"
        )
        raise _refused(name, reason)
    return built


def _refused(name: str, reason: str) -> SettingError:
    return SettingError("method", "features", f"{name!r} cannot be used: {reason}")


def register_file(setting: str, section: str = "method", key: str = "features") -> str:
    """Registers a feature map from a Python file.

    Returns the map's name for settings, `FILE.py:NAME@HASH`.

    Args:
        setting: the file and its function that builds the map, `FILE.py:NAME`. The file is
            executed.
        section, key: the setting with this value, for error messages.

    Raises:
        SettingError: the file cannot be read or executed, or does not define the name.
    """
    build, label = load_own(section, key, setting)
    register_features(label, build)
    return label


def register_features(name: str, build: Builder) -> None:
    """Registers a custom feature map, so that settings in this process can use its name.

    An earlier custom map of the same name is replaced. The map returned by `build` is checked and
    renamed when a run first needs it.

    Args:
        name: the map's name in settings and reports, which no built-in map may have.
        build: returns the map for an image shape. The map's function and constants must not depend
            on private data.

    Raises:
        SettingError: a built-in map has the name.

    >>> register_features("mean-grey", lambda shape: FeatureMap(
    ...     "mean-grey", shape, 1, 1.0, 0.5, "pixels are in [0, 1]",
    ...     lambda x: x.mean(dim=(1, 2, 3))[:, None]))
    >>> feature_map("mean-grey", (1, 8, 8)).dimension
    1
    """
    if name in _BUILT_IN:
        reason = f"must not be a built-in feature map's name, got {name!r}. Choose another name"
        raise SettingError(None, "name", reason)
    _CUSTOM[name] = build
    _build.cache_clear()
