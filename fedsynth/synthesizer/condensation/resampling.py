"""FedAF's model re-sampling (Eq. 17): each condensation step uses γ·w + (1 − γ)·w̃, with w̃ freshly
initialised.

Fresh means by the architecture's own initialisation, not Gaussian noise: w̃ is a network that could
be a run's start. All clients of a round share the draws, which come from the run's public seed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fedsynth.models.flat import FlatNetwork, flatten
from fedsynth.seeding import forked_rng


class ResampledNetworks:
    """Draws the network of each step.

    Args:
        model: w, the global model. Copied; the copy's weights are frozen.
        architecture: a network with the same parameters in the same order, whose layers have
            `reset_parameters`.
        gamma: γ in [0, 1]; 1 is the global model itself at every step.
        period: after so many networks the same ones come again; None: never.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: nn.Module,
        gamma: float,
        *,
        seed: int,
        round: int,
        device: torch.device,
        period: int | None = None,
    ) -> None:
        self._network = FlatNetwork(model, device)
        self._network.module.eval()
        self._center = self._network.flat.clone()
        self._gamma = gamma
        self._scratch = copy.deepcopy(architecture).cpu()
        self._seed = seed
        self._round = round
        self._period = period
        self._drawn = 0

    def draw(self) -> nn.Module:
        """The next network; it is the same object each time, with other weights."""
        if self._gamma < 1:
            step = self._drawn if self._period is None else self._drawn % self._period
            with forked_rng(self._seed, "model re-sampling", self._round, step):
                for layer in self._scratch.modules():
                    reset: Any = getattr(layer, "reset_parameters", None)
                    if reset is not None:
                        reset()
            fresh = flatten(self._scratch).to(self._center.device, non_blocking=True)
            torch.lerp(fresh, self._center, self._gamma, out=self._network.flat)
        self._drawn += 1
        return self._network.module
