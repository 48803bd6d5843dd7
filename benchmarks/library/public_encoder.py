"""A public encoder that needs no download: a small network that was trained on EMNIST letters.

The maps in `MAPS` differ only in the constants to which vectors are clipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedsynth.data.load import load_dataset
from fedsynth.features import FeatureMap, measured_map, normalised_map
from fedsynth.seeding import forked_rng

FILE = Path(tempfile.gettempdir()) / "fedsynth-features" / "emnist-encoder.safetensors"
IMAGES = 40_000
PUBLIC = 2000
"""The number of EMNIST letters on which constants are measured."""
Shape = tuple[int, int, int]


def network() -> nn.Sequential:
    """Returns the untrained network: three blocks with batch norm, and a mean over positions."""
    layers: list[nn.Module] = []
    for inside, outside in ((1, 32), (32, 64), (64, 256)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 26))


@cache
def trained() -> nn.Sequential:
    """Returns the trained network without its last layer. It is trained at the first call."""
    with forked_rng(0, "public encoder"):
        model = network()
        if FILE.exists():
            model.load_state_dict(load_file(FILE))
        else:
            _train(model)
            FILE.parent.mkdir(parents=True, exist_ok=True)
            save_file(model.state_dict(), FILE)
    return model[:-1].eval()


def _train(model: nn.Module) -> None:
    letters, _ = load_dataset("emnist-letters")
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        rows = torch.randperm(len(letters))[:IMAGES]
        for batch in rows.split(128):
            logits = model(letters.images[batch].float() / 255)
            loss = nn.functional.cross_entropy(logits, letters.labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


def letters() -> Tensor:
    """Returns the public images [PUBLIC, 1, 28, 28] on which constants are measured."""
    return load_dataset("emnist-letters")[1].images[:PUBLIC]


def unit(image_shape: Shape) -> FeatureMap:
    """Divides each vector by its norm."""
    return normalised_map("unit", image_shape, trained())


def centred(image_shape: Shape) -> FeatureMap:
    """Subtracts the mean of public images before the division."""
    return normalised_map("centred", image_shape, trained(), letters())


def random_clip(image_shape: Shape) -> FeatureMap:
    """Clips to the median norm of random-process images."""
    return measured_map("random clip", image_shape, trained())


def public_clip(image_shape: Shape) -> FeatureMap:
    """Clips to the median norm of public images."""
    return measured_map("public clip", image_shape, trained(), letters())


MAPS: dict[str, Callable[[Shape], FeatureMap]] = {
    "unit": unit,
    "centred": centred,
    "random clip": random_clip,
    "public clip": public_clip,
}
