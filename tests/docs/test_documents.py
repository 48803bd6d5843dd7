"""Generated pages include each method, command, option, exported name and example. Examples run as a
user would run them, and all exports of `import fedsynth` have a short one in their docstring."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fedsynth
from fedsynth.core.capabilities import upload_types
from fedsynth.core.messages import privacy_of_fields
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import BudgetExceededError, epsilon, read_ledger
from fedsynth.seeding import forked_rng

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_problems_of_site_links_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    links = importlib.import_module("check_links")
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    for body, message in {
        '<a href="nowhere.html">a</a>': "no such file",
        '<a href="other.html#where">a</a>': "no such anchor",
        '<a href="#here">a</a>': "no such anchor",
        '<img src="picture.png">': "no such file",
        '<script src="https://cdn.example.org/x.js"></script>': "loads https://cdn",
        '<link rel="stylesheet" href="//fonts.example.org/a.css">': "loads //fonts",
        '<a href="other.html#there">a</a><a href="https://example.org">b</a>': "",
    }.items():
        (tmp_path / "index.html").write_text(f"<html><body>{body}</body></html>")
        problems = "\n".join(links.problems(tmp_path))
        assert message in problems
        assert bool(message) == bool(problems)


@pytest.mark.parametrize(
    ("path", "text", "rules"),
    [
        ("docs/a.md", "a " * 60, ["wrap"]),
        ("docs/a.md", "[a](b.md)", ["link"]),
        ("docs/a.md", "[a](generated/b.md)", ["link"]),
        ("docs/tutorials/a.md", "```{code-cell} ipython3\n%cd /mnt/\n```", ["tutorial"] * 3),
        ("Dockerfile", "COPY nothing .\nARG EXTRAS=none", ["docker"] * 2),
        ("CITATION.cff", "", ["version"]),
        ("privacy/a.py", "from fedsynth.core.method import Method", ["layer"]),
        ("fedsynth/a.py", '"""Whether it is."""', ["docstring"]),
        ("fedsynth/a.py", "def f(least, dp_series): self.held = Segments = 1", ["name"] * 4),
        ("cli/a.py", 'Option("--phase")', ["option"]),
        ("README.md", "`fedsynth plot --mena`", ["command"]),
        ("README.md", "```{code-cell}\n%%bash\nfedsynth trian\n```", ["command"]),
        ("README.md", "the downlink", ["term"]),
        ("fedsynth/a.py", "time_series = dicom_series = dicom_segments = series_uid = 1", ["name"]),
        ("benchmarks/a.py", "from run import main", ["layer"]),
        *(
            ("README.md", f"```sh\n{line}\n```", ["command"])
            for line in (
                "fedsynth trian",
                "fedsynth privacy plane",
                "fedsynth train --dp-epsilom 8",
                "fedsynth train --rounds many",
                "fedsynth synthesize --data scans",  # without --out
                "for m in a b; do fedsynth train --methods $m; done",
                'docker run --rm -v "$PWD:/output" fedsynth train --epsilon 8',
                "fedsynth runs a b > x.txt && fedsynth plot --mena",
            )
        ),
        ("README.md", "```sh\nfedsynth train --rounds 2\n```\n`fedsynth plot`", []),
    ],
)
def test_lint_detects_problems(path: str, text: str, rules: list[str]) -> None:
    lint = runpy.run_path(str(ROOT / ".ci" / "lint.py"))
    assert [rule for _, rule, _ in lint["problems"](path, text)] == rules


@pytest.fixture(scope="module")
def generate() -> Iterator[ModuleType]:
    """Yields the package docs/generate, as Sphinx imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("generate")


@pytest.fixture(scope="module")
def generated(generate: ModuleType) -> dict[str, str]:
    return generate.pages()  # type: ignore[no-any-return]


def test_method_pages_show_all_declarations(generated: dict[str, str]) -> None:
    for name in METHODS:
        page = generated[f"methods/{name}.md"]
        cls = method_class(name)
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` | `" in page
        for message in upload_types(cls):
            for key, (kind, _) in privacy_of_fields(message).items():
                assert f"| `{key}` | {kind} |" in page
        for mechanism in cls.dp_mechanisms:
            assert f"| `{mechanism}` |" in page
        assert ("Refused: " in page) == (not cls.dp_mechanisms)
        assert "` |  |\n" not in page, "a setting without an explanation"
        assert name in generated["methods/index.md"].split("```{toctree}")[1].split()


