"""Runs that are killed, stopped or cut off by a full disk go on as if nothing had been."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsynth import load_dataset, resolve, simulate
from fedsynth.core.messages import ModelParameters
from fedsynth.errors import CheckpointError, FedsynthError, OutputError
from fedsynth.federation.observer import Observer
from fedsynth.methods import METHODS
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import write_whole
from fedsynth.privacy.ledger import read_ledger
from fedsynth.results import checkpoint as checkpoints
from fedsynth.results import run_checkpoints
from fedsynth.results.checkpoint import POINTER, Checkpoint, CheckpointFolder
from fedsynth.results.kept_steps import KeptSteps
from fedsynth.results.result import RunResult
from fedsynth.results.run_folder import RESUMED, RunFolder
from fedsynth.results.verification import unfinished_report, verify_run
from fedsynth.simulation import run as simulated_run
from tests.families import by_family
from tests.small import small_settings

Sections = dict[str, dict[str, Any]]
FORK = multiprocessing.get_context("fork")
ONE_SHOT = ("dense", "feddf", "fedhydra", "solo")


class Notes(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over other threads are rounded otherwise; and a forked process has no others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sections(method: str, /, **more: dict[str, Any]) -> Sections:
    """Three rounds in which three of four clients take part."""
    run: dict[str, Any] = {"method": method, "rounds": 3, "device": "cpu"}
    if method in ONE_SHOT:
        run["rounds"] = 1
    else:
        run["participation"] = 0.75
    found: Sections = {
        "run": run,
        "partition": {"clients": 4, "subset": 0.2, "alpha": 1.0},
        "model": {"width": 4, "depth": 2, "norm": "batch" if method == "fedbn" else "instance"},
        "method": small_settings(method),
    }
    for name, values in more.items():
        found.setdefault(name, {}).update(values)
    return found


def run(given: Sections, output: Path, **values: Any) -> RunResult:
    return simulate(resolve(given), output=output, **values)


def go_on(given: Sections, output: Path, **values: Any) -> RunResult:
    """Resumes the one run in `output` that did not finish."""
    return simulate(resolve(given), resume=unfinished(output), **values)


def unfinished(output: Path) -> Path:
    (folder,) = output.glob("*.incomplete")
    return folder


def assert_same(one: RunResult, other: RunResult) -> None:
    """Bit for bit, times apart."""
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert timeless(one.metrics) == timeless(other.metrics)
    assert one.accuracy == other.accuracy
    assert one.folder is not None
    assert other.folder is not None
    for name in ("model.safetensors", "synthetic.safetensors"):
        if (one.folder / name).exists():
            assert_same_tensors(one.folder / name, other.folder / name)
    rows = [read_rows(result.folder) for result in (one, other) if result.folder is not None]
    assert timeless(rows[0]) == timeless(rows[1])


def assert_same_tensors(one: Path, other: Path) -> None:
    expected = load_file(one)
    found = load_file(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a run stop after a round: as by Ctrl-C, right behind its checkpoint."""
    write = CheckpointFolder.write

    def after(last: int) -> None:
        def stopping(self: CheckpointFolder, one: Checkpoint, *clients: Any) -> None:
            write(self, one, *clients)
            if one.round == last:
                monkeypatch.setattr(CheckpointFolder, "write", write)
                raise KeyboardInterrupt

        monkeypatch.setattr(CheckpointFolder, "write", stopping)

    return after


# -------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(
    "method", by_family(METHODS, ("scaffold", "feddm", "fedaf", "fedbn", "fedkf"))
)
def test_a_resumed_run_ends_with_the_numbers_of_one_that_was_not(
    method: str, tmp_path: Path, stop: Callable[[int], None]
) -> None:
    given = sections(method)
    whole = run(given, tmp_path / "whole")
    stop(min(2, given["run"]["rounds"]))
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path / "cut")
    resumed = go_on(given, tmp_path / "cut")
    assert_same(whole, resumed)
    assert resumed.folder is not None
    assert not list(resumed.folder.rglob("*checkpoint*"))
    assert not (resumed.folder / ".lock").exists()


def interrupt(*arguments: Any, **values: Any) -> None:
    raise KeyboardInterrupt


def child(given: Sections, output: Path, patch: Callable[[], None] = lambda: None) -> None:
    """In a forked process: begins the run in `output`, or goes on with it."""
    torch.set_num_threads(1)
    patch()
    left = list(output.glob("*.incomplete"))
    if left and not (left[0] / "config.toml").exists():  # killed before it had begun
        shutil.rmtree(left[0])
        left = []
    simulate(resolve(given), output=output, resume=left[0] if left else None)
    os._exit(0)


