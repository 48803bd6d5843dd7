"""Condensation towards class means of features, with M networks that are used in turn.

Step t moves the images of a class c through network m = t mod M towards a fixed target:

    L_c = ‖ target_{m,c} − mean_{S_c} u_m ‖²,      u_m = [h_m; b·z_m].

`NetworkMeansMatcher` uses the exact class means of a client's data, without differential privacy:
FedDM's Eq. 9 over a sample of M networks, without minibatch noise. Real images take M·n forward
passes a round instead of T·C·batch.

Mechanism `features` (`FeatureSumMatcher`) releases for each network and class

    R_{m,c} = Σ_{x ∈ c} clip_𝒞(u_m(x) − s_{m,c}) + N(0, σ²𝒞²I),      s_{m,c} = mean_{S_c} u_m

with the synthetic images at the time of the release, and once the counts n̂_c = n_c + N(0,
σ_count²). The target is s_{m,c} + R_{m,c} / max(n̂_c, floor). Later steps do not access the data:
any number of steps over the M networks is post-processing.

Sensitivity: s is public noise or computed from earlier releases, so u_m(x) − s is a function of x
only. An example is in the sum of one class, which it changes by at most 𝒞, and in the count of one
class, which it changes by 1. The M + 1 releases compose adaptively.

FedSum's clients send such sums, centred with images that all parties have (`open_sums`,
`private_sums`). With pooled counts n_c, s_{m,c} + Σ_k R_{k,m,c} / n_c is the class mean over all
clients' data, however the examples are partitioned. The server condenses with a `TargetMatcher`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients, Segments, chunk
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.synthesizer.condensation.loop import Augmentation, NetworkFeatures
from fedsynth.synthesizer.condensation.matchers import (
    FeatureMap,
    frozen_means,
    pull_back,
    segment_sums,
)


class FeatureSumMatcher:
    """A `Matcher` whose first M steps each release one network's sums. Step t uses network t mod M;
    the caller draws the networks.

    Args:
        series: charged for M releases for each client.
        count_series: charged for one release of sensitivity 1.
        networks: M.
        floor: public lower bound of the divisor; a class whose noisy count is below it is not
            `kept`.

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
        """Returns the network's estimated class means, [S, D], from one noisy sum for each
        class."""
        centre = frozen_means(features, synthetic)

        def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
            where = segment_N.to(x_NCHW.device, non_blocking=True)
            return features.real(x_NCHW, where) - centre[where]

        target: Tensor = centre + self._clients.class_sums(self._series, rows) / self._divisors
        return target


class NetworkMeansMatcher:
    """A `Matcher` whose step t uses network t mod M; the caller draws the networks and must repeat
    them every M steps.

    Args:
        clients: the clients whose examples are averaged.
        segments: the (client, class) pairs that are condensed.
        networks: M.
    """

    def __init__(self, clients: OpenClients, segments: Segments, networks: int) -> None:
        self._clients = clients
        self._networks = networks
        pairs = list(zip(segments.position.tolist(), segments.label.tolist(), strict=True))
        pools = [clients.examples(position, label) for position, label in pairs]
        counts = torch.tensor([len(pool) for pool in pools], dtype=torch.int64)
        self._examples = torch.cat(pools) if pools else torch.empty(0, dtype=torch.int64)
        self._segment = torch.arange(len(pools)).repeat_interleave(counts)
        self._counts = counts.to(self._examples.device, torch.float32)[:, None]
        self._targets: dict[int, Tensor] = {}

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        number = step % self._networks
        if number not in self._targets:  # in the first pass, or the first one after a resume
            self._targets[number] = self._means(features)
        target = self._targets[number]
        return pull_back(features, synthetic, lambda means, numbers: 2 * (means - target[numbers]))

    def _means(self, features: FeatureMap) -> Tensor:
        """Returns mean_{D_c} u of every segment, [S, D], without graph."""
        sums: Tensor | None = None
        size = chunk(self._examples.device)
        for start in range(0, len(self._examples), size):
            some = self._examples[start : start + size]
            segment = self._segment[start : start + size]
            first = int(segment[0])  # `segment` is ascending, and on the CPU
            stop = int(segment[-1]) + 1
            where = segment.to(some.device, non_blocking=True)
            u = features.real(self._clients.images(some), where)
            sums = u.new_zeros(len(self._counts), u.shape[1]) if sums is None else sums
            sums[first:stop] += segment_sums(u, where - first, stop - first)
        if sums is None:
            raise ValueError("a step without any real image")
        return sums / self._counts


@dataclass(frozen=True)
class SharedNetworks:
    """M networks in a fixed order, drawn again for each pass over them.

    Args:
        draws: starts a pass: returns a function that draws the next network, and one that draws the
            next augmentation by class (or None).
        count: M.
        logit_weight: b.
        precision, memory_bytes, compiled: see `NetworkFeatures`.
    """

    draws: Callable[[], tuple[Callable[[], nn.Module], Callable[[], Augmentation] | None]]
    count: int
    logit_weight: float = 1.0
    precision: torch.dtype = torch.float32
    memory_bytes: int = 2**32
    compiled: bool = False

    def features(self) -> Iterator[NetworkFeatures]:
        """Yields u_m for m = 0 … M − 1: the same object each time, with the next network loaded."""
        draw_network, draw_augmentation = self.draws()
        features: NetworkFeatures | None = None
        for _ in range(self.count):
            network = draw_network()
            augment = None if draw_augmentation is None else draw_augmentation()
            if features is None:
                features = NetworkFeatures(
                    network,
                    self.logit_weight,
                    augment,
                    self.precision,
                    memory_bytes=self.memory_bytes,
                    compiled=self.compiled,
                )
            else:
                features.use(network, augment)
            yield features


