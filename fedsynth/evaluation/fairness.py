"""A model's accuracy at each client, and its evenness (FedKF, Definitions 1 to 3).

a_k is the accuracy on client k's own test split. n_k = |D_k| counts all of the client's records,
for training and for testing: FedKF splits each D_k into the two. All three measures include only
clients with a test record, each of which has n_k ≥ 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
