"""Damaged and hostile files for each reader, in a process of its own: no signal, no hang, no odd
error, little memory. A sample in the suite, the rest with `-m slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_readers.py")
MEGABYTE = 2**20
SAMPLE = {"pickle": 160, "image": 30, "leaf": 30, "users": 30, "idx": 30, "list": 30}
ALL = {"pickle": 5000, "image": 2000, "leaf": 1000, "users": 1000, "idx": 2000, "list": 1000}


@pytest.mark.parametrize(
    ("seed", "counts"),
    [(2, SAMPLE), pytest.param(1, ALL, marks=pytest.mark.slow)],
    ids=["sample", "all"],
)
def test_files_of_anybody(seed: int, counts: dict[str, int], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, str(seed), json.dumps(counts)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    case = (tmp_path / "CASE").read_text() if (tmp_path / "CASE").exists() else "none"
    assert done.returncode == 0, (
        f"ended with {done.returncode} at case {case}: {done.stderr[-500:]}"
    )
    for kind, found in json.loads(done.stdout).items():
        assert found["faults"] == [], kind
        assert found["refused"] + found["accepted"] == counts[kind]
        assert found["refused"] > counts[kind] / 3, kind
        assert found["accepted"] > 0, kind  # some changes do no harm: the reader still reads
        # Beyond ten times the file's size: what a million instructions of one byte can make.
        assert found["beyond"] < 24 * MEGABYTE, kind
        assert found["slowest"] < 20, kind
