"""Tests of run folders, of checkpoints of long loops, and of their use by other runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth import resolve, simulate
from fedsynth.config.settings import ReportSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError, PrivacyError, SettingError
from fedsynth.files import file_hash
from fedsynth.models.registry import own_model
from fedsynth.results import checkpoint, saved_model
from fedsynth.results.checkpoint import CheckpointFolder, LoopCheckpoints, read_loop_state
from fedsynth.results.disclosed import Disclosed
from fedsynth.results.run_folder import RunFolder, resumed_rounds
from fedsynth.results.verification import verify_run
from fedsynth.seeding import forked_rng
from fedsynth.training import digest
from fedsynth.training.loop import TRAINED
from fedsynth.training.many_clients import Learner
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings
from tests.quick_runs import folder_of, quick_sections
from tests.raising import raises
from tests.simulation.test_resume import assert_same, record_steps, run, sections
from tests.user_files import make_special_file

SPEC = replace(dataset_spec("digits"), name="ours", classes=3, class_names=("cat", "dog", "owl"))
REPORT = {"responsible": "Klinikum Mitte", "sites": "Mitte, Nord, Süd"}
TINY = quick_sections("feddm", run={"rounds": 1}, privacy={"noise_multiplier": 3.0}, report=REPORT)


def test_folders_with_special_files_are_not_resumed(tmp_path: Path) -> None:
    """Regression: a pipe blocked, and a link allowed writes to other files. A device is a link."""
    folder = RunFolder(tmp_path, "a")
    folder.write_config("")
    folder.release()
    (folder.path / "checkpoint").mkdir()
    for name, kind in (("checkpoint/state-1", "device"), ("resumed.json", "pipe")):
        file = make_special_file(folder.path / name, kind)
        with pytest.raises(OutputError, match=f"{name} is a link, pipe or device"):
            RunFolder.reopen(folder.path)
        if kind == "device":
            file.unlink()
    with raises(PrivacyError, "files.resumed.json"):
        resumed_rounds(folder.path)


def test_folders_are_separate_and_incomplete_until_finished(tmp_path: Path) -> None:
    """Runs may start in the same second."""
    folders = [RunFolder(tmp_path, "feddm-digits") for _ in range(3)]
    assert folders[0].path.name.endswith("-feddm-digits.incomplete")
    folders[0].write_summary(Disclosed({"rounds": 1}))
    finished = [folders[0].finish()]
    folders += [RunFolder(tmp_path, "feddm-digits") for _ in range(2)]
    finished += [folder.finish() for folder in folders[1:]]
    assert len({folder.path for folder in folders}) == 5
    assert {*os.listdir(tmp_path)} == {folder.name for folder in finished}
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
        path = RunFolder(tmp_path, name).finish()
        assert (path.parent, path.name[16:], path.is_dir()) == (tmp_path, ending, True)
    assert len(os.listdir(tmp_path)) == 9


def test_deleted_folder_raises_output_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    shutil.rmtree(folder.path)
    images = [(0, torch.zeros(1, 1, 8, 8), torch.zeros(1).long(), None)]
    for write, *values in (
        (folder.write_config, ""),
        (folder.append_metrics, Disclosed({"round": 1})),
        (folder.write_partition, np.ones((2, 3), dtype=np.int64)),
        (folder.write_synthetic, images, SPEC),
        (folder.write_summary, Disclosed({})),
        (folder.finish,),
    ):
        with raises(OutputError, "files.write"):
            write(*values)
    assert os.listdir(tmp_path) == []


def test_report_describes_run_and_files(tmp_path: Path) -> None:
    private_run = simulate(resolve(TINY), output=tmp_path)
    folder = folder_of(private_run)
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report == json.loads(json.dumps(private_run.privacy))
    description = report["run"]
    assert (description["id"], description["responsible"]) == (folder.name, "Klinikum Mitte")
    assert description["date"].replace("-", "") == folder.name[:8]
    assert list(description["sites"].items())[1:] == [("client-001", "Nord"), ("client-002", "Süd")]
    files = ("model.safetensors", "synthetic.safetensors", "metrics.jsonl", "config.toml")
    assert report["files"] == {name: file_hash(folder / name) for name in (*files, "summary.json")}
    verification = verify_run(folder)
    assert verification.problems == []
    assert "cannot be verified" in verification.notes[-1]


def test_invalid_report_settings_are_rejected() -> None:
    with pytest.raises(SettingError, match=r"report\.sites.* for 2 clients"):
        simulate(resolve({**TINY, "partition": {"clients": 2}}))
    for invalid in ({"sites": "a,,b"}, {"purpose": "x\ny"}, {"responsible": "x" * 301}):
        with raises(SettingError, f"report.{next(iter(invalid))}"):
            ReportSettings(**invalid)


def test_report_is_written_despite_failed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(saved_model, "save_tensors", full)
    with raises(OutputError, "files.write"):
        simulate(resolve(TINY), output=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.suffix == ".incomplete"
    assert (folder / "privacy_report.json").exists()


def test_files_are_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[tuple[int, int]] = set()
    at_rename: list[set[tuple[int, int]]] = []
    original_sync, original_rename = os.fsync, Path.rename

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


WEIGHTS = {"w": torch.ones(3)}


def checkpoints(
    folder: Path, seconds: float = 60.0, shared: Path | None = None, run: str = "this run"
) -> LoopCheckpoints:
    return LoopCheckpoints(CheckpointFolder(folder, run, shared), 1, seconds)


def test_finished_loops_are_written_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with half a minute each, every second client was trained again."""
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    writer = checkpoints(tmp_path)
    for client in range(4):
        assert writer.load(f"train-{client}") is None
        now += 19.0
        writer.offer(f"train-{client}", 1, lambda: WEIGHTS)
        writer.finish(f"train-{client}", 2, lambda: WEIGHTS)
    reader = checkpoints(tmp_path)
    loaded = [reader.load(f"train-{client}") for client in range(4)]
    assert [state and state[0] for state in loaded] == [2, 2, 2, 1]  # written at 76 seconds
    assert reader.resumed_seconds == 4 * 19.0


