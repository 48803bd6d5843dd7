"""Registers network architectures by name, and initialises them reproducibly.

An architecture is an `nn.Module` that maps normalised images [N, C, H, W] to logits. Methods on
embeddings need two members: `classifier` is the last linear layer, and `embed` computes its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from fedsynth.data.files import expanded
from fedsynth.data.registry import DatasetSpec, as_spec
from fedsynth.errors import SettingError, unknown_name, unknown_value
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.pretrained import PRETRAINED, names_a_library
from fedsynth.features.registry import feature_map, feature_names, refuse_unknown_map
from fedsynth.models.convnet import NORMS, ConvNet
from fedsynth.models.layers import Projected
from fedsynth.models.on_features import OnFeatures
from fedsynth.models.own import builder, optional_arguments, own_name
from fedsynth.models.small import Cnn, LeNet5, Linear, Mlp, ResNet8
from fedsynth.models.text import Lstm
from fedsynth.models.unet import UNet
from fedsynth.own_code import load_own, names_code, unloaded_file
from fedsynth.seeding import forked_rng
from fedsynth.validation import check_fields, in_range

# The largest width of a layer, and the largest number of blocks.
MAX_WIDTH = 2**16
# The smallest image side with three ConvNet blocks by default, instead of two.
SMALL = 16
# The maximum number of parameters. They take 4 GB, and training takes several times as much.
MAX_PARAMETERS = 2**30
# The norms for timm and torchvision networks: their own, or group norm in place of batch norm.
LIBRARY_NORMS = ("own", "group")
# The networks that can use a feature map.
ON_FEATURES = ("linear", "mlp")

# The name of the network for segmentation.
UNET = "unet"

CNN_NORMS = ("batch", "group", "instance")
_COUNTED = 1024  # wider networks are made only after counting parameters


@dataclass(frozen=True)
class _Architecture:
    """A registered architecture.

    Attributes:
        build: a function that builds the network from the image shape and the number of classes,
            and from `norm`, `width` and `depth` if it has such parameters.
        norms: the allowed norms. The first is the default.
        custom: whether a user registered the architecture.
        given_weights: whether the network starts with the user's weights.
    """

    build: Callable[..., nn.Module]
    norms: tuple[str, ...] = ("none",)
    custom: bool = False
    given_weights: bool = False


def _large(name: str) -> Callable[..., nn.Module]:
    """Returns a function that builds a network from `fedsynth.models.large`.

    The function imports `large` when called, because importing torchvision takes longer than
    importing torch.
    """

    def build(image_shape: Shape, classes: int, norm: str) -> nn.Module:
        from fedsynth.models import large

        network: nn.Module = getattr(large, name)(image_shape, classes, norm=norm)
        return network

    return build


_MODELS = {
    "convnet": _Architecture(ConvNet, NORMS),
    "linear": _Architecture(Linear),
    "mlp": _Architecture(Mlp),
    "lstm": _Architecture(Lstm),
    "lenet5": _Architecture(LeNet5),
    "cnn1": _Architecture(partial(Cnn, channels=(32, 64), hidden=128), CNN_NORMS),
    "cnn2": _Architecture(partial(Cnn, channels=(16, 32, 64), hidden=64), CNN_NORMS),
    "cnn3": _Architecture(partial(Cnn, channels=(16, 32), kernel=5), CNN_NORMS),
    "googlenet": _Architecture(_large("googlenet"), ("batch", "group")),
    "resnet8": _Architecture(ResNet8, ("instance", "group", "batch")),
    "resnet18": _Architecture(_large("resnet18"), ("batch", "group")),
    "resnet50": _Architecture(_large("resnet50"), ("batch", "group")),
    "alexnet": _Architecture(_large("AlexNet"), ("batch", "group")),
    "densenet100": _Architecture(_large("densenet100"), ("batch", "group")),
    "swin-t": _Architecture(_large("SwinT"), ("layer",)),
    UNET: _Architecture(UNet, CNN_NORMS),
}


@dataclass(frozen=True)
class ModelSettings:
    """The settings for a run's network. All of them are public.

    The server and the clients have the same architecture, unless `clients` names other
    architectures for the clients.

    Args:
        name: the architecture (convnet, linear, mlp, lstm, lenet5, cnn1, cnn2, cnn3, resnet8,
            resnet18, resnet50, alexnet, googlenet, densenet100 or swin-t, or unet for
            segmentation), or FILE.py:NAME for your own, or timm:NAME or torchvision:NAME. The
            default is "convnet", or "linear" if `features` is set.
        width: the number of channels in each layer of "convnet" or in the first layers of "unet"
            (32 in papers), or of units in the hidden layer of "mlp" and in each layer of "lstm".
            Other architectures have their published sizes.
        depth: the number of blocks of "convnet", each of which halves the image.
        norm: the kind of norm layers (default: that of the architecture). The default is instance
            norm for the ConvNet and ResNet-8, layer norm for Swin-T, and batch norm for the other
            networks that have norm layers. LeNet-5, "linear" and "mlp" have none.
        clients: the architectures of the clients, separated by commas, such as "lenet5,resnet8"
            (default: that of the server). They are assigned to the clients in turn, each with its
            default norm. Not every method allows this.
        projection: the size of a projection head before the last layer, or 0 for none. MOON uses
            256. The output of the head is then the embedding.
        features: a fixed feature map whose output is the input of the network, or FILE.py:NAME for
            a map that you have written. The network must be "linear" or "mlp". With FedStats, it
            sets the feature map of the method. The vector of each image is computed once. Its norm
            is at most 1, so learning rates must be larger than for networks on images.
        weights: the initial weights of a network timm:NAME or torchvision:NAME: "pretrained" for
            the library's download, or a file (default: random weights). A private run treats these
            weights as public.

    >>> def size(settings):
    ...     return parameter_count(build_model(settings, (1, 8, 8), classes=10, seed=0))
    >>> size(ModelSettings("linear")), size(ModelSettings(width=16, depth=2))
    (650, 3194)
    """

    section: ClassVar[str] = "model"  # section of a config file

    name: str = ""
    width: int = in_range(128, 1, MAX_WIDTH)
    depth: int = in_range(3, 1, MAX_WIDTH)
    norm: str = ""
    clients: str = ""
    projection: int = in_range(0, 0, MAX_WIDTH)
    features: str = ""
    weights: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", "linear" if self.features else "convnet")
        if names_a_library(self.name):
            _add_library_model(self.name)
        elif self.weights:
            reason = "requires a model timm:NAME or torchvision:NAME"
            raise SettingError("model", "weights", f"{reason}, got {self.weights!r}")
        if self.weights not in ("", PRETRAINED):
            object.__setattr__(self, "weights", str(expanded(self.weights).absolute()))
        _refuse_unknown_model(self.name, "name")
        norms = _MODELS[self.name].norms
        if not self.norm:
            object.__setattr__(self, "norm", norms[0])
        if self.norm not in norms:
            raise unknown_value("model", "norm", self.norm, norms, f" for {self.name}")
        check_fields(self)
        for name in self.client_names:
            _refuse_unknown_model(name, "clients")
        if self.features:
            self._check_features()

    def _check_features(self) -> None:
        if self.features not in feature_names():
            refuse_unknown_map(self.features, "model")
        if self.name not in ON_FEATURES:
            reason = (
                f"must be {' or '.join(map(repr, ON_FEATURES))} if model.features is set. Choose "
                "one of these models, or unset model.features"
            )
            raise SettingError("model", "name", reason, value=self.name)
        if self.projection:
            raise SettingError(
                "model", "projection", "must be 0 if model.features is set. Set it to 0"
            )

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients' architectures in the setting `clients`."""
        return tuple(name.strip() for name in self.clients.split(",") if name.strip())


