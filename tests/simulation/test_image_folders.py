"""Tests of runs on folders of a user's images: declarations, ledgers, reports and test images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsynth import RunSettings, load_dataset, load_folder, resolve, simulate
from fedsynth.data.medical_files import patient_of
from fedsynth.errors import DataError, PartitionError, SettingError
from fedsynth.federation.context import plan_of
from fedsynth.privacy.errors import LedgerError, PrivacySettingError
from fedsynth.simulation.audit import audit_run
from fedsynth.validation import read_sections
from tests.data.test_medical_files import NAME, write_ct
from tests.image_folders import make_image_folder, write_declaration
from tests.interruption import interrupt_in_round
from tests.quick_settings import verified

BUDGET = {"noise_multiplier": 3.0}


def tiny(folder: Path, **sections: Any) -> RunSettings:
    run = {"rounds": 1, "device": "cpu", **sections.pop("run", {})}
    data = {"folder": str(folder), **sections.pop("data", {})}
    method = {"ipc": 1, "iterations": 2, "server_epochs": 1, "min_examples": 1}
    model = {"width": 4, "depth": 2}
    return resolve({"run": run, "data": data, "method": method, "model": model, **sections})


LINEAR = resolve({"run": {"method": "fedavg", "rounds": 1}, "model": {"name": "linear"}})


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """Writes a folder of two sites with a signed declaration."""
    write_declaration(make_image_folder(tmp_path / "clinic"))
    return tmp_path / "clinic"


def test_sites_are_clients_and_pooled_folders_need_a_partition(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path / "sites", ("a", "b", "c"))
    result = simulate(tiny(folder), quiet=True)
    assert sorted(result.uploads) == [0, 1, 2]
    assert (result.settings.partition.kind, result.settings.partition.clients) == ("given", 3)
    linear = replace(LINEAR, partition=replace(LINEAR.partition, kind="iid", clients=5))
    folder_data = load_folder(folder)
    assert len(simulate(linear, data=folder_data, quiet=True).uploads) == 3
    assert len(simulate(linear, data=(folder_data.train, None), quiet=True).uploads) == 5
    pooled = make_image_folder(tmp_path / "pooled", sites=())
    with pytest.raises(PartitionError, match=r"has no sites .*Set partition\.kind"):
        simulate(tiny(pooled), quiet=True)


def test_no_file_of_a_run_has_dicom_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Patients are the privacy unit, but neither their IDs nor hashes of them leave the reader."""
    folder = tmp_path / "clinic"
    for site in ("north", "south"):
        for label in ("ill", "well"):
            for number in range(4):
                path = folder / site / label / f"{number}.dcm"
                write_ct(path, f"ID-{site}-{label}-{number // 2}")
    write_declaration(folder, users=16)
    private = tiny(folder, privacy={**BUDGET, "unit": "user"})
    assert private.privacy.nominal_size == 8  # 16 declared users at two sites
    result = simulate(private, output=tmp_path / "runs")
    hidden = [NAME, "ID-north", patient_of(folder / "north/ill/0.dcm")]
    texts = [capsys.readouterr().err.encode()]
    for path in (*result.folder.rglob("*"), *(folder / "fedsynth-ledger").rglob("*")):
        if path.is_file():
            texts.append(path.read_bytes())
    assert len(texts) > 5
    assert not [text for text in texts for secret in hidden if secret.encode() in text]


