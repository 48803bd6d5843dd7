"""FedAF's losses in logit space (Wang et al. 2024, arXiv 2404.18962).

They are the sliced Wasserstein distance of collaborative data condensation (Eq. 10), and the
local-global knowledge matching of the server's training (Eqs. 12-15). Every loss is differentiable
with respect to the network's side. Its gradient is finite even if both sides are equal.
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
    """Averages each class's row over the clients that have the class (Eqs. 8 and 12).

    Returns the averages [C, C], and a mask [C] of the classes that at least one client has. The row
    of a class that no client has is zero and must not be used.

    The paper divides by K even if a client has no example of a class, although v_{k,c} is then
    undefined. Here only clients that have the class count.
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
    """Returns the collaborative loss Σ_c SWD(u_{k,c}, v_c), summed over all clients, a scalar (Eq.
    10).

    Args:
        u_SC: the mean logits of the synthetic images of each (client, class) pair.
        v_SC: the global knowledge of each pair's class.
        client_S: the client of each pair.
        distance: the kind of distance. With "point" each u and v is one point, and the distance
            E_θ|θ·(u − v)| over unit vectors θ is exactly κ_C·‖u − v‖ with κ_C = Γ(C/2) / (√π·Γ((C +
            1)/2)). With "rows" the rows u and v of a client are two point clouds, which are
            compared along the random `directions_PC`. The result is multiplied by the number of
            rows, so that it is a sum over classes, too. With "sorted" it is the Wasserstein
            distance between the coordinates of u and of v. This distance ignores which coordinate
            belongs to which class, and is for comparison only.
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
    """Sorts each column within the rows of each client, one client after another.

    The numbers of rows per client need not be known, so the host does not wait for the device.
    """
    order = values_SP.argsort(dim=0)
    grouped = client_S[order].argsort(dim=0, stable=True)
    return values_SP.gather(0, order.gather(0, grouped))


def point_factor(dimension: int) -> float:
    """Returns E|θ₁| for a uniformly random unit vector θ of this dimension."""
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
        features, synthetic_SICHW: see `matching_gradient`. The weight b of the logits must be 1.
        classes: C, the number of logits. They are the last coordinates of the features.
        distance: a function from the mean logits u of each pair's synthetic images [S, C] (FedAF,
            Eq. 6) to a scalar.
        weight: λ_loc.
    """
    means = frozen_means(features, synthetic_SICHW)
    u_SC = means[:, -classes:].contiguous().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(distance(u_SC), u_SC)
    cotangents = F.pad(gradient * weight, (means.shape[1] - classes, 0))
    return pull_back(features, synthetic_SICHW, lambda means, numbers: cotangents[numbers])


def unit_directions(count: int, dimension: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields uniformly random unit vectors [count, dimension] without end, on the generator's
    device."""
    while True:
        drawn = torch.randn(count, dimension, generator=generator, device=generator.device)
        yield drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)


def mean_logits(logits_NC: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean logits of each class [C, C], and a mask [C] of the classes that occur."""
    members = F.one_hot(labels_N, logits_NC.shape[1]).to(logits_NC.dtype)
    count = members.sum(dim=0)
    return (members.T @ logits_NC) / count.clamp_min(1)[:, None], count > 0


def soft_labels(mean_logits_CC: Tensor, temperature: float) -> Tensor:
    """Returns softmax(v/τ) of each row v of mean logits."""
    return torch.softmax(mean_logits_CC / temperature, dim=1)


def knowledge_matching(
    mean_logits_CC: Tensor,
    soft_CC: Tensor,
    usable_C: Tensor,
    temperature: float,
    reduction: str = "mean",
) -> Tensor:
    """Returns L_LGKM = ½(KL(R‖T) + KL(T‖R)) (Eq. 15), over the rows of the usable classes.

    Args:
        mean_logits_CC: t_c before the softmax. T is softmax(mean_logits/τ) (Eq. 13).
        soft_CC: R.
        usable_C: the rows that exist on both sides. If there are none, the loss is 0.
        temperature: τ.
        reduction: "mean" over the usable rows, or "sum". Eq. 15 has a distribution for each class,
            but gives no normaliser. A sum is C times as strong and grows with the number of
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
    """Returns the L2 norm of each row. The gradient at zero is zero instead of NaN."""
    squares = rows.square().sum(dim=1)
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
