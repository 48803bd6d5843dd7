"""Without `fcntl`, as on Windows: the tests of ledgers, files and other locks, and a private run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedsynth import files

ROOT = Path(__file__).parents[1]
START = "import tests.windows; from fedsynth.cli.app import main; main()"
NO_PIPES = "not special and not mkfifo"  # Windows has no pipes among files


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("paths", "chosen", "minimum"),
    [
        (("privacy/test_ledger", "privacy/test_files"), NO_PIPES, 78),
        (("experiments/test_reproduction",), "cut_row or other_processes", 2),
        (("deployment/test_nodes",), "another_process or one_agreement", 2),
    ],
)
def test_tests_of_locks_pass_without_fcntl(
    paths: tuple[str, ...], chosen: str, minimum: int
) -> None:
    places = [f"tests/{path}.py" for path in paths]
    done = run("-m", "pytest", "-p", "tests.windows", "-n", "0", "-q", "-k", chosen, *places)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout
    assert passed
    assert int(passed[1]) >= minimum


def test_ledger_kept_without_fcntl_counts_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = "train --method fedavg --model linear --rounds 1 --dp-epsilon 8 --dp-ledger kept"
    train = ("-c", START, *options.split(), "--output", "runs")
    first = run(*train, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = run(*train, cwd=tmp_path)
    assert second.returncode == 2
    assert "leaves too little" in second.stderr
    (folder,) = (tmp_path / "runs").glob("*-fedavg-digits")
    assert run("-c", START, "privacy", "verify", str(folder), cwd=tmp_path).returncode == 0


def test_lock_is_exclusive_and_ends_with_file(tmp_path: Path) -> None:
    busy = RuntimeError("busy")
    first = files.claim(tmp_path / "lock", busy)
    with pytest.raises(RuntimeError, match="busy"):
        files.claim(tmp_path / "lock", busy)
    first.close()
    files.claim(tmp_path / "lock", busy).close()
