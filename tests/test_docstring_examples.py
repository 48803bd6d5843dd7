"""Docstrings' examples: everything that `import fedsynth` offers has one, all run, all are
short."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedsynth
from fedsynth.seeding import forked_rng

ROOT = Path(__file__).parents[1]
NO_DOCSTRING = {"__version__"}  # a string: it cannot have one of its own
EXPORTED = sorted(set(dir(fedsynth)) - NO_DOCSTRING)
LONGEST = 8  # lines of code of an example


def with_examples() -> Iterator[str]:
    """Everything whose docstring has an example, as "module:Class.method"."""
    for folder in ("fedsynth", "privacy", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "fedsynth" / folder) or ">>>" not in path.read_text():
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = parts if parts[0] == "fedsynth" else ("fedsynth", *parts)
            module = ".".join(package).removesuffix(".__init__")
            for name in _documented(ast.parse(path.read_text(encoding="utf-8"))):
                yield f"{module}:{name}"


def _documented(node: Any, prefix: str = "") -> Iterator[str]:
    """Qualified names in a syntax tree whose docstrings have examples; "" is the module's own."""
    if ">>>" in (ast.get_docstring(node) or ""):
        yield prefix.removesuffix(".")
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _documented(child, f"{prefix}{child.name}.")


EXAMPLES = list(with_examples())


def examples_of(name: str) -> doctest.DocTest:
    """The example of "module:Class.method", in the names of its module."""
    module_name, _, path = name.partition(":")
    module = importlib.import_module(module_name)
    found: Any = module
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    text = found.__doc__
    return doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, module.__file__, 0)


def test_everything_exported_has_an_example() -> None:
    for name in EXPORTED:
        exported = getattr(fedsynth, name)
        assert f"{exported.__module__}:{exported.__qualname__}" in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_true(name: str) -> None:
    """With weights and draws that are not ours from a fixed global seed."""
    test = examples_of(name)
    assert sum(len(one.source.splitlines()) for one in test.examples) <= LONGEST
    assert any(one.want for one in test.examples)
    told: list[str] = []
    with forked_rng(0, "examples of docstrings"):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        failed, attempted = runner.run(test, out=told.append)
    assert attempted > 0
    assert not failed, "".join(told)
