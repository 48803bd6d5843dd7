"""Tests of runs on a user's own data: no data are public by default, all runs are charged, and runs
may protect users with all their records."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import (
    ImageData,
    PrivacySettings,
    Real,
    RunResult,
    RunSettings,
    from_arrays,
    resolve,
    simulate,
)
from fedsynth.config.participation import Participation
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, PartitionError, SettingError, UnknownNameError
from fedsynth.federation.run_data import divided
from fedsynth.privacy.errors import LedgerError, PrivacySettingError, UnaccountedReleaseError
from fedsynth.privacy.ledger.folder import LedgerFolder
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.results.verification import verify_run
from fedsynth.simulation.audit import audit_run
from fedsynth.validation import to_toml
from tests.observers import NoteRecorder
from tests.quick_settings import folder_of, quick_sections, verified
from tests.simulation.test_recorded_numbers import user_data

SPEC = replace(
    dataset_spec("digits"), name="scans", train_size=200, test_size=40, source="our clinic"
)
DECLARED_PUBLIC = re.compile(r"declare\w*[^.;|\n]{0,60}public")
PARTS = [np.arange(120), np.arange(120, 200)]


def scans(n: int = 200, seed: int = 0, name: str = "scans") -> ImageData:
    images = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, np.arange(n) % 10, replace(SPEC, name=name))


def tiny(method: str = "feddm", **sections: Any) -> RunSettings:
    run = {"rounds": 1, **sections.pop("run", {})}
    return resolve(quick_sections(method, run=run, **sections))


def private(**privacy: Any) -> dict[str, Any]:
    return {"noise_multiplier": 3.0, "max_records": 1000, **privacy}


def run(settings: RunSettings, **more: Any) -> RunResult:
    """Runs the settings on the scans of two clients."""
    return simulate(settings, **{"data": (scans(), None), "parts": PARTS, **more})


def data_statements(folder: Path) -> str:
    """Returns a report's verdict, scope and public items."""
    report = json.loads((folder / "privacy_report.json").read_text())
    return json.dumps([report[key] for key in ("verdict", "scope", "public_items")])


# ------------------------------------------------------------ required ledgers
def test_own_data_need_a_ledger_or_a_public_declaration(tmp_path: Path) -> None:
    """Regression: a report states 'declared public' without the owner's declaration."""
    runs = tmp_path / "runs"
    with pytest.raises(
        PrivacySettingError, match=r"privacy.ledger must be the folder .*'scans'.* or 'none"
    ):
        run(tiny(privacy=private()), output=runs)
    assert not runs.exists()
    public = folder_of(run(tiny(privacy=private(ledger=NO_LEDGER)), output=runs))
    text = data_statements(public)
    assert "scans: the operator's own, declared public by the operator" in text
    assert DECLARED_PUBLIC.search(text)
    private_folder = folder_of(run(tiny(privacy=private(ledger=tmp_path / "ledgers")), output=runs))
    assert not DECLARED_PUBLIC.search(data_statements(private_folder))
    assert not (private_folder / "ledger").exists()
    for ledger in ("none", "None: this data set is public!", "", "none:"):
        with pytest.raises(PrivacySettingError, match="or exactly 'none: this data set is public'"):
            PrivacySettings(noise_multiplier=1.0, ledger=ledger)


def test_reports_without_ledgers_name_the_published_data_set(tmp_path: Path) -> None:
    folder = folder_of(simulate(tiny(privacy=private(max_records=2000)), output=tmp_path))
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["public_items"]["data set"].startswith("digits, published: scikit-learn's")
    assert not report["ledger_kept"]
    text = " ".join((folder / "privacy_report.md").read_text().split())
    assert "Earlier and later runs on the same data are not counted" in text
    assert not DECLARED_PUBLIC.search(data_statements(folder))


