"""Measures the power of the tests: how many of a fixed list of small faults they find.

    python benchmarks/mutants.py draw
    python benchmarks/mutants.py run [COMMIT]

`draw` writes mutants.csv from the working tree by the seed below: each fault changes a token or
drops a statement in a function, and is recorded as its line, so that it can be placed again where
the code has moved. `run` places each one in a clone of a commit, runs the test files of its group
and appends a row to results/mutants.jsonl: killed (by which test), survived, or gone (the line is
no longer there). A further call resumes.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "benchmarks" / "mutants.csv"
ROWS = ROOT / "benchmarks" / "results" / "mutants.jsonl"
SEED = 42
CPU_SECONDS = 500  # for each call of pytest: a fault may be an endless loop
SECONDS = 7200  # the same by the clock: a fault may wait endlessly

SOURCES = {  # how many faults, the folder, and the files that they are drawn from
    "accounting": (10, "privacy", "accounting plans releases units"),
    "mechanisms": (
        10,
        "privacy",
        "mechanisms dpsgd grid guard passes products randomness",
    ),
    "ledger": (10, "privacy", "ledger/* report/file"),
    "condensation": (10, "fedsynth/synthesizer/condensation", "*"),
    "distillation": (10, "fedsynth/synthesizer/distillation", "*"),
    "engine": (10, "fedsynth", "federation/* simulation/run training/*"),
    "methods": (20, "fedsynth", "methods/* methods/shared/* methods/statistics/* models/* core/*"),
}
TESTS = {  # below tests/; each group of files is run where those before find nothing
    "accounting": (
        "privacy/test_all* privacy/test_pl* privacy/test_req* privacy/test_set*",
        "privacy/test_acc*",
        "privacy federation/test_priv*",
    ),
    "mechanisms": (
        "privacy/test_mech* privacy/test_dps* privacy/test_prod* privacy/test_gr* privacy/test_for*",
        "privacy/test_[c-z]*",
        "privacy",
    ),
    "ledger": ("privacy/test_ledger*", "privacy simulation/test_own_data*"),
    "condensation": (
        "synthesizer/test_[adfkps]* test_docstring_examples.py",
        "synthesizer/test_matchers*",
        "methods/test_cond* methods/test_fed*",
    ),
    "distillation": (
        "synthesizer/test_ens* synthesizer/test_str*",
        "synthesizer/test_[agl]*",
        "methods/test_ens* methods/test_fedkf*",
    ),
    "engine": (
        "training federation/test_ser* config/test_set*",
        "simulation/test_sim* federation/test_cl* config/test_pa*",
        "simulation/test_unch*",
        "simulation/test_re* results/test_loop* deployment/test_re*",
    ),
    "methods": (
        "methods/test_[bclr]* methods/test_fe[ad]* models core methods",
        "simulation/test_unch*",
        "privacy/test_thr* federation/test_[lp]* simulation/test_s* deployment/test_s*",
    ),
}
SWAPS = {
    "operator": [("+", "-"), ("-", "+"), ("*", "/"), ("/", "*"), ("//", "*"), ("**", "*")],
    "comparison": [("==", "!="), ("!=", "=="), ("and", "or"), ("or", "and"), ("in", "not in")],
    "boundary": [("<", "<="), ("<=", "<"), (">", ">="), (">=", ">"), ("min", "max")],
    "sign": [("-", ""), ("not", ""), ("+=", "-="), ("is", "is not")],
    "constant": [("True", "False"), ("False", "True"), ("max", "min")],
}
NO_FAULT = re.compile(r"strict=|exist_ok|mode=|(path|folder)\w* / ")


class Mutant(NamedTuple):
    """One fault, as it is recorded."""

    number: int
    group: str
    kind: str
    file: str
    function: str
    line: str
    changed: str


def lines_of(node: ast.AST, name: str = "") -> dict[int, str]:
    """Returns the function of each line of code, without signatures, docstrings and errors."""
    found: dict[int, str] = {}
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        name = f"{name}.{node.name}".strip(".")
    if isinstance(node, ast.FunctionDef):
        code = node.body[1:] if ast.get_docstring(node) else node.body
        for number in range(node.lineno, (node.end_lineno or 0) + 1):
            found[number] = name if code and number >= code[0].lineno else ""
    elif isinstance(node, ast.Raise):
        found = dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "")
    for child in ast.iter_child_nodes(node):
        found.update(lines_of(child, name))
    return found


def changes(text: str) -> Iterator[tuple[str, int, str]]:
    """Yields all changes of a file: kind, line number, changed line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        word, line = token.string, token.line
        swaps = [(kind, new) for kind, pairs in SWAPS.items() for old, new in pairs if old == word]
        if token.type == tokenize.NUMBER and word.isdigit():
            swaps.append(("constant", str(int(word) + 1)))
        elif token.type == tokenize.NUMBER and "." in word:
            swaps.append(("constant", str(2 * float(word) or 1.0)))
        for kind, new in swaps:
            yield kind, token.start[0], line[: token.start[1]] + new + line[token.end[1] :]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr | ast.AugAssign) or node.lineno != node.end_lineno:
            continue
        if isinstance(node, ast.AugAssign) or isinstance(node.value, ast.Call):
            yield "dropped statement", node.lineno, "pass"


