"""A data owner's records in several periods: one budget, new records only, killed periods."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsynth as fs
from fedsynth.data.declaration import FolderSettings, read_declaration
from fedsynth.data.describe import describe_folder
from fedsynth.data.images import normalise
from fedsynth.errors import DataError, FedsynthError, LedgerError, PrivacySettingError, SettingError
from fedsynth.methods.fedstats import FedStats
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.ledger.folder import LedgerFolder
from fedsynth.privacy.report.file import read_report
from fedsynth.results.run_record import RunRecord
from fedsynth.results.verification import verify_run
from tests.raising import raises

METHOD = {"periods": 3, "ipc": 4, "drawn_ipc": 0, "image_steps": 2}


class Owner:
    """A data owner with three files of digits and a ledger folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.ledger = root, root / "fedsynth-ledger" / "scans"  # as declared
        train, _ = fs.load_dataset("digits")
        images = train.images.numpy()[:, 0]
        for period in range(1, 5):
            rows = slice(period * 200, (period + 1) * 200)
            self.write(str(period), images[rows], train.labels.numpy()[rows])
        self.write("mixed", images[250:450], train.labels.numpy()[250:450])

    def write(self, name: str, x: Any, y: Any) -> None:
        np.savez(self.root / f"{name}.npz", x=x, y=y)
        settings = FolderSettings(str(self.root / f"{name}.npz"))
        description = describe_folder(settings, lambda text: None, "scans")
        toml = description.toml.replace('by = ""', 'by = "me"')
        description.path.write_text(toml.replace('date = ""', 'date = "2026-11-23"'))
        assert read_declaration(description.path).signed_by

    def run(self, data: str, out: str, share: str | None = None, **privacy: Any) -> fs.RunResult:
        private = dict(privacy)
        sections: dict[str, Any] = {
            "data": {"folder": str(self.root / f"{data}.npz")},
            "privacy": private,
        }
        if share is None:
            sections |= {"run": {"method": "fedstats"}, "method": METHOD}
            private.setdefault("epsilon", 8.0)
        before = None if share is None else self.root / share
        settings = fs.owner_settings(sections, before)
        runs = self.root / "runs"
        return fs.synthesize(settings, self.root / out, runs=runs, continued=before)

    @property
    def rows(self) -> tuple[Any, ...]:
        return read_ledger(self.ledger / "client-000.jsonl").releases


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_periods_continue_after_the_folder_has_moved(owner: Owner) -> None:
    """Regression: the first period's path of the ledger was kept."""
    owner.run("1", "s1")
    moved = owner.root.with_name(f"{owner.root.name}-moved")
    owner.root.rename(moved)
    owner.root = moved
    owner.run("2", "s2", "s1")


