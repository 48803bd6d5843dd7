"""FedAF's losses in logit space (Wang et al. 2024, arXiv 2404.18962): the sliced Wasserstein
distance of collaborative data condensation (Eq. 10) and the local-global knowledge matching of the
server's training (Eqs. 12-15).

Every loss is differentiable with respect to the network's side, and its gradient is not NaN where
the two sides are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.synthesizer.condensation.matching import FeatureMap, frozen_means, pull_back

DISTANCES = ("point", "rows", "sorted")
REDUCTIONS = ("mean", "sum")


def average_over_holders(
    values_KCC: Sequence[Tensor], present_KC: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns (the mean of each class's row over the clients that have the class [C, C], a mask of
    the classes that at least one client has [C]) (Eqs. 8 and 12).

    The paper divides by K even if a client has no example of a class, so that its v_{k,c} is
    undefined; here only clients that have the class count. The row of a class that no client has is
    zero and must not be used.
    """
    values = torch.stack(list(values_KCC))
    present = torch.stack(list(present_KC)).to(torch.bool)
    weights = present.to(values.dtype)
    count = weights.sum(dim=0)
    total = torch.einsum("kc,kcd->cd", weights, torch.where(present[..., None], values, 0.0))
    return total / count.clamp_min(1)[:, None], count > 0


def collaborative_distance(
    u_SC: Tensor, v_SC: Tensor, client_S: Tensor, *, distance: str, directions_PC: Tensor
) -> Tensor:
    """Returns the collaborative loss Σ_c SWD(u_{k,c}, v_c) of each client of a group (Eq. 10),
    summed over clients: a scalar.

    Args:
        u_SC: mean logits of the synthetic images of each segment.
        v_SC: the global knowledge of the segment's class.
        client_S: the client of each segment.
        distance: "point": each u and v is one point, and the distance E_θ|θ·(u − v)| over unit
            vectors θ is exactly κ_C·‖u − v‖ with κ_C = Γ(C/2) / (√π·Γ((C + 1)/2)). "rows": a
            client's rows u against its rows v as two point clouds, along the random
            `directions_PC`, times the number of rows (so that it is a sum over classes too).
            "sorted": the Wasserstein distance between the coordinates of u and of v, which ignores
            which class is which; for comparison only.
        directions_PC: unit vectors, for "rows".
    """
    if distance == "point":
        return point_factor(u_SC.shape[1]) * _norms(u_SC - v_SC).sum()
    if distance == "sorted":
        difference = u_SC.sort(dim=1).values - v_SC.sort(dim=1).values
        return difference.abs().mean(dim=1).sum()
    along_u = _sorted_by_client(u_SC @ directions_PC.T, client_S)
    along_v = _sorted_by_client(v_SC @ directions_PC.T, client_S)
    return (along_u - along_v).abs().mean(dim=1).sum()


def _sorted_by_client(values_SP: Tensor, client_S: Tensor) -> Tensor:
    """Returns each column sorted within the rows of each client, one client after another. The
    numbers of rows per client need not be known, so the host does not wait for the device."""
    order = values_SP.argsort(dim=0)
    grouped = client_S[order].argsort(dim=0, stable=True)
    return values_SP.gather(0, order.gather(0, grouped))


def point_factor(dimension: int) -> float:
    """Returns E|θ₁| for a uniform unit vector θ in this dimension."""
    ratio = math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2))
    return ratio / math.sqrt(math.pi)


def logits_gradient(
    features: FeatureMap,
    synthetic_SICHW: Tensor,
    classes: int,
    distance: Callable[[Tensor], Tensor],
    weight: float,
) -> Tensor:
    """Returns weight·∇_S distance(u), [S, ipc, C, H, W].

    Args:
        features, synthetic_SICHW: see `matching_gradient`; the logits' weight b is 1.
        classes: C, the number of logits: the last coordinates of the features.
        distance: (mean logits u of the segments' synthetic images [S, C], FedAF's Eq. 6) -> scalar.
        weight: λ_loc.
    """
    means = frozen_means(features, synthetic_SICHW)
    u_SC = means[:, -classes:].contiguous().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(distance(u_SC), u_SC)
    cotangents = F.pad(gradient * weight, (means.shape[1] - classes, 0))
    return pull_back(features, synthetic_SICHW, lambda means, numbers: cotangents[numbers])


def unit_directions(count: int, dimension: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields uniform unit vectors [count, dimension] on the generator's device, again and again."""
    while True:
        drawn = torch.randn(count, dimension, generator=generator, device=generator.device)
        yield drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)


def mean_logits(logits_NC: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (mean logits of each class [C, C], a mask of the classes that occur [C])."""
    members = F.one_hot(labels_N, logits_NC.shape[1]).to(logits_NC.dtype)
    count = members.sum(dim=0)
    return (members.T @ logits_NC) / count.clamp_min(1)[:, None], count > 0


def soft_labels(mean_logits_CC: Tensor, temperature: float) -> Tensor:
    """Returns softmax(v/τ) by row."""
    return torch.softmax(mean_logits_CC / temperature, dim=1)


def knowledge_matching(
    mean_logits_CC: Tensor,
    soft_CC: Tensor,
    usable_C: Tensor,
    temperature: float,
    reduction: str = "mean",
) -> Tensor:
    """Returns L_LGKM = ½(KL(R‖T) + KL(T‖R)), Eq. 15, over the usable classes' rows.

    Args:
        mean_logits_CC: t_c before its softmax; T = softmax(mean_logits/τ) (Eq. 13).
        soft_CC: R.
        usable_C: which rows exist on both sides; without any the loss is 0.
        reduction: "mean" over the usable rows, or their "sum". Eq. 15 gives no normaliser, and a
            distribution for each class. A sum is C times as strong and grows with the number of
            classes, while the cross-entropy does not.
    """
    log_t = torch.log_softmax(mean_logits_CC / temperature, dim=1)
    log_r = soft_CC.clamp_min(torch.finfo(soft_CC.dtype).tiny).log()
    both = ((soft_CC - log_t.exp()) * (log_r - log_t)).sum(dim=1) / 2
    total = torch.where(usable_C, both, 0.0).sum()
    if reduction == "sum":
        return total
    return total / usable_C.sum().clamp_min(1)


def _norms(rows: Tensor) -> Tensor:
    """Returns L2 norms by row, with gradient zero (and not NaN) at zero."""
    squares = rows.square().sum(dim=1)
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
