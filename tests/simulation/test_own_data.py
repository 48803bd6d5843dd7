"""Tests of runs on a user's own data and image folders: declarations, ledgers, and users."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import fedsynth as fs
from fedsynth.config.participation import Participation
from fedsynth.data.medical import patient_of
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import (
    DataError,
    LedgerError,
    PartitionError,
    PrivacySettingError,
    SettingError,
    UnaccountedReleaseError,
    UnknownNameError,
)
from fedsynth.federation.context import plan_of
from fedsynth.federation.run_data import divided
from fedsynth.privacy.ledger.folder import LedgerFolder
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.results.verification import verify_run
from fedsynth.simulation.audit import audit_run
from fedsynth.validation import read_sections, to_toml
from tests.data.test_medical import NAME, write_ct
from tests.quick_runs import NoteRecorder, folder_of, interrupt_in_round, quick_sections, verified
from tests.raising import raises
from tests.simulation.test_recorded_numbers import user_data
from tests.user_files import make_image_folder, write_declaration

SPEC = replace(dataset_spec("digits"), name="scans", train_size=200, test_size=40, source="clinic")
DECLARED_PUBLIC = re.compile(r"declare\w*[^.;|\n]{0,60}public")
BUDGET = {"noise_multiplier": 3.0}
PARTS = [np.arange(120), np.arange(120, 200)]


def scans(n: int = 200, seed: int = 0, name: str = "scans") -> fs.ImageData:
    images = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    return fs.from_arrays(images, np.arange(n) % 10, replace(SPEC, name=name))


def tiny(method: str = "feddm", **sections: Any) -> fs.RunSettings:
    run = {"rounds": 1, **sections.pop("run", {})}
    return fs.resolve(quick_sections(method, run=run, **sections))


def private(**privacy: Any) -> dict[str, Any]:
    return {**BUDGET, "max_records": 1000, **privacy}


def run(settings: fs.RunSettings, **more: Any) -> fs.RunResult:
    return fs.simulate(settings, **{"data": (scans(), None), "parts": PARTS, **more})


def data_statements(folder: Path) -> str:
    report = json.loads((folder / "privacy_report.json").read_text())
    return json.dumps([report[key] for key in ("verdict", "scope", "public_items")])


def test_own_data_need_a_ledger_or_a_public_declaration(tmp_path: Path) -> None:
    """Regression: a report states 'declared public' without the owner's declaration. A run folder
    has only the rows of an external ledger, and no fingerprints."""
    runs, ledgers = tmp_path / "runs", tmp_path / "ledgers"
    with raises(PrivacySettingError, "privacy.ledger"):
        run(tiny(privacy=private()), output=runs)
    assert not runs.exists()
    public = folder_of(run(tiny(privacy=private(ledger=NO_LEDGER)), output=runs))
    text = data_statements(public)
    assert "scans: the operator's own, declared public by the operator" in text
    assert DECLARED_PUBLIC.search(text)
    folder = folder_of(run(tiny(privacy=private(ledger=ledgers)), output=runs))
    assert not DECLARED_PUBLIC.search(data_statements(folder))
    assert verify_run(folder, ledger=ledgers).problems == []
    assert not (folder / "ledger").exists()
    private_files = list((ledgers / "private").iterdir())
    secrets = [path.name.encode() for path in private_files if path.suffix != ".key"]
    for content in map(Path.read_bytes, private_files):
        secrets += [content, content.hex().encode()]
    for file in filter(Path.is_file, folder.rglob("*")):
        assert not [secret for secret in secrets if secret in file.read_bytes()]
    for ledger in ("none", "None: this data set is public!", "", "none:"):
        with pytest.raises(PrivacySettingError, match="or exactly 'none: this data set is public'"):
            fs.PrivacySettings(noise_multiplier=1.0, ledger=ledger)
    published = folder_of(fs.simulate(tiny(privacy=private(max_records=2000)), output=tmp_path))
    report = json.loads((published / "privacy_report.json").read_text())
    assert report["public_items"]["data set"].startswith("digits, published: scikit-learn's")
    assert not report["ledger_kept"]
    text = " ".join((published / "privacy_report.md").read_text().split())
    assert "the releases of earlier and later runs are not counted" in text
    assert not DECLARED_PUBLIC.search(data_statements(published))


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
        (scans(), PARTS[::-1], "ledger.moved_records"),
        (changed, PARTS, "ledger.new_records"),
        (scans(seed=1), PARTS, "ledger.new_records"),
    ):
        with raises(LedgerError, text):
            run(settings, data=(data, None), parts=parts, names=names)
    LedgerFolder(tmp_path / "ledgers").carry_over("north")
    third: Any = run(settings, data=(changed, None), names=names).privacy
    assert third["guarantee"]["epsilon"] > second["guarantee"]["epsilon"]
    with raises(PrivacySettingError, "names"):
        run(settings, names=["north"])


def test_open_runs_void_later_guarantees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the next report states ε = 2. Rows are written before the clients' steps."""
    ledgers, notes = tmp_path / "ledgers", NoteRecorder()
    rows: list[int] = []
    step = fs.Real.client_step

    def counted_step(self: fs.Real, *args: Any) -> Any:
        rows.extend(len(ledger.releases) for ledger in LedgerFolder(ledgers).ledgers().values())
        return step(self, *args)

    monkeypatch.setattr(fs.Real, "client_step", counted_step)
    result = run(tiny("real", run={"rounds": 2}, privacy={"ledger": str(ledgers)}), observer=notes)
    assert result.privacy is None
    assert rows == [1] * 4 + [2] * 4  # of two ledgers, before the steps of two clients
    assert "no later run on these data can state an ε" in notes.lines[1]
    for ledger in LedgerFolder(ledgers).ledgers().values():
        assert [row.round for row in ledger.releases] == [1, 2]
        reasons = [str(row.unaccounted) for row in ledger.releases]
        assert all("without differential privacy" in reason for reason in reasons)
    for target in ({"noise_multiplier": 3.0}, {}):
        capped = {"epsilon": 8.0, "max_records": 1000, "ledger": str(ledgers), **target}
        with raises(UnaccountedReleaseError, "release.ledger"):
            run(tiny(privacy=capped))
    later = run(tiny(privacy=private(ledger=ledgers)), output=tmp_path / "runs")
    assert verify_run(folder_of(later), ledger=ledgers).problems == []
    text = (folder_of(later) / "privacy_report.md").read_text()
    assert "no differential privacy guarantee" in text
    assert "a run on the same data without differential privacy" in text
    assert not any("epsilon" in row for row in later.metrics)
    assert later.summary["differential_privacy"]["epsilon"] is None