def start_child(*arguments: Any) -> Any:
    process = FORK.Process(target=child, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    given = sections("scaffold", run={"rounds": 30})
    started = time.perf_counter()
    whole = run(given, tmp_path / "whole")
    takes = time.perf_counter() - started
    output = tmp_path / "cut"
    output.mkdir()
    chance = random.Random(1)  # of moments, and no part of any run
    kills = 0
    while kills < 10:
        process = start_child(given, output)
        process.join(chance.uniform(0.02, 0.25 * takes))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
    start_child(given, output).join(120)
    finished = [path for path in output.iterdir() if path.suffix != ".incomplete"]
    assert finished
    assert len(list(output.iterdir())) == len(finished)
    for folder in finished:
        assert_folders_alike(whole.folder, folder)


def assert_folders_alike(one: Path | None, other: Path) -> None:
    assert one is not None
    assert timeless(read_rows(one)) == timeless(read_rows(other))
    names = {str(p.relative_to(one)) for p in one.rglob("*") if p.is_file()}
    found = {str(p.relative_to(other)) for p in other.rglob("*") if p.is_file()}
    left = {name for name in found if "/checkpoint/" in name}  # killed right behind the last rename
    assert found - {RESUMED} - left == names
    for name in sorted(names):
        if name.endswith(".safetensors"):
            assert_same_tensors(one / name, other / name)
        elif name.endswith((".png", "partition.txt")):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_a_kill_inside_every_write_of_a_checkpoint(tmp_path: Path) -> None:
    """Before and after renames, and with half of a file written."""
    given = sections("scaffold", run={"rounds": 2})
    whole = run(given, tmp_path / "whole")
    for call, moment in (("replace", 1), ("replace", 5), ("fsync", 6), ("replace", 9)):
        output = tmp_path / f"cut-{moment}"
        output.mkdir()
        process = start_child(given, output, partial(kill_at, call, moment))
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        if not (unfinished(output) / "config.toml").exists():  # nothing had begun
            with pytest.raises(OutputError, match=r"no config\.toml"):
                go_on(given, output)
            continue
        assert_same(whole, go_on(given, output))


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


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("feddm", {"iterations": 8, "image_momentum": 0.5, "matching": "energy"}),
        ("fedaf", {"iterations": 8, "local_weight": 0.5, "distance": "rows"}),
    ],
)
def test_a_condensation_goes_on_inside_a_round(
    method: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections(method, run={"rounds": 2}, method=more)
    whole = run(given, tmp_path / "whole")
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    offer = KeptSteps.offer
    offered: list[int] = []

    def stopping(self: KeptSteps, name: str, step: int, tensors: Any) -> None:
        offer(self, name, step, tensors)
        offered.append(step)
        if len(offered) == 8 + 5:  # in the second round
            raise KeyboardInterrupt

    monkeypatch.setattr(KeptSteps, "offer", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path / "cut")
    resumed = go_on(given, tmp_path / "cut")
    assert offered == [*range(1, 9), *range(1, 6), *range(6, 9)]  # no step twice
    assert_same(whole, resumed)


@pytest.mark.parametrize(
    ("method", "name", "at"),
    [
        ("fedavg", "train-1", 2),  # of the second client
        ("scaffold", "train-2", 1),
        ("dense", "distillation", 2),
        ("feddf", "distillation", 3),
    ],
)
def test_training_and_distillation_go_on_inside_a_round(
    method: str, name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No epoch is done twice, of clients that were done none at all."""
    small: dict[str, Any] = {"local_epochs": 3}
    if name == "distillation":
        small.update({"server_steps": 5} if method == "feddf" else {"server_epochs": 3})
    given = sections(method, run={"rounds": 1, "participation": 1.0}, method=small)
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    offered: list[tuple[str, int]] = []
    offer = KeptSteps.offer

    def noted(self: KeptSteps, loop: str, step: int, tensors: Any) -> None:
        offer(self, loop, step, tensors)
        offered.append((loop, step))

    def stopping(self: KeptSteps, loop: str, step: int, tensors: Any) -> None:
        noted(self, loop, step, tensors)
        if (loop, step) == (name, at):
            raise KeyboardInterrupt

    monkeypatch.setattr(KeptSteps, "offer", noted)
    whole = run(given, tmp_path / "whole")
    once = list(offered)
    assert len(set(once)) == len(once)
    offered.clear()
    monkeypatch.setattr(KeptSteps, "offer", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path / "cut")
    monkeypatch.setattr(KeptSteps, "offer", noted)
    assert_same(whole, go_on(given, tmp_path / "cut"))
    assert offered == once


def test_a_loss_with_a_state_of_its_own_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedKF's generator is no part of what training keeps."""
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(KeptSteps, "offer", interrupt)
    run(sections("fedkf", method={"plain_rounds": 0}), tmp_path)


@pytest.mark.parametrize("method", ["feddm", "fedavg", "dense"])
def test_a_private_loop_is_not_checkpointed_inside_a_round(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its releases would be made twice on one charge; a repeated round has other uploads."""
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(KeptSteps, "offer", interrupt)
    run(sections(method, privacy={"noise_multiplier": 1.0}), tmp_path)


def test_a_round_that_was_cut_off_is_not_gone_on_with_on_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round no checkpoint says whose the loops are: their files do."""
    given = sections("fedavg", run={"rounds": 1}, method={"local_epochs": 3})
    train, test = load_dataset("digits")
    other = replace(train, images=255 - train.images)
    whole = run(given, tmp_path / "whole", data=(other, test))
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    offer = KeptSteps.offer

    def stopping(self: KeptSteps, name: str, step: int, tensors: Any) -> None:
        offer(self, name, step, tensors)
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeptSteps, "offer", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(given, tmp_path / "cut", data=(train, test))
    assert list((unfinished(tmp_path / "cut") / "simulation_only").rglob("steps-*"))
    assert_same(whole, go_on(given, tmp_path / "cut", data=(other, test)))


# ----------------------------------------------------------------------------------------- privacy


def ledgers(folder: Path) -> list[list[int]]:
    """Of each client the rounds of its ledger's rows."""
    files = sorted(folder.glob("*.jsonl"))
    return [[row.round for row in read_ledger(file).releases] for file in files]


@pytest.mark.parametrize(("method", "kept"), [("feddm", True), ("fedavg", False)])
def test_a_repeated_round_is_charged_again_and_said(
    method: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy: dict[str, Any] = {"noise_multiplier": 1.0}
    if kept:
        privacy["ledger"] = str(tmp_path / "kept")
    given = sections(method, privacy=privacy)
    write = CheckpointFolder.write

    def killed(self: CheckpointFolder, one: Checkpoint, *clients: Any) -> None:
        if one.round == 2:  # its noise is drawn, and nothing of it is kept
            raise KeyboardInterrupt
        write(self, one, *clients)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run(given, tmp_path / "runs")
    folder = unfinished(tmp_path / "runs")
    before = ledgers(tmp_path / "kept" if kept else folder / "ledger")
    unfinished_report(folder)
    resumed = go_on(given, tmp_path / "runs")
    assert resumed.folder is not None
    after = ledgers(tmp_path / "kept" if kept else resumed.folder / "ledger")
    planned = [round for rounds in before for round in rounds].count(2)
    assert planned > 0
    for old, new in zip(before, after, strict=True):
        assert new[: len(old)] == old  # never rewound
        assert new.count(2) == 2 * old.count(2)
        assert new.count(3) <= old.count(2) or old.count(2) == 0
    verified = verify_run(resumed.folder)
    assert verified.problems == []
    (said,) = resumed.deviations
    assert said == (
        "resumed after 1 of 3 rounds: releases made in round 2 before that are charged; the round is "
        "charged again"
    )


def test_rows_of_a_repeated_round_need_a_resumption(
    tmp_path: Path, stop: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections("feddm", privacy={"noise_multiplier": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(given, tmp_path)
    folder = go_on(given, tmp_path).folder
    assert folder is not None
    assert verify_run(folder).problems == []
    stated = (folder / RESUMED).read_text()
    (folder / RESUMED).unlink()
    assert any("is not charged" in problem for problem in verify_run(folder).problems)
    (folder / RESUMED).write_text(stated.replace("[0]", "[0, 1]"))
    assert any("resumption that its ledger" in one for one in verify_run(folder).problems)


def test_a_cap_holds_over_resumptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are repeated spend the budget of later ones."""
    given = sections("feddm", privacy={"epsilon": 4.0}, run={"participation": 1.0})
    for _ in range(2):
        left = list(tmp_path.glob("*.incomplete"))
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointFolder, "write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                simulate(resolve(given), output=tmp_path, resume=left[0] if left else None)
    ended = go_on(given, tmp_path)
    assert len(ended.metrics) == 1
    assert ended.metrics[-1]["epsilon"] <= 4.0
    assert len(ended.deviations) == 3
    assert ended.folder is not None
    assert verify_run(ended.folder).problems == []


def test_a_checkpoint_has_nobodys_key_and_no_ledger(
    tmp_path: Path, stop: Callable[[int], None]
) -> None:
    given = sections("feddm", privacy={"noise_multiplier": 1.0})
    notes = Notes()
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path, observer=notes)
    assert notes.lines[-1].startswith("interrupted after 2 of 3 rounds; spent: ε = ")
    assert str(unfinished(tmp_path)) in notes.lines[-1]
    folder = unfinished(tmp_path) / "simulation_only" / "checkpoint"
    assert (folder / POINTER).exists()
    kinds = {path.name.split("-")[0] for path in folder.iterdir()}
    assert kinds <= {"state", "memory", "upload", POINTER}
    for path in folder.iterdir():
        content = path.read_bytes().lower()
        for word in (b"generator", b"secret", b"chacha", b"quantity"):
            assert word not in content, path


# -------------------------------------------------------------------------------------- what stops


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
        with pytest.raises(OutputError, match="one before") as error:
            run(given, tmp_path / "cut")
    assert "\n" not in str(error.value)
    assert_same(whole, go_on(given, tmp_path / "cut"))


# --------------------------------------------------------------------------------- what is refused


def cut(given: Sections, output: Path, stop: Callable[[int], None]) -> Path:
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        run(given, output)
    return unfinished(output)


def test_other_settings_other_data_and_other_folders_are_refused(
    tmp_path: Path, stop: Callable[[int], None]
) -> None:
    given = sections("fedavg")
    folder = cut(given, tmp_path, stop)
    with pytest.raises(CheckpointError, match="other settings"):
        go_on(sections("fedavg", run={"rounds": 4}), tmp_path)
    settings = resolve(given)
    train, test = load_dataset("digits")
    images = train.images.clone()
    images[0, 0, 0, 0] += 1
    with pytest.raises(CheckpointError, match="other data"):
        simulate(settings, data=(replace(train, images=images), test), resume=folder)
    with pytest.raises(OutputError, match="no run folder"):
        simulate(settings, resume=tmp_path)
    finished = go_on(given, tmp_path).folder
    with pytest.raises(OutputError, match="has finished"):
        simulate(settings, resume=finished)


def test_own_clients_are_resumed_with_the_same_parts(
    tmp_path: Path, stop: Callable[[int], None]
) -> None:
    data = load_dataset("digits")
    parts = [np.arange(300), np.arange(300, 900)]
    settings = resolve(sections("fedavg", partition={"clients": 2}))
    whole = simulate(settings, data=data, parts=parts, output=tmp_path / "whole")
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        simulate(settings, data=data, parts=parts, output=tmp_path / "cut")
    folder = unfinished(tmp_path / "cut")
    with pytest.raises(CheckpointError, match="other data"):
        simulate(settings, data=data, parts=parts[::-1], resume=folder)
    assert_same(whole, simulate(settings, data=data, parts=parts, resume=folder))


def test_nobody_resumes_a_run_that_is_going_on(tmp_path: Path, stop: Callable[[int], None]) -> None:
    folder = cut(sections("fedavg"), tmp_path, stop)
    held = RunFolder.reopen(folder)
    with pytest.raises(OutputError, match="another process"):
        go_on(sections("fedavg"), tmp_path)
    held.release()
    go_on(sections("fedavg"), tmp_path)


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, stop: Callable[[int], None]) -> None:
    given = sections("scaffold")
    folder = cut(given, tmp_path / "runs", stop)
    chance = random.Random(3)
    sound = tmp_path / "sound"
    shutil.copytree(folder, sound)
    names = sorted(path.name for path in (sound / "simulation_only" / "checkpoint").iterdir())
    refused: list[str] = []
    for trial in range(24):
        shutil.rmtree(folder)
        shutil.copytree(sound, folder)
        path = folder / "simulation_only" / "checkpoint" / names[trial % len(names)]
        content = bytearray(path.read_bytes())
        kind = trial // len(names) % 3
        if kind == 0:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del content[chance.randrange(len(content)) :]
        else:
            content = bytearray(b'{"format": 1, "identity": 7, "rows": [[]], "files": {"../x": 1}}')
        path.write_bytes(bytes(content))
        try:
            resumed = go_on(given, tmp_path / "runs")
        except FedsynthError as error:
            refused.append(str(error))
            continue
        assert resumed.folder is not None  # a bit of JSON that does no harm: a row's seconds
        assert path.name == POINTER
        resumed.folder.rename(folder)
    assert len(refused) >= 20
    assert not any("\n" in text for text in refused)


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
    run(sections("scaffold", run={"rounds": 8}), tmp_path)
    assert counted[-1] == {"state": 1, "memory": 4, POINTER: 1}
    assert all(each["state"] == 1 and each["memory"] <= 4 for each in counted)


def test_memories_of_clients_that_are_not_active_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections("scaffold", run={"rounds": 5, "participation": 0.25})
    without = simulate(resolve(given))
    keep, memory = simulated_run.Simulation._keep, CheckpointFolder.memory
    held: list[int] = []
    loaded: list[int] = []

    def loading(self: CheckpointFolder, client: int) -> Any:
        loaded.append(client)
        return memory(self, client)

    def counting(self: simulated_run.Simulation, context: Any) -> None:
        keep(self, context)
        held.append(sum(bool(client._memory) for client in self.exchange.clients))

    monkeypatch.setattr(simulated_run.Simulation, "_keep", counting)
    monkeypatch.setattr(CheckpointFolder, "memory", loading)
    result = run(given, tmp_path)
    assert max(held[:-1]) <= 1
    assert len(loaded) <= sum(len(row["participants"]) for row in result.metrics)
    assert isinstance(next(iter(result.uploads.values())), ModelParameters)
    for name, value in without.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name]), name


@pytest.mark.parametrize("moment", ["write_private_start", "write_model", "finish"])
def test_a_run_that_is_killed_while_it_begins_or_finishes_is_charged_once(
    moment: str, tmp_path: Path
) -> None:
    """Its checkpoint goes last: without it all rounds would be repeated, and charged again."""
    given = sections("fedavg", privacy={"noise_multiplier": 1.0})
    whole = run(given, tmp_path / "whole").folder
    output = tmp_path / "cut"
    output.mkdir()
    process = start_child(given, output, partial(kill_in, moment))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    resumed = go_on(given, output)
    folder = resumed.folder
    assert folder is not None
    assert whole is not None
    assert len(resumed.deviations) == (moment == "write_private_start")
    assert ledgers(folder / "ledger") == ledgers(whole / "ledger")
    assert verify_run(folder).problems == []
    left, expected = (set(os.listdir(one / "simulation_only")) for one in (folder, whole))
    assert left == expected


def kill_in(name: str) -> None:
    """The run folder's method does what it does, and the process is killed."""
    original = getattr(RunFolder, name)

    def killing(self: RunFolder, *arguments: Any) -> None:
        if name != "finish":
            original(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(RunFolder, name, killing)


# ------------------------------------------------------------------------------- what has to be there


@pytest.mark.parametrize(("kept", "loss"), [(False, "folder"), (True, "file"), (False, "rows")])
def test_a_ledger_that_has_lost_rows_is_not_gone_on_with(
    kept: bool, loss: str, tmp_path: Path, stop: Callable[[int], None]
) -> None:
    """A run would forget what it has spent, and exceed its cap."""
    privacy: dict[str, Any] = {"epsilon": 20.0}
    if kept:
        privacy["ledger"] = str(tmp_path / "kept")
    given = sections("feddm", privacy=privacy, run={"participation": 1.0})
    folder = cut(given, tmp_path / "runs", stop)
    ledger = tmp_path / "kept" if kept else folder / "ledger"
    file = ledger / "client-001.jsonl"
    if loss == "folder":
        shutil.rmtree(ledger)
    elif loss == "file":
        file.unlink()
    else:
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:-1]))
    with pytest.raises((FedsynthError, PrivacyError)):
        go_on(given, tmp_path / "runs")


def test_a_run_whose_checkpoint_is_gone_does_not_begin_anew(
    tmp_path: Path, stop: Callable[[int], None]
) -> None:
    given = sections("feddm", privacy={"noise_multiplier": 1.0})
    folder = cut(given, tmp_path, stop)
    rows = (folder / "metrics.jsonl").read_text()
    assert len(rows.splitlines()) >= 1
    shutil.rmtree(folder / "simulation_only" / "checkpoint")
    with pytest.raises(CheckpointError, match="checkpoint is gone"):
        go_on(given, tmp_path)
    assert (folder / "metrics.jsonl").read_text() == rows


def test_a_resumed_run_that_is_killed_while_it_finishes_says_all_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections("feddm", privacy={"noise_multiplier": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(given, tmp_path)
    process = start_child(given, tmp_path, partial(kill_in, "finish"))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    resumed = go_on(given, tmp_path)
    assert len(resumed.deviations) == 1
    assert resumed.folder is not None
    assert verify_run(resumed.folder).problems == []
