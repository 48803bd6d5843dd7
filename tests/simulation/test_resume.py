"""Runs that are killed, interrupted or stopped by a full disk resume with identical numbers."""

from __future__ import annotations

import errno
import json
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

import pytest
import torch
from safetensors.torch import load_file

from fedsynth import RunResult, load_dataset, resolve, simulate
from fedsynth.errors import CheckpointError, FedsynthError, OutputError
from fedsynth.methods import METHODS
from fedsynth.privacy import PrivacyError, read_ledger
from fedsynth.privacy.files import write_whole
from fedsynth.results import checkpoint as checkpoints
from fedsynth.results import run_checkpoints
from fedsynth.results.checkpoint import POINTER, Checkpoint, CheckpointFolder
from fedsynth.results.run_checkpoints import LoopCheckpoints
from fedsynth.results.run_folder import RESUMED, RunFolder
from fedsynth.results.verification import unfinished_report, verify_run
from fedsynth.simulation import run as simulated_run
from tests.families import by_family
from tests.observers import NoteRecorder
from tests.quick_settings import quick_sections, verified

Sections = dict[str, dict[str, Any]]
FORK = multiprocessing.get_context("fork")
ONE_SHOT = ("dense", "feddf", "fedhydra", "solo")
PRIVATE = {"noise_multiplier": 1.0}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over several threads are rounded differently, and a forked process has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sections(method: str, /, **more: dict[str, Any]) -> Sections:
    """Three rounds in which three of four clients take part."""
    rounds = {"rounds": 1} if method in ONE_SHOT else {"rounds": 3, "participation": 0.75}
    run = {**rounds, **more.pop("run", {})}
    return quick_sections(method, run=run, partition={"clients": 4}, **more)


def run(given: Sections, output: Path, **values: Any) -> RunResult:
    return simulate(resolve(given), output=output, **values)


def resumed(given: Sections, output: Path, **values: Any) -> RunResult:
    """Resumes the one run in `output` that did not finish."""
    return simulate(resolve(given), resume=unfinished(output), **values)


def unfinished(output: Path) -> Path:
    (folder,) = output.glob("*.incomplete")
    return folder


@contextmanager
def interrupted(
    owner: type, name: str, when: Callable[..., bool], *, before: bool = False
) -> Iterator[None]:
    """A run inside is interrupted, as by Ctrl-C, right after the first call of a method for whose
    arguments `when` holds, or in place of that call."""
    original = getattr(owner, name)

    def stopping(self: Any, *arguments: Any) -> None:
        stops = before and when(*arguments)
        if not stops:
            original(self, *arguments)
        if stops or when(*arguments):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            yield


def interrupted_at(round: int, *, before: bool = False) -> Any:
    """An interruption right after the checkpoint of a round, or in its place."""
    return interrupted(CheckpointFolder, "write", lambda one, *_: one.round == round, before=before)


def cut(given: Sections, output: Path, **values: Any) -> Path:
    """The folder of a run that was interrupted after two rounds."""
    with interrupted_at(min(2, given["run"]["rounds"])):
        run(given, output, **values)
    return unfinished(output)


def assert_same(one: RunResult, other: RunResult) -> None:
    """Bit for bit, except for times."""
    assert one.folder is not None
    assert other.folder is not None
    assert timeless(one.metrics) == timeless(other.metrics)
    assert timeless(read_rows(one.folder)) == timeless(read_rows(other.folder))
    assert one.accuracy == other.accuracy
    for file in one.folder.glob("*.safetensors"):
        expected, found = load_file(file), load_file(other.folder / file.name)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("method", by_family(METHODS, ("scaffold", "feddm", "fedkf")))
def test_an_interrupted_run_resumes_with_identical_numbers(method: str, tmp_path: Path) -> None:
    given = sections(method)
    whole = run(given, tmp_path / "whole")
    cut(given, tmp_path / "cut")
    found = resumed(given, tmp_path / "cut")
    assert_same(whole, found)
    assert found.folder is not None
    assert not list(found.folder.rglob("*checkpoint*"))
    assert not (found.folder / ".lock").exists()


def child(given: Sections, output: Path, patch: Callable[[], None]) -> None:
    """In a forked process: begins the run in `output`, or resumes it."""
    torch.set_num_threads(1)
    patch()
    left = next(output.glob("*.incomplete"), None)
    simulate(resolve(given), output=output, resume=left)
    os._exit(0)


