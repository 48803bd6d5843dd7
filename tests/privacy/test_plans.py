"""What a plan refuses, its signal over its noise, and a history that is written and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.files import open_regular, write_durably
from fedsynth.privacy.history import History
from fedsynth.privacy.plans import PrivatePlan

PLAN = PrivatePlan(
    name="sums",
    quantity="sum",
    mechanism="statistics",
    clipped="rows",
    clip=2.0,
    sample_rate=1.0,
    steps=1,
    dimension=6,
    noise_ratio=3.0,
    shares=4,
    signal=0.5,
)


def test_what_no_plan_is() -> None:
    for wrong in ({"phase": "last"}, {"shares": 0}, {"groups": 4}, {"groups": 0}):
        with pytest.raises(PrivacySettingError, match=next(iter(wrong))):
            replace(PLAN, **wrong)  # type: ignore[arg-type]


def test_signal_over_noise_is_that_of_draws() -> None:
    """Eight clients, each with a quarter of the charged variance."""
    sigma = 1.5
    each = sigma * PLAN.noise_ratio * PLAN.clip / PLAN.shares**0.5
    draws = np.random.default_rng(0).normal(0, each, (4000, 8, 6)).sum(axis=1)
    noise = np.sqrt(np.square(draws).sum(axis=1).mean())
    found = PLAN.signal_to_noise(sigma, 100, 8)
    assert found == pytest.approx(0.5 * 100 * PLAN.clip / noise, rel=0.02)
    assert replace(PLAN, signal=None).signal_to_noise(sigma, 100, 8) is None


def test_a_history_is_what_was_written() -> None:
    history = History("clinic", (PLAN.release(1, 1.5), PLAN.release(2, 1.5)), "abc")
    assert History.from_json(history.to_json()) == history
    assert History.from_json(History("clinic", (), None).to_json()).chain is None


def test_only_regular_files_are_read_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="regular"):
        open_regular(tmp_path)
    with pytest.raises(OSError, match=r"null|zero|embedded"):
        open_regular(Path("a\0b"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "full").touch()
    with pytest.raises(OSError, match=r"irectory"):
        write_durably(tmp_path / "there", b"x")  # a folder with files cannot be replaced
    assert [one.name for one in tmp_path.iterdir()] == ["there"]