def centres(networks: SharedNetworks, images_SICHW: Tensor) -> Tensor:
    """Returns s_{m,c} of images of each class, [M, classes, D]."""
    return torch.stack([frozen_means(u, images_SICHW) for u in networks.features()])


def open_sums(
    clients: OpenClients,
    networks: SharedNetworks,
    images_SICHW: Tensor,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Returns exact sums of each client [K, M, classes, D], accumulated in float64, and its counts
    [K, classes]; both are float32.

    Args:
        clients: the group.
        networks: the M networks.
        images_SICHW: S, by class.
        report: receives the number of finished networks.
    """
    classes = len(images_SICHW)
    made = []
    for done, u in enumerate(networks.features(), start=1):
        centre = frozen_means(u, images_SICHW)
        sums = [_open_sum(clients, k, u, centre) for k in range(len(clients.ids))]
        made.append(torch.stack(sums).float())
        report(done)
    held = [_counts(clients, k, classes) for k in range(len(clients.ids))]
    return torch.stack(made, dim=1), torch.stack(held)


def _counts(clients: OpenClients, position: int, classes: int) -> Tensor:
    """Returns one client's number of examples of each class, [classes], float32 on the device."""
    labels = clients.labels(clients.examples(position))
    return F.one_hot(labels, classes).sum(dim=0).float()


def _open_sum(clients: OpenClients, position: int, u: FeatureMap, centre_CD: Tensor) -> Tensor:
    """Returns one client's sum of u(x) − s, [classes, D], float64."""
    total = centre_CD.new_zeros(centre_CD.shape, dtype=torch.float64)
    for part in clients.examples(position).split(chunk(centre_CD.device)):
        if len(part):
            labels = clients.labels(part)
            rows = (u.real(clients.images(part), labels) - centre_CD[labels]).double()
            total += F.one_hot(labels, len(centre_CD)).to(rows.dtype).T @ rows
    return total


def private_sums(
    clients: PrivateClients,
    series: Sequence[GaussianSums],
    count_series: Sequence[GaussianSums],
    networks: SharedNetworks,
    images_SICHW: Tensor,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Returns noisy sums of each client [K, M, classes, D], one release for each network, and noisy
    counts [K, classes].

    Args:
        clients: the group.
        series: charged for M releases for each client.
        count_series: charged for one release of sensitivity 1.
        networks, images_SICHW, report: see `open_sums`; S must be public or released.
    """
    classes = len(images_SICHW)
    made = []
    for done, u in enumerate(networks.features(), start=1):
        rows = _about(u, frozen_means(u, images_SICHW))
        made.append(clients.class_sums(series, rows).view(len(clients.ids), classes, -1))
        report(done)
    ones = clients.class_sums(
        count_series, lambda x_NCHW, segment_N: x_NCHW.new_ones(len(x_NCHW), 1)
    )
    return torch.stack(made, dim=1), ones.view(len(clients.ids), classes)


def _about(u: FeatureMap, centre_CD: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function that is summed over examples: u(x) − s of the example's class, which
    depends on x only."""

    def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        # segments number (client, class) pairs; −1, which is discarded, becomes some class
        label = (segment_N % len(centre_CD)).to(x_NCHW.device, non_blocking=True)
        return u.real(x_NCHW, label) - centre_CD[label]

    return rows


def sums_of(
    clients: ClientGroup,
    series: tuple[Sequence[GaussianSums], Sequence[GaussianSums]] | None,
    networks: SharedNetworks,
    images_SICHW: Tensor,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Returns `private_sums` for private clients, with the given charged series of sums and of
    counts, and `open_sums` for others."""
    if isinstance(clients, PrivateClients):
        if series is None:
            raise ValueError("private clients release through charged series alone")
        return private_sums(clients, *series, networks, images_SICHW, report)
    return open_sums(clients, networks, images_SICHW, report)


class TargetMatcher:
    """A `Matcher` with given class means as targets: step t uses those of network t mod M.

    Its gradient is that of Σ_c ‖mean_{S_c} u_m − target_{m,c}‖² (FedDM, Eq. 9, with the means of
    all clients' data). Images of classes without a target do not move.

    Args:
        targets_MSD: class means.
        kept_S: which classes have a target.
    """

    def __init__(self, targets_MSD: Tensor, kept_S: Tensor) -> None:
        self._targets = targets_MSD
        self._kept = kept_S.to(targets_MSD.dtype)[:, None]

    def gradient(self, step: int, features: FeatureMap, synthetic: Tensor) -> Tensor:
        target = self._targets[step % len(self._targets)]
        return pull_back(
            features,
            synthetic,
            lambda means, numbers: 2 * self._kept[numbers] * (means - target[numbers]),
        )
