"""Architectures by name, and their reproducible initialisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fedsynth.core.random import forked_rng
from fedsynth.errors import unknown_name
from fedsynth.models.convnet import ConvNet


@dataclass(frozen=True)
class ModelSettings:
    """Which architecture; every client and the server use the same one. All of it is public."""

    name: str = "convnet"
    width: int = 128
    depth: int = 3
    norm: str = "instance"


_MODELS: dict[str, Callable[[tuple[int, int, int], int, ModelSettings], nn.Module]] = {
    "convnet": lambda shape, classes, s: ConvNet(shape, classes, width=s.width, depth=s.depth, norm=s.norm),
}


def build_model(settings: ModelSettings, image_shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """A freshly initialised network whose weights depend on `seed` alone; the global RNG is left as it was."""
    if settings.name not in _MODELS:
        raise unknown_name("model", settings.name, _MODELS)
    with forked_rng(seed, "model initialisation"):
        return _MODELS[settings.name](image_shape, classes, settings)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable scalars."""
    return sum(p.numel() for p in model.parameters())
