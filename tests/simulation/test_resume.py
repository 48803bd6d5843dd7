"""Tests that killed and interrupted runs, and runs stopped by a full disk, resume identically."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from safetensors.torch import load_file

from fedsynth import RunResult, load_dataset, resolve, simulate
from fedsynth.errors import CheckpointError, FedsynthError, OutputError
from fedsynth.files import write_whole
from fedsynth.methods import METHODS
from fedsynth.privacy import read_ledger
from fedsynth.results import checkpoint as checkpoints
from fedsynth.results.checkpoint import POINTER, Checkpoint, CheckpointFolder, LoopCheckpoints
from fedsynth.results.later_reports import unfinished_report
from fedsynth.results.run_folder import RESUMED, RunFolder
from fedsynth.results.verification import verify_run
from fedsynth.simulation import run as simulated_run
from tests.quick_runs import NoteRecorder, by_family, folder_of, quick_sections, read_rows, verified
from tests.raising import raises

Sections = dict[str, dict[str, Any]]
FORK = multiprocessing.get_context("fork")
ONE_SHOT = ("dense", "feddf", "fedhydra", "solo")
PRIVATE = {"noise_multiplier": 1.0}


def sections(method: str, /, **more: dict[str, Any]) -> Sections:
    """Returns the settings of three rounds with three of four clients in each."""
    rounds = {"rounds": 1} if method in ONE_SHOT else {"rounds": 3, "participation": 0.75}
    run = {**rounds, **more.pop("run", {})}
    return quick_sections(method, run=run, partition={"clients": 4}, **more)


def run(settings: Sections, output: Path, **values: Any) -> RunResult:
    return simulate(resolve(settings), output=output, **values)


def resume(settings: Sections, output: Path, **values: Any) -> RunResult:
    return simulate(resolve(settings), resume=unfinished(output), **values)


def unfinished(output: Path) -> Path:
    (folder,) = output.glob("*.incomplete")
    return folder


@contextmanager
def interrupted(
    owner: type, name: str, when: Callable[..., bool], replacing: bool = False
) -> Iterator[None]:
    """Interrupts a run, as Ctrl-C does, right after the first call of a method for whose arguments
    `when` holds, or in place of that call."""
    original = getattr(owner, name)

    def stopping(self: Any, *arguments: Any) -> None:
        stops = replacing and when(*arguments)
        if not stops:
            original(self, *arguments)
        if stops or when(*arguments):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            yield


def interrupted_at(round: int, *, replacing: bool = False) -> Any:
    """Interrupts a run right after the checkpoint of a round, or in its place."""
    return interrupted(CheckpointFolder, "write", lambda c, *_: c.round == round, replacing)


def interrupt(settings: Sections, output: Path, **values: Any) -> Path:
    with interrupted_at(min(2, settings["run"]["rounds"])):
        run(settings, output, **values)
    return unfinished(output)


def assert_same(first: RunResult, second: RunResult) -> None:
    """Compares two runs bit for bit, except for times."""
    assert timeless(first.metrics) == timeless(second.metrics)
    folders = folder_of(first), folder_of(second)
    assert timeless(read_rows(folders[0])) == timeless(read_rows(folders[1]))
    assert first.accuracy == second.accuracy
    for file in folders[0].glob("*.safetensors"):
        tensors = load_file(file), load_file(folders[1] / file.name)
        torch.testing.assert_close(*tensors, atol=0, rtol=0)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("method", by_family(METHODS, ("scaffold", "feddm", "fedkf")))
def test_resumed_run_equals_uninterrupted_run(method: str, tmp_path: Path) -> None:
    settings = sections(method)
    uninterrupted = run(settings, tmp_path / "whole")
    interrupt(settings, tmp_path / "cut")
    result = resume(settings, tmp_path / "cut")
    assert_same(uninterrupted, result)
    assert not list(folder_of(result).rglob("*checkpoint*"))
    assert not (folder_of(result) / ".lock").exists()


def run_in_fork(settings: Sections, output: Path, patch: Callable[[], None]) -> None:
    """Starts or resumes the run in `output`, in a forked process."""
    patch()
    unfinished_folder = next(output.glob("*.incomplete"), None)
    simulate(resolve(settings), output=output, resume=unfinished_folder)
    os._exit(0)


def run_and_kill(settings: Sections, output: Path, patch: Callable[[], None]) -> None:
    """Runs the settings in a process that the patch kills."""
    output.mkdir(exist_ok=True)
    process = FORK.Process(target=run_in_fork, args=(settings, output, patch))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_runs_killed_while_writing_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills happen before and after renames, and with half of a file written; a disk is full."""
    settings = sections("scaffold", run={"rounds": 2})
    uninterrupted = run(settings, tmp_path / "whole")
    for call, moment in (("replace", 1), ("replace", 5), ("fsync", 6), ("replace", 9)):
        output = tmp_path / f"cut-{moment}"
        run_and_kill(settings, output, partial(kill_at, os, call, moment))
        if not (unfinished(output) / "config.toml").exists():  # the run had not started
            with raises(OutputError, "files.output"):
                resume(settings, output)
            continue
        assert_same(uninterrupted, resume(settings, output))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.files, "write_whole", full_disk)
        with raises(OutputError, "files.write"):
            run(settings, tmp_path / "full")
    assert_same(uninterrupted, resume(settings, tmp_path / "full"))


