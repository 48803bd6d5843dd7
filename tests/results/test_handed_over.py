"""What a run's report says of who ran it and of the files that it hands over, and that it is
verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsynth import from_arrays, load_dataset
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import ReportSettings
from fedsynth.errors import SettingError
from fedsynth.privacy.files import file_hash
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate

TINY = {
    "run": {"method": "feddm", "rounds": 2, "device": "cpu"},
    "partition": {"kind": "iid", "clients": 2},
    "model": {"width": 4, "depth": 1},
    "method": {"iterations": 1, "server_epochs": 1, "ipc": 1},
    "privacy": {"noise_multiplier": 3.0},
    "report": {"responsible": "Klinikum Mitte", "sites": "Mitte, Nord"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = simulate(resolve(TINY), output=tmp_path_factory.mktemp("runs"))
    assert result.folder is not None
    report = json.loads((result.folder / "privacy_report.json").read_text())
    assert report == json.loads(json.dumps(result.privacy))
    return result.folder


def test_the_report_names_the_run_and_its_files(folder: Path) -> None:
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["run"]["id"] == folder.name
    assert report["run"]["date"].replace("-", "") == folder.name[:8]
    assert report["run"]["responsible"] == "Klinikum Mitte"
    assert report["run"]["sites"] == {"client-000": "Mitte", "client-001": "Nord"}
    assert set(report["files"]) == {
        "model.safetensors",
        "synthetic.safetensors",
        "metrics.jsonl",
        "config.toml",
    }
    for name, digest in report["files"].items():
        assert file_hash(folder / name) == digest
    found = verify_run(folder)
    assert found.problems == []
    assert "cannot be verified" in found.notes[-1]


def test_sites_are_as_many_as_clients_and_texts_are_lines() -> None:
    with pytest.raises(SettingError, match=r"report\.sites must name the sites of all 3 clients"):
        simulate(resolve({**TINY, "partition": {"kind": "iid", "clients": 3}}))
    for wrong in ({"sites": "a,,b"}, {"purpose": "x\ny"}, {"responsible": "x" * 301}):
        with pytest.raises(SettingError, match=f"report.{next(iter(wrong))} must"):
            ReportSettings(**wrong)


def test_the_report_repeats_exactly_the_stated_facts() -> None:
    assert "report" not in resolve({**TINY, "report": {}}).to_mapping()
    settings = resolve(TINY)
    assert resolve(settings.to_mapping()) == settings


def test_user_data_are_called_public_only_if_their_owner_declares_it(tmp_path: Path) -> None:
    train, _ = load_dataset("digits")
    spec = replace(train.spec, name="scans", train_size=600, source="a hospital")
    data = from_arrays(train.images.numpy(), train.labels.numpy(), spec)
    parts = np.split(np.arange(600), [300])
    pages = []
    for ledger in (str(tmp_path / "ledgers"), NO_LEDGER):
        privacy = {"noise_multiplier": 3.0, "ledger": ledger, "max_records": 1000}
        result = simulate(
            resolve({**TINY, "privacy": privacy}, own_data="scans"),
            data=(data, None),
            parts=parts,
            output=tmp_path / "runs",
        )
        assert result.folder is not None
        pages.append((result.folder / "privacy_report.md").read_text().split("# Datasheet")[0])
    assert "scans of the operator. Its specification is public, its records are not" in pages[0]
    assert "declared public by the operator" not in pages[0]
    assert "declared public by the operator" in pages[1]
