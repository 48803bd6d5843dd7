"""Runs every example as a user would."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import BudgetExceededError
from fedsynth.privacy.ledger import read_ledger

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = r"accuracy ([\d.]+) %"


def main_of(name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_examples_are_short_and_documented() -> None:
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith('"""'), path
        assert len(lines) <= (60 if path.stem == "statistics_to_set" else 150), path


def test_custom_pipeline_reaches_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("custom_pipeline")() > 0.7  # about 0.88; chance is 0.1
    assert "ε = 5.00" in capsys.readouterr().out


def test_library_page_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs on plain tensors, each at most 25 lines, one after the other."""
    page = (EXAMPLES.parent / "docs" / "library.md").read_text(encoding="utf-8")
    section = page.split("## Condense your tensors")[1].split("\n## Custom")[0]
    programs = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(programs) == 4
    assert max(len(program.splitlines()) for program in programs) <= 25
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, "library.md", "exec"), names)
    first, second, distance = map(float, re.findall(r"[\d.]+(?=\n)", capsys.readouterr().out))
    assert 4.99 < first <= 5
    assert 2.99 < second <= 3
    assert distance > 0.3
    assert "Privacy report" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_own_data_exhausts_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = main_of("own_data")
    assert main(tmp_path / "runs", tmp_path / "ledgers") > 0.6  # about 1; chance is 0.33
    first, second = map(float, re.findall(r"ε = ([\d.]+)", capsys.readouterr().out))
    assert second > 1.9 * first
    (folder,) = (tmp_path / "runs").iterdir()
    (ledger,) = {read_ledger(path).releases for path in (tmp_path / "ledgers").glob("*.jsonl")}
    assert 7.9 < epsilon(ledger, 1e-5) <= 8
    with pytest.raises(BudgetExceededError, match="is exhausted"):
        main(tmp_path / "runs", tmp_path / "ledgers")  # a second run on the same ledgers
    (final,) = {read_ledger(path).releases for path in (tmp_path / "ledgers").glob("*.jsonl")}
    assert final == ledger
    report = (folder / "privacy_report.md").read_text()
    assert "ONE PERSON OF ONE CLIENT" in report
    # the exact number of records, except inside a hash
    assert not re.search(r"(?<![\w.])570(?![\w.])", report)


def test_embeddings_example_reaches_accuracy(tmp_path: Path) -> None:
    accuracy = main_of("embeddings")(tmp_path)
    assert accuracy["FedStats"] > 0.9  # about 0.97; chance is 0.5
    assert (tmp_path / "share" / "synthetic.safetensors").is_file()


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
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    values = [float(value) for value in re.findall(figure, out)]
    assert len(values) >= len(minimum)
    assert all(value > lowest for value, lowest in zip(values, minimum, strict=False))
    if name == "feddm_private":
        assert 7.9 < float(out.split("ε = ")[1].split(",")[0]) <= 8.0
    for line in re.findall(r"^    \d: (.*)", out, re.MULTILINE):  # each digit's weights of clients
        assert sum(map(float, line.split())) == pytest.approx(1, abs=0.03)


@pytest.mark.slow
def test_custom_method_reaches_accuracy() -> None:
    accuracy = main_of("own_method")()
    assert list(accuracy) == ["FedAvg", "FedAdam", "FedAdam, ε = 8"]
    assert min(list(accuracy.values())[:2]) > 0.85  # about 0.9 and 0.92
    assert accuracy["FedAdam, ε = 8"] > 0.7  # about 0.85


@pytest.mark.slow
def test_student_examples_reach_accuracy(tmp_path: Path) -> None:
    """On the digits, shortened; Fashion-MNIST takes ten minutes."""
    teacher, student = main_of("data_free_distillation")("digits", "convnet", 40, 120)
    assert teacher > 0.93
    assert student > 0.5  # about 0.8
    teacher, student = main_of("statistics_to_set")(tmp_path)
    assert teacher > 0.85
    assert student > 0.25  # about 0.5; chance is 0.1


@pytest.mark.slow
def test_surrogate_matches_objective_at_zero(tmp_path: Path) -> None:
    """At w = 0 each loss is log 2 with the derivative x·(1/2 − y), for means and objective alike."""
    script = runpy.run_path(str(EXAMPLES / "surrogate_1d.py"))
    out = tmp_path / "picture.png"
    lines, w = script["main"](out), script["W"]
    x, y = script["make_data"]()
    middle = len(w) // 2
    for name in ("objective f", "surrogate, Eq. 9 (means)", "tangent at w = 0"):
        values = lines[name]
        assert float(values[middle]) == pytest.approx(np.log(2), abs=1e-12)
        slope = (values[middle + 1] - values[middle - 1]) / (w[middle + 1] - w[middle - 1])
        assert float(slope) == pytest.approx(float((x * (0.5 - y)).mean()), abs=1e-6)
    assert out.read_bytes().startswith(b"\x89PNG")
