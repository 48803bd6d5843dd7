"""Running sums over periods: the cost and the noise of the factorised sequence, and its files."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from fedsynth.errors import LedgerError
from fedsynth.privacy import periods
from fedsynth.privacy.accounting import merge
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.periods import (
    PeriodEnforcer,
    PeriodFacts,
    ReleaseSequence,
    RunningSumMechanism,
    charged_factor,
    coefficients,
    column_norm,
    in_period,
    sum_factor,
)
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from tests.privacy.support import release
from tests.raising import raises

SIGMA, CLIP, WIDTH = 0.7, 2.0, 60


class BasisNoise(SecretGenerator):
    """Returns the k-th draw as its standard deviation times the k-th unit vector.

    A release of empty sums is then the row of coefficients with which it uses all draws.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def normal(self, shape: Any, standard_deviation: float, device: Any = "cpu") -> torch.Tensor:
        noise = torch.zeros(shape, dtype=torch.float64)
        noise[0, self.draws] = standard_deviation
        self.draws += 1
        return noise


def row(period: int, count: int, sigma: float = SIGMA) -> Release:
    return release(
        quantity=in_period("sums", period, count),
        noise_multiplier=sigma * charged_factor(period, count),
        sensitivity=CLIP,
        dimension=WIDTH,
    )


Make = Callable[..., RunningSumMechanism]


def noise_rows(
    folder: Path, count: int, make: Make = RunningSumMechanism, sigma_of_last: float = SIGMA
) -> tuple[np.ndarray, list[Release]]:
    """Returns the noise of the releases R_1 … R_n in terms of independent draws, and the ledger."""
    secret, ledger, rows = BasisNoise(), Ledger("c"), []
    for period in range(1, count + 1):
        sigma = SIGMA if period < count else sigma_of_last
        sequence = ReleaseSequence(folder, "c", period, count)
        sequence.facts = PeriodFacts(sigma, 10.0)
        sequence.begin("")
        guard = PeriodEnforcer(ledger, rows=len(ledger.releases))
        mechanism = make(sequence, row(period, count, sigma), 1, guard, secret)
        mechanism.sample(0)
        rows.append(mechanism.release()[0].double().numpy())
    return np.stack(rows), list(ledger.releases)


def influence(noise: np.ndarray, shift: np.ndarray) -> float:
    """Returns μ of the joint Gaussian release, for a change of its mean by `shift`."""
    covariance = noise @ noise.T
    return math.sqrt(float(shift @ np.linalg.solve(covariance, shift)))


def check(folder: Path, count: int, make: Make = RunningSumMechanism) -> None:
    """Checks the cost of a record of every period after every period, and the stated noise."""
    noise, rows = noise_rows(folder, count, make)
    for last in range(1, count + 1):
        merged = merge(rows[:last], "add-remove")
        assert merged is not None
        costs = []
        for period in range(1, last + 1):
            shift = CLIP * (np.arange(1, last + 1) >= period)
            costs.append(influence(noise[:last], shift))
        assert max(costs) <= merged.mu * (1 + 1e-6)
        assert costs[0] == pytest.approx(merged.mu, rel=1e-5)  # nothing is charged in vain
        stated = rows[last - 1].noise_multiplier * CLIP * sum_factor(last)
        assert np.linalg.norm(noise[last - 1]) == pytest.approx(stated, rel=1e-5)
        assert stated == pytest.approx(SIGMA * CLIP * column_norm(count) * column_norm(last))
    assert merged.mu <= 1 / SIGMA * (1 + 1e-6)
    assert merged.mu == pytest.approx(1 / SIGMA)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_sequence_costs_as_much_as_one_release(tmp_path: Path, count: int) -> None:
    check(tmp_path, count)


