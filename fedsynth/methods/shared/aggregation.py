"""Averages of models on the server: over the clients of a round (ACA), and over the last model of
every client (OCA; FedKF, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.state import ServerState
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


def average(uploads: Mapping[int, ModelParameters], *, even: bool = False) -> dict[str, Tensor]:
    """Returns Σ_k weight_k · parameters_k / Σ_k weight_k, summed in float64, one upload at a time,
    by client index; counters (integer buffers) are taken from the first upload.

    Args:
        uploads: by client index, with a total weight above zero.
        even: weight all uploads equally instead.
    """
    sent = list(uploads.values())
    weights = [1.0 if even else u.weight for u in sent]
    total = sum(weights)
    mean: dict[str, Tensor] = {}
    for name, value in sent[0].parameters.items():
        if not value.is_floating_point():
            mean[name] = value
            continue
        total_so_far = torch.zeros_like(value, dtype=torch.float64)
        for upload, weight in zip(sent, weights, strict=True):
            total_so_far.add_(upload.parameters[name].double(), alpha=weight / total)
        mean[name] = total_so_far.to(value.dtype)
    return mean


def trainable(context: RoundContext) -> list[str]:
    """Returns the names of the parameters, without buffers."""
    return [name for name, _ in context.architecture.named_parameters()]


def cached(
    state: Averaging,
    before: AveragingState,
    uploads: Mapping[int, ModelParameters],
    context: RoundContext,
    *,
    everybody: bool = False,
) -> Averaging:
    """Returns `state` with the cache after a round, and its OCA.

    Args:
        before: the state before the round.
        uploads: of the round; those of weight 0 (dropped, or without an example) do not count.
        everybody: as in `overall_average`.
    """
    device = next(iter(before.parameters.values())).device
    seen = before.seen
    if seen is None:
        seen = torch.zeros(context.clients, dtype=torch.bool, device=device)
    slots = before.cache or {
        name: value[None].repeat(context.clients, *[1] * value.dim())
        for name, value in before.parameters.items()
    }
    seen = seen.clone()
    cache = {name: value.clone() for name, value in slots.items()}
    for client, upload in uploads.items():
        if upload.weight == 0:
            continue
        seen[client] = True
        for name, value in upload.parameters.items():
            cache[name][client] = value
    if context.robust == "none":
        overall = overall_average(cache, seen, context, everybody=everybody)
    else:
        counted = range(context.clients) if everybody else seen.nonzero()[:, 0].tolist()
        slots_of = [{name: value[k] for name, value in cache.items()} for k in counted]
        overall = robust_mean(slots_of, before.parameters, context)
    return replace(state, cache=cache, seen=seen, overall=overall)


def overall_average(
    cache: Mapping[str, Tensor], seen: Tensor, context: RoundContext, *, everybody: bool = False
) -> dict[str, Tensor]:
    """Returns OCA: the average, weighted by n_k, of all clients that have sent a model.

    Args:
        cache, seen: see `AveragingState`; at least one client has sent a model.
        everybody: average all K slots, also those that hold w⁰ (FedKF, Algorithm 1, line 10). The
            official code averages only clients that have sent a model.

    With differential privacy, where n_k is private, clients have equal weight; who has taken part
    is public.
    """
    sizes = torch.tensor(context.sizes or [1] * context.clients, dtype=torch.float64)
    counted = sizes if everybody else sizes * seen.to(sizes)
    weights = counted / counted.sum().clamp_min(1)
    overall: dict[str, Tensor] = {}
    for name, slots in cache.items():
        if not slots.is_floating_point():
            overall[name] = slots[0]
            continue
        mean = torch.zeros_like(slots[0], dtype=torch.float64)
        for slot, weight in zip(slots, weights.tolist(), strict=True):
            mean.add_(slot.double(), alpha=weight)
        overall[name] = mean.to(slots.dtype)
    return overall
