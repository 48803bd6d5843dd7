"""Runs on folders of a user's own images: what they need, what they say, what they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsynth import RunSettings, load_dataset, load_folder, resolve, simulate
from fedsynth.errors import DataError, PartitionError, SettingError
from fedsynth.federation.context import plan_of
from fedsynth.privacy.errors import LedgerError, PrivacySettingError
from fedsynth.simulation.audit import audit_run
from fedsynth.validation import read_sections
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
    """A folder of two sites, with a signed declaration."""
    write_declaration(make_image_folder(tmp_path / "clinic"))
    return tmp_path / "clinic"


def test_each_site_is_a_client_and_classes_need_a_partition(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path / "sites", ("a", "b", "c"))
    result = simulate(tiny(folder), quiet=True)
    assert sorted(result.uploads) == [0, 1, 2]
    assert (result.settings.partition.kind, result.settings.partition.clients) == ("given", 3)
    linear = replace(LINEAR, partition=replace(LINEAR.partition, kind="iid", clients=5))
    found = load_folder(folder)
    assert len(simulate(linear, data=found, quiet=True).uploads) == 3
    assert len(simulate(linear, data=(found.train, None), quiet=True).uploads) == 5
    pooled = make_image_folder(tmp_path / "pooled", sites=())
    with pytest.raises(PartitionError, match=r"has no sites .*Set partition\.kind"):
        simulate(tiny(pooled), quiet=True)


def test_private_runs_need_a_signed_declaration(tmp_path: Path) -> None:
    """Catches: sizes, classes or shape of private images that become public unasked."""
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


def test_a_private_run_goes_by_the_declaration(clinic: Path, tmp_path: Path) -> None:
    result = simulate(tiny(clinic, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    report: Any = result.privacy
    assert report["max_records"] == 100
    assert report["public_items"]["nominal records of a client"].startswith("25 ")  # 50 over 2
    assert set(report["guarantee"]["epsilon_by_client"]) == {"north", "south"}
    verified(result)
    assert (clinic / "fedsynth-ledger" / "north.jsonl").exists()
    # the images stand where they stood: the ledgers among them are none
    again: Any = simulate(tiny(clinic, privacy=BUDGET), quiet=True).privacy
    assert again["guarantee"]["epsilon"] > 1.2 * report["guarantee"]["epsilon"]


def test_another_ledger_than_the_declared_one_is_refused(clinic: Path, tmp_path: Path) -> None:
    """Catches: images whose budget is spent, and a run that begins at nothing beside it."""
    elsewhere = {**BUDGET, "ledger": str(tmp_path / "elsewhere")}
    with pytest.raises(
        SettingError, match=r"ledger.* must be the ledger folder of the declaration"
    ):
        simulate(tiny(clinic, privacy=elsewhere), output=tmp_path / "runs", quiet=True)
    same = {**BUDGET, "ledger": str(clinic / "fedsynth-ledger")}
    assert simulate(tiny(clinic, privacy=same), quiet=True).privacy is not None


def test_a_report_does_not_depend_on_how_many_images_there_are(tmp_path: Path) -> None:
    """Catches: any true count in what a private run says."""
    said = []
    for each in (5, 9):
        folder = tmp_path / f"{each}" / "clinic"
        write_declaration(make_image_folder(folder, per_class=each))
        run = simulate(tiny(folder, privacy=BUDGET), output=tmp_path / f"{each}", quiet=True)
        report: Any = run.privacy
        # the folder's name has the time; hashes are of files that hold released noise
        own = ("ledger_heads", "run", "files")
        said.append({k: v for k, v in report.items() if k not in own})
    assert said[0] == said[1]


def test_plans_and_audits_go_by_the_declaration_and_read_no_image(clinic: Path) -> None:
    for image in clinic.rglob("*.png"):
        image.unlink()
    plan = plan_of(tiny(clinic, privacy={"epsilon": 8.0}))
    assert (plan.run.partition.clients, plan.max_records, plan.nominal_size) == (2, 100, 25)
    assert [history.client for history in plan.histories] == ["north", "south"]
    settings = tiny(clinic, privacy=BUDGET)
    found = audit_run(settings, canaries=20, guesses=4, confidence=0.9)
    assert 0 < found.epsilon < 20
    assert not (clinic / "fedsynth-ledger").exists()


# ------------------------------------------------------------------------------ the test images
@pytest.mark.parametrize(("kind", "given"), [("public", None), ("", "private")])
def test_test_images_are_what_they_are_declared_to_be(
    clinic: Path, tmp_path: Path, kind: str, given: str | None
) -> None:
    """test_own_data.py has where the accuracy then stands."""
    folder = make_image_folder(tmp_path / "test", sites=(), per_class=3)
    data = {"test_folder": str(folder), "test": kind}
    result = simulate(tiny(clinic, data=data, privacy=BUDGET), output=tmp_path / "runs", quiet=True)
    verified(result)
    assert (result.summary["test_accuracy"] is not None) == (kind == "public")
    assert result.summary.get("test_data") == given


def test_public_test_images_can_be_left_out() -> None:
    assert simulate(LINEAR, test="none", quiet=True).accuracy is None


def test_test_images_that_also_train_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: copies of training images under other names in the test folder; a public data set
    has such images as it came, and is not looked at."""
    make_image_folder(tmp_path / "scans")
    make_image_folder(tmp_path / "test", sites=(), per_class=2)  # drawn from the same seeds
    simulate(tiny(tmp_path / "scans", data={"test_folder": str(tmp_path / "test")}))
    assert "2 of 4 test images are identical to training images" in capsys.readouterr().err
    train, test = load_dataset("digits")
    simulate(LINEAR, data=(train, test.subset(np.arange(5))))
    assert "are identical" not in capsys.readouterr().err
    own = replace(train, spec=replace(train.spec, name="mine"))
    simulate(LINEAR, data=(own, own.subset(np.arange(5))))
    assert "5 of 5 test images are identical" in capsys.readouterr().err


