"""How accurate a model is at each client, and how evenly (FedKF, Definitions 1 to 3); how soon a
run reaches a level.

a_k is the accuracy on client k's own test split. n_k = |D_k| counts all of the client's records,
those that train and those that test: FedKF splits each D_k into the two. All three measures count
the clients that have a test record; each of them has n_k ≥ 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def average_model_performance(accuracies: Sequence[float], sizes: Sequence[float]) -> float:
    """AMP = Σ_k n_k/n · a_k."""
    return sum(a * n for a, n in zip(accuracies, sizes, strict=True)) / sum(sizes)


def fairness_metric(accuracies: Sequence[float]) -> float:
    """FM: the population variance of the a_k about their plain mean."""
    mean = sum(accuracies) / len(accuracies)
    return sum((a - mean) ** 2 for a in accuracies) / len(accuracies)


def worst_local_performance(accuracies: Sequence[float]) -> float:
    """WLP = min_k a_k."""
    return min(accuracies)


def local_metrics(
    right: Sequence[int], tested: Sequence[int], sizes: Sequence[float]
) -> dict[str, Any] | None:
    """Computes AMP, FM, WLP and the a_k of a model on the clients' own test splits.

    Exact functions of private data: for simulations only.

    Args:
        right: records of each client's test split that the model classifies correctly.
        tested: records of each client's test split; a client without any does not count (its a_k
            is None).
        sizes: n_k.

    Returns:
        None if no client has a test record.
    """
    accuracies = [r / n if n else None for r, n in zip(right, tested, strict=True)]
    there = [(a, n) for a, n in zip(accuracies, sizes, strict=True) if a is not None]
    if not there:
        return None
    known = [a for a, _ in there]
    return {
        "amp": average_model_performance(known, [n for _, n in there]),
        "fm": fairness_metric(known),
        "wlp": worst_local_performance(known),
        "client_accuracy": accuracies,
    }


def first_to_reach(
    level: float, rows: Sequence[Mapping[str, Any]], value: str = "test_accuracy"
) -> dict[str, float] | None:
    """The first of a run's rows whose `value` (a dotted path such as "local.amp") is at least
    `level`: its round, and the seconds of all rounds up to it; None if none is. FedKF's Table VIII,
    with the level FedAvg's last AMP."""
    seconds = 0.0
    for row in rows:
        seconds += row["seconds"]
        found: Any = row
        for key in value.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None and found >= level:
            return {"round": row["round"], "seconds": seconds}
    return None
