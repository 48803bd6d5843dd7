"""Architectures by name, and their reproducible initialisation.

An architecture is an `nn.Module` from normalised images [N, C, H, W] to logits; methods that use
its embedding need `embed` (everything before the last linear layer) and `classifier` (that layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError, unknown_name, unknown_value
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import feature_map, feature_names, refuse_unknown_map
from fedsynth.models.alexnet import AlexNet
from fedsynth.models.convnet import NORMS, ConvNet
from fedsynth.models.googlenet import googlenet
from fedsynth.models.on_features import OnFeatures
from fedsynth.models.own import builder, optional_arguments, own_name
from fedsynth.models.projection import Projected
from fedsynth.models.resnet import resnet18, resnet50
from fedsynth.models.small import Cnn, LeNet5, Linear, Mlp, ResNet8
from fedsynth.own_code import OwnCode, is_label, load_own, unloaded_file
from fedsynth.seeding import forked_rng
from fedsynth.validation import check_ranges

Shape = tuple[int, int, int]
MAX_WIDTH = 2**16
"""Largest width of a layer, and largest number of blocks."""
SMALL = 16
"""Images with a smaller side get a ConvNet of two blocks by default."""
MAX_PARAMETERS = 2**30
"""Largest network: 4 GB of parameters; training takes several times that."""
ON_FEATURES = ("linear", "mlp")
"""The networks that can use a feature map."""
_COUNTED = 1024  # parameters are counted before a network with a wider layer is made


@dataclass(frozen=True)
class _Architecture:
    """A registered architecture.

    Attributes:
        build: called with image shape and classes, and with the settings `norm`, `width` and
            `depth` if it has such parameters.
        norms: the norms that it can have, its default first.
        custom: whether a user registered it.
        given_weights: whether it starts with weights that the user gave.
        source: the file that it was loaded from; None: not from a file.
    """

    build: Callable[..., nn.Module]
    norms: tuple[str, ...] = ("none",)
    custom: bool = False
    given_weights: bool = False
    source: OwnCode | None = None


_MODELS = {
    "convnet": _Architecture(ConvNet, NORMS),
    "linear": _Architecture(Linear),
    "mlp": _Architecture(Mlp),
    "lenet5": _Architecture(LeNet5),
    "cnn1": _Architecture(
        partial(Cnn, channels=(32, 64), hidden=128), ("batch", "group", "instance")
    ),
    "cnn2": _Architecture(
        partial(Cnn, channels=(16, 32, 64), hidden=64), ("batch", "group", "instance")
    ),
    "googlenet": _Architecture(googlenet, ("batch", "group")),
    "resnet8": _Architecture(ResNet8, ("instance", "group", "batch")),
    "resnet18": _Architecture(resnet18, ("batch", "group")),
    "resnet50": _Architecture(resnet50, ("batch", "group")),
    "alexnet": _Architecture(AlexNet, ("batch", "group")),
}


@dataclass(frozen=True)
class ModelSettings:
    """The architecture, which server and clients share unless `clients` names others. All settings
    are public.

    Args:
        name: architecture: convnet, linear, mlp, lenet5, cnn1, cnn2, resnet8, resnet18, resnet50,
            alexnet or googlenet; or FILE.py:NAME for your own. Empty is "convnet", or "linear" with
            `features`.
        width: channels of a layer of "convnet", or units of the hidden layer of "mlp". The others
            have their published sizes.
        depth: blocks of "convnet", each of which halves the image.
        norm: norm of the network's layers; default: the architecture's own. That is instance norm
            for the ConvNet and ResNet-8, batch norm for the others; LeNet-5 and "linear" have none.
        clients: the clients' architectures, comma-separated, assigned in turn ("lenet5,resnet8").
            Each has its default norm. Only for methods that allow it; empty: the server's.
        projection: size of a projection head before the last layer (MOON: 256), whose output is
            then the embedding; 0: none.
        features: fixed feature map on which the network, "linear" or "mlp", works; or FILE.py:NAME
            for your own. For FedStats, whose map is a setting of the method, the option sets that.
            Each image's vector is computed once. Its norm is at most 1, so learning rates are
            larger than those of networks.

    >>> def size(settings):
    ...     return parameter_count(build_model(settings, (1, 8, 8), classes=10, seed=0))
    >>> size(ModelSettings("linear")), size(ModelSettings(width=16, depth=2))
    (650, 3194)
    """

    section: ClassVar[str] = "model"  # section of a config file

    name: str = ""
    width: int = 128
    depth: int = 3
    norm: str = ""
    clients: str = ""
    projection: int = 0
    features: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", "linear" if self.features else "convnet")
        if is_label(self.name) and self.name not in _MODELS:
            raise unloaded_file("model", "name", self.name, _MODELS, "fedsynth.register_model")
        if self.name not in _MODELS:
            raise unknown_name("model", self.name, _MODELS, "model", "name")
        norms = _MODELS[self.name].norms
        if not self.norm:
            object.__setattr__(self, "norm", norms[0])
        if self.norm not in norms:
            raise unknown_value("model", "norm", self.norm, norms, f" for {self.name}")
        check_ranges(self, width=(1, MAX_WIDTH), depth=(1, MAX_WIDTH), projection=(0, MAX_WIDTH))
        for name in self.client_names:
            if name not in _MODELS:
                raise unknown_name("client model", name, _MODELS, "model", "clients")
        if self.features:
            self._check_features()

    def _check_features(self) -> None:
        if self.features not in feature_names():
            refuse_unknown_map(self.features, "model")
        if self.name not in ON_FEATURES:
            raise SettingError(
                "model",
                "name",
                f"must be {' or '.join(ON_FEATURES)} with model.features={self.features}: "
                "other networks need images",
                value=self.name,
            )
        if self.projection:
            raise SettingError("model", "projection", "must be 0 with features: use the model mlp")

    @property
    def client_names(self) -> tuple[str, ...]:
        """`clients` as a tuple."""
        return tuple(name.strip() for name in self.clients.split(",") if name.strip())


def model_names() -> tuple[str, ...]:
    """Returns the names that `ModelSettings.name` can have, without custom architectures."""
    return tuple(name for name, architecture in _MODELS.items() if not architecture.custom)


def register_model(
    name: str,
    model: nn.Module | Callable[..., nn.Module],
    *,
    norms: tuple[str, ...] = ("none",),
    source: OwnCode | None = None,
) -> ModelSettings:
    """Registers a custom architecture by name, for settings, config files and `verify`.

    Methods that use embeddings (all that condense) need two members: `embed(x)`, which returns
    embeddings [N, embedding_size] of images, and `classifier`, an nn.Linear from them to the
    logits, so that `classifier(embed(x))` is the network.

    Args:
        name: any name except those of the package's architectures; a custom one is replaced.
        model: a class or function that is called with `image_shape` (channels, height, width) and
            `classes`, and with `norm`, `width` and `depth` if it has such parameters; its weights
            are drawn from the run's seed, by torch's generator. Or a module, which is copied with
            its weights: with differential privacy they are then declared public.
        norms: the norms that it can have, by the names of `ModelSettings.norm`, its default first.
        source: the file that it was loaded from, if any.

    Returns:
        Settings of this name.

    Raises:
        SettingError: the package has an architecture of this name, or `model` is neither.

    >>> from torch import nn
    >>> def tiny(image_shape, classes):
    ...     pixels = image_shape[0] * image_shape[1] * image_shape[2]
    ...     return nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))
    >>> settings = register_model("tiny", tiny)
    >>> parameter_count(build_model(settings, (1, 8, 8), classes=10, seed=0))
    650
    """
    if not name or (name in _MODELS and not _MODELS[name].custom):
        raise SettingError(
            "model", "name", f"{name!r} is a built-in architecture: choose another name"
        )
    if not callable(model):  # a module is, too
        raise SettingError(
            "model", "name", f"{name} must be a module, or a class or function that returns one"
        )
    _MODELS[name] = _Architecture(
        builder(name, model), norms, True, isinstance(model, nn.Module), source
    )
    return ModelSettings(name)


def register_model_file(setting: str) -> ModelSettings:
    """Registers the architecture of a file as `FILE.py:NAME@HASH`; returns its settings.

    Args:
        setting: `FILE.py:NAME`; the file is executed.

    Raises:
        SettingError: as `load_own` and `register_model`.
    """
    model, source = load_own("model", "name", setting)
    return register_model(source.label, model, source=source)


def own_model(model: nn.Module | Callable[..., nn.Module]) -> ModelSettings:
    """Registers a model that was passed as an object, by a generated name; returns its settings."""
    return register_model(own_name(model), model)


def model_source(settings: ModelSettings) -> OwnCode | None:
    """Returns the file that the architecture was loaded from; None: not from a file."""
    return _MODELS[settings.name].source


def has_given_weights(settings: ModelSettings) -> bool:
    """Returns whether the network starts with the user's weights instead of random ones."""
    return _MODELS[settings.name].given_weights


