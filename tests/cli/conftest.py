"""Runs the command line in process, on the embedded digits, with settings so small that a run takes
a fraction of a second."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.shared.local import TrainsLocally

_LOCAL = "--set local_epochs=1 --set batch=128"
_DISTIL = f"{_LOCAL} --set server_epochs=1 --set generator_steps=1 --set generator_width=4"
SMALL: dict[str, str] = {
    **{name: _LOCAL for name in METHODS if issubclass(method_class(name), TrainsLocally)},
    "fedgen": f"{_LOCAL} --set generator_steps=2",
    "fedbn": f"{_LOCAL} --norm batch",
    "fedkf": f"{_LOCAL} --set generator_width=4 --set generator_batch=16",
    "feddf": f"{_LOCAL} --set server_steps=2 --set proxy=noise",
    "dense": _DISTIL,
    "fedhydra": f"{_DISTIL} --set stratification_steps=2 --set stratification_batch=4",
    "feddm": "--set iterations=1 --set server_epochs=1 --ipc 2",
    "fedaf": "--set iterations=1 --set server_epochs=1 --ipc 2",
    "fedsum": "--set networks=2 --set iterations=2 --set server_epochs=1",
    "real": "--set server_epochs=1 --ipc 2",
    "fedstats": "--set features=pixels",
}


@dataclass(frozen=True)
class Outcome:
    """What one call of `fedsynth` left; `output` is its --output."""

    code: int
    stdout: str
    stderr: str
    output: Path

    @property
    def folder(self) -> Path:
        """The one run folder."""
        (folder,) = self.output.iterdir()
        return folder


Train = Callable[..., Outcome]


def call(line: str, *more: str, output: Path) -> Outcome:
    """Runs the words of a line, and more words as they are."""
    # without catch_exceptions a traceback fails the test as itself
    runner = CliRunner(env={"FEDSYNTH_DATA": None, "COLUMNS": "160"})
    result = runner.invoke(app, [*shlex.split(line), *more], catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout, result.stderr, output)


def call_train(output: Path, line: str, *more: str) -> Outcome:
    method, _, options = line.partition(" ")
    tiny = f"--device cpu --clients 2 --rounds 1 --width 8 {SMALL[method]}"
    words = f"train --output '{output}' --method {method} {tiny} {options}"
    return call(words, *more, output=output)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make such tiny networks a hundred times slower where another
    process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> dict[str, str]:
    """Options with which each method takes a fraction of a second."""
    return SMALL


@pytest.fixture
def fedsynth(tmp_path: Path) -> Callable[..., Outcome]:
    """`fedsynth("train --dry-run", "more", "words")`; the working directory is not touched."""
    return lambda line="", *more: call(line, *more, output=tmp_path / "out")


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train("feddm --rounds 2", "more", "words")`: a tiny run into `tmp_path / "out"`; later
    options win over the tiny ones."""
    return lambda line, *more: call_train(tmp_path / "out", line, *more)


@pytest.fixture(scope="module")
def train_into() -> Train:
    """`train_into(folder, "feddm --rounds 2")`, for fixtures that live longer than a test."""
    return call_train