def test_only_clients_with_releases_are_charged(tmp_path: Path) -> None:
    """All clients are charged if sampling uses sizes or test splits are measured."""
    (client,) = Participation(0, 2, 0.5).in_round(1)
    for name, sampling, local_test, charged in (
        ("part", "uniform", 0.0, {client}),
        ("sizes", "size", 0.0, {0, 1}),
        ("splits", "uniform", 0.5, {0, 1}),
    ):
        section = {"participation": 0.5, "sampling": sampling}
        ledger = {"ledger": str(tmp_path / name)}
        run(tiny("fedavg", run=section, partition={"local_test": local_test}, privacy=ledger))
        ledgers = LedgerFolder(tmp_path / name).ledgers()
        names = {name for name, entries in ledgers.items() if entries.releases}
        assert names == {f"client-00{number}" for number in charged}


def test_ledger_settings_survive_a_config_file(tmp_path: Path) -> None:
    public = tiny(privacy=private(ledger=NO_LEDGER))
    ledger_only = tiny("real", privacy={"ledger": str(tmp_path)})
    assert (ledger_only.privacy, ledger_only.ledger) == (None, tmp_path)
    for settings in (public, ledger_only):
        assert fs.resolve(tomllib.loads(to_toml(settings.to_mapping()))) == settings
    assert tiny("real", privacy={"ledger": NO_LEDGER}).ledger is None
    with raises(SettingError, "RunSettings.ledger"):
        replace(tiny(privacy=private()), ledger=tmp_path)
    with raises(PrivacySettingError, "privacy.noise_multiplier"):
        tiny(privacy={"ledger": str(tmp_path), "delta": 1e-6})