def test_factors_multiply_to_running_sums() -> None:
    c = coefficients(52)
    matrix = np.array([[c[i - j] if i >= j else 0.0 for j in range(52)] for i in range(52)])
    assert np.allclose(matrix @ matrix, np.tril(np.ones((52, 52))))
    norms = np.linalg.norm(matrix, axis=0)
    assert norms.argmax() == 0
    assert norms[0] == pytest.approx(column_norm(52))


class FreshNoise(RunningSumMechanism):
    """Does not reuse the noise of earlier periods."""

    def _noise(self, shape: Any, device: Any) -> torch.Tensor:
        self._fresh = self._secret.normal(shape, self.noise_std * coefficients(WIDTH)[0])
        return self._fresh


class RedrawnNoise(RunningSumMechanism):
    """Draws new noise in place of that of earlier periods."""

    def _earlier_releases(self) -> list[dict[str, torch.Tensor]]:
        c = coefficients(self._sequence.period)[-1]
        earlier = super()._earlier_releases()
        for tensors in earlier:
            shape = (1, WIDTH)
            tensors["noise"] = self._secret.normal(shape, self.noise_std * c)
        return earlier


class IndependentSums(RunningSumMechanism):
    """Releases every running sum with independent noise."""

    def release(self) -> Any:
        std = self.noise_std * sum_factor(self._sequence.period)
        super().release()
        return self._secret.normal((1, WIDTH), std)


@pytest.mark.parametrize("make", [FreshNoise, RedrawnNoise, IndependentSums])
def test_wrong_noise_is_detected(tmp_path: Path, make: Make) -> None:
    with pytest.raises(AssertionError):
        check(tmp_path, 5, make)


@pytest.mark.parametrize(
    "norm", [lambda n: 1.0, lambda n: math.hypot(*coefficients(max(1, n - 1)))]
)
def test_a_wrong_column_norm_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: Callable[[int], float]
) -> None:
    monkeypatch.setattr(periods, "column_norm", norm)
    with pytest.raises(AssertionError):
        check(tmp_path, 5)


SETTINGS = {
    "method": {"periods": 3, "centre_share": 0.04, "period": 1},
    "privacy": {"adjacency": "add-remove"},
}


@pytest.mark.parametrize(
    ("sigma", "section", "key", "value"),
    [
        (SIGMA / 4, "", "", None),
        (4 * SIGMA, "", "", None),
        (SIGMA, "method", "periods", 2),
        (SIGMA, "method", "centre_share", 0.4),
        (SIGMA, "privacy", "adjacency", "replace-one"),
    ],
)
def test_other_settings_than_in_period_1_are_refused(
    tmp_path: Path, sigma: float, section: str, key: str, value: Any
) -> None:
    first = ReleaseSequence(tmp_path, "c", 1, 3)
    first.facts = PeriodFacts(SIGMA, 10.0, SETTINGS)
    first.begin("records 1")
    second = ReleaseSequence(tmp_path, "c", 2, 3)
    free = {"report": {"purpose": "a new one"}, "run": {"device": "cpu"}}
    now = {**SETTINGS, "method": {**SETTINGS["method"], "period": 2, "earlier_records": 10}, **free}
    second.facts = PeriodFacts(SIGMA, 20.0, now)
    second.begin("records 2")
    if section:
        now[section] = {**now[section], key: value}
    second.facts = PeriodFacts(sigma, 20.0, now)
    with raises(LedgerError, "sequence.changed"):
        second.begin("records 2")


