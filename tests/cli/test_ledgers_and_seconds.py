"""--dp-ledger with and without privacy, `privacy carry-over | repair`, and no seconds of private
runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.config.resolve import resolve
from fedsynth.federation.run_data import data_set_id
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.simulation.run_messages import LONG_PHASE, StderrObserver

Call = Callable[..., Any]
SECONDS = re.compile(r"\d\.\d+ ?s\b|\btime\b|seconds")
REASON = "a round of real (none): a run on the same data without differential privacy"


def test_a_ledger_may_be_named_without_privacy(train: Call, tmp_path: Path) -> None:
    """Catches: `--method real` publishes raw images, and the next run's report says ε = 2."""
    kept = f"--dp-ledger {tmp_path / 'ledgers'}"
    dry = train(f"real {kept} --dry-run")
    assert (dry.code, "no later run on these data can state an ε" in dry.stdout) == (0, True)
    assert not (tmp_path / "ledgers").exists()
    run = train(f"real {kept}")
    assert run.code == 0, run.stderr
    assert "no later run on these data can state an ε" in run.stderr
    assert 'ledger = "' in (run.folder / "config.toml").read_text()
    for path in (tmp_path / "ledgers").glob("*.jsonl"):
        (row,) = read_ledger(path).releases
        assert row.unaccounted == "a run on the same data without differential privacy"
    for budget in ("--dp-epsilon 8", "--dp-sigma 3 --dp-epsilon 100", "--dp-epsilon 8 --dry-run"):
        capped = train(f"feddm {budget} {kept}")
        assert capped.code == 2
        (line,) = capped.stderr.splitlines()
        assert line.startswith("fedsynth: error: ε = ")
        assert REASON in line
    dry = train(f"feddm --dp-sigma 3 {kept} --dry-run")
    assert (dry.code, "no ε can be stated" in dry.stdout) == (0, True)
    noisy = train(f"feddm --dp-sigma 3 {kept}")
    assert noisy.code == 0, noisy.stderr
    assert "no differential privacy guarantee: a ledger in" in noisy.stderr
    assert " ε " not in noisy.stderr.split("guarantee", 1)[1].replace("no ε can", "")
    (folder,) = noisy.output.glob("*-feddm-*")
    report = json.loads((folder / "privacy_report.json").read_text())
    assert (report["guarantee"], report["verdict"]["reasons"]) == (None, [REASON])


@pytest.mark.parametrize("options", ["", "--dp-sigma 3"])
def test_a_ledger_folder_without_a_name_is_refused(
    train: Call, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dp-ledger "$UNSET"` must not put ledgers into the current folder."""
    monkeypatch.chdir(tmp_path)
    for given in ("", " "):
        run = train(f"fedavg {options} --dp-ledger", given)
        assert (run.code, run.stderr.count("error:")) == (2, 1)
        assert "ledger must be a folder" in run.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mechanism", ["residual", "paper"])
def test_a_private_run_shows_no_seconds(train: Call, mechanism: str) -> None:
    """The run folder keeps them in simulation_only: they depend on the data."""
    line = f"feddm --dp-sigma 3 --dp-mechanism {mechanism}"
    shown, as_json = train(line), train(f"{line} --json")
    for text in (shown.stderr, shown.stdout, as_json.stderr, as_json.stdout):
        assert text
        assert not SECONDS.search(text.replace(str(shown.output), "")), text
    for folder in shown.output.iterdir():
        assert not SECONDS.search((folder / "summary.json").read_text().replace(str(folder), ""))
        assert '"seconds"' in (folder / "simulation_only" / "rounds.jsonl").read_text()
    assert re.search(r"· \d+\.\d s\n", train("feddm").stderr)


def test_a_sign_of_life_goes_by_steps_where_seconds_would_tell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    observer = StderrObserver(resolve({"privacy": {"noise_multiplier": 3.0}}), "")
    observer._printed -= 3600
    for total in (LONG_PHASE - 1, LONG_PHASE):
        for done in range(1, total + 1):
            observer.step(1, "condense", done, total)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"round 1/3 condense {n * LONG_PHASE // 10}/{LONG_PHASE}" for n in range(1, 11)
    ]
    plain = StderrObserver(resolve({}), "")
    plain._printed -= 3600
    for done in (1, 2):
        plain.step(1, "condense", done, 10)
    assert capsys.readouterr().err.splitlines() == ["round 1/3 condense 1/10"]


def test_carry_over(train: Call, fedsynth: Call, tmp_path: Path) -> None:
    """A ledger without fingerprints is taken once somebody says whose it is, and not before."""
    folder = tmp_path / "the ledgers"
    line = f"feddm --dp-sigma 3 --dp-ledger '{folder}'"
    row = Release(1, "images", "residual", "residuals", 5.0, 0.1, 1.0, "full", 2, 7840)
    dataset = resolve({"partition": {"clients": 2}})
    for name in ("client-000", "client-001"):
        Ledger(name, folder / f"{name}.jsonl", dataset=data_set_id(dataset)).charge(row)
    refused = train(line)
    assert refused.code == 2
    command = refused.stderr.strip().rpartition("confirm this with ")[2]
    assert command == f"fedsynth privacy carry-over '{folder}' client-000"
    for name in ("client-000", "client-001"):
        said = fedsynth(f"privacy carry-over '{folder}' {name}")
        assert (said.code, "(1) count for all" in said.stdout) == (0, True)
    assert train(line).code == 0
    assert len(read_ledger(folder / "client-001.jsonl").releases) == 2
    wrong = fedsynth(f"privacy carry-over '{folder}' north")
    assert (wrong.code, len(wrong.stderr.splitlines())) == (2, 1)
    assert "existing ledgers: client-000, client-001" in wrong.stderr


def test_repair(fedsynth: Call, tmp_path: Path) -> None:
    path = tmp_path / "client-000.jsonl"
    Ledger("client-000", path).charge(Release(1, "images", "m", "c", 3.0, 1.0, 1.0, "full", 1, 1))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round": 2, "qua')
    done = fedsynth(f"privacy repair {path}")
    assert done.code == 0
    assert '\'{"round": 2, "qua\'' in done.stdout
    (copy,) = tmp_path.glob("*.torn-*")
    assert (path.read_bytes(), copy.read_bytes()) == (whole, whole + b'{"round": 2, "qua')


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--dp-epsilon 8", "--dp-sigma 3", ""])
def test_plans_of_enormous_runs_come_at_once(fedsynth: Call, words: str) -> None:
    """A million rounds, a thousand million epochs, with subsampling or not: ε after chosen
    rounds."""
    started = time.process_time()
    long = f"train --dry-run --method fedavg {words}"
    epochs, million = "--set local_epochs=1000000000", "--rounds 1000000"
    sampled = "--rounds 2 --set batch=8 --clients 2"
    for more in (million, f"{million} {epochs}", f"{sampled} {epochs}", f"{sampled} {million}"):
        run = fedsynth(f"{long} {more}")
        assert len(run.stdout) < 5000
        if run.code != 0:  # a budget that no noise keeps is another line
            assert words == "--dp-epsilon 8"
            assert "8 cannot be reached with a noise multiplier up to 1e6" in run.stderr
    if words:
        shown = json.loads(fedsynth(f"{long} {million} --json").stdout)["epsilon"]
        assert 20 < len(shown) < 40
        assert list(shown)[-1] == "1000000"
    assert time.process_time() - started < 20
