"""Condensation losses other than the squared distance of mean features. FedAF (Wang et al. 2024,
arXiv 2404.18962) has two losses in logit space. They are collaborative data condensation's sliced
Wasserstein distance (Eq. 10), and local-global knowledge matching in the server's training (Eqs.
12-15). Both are differentiable with respect to the network's side. The gradient is finite even if
both sides are equal.

`DistributionMatcher` matches whole distributions of features by geomloss' Gaussian-kernel, energy
and Sinkhorn losses. FedDM and FedAF match class means of u_w (Eqs. 9 and 4). Here the loss of a
class is a divergence between the point clouds {u_w(x): x ∈ B_c} and {u_w(s): s ∈ S_c}. The points
are in units of √D (D coordinates), so that `blur` means the same for every network. Losses are
scaled so that for wide blur the Gaussian and the Sinkhorn loss become the squared distance of the
means. Learning rates therefore carry over. The loss needs every example's features, not only their
sum. No mechanism protects single features, so the loss is refused with differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.errors import SettingError, one_line
from fedsynth.own_code import load_own, names_code, unloaded_file
from fedsynth.synthesizer.condensation import matching
from fedsynth.validation import check_choice

# The type of losses between the features of real records [B, D] and of synthetic records [M, D]. A
# loss returns a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]

DISTANCES = ("point", "rows", "sorted")
REDUCTIONS = ("mean", "sum")


def average_over_holders(
    values_KCC: Sequence[Tensor], present_KC: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Averages one row per class over the clients that have the class (Eqs. 8 and 12).

    Returns the averages [C, C], and a mask [C] of the classes with examples at any client. All
    other rows are zero and must not be used.

    The paper divides by K even if a client has no example of a class, although v_{k,c} is then
    undefined. Here only clients with examples of the class count.
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
    """Computes the distance between the synthetic images' mean logits and the global mean logits.

    It is the scalar collaborative loss Σ_c SWD(u_{k,c}, v_c), summed over all clients (Eq. 10).

    Args:
        u_SC: the mean logits of each (client, class) pair's synthetic images.
        v_SC: the global knowledge of each pair's class.
        client_S: the client of each pair.
        distance: the kind of distance. With "point" each u and v is one point, and the distance
            E_θ|θ·(u − v)| over unit vectors θ is exactly κ_C·‖u − v‖ with κ_C = Γ(C/2) / (√π·Γ((C +
            1)/2)). With "rows" the rows u and v of a client are two point clouds, which are
            compared along the random `directions_PC`. The result is multiplied by the number of
            rows, so that it is a sum over classes, too. With "sorted" it is the Wasserstein
            distance between u's and v's coordinates. It ignores which coordinate belongs to which
            class, and is for comparison only.
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
    """Sorts each column's values, separately for each client's rows.

    The numbers of rows per client need not be known, so the host does not wait for the device.
    """
    order = values_SP.argsort(dim=0)
    grouped = client_S[order].argsort(dim=0, stable=True)
    return values_SP.gather(0, order.gather(0, grouped))


def point_factor(dimension: int) -> float:
    """Returns E|θ₁|, the mean absolute first coordinate of a random unit vector θ."""
    ratio = math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2))
    return ratio / math.sqrt(math.pi)


def logits_gradient(
    features: matching.NetworkFeatures,
    synthetic_SICHW: Tensor,
    classes: int,
    distance: Callable[[Tensor], Tensor],
    weight: float,
) -> Tensor:
    """Computes the logit loss's gradient with respect to synthetic images, [S, ipc, C, H, W].

    The loss is weight·distance(u) for the mean logits u.

    Args:
        features, synthetic_SICHW: see `matching_gradient`. The logits' weight b must be 1.
        classes: C, the number of logits, which are the features' last coordinates.
        distance: a function from each pair's mean logits u [S, C] (FedAF, Eq. 6) to a scalar.
        weight: λ_loc.
    """
    means = matching.frozen_means(features, synthetic_SICHW)
    u_SC = means[:, -classes:].contiguous().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(distance(u_SC), u_SC)
    cotangents = F.pad(gradient * weight, (means.shape[1] - classes, 0))
    return matching.pull_back(features, synthetic_SICHW, lambda means, numbers: cotangents[numbers])


