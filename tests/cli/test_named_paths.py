"""Files and folders that options name, and what the file system makes of them: a result, or one
line and exit code 2; no pipe is waited for, no device read."""

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
    deploy init A --spec={}
""".strip().splitlines())  # fmt: skip
PATHS = (
    *READ,
    "train --output={}",
    "train --data-root={} --dataset=mnist",
    "distill --models=x --output={}",
)


def refused(line: str, name: str) -> str:
    with time_limit(20), pytest.raises(CommandFailedError) as caught:
        command(*(word.format(name) for word in line.split()))
    return str(caught.value)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", PATHS)
def test_names_that_no_file_can_have(tmp_path: Path, line: str) -> None:
    """The home of nobody, a loop of links, and a name that is too long."""
    assert "home" in refused(line, "~nobody-of-that-name/x.py")
    assert list(tmp_path.iterdir()) == []  # no folder of that name
    refused(line, "x" * 5000)
    Path("loop").symlink_to("loop")
    refused(line, "loop")


@pytest.mark.parametrize("line", READ)
def test_special_files_are_refused(tmp_path: Path, line: str) -> None:
    for kind in ("pipe", "device", "large"):
        refused(line, str(make_special_file(tmp_path / "x.py", kind)))


def test_a_name_that_is_not_utf8(train: Call, tmp_path: Path) -> None:
    """config.toml is UTF-8, and would have to say it."""
    done = train("fedavg --dp-sigma 3 --dp-ledger", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert (done.code, "utf-8" in done.stderr.lower()) == (2, True)
    assert not done.output.exists()


@pytest.mark.parametrize(
    ("error", "one_line"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), True),
        (OSError(28, "No space left"), True),
        # bugs, and errors that no file is the cause of, or a file of the package
        (OSError(22, "Invalid argument"), False),
        (FileNotFoundError(2, "No", str(PACKAGE / "absent.html")), False),
        (KeyError(1), False),
    ],
)
def test_an_error_of_the_file_system_is_one_line_and_a_bug_keeps_its_traceback(
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
def test_broken_streams(shell: str, code: int, text: str) -> None:
    """Catches: tracebacks, also those that Python prints when it shuts down."""
    line = shell.format(f'"{sys.executable}" -c "{RUN}"')
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1 if text else 0), done.stderr
    assert text in done.stderr