# ---------------------------------------------------------- records of a ledger
def test_ledgers_of_named_clients_reject_other_data(tmp_path: Path) -> None:
    settings, names = tiny(privacy=private(ledger=tmp_path / "ledgers")), ["north", "St.Mary"]
    first: Any = run(settings, names=names).privacy
    assert set(first["guarantee"]["epsilon_by_client"]) == set(names)
    reseeded = replace(settings, seed=1)  # the records do not depend on the seed
    second: Any = run(reseeded, parts=PARTS[::-1], names=names[::-1]).privacy
    assert second["guarantee"]["epsilon"] > 1.3 * first["guarantee"]["epsilon"]
    changed = scans()
    changed.images[5, 0, 3, 3] ^= 1
    for data, parts, text in (
        (scans(), PARTS[::-1], "80 records of client .* belong to ledger .*St.Mary.jsonl"),
        (changed, PARTS, r"client 'north' has 1 records .* 1 records of the ledger"),
        (scans(seed=1), PARTS, "and 120 records of the ledger are missing"),
    ):
        with pytest.raises(LedgerError, match=text):
            run(settings, data=(data, None), parts=parts, names=names)
    LedgerFolder(tmp_path / "ledgers").carry_over("north")
    third: Any = run(settings, data=(changed, None), names=names).privacy
    assert third["guarantee"]["epsilon"] > second["guarantee"]["epsilon"]
    with pytest.raises(PrivacySettingError, match="list of 2 names"):
        run(settings, names=["north"])


def test_run_folders_contain_no_ledger_keys_or_fingerprints(tmp_path: Path) -> None:
    """A run folder has only the rows of an external ledger, and no fingerprints."""
    ledgers = tmp_path / "ledgers"
    folder = folder_of(run(tiny(privacy=private(ledger=ledgers)), output=tmp_path / "runs"))
    assert verify_run(folder, ledger=ledgers).problems == []
    secrets = [path.read_bytes() for path in (ledgers / "private").iterdir()]
    names = [path.name for path in (ledgers / "private").iterdir() if path.suffix != ".key"]
    for file in (path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert not any(secret in content or secret.hex().encode() in content for secret in secrets)
        assert not any(name.encode() in content for name in names)


# -------------------------------------------------- runs without privacy
def test_runs_without_privacy_void_later_guarantees(tmp_path: Path) -> None:
    """Regression: the next report states ε = 2 after a run that published raw images."""
    ledgers, notes = tmp_path / "ledgers", NoteRecorder()
    result = run(tiny("real", run={"rounds": 2}, privacy={"ledger": str(ledgers)}), observer=notes)
    assert result.privacy is None
    assert "no later run on these data can state an ε" in notes.lines[1]
    for ledger in LedgerFolder(ledgers).ledgers().values():
        assert [row.round for row in ledger.releases] == [1, 2]
        assert all(
            "without differential privacy" in str(row.unaccounted) for row in ledger.releases
        )
    for target in ({"noise_multiplier": 3.0}, {}):
        capped = {"epsilon": 8.0, "max_records": 1000, "ledger": str(ledgers), **target}
        with pytest.raises(UnaccountedReleaseError, match=r"epsilon=8 cannot .*a round of real"):
            run(tiny(privacy=capped))
    later = run(tiny(privacy=private(ledger=ledgers)), output=tmp_path / "runs")
    assert verify_run(folder_of(later), ledger=ledgers).problems == []
    text = (folder_of(later) / "privacy_report.md").read_text()
    assert "no differential privacy guarantee" in text
    assert "a run on the same data without differential privacy" in text
    assert not any("epsilon" in row for row in later.metrics)
    assert later.summary["differential_privacy"]["epsilon"] is None


def test_ledger_rows_are_written_before_client_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    step = Real.client_step

    def counted_step(self: Real, *args: Any) -> Any:
        rows.extend(len(ledger.releases) for ledger in LedgerFolder(tmp_path).ledgers().values())
        return step(self, *args)

    monkeypatch.setattr(Real, "client_step", counted_step)
    run(tiny("real", privacy={"ledger": tmp_path}))
    assert set(rows) == {1}


def test_only_clients_with_releases_are_charged(tmp_path: Path) -> None:
    """Participants are charged; all clients are if sampling uses sizes or test splits are measured."""
    (client,) = Participation(0, 2, 0.5).in_round(1)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "part": ({}, {}),
        "sizes": ({"sampling": "size"}, {}),
        "splits": ({}, {"local_test": 0.5}),
    }
    for name, (sampling, partition) in cases.items():
        ledger = {"ledger": str(tmp_path / name)}
        participation = {"participation": 0.5, **sampling}
        run(tiny("fedavg", run=participation, partition=partition, privacy=ledger))
        ledgers = LedgerFolder(tmp_path / name).ledgers()
        charged = {name for name, entries in ledgers.items() if entries.releases}
        assert charged == (
            {f"client-00{client}"} if name == "part" else {"client-000", "client-001"}
        )


