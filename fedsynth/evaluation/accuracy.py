"""Computes a model's accuracy, and how much the accuracy varies between clients.

`local_metrics` computes the three measures of FedKF (Definitions 1 to 3): the average accuracy of a
model over the clients, its variance and its minimum. a_k is the accuracy on the test split of
client k. n_k = |D_k| counts all records of client k, both for training and for testing, because
FedKF splits each D_k into the two. The measures include only clients that have at least one test
record. In segmentation, the Dice coefficient of a record takes the place of whether it is
classified correctly, and a_k is the mean Dice coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.feature_cache import feature_table
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.registry import CLASSIFICATION
from fedsynth.evaluation import NAMES
from fedsynth.models.on_features import FeatureLinear, OnFeatures
from fedsynth.training.segmentation import dice

PASS_SCALARS = 2**24  # of the images in a forward pass


def accuracy(model: nn.Module, data: ImageData, batch: int = 1000) -> float:
    """Computes the accuracy of a classifier on a dataset, as a fraction in [0, 1].

    The model must be on the same device as the data. Its training or evaluation mode is restored
    afterwards.
    """
    return float(scores(predict(model, data, batch), data.labels).sum()) / len(data.labels)


def domain_masks(data: ImageData) -> dict[str, Tensor]:
    """Returns masks that select the examples of each domain, for example of each hospital.

    Returns:
        A boolean tensor [N] by the domain's name, for domains with at least one example. The
        dictionary is empty if the data set has no domains.
    """
    masks = {}
    if data.domains is not None:
        for number, name in enumerate(data.spec.domains):
            mask = data.domains == number
            if bool(mask.any()):
                masks[name] = mask
    return masks


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Scores each prediction between 0 (wrong) and 1 (correct).

    The scores are float64 [N]. For classes [N], a score is 0 or 1. For masks [N, H, W], it is the
    Dice coefficient.
    """
    if labels.dim() == 1:
        return (logits.argmax(dim=1) == labels).double()
    return dice(logits, labels)


def predict(
    model: nn.Module, data: ImageData, batch: int = 1000, *, among: Tensor | None = None
) -> Tensor:
    """Computes a model's logits for examples: [N, C], or [N, C, H, W] for masks.

    The model's training or evaluation mode is restored afterwards.

    Args:
        model: a classifier of images. If the model uses a feature map, the features are cached
            together with the data.
        data: the dataset that contains the examples.
        batch: number of examples in a forward pass, or fewer if the examples are large.
        among: indices [N] of the examples to classify. By default, all examples are classified.
    """
    mode = model.training
    model.eval()
    if among is None:
        among = torch.arange(len(data))
    indices = among.to(data.labels.device, non_blocking=True)
    batch = max(1, min(batch, PASS_SCALARS // math.prod(data.spec.image_shape)))
    logits = _logits_of(model, data, indices)
    with torch.no_grad():
        parts = list(map(logits, indices.split(batch)))
    model.train(mode)
    return torch.cat(parts)


def _logits_of(model: nn.Module, data: ImageData, indices: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes the logits of the examples with given indices.

    The function accepts only indices that are in `indices`.
    """
    if isinstance(model, FeatureLinear):
        classifier = model.classifier
        look_up = feature_table(data, model.feature_map, indices, model.embedding)
        return lambda records: classifier(look_up(records))
    if isinstance(model, OnFeatures):
        from_features = model.from_features
        look_up = feature_table(data, model.feature_map, indices)
        return lambda records: from_features(look_up(records))
    return lambda records: model(normalise(data.images[records], data.spec))


def local_metrics(
    right: Sequence[float],
    tested: Sequence[int],
    sizes: Sequence[float],
    task: str = CLASSIFICATION,
) -> dict[str, Any] | None:
    """Computes the mean, variance and minimum of a model's accuracies on the clients' test splits.

    The measures are AMP = Σ_k n_k/n · a_k, the weighted mean of the accuracies a_k; FM, their
    population variance around the unweighted mean; and WLP = min_k a_k, the accuracy of the worst
    client. The results are exact functions of private data, so only a simulation may compute them.

    Args:
        right: for each client, the sum of the `scores` of its test records: in classification, the
            number of records that the model classifies correctly.
        tested: for each client, the number of test records. A client without test records is
            ignored, and its a_k is None.
        sizes: n_k of each client.
        task: the task, which determines the name of the a_k.

    Returns:
        The measures by name, or None if no client has a test record.
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
        NAMES[task].clients: accuracies,
    }
