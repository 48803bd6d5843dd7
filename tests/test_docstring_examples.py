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
import torch

import fedsynth
from fedsynth.seeding import forked_rng

ROOT = Path(__file__).parents[1]
NO_DOCSTRING = {"__version__"}  # a string: it cannot have one of its own
EXPORTED = sorted(set(dir(fedsynth)) - NO_DOCSTRING)
LONGEST = 8  # lines of code of an example


def documented_files() -> Iterator[Path]:
    """Files with examples in docstrings."""
    for folder in ("fedsynth", "privacy", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_relative_to(ROOT / "fedsynth" / folder) and ">>>" in path.read_text():
                yield path


def with_examples() -> dict[str, Path]:
    """Everything whose docstring has an example, as "module:Class.method", and its file."""
    found: dict[str, Path] = {}
    for path in documented_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = parts if parts[0] == "fedsynth" else ("fedsynth", *parts)
        module = ".".join(package).removesuffix(".__init__")
        for name in _documented(ast.parse(path.read_text(encoding="utf-8"))):
            found[f"{module}:{name}"] = path
    return found


def _documented(node: Any, prefix: str = "") -> Iterator[str]:
    """Qualified names in a syntax tree whose docstrings have examples; "" is the module's own."""
    if ">>>" in (ast.get_docstring(node) or ""):
        yield prefix.removesuffix(".")
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _documented(child, f"{prefix}{child.name}.")


EXAMPLES = with_examples()


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
    """On one thread, and with weights and draws that are not ours from a fixed global seed."""
    test = examples_of(name)
    told: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with forked_rng(0, "examples of docstrings"):
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
            failed, attempted = runner.run(test, out=told.append)
    finally:
        torch.set_num_threads(threads)
    assert attempted > 0
    assert not failed, "".join(told)


def test_examples_are_short_and_say_something() -> None:
    for name in EXAMPLES:
        examples = examples_of(name).examples
        assert sum(len(one.source.splitlines()) for one in examples) <= LONGEST, name
        assert any(one.want for one in examples), name


def test_an_example_that_is_wrong_fails() -> None:
    """The runner sees what differs, and an exported name without an example is not in the list."""
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1
    tree = ast.parse('class A:\n    """Text."""\n\n    def b(self):\n        """>>> 1"""\n')
    assert list(_documented(tree)) == ["A.b"]
