"""FedProx's γ-inexactness, which measures the progress of local training (Li et al. 2020, arXiv
1812.06127, Definition 2)."""

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
    """Computes the γ-inexactness ‖∇F(w) + μ(w − w_t)‖ / ‖∇F(w_t)‖ of a client's local training.

    F is the mean cross-entropy on the client's data. γ is 0 if the client has solved its local
    problem exactly, and 1 if the client has not trained at all. The function reads the client's
    data, so only a simulation may call it.

    Args:
        model: the client's network after training, with weights w. It is not changed.
        start: the parameters and buffers w_t with which the client started.
        images_NCHW, labels_N: all examples of the client. The images are normalised.
        mu: μ, the weight of the proximal term.

    Raises:
        DataError: the client has no examples, so F has no gradient.
    """
    if not len(labels_N):
        raise DataError("γ-inexactness needs at least one example, but the client has none")
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
    """Computes ∇F as a single vector."""
    weights = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in weights), device=images_NCHW.device)
    for x, y in zip(images_NCHW.split(CHUNK), labels_N.split(CHUNK), strict=True):
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])
    return total / len(labels_N)
