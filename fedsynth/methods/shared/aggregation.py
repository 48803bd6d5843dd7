"""Averages of models on the server.

`average` computes ACA, the average over the active clients of a round. `update_cache` also computes
OCA, the average over the last model of every client (FedKF, Algorithm 1).
"""

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
    """The state of a server that averages models.

    Args:
        cache: the last model of every client, as one tensor [K, …] for each parameter. The entry of
            a client that has sent no model yet is w⁰ (FedKF, Algorithm 1, line 2). The mapping is
            empty if the method keeps no cache.
        seen: a boolean mask [K] of the clients that have sent a model, or None without a cache.
        overall: the parameters of OCA. The mapping is empty if the method keeps no cache.
    """

    cache: Mapping[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None
    overall: Mapping[str, Tensor] = field(default_factory=dict)


Averaging = TypeVar("Averaging", bound=AveragingState)


def average(uploads: Mapping[int, ModelParameters], *, uniform: bool = False) -> dict[str, Tensor]:
    """Computes the weighted average of the uploaded models, Σ_k weight_k · parameters_k / Σ_k
    weight_k.

    The sum is in float64 and adds the uploads one after another in the order of the mapping.
    Integer buffers, such as counters, are taken from the first upload.

    Args:
        uploads: the uploads by client index. Their total weight must be above zero.
        uniform: whether all uploads have equal weight instead of their own weights.
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
    """Returns the names of the model's parameters, without buffers."""
    return [name for name, _ in context.architecture.named_parameters()]


def update_cache(
    state: Averaging,
    previous: AveragingState,
    uploads: Mapping[int, ModelParameters],
    context: RoundContext,
    *,
    all_slots: bool = False,
) -> Averaging:
    """Adds the cache after this round, and the average OCA over the cache, to a state.

    OCA weights each client by n_k. With differential privacy, where n_k is private, all clients
    have equal weight. Which clients have taken part is public.

    Args:
        state: the state to which the cache is added.
        previous: the state before the round.
        uploads: the uploads of the round. Uploads of weight 0, from clients that were dropped or
            have no examples, are ignored.
        context: the context of the round.
        all_slots: whether OCA averages all K entries of the cache, including those that still hold
            w⁰ (FedKF, Algorithm 1, line 10). Otherwise it averages only the clients that have sent
            a model, as in the official code.
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
