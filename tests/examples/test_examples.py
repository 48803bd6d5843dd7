"""Every example runs as its reader would run it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import BudgetExceededError
from fedsynth.privacy.ledger import read_ledger

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_private_federation(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "feddm_private.py"), run_name="__main__")
    out = capsys.readouterr().out
    accuracy, spent = float(out.split()[2]), float(out.split("ε = ")[1].split(",")[0])
    assert 7.9 < spent <= 8.0
    assert accuracy > 70  # about 90; chance is 10


def test_the_custom_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = runpy.run_path(str(EXAMPLES / "custom_pipeline.py"))["main"]()
    assert accuracy > 0.7  # about 0.88; chance is 0.1
    assert "ε = 5.00" in capsys.readouterr().out


def test_the_programs_of_the_librarys_page(
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


def test_own_data_and_own_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "own_data.py"))["main"]
    accuracy = main(tmp_path / "runs", tmp_path / "ledgers")
    assert accuracy > 0.6  # about 1; chance is 0.33
    one, two = map(float, re.findall(r"ε = ([\d.]+)", capsys.readouterr().out))
    assert two > 1.9 * one
    (folder,) = (tmp_path / "runs").iterdir()
    (ledger,) = {read_ledger(path).releases for path in (tmp_path / "ledgers").glob("*.jsonl")}
    assert 7.9 < epsilon(ledger, 1e-5) <= 8
    with pytest.raises(BudgetExceededError, match="is exhausted"):
        main(tmp_path / "runs", tmp_path / "ledgers")  # a second run on the same ledgers
    (after,) = {read_ledger(path).releases for path in (tmp_path / "ledgers").glob("*.jsonl")}
    assert after == ledger
    report = (folder / "privacy_report.md").read_text()
    assert "university" in report
    assert "ONE PERSON OF ONE CLIENT" in report
    # the true number of records, but for digits inside a hash
    assert not re.search(r"(?<![\w.])570(?![\w.])", report)


def test_private_statistics_of_embeddings(tmp_path: Path) -> None:
    accuracy = runpy.run_path(str(EXAMPLES / "embeddings.py"))["main"](tmp_path / "ledgers")
    assert accuracy > 0.9  # about 0.97; chance is 0.5


def test_examples_are_short_and_explain_themselves() -> None:
    for path in EXAMPLES.glob("*.py"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith('"""'), path
        assert len(lines) <= 150, path


@pytest.mark.slow
def test_fedaf_with_and_without_privacy(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "fedaf.py"), run_name="__main__")
    out = capsys.readouterr().out
    accuracies = [float(a) for a in re.findall(r"accuracy ([\d.]+) %", out)]
    assert accuracies[0] > 90  # about 97; chance is 10
    assert accuracies[1] > 70  # about 89
    assert out.count("if it were the only release") == 3


@pytest.mark.slow
def test_a_custom_method() -> None:
    accuracy = runpy.run_path(str(EXAMPLES / "own_method.py"))["main"]()
    assert list(accuracy) == ["FedAvg", "FedAdam", "FedAdam, ε = 8"]
    assert min(list(accuracy.values())[:2]) > 0.85  # about 0.9 and 0.92
    assert accuracy["FedAdam, ε = 8"] > 0.7  # about 0.85


@pytest.mark.slow
def test_a_custom_condensing_method(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_condensation.py"), run_name="__main__")
    out = capsys.readouterr().out
    accuracies = [float(a) for a in re.findall(r"accuracy ([\d.]+) %", out)]
    assert accuracies[0] > 90  # about 97; chance is 10
    assert accuracies[1] > 70  # about 88
    assert re.findall(r"  ([\w ]+): (\d+) a round", out) == [
        ("synthetic images", "10"),
        ("class sums of embeddings", "1"),
        ("class counts", "1"),
    ]


@pytest.mark.slow
def test_fedkf_with_and_without_privacy(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "fedkf.py"), run_name="__main__")
    amp = [float(a) for a in re.findall(r"AMP ([\d.]+) %", capsys.readouterr().out)]
    assert len(amp) == 4
    assert min(amp[:2]) > 75  # about 90; chance is 10
    assert min(amp[2:]) > 25


@pytest.mark.slow
def test_a_student_without_data() -> None:
    """On the digits, shortened; Fashion-MNIST takes ten minutes."""
    teacher, student = runpy.run_path(str(EXAMPLES / "data_free_distillation.py"))["main"](
        "digits", "convnet", 40, 120
    )
    assert teacher > 0.93
    assert student > 0.5  # about 0.8


@pytest.mark.slow
def test_one_shot_with_and_without_privacy(capsys: pytest.CaptureFixture[str]) -> None:
    """Also prints each digit's weights of the clients, which sum to 1."""
    runpy.run_path(str(EXAMPLES / "one_shot.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert len(re.findall(r"test accuracy [\d.]+ %", out)) == 6
    lines = [line for line in out.splitlines() if re.match(r"    \d: ", line)]
    assert len(lines) == 10
    for line in lines:
        shares = [float(share) for share in line.split(":")[1].split()]
        assert sum(shares) == pytest.approx(1, abs=0.03)


@pytest.mark.slow
def test_a_set_from_statistics_trains_a_custom_model(tmp_path: Path) -> None:
    teacher, student = runpy.run_path(str(EXAMPLES / "statistics_to_set.py"))["main"](tmp_path)
    assert teacher > 0.85
    assert student > 0.25  # about 0.5; chance is 0.1
    assert len((EXAMPLES / "statistics_to_set.py").read_text().splitlines()) <= 60


@pytest.mark.slow
def test_the_surrogate_of_one_dimension(tmp_path: Path) -> None:
    """At w = 0 each loss is log 2 with the derivative x·(1/2 − y), for means and objective alike."""
    found = runpy.run_path(str(EXAMPLES / "surrogate_1d.py"))
    out = tmp_path / "picture.png"
    lines, w = found["main"](out), found["W"]
    x, y = found["make_data"]()
    middle = len(w) // 2
    for name in ("objective f", "surrogate, Eq. 9 (means)", "tangent at w = 0"):
        values = lines[name]
        assert float(values[middle]) == pytest.approx(np.log(2), abs=1e-12)
        slope = (values[middle + 1] - values[middle - 1]) / (w[middle + 1] - w[middle - 1])
        assert float(slope) == pytest.approx(float((x * (0.5 - y)).mean()), abs=1e-6)
    assert out.read_bytes().startswith(b"\x89PNG")
