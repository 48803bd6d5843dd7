"""The run folder: finished runs and half-written ones can be told apart, bad input leaves neither,
and what is written is what the run had."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import from_arrays, load_dataset, load_model
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import ReportSettings
from fedsynth.data.images import normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError, SettingError
from fedsynth.privacy.errors import BudgetExceededError, PrivacyError
from fedsynth.privacy.files import file_hash
from fedsynth.results import run_folder
from fedsynth.results.disclosed import Disclosed
from fedsynth.results.run_folder import RunFolder, resumed_rounds
from fedsynth.results.run_record import RunResult
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate
from tests.special_files import make_special_file

SPEC = dataclasses.replace(
    dataset_spec("digits"), name="ours", classes=3, class_names=("cat", "dog", "owl")
)
TINY: dict[str, dict[str, Any]] = {
    "run": {"method": "feddm", "rounds": 1, "device": "cpu"},
    "partition": {"kind": "iid", "clients": 2},
    "model": {"width": 4, "depth": 1},
    "method": {"iterations": 1, "server_epochs": 1, "ipc": 1},
    "privacy": {"noise_multiplier": 3.0},
    "report": {"responsible": "Klinikum Mitte", "sites": "Mitte, Nord"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return simulate(resolve(TINY), output=tmp_path_factory.mktemp("runs"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_incomplete_until_it_is_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "feddm-digits")
    assert folder.path.name.endswith("-feddm-digits.incomplete")
    finished = folder.finish(Disclosed({"rounds": 1}))
    assert names(tmp_path) == {finished.name}
    assert f"{finished.name}.incomplete" not in names(tmp_path)
    summary = json.loads((finished / "summary.json").read_text())
    assert summary == {"rounds": 1, "folder": str(finished)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("resumed.json", "pipe"), ("metrics.jsonl", "link"), ("checkpoint/state-1", "device")],
)
def test_a_folder_with_special_files_is_not_resumed(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe was waited for; a link let a stranger's folder have another file written."""
    folder = RunFolder(tmp_path, "a")
    folder.write_config("")
    folder.release()
    file = folder.path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    else:
        make_special_file(file, kind)
    with pytest.raises(OutputError, match=f"{name} is neither a plain file nor a folder"):
        RunFolder.reopen(folder.path)
    if kind == "pipe":
        with pytest.raises(PrivacyError, match="regular file"):
            resumed_rounds(folder.path)


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path, "a") for _ in range(3)]
    first = folders[0].finish(Disclosed({}))
    folders += [RunFolder(tmp_path, "a") for _ in range(2)]
    assert len({folder.path for folder in folders}) == 5
    assert len({first, *(folder.finish(Disclosed({})) for folder in folders[1:])}) == 5


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("feddm-a/b", "feddm-a_b"),
        ("feddm-" + "é" * 190, "feddm-" + "é" * 54),
        ("feddm-x.incomplete", "feddm-x"),
        ("feddm-synthetic(1,0.5)", "feddm-synthetic(1,0.5)"),
    ],
)
def test_a_data_set_with_any_name_has_a_folder(tmp_path: Path, name: str, ending: str) -> None:
    """Catches: a slash that is taken for a folder, and a name that no file can have."""
    finished = RunFolder(tmp_path, name).finish(Disclosed({}))
    assert (finished.parent, finished.name[16:]) == (tmp_path, ending)
    assert names(tmp_path) == {finished.name}


def test_a_folder_that_vanishes_is_one_clear_error(tmp_path: Path) -> None:
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
        with pytest.raises(OutputError, match="cannot write into the run folder"):
            write()
    assert names(tmp_path) == set()


def test_a_cap_that_allows_no_round_leaves_nothing(tmp_path: Path) -> None:
    capped = {**TINY, "privacy": {"noise_multiplier": 1, "epsilon": 1e-3}}
    with pytest.raises(BudgetExceededError, match=r"above the cap 0\.001"):
        simulate(resolve(capped), output=tmp_path / "out")
    assert names(tmp_path) == set()


def test_the_report_names_the_run_and_its_files(run: RunResult) -> None:
    folder = run.folder
    assert folder is not None
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report == json.loads(json.dumps(run.privacy))
    about = report["run"]
    assert (about["id"], about["responsible"]) == (folder.name, "Klinikum Mitte")
    assert about["date"].replace("-", "") == folder.name[:8]
    assert about["sites"] == {"client-000": "Mitte", "client-001": "Nord"}
    files = ("model.safetensors", "synthetic.safetensors", "metrics.jsonl", "config.toml")
    assert report["files"] == {name: file_hash(folder / name) for name in files}
    found = verify_run(folder)
    assert found.problems == []
    assert "cannot be verified" in found.notes[-1]


def test_sites_are_as_many_as_clients_and_texts_are_lines() -> None:
    with pytest.raises(SettingError, match=r"report\.sites must .* 3 clients"):
        simulate(resolve({**TINY, "partition": {"kind": "iid", "clients": 3}}))
    for wrong in ({"sites": "a,,b"}, {"purpose": "x\ny"}, {"responsible": "x" * 301}):
        with pytest.raises(SettingError, match=f"report.{next(iter(wrong))} must"):
            ReportSettings(**wrong)


def test_a_finished_runs_model_is_loaded_from_its_folder(run: RunResult) -> None:
    assert run.folder is not None
    test = load_dataset("digits")[1]
    images = normalise(test.images[:20], test.spec)
    found = load_model(str(run.folder))
    assert not found.training
    with torch.no_grad():
        torch.testing.assert_close(found(images), run.model.eval()(images))


def test_a_model_of_own_images_needs_their_form(tmp_path: Path) -> None:
    """And a folder without a model, or with a damaged one, is refused."""
    with pytest.raises(OutputError, match="must be a model file"):
        load_model(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8)).astype(np.uint8)
    data = from_arrays(pixels, np.arange(60) % 3, SPEC)
    plain = {**TINY, "privacy": {}, "report": {}, "method": {**TINY["method"], "min_examples": 1}}
    run = simulate(resolve(plain), data=(data, None), output=tmp_path)
    assert run.folder is not None
    assert load_model(run.folder, spec=SPEC)(torch.zeros(1, 1, 8, 8)).shape == (1, 3)
    (run.folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(OutputError, match="cannot be used"):
        load_model(run.folder, spec=SPEC)


def test_the_report_is_there_when_the_model_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_place(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "save_tensors", no_place)
    with pytest.raises(OutputError, match="No space left on device"):
        simulate(resolve(TINY), output=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.suffix == ".incomplete"
    assert (folder / "privacy_report.json").exists()


def test_everything_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which files and folders were synced, by their number, when the folder is renamed."""
    synced: set[tuple[int, int]] = set()
    at_rename: list[set[tuple[int, int]]] = []
    real_sync = os.fsync
    real_rename = Path.rename

    def sync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_file = os.path.isfile(f"/proc/self/fd/{descriptor}")
        synced.add((found.st_ino, found.st_size if is_file else 0))
        real_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        if path.suffix == ".incomplete":
            at_rename.append(set(synced))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    result = simulate(resolve(TINY), output=tmp_path)
    assert result.folder is not None
    (before,) = at_rename
    for path in (result.folder, *result.folder.rglob("*")):
        found = path.stat()
        assert (found.st_ino, found.st_size if path.is_file() else 0) in before, path
    assert (tmp_path.stat().st_ino, 0) in synced - before