def test_a_published_data_set_with_a_part_missing_is_said(
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
def test_own_images_have_no_published_name(tmp_path: Path) -> None:
    """Catches: a report that takes a user's own folder for MNIST."""
    folder = make_image_folder(tmp_path / "mnist")
    with pytest.raises(SettingError, match=r"data.dataset cannot be mnist, which is a published"):
        tiny(folder, data={"dataset": "mnist"})
    assert tiny(folder).dataset == "own mnist"


def test_one_owners_cost_is_counted_at_the_sites(clinic: Path) -> None:
    """Catches: a budget twice for the same images, once pooled and once by site."""
    simulate(tiny(clinic, partition={"kind": "iid", "clients": 1}, privacy=BUDGET), quiet=True)
    with pytest.raises(LedgerError, match=r"records of ledger .*client-000.jsonl"):
        simulate(tiny(clinic, privacy=BUDGET), quiet=True)


# ------------------------------------------------------------------------- users, and going on
def test_patients_are_protected_by_the_users_of_the_images(tmp_path: Path) -> None:
    """Catches: users.csv that nobody reads, and so a guarantee for images alone."""
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


def test_a_run_on_a_folder_resumes(
    clinic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a resumed run whose declaration has filled other settings than config.toml's."""
    settings = tiny(clinic, run={"rounds": 2}, privacy=BUDGET)
    with interrupt_in_round(2, monkeypatch), pytest.raises(KeyboardInterrupt):
        simulate(settings, output=tmp_path / "runs", quiet=True)
    (left,) = (tmp_path / "runs").iterdir()
    again = resolve(read_sections(left / "config.toml"))
    done = simulate(again, resume=left, quiet=True)
    assert len(done.metrics) == 2
    verified(done)
    assert len(done.deviations) == 1