def killed(given: Sections, output: Path, patch: Callable[[], None]) -> None:
    """Runs in a process that the patch kills."""
    output.mkdir(exist_ok=True)
    process = FORK.Process(target=child, args=(given, output, patch))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_a_kill_inside_every_write_of_a_checkpoint(tmp_path: Path) -> None:
    """Before and after renames, and with half of a file written."""
    given = sections("scaffold", run={"rounds": 2})
    whole = run(given, tmp_path / "whole")
    for call, moment in (("replace", 1), ("replace", 5), ("fsync", 6), ("replace", 9)):
        output = tmp_path / f"cut-{moment}"
        killed(given, output, partial(kill_at, call, moment))
        if not (unfinished(output) / "config.toml").exists():  # nothing had begun
            with pytest.raises(OutputError, match=r"no config\.toml"):
                resumed(given, output)
            continue
        assert_same(whole, resumed(given, output))


def kill_at(call: str, moment: int) -> None:
    """The n-th call kills the process."""
    original = getattr(os, call)
    seen = 0

    def killing(*arguments: Any, **values: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **values)

    setattr(os, call, killing)


# ---------------------------------------------------------------------------------- inside a round


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Loops are checkpointed at every step; the steps are listed."""
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    offer = LoopCheckpoints.offer
    offered: list[tuple[str, int]] = []

    def noted(self: LoopCheckpoints, loop: str, step: int, tensors: Any) -> None:
        offer(self, loop, step, tensors)
        offered.append((loop, step))

    monkeypatch.setattr(LoopCheckpoints, "offer", noted)
    return offered


@pytest.mark.parametrize(
    ("method", "rounds", "more", "last", "step"),
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
def test_condensation_training_and_distillation_resume_inside_a_round(
    method: str,
    rounds: int,
    more: dict[str, Any],
    last: int,
    step: int,
    tmp_path: Path,
    each_step: list[tuple[str, int]],
) -> None:
    """No step is taken twice, and none of the clients that had finished."""
    given = sections(method, run={"rounds": rounds, "participation": 1.0}, method=more)
    whole = run(given, tmp_path / "whole")
    once = list(each_step)
    assert len(set(once)) == len(once) / rounds
    assert once[last - 1][1] == step
    each_step.clear()
    # `each_step` notes a step after `interrupted` has counted it
    with interrupted(LoopCheckpoints, "offer", lambda *_: len(each_step) == last):
        run(given, tmp_path / "cut")
    assert_same(whole, resumed(given, tmp_path / "cut"))
    assert each_step == once


@pytest.mark.parametrize("method", ["feddm", "dense"])
def test_loops_of_private_runs_are_not_checkpointed(
    method: str, tmp_path: Path, each_step: list[tuple[str, int]]
) -> None:
    """A private loop's releases would be made twice on one charge."""
    run(sections(method, run={"rounds": 1}, privacy=PRIVATE), tmp_path)
    assert each_step == []


def test_a_loop_is_not_resumed_on_other_data(
    tmp_path: Path, each_step: list[tuple[str, int]]
) -> None:
    """In the first round there is no checkpoint whose identity could be compared."""
    given = sections("fedavg", run={"rounds": 1}, method={"local_epochs": 3})
    train, test = load_dataset("digits")
    other = replace(train, images=255 - train.images)
    whole = run(given, tmp_path / "whole", data=(other, test))
    with interrupted(LoopCheckpoints, "offer", lambda name, step, _: step == 2):
        run(given, tmp_path / "cut", data=(train, test))
    assert list((unfinished(tmp_path / "cut") / "simulation_only").rglob("steps-*"))
    assert_same(whole, resumed(given, tmp_path / "cut", data=(other, test)))


# ----------------------------------------------------------------------------------------- privacy


def ledgers(folder: Path) -> list[list[int]]:
    """The rounds of each client's ledger rows."""
    files = sorted(folder.glob("*.jsonl"))
    return [[row.round for row in read_ledger(file).releases] for file in files]


@pytest.mark.parametrize(("method", "kept"), [("feddm", True), ("fedavg", False)])
def test_a_repeated_round_is_charged_again_and_reported(
    method: str, kept: bool, tmp_path: Path
) -> None:
    ledger = {"ledger": str(tmp_path / "kept")} if kept else {}
    given = sections(method, privacy={**PRIVATE, **ledger})
    with interrupted_at(2, before=True):  # its noise is drawn, and no checkpoint has the round
        run(given, tmp_path / "runs")
    folder = unfinished(tmp_path / "runs")
    before = ledgers(tmp_path / "kept" if kept else folder / "ledger")
    unfinished_report(folder)
    found = resumed(given, tmp_path / "runs")
    after = ledgers(tmp_path / "kept" if kept else verified(found) / "ledger")
    assert any(2 in rounds for rounds in before)
    for old, new in zip(before, after, strict=True):
        assert new[: len(old)] == old  # never rewound
        assert new.count(2) == 2 * old.count(2)
        assert new.count(3) <= old.count(2) or old.count(2) == 0
    (deviation,) = found.deviations
    assert deviation.startswith("resumed after 1 of 3 rounds: earlier releases in round 2 are")