def _refuse_unknown_model(name: str, key: str) -> None:
    """Raises an error for an unknown architecture in a setting."""
    if name in _MODELS:
        return
    if names_code(name):
        raise unloaded_file("model", key, name)
    raise unknown_name("model" if key == "name" else "client model", name, _MODELS, "model", key)


def _add_library_model(name: str) -> None:
    """Registers a timm or torchvision network as an architecture.

    The library is imported only when the network is built.
    """

    def build(image_shape: Shape, classes: int, norm: str, weights: str = "") -> nn.Module:
        from fedsynth.models.pretrained import LibraryNetwork

        model = partial(LibraryNetwork, name, weights=weights)
        return builder(name, model)(image_shape, classes, norm, width=0, depth=0)

    _MODELS[name] = _Architecture(build, LIBRARY_NORMS, custom=True)


def model_names() -> tuple[str, ...]:
    """Returns the names of the built-in architectures."""
    return tuple(name for name, architecture in _MODELS.items() if not architecture.custom)


def register_model(
    name: str,
    model: nn.Module | Callable[..., nn.Module],
    *,
    norms: tuple[str, ...] = ("none",),
) -> ModelSettings:
    """Registers a custom architecture, so that settings, config files and `verify` can name it.

    Methods on embeddings, such as all condensation methods, need a network with two members.
    `embed(x)` returns image embeddings [N, embedding_size]. `classifier` is an nn.Linear that maps
    embeddings to logits. `classifier(embed(x))` must be the network's output.

    Args:
        name: the new name, which no built-in architecture may have. An existing custom architecture
            of the same name is replaced.
        model: a class or function that builds the network, or a module. A class or function is
            called with `image_shape` (channels, height, width) and `classes`, and with `norm`,
            `width` and `depth` if it has such parameters. Weights must be drawn from torch's global
            generator, which is seeded by the run. A module is copied with its weights, which with
            differential privacy you declare public.
        norms: the names of the allowed norms. The first is the default.

    Returns:
        The settings that select this architecture.

    Raises:
        SettingError: a built-in architecture has this name, or `model` cannot be called.

    >>> from torch import nn
    >>> def tiny(image_shape, classes):
    ...     pixels = image_shape[0] * image_shape[1] * image_shape[2]
    ...     return nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))
    >>> settings = register_model("tiny", tiny)
    >>> parameter_count(build_model(settings, (1, 8, 8), classes=10, seed=0))
    650
    """
    if not name or (name in _MODELS and not _MODELS[name].custom):
        reason = f"{name!r} is a built-in architecture's name. Choose another name"
        raise SettingError("model", "name", reason)
    if not callable(model):  # a module is, too
        kind = type(model).__name__
        reason = f"must be an nn.Module, or a function that returns one, got {kind}. Pass a module"
        raise SettingError("model", "name", reason, value=name)
    _MODELS[name] = _Architecture(builder(name, model), norms, True, isinstance(model, nn.Module))
    return ModelSettings(name)


