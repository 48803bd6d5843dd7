"""User errors, and files and folders of options: each gives a result, or one line on stderr, with
the setting's key in a config file, and exit code 2, without a run folder, blocking on a pipe or
reading a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fedsynth.cli.application import PACKAGE
from fedsynth.methods import METHODS
from tests.cli.conftest import Call
from tests.fuzz.mutations import CommandFailedError, command, time_limit
from tests.special_files import make_special_file

CELL = "fedprox:synthetic --dataset 'synthetic(0,0)' --cell '90 %' --method fedprox"
LINES = (
    ("feddm --method feddmm", "unknown method 'feddmm'; did you mean feddm"),
    ("feddm --dataset mnits", "unknown data set 'mnits'; did you mean mnist"),
    ("feddm --set icp=3", "unknown setting of feddm 'icp'; did you mean ipc"),
    ("fedavg --set projection=8", "unknown setting of fedavg 'projection'"),
    ("feddm --set ipc", "--set must be KEY=VALUE or SECTION.KEY=VALUE, got 'ipc'"),
    ("feddm --bogus 3", "No such option: --bogus"),  # errors of the parser
    ("feddm --dp-sigma big", "'--dp-sigma'"),
    ("feddm surplus", "surplus"),
    ("feddm --rounds 0", "run.rounds must be at least 1, got 0"),
    ("fedavg --client-models cnn1", "model.clients cannot be used with fedavg"),
    ("feddm --dataset mnist", "data.data_root"),
    ("feddm --dataset mnist --data-root {tmp}", "Use --download"),
    ("feddm --output {tmp}/file/runs", "cannot write {tmp}/file/runs"),
    ("feddm --dp-sigma 1 --dp-ledger {tmp}/file", "cannot use ledger folder {tmp}/file"),
    ("feddm --config {tmp}/absent.toml", "cannot read the config file {tmp}/absent.toml"),
    ("fedavg --preset feddm:table2 --config c.toml", "use either --preset or --config"),
    ("feddm --resume {tmp}", "--method cannot be used with --resume"),
    ("methods show fedpro", "did you mean fedprox"),
    ("privacy plan", "set --epsilon to compute"),
    (f"privacy audit --dp-sigma 1 --canaries {10**30}", "canaries must be at most 1e+07"),
    ("privacy audit --dp-sigma 1 --confidence 1e-320", "confidence must be in [0.5, 1)"),
    ("privacy audit --rounds 1", "Set --dp-sigma, --dp-epsilon, or --run"),
    ("server --insecure --port 99999", "'--port': Input should be less than or equal to"),
    ("sweep {tmp}/none.toml", "cannot read the config file {tmp}/none.toml"),
    ("distill --models ,", "files must name at least one model file"),
    ("distill --models a --method feddm", "run.method=feddm cannot distil without data"),
    ("reproduce", "name a table, such as feddm:table2. Use --list to show all tables"),
    ("reproduce feddm:table9", "unknown preset 'feddm:table9'; did you mean"),
    ("reproduce feddm:table2 --alpha 0.5", "no results for alpha 0.5. Use 0.1, 0.01"),
    (f"reproduce {CELL} --time-budget soon", "--time-budget must be a duration"),
    (f"reproduce {CELL} --set method.nu=1", "unknown setting of fedprox 'nu'"),
    ("runs {tmp}", "there is no finished run in {tmp}"),
    ("privacy report {tmp}", "cannot read the privacy report"),
    ("privacy sign {tmp} --key {tmp}/key", "cannot use {tmp}/key"),
)


@pytest.mark.parametrize(("line", "text"), LINES)
def test_user_errors_print_one_line(
    train: Call, fedsynth: Call, tmp_path: Path, line: str, text: str
) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    run = (train if line.split()[0] in METHODS else fedsynth)(line.format(tmp=tmp_path))
    run.assert_refused(text.format(tmp=tmp_path))
    assert not run.output.exists() or not list(run.output.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_missing_cuda_is_rejected(train: Call) -> None:
    train("feddm --device cuda").assert_refused("finds no CUDA device")


def test_invalid_configs_are_rejected(train: Call, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for toml, text in {
        "[run\n": "is not valid TOML",
        "rounds = 3\n": "must be in a section such as [run]",
        "[metod]\nipc = 1\n": "unknown section 'metod'; did you mean method",
        "[run]\nround = 1\n": "unknown setting of run 'round'; did you mean rounds",
        "[partition]\nalpha = [1]\n": "partition.alpha must be a number, got [1]",
    }.items():
        path.write_text(toml)
        train(f"feddm --config {path}").assert_refused(text)


def test_errors_of_all_settings_are_in_one_message(train: Call) -> None:
    """Regression: each error hides the next one until it is corrected."""
    run = train(
        "feddm --set ipcs=2 --set iterations=x --set model.depth=0 --set partition.alpha=-1"
    )
    for text in ("unknown setting of feddm 'ipcs'", "method.iterations", "model.depth"):
        run.assert_refused(text)
    run.assert_refused("fedsynth: error: partition.alpha must be")
    text = "method.image_lr must be at least 0, got -1.0. Also: method.image_momentum must be"
    train("feddm --set image_lr=-1 --set image_momentum=2").assert_refused(text)


READ = tuple(line.strip() for line in """
    train --config={}
    train --dp-sigma=3 --dp-ledger={}
    train --dp-ledger={}
    train --dp-sigma=3 --sign-key={}
    train --model={}:Net
    runs {}
    distill --models={}
    privacy report {}
    privacy verify {}
    privacy verify x --ledger={}
    privacy verify x --public-key={}
    privacy sign {} --key=x
    privacy sign x --key={}
    privacy repair {}
    privacy carry-over {} north
    privacy audit --run={}
    sweep {}
    student {}
    fidelity {} --features=x
    deploy init A --spec={}
