"""The attacker cuts a ledger to spend its budget again.

docs/threat-model.md states what only an earlier report reveals; tests/results/test_tampering.py has
the other edits of a run folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsynth import resolve, simulate
from fedsynth.privacy.ledger import read_ledger
from fedsynth.results.verification import verify_run
from tests.quick_runs import folder_of, quick_sections

pytestmark = pytest.mark.slow


def private_run(output: Path, seed: int, **privacy: object) -> Path:
    sections = quick_sections(
        "fedavg", run={"seed": seed}, privacy={"noise_multiplier": 3.0, **privacy}
    )
    sections["partition"]["seed"] = 0
    return folder_of(simulate(resolve(sections), output=output, quiet=True))


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 5, 6])
def test_spent_budget_of_cut_ledger_is_missing_from_earlier_reports(
    tmp_path: Path, lines: int
) -> None:
    """Two runs of two rounds charge four rows, and each notes its files. A cut ledger opens, and
    has less spent.
    """
    kept = tmp_path / "kept"
    first, second = (private_run(tmp_path, seed, ledger=str(kept)) for seed in (0, 1))
    assert verify_run(first).problems == verify_run(second).problems == []
    file = kept / "client-000.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    rows = len(read_ledger(file).releases)
    assert rows == 4
    file.write_text("".join(whole[:-lines]))
    assert len(read_ledger(file).releases) == [4, 3, 2, 2, 1, 0][lines - 1]  # not detected
    codes = [problem.code for problem in verify_run(second).problems]
    assert ("ledger.files" if lines == 1 else "ledger.rows") in codes
    assert bool(verify_run(first).problems) == (lines > 3)
    private_run(tmp_path, 2, ledger=str(kept))  # nor here: the same rows are charged again
    assert any("client-000" in problem.text for problem in verify_run(second).problems)
