"""Condensation that matches whole distributions of features instead of their means.

It uses geomloss' Gaussian-kernel, energy and Sinkhorn losses. FedDM and FedAF match class means of
u_w (Eqs. 9 and 4). Here the loss of a class is a divergence between the point clouds {u_w(x): x ∈
B_c} and {u_w(s): s ∈ S_c}. The points are in units of √D (D coordinates), so that `blur` means the
same for every network. The scale is chosen such that for wide blur the Gaussian and the Sinkhorn
loss become the squared distance of the means. Learning rates therefore carry over.

The loss needs the features of every example and not only their sum. No mechanism here protects it,
so it is refused with differential privacy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.synthesizer.condensation.matching import (
    ExactMatcher,
    FeatureMap,
    MatchingObjective,
    passes,
)

SCALE = 4.0  # in units of √D: several times the spread of instance-normalised features
MATCHINGS = ("mean", "gaussian", "energy", "sinkhorn")


def refuse_private(matching: str) -> None:
    """Raises SettingError for a matching loss that no privacy mechanism protects."""
    if matching != "mean":
        raise SettingError(
            "method",
            "matching",
            "must be mean with differential privacy, because no mechanism protects the features "
            f"of single examples, got {matching!r}",
        )


class DistributionMatcher(MatchingObjective):
    """Computes ∇_S Σ_c divergence(u(B_c), u(S_c)), without differential privacy.

    Args:
        exact: draws the real batches.
        matching: the divergence, "gaussian", "energy" or "sinkhorn" (debiased, with squared
            distances).
        blur: the kernel's standard deviation or the square root of the entropic regularisation, in
            units of √D. "energy" does not use it.
        columns: the number of leading coordinates of u that are matched. If None, all are matched.
    """

    def __init__(
        self, exact: ExactMatcher, matching: str, blur: float, columns: int | None = None
    ) -> None:
        from geomloss import SamplesLoss

        self._exact = exact
        self._columns = columns
        # A fixed initial scale: by default geomloss derives one from all segments, which would
        # make a client's images depend on other clients of its group.
        self._loss = SamplesLoss(matching, p=2, blur=blur, diameter=SCALE, backend="tensorized")
        self._factor = 2.0
        if matching == "gaussian":
            self._factor *= blur**2

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        rows, weights = _padded(*self._exact.real_rows(step, features))
        rows = rows[..., : self._columns]
        ipc = synthetic.shape[1]
        out = torch.empty_like(synthetic)
        for numbers in passes(features, synthetic):
            u, pull = features.vjp(synthetic[numbers].flatten(0, 1), numbers.repeat_interleave(ipc))
            u_GID = u.view(len(numbers), ipc, -1)
            cotangents = self._cotangents(u_GID, rows[numbers], weights[numbers])
            out[numbers] = pull(cotangents.flatten(0, 1)[None])[0].view_as(synthetic[numbers])
        return out

    def _cotangents(self, u_GID: Tensor, real_GBD: Tensor, weights_GB: Tensor) -> Tensor:
        """Returns the gradient of the loss with respect to the features of the synthetic images,
        [G, ipc, D]."""
        width = real_GBD.shape[2]
        leaf = u_GID.detach().requires_grad_()
        even = leaf.new_full(leaf.shape[:2], 1 / leaf.shape[1])
        with torch.enable_grad():
            divergence_G = self._loss(
                even, leaf[..., :width] / width**0.5, weights_GB, real_GBD / width**0.5
            )
            (gradient,) = torch.autograd.grad(self._factor * width * divergence_G.sum(), leaf)
        return gradient


def _padded(rows_ND: Tensor, segment_N: Tensor, sizes_S: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of each (client, class) pair, padded to the largest number of rows.

    The rows have the shape [S, B, D]. The function also returns weights [S, B], which sum to 1 for
    each pair and are 0 for the padding.

    Args:
        rows_ND: the rows of all pairs.
        segment_N: the index of the pair of each row, ascending.
        sizes_S: the number of rows of each pair, as in `BatchIndices`. It is on the CPU so that the
            host need not wait for the GPU.
    """
    largest = int(sizes_S.max())
    sizes = sizes_S.to(segment_N.device, non_blocking=True)
    first = sizes.cumsum(0) - sizes
    position = torch.arange(len(segment_N), device=segment_N.device) - first[segment_N]
    # Padded with the segment's first row and not with zeros: a distant point of weight zero would
    # still widen Sinkhorn's first blur.
    rows = rows_ND[first.clamp_max(len(segment_N) - 1)][:, None].repeat(1, largest, 1)
    rows[segment_N, position] = rows_ND
    weights = rows_ND.new_zeros(len(sizes_S), largest)
    weights[segment_N, position] = 1 / sizes[segment_N].to(rows_ND.dtype)
    return rows, weights