def full_disk(path: Path, content: bytes, **values: bool) -> None:
    """Writes half of a client's state after round 2, and other files whole."""
    if path.name.startswith("client_state-") and path.name.endswith("-2.safetensors"):
        path.with_name(f"{path.name}.partial").write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_whole(path, content, **values)


def kill_at(owner: Any, name: str, moment: int = 1, *, after: bool = False) -> None:
    """Patches a function to kill the process at its n-th call, or right after it."""
    original, calls = getattr(owner, name), itertools.count(1)

    def killing(*arguments: Any, **values: Any) -> Any:
        last = next(calls) == moment
        result = original(*arguments, **values) if after or not last else None
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, killing)


def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    monkeypatch.setattr(checkpoints, "STEP_SECONDS", 0.0)
    offer = LoopCheckpoints.offer
    offered: list[tuple[str, int]] = []

    def recorded(self: LoopCheckpoints, loop: str, step: int, tensors: Any) -> None:
        offer(self, loop, step, tensors)
        offered.append((loop, step))

    monkeypatch.setattr(LoopCheckpoints, "offer", recorded)
    return offered


@pytest.mark.parametrize(
    ("method", "rounds", "values", "last", "step"),
    [
        ("feddm", 2, {"iterations": 8, "image_momentum": 0.5, "matching": "energy"}, 8 + 5, 5),
        ("fedaf", 2, {"iterations": 8, "local_weight": 0.5, "distance": "rows"}, 8 + 5, 5),
        ("fedavg", 1, {"local_epochs": 3}, 3 + 2, 2),  # of the second client
        ("fedkf", 1, {"local_epochs": 3, "plain_rounds": 0}, 3 + 2, 2),
        ("fedgen", 2, {"local_epochs": 3, "generator_steps": 3}, 4 * 3 + 3 + 3 + 2, 2),
        ("fedhydra", 1, {"local_epochs": 3, "server_epochs": 3}, 4 * 3 + 1, 1),
        ("dense", 1, {"local_epochs": 3, "server_epochs": 3}, 4 * 3 + 2, 2),
        ("feddf", 1, {"local_epochs": 3, "server_steps": 5}, 4 * 3 + 3, 3),
    ],
)
def test_loops_resume_inside_a_round(
    method: str, rounds: int, values: Any, last: int, step: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """No step is taken twice, and finished clients take none."""
    settings = sections(method, run={"rounds": rounds, "participation": 1.0}, method=values)
    steps = record_steps(monkeypatch)
    uninterrupted = run(settings, tmp_path / "whole")
    all_steps = list(steps)
    assert len(set(all_steps)) == len(all_steps) / rounds
    assert all_steps[last - 1][1] == step
    steps.clear()
    # a step is recorded after `interrupted` has counted it
    with interrupted(LoopCheckpoints, "offer", lambda *_: len(steps) == last):
        run(settings, tmp_path / "cut")
    assert_same(uninterrupted, resume(settings, tmp_path / "cut"))
    assert steps == all_steps


@pytest.mark.parametrize("method", ["feddm", "dense"])
def test_loops_of_private_runs_are_not_checkpointed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private loop would repeat its releases on one charge."""
    steps = record_steps(monkeypatch)
    run(sections(method, run={"rounds": 1}, privacy=PRIVATE), tmp_path)
    assert steps == []


def ledgers(folder: Path) -> list[list[int]]:
    files = sorted(folder.glob("*.jsonl"))
    return [[row.round for row in read_ledger(file).releases] for file in files]


@pytest.mark.parametrize(("method", "external"), [("feddm", True), ("fedavg", False)])
def test_repeated_rounds_are_charged_again(method: str, external: bool, tmp_path: Path) -> None:
    ledger = {"ledger": str(tmp_path / "kept")} if external else {}
    settings = sections(method, privacy={**PRIVATE, **ledger})
    with interrupted_at(2, replacing=True):  # its noise is drawn, and no checkpoint has the round
        run(settings, tmp_path / "runs")
    folder = unfinished(tmp_path / "runs")
    initial = ledgers(tmp_path / "kept" if external else folder / "ledger")
    unfinished_report(folder)
    result = resume(settings, tmp_path / "runs")
    final = ledgers(tmp_path / "kept" if external else verified(result) / "ledger")
    assert any(2 in rounds for rounds in initial)
    for old, new in zip(initial, final, strict=True):
        assert new[: len(old)] == old  # never rewound
        assert new.count(2) == 2 * old.count(2)
        assert new.count(3) <= old.count(2) or old.count(2) == 0
    (deviation,) = result.deviations
    assert deviation.startswith("resumed after 1 of 3 rounds: earlier releases in round 2 are")
    (folder_of(result) / RESUMED).unlink()
    problems = "\n".join(map(str, verify_run(folder_of(result)).problems))
    assert ("events has 1" if external else "is not planned by config.toml") in problems


def test_budget_caps_hold_over_resumptions(tmp_path: Path) -> None:
    settings = sections("feddm", privacy={"epsilon": 4.0}, run={"participation": 1.0})
    for _ in range(2):
        folders = list(tmp_path.glob("*.incomplete"))
        with interrupted_at(1, replacing=True):
            simulate(resolve(settings), output=tmp_path, resume=folders[0] if folders else None)
    result = resume(settings, tmp_path)
    assert len(result.metrics) == 1
    assert result.metrics[-1]["epsilon"] <= 4.0
    assert len(result.deviations) == 3
    verified(result)


def test_interruption_before_checkpoint_states_stored_rounds(tmp_path: Path) -> None:
    """Regression: round 2 had its metrics, but no checkpoint, and was counted as finished."""
    notes = NoteRecorder()
    settings = sections("fedavg")
    with interrupted_at(2, replacing=True):
        run(settings, tmp_path, observer=notes)
    assert notes.lines[-1].startswith("interrupted after 1 of 3 rounds")
    folder = unfinished(tmp_path)
    assert notes.lines[-1].endswith(f"To resume: fedsynth train --resume {folder}")
    assert len(resume(settings, tmp_path, observer=notes).metrics) == 3
    assert any(line.startswith("the run resumes after 1 of 3 rounds") for line in notes.lines)


def test_private_checkpoints_contain_no_keys_and_are_needed_to_resume(tmp_path: Path) -> None:
    notes = NoteRecorder()
    run_folder = interrupt(sections("feddm", privacy=PRIVATE), tmp_path, observer=notes)
    assert "interrupted after 2 of 3 rounds. Spent: ε = " in notes.lines[-1]
    assert notes.lines[-1].endswith(f"--resume {run_folder}")
    folder = run_folder / "simulation_only" / "checkpoint"
    kinds = {path.name.split("-")[0] for path in folder.iterdir()}
    assert POINTER in kinds <= {"state", "client_state", "upload", POINTER}
    for path in folder.iterdir():
        content = path.read_bytes().lower()
        for word in (b"generator", b"secret", b"chacha", b"quantity"):
            assert word not in content, path
    rows = read_rows(run_folder)
    shutil.rmtree(folder)
    with raises(CheckpointError, "checkpoint.unusable"):
        resume(sections("feddm", privacy=PRIVATE), tmp_path)
    assert read_rows(run_folder) == rows


def test_runs_killed_at_start_or_finish_are_charged_once(tmp_path: Path) -> None:
    """The checkpoint is removed last: without it all rounds would be repeated and charged again."""
    settings = sections("feddm", privacy=PRIVATE)
    uninterrupted = verified(run(settings, tmp_path / "whole"))
    for moment in ("write_private_start", "write_artefacts", "finish"):
        kill = partial(kill_at, RunFolder, moment, after=moment != "finish")
        run_and_kill(settings, tmp_path / moment, kill)
        result = resume(settings, tmp_path / moment)
        folder = verified(result)
        assert len(result.deviations) == (moment == "write_private_start")
        assert ledgers(folder / "ledger") == ledgers(uninterrupted / "ledger")
        expected = os.listdir(uninterrupted / "simulation_only")
        assert set(os.listdir(folder / "simulation_only")) == set(expected)


def test_resuming_with_changed_or_busy_runs_is_refused(tmp_path: Path) -> None:
    """Includes one damaged checkpoint; tests/fuzz covers all kinds of damage."""
    settings = sections("fedavg")
    resolved = resolve(settings)
    folder = interrupt(settings, tmp_path)
    with pytest.raises(CheckpointError, match="does not match this run's settings"):
        resume(sections("fedavg", run={"rounds": 4}), tmp_path)
    train, test = load_dataset("digits")
    images = train.images.clone()
    images[0, 0, 0, 0] += 1
    with pytest.raises(CheckpointError, match="other settings or data"):
        simulate(resolved, data=(replace(train, images=images), test), resume=folder)
    with pytest.raises(OutputError, match="contains no config"):
        simulate(resolved, resume=tmp_path)
    (state,) = (folder / "simulation_only" / "checkpoint").glob("state-*")
    sound = state.read_bytes()
    state.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        resume(settings, tmp_path)
    state.write_bytes(sound)
    locked = RunFolder.reopen(folder)
    with pytest.raises(OutputError, match="another process"):
        resume(settings, tmp_path)
    locked.release()
    finished = resume(settings, tmp_path).folder
    with raises(OutputError, "files.finished"):
        simulate(resolved, resume=finished)


@pytest.mark.parametrize("loss", ["folder", "file", "row"])
def test_runs_with_truncated_ledgers_are_not_resumed(loss: str, tmp_path: Path) -> None:
    """Regression: a resumed run loses its spent budget and exceeds its cap."""
    ledger = {"ledger": str(tmp_path / "kept")} if loss == "file" else {}
    settings = sections("feddm", privacy={"epsilon": 20.0, **ledger}, run={"participation": 1.0})
    folder = interrupt(settings, tmp_path / "runs")
    rows = Path(ledger.get("ledger", folder / "ledger"))
    file = rows / "client-001.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    if loss == "folder":
        shutil.rmtree(rows)
    elif loss == "row":
        file.write_text("".join(lines[:-1]))
    with pytest.raises(FedsynthError):
        resume(settings, tmp_path / "runs")


def test_old_checkpoints_are_pruned_and_inactive_client_states_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One state and one client state of each client are kept for any number of rounds."""
    settings = sections("scaffold", run={"rounds": 5, "participation": 0.25})
    expected = simulate(resolve(settings))
    keep = simulated_run.Simulation._store
    client_state = create_autospec(
        CheckpointFolder.client_state, side_effect=CheckpointFolder.client_state
    )
    in_memory: list[Any] = []
    kinds: list[list[str]] = []

    def counting(self: simulated_run.Simulation, checkpoint: Checkpoint) -> None:
        keep(self, checkpoint)
        (folder,) = tmp_path.glob("*/simulation_only/checkpoint")
        kinds.append(sorted(path.name.split("-")[0] for path in folder.iterdir()))
        in_memory.extend(c for c in self.backend.clients if not c.stored and c.client_state)

    monkeypatch.setattr(simulated_run.Simulation, "_store", counting)
    monkeypatch.setattr(CheckpointFolder, "client_state", client_state)
    result = run(settings, tmp_path)
    clients = {client for row in result.metrics for client in row["participants"]}
    assert kinds[-1] == sorted([POINTER, "state", *["client_state"] * len(clients)])
    assert all(names.count("state") == 1 and len(names) <= len(kinds[-1]) for names in kinds)
    assert in_memory == []
    assert client_state.call_count <= sum(len(row["participants"]) for row in result.metrics)
    weights = expected.model.state_dict(), result.model.state_dict()
    torch.testing.assert_close(*weights, atol=0, rtol=0)
