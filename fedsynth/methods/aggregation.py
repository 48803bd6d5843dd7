"""Averages of models on the server: over the clients of a round (ACA), and over the last model of every client (OCA; FedKF, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import RoundContext, ServerState

SLOT = "cache."


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
    """The server's cache after a round, to be kept: one slot a client, [K, …] for each parameter; a client never active yet holds w⁰."""
    cache = {name: value for name, value in state.kept.items() if name.startswith(SLOT)}
    if not cache:
        cache = {
            SLOT + name: value[None].repeat(context.clients, *[1] * value.dim())
            for name, value in state.parameters.items()
        }
    active = context.participants or range(context.clients)
    fresh = {name: slots.clone() for name, slots in cache.items()}
    for client, upload in zip(active, uploads, strict=True):
        if upload.weight == 0:  # dropped, or without an example: it has trained nothing that counts
            continue
        for name, value in upload.parameters.items():
            fresh[SLOT + name][client] = value
    return fresh


def overall_average(kept: Mapping[str, Tensor], context: RoundContext) -> dict[str, Tensor]:
    """OCA: the average of all slots, weighted by n_k; with differential privacy, where n_k is private, every client counts alike."""
    sizes = torch.tensor(context.sizes or [1] * context.clients, dtype=torch.float64)
    weights = sizes / sizes.sum().clamp_min(1)
    return {
        name.removeprefix(SLOT): torch.tensordot(
            weights.to(slots.device), slots.double(), dims=1
        ).to(slots.dtype)
        if slots.is_floating_point()
        else slots[0]
        for name, slots in kept.items()
        if name.startswith(SLOT)
    }
