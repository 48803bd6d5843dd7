"""Test accuracy of a classifier on resident data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsynth.data.images import ImageData, normalise


def accuracy(model: nn.Module, data: ImageData, batch: int = 1000) -> float:
    """Share of `data` that `model` (on the data's device) classifies rightly, in [0, 1]; the
    model's mode is restored."""
    return int(correct(model, data, batch).sum()) / len(data.labels)


def accuracy_by_domain(right_N: Tensor, data: ImageData) -> dict[str, float]:
    """Of each domain that `data` has examples of, from `correct`; empty where examples have no
    domain."""
    if data.domains is None:
        return {}
    here = {name: data.domains == number for number, name in enumerate(data.spec.domains)}
    return {
        name: float(right_N[mine].double().mean())
        for name, mine in here.items()
        if bool(mine.any())
    }


def correct(model: nn.Module, data: ImageData, batch: int = 1000) -> Tensor:
    """Which examples `model` classifies rightly, bool [N]; the model's mode is restored."""
    mode = model.training
    model.eval()
    with torch.no_grad():
        right = [
            model(normalise(images, data.spec)).argmax(dim=1) == labels
            for images, labels in zip(
                data.images.split(batch), data.labels.split(batch), strict=True
            )
        ]
    model.train(mode)
    return torch.cat(right)
