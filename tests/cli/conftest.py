"""Runs the command line in this process, on the digits, with settings of a fraction of a second."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsynth.cli.app import app

LOCAL = "--set local_epochs=1 --set batch=128"
SMALL = {
    "feddm": "--set iterations=1 --set server_epochs=1 --ipc 2",
    "real": "--set server_epochs=1 --ipc 2",
}


@dataclass(frozen=True)
class Outcome:
    """The result of one call of `fedsynth`; `output` is its --output."""

    code: int
    stdout: str
    stderr: str
    output: Path

    @property
    def folder(self) -> Path:
        """The only run folder."""
        (folder,) = self.output.iterdir()
        return folder

    @property
    def summary(self) -> Any:
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def ok(self) -> Outcome:
        """This outcome, of a command that succeeded."""
        assert self.code == 0, self.stderr
        return self

    def assert_refused(self, text: str) -> None:
        """Asserts exit code 2 and one error line on stderr that contains `text`."""
        assert self.code == 2, self.stdout + self.stderr
        assert self.stderr.startswith("fedsynth: error: ")
        assert (self.stderr[-1], self.stderr.count("\n")) == ("\n", 1), self.stderr
        assert text in self.stderr
        assert self.stdout == ""


Call = Callable[..., Any]


def call(line: str, *more: str, output: Path) -> Outcome:
    """Runs the arguments of a line, and more arguments verbatim."""
    # without catch_exceptions a traceback fails the test as itself
    runner = CliRunner(env={"FEDSYNTH_DATA": None, "COLUMNS": "160"})
    result = runner.invoke(app, [*shlex.split(line), *more], catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout, result.stderr, output)


def call_train(output: Path, line: str, *more: str) -> Outcome:
    method, _, options = line.partition(" ")
    tiny = f"--device cpu --clients 2 --rounds 1 --width 8 {SMALL.get(method, LOCAL)}"
    arguments = f"train --output '{output}' --method {method} {tiny} {options}"
    return call(arguments, *more, output=output)


@pytest.fixture
def fedsynth(tmp_path: Path) -> Call:
    """`fedsynth("train --dry-run", "more", "arguments")`, in the current working directory."""
    return lambda line="", *more: call(line, *more, output=tmp_path / "out")


@pytest.fixture
def train(tmp_path: Path) -> Call:
    """`train("feddm --rounds 2", "more", "arguments")`: a tiny run into `tmp_path / "out"`; later
    options override the tiny ones."""
    return lambda line, *more: call_train(tmp_path / "out", line, *more)
