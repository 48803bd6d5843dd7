"""Tests that a simulation on several ranks gives the results of one process, and reports faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import FedAvg
from fedsynth.cli.app import app
from fedsynth.federation.links import SECONDS
from fedsynth.federation.ranks import owners
from fedsynth.privacy import read_ledger
from fedsynth.results.verification import verify_run
from tests.simulation import rank_program

ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "tests.simulation.rank_program")
TRAIN = ("-m", "fedsynth", "train", "--method", "fedavg", "--model", "linear")
LIMIT = 300.0  # seconds for all ranks, also on a busy machine


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started(
    ranks: int, *arguments: str, size: int = 0, port: int = 0, **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a program at several ranks, as torchrun does, and kills what is left of it."""
    world = {"WORLD_SIZE": str(size or ranks), "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(port or free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", SECONDS: "120", **world, **more}
    processes = []
    try:
        for number in range(ranks):
            variables = {**environment, "RANK": str(number), "LOCAL_RANK": str(number)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=variables,
                    cwd=ROOT,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Waits for all ranks, and returns the exit code, stdout and stderr of each."""
    results = []
    for process in processes:
        out, err = process.communicate(timeout=LIMIT)
        results.append((process.returncode, out, err))
    return results


def values(folder: Path, name: str, rank: int = 0) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one process, which also leaves an interrupted run to two ranks."""
    folder = tmp_path_factory.mktemp("alone")
    rank_program.main("equal,interrupted", folder)
    rank_program.main("resumed", folder / "whole")
    return folder


@pytest.fixture(scope="module")
def two(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    (alone / "interrupted").rename(folder / "interrupted")
    with started(2, *PROGRAM, "equal,resumed,interrupted,private,failing", str(folder)) as both:
        for code, _, err in ended(both):
            assert code == 0, err
    return folder


@pytest.mark.parametrize("name", rank_program.EQUAL)
def test_two_ranks_give_equal_results(name: str, alone: Path, two: Path) -> None:
    assert values(two, "equal")[name] == values(alone, "equal")[name]


@pytest.mark.parametrize("name", rank_program.CLOSE)
def test_only_last_bits_depend_on_who_shares_a_pass(name: str, alone: Path, two: Path) -> None:
    expected = torch.tensor(values(alone, "equal")[name])
    torch.testing.assert_close(
        torch.tensor(values(two, "equal")[name]), expected, rtol=0, atol=1e-6
    )


@pytest.mark.slow
def test_four_ranks_give_equal_results(alone: Path, tmp_path: Path) -> None:
    with started(4, *PROGRAM, "equal", str(tmp_path)) as processes:
        assert [code for code, _, _ in ended(processes)] == [0] * 4
    for name in rank_program.EQUAL:
        assert values(tmp_path, "equal")[name] == values(alone, "equal")[name]


def test_runs_resume_with_another_number_of_ranks(alone: Path, two: Path) -> None:
    whole = values(alone / "whole", "resumed")
    assert values(two, "resumed") == whole
    rank_program.main("resumed", two)
    assert values(two, "resumed") == whole


def test_each_client_is_charged_once_and_no_noise_repeats(two: Path, tmp_path: Path) -> None:
    released = values(two, "private")
    assert len(set(released["uploads"])) == 4
    rank_program.main("private", tmp_path)
    for client in range(4):
        name = f"client-{client:03d}.jsonl"
        charged = read_ledger(two / "private" / "ledgers" / name).releases
        assert charged == read_ledger(tmp_path / "private" / "ledgers" / name).releases
    assert not verify_run(Path(released["folder"])).problems
    assert values(two, "private", rank=1)["metrics"] == released["metrics"]


def test_equal_keys_at_two_ranks_are_detected(tmp_path: Path) -> None:
    with started(2, *PROGRAM, "private", str(tmp_path), EQUAL_KEYS="1") as both:
        ended(both)
    assert len(set(values(tmp_path, "private")["uploads"])) < 4


def test_rank_0_reports_the_failures_of_other_ranks(two: Path) -> None:
    errors = values(two, "failing")
    assert errors["client"][0] == "training.diverged"
    assert re.fullmatch(
        r"rank 1, one of the clients \[[0-3]\]: the loss is not finite", errors["client"][1]
    )
    assert errors["version"][0] == errors["settings"][0] == "ranks.differ"
    assert "rank 1 has fedsynth 0.0.1, but rank 0 has 0.0.2" in errors["version"][1]
    assert errors["diverged"][0] == "training.diverged"
    assert "nothing" not in errors
    others = values(two, "failing", rank=1)
    assert others.keys() == errors.keys()
    assert others["version"][0] == "ranks.stopped"


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGSTOP")
def test_a_hanging_rank_is_noticed(tmp_path: Path) -> None:
    with started(2, *PROGRAM, "hanging", str(tmp_path), **{SECONDS: "8"}) as (first, _):
        first.communicate(timeout=LIMIT)
    code, text = values(tmp_path, "hanging")["error"]
    assert code == "ranks.silent"
    assert "rank 1 has given no sign for 8 seconds" in text


def errors_of(err: str) -> list[str]:
    return [line for line in err.splitlines() if "error" in line.lower()]


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_killed_rank_ends_the_run_with_one_line(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    with started(2, *TRAIN, *many) as both:
        assert both[0].stderr is not None
        for line in both[0].stderr:
            if line.startswith("round 2/"):
                break
        both[1].send_signal(signal.SIGKILL)
        code, out, err = ended(both)[0]
    assert (code, out) == (2, "")
    (line,) = errors_of(err)
    assert line.startswith("fedsynth: error: rank 1 has ended unexpectedly")
    assert "To resume: --resume" in err


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_killed_server_is_reported_by_one_rank(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    with started(2, *TRAIN, *many) as both:
        assert both[0].stderr is not None
        for line in both[0].stderr:
            if line.startswith("round 2/"):
                break
        both[0].send_signal(signal.SIGKILL)
        _, (code, out, err) = ended(both)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("fedsynth: error: rank 0 has ended unexpectedly")


def test_a_missing_rank_and_a_port_that_is_taken_are_reported() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        with (
            started(1, *TRAIN, size=2, port=taken) as busy,
            started(1, *TRAIN, size=2, **{SECONDS: "3"}) as lonely,
        ):
            results = ended(busy) + ended(lonely)
    for code, out, err in results:
        assert (code, out) == (2, "")
        (line,) = errors_of(err)
        assert line.startswith("fedsynth: error: rank 0 cannot connect all 2 ranks")
    assert "EADDRINUSE" in results[0][2]


def test_torchrun_starts_a_run(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = [*launcher, *TRAIN, "--rounds", "2", "--output", str(tmp_path)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert run.stdout.count("run folder:") == 1
    assert [line[:10] for line in run.stderr.splitlines() if "accuracy" in line] == [
        "round 1/2 ", "round 2/2 ",
    ]  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 1


def test_other_commands_run_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        app(["runs"])
    assert "runs runs in one process" in capsys.readouterr().err


def test_clients_are_shared_out_by_cost() -> None:
    sizes = {0: 100, 1: 30, 2: 40, 3: 20, 4: 0}
    context: Any = None
    assert owners(FedAvg(batch=10), sizes, context, 2) == {0: 0, 2: 1, 1: 1, 3: 1, 4: 1}
    steps = owners(FedAvg(local_steps=5, local_epochs=1), sizes, context, 2)
    assert sorted(steps.values()) == [0, 0, 0, 1, 1]
