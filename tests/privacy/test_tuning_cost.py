"""What tuning would cost on private data, as docs/threat-model.md has it, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.optimize import brentq

from fedsynth.privacy.accounting import gaussian_delta

ROOT = Path(__file__).parents[2]
DELTA = 1e-5


def documented() -> dict[str, list[float]]:
    """The table's columns: one run, six, seven, a seventh's share."""
    text = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8").split("### Tuning")[1]
    lines = [line for line in text.splitlines() if line.startswith("|")][:6]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    names = ["features", "residual", "gradient", "dp-sgd"]
    assert [name.lower() for name in cells[0][1:]] == [*names[:3], "dp-fedavg"]
    return {name: [float(row[k]) for row in cells[2:]] for k, name in enumerate(names, start=1)}


def test_six_unsampled_runs_and_a_seventh_by_hand() -> None:
    """`features` takes all records: a run at ε = 3 is μ-GDP, and k of them are √k·μ."""

    def spent(mu: float) -> float:
        return float(brentq(lambda e: gaussian_delta(mu, e) - DELTA, 0.01, 50))

    def mu_of(epsilon: float) -> float:
        return float(brentq(lambda m: gaussian_delta(m, epsilon) - DELTA, 0.01, 10))

    one = mu_of(3.0)
    by_hand = [3.0, spent(math.sqrt(6) * one), spent(math.sqrt(7) * one), spent(one / math.sqrt(7))]
    assert documented()["features"] == pytest.approx(by_hand, abs=0.011)
