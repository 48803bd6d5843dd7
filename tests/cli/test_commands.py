"""The other commands, and the entry point as users call it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth import __version__
from fedsynth.federation.simulated_run import Simulation
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
    assert fedsynth("methods", "feddm").stdout == feddm
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

    monkeypatch.setattr("fedsynth.federation.simulated_run.Simulation.play", interrupt)
    run = fedsynth("train", "--device", "cpu", "--output", str(tmp_path / "out"))
    assert run.code == 130
    assert run.folder.name.endswith("-feddm-digits.incomplete")
    assert run.stderr.endswith(
        f"interrupted after 0 of 3 rounds; to go on: --resume {run.folder}\nfedsynth: interrupted\n"
    )


def heed_signals() -> None:
    """A job that a shell starts in the background ignores SIGINT, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_gets_a_signal_ends_in_order_and_goes_on(
    number: int, code: int, fedsynth: Callable[..., Any], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    options = ["--dp-sigma", "3", "--rounds", "400", "--set", "iterations=2", "--subset", "0.2"]
    with (tmp_path / "stderr").open("w") as stderr:
        run = subprocess.Popen(
            [SCRIPT, "train", "--device", "cpu", "--output", str(output), *options],
            stderr=stderr,
            stdout=subprocess.DEVNULL,
            preexec_fn=heed_signals,
        )
        said = tmp_path / "stderr"
        until = time.monotonic() + 120
        try:
            while "round 2/400" not in said.read_text() and time.monotonic() < until:
                time.sleep(0.05)
            run.send_signal(number)
            assert run.wait(60) == code
        finally:
            run.kill()
    (folder,) = output.iterdir()
    assert "of 400 rounds; spent: ε = " in said.read_text()
    assert f"to go on: --resume {folder}" in said.read_text()
    refused = fedsynth("train", "--resume", str(folder), "--rounds", "3")
    assert refused.code == 2
    assert "--rounds cannot be given beside it" in refused.stderr
    gone = fedsynth("train", "--resume", str(tmp_path))
    assert gone.code == 2
    assert "config.toml" in gone.stderr


def test_resume_ends_a_run(
    fedsynth: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same table and the same folder as any run, and a report that verifies."""
    played = Simulation.play

    def stop(self: Simulation, context: Any) -> Any:
        if context.round == 2:
            raise KeyboardInterrupt
        return played(self, context)

    small = ["--set", "iterations=2", "--subset", "0.2", "--dp-sigma", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "play", stop)
        cut = fedsynth("train", "--device", "cpu", "--output", str(tmp_path / "out"), *small)
    assert cut.code == 130
    ended = fedsynth("train", "--resume", str(cut.folder), "--device", "cpu")
    assert ended.code == 0
    assert "the run goes on after 1 of 3 rounds" in ended.stderr
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.suffix != ".incomplete"
    assert fedsynth("privacy", "verify", str(folder)).code == 0
    again = fedsynth("train", "--resume", str(folder))
    assert again.code == 2
    assert "has finished" in again.stderr