def test_rows_of_a_repeated_round_need_a_resumption(tmp_path: Path) -> None:
    given = sections("feddm", privacy=PRIVATE)
    with interrupted_at(1, before=True):
        run(given, tmp_path)
    folder = verified(resumed(given, tmp_path))
    stated = (folder / RESUMED).read_text()
    (folder / RESUMED).unlink()
    assert any(
        "does not follow from config.toml" in problem for problem in verify_run(folder).problems
    )
    (folder / RESUMED).write_text(stated.replace("[0]", "[0, 1]"))
    problems = "\n".join(verify_run(folder).problems)
    assert "lacks a resumption that resumed.json states" in problems


def test_a_cap_holds_over_resumptions(tmp_path: Path) -> None:
    """Repeated rounds spend the budget of later ones."""
    given = sections("feddm", privacy={"epsilon": 4.0}, run={"participation": 1.0})
    for _ in range(2):
        left = list(tmp_path.glob("*.incomplete"))
        with interrupted_at(1, before=True):
            simulate(resolve(given), output=tmp_path, resume=left[0] if left else None)
    ended = resumed(given, tmp_path)
    assert len(ended.metrics) == 1
    assert ended.metrics[-1]["epsilon"] <= 4.0
    assert len(ended.deviations) == 3
    verified(ended)


def test_a_checkpoint_has_no_key_and_no_ledger(tmp_path: Path) -> None:
    notes = NoteRecorder()
    left = cut(sections("feddm", privacy=PRIVATE), tmp_path, observer=notes)
    assert "interrupted after 2 of 3 rounds" in notes.lines[-1]
    assert str(left) in notes.lines[-1]
    folder = left / "simulation_only" / "checkpoint"
    kinds = {path.name.split("-")[0] for path in folder.iterdir()}
    assert POINTER in kinds <= {"state", "memory", "upload", POINTER}
    for path in folder.iterdir():
        content = path.read_bytes().lower()
        for word in (b"generator", b"secret", b"chacha", b"quantity"):
            assert word not in content, path


def test_a_run_that_is_killed_while_it_begins_or_finishes_is_charged_once(tmp_path: Path) -> None:
    """Its checkpoint is removed last: without it all rounds would be repeated, and charged again."""
    given = sections("feddm", privacy=PRIVATE)
    whole = verified(run(given, tmp_path / "whole"))
    for moment in ("write_private_start", "write_model", "finish"):
        killed(given, tmp_path / moment, partial(kill_in, moment))
        found = resumed(given, tmp_path / moment)
        folder = verified(found)
        assert len(found.deviations) == (moment == "write_private_start")
        assert ledgers(folder / "ledger") == ledgers(whole / "ledger")
        left, expected = (set(os.listdir(one / "simulation_only")) for one in (folder, whole))
        assert left == expected


def kill_in(name: str) -> None:
    """The process is killed after this method of the run folder, or in `finish`, before it."""
    original = getattr(RunFolder, name)

    def killing(self: RunFolder, *arguments: Any) -> None:
        if name != "finish":
            original(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(RunFolder, name, killing)


def test_a_resumed_run_that_is_killed_while_it_finishes_reports_its_resumption(
    tmp_path: Path,
) -> None:
    given = sections("feddm", privacy=PRIVATE)
    with interrupted_at(1, before=True):
        run(given, tmp_path)
    killed(given, tmp_path, partial(kill_in, "finish"))
    found = resumed(given, tmp_path)
    assert len(found.deviations) == 1
    verified(found)


# ------------------------------------------------------------------------------------- full disk


def test_a_full_disk_leaves_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections("scaffold")
    whole = run(given, tmp_path / "whole")
    original = write_whole

    def full(path: Path, content: bytes, **values: bool) -> None:
        if path.name.startswith("memory-") and path.name.endswith("-3.safetensors"):
            path.with_name(f"{path.name}.partial").write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, content, **values)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_whole", full)
        with pytest.raises(OutputError, match="then resume the run"):
            run(given, tmp_path / "cut")
    assert_same(whole, resumed(given, tmp_path / "cut"))