def test_command_pages_show_all_options(generate: ModuleType, generated: dict[str, str]) -> None:
    commands = generate.commands.commands()
    assert len(commands) > 20
    for path, command in commands.items():
        if not path:
            continue
        page = generated[f"commands/{path.split(' ')[0]}.md"]
        assert f"# fedsynth {path}\n" in page
        assert f"[fedsynth {path}]" in generated["commands/index.md"]
        section = page.split(f"# fedsynth {path}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert all(f"`{flag}`" in section for flag in parameter.opts)


def test_reference_includes_every_exported_name(
    generate: ModuleType, generated: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = "".join(text for name, text in generated.items() if name.startswith("api/"))
    for name in set(dir(fedsynth)) - {"__version__"}:
        assert f":: fedsynth.{name}\n" in pages + "\n"
    monkeypatch.delitem(generate.api.GROUPS, "Data")
    with pytest.raises(LookupError, match="ImageData"):
        generate.api.groups()


STABLE = {
    name: importlib.import_module(name)
    for name in (
        *("fedsynth", "fedsynth.experiments", "fedsynth.methods.kit"),
        *("fedsynth.privacy", "fedsynth.synthesizer"),
    )
}
NEED_EXTRAS = {  # stable, too
    "fedsynth.deployment.flower.guard.GuardedClientApp",
    "fedsynth.deployment.nvflare_filter.GuardFilter",
}
PYTHON = re.compile(r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def imported_names(text: str) -> Iterator[tuple[str, str]]:
    """Yields the module and the name of each import from fedsynth."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "__name__") for alias in node.names)


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "examples").glob("*.py"), *DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")]),
    ids=lambda path: path.name,
)
def test_examples_and_pages_import_only_stable_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        cells = (cell for cell in PYTHON.findall(text) if "%%bash" not in cell)
        text = "\n".join(re.sub(r"^(%|:\w).*", "", cell, flags=re.MULTILINE) for cell in cells)
    for module, name in imported_names(text):
        if module.partition(".")[0] == "fedsynth" and f"{module}.{name}" not in NEED_EXTRAS:
            names = {"__name__", *dir(STABLE[module])}
            assert name in names or f"{module}.{name}" in STABLE, f"{module}.{name}"


def test_every_example_has_page(generated: dict[str, str]) -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert path.read_text(encoding="utf-8").rstrip() in generated[f"examples/{path.stem}.md"]


def modules() -> Iterator[tuple[str, str]]:
    """Yields the path and the text of each product file."""
    for path in sorted(
        path
        for package in ("fedsynth", "privacy", "cli")
        for path in (ROOT / package).rglob("*.py")
    ):
        if path == path.resolve():  # fedsynth/cli is a link to cli
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


# ----------------------------------------------------------------- examples, also of docstrings
ACCURACY = r"accuracy ([\d.]+) %"


def main_of(name: str) -> Any:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def test_short_examples_reach_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("custom_pipeline")() > 0.7  # about 0.88; chance is 0.1
    assert "ε = 5.00" in capsys.readouterr().out
    assert main_of("embeddings")(tmp_path)["FedStats"] > 0.9  # about 0.97; chance is 0.5
    assert (tmp_path / "share" / "synthetic.safetensors").is_file()


def test_library_page_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs on plain tensors, each at most 25 lines, one after the other."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    section = page.split("## Condense your tensors")[1].split("\n## Custom")[0]
    programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(programs) == 5
    assert max(len(program.splitlines()) for program in programs) <= 25
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, "library.md", "exec"), names)
    first, second = map(float, re.findall(r"[\d.]+(?=\n)", capsys.readouterr().out))
    assert 4.99 < first <= 5
    assert 2.99 < second <= 3
    assert "Privacy report" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_own_data_exhausts_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = main_of("own_data")
    assert main(tmp_path / "runs", tmp_path / "ledgers") > 0.6  # about 1; chance is 0.33
    first, second = map(float, re.findall(r"ε = ([\d.]+)", capsys.readouterr().out))
    assert second > 1.9 * first
    (folder,) = (tmp_path / "runs").iterdir()
    paths = list((tmp_path / "ledgers").glob("*.jsonl"))
    (ledger,) = {read_ledger(path).releases for path in paths}
    assert 7.9 < epsilon(ledger, 1e-5) <= 8
    with pytest.raises(BudgetExceededError, match="leaves too little"):
        main(tmp_path / "runs", tmp_path / "ledgers")  # a second run on the same ledgers
    assert {read_ledger(path).releases for path in paths} == {ledger}
    report = (folder / "privacy_report.md").read_text()
    assert "ONE PERSON OF ONE CLIENT" in report
    assert not re.search(r"(?<![\w.])570(?![\w.])", report)  # the number of records, not in a hash


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figure", "minimum"),
    [
        ("feddm_private", ACCURACY, (70,)),  # about 90
        ("fedaf", ACCURACY, (90, 70)),  # about 97 and with privacy 89
        ("own_condensation", ACCURACY, (90, 70)),  # about 97 and with privacy 88
        ("fedkf", r"AMP ([\d.]+) %", (75, 75, 25, 25)),  # about 90 without privacy
        ("one_shot", rf"test {ACCURACY}", (10,) * 6),
    ],
)
def test_example_scripts_print_accuracies(
    name: str, figure: str, minimum: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Chance is 10 %."""
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    values = [float(value) for value in re.findall(figure, out)]
    assert len(values) >= len(minimum)
    assert all(value > lowest for value, lowest in zip(values, minimum, strict=False))
    if name == "feddm_private":
        assert 7.9 < float(out.split("ε = ")[1].split(",")[0]) <= 8.0
    for line in re.findall(r"^    \d: (.*)", out, re.MULTILINE):  # each digit's weights of clients
        assert sum(map(float, line.split())) == pytest.approx(1, abs=0.03)


@pytest.mark.slow
def test_longer_examples_reach_accuracy(tmp_path: Path) -> None:
    """On the digits, shortened; Fashion-MNIST takes ten minutes."""
    accuracy = main_of("own_method")()
    assert list(accuracy) == ["FedAvg", "FedAdam", "FedAdam, ε = 8"]
    values = [
        *accuracy.values(),  # about 0.9, 0.92 and 0.85
        *main_of("data_free_distillation")("digits", "convnet", 40, 120),  # student: about 0.8
        *main_of("statistics_to_set")(tmp_path),  # student: about 0.5; chance is 0.1
    ]
    for value, lowest in zip(values, (0.85, 0.85, 0.7, 0.93, 0.5, 0.85, 0.25), strict=True):
        assert value > lowest


@pytest.mark.slow
def test_surrogate_matches_objective_at_zero(tmp_path: Path) -> None:
    """At w = 0 each loss is log 2 with the derivative x·(1/2 − y), of means and objective."""
    script = runpy.run_path(str(ROOT / "examples" / "surrogate_1d.py"))
    lines, w = script["main"](tmp_path / "picture.png"), script["W"]
    x, y = script["make_data"]()
    middle = len(w) // 2
    for name in ("objective f", "surrogate, Eq. 9 (means)", "tangent at w = 0"):
        assert float(lines[name][middle]) == pytest.approx(np.log(2), abs=1e-12)
        slope = np.gradient(lines[name], w)[middle]
        assert float(slope) == pytest.approx(float((x * (0.5 - y)).mean()), abs=1e-6)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


MAX_LINES = 8  # lines of code in an example


def with_examples() -> Iterator[doctest.DocTest]:
    for path, text in modules():
        if ">>>" in text:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            package = "" if name.startswith("fedsynth") else "fedsynth."
            module = importlib.import_module(package + name)
            yield from (test for test in doctest.DocTestFinder().find(module) if test.examples)


DOCTESTS = {test.name: test for test in with_examples()}


def test_all_exports_have_examples() -> None:
    for name in {*dir(fedsynth)} - {"__version__"}:  # a string: it has no docstring
        exported = getattr(fedsynth, name)
        assert f"{exported.__module__}.{exported.__qualname__}" in DOCTESTS


@pytest.mark.parametrize("name", DOCTESTS)
def test_examples_run_and_are_short(name: str) -> None:
    """Weights and draws of other libraries come from a fixed global seed."""
    examples = DOCTESTS[name].examples
    assert sum(len(example.source.splitlines()) for example in examples) <= MAX_LINES
    assert any(example.want for example in examples)
    output: list[str] = []
    with forked_rng(0, "examples of docstrings"):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        failed, attempted = runner.run(DOCTESTS[name], out=output.append)
    assert attempted > 0
    assert not failed, "".join(output)
