"""Tests of run folders: incomplete runs are recognised, invalid input leaves no folder, and the
files match the run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fedsynth import from_arrays, load_model
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import ReportSettings
from fedsynth.data.images import normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError, SettingError
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import file_hash
from fedsynth.results import run_folder
from fedsynth.results.disclosed import Disclosed
from fedsynth.results.run_folder import RunFolder, resumed_rounds
from fedsynth.results.run_record import RunResult
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate
from tests.quick_runs import folder_of, quick_sections
from tests.special_files import make_special_file

SPEC = dataclasses.replace(
    dataset_spec("digits"), name="ours", classes=3, class_names=("cat", "dog", "owl")
)
REPORT = {"responsible": "Klinikum Mitte", "sites": "Mitte, Nord, Süd"}
TINY = quick_sections("feddm", run={"rounds": 1}, privacy={"noise_multiplier": 3.0}, report=REPORT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return simulate(resolve(TINY), output=tmp_path_factory.mktemp("runs"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folders_with_special_files_are_not_resumed(tmp_path: Path) -> None:
    """Regression: a pipe blocked, and a link allowed writes to other files. A device is a link."""
    folder = RunFolder(tmp_path, "a")
    folder.write_config("")
    folder.release()
    (folder.path / "checkpoint").mkdir()
    for name, kind in (("checkpoint/state-1", "device"), ("resumed.json", "pipe")):
        file = make_special_file(folder.path / name, kind)
        with pytest.raises(OutputError, match=f"{name} is neither a plain file nor a folder"):
            RunFolder.reopen(folder.path)
        if kind == "device":
            file.unlink()
    with pytest.raises(PrivacyError, match="regular file"):
        resumed_rounds(folder.path)


def test_folders_are_separate_and_incomplete_until_finished(tmp_path: Path) -> None:
    """Runs may start in the same second."""
    folders = [RunFolder(tmp_path, "feddm-digits") for _ in range(3)]
    assert folders[0].path.name.endswith("-feddm-digits.incomplete")
    finished = [folders[0].finish(Disclosed({"rounds": 1}))]
    folders += [RunFolder(tmp_path, "feddm-digits") for _ in range(2)]
    finished += [folder.finish(Disclosed({})) for folder in folders[1:]]
    assert len({folder.path for folder in folders}) == 5
    assert names(tmp_path) == {folder.name for folder in finished}
    assert len(set(finished)) == 5
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary == {"rounds": 1, "folder": str(finished[0])}
    # slashes created folders, and some names of data sets were invalid for files
    for name, ending in (
        ("feddm-a/b", "feddm-a_b"),
        ("feddm-" + "é" * 190, "feddm-" + "é" * 54),
        ("feddm-x.incomplete", "feddm-x"),
        ("feddm-synthetic(1,0.5)", "feddm-synthetic(1,0.5)"),
    ):
        path = RunFolder(tmp_path, name).finish(Disclosed({}))
        assert (path.parent, path.name[16:], path.is_dir()) == (tmp_path, ending, True)
    assert len(names(tmp_path)) == 9


def test_deleted_folder_raises_output_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    shutil.rmtree(folder.path)
    writes = (
        lambda: folder.write_config(""),
        lambda: folder.append_metrics(Disclosed({"round": 1})),
        lambda: folder.write_partition(np.ones((2, 3), dtype=np.int64)),
        lambda: folder.write_model({"w": torch.zeros(2)}),
        lambda: folder.write_synthetic([(0, torch.zeros(1, 1, 8, 8), torch.zeros(1).long())], SPEC),
        lambda: folder.finish(Disclosed({})),
    )
    for write in writes:
        with pytest.raises(OutputError, match="cannot write"):
            write()
    assert names(tmp_path) == set()


def test_report_describes_run_and_files(run: RunResult) -> None:
    folder = folder_of(run)
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report == json.loads(json.dumps(run.privacy))
    description = report["run"]
    assert (description["id"], description["responsible"]) == (folder.name, "Klinikum Mitte")
    assert description["date"].replace("-", "") == folder.name[:8]
    assert list(description["sites"].items())[1:] == [("client-001", "Nord"), ("client-002", "Süd")]
    files = ("model.safetensors", "synthetic.safetensors", "metrics.jsonl", "config.toml")
    assert report["files"] == {name: file_hash(folder / name) for name in files}
    verification = verify_run(folder)
    assert verification.problems == []
    assert "cannot be verified" in verification.notes[-1]


def test_invalid_report_settings_are_rejected() -> None:
    with pytest.raises(SettingError, match=r"report\.sites must name 2 sites"):
        simulate(resolve({**TINY, "partition": {"clients": 2}}))
    for invalid in ({"sites": "a,,b"}, {"purpose": "x\ny"}, {"responsible": "x" * 301}):
        with pytest.raises(SettingError, match=f"report.{next(iter(invalid))} must"):
            ReportSettings(**invalid)


def test_model_of_custom_data_requires_spec(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="must be a model file"):
        load_model(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8)).astype(np.uint8)
    data = from_arrays(pixels, np.arange(60) % 3, SPEC)
    plain = quick_sections("feddm", partition={"subset": 1.0}, method={"min_examples": 1})
    run = simulate(resolve(plain), data=(data, None), output=tmp_path)
    loaded, images = load_model(folder_of(run), spec=SPEC), normalise(data.images, SPEC)
    assert not loaded.training
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), run.model.eval()(images))
    (folder_of(run) / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(OutputError, match="cannot be used"):
        load_model(folder_of(run), spec=SPEC)


def test_report_is_written_despite_failed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(run_folder, "save_tensors", full)
    with pytest.raises(OutputError, match="No space left on device"):
        simulate(resolve(TINY), output=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.suffix == ".incomplete"
    assert (folder / "privacy_report.json").exists()


def test_files_are_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[tuple[int, int]] = set()
    at_rename: list[set[tuple[int, int]]] = []
    original_sync = os.fsync
    original_rename = Path.rename

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        is_file = os.path.isfile(f"/proc/self/fd/{descriptor}")
        synced.add((status.st_ino, status.st_size if is_file else 0))
        original_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        if path.suffix == ".incomplete":
            at_rename.append(set(synced))
        return original_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    result = simulate(resolve(TINY), output=tmp_path)
    (synced_before,) = at_rename
    for path in (folder_of(result), *folder_of(result).rglob("*")):
        status = path.stat()
        assert (status.st_ino, status.st_size if path.is_file() else 0) in synced_before, path
    assert (tmp_path.stat().st_ino, 0) in synced - synced_before
