"""FedAF's knowledge in logit space (Wang et al. 2024, arXiv 2404.18962): what clients share, and
the two losses that use it.

A client sends its class-mean logits v_{k,c} (Eq. 5); the server averages them to v_c (Eq. 8).
During condensation, a client pulls its synthetic images' mean logits u_{k,c} towards v_c by a
sliced Wasserstein distance (collaborative data condensation, Eq. 10). During training, the server
pulls its own soft labels on the synthetic set towards the clients' (local-global knowledge
matching, Eqs. 12-15).

Every function here is differentiable with respect to the network's side, and its gradient is not
NaN where the two sides are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.mixed_precision import mixed, widened
from fedsynth.synthesizer.condensation.matchers import FeatureMap, Matcher, frozen_means, pull_back

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
    mean = (
        torch.einsum("kc,kcd->cd", weights, torch.where(present[..., None], values, 0.0))
        / count.clamp_min(1)[:, None]
    )
    return mean, count > 0


def sliced_wasserstein(
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
        apart: Tensor = u_SC.sort(dim=1).values - v_SC.sort(dim=1).values
        return apart.abs().mean(dim=1).sum()
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
    return math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2)) / math.sqrt(
        math.pi
    )


class KnowledgeMatcher:
    """Adds λ_loc·∇_S Σ_c SWD(u_c, v_c) to another matcher's gradient (Eqs. 4 and 10 together);
    accesses no data.

    Args:
        inner: distribution matching.
        global_SC: v_c of each segment's class.
        client_S: the client of each segment.
        known_S: whether a v_c exists for the segment's class; the term ignores other segments.
        weight: λ_loc.
        logit_weight: b of the features' logits (the last C coordinates), above 0.
        directions: draws the step's unit vectors; only "rows" uses them.
    """

    def __init__(
        self,
        inner: Matcher,
        global_SC: Tensor,
        client_S: Tensor,
        known_S: Tensor,
        *,
        weight: float,
        logit_weight: float,
        distance: str,
        directions: Callable[[], Tensor],
    ) -> None:
        self._inner = inner
        self._weight = weight
        self._logit_weight = logit_weight
        self._distance = distance
        self._known = known_S.nonzero().flatten()  # once: this waits for the device
        self._global = global_SC[self._known]
        self._client = client_S[self._known]
        self._directions = directions

    def skip(self, steps: int) -> None:
        """Consumes the random draws of `steps` steps, so that a resumed loop uses the same ones."""
        for _ in range(steps):
            self._directions()

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        matched = self._inner.gradient(step, features, synthetic)
        means = frozen_means(features, synthetic)
        logits = (means[:, -self._global.shape[1] :] / self._logit_weight).requires_grad_()
        with torch.enable_grad():
            pull = sliced_wasserstein(
                logits[self._known],
                self._global,
                self._client,
                distance=self._distance,
                directions_PC=self._directions(),
            )
            (gradient,) = torch.autograd.grad(pull, logits)
        width = means.shape[1]
        cotangents = torch.nn.functional.pad(
            gradient * (self._weight / self._logit_weight), (width - gradient.shape[1], 0)
        )
        return matched + pull_back(features, synthetic, lambda means, numbers: cotangents[numbers])


def unit_directions(count: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Returns uniform unit vectors [count, dimension] on the generator's device."""
    drawn = torch.randn(count, dimension, generator=generator, device=generator.device)
    unit: Tensor = drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
    return unit


def class_means(logits_NC: Tensor, labels_N: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns (mean logits of each class [classes, C], a mask of the classes that occur
    [classes])."""
    members = F.one_hot(labels_N, classes).to(logits_NC.dtype)
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
    return total if reduction == "sum" else total / usable_C.sum().clamp_min(1)


@dataclass(frozen=True)
class KnowledgeTerm:
    """λ_glob·L_LGKM, which is added to the cross-entropy while the server trains (Eqs. 13-15).

    Args:
        soft: R [C, C].
        known: which of its rows exist [C].
        weight: λ_glob.
        temperature: τ of T.
        reduction: see `knowledge_matching`.
        running: in the pass that computes T, batch norm uses running statistics, as in the pass
            that computed R, instead of the batch's, as in training.
        precision: of the network's passes (`fedsynth.mixed_precision`); losses are float32.
    """

    soft: Tensor
    known: Tensor
    weight: float
    temperature: float
    reduction: str = "mean"
    running: bool = False
    precision: torch.dtype = torch.float32

    def with_cross_entropy(self, network: nn.Module, images: Tensor, labels_N: Tensor) -> Tensor:
        """Returns the loss of a minibatch, with t_c over the minibatch's images."""
        logits = self._says(network, images)
        plain = F.cross_entropy(logits, labels_N)
        if self.running:
            return plain + self(network, images, labels_N)
        return plain + self._of_logits(logits, labels_N)

    def __call__(self, network: nn.Module, images: Tensor, labels_N: Tensor) -> Tensor:
        """Returns only the term, with t_c over these images, which may differ from those of the
        step."""
        network.train(not self.running)
        logits = self._says(network, images)
        network.train()
        return self._of_logits(logits, labels_N)

    def _says(self, network: nn.Module, images: Tensor) -> Tensor:
        with mixed(images.device, self.precision):
            logits: Tensor = network(images)
        return widened(logits)

    def _of_logits(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        means, there = class_means(logits_NC, labels_N, len(self.known))
        usable = there & self.known
        return self.weight * knowledge_matching(
            means, self.soft, usable, self.temperature, self.reduction
        )


def _norms(rows: Tensor) -> Tensor:
    """Returns L2 norms by row, with gradient zero (and not NaN) at zero."""
    squares = rows.square().sum(dim=1)
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
