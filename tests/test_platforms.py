"""Without `fcntl`, as on Windows: the tests of ledgers, files and nodes, and a private run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedsynth import files

ROOT = Path(__file__).parents[1]
START = "import tests.windows; from fedsynth.cli.app import main; main()"


def run(*arguments: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_locks_without_fcntl_pass_tests_of_ledgers() -> None:
    paths = [f"tests/{name}.py" for name in ("privacy/test_ledger", "privacy/test_files")]
    chosen = "not special and not mkfifo"  # Windows has no pipes among files
    out = run("-m", "pytest", "-p", "tests.windows", "-n", "0", "-q", "-k", chosen, *paths)
    assert "78 passed" in out or int(out.rpartition(" passed")[0].split()[-1]) > 70


@pytest.mark.parametrize("places", [["experiments/test_reproduction", "deployment/test_nodes"]])
def test_other_locks_work_without_fcntl(places: list[str]) -> None:
    chosen = "another_process or locked or resume or concurrent or repeated"
    paths = [f"tests/{name}.py" for name in places]
    assert " passed" in run(
        "-m", "pytest", "-p", "tests.windows", "-n", "0", "-q", "-k", chosen, *paths
    )


def test_private_run_without_fcntl_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = "--method fedavg --model linear --rounds 1 --dp-epsilon 8 --dp-ledger kept"
    for _ in range(2):
        run("-c", START, "train", *options.split(), "--output", "runs", cwd=tmp_path)
    folders = sorted(map(str, (tmp_path / "runs").iterdir()))
    assert len(folders) == 2
    run("-c", START, "privacy", "verify", folders[1], cwd=tmp_path)


def test_lock_is_exclusive_and_ends_with_file(tmp_path: Path) -> None:
    busy = RuntimeError("busy")
    first = files.claim(tmp_path / "lock", busy)
    with pytest.raises(RuntimeError, match="busy"):
        files.claim(tmp_path / "lock", busy)
    first.close()
    files.claim(tmp_path / "lock", busy).close()
