"""Exact class means of a few networks, in the place of minibatches of ever new ones (ours, not
FedDM's).

FedDM draws a network w for every step and sees a minibatch of each class through it. Here a round
has M networks; the mean of u_w over *all* of a client's examples of a class is computed once for
each, and T steps go through the M networks in turn:

    L_c = ‖ mean_{D_c} u_{w_m} − mean_{S_c} u_{w_m} ‖²,      m = t mod M.

It is Eq. 9's objective over a sample of M networks, without the minibatches' noise. Real images go
forward M·n times a round and not T·C·batch times. Reads exact data: without differential privacy
alone; mechanism `features` (`feature_sums.py`) is its private form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsynth.core.client import OpenClients, Segments, chunk
from fedsynth.synthesizer.condensation.matchers import FeatureMap, pull_back, segment_sums


class NetworkMeansMatcher:
    """A `Matcher`; step t uses network t mod M, whoever draws the networks, which have to come
    again after M steps.

    Args:
        clients: whose examples are averaged.
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
        if number not in self._targets:  # the first turn, or the first after a run was cut off
            self._targets[number] = self._means(features)
        target = self._targets[number]
        return pull_back(features, synthetic, lambda means, numbers: 2 * (means - target[numbers]))

    def _means(self, features: FeatureMap) -> Tensor:
        """mean_{D_c} u of every segment, [S, D], without graph."""
        sums: Tensor | None = None
        size = chunk(self._examples.device)
        for start in range(0, len(self._examples), size):
            some = self._examples[start : start + size]
            segment = self._segment[start : start + size]
            first = int(segment[0])  # ascending, and on the CPU
            stop = int(segment[-1]) + 1
            where = segment.to(some.device, non_blocking=True)
            u = features.real(self._clients.images(some), where)
            sums = u.new_zeros(len(self._counts), u.shape[1]) if sums is None else sums
            sums[first:stop] += segment_sums(u, where - first, stop - first)
        if sums is None:
            raise ValueError("a step without any real image")
        return sums / self._counts
