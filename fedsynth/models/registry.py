"""Architectures by name, and their reproducible initialisation.

An architecture is an `nn.Module` from normalised images [N, C, H, W] to logits; methods that look
inside it want `embed` (everything before the last linear layer) and `classifier` (that layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedsynth.core.validation import check_ranges
from fedsynth.errors import SettingError, unknown_name, unknown_value
from fedsynth.models.alexnet import AlexNet
from fedsynth.models.convnet import NORMS, ConvNet
from fedsynth.models.googlenet import googlenet
from fedsynth.models.projection import Projected
from fedsynth.models.resnet import ResNet18, ResNet50
from fedsynth.models.small import Cnn, LeNet5, Linear, ResNet8
from fedsynth.seeding import forked_rng

Shape = tuple[int, int, int]
WIDEST = 2**16
"""Of a layer, and the most blocks."""
MOST_PARAMETERS = 2**30
"""Of a network: 4 GB, and training takes several times that."""
_COUNTED = 1024  # a wider layer is counted before it is made


@dataclass(frozen=True)
class _Architecture:
    """How to build it, and the norms that it can have, its own first."""

    build: Callable[[Shape, int, ModelSettings], nn.Module]
    norms: tuple[str, ...]


_MODELS: dict[str, _Architecture] = {
    "convnet": _Architecture(
        lambda shape, classes, s: ConvNet(
            shape, classes, width=s.width, depth=s.depth, norm=s.norm
        ),
        NORMS,
    ),
    "linear": _Architecture(lambda shape, classes, s: Linear(shape, classes), ("none",)),
    "lenet5": _Architecture(lambda shape, classes, s: LeNet5(shape, classes), ("none",)),
    "cnn1": _Architecture(
        lambda shape, classes, s: Cnn(shape, classes, (32, 64), 128, norm=s.norm),
        ("batch", "group", "instance"),
    ),
    "cnn2": _Architecture(
        lambda shape, classes, s: Cnn(shape, classes, (16, 32, 64), 64, norm=s.norm),
        ("batch", "group", "instance"),
    ),
    "googlenet": _Architecture(
        lambda shape, classes, s: googlenet(shape, classes, s.norm), ("batch", "group")
    ),
    "resnet8": _Architecture(
        lambda shape, classes, s: ResNet8(shape, classes, norm=s.norm),
        ("instance", "group", "batch"),
    ),
    "resnet18": _Architecture(
        lambda shape, classes, s: ResNet18(shape, classes, norm=s.norm), ("batch", "group")
    ),
    "resnet50": _Architecture(
        lambda shape, classes, s: ResNet50(shape, classes, norm=s.norm), ("batch", "group")
    ),
    "alexnet": _Architecture(
        lambda shape, classes, s: AlexNet(shape, classes, norm=s.norm), ("batch", "group")
    ),
}


@dataclass(frozen=True)
class ModelSettings:
    """Which architecture; every client and the server use the same one. All of it is public.

    Args:
        name: see `model_names`.
        width: channels of a layer of "convnet"; the others have their published sizes.
        depth: blocks of "convnet", each of which halves the image.
        norm: empty takes the architecture's own: instance norm for the ConvNet and ResNet-8, batch
            norm for the others; LeNet-5 and "linear" have none.
        clients: for methods that allow it, the clients' own architectures by name, comma-separated,
            dealt out in turn ("lenet5,resnet8"), with their own norms; empty: the server's.
        projection: size of a projection head before the last layer (MOON: 256), whose outcome is
            then the embedding; 0: none.

    >>> def size(settings):
    ...     return parameter_count(build_model(settings, (1, 8, 8), classes=10, seed=0))
    >>> size(ModelSettings("linear")), size(ModelSettings(width=16, depth=2))
    (650, 3194)
    """

    section: ClassVar[str] = "model"  # of a config file

    name: str = "convnet"
    width: int = 128
    depth: int = 3
    norm: str = ""
    clients: str = ""
    projection: int = 0

    def __post_init__(self) -> None:
        if self.name not in _MODELS:
            raise unknown_name("model", self.name, _MODELS, "model", "name")
        norms = _MODELS[self.name].norms
        if not self.norm:
            object.__setattr__(self, "norm", norms[0])
        if self.norm not in norms:
            raise unknown_value("model", "norm", self.norm, norms, f" for {self.name}")
        check_ranges(self, width=(1, WIDEST), depth=(1, WIDEST), projection=(0, WIDEST))
        for name in self.client_names:
            if name not in _MODELS:
                raise unknown_name("client model", name, _MODELS, "model", "clients")

    @property
    def client_names(self) -> tuple[str, ...]:
        """`clients` as a tuple."""
        return tuple(name.strip() for name in self.clients.split(",") if name.strip())


def model_names() -> tuple[str, ...]:
    """The architectures that `ModelSettings.name` can be."""
    return tuple(_MODELS)


def build_model(settings: ModelSettings, image_shape: Shape, classes: int, seed: int) -> nn.Module:
    """A freshly initialised network whose weights depend on `seed` alone; the global RNG is left as
    it was.

    Raises:
        SettingError: it would have more than `MOST_PARAMETERS`, or the images are too small for it.
    """
    if max(settings.width, settings.projection) > _COUNTED:
        _refuse_beyond_measure(settings, image_shape, classes)
    with forked_rng(seed, "model initialisation"):
        return _build(settings, image_shape, classes)


def _build(settings: ModelSettings, image_shape: Shape, classes: int) -> nn.Module:
    made = _MODELS[settings.name].build(image_shape, classes, settings)
    return Projected(made, settings.projection, classes) if settings.projection else made


def _refuse_beyond_measure(settings: ModelSettings, image_shape: Shape, classes: int) -> None:
    """Counts a network's parameters without making them."""
    with forked_rng(0, "counting"), torch.device("meta"):
        count = parameter_count(_build(settings, image_shape, classes))
    if count > MOST_PARAMETERS:
        key = "width" if settings.width > _COUNTED else "projection"
        raise SettingError(
            "model",
            key,
            f"gives a network of {count:,} parameters, more than {MOST_PARAMETERS:,}: take a "
            "smaller one",
            value=getattr(settings, key),
        )


def build_client_models(
    settings: ModelSettings,
    image_shape: Shape,
    classes: int,
    seed: int,
    clients: int,
    *,
    private: bool = False,
) -> tuple[nn.Module, ...] | None:
    """An untrained network for each client, where `settings.clients` names some; None: all have the
    server's.

    Args:
        private: group norm in place of batch norm, which cannot be protected.
    """
    names = settings.client_names
    if not names:
        return None
    made: list[nn.Module] = []
    for client in range(clients):
        name = names[client % len(names)]
        norm = next(n for n in _MODELS[name].norms if not (private and n == "batch"))
        one = ModelSettings(
            name, settings.width, settings.depth, norm, projection=settings.projection
        )
        with forked_rng(seed, "client model initialisation", client):
            made.append(_build(one, image_shape, classes))
    return tuple(made)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable scalars."""
    return sum(p.numel() for p in model.parameters())
