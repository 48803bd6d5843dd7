"""The other commands, and the entry point as users call it."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth import __version__
from fedsynth.methods import METHODS

SCRIPT = Path(sysconfig.get_path("scripts")) / "fedsynth"


def test_partition_prints_who_has_what(fedsynth: Callable[..., Any], tmp_path: Path) -> None:
    picture = tmp_path / "who.png"
    shown = fedsynth("partition", "--clients", "3", "--picture", str(picture))
    assert shown.code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["client", "examples", *"0123456789"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert sum(int(line.split()[1]) for line in lines[1:4]) == 1438
    assert "floats a round" in lines[-1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert shown.stdout == fedsynth("partition", "--clients", "3").stdout
    assert shown.stdout != fedsynth("partition", "--clients", "3", "--seed", "1").stdout


def test_partition_shows_the_partition_of_a_run(
    fedsynth: Callable[..., Any], train: Callable[..., Any]
) -> None:
    table = (train("real").folder / "simulation_only" / "partition.txt").read_text(encoding="utf-8")
    assert fedsynth("partition", "--clients", "2").stdout.startswith(table.rstrip())
    other = fedsynth(
        "partition", "--clients", "2", "--set", "run.method=fedavg", "--set", "data.dataset=digits"
    )
    assert (other.code, "FedDM" in other.stdout) == (0, False)


def test_methods_lists_each_with_a_line_and_show_says_all(fedsynth: Callable[..., Any]) -> None:
    listed = fedsynth("methods")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == sorted(METHODS)
    feddm = fedsynth("methods", "show", "feddm").stdout
    assert "ipc = 10" in feddm
    assert "with differential privacy: residual, gradient, features, paper" in feddm
    assert "images: released" in feddm
    assert "arXiv 2207.09653" in feddm
    fedfm = fedsynth("methods", "show", "fedfm").stdout
    first = "uploads in a first exchange (FeatureSums):\n  sums: released\n  counts: released"
    assert first in fedfm
    assert "refused: it sends clients' own images" in fedsynth("methods", "show", "real").stdout
    for name in METHODS:  # what a setting is, and not only that it is there
        settings, explained = fedsynth("methods", "show", name).stdout.split("\n\n", 2)[1:]
        assert ">>>" not in explained  # examples are for who writes Python
        for line in settings.splitlines()[1:]:
            assert re.search(rf"\b{line.split()[0]}\b", explained), (name, line)
    wrong = fedsynth("methods", "show", "fedpro")
    assert (wrong.code, "did you mean fedprox" in wrong.stderr) == (2, True)


def test_version_and_help(fedsynth: Callable[..., Any]) -> None:
    assert fedsynth("--version").stdout.strip() == __version__
    bare = fedsynth()
    assert bare.code == 0
    assert "partition" in bare.stdout


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (
            ["train", "--method", "feddmm"],
            2,
            b"fedsynth: error: unknown method 'feddmm'; did you mean feddm or fedfm or feddf?\n",
        ),
        (["train", "--bogus"], 2, b"fedsynth: error: No such option: --bogus"),
    ],
)
def test_the_installed_script_keeps_to_one_line(
    args: list[str], code: int, text: bytes, tmp_path: Path
) -> None:
    done = subprocess.run(
        [SCRIPT, *args], capture_output=True, check=False, timeout=120, cwd=tmp_path
    )
    assert done.returncode == code
    assert done.stderr.startswith(text)
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""
    assert not list(tmp_path.iterdir())


def test_an_old_locale_costs_letters_and_not_the_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [SCRIPT, "train", "--help"], capture_output=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert b"--dp-epsilon" in done.stdout


def test_an_interrupted_run_says_so(
    fedsynth: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsynth.federation.simulation.Simulation.play", interrupt)
    run = fedsynth("train", "--device", "cpu", "--output", str(tmp_path / "out"))
    assert run.code == 130
    assert run.stderr.endswith(
        "fedsynth: interrupted; the run folder keeps its .incomplete ending\n"
    )
    assert run.folder.name.endswith("-feddm-digits.incomplete")
