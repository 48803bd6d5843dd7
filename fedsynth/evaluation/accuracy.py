"""Test accuracy of a classifier on resident data."""

from __future__ import annotations

import torch
from torch import nn

from fedsynth.data.images import ImageData, normalise


def accuracy(model: nn.Module, data: ImageData, batch: int = 1000) -> float:
    """Share of `data` that `model` (on the data's device) classifies rightly, in [0, 1]; the model's mode is restored."""
    mode = model.training
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=data.labels.device)
    with torch.no_grad():
        for images, labels in zip(data.images.split(batch), data.labels.split(batch), strict=True):
            right += (model(normalise(images, data.spec)).argmax(dim=1) == labels).sum()
    model.train(mode)
    return int(right) / len(data.labels)
