"""Tests of `fedsynth privacy verify` on runs over nodes: the server's folder and each owner's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.deployment.policy import Policy
from fedsynth.privacy import Ledger, Release
from fedsynth.privacy.report.figures import Event
from fedsynth.results.verification import verify_run
from tests.deployment.local_setup import CLIENTS, Setup, sections
from tests.deployment.test_secure_runs import sections as secure_sections
from tests.results.test_tampering import Tamper, changed, delete, edit, put, row

PRIVATE = {"noise_multiplier": 5.0}
CAPPED = {"noise_multiplier": 5.0, "epsilon": 1.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs two rounds; one client's policy declines the second."""
    torch.set_num_threads(1)
    setup = Setup(tmp_path_factory.mktemp("served"))
    policy = Policy(epsilon=1.5, delta=1e-5)
    nodes = [setup.node(0), setup.node(1), setup.node(2, policy)]
    setup.serve(sections("feddm", privacy=PRIVATE), setup.link(*nodes))
    return setup.folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def server_folder(folder: Path) -> Path:
    [run_folder] = (folder / "runs").iterdir()
    return run_folder


def owner_folder(folder: Path, number: int = 0) -> Path:
    [run_folder] = (folder / f"owner-{number}" / "runs").iterdir()
    return run_folder


def test_server_and_owner_folders_are_verified(folder: Path) -> None:
    verification = verify_run(server_folder(folder))
    assert verification.problems == []
    assert "no ledger was compared" in verification.notes[0]
    for number in range(CLIENTS):
        verification = verify_run(owner_folder(folder, number))
        assert verification.problems == []
        assert any("compared with the ledger files" in str(note) for note in verification.notes)
    result = CliRunner().invoke(app, ["privacy", "verify", str(owner_folder(folder))])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", ["fedstats", "fedsum", "absent", "ended"])
def test_special_runs_are_verified(tmp_path: Path, kind: str) -> None:
    """Secure sums, a client that declines, and a run that its cap ends."""
    torch.set_num_threads(1)
    setup = Setup(tmp_path)
    settings = sections("feddm", privacy=CAPPED if kind == "ended" else PRIVATE)
    if kind in ("fedstats", "fedsum"):
        settings = secure_sections(kind, privacy=PRIVATE)
    declines = Policy(methods=("fedavg",)) if kind == "absent" else None
    setup.serve(settings, setup.link(setup.node(0), setup.node(1), setup.node(2, declines)))
    assert verify_run(server_folder(tmp_path)).problems == []
    for number in range(CLIENTS - (kind == "absent")):
        assert verify_run(owner_folder(tmp_path, number)).problems == []


def fewer_rounds(report: Any) -> None:
    """Removes a round of each release."""
    for release in report["ledger"]:
        release["rounds"] = release["rounds"][:-1] or release["rounds"]
    for head in report["ledger_heads"].values():
        head["rows"] //= 2


BOTH_FOLDERS: dict[str, Tamper] = {
    "missing row": edit(fewer_rounds),
    "unknown event": put("events", [Event(kind="absent", client="1", why="ill").to_json()]),
    "missing page": delete("privacy_report.html"),
}
SERVER_FOLDER: dict[str, Tamper] = {
    "changed epsilon": row(2, "epsilon", 99.0),
    "removed loss": row(2, "lost", {}),
    "unknown client lost": row(2, "lost", {"7": "away"}),
    "repeated round": row(1, "round", 2),
    "marked as simulated": changed("privacy_start.json", "simulated", True),
}
OWNER_FOLDER: dict[str, Tamper] = {
    "another client's number": changed("owner.json", "client", 7),
    "more rounds": changed("owner.json", "rounds", 9),
    "fewer rounds": changed("owner.json", "rounds", 1),
    "more initial rows": changed("privacy_start.json", "ledgers/client-000/rows", 1),
}


@pytest.mark.parametrize("name", [*BOTH_FOLDERS, *SERVER_FOLDER])
def test_tampering_in_server_folders_is_detected(folder: Path, name: str) -> None:
    {**BOTH_FOLDERS, **SERVER_FOLDER}[name](server_folder(folder))
    assert verify_run(server_folder(folder)).problems


@pytest.mark.parametrize("name", ["missing row", "missing page", *OWNER_FOLDER])
def test_tampering_in_owner_folders_is_detected(folder: Path, name: str) -> None:
    {**BOTH_FOLDERS, **OWNER_FOLDER}[name](owner_folder(folder))
    assert verify_run(owner_folder(folder)).problems


def test_owner_reports_are_compared_with_the_ledger(folder: Path) -> None:
    """Rows of later runs are allowed; a lost or replaced row is detected."""
    file = folder / "owner-0" / "client-000.jsonl"
    text = file.read_text()
    row = Release(1, "sums", "residual", "each", 5.0, 1.0, 1.0, "full", 3, 10)
    Ledger("client-000", file, dataset=None).charge(row)
    assert verify_run(owner_folder(folder)).problems == []
    lines = text.splitlines(keepends=True)
    for fewer in (lines[:-1], [lines[0], *lines[2:]]):
        file.write_text("".join(fewer))
        assert verify_run(owner_folder(folder)).problems
