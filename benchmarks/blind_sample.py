"""Draws docstrings and messages of ours and of other projects for a blind reading, unlabelled.

    python benchmarks/blind_sample.py OUT SEED FOLDER ...             # writes OUT.txt and OUT.key.json
    python benchmarks/blind_sample.py OUT SEED --marks READER=FILE    # prints a row of the reading

Our messages are those that users see, with the place, such as "run.rounds must be at least 1". In
FILE, a reader's JSON list contains the numbers of the items that had to be read twice. Rows are in
`benchmarks/results/blind_reading.jsonl`.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import Counter
from pathlib import Path

import errors_page

NUMBER = 40  # texts of each kind and side
PER_PROJECT = {"docstring": 200, "message": 60}
LENGTHS = {"docstring": range(31, 400), "message": range(31, 300)}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef)


def docstrings(module: errors_page.Module) -> list[str]:
    """Returns the first paragraphs of a module's docstrings."""
    nodes = (node for node in module.parents if isinstance(node, DEFINITIONS))
    found = filter(None, map(ast.get_docstring, (module.tree, *nodes)))
    return [doc.split("\n\n")[0] for doc in found]


def messages(sources: errors_page.Sources, module: errors_page.Module) -> list[str]:
    """Returns the messages that a module raises."""
    found = []
    for node in module.parents:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            if errors_page.name_of(call) == "with_code" and isinstance(call.func, ast.Attribute):
                call = call.func.value if isinstance(call.func.value, ast.Call) else call
            scope = errors_page.Scope(module, node)
            if errors_page.name_of(call) in sources.classes and call.args:
                found += sorted(m.text for m in sources.of_call(call, scope))[:1]
            elif call.args and errors_page.name_of(call)[:1].isupper():  # helpers lack the place
                found.append(sources.texts(call.args[0], scope)[0])
    return found


def texts(sources: errors_page.Sources, modules: list[errors_page.Module]) -> dict[str, list[str]]:
    """Returns the docstrings and messages of suitable length, in one line each."""
    drawn: dict[str, list[str]] = {"docstring": [], "message": []}
    for module in modules:
        drawn["docstring"] += docstrings(module)
        drawn["message"] += messages(sources, module)
    lines = {kind: [" ".join(text.split()) for text in found] for kind, found in drawn.items()}
    return {k: [line for line in found if len(line) in LENGTHS[k]] for k, found in lines.items()}


def modules_in(folder: Path) -> list[errors_page.Module]:
    paths = (path for path in sorted(folder.rglob("*.py")) if "test" not in path.as_posix())
    sources = (path.read_text("utf-8", "replace") for path in paths if not path.is_symlink())
    return [errors_page.Module(ast.parse(source)) for source in sources]


def sample(out: str, seed: int, folders: list[str]) -> None:
    rng = random.Random(seed)
    sources = errors_page.Sources()
    ours = texts(sources, sources.modules)
    theirs: dict[str, list[str]] = {"docstring": [], "message": []}
    for folder in folders:
        for kind, found in texts(errors_page.Sources(()), modules_in(Path(folder))).items():
            theirs[kind] += rng.sample(found, min(len(found), PER_PROJECT[kind]))
    items = []
    for side, drawn in (("ours", ours), ("theirs", theirs)):
        for kind, found in drawn.items():
            items += [(kind, text, side) for text in rng.sample(found, min(len(found), NUMBER))]
    rng.shuffle(items)
    lines = [f"{number}. [{kind}] {text}" for number, (kind, text, _) in enumerate(items, 1)]
    Path(f"{out}.txt").write_text("\n".join(lines), "utf-8")
    Path(f"{out}.key.json").write_text(json.dumps([[kind, side] for kind, _, side in items]))


def row(out: str, seed: int, reader: str, marks: list[int]) -> dict[str, object]:
    key = json.loads(Path(f"{out}.key.json").read_text())
    counts = Counter(tuple(key[number - 1]) for number in marks)
    marked = {f"{k}s {side}": counts[k, side] for k in LENGTHS for side in ("ours", "theirs")}
    return {"seed": seed, "reader": reader, "of": NUMBER, **marked}


def main() -> None:
    out, seed, *others = sys.argv[1:]
    if others[:1] == ["--marks"]:
        reader, file = others[1].split("=")
        print(json.dumps(row(out, int(seed), reader, json.loads(Path(file).read_text()))))
    else:
        sample(out, int(seed), others)


if __name__ == "__main__":
    main()
