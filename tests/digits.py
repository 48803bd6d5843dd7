"""Random images in the digits' shape, a tiny network, and clients whose releases are charged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth import ImageData, Method, PrivacySettings, RoundContext, from_arrays
from fedsynth.core.capabilities import VaryingReleases
from fedsynth.core.client import Group, PrivateClientView
from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.plans import MAIN, ReleaseBudget, charge_round
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import RECORD

SPEC, CPU = dataset_spec("digits"), torch.device("cpu")
WHITE = np.full((1, 1, 8, 8), 255, np.uint8)
NOISE = np.random.default_rng(7).integers(0, 256, (1, 1, 8, 8)).astype(np.uint8)
# Images of an additional example, for tests of sensitivity.
HOSTILE = (0 * WHITE, WHITE, NOISE)


def digits(labels: Any, extra: np.ndarray | None = None, device: torch.device = CPU) -> ImageData:
    """Returns random images with these labels; `extra` replaces the last image."""
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 1, 8, 8)).astype(np.uint8)
    if extra is not None:
        images[-1:] = extra
    return from_arrays(images, np.asarray(labels), SPEC).to(device)


def convnet(norm: str = "instance", seed: int = 0, weights: Any = None) -> Any:
    """Returns a network with embeddings of 16 numbers and ten logits, with these weights."""
    settings = ModelSettings(width=4, depth=2, norm=norm)
    network = build_model(settings, SPEC.image_shape, 10, seed)
    network.load_state_dict(weights or network.state_dict())
    return network


def round_context(
    privacy: PrivacySettings | None = None,
    number: int = 1,
    *,
    network: nn.Module | None = None,
    device: torch.device = CPU,
    seed: int = 0,
    nominal: float = 30.0,
    **federation: Any,
) -> RoundContext:
    """Returns the context of round `number`, with a ConvNet by default."""
    return RoundContext(
        number, seed, device, SPEC, network or convnet(), nominal, privacy, **federation
    )


def charge_for(
    method: Method,
    context: RoundContext,
    clients: Sequence[int],
    guards: Sequence[BudgetEnforcer],
    secrets: Sequence[SecretGenerator],
    exchange: str = MAIN,
) -> list[ReleaseBudget[GaussianSumMechanism]]:
    """Charges each client for the releases of one exchange, as a run does."""
    privacy, number, charged = context.privacy, context.round, []
    assert privacy is not None
    assert privacy.noise_multiplier is not None
    plans = method.release_plans(privacy, context)
    if isinstance(method, VaryingReleases):
        plans = method.round_plans(plans, number, context.rounds)
    for client, guard, secret in zip(clients, guards, secrets, strict=True):
        own, sigma = method.client_plans(plans, client, context), privacy.noise_multiplier
        charged.append(charge_round(own, number, sigma, guard, secret, exchange=exchange))
    return charged


def private_clients(
    method: Method,
    ctx: RoundContext,
    data: ImageData,
    parts: Sequence[Tensor] | None = None,
    ledgers: Sequence[Ledger] | None = None,
    exchange: str = MAIN,
    unit: str = RECORD,
    **view: Any,
) -> PrivateClientView:
    """Returns private clients with these parts of the data; one client has all by default."""
    parts = [torch.arange(len(data.labels))] if parts is None else parts
    ids = range(len(parts))
    ledgers = ledgers or [Ledger(str(k)) for k in ids]
    guards = [BudgetEnforcer(ledger, unit=unit) for ledger in ledgers]
    budgets = charge_for(method, ctx, ids, guards, [SecretGenerator() for _ in ids], exchange)
    return PrivateClientView(ids, data, parts, budgets, **view)


def client_uploads(
    method: Method,
    ctx: RoundContext,
    clients: Group,
    client_states: Sequence[Any] | None = None,
    state: Any = None,
) -> list[Any]:
    """Returns the clients' uploads in the first round, or in one with this state."""
    state = state or method.initial_state(ctx.architecture.state_dict())
    message = method.broadcast(state, ctx)
    results = method.client_step(message, clients, client_states or [{} for _ in clients.ids], ctx)
    return [upload for upload, _ in results]
