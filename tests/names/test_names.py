"""Public names, docstrings and options keep to the terms of docs/glossary.md."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsynth", "privacy", "cli")
DENY_LIST = Path(__file__).with_name("deny_list.toml")
OPTION = re.compile(r"--([a-z][a-z-]+)(?:/.*)?")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


@cache
def deny_list() -> dict[str, Any]:
    return tomllib.loads(DENY_LIST.read_text(encoding="utf-8"))


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yields the path and the tree of each product file."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path == path.resolve():  # fedsynth/cli is a link to cli
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yields the public functions, arguments, classes and attributes of a module or class."""
    for node in body:
        if isinstance(node, FUNCTIONS):
            if node.name.startswith("_") and not node.name.startswith("__"):
                continue
            yield node.name
            arguments = [arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
            yield from (name for name in arguments if not name.startswith("_"))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
            yield from public_names(node.body)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            ids = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            yield from (name for name in ids if not name.startswith("_"))


def options(tree: ast.Module) -> Iterator[str]:
    """Yields the names of options in a module of the command line, as identifiers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = OPTION.fullmatch(node.value)
            if match:
                yield match[1].replace("-", "_")


def denied_name(name: str) -> str | None:
    """Returns the reason why a public name is denied, or None."""
    replacement = deny_list()["replaced"].get(name)
    if replacement is not None:
        return f"`{name}`: use `{replacement}`"
    parts = set(name.lower().strip("_").split("_"))
    if parts and parts <= set(deny_list()["vague_words"].split()):
        return f"`{name}`: name the thing that it holds or does"
    return None


def denied_docstrings(tree: ast.Module) -> Iterator[str]:
    starts = tuple(start + " " for start in deny_list()["docstring_starts"].strip().split("|"))
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node) or ""
            if text.startswith(starts):
                yield text.splitlines()[0]


def problems(path: str, tree: ast.Module) -> dict[str, str]:
    """Returns the reason for each denied name or docstring."""
    reasons = {}
    names = list(public_names(tree.body))
    if path.startswith("cli/"):
        names += options(tree)
    for name in names:
        reason = denied_name(name)
        if reason is not None:
            reasons[name] = f"{path}: {reason}"
    for line in denied_docstrings(tree):
        reasons[line] = f"{path}: begin with a verb or a noun: {line!r}"
    return reasons


def test_public_names_and_docstrings_avoid_deny_list() -> None:
    trees = dict(modules())
    assert len(trees) > 150
    reasons = {key: why for path in trees for key, why in problems(path, trees[path]).items()}
    listed = deny_list()["exceptions"]
    new = [
        why for key, why in reasons.items() if key not in (*listed["names"], *listed["docstrings"])
    ]
    assert not new, "\n".join(new)


BAD = '''
"""Whether a thing is there."""

LEAST = 3

class Told:
    """What the clients know."""

    made: int

    def found(self, others): ...

    def _told(self, mine): ...

def private_plans(): ...

option("--found-again")
'''


def test_denied_sample_is_rejected() -> None:
    reasons = problems("cli/sample.py", ast.parse(BAD))
    assert set(reasons) == {
        "Whether a thing is there.",
        "What the clients know.",
        *("LEAST", "Told", "made", "found", "others", "private_plans", "found_again"),
    }
    assert "release_plans" in reasons["private_plans"]
    for name in ("given_norm", "num_clients", "DatasetSpec", "__init__"):
        assert denied_name(name) is None
