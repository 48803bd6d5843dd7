"""Tests of whole runs that protect users: reports, ledgers, refusals, and the influence of one user
on a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import ImageData, RunResult, RunSettings, from_arrays, resolve, simulate
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, PartitionError
from fedsynth.federation.run_data import divided
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.releases import USER
from fedsynth.simulation.audit import audit_run
from tests.quick_settings import verified

SPEC = dataset_spec("digits")
USERS = np.repeat(np.arange(30), 10)  # 10 records each; ten users a client
PARTS = [np.arange(100), np.arange(100, 200), np.arange(200, 300)]


def user_data(users: np.ndarray = USERS) -> tuple[ImageData, ImageData]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (len(users), 1, 8, 8)).astype(np.uint8)
    data = from_arrays(images, rng.integers(0, 10, len(users)), SPEC)
    return ImageData(data.images, data.labels, SPEC, None, torch.from_numpy(users)), data


def settings(method: str = "feddm", **privacy: Any) -> RunSettings:
    values = {"iterations": 2, "ipc": 1, "server_epochs": 1}
    return resolve({
        "run": {"method": method, "rounds": 2},
        "model": {"width": 4, "depth": 2},
        "partition": {"clients": 3},
        "method": values if method == "feddm" else {"local_steps": 1},
        "privacy": {"noise_multiplier": 3.0, "unit": "user", "nominal_size": 10, **privacy},
    })  # fmt: skip


def run(output: Path | None = None, **privacy: Any) -> RunResult:
    return simulate(settings(**privacy), data=user_data(), parts=PARTS, output=output)


def test_report_states_the_protected_unit_and_is_verified(tmp_path: Path) -> None:
    result = run(tmp_path, user_records=4)
    report: Any = result.privacy
    assert (report["unit"]["kind"], report["unit"]["user_records"]) == (USER, 4)
    assert report["public_items"]["nominal persons of a client"].startswith("10 (declared)")
    assert {row["unit"] for row in report["ledger"]} == {USER}
    assert [group["units"] for group in report["guarantee"]["groups"]] == [2, 5]
    assert "for one person of one client" in (verified(result) / "privacy_report.md").read_text()


def test_sample_rate_uses_the_public_number_of_users() -> None:
    """The rate is the method's batch over the nominal number of users, at most 1."""
    report: Any = simulate(settings("fedavg"), data=user_data(), parts=PARTS).privacy
    assert {row["sample_rate"] for row in report["ledger"]} == {1.0}


@pytest.mark.parametrize(("local_test", "user_records"), [(0.0, None), (0.3, 3)])
def test_one_more_user_moves_sums_by_at_most_the_clip(
    local_test: float, user_records: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the engine's split, bound, sampling at rate 1 and clipping, with releases of zero."""
    sums: list[tuple[Tensor, float]] = []

    def release(self: GaussianSumMechanism) -> Released:
        assert self._sums is not None
        self._users.close(self._sums)
        sums.append((self._sums.clone(), self._release.sensitivity))
        self._sums, self.steps_left = None, self.steps_left - 1
        return Released(torch.zeros(self._groups, self._width))

    monkeypatch.setattr(GaussianSumMechanism, "release", release)
    bound = {} if user_records is None else {"user_records": user_records}
    sections = settings(**bound, sample_rate=1.0, clip=0.05).to_mapping()
    sections["partition"]["local_test"] = local_test
    data, test = user_data()
    runs = []
    for removed in (None, 3, 7):
        indices = np.flatnonzero(removed != USERS) if removed is not None else np.arange(300)
        parts = [np.flatnonzero(np.isin(indices, part)) for part in PARTS]
        sums.clear()
        simulate(resolve(sections), data=(data.subset(indices), test), parts=parts)
        runs.append(list(sums))
    shifts = []
    for other in runs[1:]:
        assert len(other) == len(runs[0]) > 0
        for (a, clip), (b, _) in zip(runs[0], other, strict=True):
            shifts.append(float((a - b).norm()) / clip)
    assert max(shifts) <= 1 + 1e-6
    assert max(shifts) > 0.5  # some user trains and is clipped


@pytest.mark.parametrize(("unit", "shares"), [("user", False), ("record", True)])
def test_test_splits_follow_the_protected_unit(unit: str, shares: bool) -> None:
    sections = settings(unit=unit, nominal_size=100).to_mapping()
    sections["partition"]["local_test"] = 0.3
    training, testing = divided(
        resolve(sections), list(map(torch.from_numpy, PARTS)), user_data()[0]
    )
    assert all(len(part) for part in (*training, *testing))
    shared = [set(USERS[a]) & set(USERS[b]) for a, b in zip(training, testing, strict=True)]
    assert any(shared) == shares


def test_invalid_user_settings_are_refused() -> None:
    with pytest.raises(PrivacySettingError, match=r"requires privacy\.nominal_size"):
        resolve({"privacy": {"noise_multiplier": 1.0, "unit": "user"}})
    with pytest.raises(PrivacySettingError, match="one of record, user"):
        settings(unit="household")
    with pytest.raises(PrivacySettingError, match="user_records"):
        settings(unit="record", user_records=3)
    data, test = user_data()
    with pytest.raises(DataError, match="must state the user of each record"):
        simulate(settings(), data=(test, test), parts=PARTS)
    cut = [np.arange(95), np.arange(95, 200), np.arange(200, 300)]
    with pytest.raises(PartitionError, match="records of the same user"):
        simulate(settings(), data=(data, test), parts=cut)


def test_user_runs_can_be_audited() -> None:
    """Each canary is a user; the claim of an honest run is not refuted."""
    audit = audit_run(
        settings(noise_multiplier=2.0), canaries=40, test_only=np.random.default_rng(0)
    )
    assert 0 <= audit.epsilon_lower_bound <= audit.epsilon
