"""Examples in docstrings: all exports of `import fedsynth` have one; all are short and run."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsynth
from fedsynth.seeding import forked_rng

ROOT = Path(__file__).parents[1]
MAX_LINES = 8  # lines of code in an example


def with_examples() -> Iterator[doctest.DocTest]:
    for folder in ("fedsynth", "privacy", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "fedsynth" / folder) or ">>>" not in path.read_text():
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = parts if parts[0] == "fedsynth" else ("fedsynth", *parts)
            module = importlib.import_module(".".join(package).removesuffix(".__init__"))
            yield from (test for test in doctest.DocTestFinder().find(module) if test.examples)


EXAMPLES = {test.name: test for test in with_examples()}


def test_all_exports_have_examples() -> None:
    for name in {*dir(fedsynth)} - {"__version__"}:  # a string: it has no docstring
        exported = getattr(fedsynth, name)
        assert f"{exported.__module__}.{exported.__qualname__}" in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_are_short(name: str) -> None:
    """Weights and draws of other libraries come from a fixed global seed."""
    examples = EXAMPLES[name].examples
    assert sum(len(example.source.splitlines()) for example in examples) <= MAX_LINES
    assert any(example.want for example in examples)
    output: list[str] = []
    with forked_rng(0, "examples of docstrings"):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        failed, attempted = runner.run(EXAMPLES[name], out=output.append)
    assert attempted > 0
    assert not failed, "".join(output)
