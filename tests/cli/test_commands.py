"""The other commands, the entry point as users call it, and runs that are stopped and resumed."""

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

from fedsynth.methods import METHODS
from fedsynth.simulation.run import Simulation

Call = Callable[..., Any]
SCRIPT = Path(sysconfig.get_path("scripts")) / "fedsynth"


def test_partition_prints_the_examples_of_each_client(
    fedsynth: Call, train: Call, tmp_path: Path
) -> None:
    picture = tmp_path / "who.png"
    shown = fedsynth(f"partition --clients 3 --picture {picture}")
    assert shown.code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["client", "examples", *"0123456789"]
    assert sum(int(line.split()[1]) for line in lines[1:4]) == 1438
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert shown.stdout != fedsynth("partition --clients 3 --seed 1").stdout
    table = (train("real").folder / "simulation_only" / "partition.txt").read_text(encoding="utf-8")
    assert fedsynth("partition --clients 2").stdout.startswith(table.rstrip())


def test_methods_lists_each_with_a_line_and_show_explains_its_settings(fedsynth: Call) -> None:
    listed = fedsynth("methods")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == sorted(METHODS)
    feddm = fedsynth("methods show feddm").stdout
    for text in (
        "ipc = 10",
        "with differential privacy: residual, gradient, features, paper",
        "images: released",
        "arXiv 2207.09653",
    ):
        assert text in feddm
    first = "uploads in a first exchange (FeatureSums):\n  sums: released\n  counts: released"
    assert first in fedsynth("methods show fedfm").stdout
    assert "refused: the clients send real images" in fedsynth("methods show real").stdout
    for name in METHODS:
        settings, explained = fedsynth(f"methods show {name}").stdout.split("\n\n", 2)[1:]
        assert ">>>" not in explained  # examples are for who writes Python
        for line in settings.splitlines()[1:]:
            assert re.search(rf"\b{line.split()[0]}\b", explained), (name, line)
    wrong = fedsynth("methods show fedpro")
    assert (wrong.code, "did you mean fedprox" in wrong.stderr) == (2, True)


def test_the_installed_script_keeps_to_one_line_and_to_an_old_locale(tmp_path: Path) -> None:
    def script(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, **environment}
        return subprocess.run([SCRIPT, *words], capture_output=True, cwd=tmp_path, env=env)

    wrong = script("train", "--bogus")
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert wrong.stderr.startswith(b"fedsynth: error: No such option: --bogus")
    assert wrong.stderr.count(b"\n") == 1
    ascii_only = script("train", "--help", PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert b"--dp-epsilon" in ascii_only.stdout


def heed_signals() -> None:
    """A job that a shell starts in the background ignores SIGINT, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_gets_a_signal_ends_in_order(number: int, code: int, tmp_path: Path) -> None:
    output, said = tmp_path / "out", tmp_path / "stderr"
    options = [
        "--dp-sigma",
        "3",
        "--rounds",
        "400",
        "--set",
        "iterations=2",
        "--subset",
        "0.2",
        "--device",
        "cpu",
    ]
    with said.open("w") as stderr:
        run = subprocess.Popen(
            [SCRIPT, "train", "--output", str(output), *options],
            stderr=stderr,
            stdout=subprocess.DEVNULL,
            preexec_fn=heed_signals,
        )
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
    assert f"to resume: --resume {folder}" in said.read_text()


def test_resume_ends_a_run(fedsynth: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same table and the same folder as any run, and a report that verifies."""
    played = Simulation.play

    def stop(self: Simulation, context: Any) -> Any:
        if context.round == 2:
            raise KeyboardInterrupt
        return played(self, context)

    small = f"--device cpu --output {tmp_path / 'out'} --set iterations=2 --subset 0.2"
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "play", stop)
        cut = fedsynth(f"train {small} --dp-sigma 3")
    assert cut.code == 130
    refused = fedsynth(f"train --resume {cut.folder} --rounds 3")
    assert (refused.code, "leave out --rounds" in refused.stderr) == (2, True)
    no_run = fedsynth(f"train --resume {tmp_path}")
    assert (no_run.code, "config.toml" in no_run.stderr) == (2, True)
    ended = fedsynth(f"train --resume {cut.folder} --device cpu")
    assert ended.code == 0
    assert "the run resumes after 1 of 3 rounds" in ended.stderr
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.suffix != ".incomplete"
    assert fedsynth(f"privacy verify {folder}").code == 0
    again = fedsynth(f"train --resume {folder}")
    assert (again.code, "has finished" in again.stderr) == (2, True)
