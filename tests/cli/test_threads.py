"""CPU threads on a machine with other work: how they wait, how many there are, and that a run is
repeated with its own number."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth.cli import app, process
from fedsynth.cli.process import CpuUse, cpu_quota, fewer_threads
from fedsynth.simulation.run import Simulation
from tests.interrupted import interrupted_in_round

CPUS = 4
BEGAN = CpuUse(at=100.0, machine=1000.0, process=1.0)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(CPUS)))
    monkeypatch.setattr(process, "cpu_quota", lambda: float("inf"))


def later(others: float, own: float = 1.0) -> CpuUse:
    """Ten seconds after `BEGAN`, in which these CPUs were used."""
    return CpuUse(110.0, 1000.0 + 10 * (others + own), 1.0 + 10 * own)


@pytest.mark.parametrize(
    ("others", "usual", "expected"),
    [
        (0.0, 4, None),
        (0.4, 4, None),  # less than half a CPU is no other program
        (3.2, 4, 1),
        (9.0, 4, 1),  # never none
        (2.0, 2, None),  # there is place for two
    ],
)
def test_other_programs_leave_fewer_threads(
    others: float, usual: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuUse, "now", classmethod(lambda cls: later(others)))
    assert fewer_threads(BEGAN, usual) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # the user's choice
    assert fewer_threads(BEGAN, usual) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({}, float("inf")),
    ],
)
def test_quotas_of_containers(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected


def test_busy_seconds_are_of_this_process_cpus_and_without_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 10})
    ticks = os.sysconf("SC_CLK_TCK")
    rows = {"cpu": 9, "cpu0": 9, "cpu1": ticks, "cpu10": 2 * ticks}
    lines = [f"{name} {t} 0 {t} 5000 7000 0 0 0 {t} 0" for name, t in rows.items()]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 5 6"]))
    monkeypatch.setattr(process, "CPU_TIMES", tmp_path / "stat")
    measured = CpuUse.now()
    assert measured is not None
    assert measured.machine == 6.0


@pytest.mark.parametrize("given", [None, "active"])
def test_threads_wait_passively_by_default(given: str | None) -> None:
    """The policy is set before torch is imported, which reads it then."""
    code = (
        "import os, sys; from fedsynth.cli import app as a;"
        "a.app = lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); a.main()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout.split() == [given or "PASSIVE", "False"]


def test_a_run_keeps_its_number_of_threads(
    train: Callable[..., Any], fedsynth: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a resumed run, or one from its config.toml, that rounds otherwise."""
    seen: list[int] = []
    play = Simulation.play

    def counted(self: Simulation, context: Any) -> Any:
        seen.append(torch.get_num_threads())
        return play(self, context)

    monkeypatch.setattr(Simulation, "play", counted)
    monkeypatch.setattr(app, "BEGAN", [BEGAN])
    monkeypatch.setattr(CpuUse, "now", classmethod(lambda cls: later(3.0)))
    torch.set_num_threads(2)
    with interrupted_in_round(2, monkeypatch):
        cut = train("fedavg --rounds 2")
    assert cut.stderr.count("note: using 1 of 2 CPU threads, because other programs") == 1
    assert tomllib.loads((cut.folder / "config.toml").read_text())["run"]["threads"] == 1
    monkeypatch.setattr(CpuUse, "now", classmethod(lambda cls: later(2.0)))
    ended = fedsynth(f"train --resume {cut.folder}")
    again = fedsynth(f"train --config {ended.output / cut.folder.stem} --output {cut.output / '2'}")
    assert (ended.code, again.code) == (0, 0), ended.stderr + again.stderr
    assert "CPU threads" not in ended.stderr + again.stderr
    chosen = train("fedavg --threads 2")
    assert seen == [1, 1, 1, 1, 2]
    assert torch.get_num_threads() == 2  # of this process: unchanged
    assert "CPU threads" not in chosen.stderr
    assert "run.threads must be between 1 and" in train("fedavg --threads 0").stderr
