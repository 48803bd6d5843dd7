"""Test accuracy of a classifier on resident data.

A model's accuracy at each client, and its evenness (FedKF, Definitions 1 to 3).

a_k is the accuracy on client k's own test split. n_k = |D_k| counts all of the client's records,
for training and for testing: FedKF splits each D_k into the two. All three measures include only
clients with a test record, each of which has n_k ≥ 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.feature_cache import feature_table
from fedsynth.data.images import ImageData, normalise
from fedsynth.models.feature_linear import FeatureLinear
from fedsynth.models.on_features import OnFeatures


def accuracy(model: nn.Module, data: ImageData, batch: int = 1000) -> float:
    """Returns the accuracy of `model` (on the data's device) on `data`, in [0, 1]; the model's mode
    is restored."""
    return int(correct(model, data, batch).sum()) / len(data.labels)


def accuracy_by_domain(right_N: Tensor, data: ImageData) -> dict[str, float]:
    """Returns the accuracy in each domain that `data` has examples of, from `correct`; empty if
    examples have no domain."""
    if data.domains is None:
        return {}
    accuracies = {}
    for number, name in enumerate(data.spec.domains):
        right = right_N[data.domains == number]
        if len(right):
            accuracies[name] = float(right.double().mean())
    return accuracies


def correct(
    model: nn.Module, data: ImageData, batch: int = 1000, *, among: Tensor | None = None
) -> Tensor:
    """Returns whether `model` classifies each example correctly, bool [N]; the model's mode is
    restored.

    Args:
        model: takes images; if it uses a feature map, the features are cached with the data.
        data: all examples.
        batch: examples per pass.
        among: positions [N] of the examples to classify; None: all.
    """
    mode = model.training
    model.eval()
    if among is None:
        among = torch.arange(len(data))
    indices = among.to(data.labels.device, non_blocking=True)
    logits = _logits_of(model, data, indices)
    right = []
    with torch.no_grad():
        for chunk in indices.split(batch):
            right.append(logits(chunk).argmax(dim=1) == data.labels[chunk])
    model.train(mode)
    return torch.cat(right)


def _logits_of(model: nn.Module, data: ImageData, indices: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that gives logits of records [M] among `indices` [N]."""
    if isinstance(model, OnFeatures | FeatureLinear):
        from_features = model.from_features
        look_up = feature_table(data, model.feature_map, indices)
        return lambda records: from_features(look_up(records))
    return lambda records: model(normalise(data.images[records], data.spec))


def local_metrics(
    right: Sequence[int], tested: Sequence[int], sizes: Sequence[float]
) -> dict[str, Any] | None:
    """Returns measures of a model on the clients' own test splits.

    AMP = Σ_k n_k/n · a_k; FM is the population variance of the a_k about their plain mean; WLP =
    min_k a_k.

    They are exact functions of private data: for simulations only.

    Args:
        right: records of each client's test split that the model classifies correctly.
        tested: records of each client's test split; a client without any does not count (its a_k
            is None).
        sizes: n_k.

    Returns:
        None if no client has a test record.
    """
    accuracies: list[float | None] = []
    values, weights = [], []
    for correct, examples, size in zip(right, tested, sizes, strict=True):
        if not examples:
            accuracies.append(None)
            continue
        accuracies.append(correct / examples)
        values.append(correct / examples)
        weights.append(size)
    if not values:
        return None
    mean = sum(values) / len(values)
    return {
        "amp": sum(a * n for a, n in zip(values, weights, strict=True)) / sum(weights),
        "fm": sum((a - mean) ** 2 for a in values) / len(values),
        "wlp": min(values),
        "client_accuracy": accuracies,
    }
