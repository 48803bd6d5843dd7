"""Files and folders of options: each gives a result, or one line and exit code 2, without blocking on
a pipe or reading a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsynth.cli.application import PACKAGE
from tests.cli.conftest import Call
from tests.fuzz.mutations import CommandFailedError, command, time_limit
from tests.special_files import make_special_file

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


def error_of(line: str, name: str) -> str:
    with time_limit(20), pytest.raises(CommandFailedError) as caught:
        command(*(word.format(name) for word in line.split()))
    return str(caught.value)


@pytest.fixture(autouse=True)
def inside_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", PATHS)
def test_impossible_file_names_are_rejected(tmp_path: Path, line: str) -> None:
    """The home folder of an unknown user, a loop of links, and a name that is too long."""
    assert "home" in error_of(line, "~nobody-of-that-name/x.py")
    assert list(tmp_path.iterdir()) == []  # no folder was created
    error_of(line, "x" * 5000)
    Path("loop").symlink_to("loop")
    error_of(line, "loop")


@pytest.mark.parametrize("line", READ)
def test_special_files_are_rejected(tmp_path: Path, line: str) -> None:
    for kind in ("pipe", "device", "large"):
        error_of(line, str(make_special_file(tmp_path / "x.py", kind)))


def test_non_utf8_names_are_rejected(train: Call, tmp_path: Path) -> None:
    """config.toml is UTF-8 and cannot contain the name."""
    result = train("fedavg --dp-sigma 3 --dp-ledger", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert (result.code, "utf-8" in result.stderr.lower()) == (2, True)
    assert not result.output.exists()


@pytest.mark.parametrize(
    ("error", "one_line"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), True),
        (OSError(28, "No space left"), True),
        # bugs, and errors without a file or with a file of the package
        (OSError(22, "Invalid argument"), False),
        (FileNotFoundError(2, "No", str(PACKAGE / "absent.html")), False),
        (KeyError(1), False),
    ],
)
def test_file_system_errors_print_one_line_and_bugs_raise(
    error: Exception, one_line: bool, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise error

    monkeypatch.setattr("fedsynth.results.finished.finished_runs", broken)
    if one_line:
        fedsynth("runs").assert_refused(str(error.args[1]))
    else:
        with pytest.raises(type(error)):
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
