"""The remaining time of a run, as its progress shows it."""

from __future__ import annotations

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.simulation import run_messages as stderr_observer
from fedsynth.simulation.run_messages import StderrObserver


@pytest.mark.parametrize("private", [False, True])
def test_remaining_time_is_that_of_the_mean_round(
    private: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A private run shows no times, because they may depend on the data."""
    now = 0.0
    monkeypatch.setattr(stderr_observer.time, "monotonic", lambda: now)
    privacy = {"noise_multiplier": 3.0} if private else {}
    observer = StderrObserver(resolve({"run": {"rounds": 10}, "privacy": privacy}))
    observer.step(1, "train", 1, 10)
    for number, ended in ((1, 100_000.0), (2, 100_060.0)):
        now = ended
        observer.round_ended({"round": number, "upload_bytes": 0})
    now += 31.0
    observer.step(3, "train", 1, 10)
    lines = capsys.readouterr().err.splitlines()
    times = [line for line in lines if "days" in line]
    if private:
        assert len(lines) == 2
        assert times == []
    else:
        assert "at this speed, the run takes another 10 days, 10:00:00" in times[0]
        assert times[1] == "round 3/10 train 1/10, about 4 days, 15:10:40 left"
        assert len(times) == 2
