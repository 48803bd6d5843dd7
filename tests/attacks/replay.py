"""Replays the releases of one run in another run, on a neighbouring data set or on other data.

The second run receives the outputs of the first. If the mechanisms are right, its sums without
noise then differ by at most the clip, for one more record, and nothing else differs at all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.releases import Release

Key = tuple[str, int, int]  # the client, the number of its mechanism, and the step


@dataclass
class Tape:
    """The charged row, the sums without noise and the output of each release of a run."""

    rows: dict[Key, Release] = field(default_factory=dict)
    sums: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)

    def largest_influence(self, other: Tape) -> float:
        """Returns the largest difference between the sums of two runs, in clips."""
        assert self.rows == other.rows  # the schedule is public
        changes = []
        for key, row in self.rows.items():
            change = (self.sums[key] - other.sums[key]).norm()
            changes.append(float(change) / row.sensitivity)
        return max(changes)


@contextmanager
def recorded(
    replayed: Tape | None = None, extra: Mapping[str, int] | None = None
) -> Iterator[Tape]:
    """Records the releases of a run, which are those of `replayed` if given.

    Samples are public here. A record that both runs have is in both samples or in neither.

    Args:
        replayed: the tape of the run whose outputs this run receives.
        extra: the position of the additional record of a client, which is in each sample.
    """
    tape, mechanism, extra = Tape(), Counter[str](), extra or {}
    init, sample, release = (
        getattr(GaussianSumMechanism, name) for name in ("__init__", "sample", "release")
    )

    def new(self: Any, row: Release, groups: int, guard: Any, secret: Any) -> None:
        init(self, row, groups, guard, secret)
        self.client = guard.ledger.client
        if type(self) is GaussianSumMechanism:  # not a trial on public images
            self.number = mechanism[self.client]
            mechanism[self.client] += 1

    def public_sample(self: Any, units: int) -> Tensor:
        sampled = sample(self, units)
        if type(self) is not GaussianSumMechanism:
            return sampled
        step = repr((self.client, self.number, self.steps_left))
        seed = int.from_bytes(hashlib.blake2b(step.encode(), digest_size=7).digest(), "big")
        position = extra.get(self.client)
        common = np.random.default_rng(seed).random(units - (position is not None))
        chosen = common < self.sample_rate
        if position is not None:
            chosen = np.insert(chosen, position, values=True)
        return torch.from_numpy(np.flatnonzero(chosen))

    def replayed_release(self: Any) -> Released:
        if type(self) is not GaussianSumMechanism:
            return release(self)
        key = self.client, self.number, self.steps_left
        self._users.close(self._sums)
        tape.rows[key], tape.sums[key] = self._release, self._sums.clone().cpu()
        output = release(self)
        if replayed is not None:
            output = Released(replayed.outputs[key].clone())
        tape.outputs[key] = output.clone()
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GaussianSumMechanism, "__init__", new)
        patch.setattr(GaussianSumMechanism, "sample", public_sample)
        patch.setattr(GaussianSumMechanism, "release", replayed_release)
        yield tape