def test_ledger_settings_survive_a_config_file(tmp_path: Path) -> None:
    public = tiny(privacy=private(ledger=NO_LEDGER))
    ledger_only = tiny("real", privacy={"ledger": str(tmp_path)})
    assert (ledger_only.privacy, ledger_only.ledger) == (None, tmp_path)
    for settings in (public, ledger_only):
        assert resolve(tomllib.loads(to_toml(settings.to_mapping()))) == settings
    assert tiny("real", privacy={"ledger": NO_LEDGER}).ledger is None
    with pytest.raises(SettingError, match=r"Set PrivacySettings\.ledger instead"):
        replace(tiny(privacy=private()), ledger=tmp_path)
    with pytest.raises(PrivacySettingError, match="noise_multiplier"):
        tiny(privacy={"ledger": str(tmp_path), "delta": 1e-6})


# ------------------------------------------------------------------------ test images
@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("declared", [None, "public", "none"])
def test_accuracy_on_private_test_images_is_in_simulation_only(
    declared: str | None, protected: bool, tmp_path: Path
) -> None:
    """Own test images are private unless declared public; runs without differential privacy show all
    accuracies."""
    absent = declared == "none"
    public = declared == "public" or (not protected and not absent)
    settings = tiny("fedavg", privacy=private(ledger=NO_LEDGER) if protected else {})
    data, test = (scans(), None if absent else scans(40, 1)), None if absent else declared
    result = run(settings, data=data, test=test, output=tmp_path)
    folder = folder_of(result)
    assert (result.accuracy is None) == absent
    assert result.summary["test_accuracy"] == (result.accuracy if public else None)
    assert result.summary.get("test_data") == (None if public else declared or "private")
    assert ("test_accuracy" in result.metrics[0]) == public
    if not protected:
        return
    report = json.loads((folder / "privacy_report.json").read_text())
    scope = [entry for entry in report["scope"] if entry["access"].startswith("test set")]
    status = [] if absent else ["public" if public else "simulation-only"]
    assert list(dict.fromkeys(entry["status"] for entry in scope)) == status
    row = json.loads((folder / "simulation_only" / "rounds.jsonl").read_text().splitlines()[0])
    assert ("private_test" in row) == (declared is None)
    if declared is None:
        assert row["private_test"]["test_accuracy"] == result.accuracy
        for file in (path for path in folder.rglob("*") if path.is_file()):
            if "simulation_only" not in file.parts:
                text = file.read_bytes().decode(errors="replace")
                assert '"private_test"' not in text, file
                assert '"test_accuracy"' not in text.replace('"test_accuracy": null', ""), file


@pytest.mark.parametrize("method", ["fedkf", "fedbn"])
def test_methods_with_variants_and_own_models_run_without_test_images(method: str) -> None:
    result = run(tiny(method, partition={"local_test": 0.3}))
    assert result.accuracy is None
    assert 0 <= result.metrics[-1]["local"]["amp"] <= 1


