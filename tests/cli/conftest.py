"""Runs the command line in process, on the embedded digits, with settings so small that a run takes
a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.shared.local import TrainsLocally

_LOCAL = ("--set", "local_epochs=1", "--set", "batch=128")
_DISTIL = (
    *_LOCAL,
    "--set",
    "server_epochs=1",
    "--set",
    "generator_steps=1",
    "--set",
    "generator_width=4",
)
SMALL: dict[str, tuple[str, ...]] = {
    **{name: _LOCAL for name in METHODS if issubclass(method_class(name), TrainsLocally)},
    "fedgen": (*_LOCAL, "--set", "generator_steps=2"),
    "fedbn": (*_LOCAL, "--norm", "batch"),
    "fedkf": (*_LOCAL, "--set", "generator_width=4", "--set", "generator_batch=16"),
    "feddf": (*_LOCAL, "--set", "server_steps=2", "--set", "proxy=noise"),
    "dense": _DISTIL,
    "fedhydra": (*_DISTIL, "--set", "stratification_steps=2", "--set", "stratification_batch=4"),
    "feddm": ("--set", "iterations=1", "--set", "server_epochs=1", "--ipc", "2"),
    "fedaf": ("--set", "iterations=1", "--set", "server_epochs=1", "--ipc", "2"),
    "fedsum": ("--set", "networks=2", "--set", "iterations=2", "--set", "server_epochs=1"),
    "real": ("--set", "server_epochs=1", "--ipc", "2"),
    "fedstats": ("--set", "features=pixels"),
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


def call(*args: str, output: Path) -> Outcome:
    # without catch_exceptions a traceback fails the test as itself
    result = CliRunner(env={"FEDSYNTH_DATA": None}).invoke(app, args, catch_exceptions=False)
    return Outcome(result.exit_code, result.stdout, result.stderr, output)


def call_train(output: Path, method: str, *args: str) -> Outcome:
    tiny = ("--device", "cpu", "--clients", "2", "--rounds", "1", "--width", "8", *SMALL[method])
    return call("train", "--output", str(output), "--method", method, *tiny, *args, output=output)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make such tiny networks a hundred times slower where another
    process has a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> dict[str, tuple[str, ...]]:
    """Options with which each method takes a fraction of a second."""
    return SMALL


@pytest.fixture
def fedsynth(tmp_path: Path) -> Callable[..., Outcome]:
    """`fedsynth(*args)`, as typed; the working directory and run folders are not touched."""
    return lambda *args: call(*args, output=tmp_path / "out")


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train(method, *args)`: a tiny run into `tmp_path / "out"`; later options win over the tiny
    ones."""
    return lambda method, *args: call_train(tmp_path / "out", method, *args)


@pytest.fixture(scope="module")
def train_into() -> Train:
    """`train_into(folder, method, *args)`, for fixtures that live longer than a test."""
    return call_train
