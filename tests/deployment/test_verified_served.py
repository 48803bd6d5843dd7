"""`fedsynth privacy verify` of runs over nodes: the server's folder, and each owner's own report;
what was tampered with is noticed."""

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
from tests.deployment.place import CLIENTS, Place, sections
from tests.deployment.test_secure_runs import sections as secure_sections
from tests.results.test_tampering import Tamper, changed, delete, edit, put, row

PRIVATE = {"noise_multiplier": 5.0}
CAPPED = {"noise_multiplier": 5.0, "epsilon": 1.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds, in which one client declines the second by its policy."""
    torch.set_num_threads(1)
    place = Place(tmp_path_factory.mktemp("served"))
    policy = Policy(epsilon=1.5, delta=1e-5)
    nodes = [place.node(0), place.node(1), place.node(2, policy)]
    place.serve(sections("feddm", privacy=PRIVATE), place.hand(*nodes))
    return place.folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def servers(folder: Path) -> Path:
    [found] = (folder / "runs").iterdir()
    return found


def owners(folder: Path, number: int = 0) -> Path:
    [found] = (folder / f"owner-{number}" / "runs").iterdir()
    return found


def test_a_servers_folder_and_each_owners_verify(folder: Path) -> None:
    found = verify_run(servers(folder))
    assert found.problems == []
    assert "no ledger was compared" in found.notes[0]
    for number in range(CLIENTS):
        found = verify_run(owners(folder, number))
        assert found.problems == []
        assert any("compared with the ledger files" in str(note) for note in found.notes)
    result = CliRunner().invoke(app, ["privacy", "verify", str(owners(folder))])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("kind", ["fedstats", "fedsum", "absent", "ended"])
def test_other_runs_verify(tmp_path: Path, kind: str) -> None:
    """Sums that the server saw alone; a client that took no part; and a cap that ended the run."""
    torch.set_num_threads(1)
    place = Place(tmp_path)
    given = sections("feddm", privacy=CAPPED if kind == "ended" else PRIVATE)
    if kind in ("fedstats", "fedsum"):
        given = secure_sections(kind, privacy=PRIVATE)
    declines = Policy(methods=("fedavg",)) if kind == "absent" else None
    place.serve(given, place.hand(place.node(0), place.node(1), place.node(2, declines)))
    assert verify_run(servers(tmp_path)).problems == []
    for number in range(CLIENTS - (kind == "absent")):
        assert verify_run(owners(tmp_path, number)).problems == []


def fewer_rounds(report: Any) -> None:
    """A round less of the first client."""
    for release in report["ledger"]:
        release["rounds"] = release["rounds"][:-1] or release["rounds"]
    for head in report["ledger_heads"].values():
        head["rows"] //= 2


OF_BOTH: dict[str, Tamper] = {
    "a row less": edit(fewer_rounds),
    "an event of nobody's": put("events", [Event(kind="absent", client="1", why="ill").to_json()]),
    "no page": delete("privacy_report.html"),
}
OF_SERVERS: dict[str, Tamper] = {
    "epsilon of a round": row(2, "epsilon", 99.0),
    "nobody lost": row(2, "lost", {}),
    "a stranger lost": row(2, "lost", {"7": "away"}),
    "a round less": row(1, "round", 2),
    "a simulation's": changed("privacy_start.json", "simulated", True),
}
OF_OWNERS: dict[str, Tamper] = {
    "another client's number": changed("owner.json", "client", 7),
    "more rounds": changed("owner.json", "rounds", 9),
    "fewer rounds": changed("owner.json", "rounds", 1),
    "rows that were there before": changed("privacy_start.json", "ledgers/client-000/rows", 1),
}


@pytest.mark.parametrize("name", [*OF_BOTH, *OF_SERVERS])
def test_what_was_tampered_with_in_a_servers_folder_is_noticed(folder: Path, name: str) -> None:
    {**OF_BOTH, **OF_SERVERS}[name](servers(folder))
    assert verify_run(servers(folder)).problems


@pytest.mark.parametrize("name", ["a row less", "no page", *OF_OWNERS])
def test_what_was_tampered_with_in_an_owners_folder_is_noticed(folder: Path, name: str) -> None:
    {**OF_BOTH, **OF_OWNERS}[name](owners(folder))
    assert verify_run(owners(folder)).problems


def test_an_owners_ledger_decides(folder: Path) -> None:
    """It may grow by other runs; a row that it has lost, or another in its place, is noticed."""
    file = folder / "owner-0" / "client-000.jsonl"
    whole = file.read_text()
    row = Release(1, "sums", "residual", "each", 5.0, 1.0, 1.0, "full", 3, 10)
    Ledger("client-000", file, dataset=None).charge(row)
    assert verify_run(owners(folder)).problems == []
    lines = whole.splitlines(keepends=True)
    for fewer in (lines[:-1], [lines[0], *lines[2:]]):
        file.write_text("".join(fewer))
        assert verify_run(owners(folder)).problems