""".strip().splitlines())  # fmt: skip
PATHS = (
    *READ,
    "train --output={}",
    "train --data-root={} --dataset=mnist",
    "distill --models=x --output={}",
)


@pytest.mark.parametrize("line", PATHS)
def test_impossible_and_special_files_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """The home folder of an unknown user, a loop of links, and a name that is too long."""

    def error_of(name: str) -> str:
        with time_limit(20), pytest.raises(CommandFailedError) as caught:
            command(*(word.format(name) for word in line.split()))
        return str(caught.value)

    monkeypatch.chdir(tmp_path)
    assert "home" in error_of("~nobody-of-that-name/x.py")
    assert list(tmp_path.iterdir()) == []  # no folder was created
    error_of("x" * 5000)
    Path("loop").symlink_to("loop")
    error_of("loop")
    for kind in ("pipe", "device", "large") if line in READ else ():
        error_of(str(make_special_file(tmp_path / "x.py", kind)))


def test_non_utf8_names_are_rejected(train: Call, tmp_path: Path) -> None:
    """config.toml is UTF-8 and cannot contain the name."""
    result = train("fedavg --dp-sigma 3 --dp-ledger", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert (result.code, "utf-8" in result.stderr.lower()) == (2, True)
    assert not result.output.exists()


def test_file_system_errors_print_one_line_and_bugs_raise(
    fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_runs = Mock()
    monkeypatch.setattr("fedsynth.results.finished.finished_runs", finished_runs)
    for error in (PermissionError(13, "Permission denied", "/x/y"), OSError(28, "No space left")):
        finished_runs.side_effect = error
        fedsynth("runs").assert_refused(error.args[1])
    # bugs, and errors without a file or with a file of the package
    absent = FileNotFoundError(2, "No", str(PACKAGE / "absent.html"))
    for bug in (OSError(22, "Invalid argument"), absent, KeyError(1)):
        finished_runs.side_effect = bug
        with pytest.raises(type(bug)):
            fedsynth("runs")


RUN = "import sys; sys.argv[0] = 'fedsynth'; from fedsynth.cli.app import main; main()"


@pytest.mark.parametrize(
    ("shell", "code", "text"),
    [
        ("{} > /dev/full", 2, "No space left on device"),
        ("{} | true; exit ${{PIPESTATUS[0]}}", 141, ""),
        ("{} >&-", 0, ""),
    ],
)
def test_broken_streams_print_no_traceback(shell: str, code: int, text: str) -> None:
    """Python does not print a traceback at its shutdown either."""
    line = shell.format(f'"{sys.executable}" -c "{RUN}"')
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (code, 1 if text else 0), run.stderr
    assert text in run.stderr
