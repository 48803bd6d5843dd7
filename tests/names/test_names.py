"""Public names, docstrings and options keep to the terms of docs/glossary.md."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsynth", "privacy", "cli")
DENIED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("deny_list.toml").read_text(encoding="utf-8")
)
OPTION = re.compile(r"--([a-z][a-z-]+)(?:/.*)?")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yields the path and the tree of each product file."""
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path == path.resolve():  # fedsynth/cli is a link to cli
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def defined_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yields the functions, arguments, classes and attributes of a module or public class."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_") or name.startswith("__"):
                    yield name
                    yield from (arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg))
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield name
                yield from defined_names(node.body)
            case ast.Assign(targets=[*targets]) | ast.AnnAssign(target=targets):
                parts = targets if isinstance(targets, list) else [targets]
                ids = (part for target in parts for part in ast.walk(target))
                yield from (part.id for part in ids if isinstance(part, ast.Name))


def options(tree: ast.Module) -> Iterator[str]:
    """Yields the names of options in a module of the command line, as identifiers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = OPTION.fullmatch(node.value)
            if match:
                yield match[1].replace("-", "_")


def denied_name(name: str) -> str | None:
    """Returns the reason why a public name is denied, or None."""
    replacement = DENIED["replaced"].get(name)
    if replacement is not None:
        return f"`{name}`: use `{replacement}`"
    parts = set(name.lower().strip("_").split("_"))
    if parts and parts <= set(DENIED["vague_words"].split()):
        return f"`{name}`: name the thing that it holds or does"
    return None


def problems(path: str, tree: ast.Module) -> dict[str, str]:
    """Returns the reason for each denied name or docstring."""
    reasons = {}
    for name in (*defined_names(tree.body), *(options(tree) if path.startswith("cli/") else ())):
        reason = None if name.startswith("_") else denied_name(name)
        if reason is not None:
            reasons[name] = f"{path}: {reason}"
    starts = tuple(start + " " for start in DENIED["docstring_starts"].strip().split("|"))
    for node in ast.walk(tree):
        text = (ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None) or ""
        if text.startswith(starts):
            line = text.splitlines()[0]
            reasons[line] = f"{path}: begin with a verb or a noun: {line!r}"
    return reasons


def test_public_names_and_docstrings_avoid_deny_list() -> None:
    trees = dict(modules())
    assert len(trees) > 150
    reasons = {key: why for path in trees for key, why in problems(path, trees[path]).items()}
    listed = {*DENIED["exceptions"]["names"], *DENIED["exceptions"]["docstrings"]}
    assert not reasons.keys() - listed, [reasons[key] for key in reasons.keys() - listed]


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