# -------------------------------------------------------------------------------------- refusals


def test_other_settings_data_and_folders_and_running_runs_are_refused(tmp_path: Path) -> None:
    """A damaged checkpoint, too: tests/fuzz has every kind of damage."""
    given = sections("fedavg")
    settings = resolve(given)
    folder = cut(given, tmp_path)
    with pytest.raises(CheckpointError, match="differs from this run's settings"):
        resumed(sections("fedavg", run={"rounds": 4}), tmp_path)
    train, test = load_dataset("digits")
    images = train.images.clone()
    images[0, 0, 0, 0] += 1
    with pytest.raises(CheckpointError, match="settings or data differ"):
        simulate(settings, data=(replace(train, images=images), test), resume=folder)
    with pytest.raises(OutputError, match="not a run folder"):
        simulate(settings, resume=tmp_path)
    (state,) = (folder / "simulation_only" / "checkpoint").glob("state-*")
    sound = state.read_bytes()
    state.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        resumed(given, tmp_path)
    state.write_bytes(sound)
    held = RunFolder.reopen(folder)
    with pytest.raises(OutputError, match="another process"):
        resumed(given, tmp_path)
    held.release()
    finished = resumed(given, tmp_path).folder
    with pytest.raises(OutputError, match="has finished"):
        simulate(settings, resume=finished)


@pytest.mark.parametrize("loss", ["folder", "file", "row"])
def test_a_run_with_a_truncated_ledger_is_not_resumed(loss: str, tmp_path: Path) -> None:
    """Catches: a run that forgets what it has spent, and exceeds its cap."""
    ledger = {"ledger": str(tmp_path / "kept")} if loss == "file" else {}
    given = sections("feddm", privacy={"epsilon": 20.0, **ledger}, run={"participation": 1.0})
    folder = cut(given, tmp_path / "runs")
    rows = Path(ledger.get("ledger", folder / "ledger"))
    file = rows / "client-001.jsonl"
    if loss == "folder":
        shutil.rmtree(rows)
    elif loss == "file":
        file.unlink()
    else:
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises((FedsynthError, PrivacyError)):
        resumed(given, tmp_path / "runs")


def test_a_run_without_its_checkpoint_does_not_start_again(tmp_path: Path) -> None:
    given = sections("feddm", privacy=PRIVATE)
    folder = cut(given, tmp_path)
    rows = (folder / "metrics.jsonl").read_text()
    shutil.rmtree(folder / "simulation_only" / "checkpoint")
    with pytest.raises(CheckpointError, match=r"the checkpoint in .* is missing"):
        resumed(given, tmp_path)
    assert (folder / "metrics.jsonl").read_text() == rows


# -------------------------------------------------------------------------------------------- size


def test_old_checkpoints_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One state, and one memory of each client, whatever the number of rounds."""
    write = CheckpointFolder.write
    counted: list[dict[str, int]] = []

    def counting(self: CheckpointFolder, one: Checkpoint, *clients: Any) -> None:
        write(self, one, *clients)
        kinds = [path.name.split("-")[0] for path in self.path.iterdir()]
        counted.append({kind: kinds.count(kind) for kind in set(kinds)})

    monkeypatch.setattr(CheckpointFolder, "write", counting)
    run(sections("scaffold", run={"rounds": 5}), tmp_path)
    assert counted[-1] == {"state": 1, "memory": 4, POINTER: 1}
    assert all(each["state"] == 1 and each["memory"] <= 4 for each in counted)


def test_memories_of_clients_that_are_not_active_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections("scaffold", run={"rounds": 5, "participation": 0.25})
    without = simulate(resolve(given))
    keep, memory = simulated_run.Simulation._write_checkpoint, CheckpointFolder.memory
    held: list[int] = []
    loaded: list[int] = []

    def loading(self: CheckpointFolder, client: int) -> Any:
        loaded.append(client)
        return memory(self, client)

    def counting(self: simulated_run.Simulation, context: Any) -> None:
        keep(self, context)
        held.append(sum(bool(client._memory) for client in self.exchange.clients))

    monkeypatch.setattr(simulated_run.Simulation, "_write_checkpoint", counting)
    monkeypatch.setattr(CheckpointFolder, "memory", loading)
    result = run(given, tmp_path)
    assert max(held[:-1]) <= 1
    assert len(loaded) <= sum(len(row["participants"]) for row in result.metrics)
    for name, value in without.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name]), name