def test_private_runs_need_a_signed_declaration(tmp_path: Path) -> None:
    """Otherwise sizes, classes or the shape of private images would become public."""
    folder = make_image_folder(tmp_path)
    with pytest.raises(DataError, match=f"Run fedsynth data describe {folder}, then"):
        simulate(tiny(folder, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    with pytest.raises(DataError, match="needs a declaration"):
        simulate(tiny(folder, privacy=BUDGET), data=load_folder(folder), quiet=True)
    write_declaration(folder, by="")
    with pytest.raises(DataError, match=r"is not signed. "):
        simulate(tiny(folder, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()
    write_declaration(folder, ledger="")
    with pytest.raises(PrivacySettingError, match="ledger must be the folder"):
        simulate(tiny(folder, privacy=BUDGET), quiet=True)


def test_private_runs_use_the_declaration(clinic: Path, tmp_path: Path) -> None:
    result = simulate(tiny(clinic, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    report: Any = result.privacy
    assert report["max_records"] == 100
    assert report["public_items"]["nominal records of a client"].startswith("25 ")  # 50 over 2
    assert set(report["guarantee"]["epsilon_by_client"]) == {"north", "south"}
    verified(result)
    assert (clinic / "fedsynth-ledger" / "north.jsonl").exists()
    # the ledger folder among the images is not read as a class
    same = {**BUDGET, "ledger": str(clinic / "fedsynth-ledger")}
    second_report: Any = simulate(tiny(clinic, privacy=same), quiet=True).privacy
    assert second_report["guarantee"]["epsilon"] > 1.2 * report["guarantee"]["epsilon"]
    # a new ledger would start at ε = 0 for images whose budget is spent
    elsewhere = {**BUDGET, "ledger": str(tmp_path / "elsewhere")}
    with pytest.raises(
        SettingError, match=r"ledger.* must be the ledger folder of the declaration"
    ):
        simulate(tiny(clinic, privacy=elsewhere), quiet=True)


def test_reports_do_not_depend_on_image_counts(tmp_path: Path) -> None:
    """Regression: a private report contains a true count."""
    reports = []
    for count in (5, 9):
        folder = tmp_path / f"{count}" / "clinic"
        write_declaration(make_image_folder(folder, per_class=count))
        run = simulate(tiny(folder, privacy=BUDGET), output=tmp_path / f"{count}", quiet=True)
        report: Any = run.privacy
        # the folder's name has the time; hashes are of files that hold released noise
        run_specific = ("ledger_heads", "run", "files")
        reports.append({k: v for k, v in report.items() if k not in run_specific})
    assert reports[0] == reports[1]


def test_plans_and_audits_read_the_declaration_and_no_image(clinic: Path) -> None:
    for image in clinic.rglob("*.png"):
        image.unlink()
    plan = plan_of(tiny(clinic, privacy={"epsilon": 8.0}))
    assert (plan.run.partition.clients, plan.max_records, plan.nominal_size) == (2, 100, 25)
    assert [history.client for history in plan.histories] == ["north", "south"]
    settings = tiny(clinic, privacy=BUDGET)
    audit = audit_run(settings, canaries=20, guesses=4, confidence=0.9)
    assert 0 < audit.epsilon < 20
    assert not (clinic / "fedsynth-ledger").exists()


# ------------------------------------------------------------------------------ the test images
@pytest.mark.parametrize(("kind", "stated"), [("public", None), ("", "private")])
def test_accuracy_needs_test_images_declared_public(
    clinic: Path, tmp_path: Path, kind: str, stated: str | None
) -> None:
    """test_own_data.py tests the location of the accuracy."""
    folder = make_image_folder(tmp_path / "test", sites=(), per_class=3)
    data = {"test_folder": str(folder), "test": kind}
    result = simulate(tiny(clinic, data=data, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    verified(result)
    assert (result.summary["test_accuracy"] is not None) == (kind == "public")
    assert result.summary.get("test_data") == stated


def test_public_test_images_can_be_left_out() -> None:
    assert simulate(LINEAR, test="none", quiet=True).accuracy is None


def test_duplicate_test_images_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of training images in the test folder are counted under any name; public data sets are
    not checked."""
    make_image_folder(tmp_path / "scans")
    test_folder = make_image_folder(tmp_path / "test", sites=(), per_class=2)  # from equal seeds
    Image.open(test_folder / "ill/00.png").save(test_folder / "ill/00.bmp")
    (test_folder / "ill/00.png").unlink()
    simulate(tiny(tmp_path / "scans", data={"test_folder": str(tmp_path / "test")}))
    assert "2 of 4 test images are identical to training images" in capsys.readouterr().err
    train, test = load_dataset("digits")
    simulate(LINEAR, data=(train, test.subset(np.arange(5))))
    assert "are identical" not in capsys.readouterr().err
    user_data = replace(train, spec=replace(train.spec, name="mine"))
    simulate(LINEAR, data=(user_data, user_data.subset(np.arange(5))))
    assert "5 of 5 test images are identical" in capsys.readouterr().err


def test_incomplete_published_data_sets_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = load_dataset("digits")
    few = (train.subset(np.arange(1000)), test)
    monkeypatch.setattr("fedsynth.federation.run_data.load_dataset", lambda *_, **__: few)
    simulate(LINEAR)
    assert (
        "has 1,000 training images, but the published version has 1,438" in capsys.readouterr().err
    )
    simulate(resolve({**LINEAR.to_mapping(), "privacy": {"noise_multiplier": 3.0}}))
    assert "missing" not in capsys.readouterr().err  # it depends on private data


# ------------------------------------------------------------------------------------- settings
def test_user_images_cannot_have_published_names(tmp_path: Path) -> None:
    """Regression: a report treats a user's folder as MNIST."""
    folder = make_image_folder(tmp_path / "mnist")
    with pytest.raises(SettingError, match=r"data.dataset cannot be mnist, which is a published"):
        tiny(folder, data={"dataset": "mnist"})
    assert tiny(folder).dataset == "own mnist"


def test_ledgers_recognise_files_of_other_clients_and_sizes(clinic: Path) -> None:
    """Regression: the same images get two budgets, one pooled and one by site, or at another size."""
    simulate(tiny(clinic, partition={"kind": "iid", "clients": 1}, privacy=BUDGET), quiet=True)
    with pytest.raises(LedgerError, match=r"belong to ledger .*client-000.jsonl"):
        simulate(tiny(clinic, privacy=BUDGET), quiet=True)
    declaration = clinic / "fedsynth.toml"
    declaration.write_text(declaration.read_text().replace("height = 16", "height = 24"))
    with pytest.raises(LedgerError, match=r"belong to ledger .*client-000.jsonl"):
        simulate(tiny(clinic, privacy=BUDGET), quiet=True)


# ------------------------------------------------------------------------- users, and resuming
def test_user_privacy_reads_users_csv(tmp_path: Path) -> None:
    """Regression: users.csv is ignored, and the guarantee is only for images."""
    folder = make_image_folder(tmp_path / "clinic")
    write_declaration(folder, users=20)
    by_user = {**BUDGET, "unit": "user", "nominal_size": 10}
    with pytest.raises(DataError, match="must state the user of each record"):
        simulate(tiny(folder, privacy=by_user), quiet=True)
    images = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.png"))
    rows = [f"{name},patient {number // 3}" for number, name in enumerate(images)]
    (folder / "users.csv").write_text("path,user\n" + "\n".join(rows))
    report: Any = simulate(tiny(folder, privacy=by_user), quiet=True).privacy
    assert report["unit"]["kind"] == "user"


def test_runs_on_folders_resume(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a resumed run fills other settings from the declaration than config.toml has."""
    settings = tiny(clinic, run={"rounds": 2}, privacy=BUDGET)
    with interrupt_in_round(2, monkeypatch), pytest.raises(KeyboardInterrupt):
        simulate(settings, output=tmp_path / "runs", quiet=True)
    (unfinished,) = (tmp_path / "runs").iterdir()
    resumed_settings = resolve(read_sections(unfinished / "config.toml"))
    result = simulate(resumed_settings, resume=unfinished, quiet=True)
    assert len(result.metrics) == 2
    verified(result)
    assert len(result.deviations) == 1
