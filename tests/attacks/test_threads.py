"""The attacker lets several threads use what was charged once (F5).

They must not get more releases than were charged, nor a release that counts a record twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsynth.privacy import DataOwner
from fedsynth.privacy.ledger import read_ledger
from tests.privacy.support import in_threads, plan

pytestmark = pytest.mark.slow


def owner(folder: Path | None = None, epsilon: float = 2.0) -> DataOwner:
    x = torch.eye(3).repeat(20, 1)
    return DataOwner("a", x, nominal_size=60, epsilon=epsilon, delta=1e-5, ledger=folder)


def test_one_mechanism_in_four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 26 of 200 mechanisms made more releases than charged, and 40 counted records twice."""
    counted = torch.full((1, 3), 20.0)
    monkeypatch.setattr(DataOwner, "check_independent", lambda *_, **__: (64, 64))
    for _ in range(200):
        one = owner(epsilon=1e4)
        mechanism = one.charge(plan(steps=2, dimension=3, groups=1, clip=1.0))
        released: list[Tensor] = []

        def use(one: Any = one, mechanism: Any = mechanism, released: Any = released) -> None:
            for _ in range(3):
                released.append(one.class_sums([mechanism], lambda x, _: x))

        in_threads(use)
        assert len(released) == 2 - mechanism.steps_left
        for sums in released:
            assert float((sums - counted).abs().max()) < 8 * mechanism.noise_std < 2


@pytest.mark.parametrize("kept", [False, True])
def test_one_budget_in_eight_threads(tmp_path: Path, kept: bool) -> None:
    """Each thread spends all that is left of the same budget, alone or through its own object."""
    for number in range(10):
        folder = tmp_path / str(number) if kept else None
        shared = owner(folder)

        def spend(place: Path | None = folder, one: DataOwner = shared) -> Tensor:
            return (one if place is None else owner(place)).noisy_mean(clip=1.0)

        assert len(in_threads(spend, 8)) == 1
        assert shared.spent() <= 2.0
        if folder is not None:
            assert len(read_ledger(folder / "a.jsonl").releases) == 1


def test_many_small_budgets_in_threads() -> None:
    """The targets of the threads differ; each total is kept when its release is charged."""
    for _ in range(10):
        one = owner()
        totals = iter([0.2, 0.5, 1.0, 1.9])
        made = in_threads(lambda one=one, t=totals: one.noisy_mean(clip=1.0, total_epsilon=next(t)))
        assert 1 <= len(made) == len(one._ledger.releases)
        assert one.spent() <= 1.9


def test_reports_during_charges(tmp_path: Path) -> None:
    one, numbers = owner(tmp_path / "ledger", 50.0), iter(range(8))

    def work() -> None:
        number = next(numbers)
        if number % 2:
            one.report(tmp_path / f"{number}.json")
        else:
            one.noisy_mean(clip=1.0, total_epsilon=5.0 + number)

    in_threads(work, 8)
    assert len(list(tmp_path.glob("*.json"))) == 4  # none was refused