def test_loops_of_equal_name_are_separate(tmp_path: Path) -> None:
    """Regression: a client's second training in a round was skipped."""
    writer = checkpoints(tmp_path, 0.0)
    for weights in (1.0, 2.0):
        assert writer.load("train-0") is None
        writer.finish("train-0", 1, lambda weights=weights: {"w": torch.tensor([weights])})
    reader = checkpoints(tmp_path, 0.0)
    loaded: list[Any] = [reader.load("train-0") for _ in range(2)]
    assert [tensors["w"].item() for _, tensors in loaded] == [1.0, 2.0]


def test_damaged_or_foreign_checkpoints_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = checkpoints(tmp_path, 0.0)
    writer.load("train-0")
    writer.offer("train-0", 1, lambda: WEIGHTS)
    path = tmp_path / "steps-1-train-0"
    intact = path.read_bytes()
    assert checkpoints(tmp_path).load("train-0") is not None
    assert checkpoints(tmp_path, run="that run").load("train-0") is None
    for content in (intact[:-1] + bytes([intact[-1] ^ 1]), intact[:-5], b""):
        path.write_bytes(content)
        assert checkpoints(tmp_path).load("train-0") is None
    path.write_bytes(intact)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    assert checkpoints(tmp_path).load("train-0") is None


NAME = f"{TRAINED}x"


def test_damaged_shared_files_are_replaced_and_unwritable_folders_tolerated(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / NAME).write_bytes(b"damaged")
    (tmp_path / "file").write_text("not a folder")
    for folder in ("shared", "file"):
        writer = checkpoints(tmp_path / f"run-{folder}", 0.0, tmp_path / folder)
        assert writer.load(NAME) is None
        writer.finish(NAME, 3, lambda: WEIGHTS)
        assert checkpoints(tmp_path / f"run-{folder}").load(NAME) is not None
    state: Any = read_loop_state(tmp_path / "shared" / NAME, "")
    assert state.step == 3


def finish_many(folder: Path, shared: Path) -> None:
    writer = checkpoints(folder, 0.0, shared)
    for number in range(20):
        writer.load(f"{TRAINED}{number}")
        writer.finish(f"{TRAINED}{number}", 1, lambda: {"w": torch.ones(2000)})


