"""Thousands of damaged and hostile files for each reader, in a process of its own: no signal, no
hang, no odd error, little memory.

A few hundred of each kind run always, the rest with `-m slow`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_readers.py")
MEGABYTE = 2**20
CASES = {
    "pickle": 400,
    "image": 150,
    "leaf": 150,
    "users": 150,
    "idx": 150,
    "list": 150,
}


def fuzzed(kind: str, seed: int, cases: int, folder: Path, timeout: int) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, kind, str(seed), str(cases)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    case = (folder / "CASE").read_text() if (folder / "CASE").exists() else "none"
    assert done.returncode == 0, (
        f"ended with {done.returncode} at case {case}: {done.stderr[-500:]}"
    )
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert found["refused"] + found["accepted"] == cases
    assert found["refused"] > cases / 3
    assert found["accepted"] > 0  # some changes do no harm: the reader still reads
    # Beyond ten times the file's size: what a million instructions of one byte can make.
    assert found["beyond"] < 24 * MEGABYTE
    assert found["slowest"] < 20


@pytest.mark.parametrize(
    ("kind", "cases"),
    list(CASES.items()),
)
def test_some_files(kind: str, cases: int, tmp_path: Path) -> None:
    fuzzed(kind, 0, cases, tmp_path, 300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("pickle", 5000),
        ("image", 2000),
        ("leaf", 1000),
        ("users", 1000),
        ("idx", 2000),
        ("list", 1000),
    ],
)
def test_many_files(kind: str, cases: int, tmp_path: Path) -> None:
    fuzzed(kind, 1, cases, tmp_path, 1200)
