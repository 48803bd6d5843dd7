"""What a method will release of each client in a round, known before any data are read.

A method names its plans once (`Method.private_plans`). A client's ledger is charged for them by
these, and a step gets the charged series by the plan's name (`fedsynth.privacy.allowance`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.grid import Addends, Grid, grid_of
from fedsynth.privacy.releases import RECORD, Release

FIRST, MAIN = "first", "main"
PHASES = (FIRST, MAIN)
"""The exchanges of a round: some methods have one before the main one."""


@dataclass(frozen=True, kw_only=True)
class PrivatePlan:
    """One kind of release of a round: a series of noisy sums.

    Args:
        name: what a step asks for the series by, such as "images".
        quantity: what leaves the client, in words for ledger and report.
        mechanism: its name.
        clipped: what is clipped, in words.
        clip: L2 bound 𝒞 of one example's contribution.
        sample_rate: q of Poisson sampling.
        steps: releases in a round.
        dimension: coordinates of one release.
        groups: the sums that these coordinates are: one for each class, or one.
        noise_ratio: the release's noise multiplier over the run's σ.
        phase: the exchange that it is made in, "main" or "first".
        shares: H of secure aggregation: the noise that is charged is that of H clients together,
            each of whom adds 1/√H of its deviation; 1: every client adds all of it.
        addends: whose releases are added up before anybody sees them, and rounded for that; None:
            each is seen by itself.
        signal: norm of the sum over all clients' examples, over its bound (𝒞 for each example), in
            a public case that the method's documentation describes; None: it names none.

    Raises:
        PrivacySettingError: an unknown phase, no share, or a dimension that is not of equal groups.
    """

    name: str
    quantity: str
    mechanism: str
    clipped: str
    clip: float
    sample_rate: float
    steps: int
    dimension: int
    groups: int = 1
    noise_ratio: float = 1.0
    phase: str = MAIN
    shares: int = 1
    addends: Addends | None = None
    signal: float | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise PrivacySettingError(
                None,
                "phase",
                f"of plan {self.name!r} must be one of {', '.join(PHASES)}, got {self.phase!r}",
            )
        if self.shares < 1:
            raise PrivacySettingError(
                None, "shares", f"of plan {self.name!r} must be at least 1, got {self.shares}"
            )
        if self.groups < 1 or self.dimension % self.groups:
            raise PrivacySettingError(
                None,
                "groups",
                f"of plan {self.name!r}, {self.groups}, must divide its {self.dimension} "
                "coordinates evenly",
            )

    def signal_to_noise(
        self, noise_multiplier: float, records: float, clients: int
    ) -> float | None:
        """Norm of the pooled sum in the public case over the root mean square of its noise's norm:
        signal·n·𝒞 / (σ·𝒞·√(K/H)·√D).

        Args:
            noise_multiplier: the run's σ.
            records: n, the public number of examples (or users) of all clients.
            clients: K, who each add noise.

        Returns:
            The ratio; None where the plan names no signal.
        """
        if self.signal is None:
            return None
        noise = noise_multiplier * self.noise_ratio
        return self.signal * records / (noise * math.sqrt(clients / self.shares * self.dimension))

    def grid(self, noise_multiplier: float) -> Grid | None:
        """What a client rounds its noisy release to; None: to no grid, as each is seen by itself.

        Args:
            noise_multiplier: the run's σ.

        Raises:
            PrivacySettingError: see `grid_of`.
        """
        if self.addends is None:
            return None
        charged = noise_multiplier * self.noise_ratio * self.clip
        return grid_of(self.clip, charged / math.sqrt(self.shares), self.shares, self.addends)

    def release(
        self,
        round: int,
        noise_multiplier: float,
        *,
        unit: str = RECORD,
        unaccounted: str | None = None,
    ) -> Release:
        """The ledger's row.

        Args:
            round: its number.
            noise_multiplier: the run's σ.
            unit: who is protected, one of `releases.UNITS`.
            unaccounted: why nothing is guaranteed, where nothing is.
        """
        return Release(
            round=round,
            quantity=self.quantity,
            mechanism=self.mechanism,
            clipped=self.clipped,
            noise_multiplier=noise_multiplier * self.noise_ratio,
            sensitivity=self.clip,
            sample_rate=self.sample_rate,
            sampler="poisson" if self.sample_rate < 1 else "full",
            steps=self.steps,
            dimension=self.dimension,
            unaccounted=unaccounted,
            unit=unit,
            shares=self.shares,
        )


def check_plans(plans: Sequence[PrivatePlan]) -> None:
    """Refuses what no step could ask for by name.

    Raises:
        PrivacySettingError: there is no plan, or two have the same name.
    """
    if not plans:
        raise PrivacySettingError(None, "plans", "must hold at least one: what a round releases")
    names = [plan.name for plan in plans]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PrivacySettingError(
            None, "plans", f"of a round must have different names; two have {twice!r}"
        )
