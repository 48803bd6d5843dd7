"""Measures the power of the tests: how many of a fixed list of small faults they find.

    python benchmarks/mutants.py run [COMMIT]

Each fault of mutants.csv changes a token or drops a statement in a function, and is recorded as its
line, so that it can be placed again where the code has moved. `draw` of `git show
8888f1fc:benchmarks/mutants.py` drew them at 43a92f19, with SEED = 43; of the first list, with SEED
= 42, the code of half the lines had been rewritten. `run` places each one in a clone of a commit,
runs the test files of its group and appends a row to results/mutants.jsonl: killed (by which test),
survived, or gone (the line no longer exists). A further call resumes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "benchmarks" / "mutants.csv"
ROWS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
CPU_SECONDS = 500  # for each call of pytest: a fault may be an endless loop
SECONDS = 7200  # the same by the clock: a fault may wait endlessly

TESTS = {  # below tests/; each group of files is run where those before find nothing
    "accounting": (
        "privacy/test_acc*",
        "privacy/test_rel* privacy/test_priv*",
        "privacy federation/test_priv*",
    ),
    "mechanisms": (
        "privacy/test_mech* privacy/test_dps* privacy/test_prod* privacy/test_gr*",
        "privacy/test_[a-z]*",
    ),
    "ledger": ("privacy/test_ledger*", "privacy simulation/test_own_data*"),
    "condensation": (
        "synthesizer/test_[acfp]* test_docstring_examples.py",
        "synthesizer/test_matchers*",
        "methods/test_fed*",
    ),
    "distillation": (
        "synthesizer/test_ens* synthesizer/test_dis*",
        "synthesizer/test_[ac]*",
        "methods/test_ens* methods/test_fedkf*",
    ),
    "engine": (
        "training federation/test_ser* config/test_set*",
        "simulation/test_sim* federation/test_cl* config/test_pa*",
        "simulation/test_rec*",
        "simulation/test_res* results/test_loop* deployment/test_re*",
    ),
    "methods": (
        "methods/test_[bclr]* methods/test_fe[ad]* models core methods",
        "simulation/test_rec*",
        "privacy/test_priv* federation/test_[lp]* simulation/test_s* deployment/test_s*",
    ),
}


class Mutant(NamedTuple):
    """One fault, as it is recorded."""

    number: int
    group: str
    kind: str
    file: str
    function: str
    line: str
    changed: str


def lines_with(text: str, line: str) -> int:
    """Returns how many lines of a text are this one."""
    return [text_line.strip() for text_line in text.split("\n")].count(line)


def place(mutant: Mutant, tree: Path) -> bool:
    """Writes a fault into a tree; False where its line is nowhere, or at more than one place."""
    files = [path for top in ("privacy", "fedsynth") for path in (tree / top).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    matches = [path for path in files if lines_with(texts[path], mutant.line) == 1]
    name = f"def {mutant.function.rpartition('.')[2]}("
    same_file = [path for path in matches if path == tree / mutant.file]
    same_function = [path for path in matches if name in texts[path]]
    for paths in (same_file, same_function, matches):
        if len(paths) == 1:
            text = texts[paths[0]].replace(mutant.line, mutant.changed)
            paths[0].write_text(text, encoding="utf-8")
            return True
    return False


def failing(files: list[str], tree: Path) -> str:
    """Returns the first test of these files (or ids) that fails in a tree; empty for none."""
    limit = CPU_SECONDS, CPU_SECONDS + 5
    options = ["-n", "0", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=tree,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit),
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    failure = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", ran.stdout, re.MULTILINE)
    if failure:
        return failure[1]
    return f"ends with {ran.returncode}" if ran.returncode else ""


def killing_test(mutant: Mutant, tree: Path, known_tests: list[str]) -> str:
    """Returns the test that finds a fault in a tree, empty for none.

    Args:
        known_tests: tests that found it in other commits, whose files are run first.
    """
    names = {Path(test.split("::")[0]).name for test in known_tests}  # files may have moved
    first = [str(path) for name in sorted(names) for path in tree.glob(f"tests/**/{name}")]
    steps = [first] if first else []
    for patterns in TESTS[mutant.group]:
        paths = [
            path for pattern in patterns.split() for path in sorted((tree / "tests").glob(pattern))
        ]
        steps.append([str(path.relative_to(tree)) for path in paths])
    return next((test for files in steps if (test := failing(files, tree))), "")


def run(commit: str) -> None:
    """Tests the mutants of the list in a clone of a commit, and each finding without the fault."""
    with LIST.open(encoding="utf-8", newline="") as file:
        mutants = [Mutant(int(row[0]), *row[1:]) for row in list(csv.reader(file))[1:]]
    text = ROWS.read_text(encoding="utf-8") if ROWS.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    finished = [row["mutant"] for row in rows if row["commit"] == commit]
    with tempfile.TemporaryDirectory() as folder, ROWS.open("a", encoding="utf-8") as results:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(tree)]
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
        subprocess.run([*git, "checkout", "-q", commit], check=True)
        for mutant in mutants:
            if mutant.number in finished:
                continue
            outcome, test = "gone", ""
            if place(mutant, tree):
                tests = [row["test"] for row in rows if row["mutant"] == mutant.number]
                test = killing_test(mutant, tree, [name for name in tests if "::" in name])
                outcome = "killed" if test else "survived"
            subprocess.run([*git, "checkout", "-q", "."], check=True)
            if "::" in test and failing([test], tree):
                outcome = "error"  # the test fails without the fault, too
            row = {"commit": commit, "mutant": mutant.number, "group": mutant.group}
            print(json.dumps({**row, "outcome": outcome, "test": test}), file=results, flush=True)


def main() -> None:
    if sys.argv[1:2] != ["run"] or len(sys.argv) > 3:
        sys.exit(__doc__)
    arguments = ["git", "-C", str(ROOT), "rev-parse", "--short", *(sys.argv[2:] or ["HEAD"])]
    run(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip())


if __name__ == "__main__":
    main()
