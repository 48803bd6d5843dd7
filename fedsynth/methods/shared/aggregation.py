"""Averages of models on the server: over the clients of a round (ACA), and over the last model of
every client (OCA; FedKF, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import ModelParameters
from fedsynth.methods.shared.robust import robust_mean


@dataclass(frozen=True)
class AveragingState(ServerState):
    """The state of a method that averages models.

    Args:
        cache: every client's last model, [K, …] for each parameter; {}: not kept. The slot of a
            client that has sent none holds w⁰ (FedKF, Algorithm 1, line 2).
        seen: which clients have sent a model, bool [K].
        overall: OCA; {}: not kept.
    """

    cache: Mapping[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None
    overall: Mapping[str, Tensor] = field(default_factory=dict)


Averaging = TypeVar("Averaging", bound=AveragingState)


def average(uploads: Mapping[int, ModelParameters], *, uniform: bool = False) -> dict[str, Tensor]:
    """Returns Σ_k weight_k · parameters_k / Σ_k weight_k, summed in float64, one upload at a time,
    by client index; counters (integer buffers) are taken from the first upload.

    Args:
        uploads: by client index, with a total weight above zero.
        uniform: weight all uploads equally instead.
    """
    models = [upload.parameters for upload in uploads.values()]
    weights = [upload.weight for upload in uploads.values()]
    if uniform:
        weights = [1.0] * len(models)
    return _weighted_mean(models, weights)


def _weighted_mean(
    models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    total = sum(weights)
    mean: dict[str, Tensor] = {}
    for name, value in models[0].items():
        mean[name] = value
        if value.is_floating_point():
            weighted_sum = torch.zeros_like(value, dtype=torch.float64)
            for model, weight in zip(models, weights, strict=True):
                weighted_sum.add_(model[name].double(), alpha=weight / total)
            mean[name] = weighted_sum.to(value.dtype)
    return mean


def trainable(context: RoundContext) -> list[str]:
    """Returns the names of the parameters, without buffers."""
    return [name for name, _ in context.architecture.named_parameters()]


def update_cache(
    state: Averaging,
    previous: AveragingState,
    uploads: Mapping[int, ModelParameters],
    context: RoundContext,
    *,
    all_slots: bool = False,
) -> Averaging:
    """Returns `state` with the cache after a round, and its OCA.

    With differential privacy, where n_k is private, clients have equal weight in OCA; who has taken
    part is public.

    Args:
        previous: the state before the round.
        uploads: of the round; those of weight 0 (dropped, or without an example) do not count.
        all_slots: average all K slots, also those that hold w⁰ (FedKF, Algorithm 1, line 10). The
            official code averages only clients that have sent a model: at least one.
    """
    K = context.clients
    if previous.seen is None:
        cache = {n: w[None].repeat(K, *[1] * w.dim()) for n, w in previous.parameters.items()}
        seen = torch.zeros(K, dtype=torch.bool, device=context.device)
    else:
        cache = {name: slots.clone() for name, slots in previous.cache.items()}
        seen = previous.seen.clone()
    for client, upload in uploads.items():
        if upload.weight:
            seen[client] = True
            for name, value in upload.parameters.items():
                cache[name][client] = value
    averaged = range(K) if all_slots else seen.nonzero()[:, 0].tolist()
    models = [{name: slots[k] for name, slots in cache.items()} for k in averaged]
    if context.robust == "none":
        sizes = context.sizes or [1] * K
        overall = _weighted_mean(models, [sizes[k] for k in averaged])
    else:
        overall = robust_mean(models, previous.parameters, context)
    return replace(state, cache=cache, seen=seen, overall=overall)
