"""Feature maps by name: one line each, and those that a user registers in this process.

A map of one's own is a function from an image shape to a `FeatureMap`, with constants of one's own:
the embeddings of a hospital's encoder, say. Settings then name it like the others. Whoever joins a
run has to register the same map: it is public, as an architecture is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import NoReturn

import torch
from torch import Tensor

from fedsynth.data.files import one_line
from fedsynth.errors import FedsynthError, SettingError, unknown_name
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.random_process import LEAST
from fedsynth.own_code import OwnCode, given_again, is_label, load_own
from fedsynth.privacy.batch_independence import ADVICE, dependence_on_batch

Builder = Callable[[Shape], FeatureMap]
"""(channels, height, width) of the images -> their map."""

_BUILT_IN = {
    "pixels": "fedsynth.features.pixels:pixels",
    "scattering": "fedsynth.features.scattering:scattering",
    "random-process": "fedsynth.features.random_process:random_process",
    "scattering+random-process": ("fedsynth.features.random_process:scattering_and_random_process"),
    "whitened-scattering": "fedsynth.features.scattering:whitened_scattering",
    "whitened-scattering+random-process": "fedsynth.features.side_by_side:whitened_pair",
    "mirrored-scattering+random-process": "fedsynth.features.side_by_side:mirrored_pair",
}
_OWN: dict[str, tuple[Builder, OwnCode | None]] = {}
_MADE: dict[tuple[str, Shape], FeatureMap] = {}
"""A name means one object, as long as it means one map: vectors are kept by it."""


def feature_names() -> tuple[str, ...]:
    """The names that `feature_map` knows.

    >>> "pixels" in feature_names()
    True
    """
    return (*_BUILT_IN, *_OWN)


def features_for(shape: Shape) -> str:
    """The default for images of this shape, found on held-out training images.

    >>> features_for((3, 32, 32))
    'mirrored-scattering+random-process'
    >>> features_for((1, 28, 28)), features_for((1, 8, 8))
    ('whitened-scattering+random-process', 'whitened-scattering')
    """
    if shape[0] not in (1, 3) or min(shape[1:]) < LEAST:
        return "whitened-scattering"
    kind = "mirrored" if shape[0] == 3 else "whitened"
    return f"{kind}-scattering+random-process"


def is_own_features(name: str) -> bool:
    """Whether the map of this name comes from outside the package."""
    return name in _OWN


def features_source(name: str) -> OwnCode | None:
    """The file that a map of one's own was loaded from; None: from none."""
    return _OWN[name][1] if name in _OWN else None


def feature_map(name: str, shape: Shape) -> FeatureMap:
    """The map with this name for images of this shape.

    Raises:
        UnknownNameError: no such map; names the near matches.
        SettingError: the map cannot take such images, or one of one's own mixes examples.

    >>> feature_map("pixels", (1, 28, 28)).dimension
    784
    """
    if (name, shape) not in _MADE:
        _MADE[name, shape] = _made(name, shape)
    return _MADE[name, shape]


def _made(name: str, shape: Shape) -> FeatureMap:
    if name in _OWN:
        return _checked(name, shape)
    if name not in _BUILT_IN:
        refuse_unknown_map(name, "method")
    module, _, function = _BUILT_IN[name].partition(":")
    build: Builder = getattr(import_module(module), function)
    return build(shape)


def refuse_unknown_map(name: str, section: str, *others: str) -> NoReturn:
    """The error of a name that is no map's, or of a file that has to be named again.

    Args:
        name: what the setting `features` says.
        section: whose setting it is, "method" or "model".
        others: what it may say beside names of maps.
    """
    if not is_label(name):
        known = (*others, *feature_names())
        raise unknown_name("feature map", name, known, section, "features")
    raise given_again(section, "features", name, _OWN, "fedsynth.features.register_file")