def is_own_model(settings: ModelSettings) -> bool:
    """Returns whether the architecture is custom."""
    return _MODELS[settings.name].custom


def build_model(settings: ModelSettings, image_shape: Shape, classes: int, seed: int) -> nn.Module:
    """Returns an initialised network whose weights depend only on `seed`; the state of the global
    RNG is preserved.

    Raises:
        SettingError: it would have more than `MAX_PARAMETERS`, or the images are too small for it.
    """
    if max(settings.width, settings.projection) > _COUNTED and not is_own_model(settings):
        count = count_parameters(settings, image_shape, classes)
        if count > MAX_PARAMETERS:
            key = "width" if settings.width > _COUNTED else "projection"
            raise SettingError(
                "model",
                key,
                f"results in a network of {count:,} parameters, more than {MAX_PARAMETERS:,}: "
                "use a smaller value",
                value=getattr(settings, key),
            )
    with forked_rng(seed, "model initialisation"):
        return _build(settings, image_shape, classes)


def usual_depth(image_shape: Shape) -> int:
    """Returns the default number of a ConvNet's blocks: three, or two for small images.

    >>> usual_depth((3, 32, 32)), usual_depth((1, 8, 8))
    (3, 2)
    """
    return 3 if min(image_shape[1:]) >= SMALL else 2