@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("declared", [None, "public", "none"])
def test_accuracy_on_private_test_images_is_in_simulation_only(
    declared: str | None, protected: bool, tmp_path: Path
) -> None:
    """Own test images are private unless declared public or the run has no privacy."""
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
        for file in folder.rglob("*"):
            if file.is_file() and "simulation_only" not in file.parts:
                text = file.read_text(errors="replace")
                assert '"private_test"' not in text, file
                assert '"test_accuracy"' not in text.replace('"test_accuracy": null', ""), file


@pytest.mark.parametrize("method", ["fedkf", "fedbn"])
def test_methods_with_variants_and_own_models_run_without_test_images(method: str) -> None:
    result = run(tiny(method, partition={"local_test": 0.3}))
    assert result.accuracy is None
    assert 0 <= result.metrics[-1]["local"]["amp"] <= 1


def test_invalid_data_and_test_statuses_are_rejected() -> None:
    cases: list[tuple[Any, str]] = [
        ((scans(), "public"), "data.type"),
        ((None, scans()), "data.type"),
        ("digits", "data.type"),
        ((scans(), scans(name="other")), "data.spec"),
    ]
    for data, text in cases:
        with raises(DataError, text):
            fs.simulate(tiny(), data=data)
    with raises(SettingError, "settings"):
        fs.simulate("feddm")
    with raises(SettingError, "method"):
        fs.owner_settings({"method": "feddm"})
    with raises(UnknownNameError, "test"):
        fs.simulate(tiny(), data=(scans(), scans()), test="secret")


def test_ipc_of_a_synthesis_counts_all_images() -> None:
    """`--ipc 100` is "the number of images of each class", so no further images are drawn."""
    for given, total in (({}, 500), ({"ipc": 100}, 100), ({"ipc": 100, "drawn_ipc": 50}, 150)):
        settings = fs.owner_settings({"run": {"method": "fedstats"}, "method": given})
        assert settings.method.images_each == total


USERS = np.arange(320) // 8
USER_PARTS = list(np.arange(320).reshape(4, 80))


def user_settings(method: str = "feddm", **privacy: Any) -> fs.RunSettings:
    return tiny(method, privacy={**BUDGET, "unit": "user", "nominal_size": 10, **privacy})


def test_runs_on_records_of_users_need_a_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is charged without a unit. If users are not declared, the run only warns."""
    by_user = replace(scans(), groups=torch.arange(200) // 8)
    kept = {**BUDGET, "max_records": 1000, "ledger": str(tmp_path / "kept")}
    public = {**kept, "ledger": NO_LEDGER}
    run(tiny("fedavg", privacy=public), data=scans())
    for unit in ({"unit": "user", "nominal_size": 10}, {"unit": "record"}):
        run(tiny("fedavg", privacy={**public, **unit}), data=(by_user, None))
    with raises(PrivacySettingError, "privacy.unit"):
        run(tiny("fedavg", privacy=kept), data=(by_user, None))
    assert not (tmp_path / "kept").exists()
    folder = make_image_folder(tmp_path / "scans")
    images = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*/*.png"))
    rows = [f"{path},p{number // 3}" for number, path in enumerate(images)]
    (folder / "users.csv").write_text("\n".join(("path,patient", *rows)))
    for users in (8, 0):
        write_declaration(folder, users=users)
        settings = on_folder(folder, privacy=BUDGET)
        if users:
            with raises(PrivacySettingError, "privacy.unit"):
                plan_of(settings)
            with raises(PrivacySettingError, "privacy.unit"):
                fs.simulate(settings)
            assert not (folder / "fedsynth-ledger").exists()
    capsys.readouterr()
    fs.simulate(settings)
    assert "set --dp-unit user" in capsys.readouterr().err


def test_local_tests_do_not_split_users() -> None:
    """Regression: without privacy, a patient was in the training and in the test split."""
    by_user = replace(scans(), groups=torch.arange(200) // 8)
    settings = tiny("fedavg", partition={"local_test": 0.5, "clients": 2})
    parts = [torch.arange(0, 104), torch.arange(104, 200)]
    (training, _), (testing, _) = divided(settings, [torch.arange(8), parts[1]], by_user)
    assert 0 < len(testing) < 8  # a client's only user is divided
    assert len(training) + len(testing) == 8
    for training, testing in zip(*divided(settings, parts, by_user), strict=True):
        assert len(training)
        assert len(testing)
        assert not set((training // 8).tolist()) & set((testing // 8).tolist())


def test_kept_ledgers_are_bound_to_users(tmp_path: Path) -> None:
    settings = user_settings("fedavg", ledger=str(tmp_path))
    by_user = replace(scans(), groups=torch.arange(200) // 8)
    run(settings, data=(by_user, None))
    run(settings, data=(replace(by_user, groups=99 - by_user.groups), None))  # renumbered
    moved = by_user.groups.clone()
    moved[8] = 0
    with raises(LedgerError, "ledger.new_records"):
        run(settings, data=(replace(by_user, groups=moved), None))


def test_reports_and_audits_of_users_state_the_protected_unit(tmp_path: Path) -> None:
    """The sample rate is the method's batch over the nominal number of users, at most 1."""
    settings = user_settings("fedavg", user_records=4)
    result = fs.simulate(settings, data=user_data(), parts=USER_PARTS, output=tmp_path)
    report: Any = result.privacy
    assert (report["unit"]["kind"], report["unit"]["user_records"]) == (USER, 4)
    assert report["public_items"]["nominal persons of a client"].startswith("10 (declared)")
    assert {(row["unit"], row["sample_rate"]) for row in report["ledger"]} == {(USER, 1.0)}
    assert [group["units"] for group in report["guarantee"]["groups"]] == [2, 5]
    assert "for one person of one client" in (verified(result) / "privacy_report.md").read_text()
    settings = user_settings(noise_multiplier=2.0)  # each canary of an audit is a user
    audit = audit_run(settings, canaries=40, test_only=np.random.default_rng(0))
    assert 0 <= audit.epsilon_lower_bound <= audit.epsilon