def test_invalid_data_and_test_statuses_are_rejected() -> None:
    cases: list[tuple[Any, str | None, type[Exception], str]] = [
        ((scans(), "public"), None, DataError, r"tuple \(train, test\)"),
        ((None, scans()), None, DataError, "fedsynth.from_arrays"),
        ("digits", None, DataError, r"data must be a tuple \(train, test\)"),
        ((scans(), scans(name="other")), None, DataError, "same specification"),
        ((scans(), scans()), "secret", UnknownNameError, "secret"),
    ]
    for data, test, kind, text in cases:
        with pytest.raises(kind, match=text):
            simulate(tiny(), data=data, test=test)


# ------------------------------------------------------------------------------------- users
USERS = np.arange(320) // 8
USER_PARTS = list(np.arange(320).reshape(4, 80))


def user_settings(method: str = "feddm", **privacy: Any) -> RunSettings:
    return tiny(
        method, privacy={"noise_multiplier": 3.0, "unit": "user", "nominal_size": 10, **privacy}
    )


def user_run(settings: RunSettings, output: Path | None = None) -> RunResult:
    return simulate(settings, data=user_data(), parts=USER_PARTS, output=output)


def test_report_states_the_protected_unit_and_is_verified(tmp_path: Path) -> None:
    result = user_run(user_settings(user_records=4), tmp_path)
    report: Any = result.privacy
    assert (report["unit"]["kind"], report["unit"]["user_records"]) == (USER, 4)
    assert report["public_items"]["nominal persons of a client"].startswith("10 (declared)")
    assert {row["unit"] for row in report["ledger"]} == {USER}
    assert [group["units"] for group in report["guarantee"]["groups"]] == [2, 5]
    assert "for one person of one client" in (verified(result) / "privacy_report.md").read_text()


def test_sample_rate_uses_the_public_number_of_users() -> None:
    """The rate is the method's batch over the nominal number of users, at most 1."""
    report: Any = user_run(user_settings("fedavg")).privacy
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
    settings = user_settings(**bound, sample_rate=1.0, clip=0.05)
    settings = replace(settings, partition=replace(settings.partition, local_test=local_test))
    data, test = user_data()
    runs = []
    for removed in (-1, 3, 7):
        indices = np.flatnonzero(removed != USERS)
        parts = [np.flatnonzero(np.isin(indices, part)) for part in USER_PARTS]
        sums.clear()
        simulate(settings, data=(data.subset(indices), test), parts=parts)
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
    privacy = {"noise_multiplier": 3.0, "unit": unit, "nominal_size": 100}
    settings = tiny(partition={"local_test": 0.3}, privacy=privacy)
    training, testing = divided(settings, [torch.from_numpy(p) for p in USER_PARTS], user_data()[0])
    assert all(len(part) for part in (*training, *testing))
    shared = [set(USERS[a]) & set(USERS[b]) for a, b in zip(training, testing, strict=True)]
    assert any(shared) == shares


def test_invalid_user_settings_are_refused() -> None:
    with pytest.raises(PrivacySettingError, match=r"requires privacy\.nominal_size"):
        resolve({"privacy": {"noise_multiplier": 1.0, "unit": "user"}})
    with pytest.raises(PrivacySettingError, match="one of record, user"):
        user_settings(unit="household")
    with pytest.raises(PrivacySettingError, match="user_records"):
        user_settings(unit="record", user_records=3)
    data, test = user_data()
    with pytest.raises(DataError, match="must state the user of each record"):
        run(user_settings(), data=(test, test), parts=np.split(np.arange(100), 2))
    with pytest.raises(PartitionError, match="records of the same user"):
        run(user_settings(), data=(data, test), parts=[np.arange(95), np.arange(95, 320)])


def test_user_runs_can_be_audited() -> None:
    """Each canary is a user; the claim of an honest run is not refuted."""
    settings = user_settings(noise_multiplier=2.0)
    audit = audit_run(settings, canaries=40, test_only=np.random.default_rng(0))
    assert 0 <= audit.epsilon_lower_bound <= audit.epsilon
