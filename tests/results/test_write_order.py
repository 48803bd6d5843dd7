"""What a run leaves first and last: its promise before its pictures, all of it on the disk before
the folder has its final name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.errors import OutputError
from fedsynth.results import run_folder
from fedsynth.simulation.simulate import simulate

TINY = {
    "run": {"method": "feddm", "rounds": 1, "device": "cpu"},
    "partition": {"kind": "iid", "clients": 2},
    "model": {"width": 4, "depth": 1},
    "method": {"iterations": 1, "server_epochs": 1, "ipc": 1},
    "privacy": {"noise_multiplier": 3.0},
}


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
        synced.add(
            (found.st_ino, found.st_size if os.path.isfile(f"/proc/self/fd/{descriptor}") else 0)
        )
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