def test_periods_share_one_budget(owner: Owner) -> None:
    spent, shares = [], ["1"]
    owner.run("1", "1")
    for period in ("2", "3"):
        result = owner.run(period, period, shares[-1])
        shares.append(period)
        assert result.folder is not None
        assert not verify_run(result.folder).problems
    for share in shares:
        warnings = read_report(owner.root / share)["verdict"]["warnings"]
        assert not [text for text in warnings if "could not run" in text]
        report = read_report(owner.root / share)
        spent.append(report["guarantee"]["epsilon"])
        quantities = [entry["quantity"] for entry in report["ledger"]]
        assert f"products of features with labels, period {share} of 3" in quantities
        assert len(quantities) == 1 + 2 * int(share)  # the centre once
        assert report["noise_multiplier"] == read_report(owner.root / "1")["noise_multiplier"]
    assert spent == sorted(spent)
    assert spent[0] < 7.5
    assert 7.9 < spent[-1] <= 8
    assert "period 2 of 3" in (owner.root / "2" / "privacy_report.md").read_text()
    models = [fs.load_model(owner.root / share).state_dict() for share in shares]
    assert all(model["centre"].equal(models[0]["centre"]) for model in models)
    # the images are made anew
    sets = [fs.load_synthetic(owner.root / share).images for share in shares]
    assert not sets[0].equal(sets[1])
    for path in (owner.ledger / "private" / ".sequences").rglob("*.*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shared = {path.name for share in shares for path in (owner.root / share).rglob("*")}
    assert not [name for name in shared if name.startswith("00") and "safetensors" in name]

    # a fourth period is refused before the ledger or the data are read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerFolder, "ledgers", None)
        with raises(SettingError, "method.periods"):
            owner.run("missing", "4", "3")
    with raises(SettingError, "method.period"):
        FedStats(periods=3, period=4)


def test_running_sums_improve_the_classifier(owner: Owner) -> None:
    """The classifier of the last period knows all records, that of the first only its own."""
    _, test = fs.load_dataset("digits")
    correct = []
    share = None
    for period in ("1", "2", "3"):
        owner.run(period, period, share, **({} if share else {"epsilon": 1e6}))
        model, share = fs.load_model(owner.root / period), period
        with torch.no_grad():
            logits = model(normalise(test.images, fs.load_synthetic(owner.root / period).spec))
        correct.append(float((logits.argmax(1) == test.labels).float().mean()))
    assert correct[-1] > correct[0]


def test_records_and_shares_are_checked(owner: Owner, tmp_path: Path) -> None:
    owner.run("1", "1")
    charged = owner.rows
    for data in ("1", "mixed"):
        with raises(LedgerError, "sequence.repeated"):
            owner.run(data, "2", "1")
    with raises(SettingError, "privacy.epsilon"):
        owner.run("2", "2", "1", epsilon=20)
    with raises(LedgerError, "sequence.share"):
        owner.run("2", "2", "1", ledger=str(tmp_path / "other"))
    with raises(LedgerError, "sequence.finished"):
        owner.run("1", "again")
    assert owner.rows == charged
    owner.run("2", "2", "1")
    for data, share in (("2", "1"), ("3", "1")):
        with raises(LedgerError, "sequence.finished"):
            owner.run(data, "3", share)

    # without the noise of period 1, or with an old copy of the files, nothing goes on
    folder = owner.ledger / "private" / ".sequences" / "client-000"
    (folder / "002.json").rename(tmp_path / "002.json")
    for path in folder.glob("002-*"):
        path.rename(tmp_path / path.name)
    with raises(LedgerError, "sequence.missing"):
        owner.run("2", "again", "1")
    with raises(LedgerError, "sequence.share"):
        owner.run("3", "3", "2")


def test_a_period_with_other_settings_is_refused_before_a_charge(owner: Owner) -> None:
    """Rows of a smaller σ would state less than the new records' cost."""
    owner.run("1", "1")
    charged, before = owner.rows, owner.root / "1"
    data = {"folder": str(owner.root / "2.npz")}
    settings = fs.owner_settings({"data": data}, before)
    assert settings.privacy is not None
    less_noise = replace(settings.privacy, noise_multiplier=0.3, epsilon=None)
    fewer = replace(settings.method, periods=2)
    for changed in ({"privacy": less_noise}, {"method": fewer}):
        with raises(LedgerError, "sequence.changed"):
            fs.simulate(replace(settings, **changed), continued=before, quiet=True)
    assert owner.rows == charged
    owner.run("2", "2", "1")


@pytest.mark.parametrize("changed", ["size", "classes"])
def test_images_of_another_shape_are_refused_before_a_charge(owner: Owner, changed: str) -> None:
    owner.run("1", "1")
    charged = owner.rows
    with np.load(owner.root / "2.npz") as second:
        x, y = second["x"], second["y"]
    if changed == "size":
        owner.write("other", np.pad(x, ((0, 0), (2, 2), (2, 2))), y)
    else:
        owner.write("other", x[y < 8], y[y < 8])
    with raises(DataError, "sequence.images"):
        owner.run("other", "2", "1")
    assert owner.rows == charged


def test_all_periods_have_one_encoder(owner: Owner) -> None:
    def sections(period: str, **data: Any) -> dict[str, Any]:
        return {"data": {"folder": str(owner.root / f"{period}.npz"), **data}, "privacy": {}}

    first = {**sections("1", encoder="pixels"), "run": {"method": "fedstats"}, "method": METHOD}
    settings = fs.owner_settings({**first, "privacy": {"epsilon": 8.0}})
    before = owner.root / "1"
    fs.synthesize(settings, before, runs=owner.root / "runs")
    charged = owner.rows
    other = fs.owner_settings(sections("2", encoder="unit-norm"), before)
    with raises(LedgerError, "sequence.changed"):
        fs.simulate(other, continued=before, quiet=True)
    assert owner.rows == charged
    settings = fs.owner_settings(sections("2"), before)  # which need not name the encoder again
    assert settings.encoder is not None
    fs.synthesize(settings, owner.root / "2", runs=owner.root / "runs", continued=before)
    assert read_report(owner.root / "2")["guarantee"]["epsilon"] < 8


class KilledError(Exception):
    pass


def run_killed(owner: Owner, exchange: str, period: str, share: str | None) -> None:
    """Runs a period that is killed when the server has the exchange's sum."""
    original = FedStats.from_sum

    def kill(self: FedStats, name: str, *rest: Any) -> Any:
        if name == exchange:
            raise KilledError
        return original(self, name, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedStats, "from_sum", kill)
        with pytest.raises(KilledError):
            owner.run(period, "killed", share)


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("exchange", ["first", "main"])
def test_a_killed_period_is_charged_once(owner: Owner, period: int, exchange: str) -> None:
    if period == 2:
        owner.run("1", "1")
    share = "1" if period == 2 else None
    before = len(owner.rows) if period == 2 else 0
    run_killed(owner, exchange, str(period), share)
    folder = owner.ledger / "private" / ".sequences" / "client-000"
    stored = {path: path.read_bytes() for path in folder.glob(f"00{period}-*")}
    assert stored
    with raises(LedgerError, "sequence.records"):
        owner.run("3", "other", share)
    result = owner.run(str(period), str(period), share)
    assert result.folder is not None
    assert not verify_run(result.folder).problems
    assert len(owner.rows) - before == (3 if period == 1 else 2)
    assert {path: path.read_bytes() for path in stored} == stored


def test_a_period_killed_after_its_files_were_noted_can_be_repeated(owner: Owner) -> None:
    draw = RunRecord.draw
    with pytest.MonkeyPatch.context() as patch:

        def kill(self: RunRecord, sets: Any, spec: Any, name: str) -> None:
            if name == "synthetic.png":
                raise KilledError
            draw(self, sets, spec, name)

        patch.setattr(RunRecord, "draw", kill)
        with pytest.raises(KilledError):
            owner.run("1", "killed")
    charged = owner.rows
    result = owner.run("1", "1")
    assert owner.rows == charged
    assert result.folder is not None
    assert not verify_run(result.folder, ledger=owner.ledger).problems
    (result.folder / "summary.json").write_text("{}")
    assert verify_run(result.folder, ledger=owner.ledger).problems
    owner.run("2", "2", "1")


@pytest.mark.parametrize("exchange", ["first", "main"])
def test_another_run_between_a_kill_and_the_repetition(owner: Owner, exchange: str) -> None:
    owner.run("1", "1")
    run_killed(owner, exchange, "2", "1")
    sections = {
        "run": {"method": "fedstats", "rounds": 1},
        "data": {"folder": str(owner.root / "2.npz")},
        "partition": {"kind": "iid", "clients": 1},
        "privacy": {"noise_multiplier": 20.0},
    }
    between = fs.simulate(fs.resolve(sections), output=owner.root / "runs", quiet=True)
    repeated = owner.run("2", "2", "1")
    for result in (between, repeated):
        assert result.folder is not None
        assert not verify_run(result.folder, ledger=owner.ledger).problems
    report = read_report(owner.root / "2")
    assert len(report["ledger"]) == len(owner.rows) == 3 + 2 + 2


def test_a_missed_period_costs_nothing(owner: Owner) -> None:
    owner.run("1", "1")
    owner.run("3", "2", "1")  # the second month had no release
    assert read_report(owner.root / "2")["guarantee"]["epsilon"] < 7.9
    assert json.loads((owner.root / "2" / "privacy_report.json").read_text())


def test_periods_that_are_refused(owner: Owner) -> None:
    private = {"epsilon": 8.0}
    method = {"periods": 3, "ipc": 4}
    run = {"method": "fedstats"}
    settings = fs.owner_settings({"run": run, "method": method, "privacy": private})
    assert settings.rounds == 1
    cases: list[tuple[dict[str, Any], type[FedsynthError], str]] = [
        ({}, SettingError, "method.periods"),  # no ledger folder
        ({"privacy": {}}, SettingError, "method.periods"),
        ({"run": {**run, "rounds": 2}}, SettingError, "run.rounds"),
        ({"method": {**method, "period": 2}}, SettingError, "continued"),
        ({"method": {**method, "aggregation": "secure"}}, SettingError, "method.aggregation"),
        ({"privacy": {**private, "delta": 3e-4}}, PrivacySettingError, "privacy.delta"),
    ]
    for changed, kind, code in cases:
        sections = {"run": run, "method": method, "privacy": private, **changed}
        with raises(kind, code):
            fs.simulate(fs.owner_settings({k: v for k, v in sections.items() if v}), quiet=True)
    unit = {"privacy": {**private, "unit": "user", "nominal_size": 10}}
    settings = fs.owner_settings({"run": run, "method": method, **unit})
    train, _ = fs.load_dataset("digits")
    by_user = replace(train, groups=torch.arange(len(train)) // 8)
    with raises(SettingError, "privacy.unit"):
        fs.simulate(settings, data=(by_user, None), quiet=True)