def build_network(settings: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
    """Returns `build_model` for a data set's images; with `features`, a network on a feature map.

    Raises:
        SettingError: as `build_model`, or the feature map cannot take such images.
    """
    if not settings.features:
        return build_model(settings, spec.image_shape, spec.classes, seed)
    features = _map_below(settings, spec)
    hidden = settings.width if settings.name == "mlp" else 0
    with forked_rng(seed, "model initialisation"):
        return OnFeatures(features, spec, hidden)


def _map_below(settings: ModelSettings, spec: DatasetSpec) -> FeatureMap:
    """Returns φ; its errors name the setting `model.features`."""
    try:
        return feature_map(settings.features, spec.image_shape)
    except SettingError as error:
        raise SettingError("model", "features", f"cannot be used: {error}") from None


def feature_facts(settings: ModelSettings, spec: DatasetSpec) -> dict[str, str]:
    """Returns the report's entries on the network's feature map: each item, and why it is public;
    empty without a map."""
    if not settings.features:
        return {}
    features = _map_below(settings, spec)
    return {
        "feature map": f"{features.name}, {features.dimension} coordinates: fixed before data are "
        "read; each image's vector depends only on that image",
        "constants of the features": f"radius R {features.radius:.6g}: {features.source}",
    }


def _build(settings: ModelSettings, image_shape: Shape, classes: int) -> nn.Module:
    build = _MODELS[settings.name].build
    network = build(image_shape, classes, **optional_arguments(build, vars(settings)))
    if settings.projection:
        return Projected(network, settings.projection, classes)
    return network


def count_parameters(settings: ModelSettings, image_shape: Shape, classes: int) -> int:
    """Returns a package network's number of parameters, without allocating them."""
    with forked_rng(0, "counting"), torch.device("meta"):
        return parameter_count(_build(settings, image_shape, classes))


def build_client_models(
    settings: ModelSettings,
    image_shape: Shape,
    classes: int,
    seed: int,
    clients: int,
    *,
    private: bool = False,
) -> tuple[nn.Module, ...] | None:
    """Returns an untrained network for each client, if `settings.clients` names architectures;
    None: all clients have the server's.

    Args:
        private: whether group norm replaces batch norm, which cannot be protected.
    """
    names = settings.client_names
    if not names:
        return None
    networks: list[nn.Module] = []
    for client in range(clients):
        name = names[client % len(names)]
        norm = next(n for n in _MODELS[name].norms if not (private and n == "batch"))
        client_settings = ModelSettings(
            name, settings.width, settings.depth, norm, projection=settings.projection
        )
        with forked_rng(seed, "client model initialisation", client):
            networks.append(_build(client_settings, image_shape, classes))
    return tuple(networks)


def parameter_count(model: nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(p.numel() for p in model.parameters())