def test_less_noise_in_a_later_period_would_cost_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of period 2 states the cost of a record of period 1, whose influence is smaller."""
    monkeypatch.setattr(periods, "_changed", lambda *_: "")
    noise, rows = noise_rows(tmp_path, 2, sigma_of_last=SIGMA / 4)
    merged = merge(rows, "add-remove")
    assert merged is not None
    assert influence(noise, CLIP * np.array([0.0, 1.0])) > 1.5 * merged.mu


def test_a_record_in_two_periods_would_cost_more(tmp_path: Path) -> None:
    noise, _ = noise_rows(tmp_path, 5)
    twice = CLIP * np.array([1.0, 2.0, 2.0, 2.0, 2.0])
    assert influence(noise, twice) > 1.2 / SIGMA


def test_gain_over_independent_releases() -> None:
    """A sum of n independent releases has √n times the noise of one; see docs/periods.md."""
    found = {}
    for line in Path("docs/periods.md").read_text("utf-8").splitlines():
        if match := re.match(r"\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", line):
            found[int(match[1])] = tuple(map(float, match.groups()[1:]))
    for count, stated in found.items():
        noise = column_norm(count) ** 2
        first = column_norm(count)
        expected = (first, noise, math.sqrt(count), math.sqrt(count) / noise)
        assert stated == pytest.approx(expected, abs=0.005)
    assert {n: round(found[n][3], 1) for n in (12, 52)} == {12: 1.9, 52: 3.1}


def test_a_repeated_period_is_charged_and_drawn_once(tmp_path: Path) -> None:
    ledger, secret = Ledger("c"), SecretGenerator()
    results = []
    for stops in ("charged", "released", "", ""):
        sequence = ReleaseSequence(tmp_path, "c", 1, 3)
        sequence.begin("records")
        mechanism = RunningSumMechanism(
            sequence, row(1, 3), 1, PeriodEnforcer(ledger, rows=0), secret
        )
        if stops != "charged":
            mechanism.sample(1)
            mechanism.add(torch.ones(1, WIDTH), torch.zeros(1, dtype=torch.long))
            results.append(mechanism.release())
    assert len(ledger.releases) == 1
    assert all(result.equal(results[0]) for result in results)
    for path in tmp_path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert path.name == ".sequences" or mode == (0o700 if path.is_dir() else 0o600)

    sequence.facts = replace(sequence.facts, noise_multiplier=3.0)
    with raises(LedgerError, "sequence.settings"):
        sequence.begin("records")


@pytest.mark.parametrize("changed", ["records", "settings"])
def test_only_the_last_of_two_processes_releases(tmp_path: Path, changed: str) -> None:
    """Else the first process's records would be known in no period, and could be in two."""
    ledger, secret, mechanisms = Ledger("c"), SecretGenerator(), []
    for number in range(2):
        sequence = ReleaseSequence(tmp_path, "c", 2, 3)
        sequence.facts = PeriodFacts(1.0, 10.0 + (changed == "settings") * number)
        sequence.begin(f"records {(changed == 'records') * number}")
        (sequence.folder / "001-sums.safetensors").write_bytes(
            save({"noise": torch.zeros(1, WIDTH), "increment": torch.zeros(1, WIDTH)})
        )
        guard = PeriodEnforcer(ledger, rows=0)
        mechanism = RunningSumMechanism(sequence, row(2, 3), 1, guard, secret)
        mechanism.sample(1)
        mechanisms.append(mechanism)
    with raises(LedgerError, "sequence.begun"):
        mechanisms[0].release()
    assert not sequence.has_releases
    mechanisms[1].release()
    assert sequence.has_releases
    with raises(LedgerError, "sequence.settings"):
        sequence.begin("other")


def test_missing_or_damaged_noise_is_refused(tmp_path: Path) -> None:
    noise_rows(tmp_path, 2)
    (file,) = tmp_path.rglob("001-*")
    for content in (b"", b"x" * 50, None):
        file.write_bytes(content) if content is not None else file.unlink()
        with raises(LedgerError, "sequence.missing"):
            ReleaseSequence(tmp_path, "c", 2, 2).earlier_releases(in_period("sums", 2, 2))
    sequence = ReleaseSequence(tmp_path, "c", 1, 2)
    (sequence.folder / "001.json").write_text("[]")
    with raises(LedgerError, "sequence.missing"):
        sequence.stored_facts(1)
    assert ReleaseSequence(tmp_path, "d", 1, 2).stored_facts(1) is None
    assert PeriodFacts(1.0, 2.0).finished is False