def register_model_file(setting: str, key: str = "name") -> ModelSettings:
    """Registers an architecture from a Python file under the name `FILE.py:NAME@HASH`.

    Args:
        setting: `FILE.py:NAME`. The file is executed.
        key: the setting with this value, for error messages.

    Returns:
        The settings that select this architecture.

    Raises:
        SettingError: the file cannot be loaded, or its architecture cannot be registered.
    """
    model, label = load_own("model", key, setting)
    return register_model(label, model)


def own_model(model: nn.Module | Callable[..., nn.Module]) -> ModelSettings:
    """Registers a model under a generated name, and returns the settings that select the model."""
    return register_model(own_name(model), model)


def has_given_weights(settings: ModelSettings) -> bool:
    """Returns True if the run starts with the user's weights, or with pretrained ones."""
    return _MODELS[settings.name].given_weights or bool(settings.weights)


def is_own_model(settings: ModelSettings) -> bool:
    """Returns True if a user registered the architecture."""
    return _MODELS[settings.name].custom


def build_model(
    settings: ModelSettings, images: DatasetSpec | Shape, classes: int, seed: int
) -> nn.Module:
    """Builds a network and initialises its weights from `seed`.

    `images` is an image shape, or the specification of records such as tokens. The state of torch's
    global random generator does not change.

    Raises:
        SettingError: the network would have more than `MAX_PARAMETERS` parameters, or the images
            are too small for the architecture.
    """
    if max(settings.width, settings.projection) > _COUNTED and not is_own_model(settings):
        count = count_parameters(settings, images, classes)
        if count > MAX_PARAMETERS:
            key = "width" if settings.width > _COUNTED else "projection"
            reason = f"gives {count:,} parameters, more than {MAX_PARAMETERS:,}. Lower it"
            raise SettingError("model", key, reason, value=getattr(settings, key))
    with forked_rng(seed, "model initialisation"):
        return _build(settings, images, classes)