@dataclass(eq=False)
class _EachAlone:
    """A function of one's own, tried on public images on each device before it gets others
    there."""

    name: str
    function: Callable[[Tensor], Tensor]
    tried: set[torch.device] = field(default_factory=set)

    def __call__(self, pixels_NCHW: Tensor) -> Tensor:
        _, channels, height, width = pixels_NCHW.shape
        self.try_on(pixels_NCHW.device, (channels, height, width))
        return self.function(pixels_NCHW)

    def try_on(self, device: torch.device, shape: Shape) -> None:
        if device in self.tried:
            return
        finding = dependence_on_batch(self.function, shape, device)
        if finding:
            reason = f"its function {finding}, so one example's influence has no bound: {ADVICE}"
            raise _refused(self.name, reason)
        self.tried.add(device)


def _checked(name: str, shape: Shape) -> FeatureMap:
    """Returns a registered map with a function that refuses to mix examples.

    What the map is for, and what it makes of some images, is checked before any ledger is charged.

    Raises:
        SettingError: the builder fails, or makes something else than a map for such images.
    """
    try:
        own: object = _OWN[name][0](shape)
    except (FedsynthError, MemoryError):
        raise
    except Exception as error:
        reason = f"fails for images of shape {shape}: {type(error).__name__}: {one_line(error)}"
        raise _refused(name, reason) from error
    if not isinstance(own, FeatureMap):
        reason = f"what was registered makes {type(own).__name__}, and should make a "
        raise _refused(name, f"{reason}fedsynth.features.FeatureMap of an image shape")
    if own.image_shape != shape:
        reason = f"its map is for images of shape {own.image_shape}, and these are {shape}"
        raise _refused(name, reason)
    function = _EachAlone(name, own.function)
    try:
        pixels = torch.linspace(0, 1, 2 * math.prod(shape)).view(2, *shape)
        own(pixels)  # raises where it makes another thing than it declares
        function.try_on(torch.device("cpu"), own.image_shape)
    except (RuntimeError, AssertionError, NotImplementedError):
        pass  # it may want another device: there it is tried before it gets its first images
    return replace(own, name=name, function=function)


def _refused(name: str, reason: str) -> SettingError:
    return SettingError("method", "features", f"{name!r}: {reason}")


def register_file(given: str, section: str = "method") -> str:
    """Makes the map of a file known: its name for settings, `FILE.py:NAME@HASH`.

    Args:
        given: `FILE.py:NAME`; the file is executed.
        section: whose setting names it, for errors.

    Raises:
        SettingError: as `load_own` and `register_features`.
    """
    build, source = load_own(section, "features", given)
    register_features(source.label, build, source)
    return source.label


def register_features(name: str, build: Builder, source: OwnCode | None = None) -> None:
    """Makes a map of one's own known by a name, in this process; an earlier one of one's own with
    that name is replaced.

    Args:
        name: for settings and reports; not that of a map of the package.
        build: from an image shape to the map, whose function and constants must not come from
            private data.
        source: the file that it comes from, where it was loaded from one.

    Raises:
        SettingError: the name is that of a map of the package, or `build` is no function. What
            `build` makes is looked at when a run first needs it; there it has the registered name.

    >>> register_features("mean-grey", lambda shape: FeatureMap(
    ...     "mean-grey", shape, 1, 1.0, 0.5, "pixels are in [0, 1]",
    ...     lambda x: x.mean(dim=(1, 2, 3))[:, None]))
    >>> feature_map("mean-grey", (1, 8, 8)).dimension
    1
    """
    if name in _BUILT_IN:
        raise SettingError(
            None, "name", f"of own features cannot be {name!r}: the package has a map of that name"
        )
    if not callable(build):
        raise SettingError(
            None,
            "build",
            f"of own features must be a function from an image shape to a FeatureMap, got "
            f"{type(build).__name__}",
        )
    _OWN[name] = (build, source)
    for made in [one for one in _MADE if one[0] == name]:
        del _MADE[made]
