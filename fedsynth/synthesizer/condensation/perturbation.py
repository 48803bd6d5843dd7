"""FedDM's parameter perturbation (App. D.3, Eq. 24): networks drawn around the global model for
each condensation step.

P_w(w_r) = w_r + ε with ε ~ N(0, I) rescaled so that ‖ε‖₂ ≤ ρ. With 300,000 parameters ‖N(0, I)‖ ≈
550, so for ρ = 5 rescaling always bites and w lies on the sphere: reading "sphere", the literal one
and the default. Reading "ball" keeps the direction and draws the distance to w_r uniformly from [0,
ρ].
"""

from __future__ import annotations

import torch
from torch import nn

from fedsynth.models.flat import FlatNetwork
from fedsynth.seeding import torch_generator
from fedsynth.validation import check_choice

READINGS = ("sphere", "ball")


class Perturbations:
    """Draws w ~ P_w(w_r), one for each step, from the round's public seed: all clients of a round
    share them.

    Args:
        model: w_r. Copied; the copy's weights are frozen.
        radius: ρ; 0 matches at w_r itself.
        period: after so many networks the same ones come again, in the same order; None: never.
    """

    def __init__(
        self,
        model: nn.Module,
        radius: float,
        *,
        reading: str = "sphere",
        seed: int,
        round: int,
        device: torch.device,
        period: int | None = None,
    ) -> None:
        check_choice("method", "perturbation", reading, READINGS)
        self._network = FlatNetwork(model, device)
        self._network.module.eval()
        self._center = self._network.flat.clone()
        self._noise = torch.empty_like(self._center)
        self._radius = radius
        self._reading = reading
        self._key = (seed, round, device)
        self._period = period
        self._drawn = 0
        self._generator = self._stream()

    def _stream(self) -> torch.Generator:
        seed, round, device = self._key
        return torch_generator(seed, "parameter perturbation", round, device=device)

    def draw(self) -> nn.Module:
        """The next network; it is the same object each time, with other weights."""
        if self._period is not None and self._drawn % self._period == 0:
            self._generator = self._stream()
        self._drawn += 1
        self._noise.normal_(generator=self._generator)
        norm = torch.linalg.vector_norm(self._noise)
        if self._reading == "ball":
            scale = (
                self._radius * torch.rand((), generator=self._generator, device=norm.device) / norm
            )
        else:
            scale = (self._radius / norm).clamp_max(1.0)
        torch.addcmul(self._center, self._noise, scale, out=self._network.flat)
        return self._network.module
