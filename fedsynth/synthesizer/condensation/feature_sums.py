"""Mechanism `features`: each network's class sums are released once, and condensation on them is
post-processing.

For each of M networks around the global model (drawn from the round's public seed), one release
holds for every class c

    R_{m,c} = Σ_{x ∈ c} clip_𝒞(u_m(x) − s_{m,c}) + N(0, σ²𝒞²I)
    s_{m,c} = mean_{S_c} u_m of the images as they are then,

and one more release the counts n̂_c = n_c + N(0, σ_count²). The class mean is estimated by s_{m,c}
+ R_{m,c} / max(n̂_c, floor). After that no step sees data: any number of steps over the M networks
in turn costs no privacy, and no more time than without it.

Sensitivity: s is public noise or made of earlier releases, so u_m(x) − s is a function of x alone;
an example is in one class's sum, which it moves by at most 𝒞, and in one class's count, which it
moves by 1. The M + 1 releases compose adaptively.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedsynth.core.client import PrivateClients
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.synthesizer.condensation.matchers import FeatureMap, frozen_means, pull_back


class FeatureSumMatcher:
    """A `Matcher` whose first M steps each release one network's sums; step t uses network t mod M,
    whoever draws the networks.

    Args:
        series: charged for M releases for each client.
        count_series: charged for one release of sensitivity 1.
        networks: M.
        floor: public least divisor; a class whose noisy count is below it is not `kept`.

    Attributes:
        counts: released noisy counts [S].
        kept: whether a class's count reaches the floor [S].
    """

    def __init__(
        self,
        clients: PrivateClients,
        series: Sequence[GaussianSums],
        count_series: Sequence[GaussianSums],
        networks: int,
        floor: float,
    ) -> None:
        self._clients = clients
        self._series = series
        self._networks = networks
        ones = clients.class_sums(
            count_series, lambda x_NCHW, segment_N: x_NCHW.new_ones(len(x_NCHW), 1)
        )
        self.counts: Tensor = ones[:, 0]
        self.kept: Tensor = self.counts >= floor
        self._divisors = self.counts.clamp_min(floor)[:, None]
        self._targets: list[Tensor] = []

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        if step < self._networks:
            self._targets.append(self._release(features, synthetic))
        target = self._targets[step % self._networks]
        return pull_back(features, synthetic, lambda means, numbers: 2 * (means - target[numbers]))

    def _release(self, features: FeatureMap, synthetic: Tensor) -> Tensor:
        """The network's estimated class means, [S, D], from one noisy sum for each class."""
        centre = frozen_means(features, synthetic)

        def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            where = segment_N.to(x_NCHW.device, non_blocking=True)
            return features.real(x_NCHW, where) - centre[where]

        target: Tensor = centre + self._clients.class_sums(self._series, rows) / self._divisors
        return target
