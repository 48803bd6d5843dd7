"""Averages of models on the server: over the clients of a round (ACA), and over the last model of every client (OCA; FedKF, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import RoundContext, ServerState

SLOT = "cache."
SEEN = "cached clients"


def average(uploads: Sequence[ModelParameters], *, even: bool = False) -> dict[str, Tensor]:
    """Σ_k weight_k · parameters_k / Σ_k weight_k, in float64; counters (integer buffers) are taken from the first upload.

    Args:
        uploads: with a weight above zero, all in all. even: all with the same weight instead.
    """
    weights = [1.0 if even else u.weight for u in uploads]
    total = sum(weights)
    return {
        name: torch.stack(
            [
                u.parameters[name].double() * (w / total)
                for u, w in zip(uploads, weights, strict=True)
            ]
        )
        .sum(dim=0)
        .to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in uploads[0].parameters.items()
    }


def trainable(context: RoundContext) -> list[str]:
    """Names of the parameters, without buffers."""
    return [name for name, _ in context.architecture.named_parameters()]


def cached(
    state: ServerState, uploads: Sequence[ModelParameters], context: RoundContext
) -> dict[str, Tensor]:
    """The server's cache after a round, to be kept: one slot a client, [K, …] for each parameter, and which
    clients have sent a model [K].

    The slot of a client that has sent none holds w⁰ (FedKF, Algorithm 1, line 2).
    """
    cache = {name: value for name, value in state.kept.items() if name.startswith(SLOT)}
    device = next(iter(state.parameters.values())).device
    seen = state.kept.get(SEEN, torch.zeros(context.clients, dtype=torch.bool, device=device))
    if not cache:
        cache = {
            SLOT + name: value[None].repeat(context.clients, *[1] * value.dim())
            for name, value in state.parameters.items()
        }
    active = context.participants or range(context.clients)
    fresh = {name: slots.clone() for name, slots in {**cache, SEEN: seen}.items()}
    for client, upload in zip(active, uploads, strict=True):
        if upload.weight == 0:  # dropped, or without an example: it has trained nothing that counts
            continue
        fresh[SEEN][client] = True
        for name, value in upload.parameters.items():
            fresh[SLOT + name][client] = value
    return fresh


def overall_average(
    kept: Mapping[str, Tensor], context: RoundContext, *, everybody: bool = False
) -> dict[str, Tensor]:
    """OCA: the average of the slots of all clients that have sent a model so far, weighted by n_k.

    Args:
        kept: what `cached` gave; somebody has sent a model. everybody: all K slots count, also those that hold
            w⁰ (FedKF, Algorithm 1, line 10). The official code averages those that it has seen.

    With differential privacy, where n_k is private, clients count alike; who has taken part is public.
    """
    sizes = torch.tensor(context.sizes or [1] * context.clients, dtype=torch.float64)
    counted = sizes if everybody else sizes * kept[SEEN].to(sizes)
    weights = counted / counted.sum().clamp_min(1)
    return {
        name.removeprefix(SLOT): torch.tensordot(
            weights.to(slots.device), slots.double(), dims=1
        ).to(slots.dtype)
        if slots.is_floating_point()
        else slots[0]
        for name, slots in kept.items()
        if name.startswith(SLOT)
    }