def lines_with(text: str, line: str) -> int:
    """Returns how many lines of a text are this one."""
    return [one.strip() for one in text.split("\n")].count(line)


def candidates(path: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields the mutants of a file: kind, file, function, line, changed line."""
    text = path.read_text(encoding="utf-8")
    lines, function_of = text.split("\n"), lines_of(ast.parse(text))
    for kind, number, changed in changes(text):
        line = lines[number - 1].strip()
        function = function_of.get(number)
        if function and not NO_FAULT.search(line) and lines_with(text, line) == 1:
            yield kind, str(path.relative_to(ROOT)), function, line, changed.strip()


def draw() -> Iterator[Mutant]:
    """Yields the mutants of the working tree: all kinds alike, at most one in a function."""
    number = 0
    for group, (wanted, folder, names) in SOURCES.items():
        patterns = [f"{folder}/{name}.py" for name in names.split()]
        by_kind = defaultdict(list)
        for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
            for one in candidates(path):
                by_kind[one[0]].append(one)
        chance = random.Random(f"{SEED} {group}")
        taken: set[str] = set()
        while len(taken) < wanted:
            mutant = Mutant(number, group, *chance.choice(by_kind[chance.choice(sorted(by_kind))]))
            text = (ROOT / mutant.file).read_text(encoding="utf-8")
            with suppress(SyntaxError):
                ast.parse(text.replace(mutant.line, mutant.changed))
                if mutant.function not in taken:
                    number += 1
                    yield mutant
                taken.add(mutant.function)


def place(mutant: Mutant, tree: Path) -> bool:
    """Writes a fault into a tree; False where its line is nowhere, or at more than one place."""
    files = [path for top in ("privacy", "fedsynth") for path in (tree / top).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    found = [path for path in files if lines_with(texts[path], mutant.line) == 1]
    name = f"def {mutant.function.rpartition('.')[2]}("
    same_function = [path for path in found if name in texts[path]]
    for kept in ([path for path in found if path == tree / mutant.file], same_function, found):
        if len(kept) == 1:
            text = texts[kept[0]].replace(mutant.line, mutant.changed)
            kept[0].write_text(text, encoding="utf-8")
            return True
    return False


def failing(files: list[str], tree: Path) -> str:
    """Returns the first test of these files (or ids) that fails in a tree; empty for none."""
    limit = CPU_SECONDS, CPU_SECONDS + 5
    words = ["-m", "pytest", "-n", "0", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    try:
        ran = subprocess.run(
            [sys.executable, *words, *files],
            cwd=tree,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit),
        )
    except subprocess.TimeoutExpired:
        return "waits for ever"
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", ran.stdout, re.MULTILINE)
    if found:
        return str(found[0])
    return f"ends with {ran.returncode}" if ran.returncode else ""


def finds(mutant: Mutant, tree: Path, before: list[str]) -> str:
    """Returns the test that finds a fault in a tree, empty for none.

    Args:
        before: tests that found it in other commits, whose files are run first.
    """
    names = {Path(test.split("::")[0]).name for test in before}  # files may have moved
    first = [str(path) for name in sorted(names) for path in tree.glob(f"tests/**/{name}")]
    steps = [first] if first else []
    for patterns in TESTS[mutant.group]:
        paths = [path for one in patterns.split() for path in sorted((tree / "tests").glob(one))]
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
                earlier = [row["test"] for row in rows if row["mutant"] == mutant.number]
                test = finds(mutant, tree, [name for name in earlier if "::" in name])
                outcome = "killed" if test else "survived"
            subprocess.run([*git, "checkout", "-q", "."], check=True)
            if "::" in test and failing([test], tree):
                outcome = "error"  # the test fails without the fault, too
            row = {"commit": commit, "mutant": mutant.number, "group": mutant.group}
            print(json.dumps({**row, "outcome": outcome, "test": test}), file=results, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["draw"] and len(sys.argv) == 2:
        with LIST.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Mutant._fields, *draw()])
    elif sys.argv[1:2] == ["run"] and len(sys.argv) <= 3:
        words = ["git", "-C", str(ROOT), "rev-parse", "--short", *(sys.argv[2:] or ["HEAD"])]
        run(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