def usual_model(image_shape: Shape) -> dict[str, Any]:
    """Returns the default network settings for an image shape.

    The network is a ConvNet with three blocks, with two for small images, or an MLP for vectors and
    time series.

    >>> usual_model((3, 32, 32)), usual_model((1, 8, 8)), usual_model((2, 1, 16))
    ({'depth': 3}, {'depth': 2}, {'name': 'mlp'})
    """
    side = min(image_shape[1:])
    depth = 3 if side >= SMALL else 2
    return {"depth": depth} if side >> depth else {"name": "mlp"}


def build_network(settings: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
    """Builds the network for a data set, on a feature map if `features` is set.

    Raises:
        SettingError: as for `build_model`, or the feature map does not support the images.
    """
    if not settings.features:
        return build_model(settings, spec, spec.classes, seed)
    _refuse_tokens(settings, spec)
    features = _map_below(settings, spec)
    hidden = settings.width if settings.name == "mlp" else 0
    with forked_rng(seed, "model initialisation"):
        return OnFeatures(features, spec, hidden)


def _map_below(settings: ModelSettings, spec: DatasetSpec) -> FeatureMap:
    """Returns the feature map selected by `model.features`."""
    try:
        return feature_map(settings.features, spec.image_shape)
    except SettingError as error:
        raise SettingError("model", "features", f"cannot be used: {error}") from None


def feature_facts(settings: ModelSettings, spec: DatasetSpec) -> dict[str, str]:
    """Returns the privacy report's entries for the network's feature map.

    Each entry names an item and why it is public. The result is empty without a feature map.
    """
    if not settings.features:
        return {}
    features = _map_below(settings, spec)
    return {
        "feature map": f"{features.name} with {features.dimension} coordinates is fixed before data "
        "are read. The vector of an image depends only on this image",
        "constants of the features": f"radius R {features.radius:.6g}: {features.source}",
    }


def _refuse_tokens(settings: ModelSettings, spec: DatasetSpec) -> None:
    """Raises an error if a built-in network other than the LSTM is used for tokens."""
    if spec.vocabulary and settings.name != "lstm" and not is_own_model(settings):
        reason = f"must be lstm for the tokens of {spec.name}. Set model.name=lstm"
        raise SettingError("model", "name", reason, value=settings.name)


def _build(settings: ModelSettings, images: DatasetSpec | Shape, classes: int) -> nn.Module:
    spec = as_spec(images)
    image_shape = spec.image_shape
    _refuse_tokens(settings, spec)
    if not spec.vocabulary and (
        image_shape[:2] == (1, 1) and not (settings.name in ON_FEATURES or is_own_model(settings))
    ):
        names = " or ".join(ON_FEATURES)
        reason = f"requires images, but the records are vectors. Set model.name to {names}"
        raise SettingError("model", "name", reason, value=settings.name)
    build = _MODELS[settings.name].build
    arguments = optional_arguments(build, vars(settings))
    if settings.weights:
        arguments["weights"] = settings.weights
    if spec.vocabulary and settings.name == "lstm":
        arguments["vocabulary"] = spec.vocabulary
    network = build(image_shape, classes, **arguments)
    if settings.projection:
        return Projected(network, settings.projection, classes)
    return network


def count_parameters(settings: ModelSettings, images: DatasetSpec | Shape, classes: int) -> int:
    """Counts a built-in network's parameters without allocating memory for weights."""
    with forked_rng(0, "counting"), torch.device("meta"):
        return parameter_count(_build(settings, images, classes))


def build_client_models(
    settings: ModelSettings,
    images: DatasetSpec | Shape,
    classes: int,
    seed: int,
    clients: int,
    *,
    private: bool = False,
) -> tuple[nn.Module, ...] | None:
    """Builds an untrained network for each client from the architectures in `settings.clients`.

    Returns None if all clients have the server's architecture.

    Args:
        settings: the network settings.
        images: the records' specification, or the image shape (C, H, W).
        classes: the number of classes.
        seed: the seed of the weights.
        clients: the number of clients.
        private: whether the run has differential privacy. The networks then have the first norm
            other than batch norm, which mixes a batch's examples.
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
            networks.append(_build(client_settings, images, classes))
    return tuple(networks)


def parameter_count(model: nn.Module) -> int:
    """Returns a network's number of parameters."""
    return sum(map(torch.Tensor.numel, model.parameters()))
