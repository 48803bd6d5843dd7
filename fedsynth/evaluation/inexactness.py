"""Progress of local training: FedProx's γ-inexactness (Li et al. 2020, arXiv 1812.06127, Definition
2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsynth.errors import DataError
from fedsynth.models.flat import flatten, flatten_named

CHUNK = 1024


def inexactness(
    model: nn.Module,
    start: Mapping[str, Tensor],
    images_NCHW: Tensor,
    labels_N: Tensor,
    mu: float = 0.0,
) -> float:
    """Returns γ = ‖∇F(w) + μ(w − w_t)‖ / ‖∇F(w_t)‖, F a client's mean cross-entropy: 0 for an exact
    solution of its subproblem, 1 for no work.

    It reads the client's data: for simulations only.

    Args:
        model: w, a client's network after its training; it is not changed.
        start: w_t, the parameters and buffers that it started from.
        images_NCHW, labels_N: all of the client's examples, normalised.
        mu: μ of the proximal term.

    Raises:
        DataError: there is no example, so F has no gradient.
    """
    if not len(labels_N):
        raise DataError("γ-inexactness needs a client with examples, got none")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    training = model.training
    model.eval()
    try:
        gradient = _gradient(model, images_NCHW, labels_N)
        moved = flatten(model) - flatten_named(start, model)
        model.load_state_dict(dict(start))
        at_start = _gradient(model, images_NCHW, labels_N)
    finally:
        model.load_state_dict(state)
        model.train(training)
    return float((gradient + mu * moved).norm() / at_start.norm())


def _gradient(model: nn.Module, images_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """Returns ∇F as one vector."""
    weights = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in weights), device=images_NCHW.device)
    for x, y in zip(images_NCHW.split(CHUNK), labels_N.split(CHUNK), strict=True):
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
    return total / len(labels_N)
