"""Tests of `fedsynth privacy verify` on runs over nodes: the server's folder and each owner's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.deployment.policy import Policy
from fedsynth.privacy import Ledger, Release
from fedsynth.privacy.report.figures import Event
from fedsynth.results.verification import verify_run
from tests.deployment.local_setup import CLIENTS, PRIVATE, Setup, sections
from tests.results.test_tampering import Tamper, changed, delete, edit, put, row


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs two rounds; one client's policy declines the second."""
    setup = Setup(tmp_path_factory.mktemp("served"))
    nodes = [setup.node(0), setup.node(1), setup.node(2, Policy(epsilon=1.5, delta=1e-5))]
    setup.serve(sections("feddm", privacy=PRIVATE), setup.link(*nodes))
    return setup.folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def run_folder(folder: Path, home: str = "") -> Path:
    """Returns the run folder of an owner or of the server."""
    [found] = (folder / home / "runs").iterdir()
    return found


def test_server_and_owner_folders_are_verified(finished: Path) -> None:
    verification = verify_run(run_folder(finished))
    assert verification.problems == []
    assert "no ledger was compared" in verification.notes[0]
    for number in range(CLIENTS):
        verification = verify_run(run_folder(finished, f"owner-{number}"))
        assert verification.problems == []
        assert any("compared with the ledger files" in str(note) for note in verification.notes)
    result = CliRunner().invoke(app, ["privacy", "verify", str(run_folder(finished, "owner-0"))])
    assert result.exit_code == 0, result.output


def fewer_rounds(report: Any) -> None:
    """Removes a round of each release."""
    for release in report["ledger"]:
        release["rounds"] = release["rounds"][:-1] or release["rounds"]
    for head in report["ledger_heads"].values():
        head["rows"] //= 2


ROW, PAGE = edit(fewer_rounds), delete("privacy_report.html")
ABSENT = Event(kind="absent", client="1", why="ill").to_json()
TAMPERS: list[tuple[str, str, Tamper]] = [
    ("", "missing row", ROW),
    ("", "missing page", PAGE),
    ("", "unknown event", put("events", [ABSENT])),
    ("", "changed epsilon", row(2, "epsilon", 99.0)),
    ("", "removed loss", row(2, "lost", {})),
    ("", "unknown client lost", row(2, "lost", {"7": "away"})),
    ("", "repeated round", row(1, "round", 2)),
    ("", "marked as simulated", changed("privacy_start.json", "simulated", True)),
    ("owner-0", "missing row", ROW),
    ("owner-0", "missing page", PAGE),
    ("owner-0", "another client's number", changed("owner.json", "client", 7)),
    ("owner-0", "more rounds", changed("owner.json", "rounds", 9)),
    ("owner-0", "fewer rounds", changed("owner.json", "rounds", 1)),
    ("owner-0", "initial rows", changed("privacy_start.json", "ledgers/client-000/rows", 1)),
]


@pytest.mark.parametrize(("home", "name", "tamper"), TAMPERS)
def test_tampering_is_detected(folder: Path, home: str, name: str, tamper: Tamper) -> None:
    tamper(run_folder(folder, home))
    assert verify_run(run_folder(folder, home)).problems


def test_owner_reports_are_compared_with_the_ledger(folder: Path) -> None:
    """Rows of later runs are allowed; a lost or replaced row is detected."""
    file = folder / "owner-0" / "client-000.jsonl"
    text = file.read_text()
    row = Release(1, "sums", "residual", "each", 5.0, 1.0, 1.0, "full", 3, 10)
    Ledger("client-000", file, dataset=None).charge(row)
    assert verify_run(run_folder(folder, "owner-0")).problems == []
    lines = text.splitlines(keepends=True)
    for fewer in (lines[:-1], [lines[0], *lines[2:]]):
        file.write_text("".join(fewer))
        assert verify_run(run_folder(folder, "owner-0")).problems