def unit_directions(count: int, dimension: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields uniformly random unit vectors [count, dimension] forever, on the generator's
    device.
    """
    while True:
        drawn = torch.randn(count, dimension, generator=generator, device=generator.device)
        yield drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True)


def mean_logits(logits_NC: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each class's mean logits [C, C], and a mask [C] of the classes with examples."""
    members = F.one_hot(labels_N, logits_NC.shape[1]).to(logits_NC.dtype)
    count = members.sum(dim=0)
    return (members.T @ logits_NC) / count.clamp_min(1)[:, None], count > 0


def soft_labels(mean_logits_CC: Tensor, temperature: float) -> Tensor:
    """Returns the soft labels softmax(v/τ) for each row v of mean logits."""
    return torch.softmax(mean_logits_CC / temperature, dim=1)


def knowledge_matching(
    mean_CC: Tensor, soft_CC: Tensor, usable_C: Tensor, temperature: float, reduction: str = "mean"
) -> Tensor:
    """Computes the knowledge-matching loss between two sets of soft labels (Eq. 15).

    The loss is L_LGKM = ½(KL(R‖T) + KL(T‖R)), over the usable classes' rows.

    Args:
        mean_CC: t_c before the softmax. T is softmax(mean_CC/τ) (Eq. 13).
        soft_CC: R.
        usable_C: a mask of the rows defined on both sides. If there are none, the loss is 0.
        temperature: τ.
        reduction: "mean" over the usable rows, or "sum". Eq. 15 has a distribution for each class,
            but no normaliser. A sum grows with the number of classes C, while the cross-entropy
            does not.
    """
    log_t = torch.log_softmax(mean_CC / temperature, dim=1)
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


def loss_gradient(loss: Loss, real: Tensor, synthetic: Tensor) -> Tensor:
    """Returns the loss's gradient with respect to one class's synthetic features [M, D]."""
    leaf = synthetic.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(real, leaf)
        if value.dim():
            raise ValueError(f"the loss must return a scalar, got shape {list(value.shape)}")
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient


SCALE = 4.0  # in units of √D: several times the spread of instance-normalised features
MATCHINGS = ("mean", "gaussian", "energy", "sinkhorn")
# User-defined losses, by label.
_CUSTOM: dict[str, Loss] = {}


def register_loss_file(setting: str) -> str:
    """Registers a loss from a Python file, and returns its name for settings, `FILE.py:NAME@HASH`.

    Args:
        setting: FILE.py:NAME. The function gets one class's real features [B, D] and synthetic
            features [M, D], and returns a scalar. The file is executed.

    Raises:
        SettingError: the file cannot be read or executed, or does not define the name.
    """
    loss, label = load_own("method", "matching", setting)
    _CUSTOM[label] = loss
    return label


def check_matching(name: str) -> None:
    """Raises an error if a matching loss's name is unknown."""
    if names_code(name) and name not in _CUSTOM:
        raise unloaded_file("method", "matching", name)
    check_choice("method", "matching", name, (*MATCHINGS, *_CUSTOM))


def refuse_private(kind: str) -> None:
    """Raises SettingError for a matching loss that no privacy mechanism protects."""
    if kind != "mean":
        reason = f"is {kind!r}, which has no differential privacy. Set method.matching=mean"
        raise SettingError("method", "matching", reason)


class DistributionMatcher(matching.MatchingObjective):
    """Matches the feature distribution of synthetic images to that of real images.

    It is not differentially private. It computes ∇_S Σ_c divergence(u(B_c), u(S_c)).

    Args:
        exact: draws the real batches.
        kind: the divergence, "gaussian", "energy" or "sinkhorn" (debiased, with squared
            distances), or the name of a custom loss.
        blur: the kernel's standard deviation or the square root of the entropic regularisation, in
            units of √D. "energy" does not use it.
        columns: the number of matched leading coordinates of u. With None, all are matched.
    """

    def __init__(
        self, exact: matching.ExactMatcher, kind: str, blur: float, columns: int | None = None
    ) -> None:
        self._exact = exact
        self._columns = columns
        self._custom = _CUSTOM.get(kind)
        if self._custom is not None:
            return
        from geomloss import SamplesLoss

        # A fixed initial scale: by default geomloss derives one from all pairs, which would
        # make a client's images depend on other clients of its group.
        self._loss = SamplesLoss(kind, p=2, blur=blur, diameter=SCALE, backend="tensorized")
        self._factor = 2.0
        if kind == "gaussian":
            self._factor *= blur**2

    def gradient(self, step: int, features: matching.NetworkFeatures, synthetic: Tensor) -> Tensor:
        rows, weights = _padded(*self._exact.real_rows(step, features))
        rows = rows[..., : self._columns]
        ipc = synthetic.shape[1]
        out = torch.empty_like(synthetic)
        for numbers in matching.passes(features, synthetic):
            u, pull = features.vjp(synthetic[numbers].flatten(0, 1), numbers.repeat_interleave(ipc))
            u_GID = u.view(len(numbers), ipc, -1)
            cotangents = self._cotangents(u_GID, rows[numbers], weights[numbers])
            out[numbers] = pull(cotangents.flatten(0, 1)[None])[0].view_as(synthetic[numbers])
        return out

    def _cotangents(self, u_GID: Tensor, real_GBD: Tensor, weights_GB: Tensor) -> Tensor:
        """Returns the loss's gradient with respect to the synthetic images' features, [G, ipc,
        D]."""
        width = real_GBD.shape[2]
        if self._custom is not None:
            gradient = torch.zeros_like(u_GID)
            try:
                for out, u, real, weights in zip(
                    gradient, u_GID, real_GBD, weights_GB, strict=True
                ):
                    out[:, :width] = loss_gradient(self._custom, real[weights > 0], u[:, :width])
            except Exception as error:
                cause = f"{type(error).__name__}: {one_line(error)}"
                reason = f"cannot be used, because the loss raises {cause}. Correct the loss"
                raise SettingError("method", "matching", reason) from error
            return gradient
        leaf = u_GID.detach().requires_grad_()
        even = leaf.new_full(leaf.shape[:2], 1 / leaf.shape[1])
        with torch.enable_grad():
            divergence_G = self._loss(
                even, leaf[..., :width] / width**0.5, weights_GB, real_GBD / width**0.5
            )
            (gradient,) = torch.autograd.grad(self._factor * width * divergence_G.sum(), leaf)
        return gradient


def _padded(rows_ND: Tensor, pair_N: Tensor, sizes_S: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each (client, class) pair's rows, padded to a common number, [S, B, D].

    Also returns weights [S, B], which sum to 1 for each pair and are 0 for the padding.

    Args:
        rows_ND: the rows of all pairs.
        pair_N: each row's pair index, ascending.
        sizes_S: each pair's number of rows, as in `BatchIndices`, on the CPU so that the host need
            not wait for the GPU.
    """
    largest = int(sizes_S.max())
    sizes = sizes_S.to(pair_N.device, non_blocking=True)
    first = sizes.cumsum(0) - sizes
    position = torch.arange(len(pair_N), device=pair_N.device) - first[pair_N]
    # Padded with the pair's first row and not with zeros: a distant point of weight zero would
    # still widen Sinkhorn's first blur.
    rows = rows_ND[first.clamp_max(len(pair_N) - 1)][:, None].repeat(1, largest, 1)
    rows[pair_N, position] = rows_ND
    weights = rows_ND.new_zeros(len(sizes_S), largest)
    weights[pair_N, position] = 1 / sizes[pair_N].to(rows_ND.dtype)
    return rows, weights
