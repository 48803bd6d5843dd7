"""FedDM with a few networks a round, after an interruption, and where it is refused (test_feddm.py
compares it with plain PyTorch)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import OpenClients
from fedsynth.core.context import RoundContext
from fedsynth.errors import SettingError
from fedsynth.keeping import KeepsNothing
from fedsynth.methods.feddm import FedDM
from fedsynth.simulation.simulate import simulate
from tests.digits import CPU, context, digits, sent

LABELS = np.array([0] * 25 + [1] * 12 + [2] * 3 + [7] * 20)
PARTS = [torch.arange(0, 40), torch.arange(40, 60)]
METHOD = FedDM(ipc=2, iterations=7, image_lr=0.5, networks_per_round=3)


def clients(device: torch.device = CPU) -> OpenClients:
    return OpenClients((0, 1), digits(LABELS, device=device), [part.to(device) for part in PARTS])


def uploads(method: FedDM, ctx: RoundContext, group: OpenClients) -> list[Tensor]:
    return [one.images for one in sent(method, ctx, group)]


class Keeps(KeepsNothing):
    """What a loop offers at one step, and gives it back."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.kept: tuple[int, dict[str, Tensor]] | None = None

    def found(self, name: str) -> tuple[int, dict[str, Tensor]] | None:
        return self.kept

    def offer(self, name: str, done: int, tensors: Any) -> None:
        if done == self._at and self.kept is None:
            self.kept = done, {key: value.clone() for key, value in tensors().items()}


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_loop_that_was_cut_off_ends_with_the_same_images(at: int) -> None:
    """Catches: means that only the first M steps make."""
    keeper = Keeps(at)
    ctx, group = replace(context(), keeper=keeper), clients()
    whole = uploads(METHOD, ctx, group)
    assert keeper.kept is not None
    again = uploads(METHOD, ctx, group)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_where_it_is_refused() -> None:
    with pytest.raises(SettingError, match=r"method\.networks_per_round must be 0 unless"):
        FedDM(networks_per_round=2, matching="energy")
    with pytest.raises(SettingError, match="at least 0"):
        FedDM(networks_per_round=-1)
    run = {"run": {"method": "feddm", "rounds": 1}, "method": {"networks_per_round": 2}}
    private = resolve({**run, "privacy": {"epsilon": 8.0}})
    with pytest.raises(SettingError, match=r"with differential privacy.*features"):
        simulate(private)
    normed = resolve({**run, "model": {"norm": "batch", "width": 8, "depth": 2}})
    with pytest.raises(SettingError, match="must be 0 with batch norm"):
        simulate(normed)