@pytest.mark.parametrize(("local_test", "user_records"), [(0.0, None), (0.3, 3)])
def test_one_more_user_moves_sums_by_at_most_the_clip(
    local_test: float, user_records: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the engine's split, bound, sampling at rate 1 and clipping, with releases of zero."""
    sums: list[Tensor] = []
    release = GaussianSumMechanism.release

    def release_zeros(self: GaussianSumMechanism) -> Released:
        assert self._sums is not None
        self._users.close(self._sums)
        sums.append(self._sums / self._release.sensitivity)
        return Released(torch.zeros_like(release(self)))

    monkeypatch.setattr(GaussianSumMechanism, "release", release_zeros)
    bound = {} if user_records is None else {"user_records": user_records}
    settings = user_settings(**bound, sample_rate=1.0, clip=0.05)
    settings = replace(settings, partition=replace(settings.partition, local_test=local_test))
    data, test = user_data()
    runs = []
    for removed in (-1, 3, 7):
        indices = np.flatnonzero(removed != USERS)
        parts = [np.flatnonzero(np.isin(indices, part)) for part in USER_PARTS]
        sums.clear()
        fs.simulate(settings, data=(data.subset(indices), test), parts=parts)
        runs.append(list(sums))
    pairs = [pair for other in runs[1:] for pair in zip(runs[0], other, strict=True)]
    shifts = [float((a - b).norm()) for a, b in pairs]
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
    with pytest.raises(PrivacySettingError, match=r"Set privacy\.nominal_size"):
        fs.resolve({"privacy": {"noise_multiplier": 1.0, "unit": "user"}})
    with pytest.raises(PrivacySettingError, match="one of record, user"):
        user_settings(unit="household")
    with raises(PrivacySettingError, "privacy.user_records"):
        user_settings(unit="record", user_records=3)
    data, test = user_data()
    with raises(DataError, "data.users"):
        run(user_settings(), data=(test, test), parts=np.split(np.arange(100), 2))
    with raises(PartitionError, "partition.users"):
        run(user_settings(), data=(data, test), parts=[np.arange(95), np.arange(95, 320)])


def on_folder(folder: Path, **sections: Any) -> fs.RunSettings:
    run = {"rounds": 1, "device": "cpu", **sections.pop("run", {})}
    data = {"folder": str(folder), **sections.pop("data", {})}
    method = {"ipc": 1, "iterations": 2, "server_epochs": 1, "min_examples": 1}
    model = {"width": 4, "depth": 2}
    return fs.resolve({"run": run, "data": data, "method": method, "model": model, **sections})


LINEAR = fs.resolve({"run": {"method": "fedavg", "rounds": 1}, "model": {"name": "linear"}})


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    write_declaration(make_image_folder(tmp_path / "clinic"))
    return tmp_path / "clinic"


def test_sites_are_clients_and_pooled_folders_need_a_partition(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path / "sites", ("a", "b", "c"))
    result = fs.simulate(on_folder(folder), quiet=True)
    assert sorted(result.uploads) == [0, 1, 2]
    assert (result.settings.partition.kind, result.settings.partition.clients) == ("given", 3)
    linear = replace(LINEAR, partition=replace(LINEAR.partition, kind="iid", clients=5))
    folder_data = fs.load_records(folder)
    assert len(fs.simulate(linear, data=folder_data, quiet=True).uploads) == 3
    assert len(fs.simulate(linear, data=(folder_data.train, None), quiet=True).uploads) == 5
    pooled = make_image_folder(tmp_path / "pooled", sites=())
    with raises(PartitionError, "partition.sites"):
        fs.simulate(on_folder(pooled), quiet=True)


def test_no_run_file_has_dicom_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Patients are the privacy unit, but neither their IDs nor hashes of them leave the reader."""
    folder = tmp_path / "clinic"
    for site, label, number in product(("north", "south"), ("ill", "well"), range(4)):
        path = folder / site / label / f"{number}.dcm"
        write_ct(path, f"ID-{site}-{label}-{number // 2}")
    write_declaration(folder, users=16)
    private = on_folder(folder, privacy={**BUDGET, "unit": "user"})
    assert private.privacy.nominal_size == 8  # 16 declared users at two sites
    result = fs.simulate(private, output=tmp_path / "runs")
    hidden = [NAME, "ID-north", patient_of(folder / "north/ill/0.dcm")]
    paths = (*result.folder.rglob("*"), *(folder / "fedsynth-ledger").rglob("*"))
    texts = [capsys.readouterr().err.encode(), *map(Path.read_bytes, filter(Path.is_file, paths))]
    assert len(texts) > 5
    assert not [text for text in texts for secret in hidden if secret.encode() in text]


def test_private_runs_need_a_signed_declaration(tmp_path: Path) -> None:
    """Otherwise sizes, classes or the shape of private images would become public."""
    folder = make_image_folder(tmp_path)
    with raises(DataError, "declaration.missing"):
        fs.simulate(on_folder(folder, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    with raises(DataError, "declaration.missing"):
        fs.simulate(on_folder(folder, privacy=BUDGET), data=fs.load_records(folder), quiet=True)
    write_declaration(folder, by="")
    with raises(DataError, "declaration.signature"):
        fs.simulate(on_folder(folder, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()
    write_declaration(folder, ledger="")
    with raises(PrivacySettingError, "privacy.ledger"):
        fs.simulate(on_folder(folder, privacy=BUDGET), quiet=True)


def test_private_runs_use_the_declaration(clinic: Path, tmp_path: Path) -> None:
    """Regression: a resumed run fills other settings from the declaration than config.toml has."""
    test = {"test_folder": str(make_image_folder(tmp_path / "test", sites=(), per_class=3))}
    settings = on_folder(clinic, run={"rounds": 2}, data=test, privacy=BUDGET)
    with interrupt_in_round(2), pytest.raises(KeyboardInterrupt):
        fs.simulate(settings, output=tmp_path / "runs", quiet=True)
    (unfinished,) = (tmp_path / "runs").iterdir()
    resumed_settings = fs.resolve(read_sections(unfinished / "config.toml"))
    result = fs.simulate(resumed_settings, resume=unfinished, quiet=True)
    assert (len(result.metrics), len(result.deviations)) == (2, 1)
    assert (result.summary["test_accuracy"], result.summary["test_data"]) == (None, "private")
    report: Any = result.privacy
    assert report["max_records"] == 100
    assert report["public_items"]["nominal records of a client"].startswith("25 ")  # 50 over 2
    assert set(report["guarantee"]["epsilon_by_client"]) == {"north", "south"}
    verified(result)
    assert (clinic / "fedsynth-ledger" / "north.jsonl").exists()
    # the ledger folder among the images is not read as a class
    same = {**BUDGET, "ledger": str(clinic / "fedsynth-ledger")}
    public = {**test, "test": "public"}
    second: Any = fs.simulate(on_folder(clinic, data=public, privacy=same), quiet=True)
    assert second.privacy["guarantee"]["epsilon"] > 1.2 * report["guarantee"]["epsilon"]
    assert second.summary["test_accuracy"] is not None
    # a new ledger would start at ε = 0 for images whose budget is spent
    elsewhere = {**BUDGET, "ledger": str(tmp_path / "elsewhere")}
    with raises(SettingError, "privacy.ledger"):
        fs.simulate(on_folder(clinic, privacy=elsewhere), quiet=True)


def test_reports_do_not_depend_on_image_counts(tmp_path: Path) -> None:
    reports = []
    for count in (5, 9):
        folder = make_image_folder(tmp_path / f"{count}" / "clinic", per_class=count)
        write_declaration(folder)
        report: Any = fs.simulate(on_folder(folder, privacy=BUDGET), output=folder.parent).privacy
        # the folder's name has the time; hashes are of files that hold released noise
        run_specific = ("ledger_heads", "run", "files")
        reports.append({k: v for k, v in report.items() if k not in run_specific})
    assert reports[0] == reports[1]


def test_plans_and_audits_read_the_declaration_and_no_image(clinic: Path) -> None:
    for image in clinic.rglob("*.png"):
        image.unlink()
    plan = plan_of(on_folder(clinic, privacy={"epsilon": 8.0}))
    assert (plan.run.partition.clients, plan.max_records, plan.nominal_size) == (2, 100, 25)
    assert [history.client for history in plan.histories] == ["north", "south"]
    settings = on_folder(clinic, privacy=BUDGET)
    audit = audit_run(settings, canaries=20, guesses=4, confidence=0.9)
    assert 0 < audit.epsilon < 20
    assert not (clinic / "fedsynth-ledger").exists()


def test_duplicate_images_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies are counted under any name; public data sets are not checked."""
    make_image_folder(tmp_path / "scans")
    test_folder = make_image_folder(tmp_path / "test", sites=(), per_class=2)  # from equal seeds
    Image.open(test_folder / "ill/00.png").save(test_folder / "ill/00.bmp")
    (test_folder / "ill/00.png").unlink()
    fs.simulate(on_folder(tmp_path / "scans", data={"test_folder": str(tmp_path / "test")}))
    assert "2 of 4 test images are identical to training images" in capsys.readouterr().err
    train, test = fs.load_dataset("digits")
    without = fs.simulate(LINEAR, data=(train, test.subset(np.arange(5))), test="none")
    assert without.accuracy is None
    fs.simulate(LINEAR, data=(train, test.subset(np.arange(5))))
    assert "are identical" not in capsys.readouterr().err


def test_incomplete_published_data_sets_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = fs.load_dataset("digits")
    few = (train.subset(np.arange(1000)), test)
    monkeypatch.setattr("fedsynth.federation.run_data.load_dataset", lambda *_, **__: few)
    fs.simulate(LINEAR)
    text = "has 1,000 training images, but the published version has 1,438"
    assert text in capsys.readouterr().err
    fs.simulate(fs.resolve({**LINEAR.to_mapping(), "privacy": {"noise_multiplier": 3.0}}))
    assert "missing" not in capsys.readouterr().err  # it depends on private data


def test_user_images_cannot_have_published_names(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path / "mnist")
    with raises(SettingError, "data.dataset"):
        on_folder(folder, data={"dataset": "mnist"})
    assert on_folder(folder).dataset == "own mnist"


def test_ledgers_recognise_files_of_other_clients_and_sizes(clinic: Path) -> None:
    """Regression: the same images get two budgets, pooled and by site, or at another size."""
    fs.simulate(on_folder(clinic, partition={"kind": "iid", "clients": 1}, privacy=BUDGET))
    with raises(LedgerError, "ledger.moved_records"):
        fs.simulate(on_folder(clinic, privacy=BUDGET), quiet=True)
    declaration = clinic / "fedsynth.toml"
    declaration.write_text(declaration.read_text().replace("height = 16", "height = 24"))
    with raises(LedgerError, "ledger.moved_records"):
        fs.simulate(on_folder(clinic, privacy=BUDGET), quiet=True)
