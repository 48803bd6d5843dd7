"""Examples in docstrings: all exports of `import fedsynth` have one; all are short and run."""

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
NO_DOCSTRING = {"__version__"}  # a string: it has no docstring
EXPORTED = sorted(set(dir(fedsynth)) - NO_DOCSTRING)
MAX_LINES = 8  # lines of code in an example


def with_examples() -> Iterator[str]:
    """Yields all objects whose docstring has an example, as "module:Class.method"."""
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
    """Yields qualified names whose docstrings have examples; "" names the module."""
    if ">>>" in (ast.get_docstring(node) or ""):
        yield prefix.removesuffix(".")
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _documented(child, f"{prefix}{child.name}.")


EXAMPLES = list(with_examples())


def examples_of(name: str) -> doctest.DocTest:
    """Returns the example of "module:Class.method" with the globals of its module."""
    module_name, _, path = name.partition(":")
    module = importlib.import_module(module_name)
    documented: Any = module
    for part in path.split(".") if path else ():
        documented = getattr(documented, part)
    docstring = documented.__doc__
    return doctest.DocTestParser().get_doctest(
        docstring, dict(vars(module)), name, module.__file__, 0
    )


def test_all_exports_have_examples() -> None:
    for name in EXPORTED:
        exported = getattr(fedsynth, name)
        assert f"{exported.__module__}:{exported.__qualname__}" in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_are_short(name: str) -> None:
    """Weights and draws of other libraries come from a fixed global seed."""
    test = examples_of(name)
    assert sum(len(example.source.splitlines()) for example in test.examples) <= MAX_LINES
    assert any(example.want for example in test.examples)
    output: list[str] = []
    with forked_rng(0, "examples of docstrings"):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        failed, attempted = runner.run(test, out=output.append)
    assert attempted > 0
    assert not failed, "".join(output)