def test_concurrent_processes_finish_same_training(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(finish_many, [(tmp_path / name, shared) for name in ("a", "b")])
    assert len(list(shared.iterdir())) == 20
    assert all(read_loop_state(path, "") is not None for path in shared.iterdir())


def batch_norm_sections(method: str) -> dict[str, dict[str, Any]]:
    run = {"rounds": 1, "participation": 1.0}
    training = {"local_epochs": 2, "batch": 16, "momentum": 0.5}
    return sections(method, run=run, method=training, model={"norm": "batch"})


def test_methods_with_equal_training_share_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results equal those without sharing; a round's seconds include shared training."""
    expected = run(batch_norm_sections("dense"), tmp_path / "alone")
    trained = record_steps(monkeypatch)
    shared = tmp_path / "shared"
    run(batch_norm_sections("fedavg"), tmp_path / "first", trained=shared)
    assert [name.split("-")[0] for name, _ in trained] == ["trained"] * (2 * 4)
    assert len(list(shared.iterdir())) == 4
    for path in shared.iterdir():
        state: Any = read_loop_state(path, "")
        path.write_bytes(checkpoint._with_hash(replace(state, seconds=1000.0), ""))
    trained.clear()
    actual = run(batch_norm_sections("dense"), tmp_path / "second", trained=shared)
    assert {name.split("-")[0] for name, _ in trained} == {"distillation"}
    assert {path.name.split("-")[0] for path in shared.iterdir()} == {"trained"}
    assert_same(expected, actual)
    assert 4000.0 < actual.metrics[0]["seconds"] < 4100.0


def test_custom_private_or_multi_round_training_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom network's dependencies are unknown; models of all rounds would fill a disk."""
    record_steps(monkeypatch)
    shared = tmp_path / "shared"
    run(sections("fedavg"), tmp_path / "rounds", trained=shared)
    monkeypatch.setattr(digest, "training_name", None)  # must not be called
    model = own_model(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)))
    settings = replace(resolve(batch_norm_sections("fedavg")), model=model)
    simulate(settings, output=tmp_path / "own", trained=shared, quiet=True)
    private = sections("fedavg", run={"rounds": 1}, privacy={"noise_multiplier": 1.0})
    run(private, tmp_path / "private", trained=shared)
    assert not shared.exists()


def data_of(x: Tensor, y: Tensor) -> Any:
    return SimpleNamespace(images=lambda indices: x[indices], labels=lambda indices: y[indices])


def small_network(changed: str = "", *extra: nn.Module) -> nn.Module:
    """Returns a network with fixed weights and buffers, except for the changed one."""
    with forked_rng(0, "a network"):
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10), *extra)
    if changed:
        network.state_dict()[changed].add_(1)
    return network


def test_digest_depends_on_all_training_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6)
    sgd = SgdSettings(2, 3, MomentumSgd(0.1, 0.9))
    pull = Pull(0.5, torch.zeros(20), torch.ones(20))
    base: dict[str, Any] = {
        "network": small_network(),
        "where": torch.arange(5),
        "settings": sgd,
        "seed": 0,
        "penalty": pull,
        "data": data_of(x, y),
        "precision": torch.float32,
    }

    def name_of(**changed: Any) -> str:
        *arguments, seed, penalty, data, precision = {**base, **changed}.values()
        learner = Learner(*arguments, torch.Generator().manual_seed(seed), penalty)
        device = torch.device("cpu")
        return digest.training_name(learner, data.images, data.labels, device, precision)

    base_digest = name_of()
    assert name_of() == base_digest
    pixel, label = x.clone(), y.clone()
    pixel[4, 0, 7, 7] += 1
    label[4] = 0
    networks = [small_network(name) for name in small_network().state_dict()]
    optimiser = MomentumSgd(0.1, 0.9, 0.1)
    sgd_changes = {"epochs": 3, "steps": 3, "batch": 2, "radius": 1.0, "optimiser": optimiser}
    pull_changes = {"weight": 0.6, "center": torch.ones(20), "linear": torch.zeros(20)}
    changes: dict[str, list[Any]] = {
        "network": [*networks, small_network("", nn.Identity())],
        "where": [torch.arange(4), torch.tensor([1, 0, 2, 3, 4])],
        "settings": [replace(sgd, **{key: sgd_changes[key]}) for key in sgd_changes],
        "seed": [1],
        "penalty": [None, *(replace(pull, **{key: pull_changes[key]}) for key in pull_changes)],
        "data": [data_of(pixel, y), data_of(x, label)],
        "precision": [torch.bfloat16],
    }
    digests = [name_of(**{name: value}) for name, values in changes.items() for value in values]
    monkeypatch.setattr(digest, "__version__", "another")
    digests.append(name_of())
    assert len({base_digest, *digests}) == 1 + len(digests)
