"""Class sums of features over M networks that all parties draw alike, and matching on pooled ones.

For network m and class c a client's sum about a public centre s_{m,c} is

    R_{m,c} = Σ_{x ∈ c} (u_m(x) − s_{m,c}),      s_{m,c} = mean_{S_c} u_m,

with u_m = [h_m; b·z_m] and S images that everybody has. Sums add up over clients, so with pooled
counts n_c the estimate s_{m,c} + Σ_k R_{k,m,c} / n_c is the class mean of all clients' data
together, whichever client has which example. With differential privacy each example's u_m(x) − s is
clipped, and each R is one release of mechanism `features` (`feature_sums.py`, which has the
argument for its sensitivity); the counts are one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients, chunk
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.synthesizer.condensation.loop import Augmentation, NetworkFeatures
from fedsynth.synthesizer.condensation.matchers import FeatureMap, frozen_means, pull_back


@dataclass(frozen=True)
class SharedNetworks:
    """M networks in a fixed order, drawn anew at each pass over them.

    Args:
        draws: starts a pass: gives what draws the next network, and the next augmentation by class
            (or None).
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
        """u_m for m = 0 … M − 1: the same object each time, which has gone on to the next."""
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
    """s_{m,c} of images of each class, [M, classes, D]."""
    return torch.stack([frozen_means(u, images_SICHW) for u in networks.features()])


def open_sums(
    clients: OpenClients,
    networks: SharedNetworks,
    images_SICHW: Tensor,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Exact sums of each client [K, M, classes, D], accumulated in float64, and its counts
    [K, classes]; both float32.

    Args:
        clients: the group.
        networks: the M networks.
        images_SICHW: S, by class.
        report: told the number of networks done.
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
    """How many examples of each class one client has, [classes], float32 on the device."""
    labels = clients.labels(clients.examples(position))
    return F.one_hot(labels, classes).sum(dim=0).float()


def _open_sum(clients: OpenClients, position: int, u: FeatureMap, centre_CD: Tensor) -> Tensor:
    """One client's sum about the centre, [classes, D], float64."""
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
    """Noisy sums of each client [K, M, classes, D], one release for each network, and noisy counts
    [K, classes].

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
    """What is summed of an example: u(x) − s of its class, a function of x alone."""

    def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        # segments count (client, class) pairs; −1, which is thrown away, becomes some class
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
    """`private_sums` of private clients, whose charged series of sums and of counts are given;
    `open_sums` of others."""
    if isinstance(clients, PrivateClients):
        if series is None:
            raise ValueError("private clients release through charged series alone")
        return private_sums(clients, *series, networks, images_SICHW, report)
    return open_sums(clients, networks, images_SICHW, report)


class TargetMatcher:
    """A `Matcher` on given class means: step t pulls towards those of network t mod M.

    Its gradient is that of Σ_c ‖mean_{S_c} u_m − target_{m,c}‖² (FedDM, Eq. 9, with the means of
    all clients' data); classes without a target stay where they are.

    Args:
        targets_MSD: class means.
        kept_S: which classes have one.
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
