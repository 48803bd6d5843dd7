"""What is kept of a round's long loops, when, and what other runs may take of it."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsynth import RunResult, resolve, simulate
from fedsynth.core.client import ExactClientView
from fedsynth.methods.shared import client_training
from fedsynth.methods.shared.client_training import training_digest
from fedsynth.results import run_checkpoints
from fedsynth.results.checkpoint import CheckpointFolder
from fedsynth.results.run_checkpoints import (
    HASH_BYTES,
    LoopCheckpoints,
    LoopState,
    read_loop_state,
)
from fedsynth.training.many_clients import Learner
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings
from tests.simulation.test_resume import assert_same, run, sections

FORK = multiprocessing.get_context("fork")
ONE = {"w": torch.ones(3)}


def keeper(folder: Path, seconds: float = 60.0, shared: Path | None = None) -> LoopCheckpoints:
    return LoopCheckpoints(CheckpointFolder(folder, "this run"), 1, seconds, shared)


class Clock:
    """A clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(run_checkpoints.time, "monotonic", lambda: self.now)


# -------------------------------------------------------------------------------------------- when


def test_every_minute_all_that_has_ended_by_then_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: of a hundred clients of half a minute each, every second one trained again."""
    clock = Clock(monkeypatch)
    kept = keeper(tmp_path)
    for client in range(4):
        assert kept.load(f"train-{client}") is None
        clock.now += 19.0
        kept.offer(f"train-{client}", 1, lambda: ONE)
        kept.finish(f"train-{client}", 2, lambda: ONE)
    again = keeper(tmp_path)
    found = [again.load(f"train-{client}") for client in range(4)]
    assert [one and one[0] for one in found] == [2, 2, 2, 1]  # at 76 seconds, by the fourth's offer
    assert again.resumed_seconds == 4 * 19.0


def test_a_second_loop_of_a_name_is_another(tmp_path: Path) -> None:
    """Catches: a method that trains a client twice in a round, whose second training is skipped."""
    kept = keeper(tmp_path, 0.0)
    for weights in (1.0, 2.0):
        assert kept.load("train-0") is None
        kept.finish("train-0", 1, lambda weights=weights: {"w": torch.tensor([weights])})
    again = keeper(tmp_path, 0.0)
    for weights in (1.0, 2.0):
        found = again.load("train-0")
        assert found is not None
        assert found[1]["w"].item() == weights


@pytest.mark.parametrize("what", ["bit", "cut", "empty", "another run", "another format"])
def test_what_is_damaged_or_another_runs_is_not_gone_on_with(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper(tmp_path, 0.0)
    kept.load("train-0")
    kept.offer("train-0", 1, lambda: ONE)
    path = tmp_path / "steps-1-train-0"
    content = bytearray(path.read_bytes())
    assert keeper(tmp_path).load("train-0") is not None
    identity = "this run"
    if what == "bit":
        content[-1] ^= 1
    elif what == "cut":
        content = content[:-5]
    elif what == "empty":
        content = bytearray()
    elif what == "another run":
        identity = "that run"
    else:
        monkeypatch.setattr(run_checkpoints, "FORMAT", 0)
    path.write_bytes(content)
    assert LoopCheckpoints(CheckpointFolder(tmp_path, identity), 1, 0.0).load("train-0") is None


# ------------------------------------------------------------------------------------------ shared


def test_a_shared_file_that_is_damaged_is_replaced(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "train-x").write_bytes(b"damaged")
    kept = keeper(tmp_path / "run", 0.0, shared)
    assert kept.shared is not None
    assert kept.shared.load("train-x") is None
    kept.shared.finish("train-x", 3, lambda: ONE)
    found = read_loop_state(shared / "train-x", "")
    assert found is not None
    assert found.step == 3


def test_a_shared_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_text("a file")
    kept = keeper(tmp_path / "run", 0.0, shared)
    assert kept.shared is not None
    kept.shared.load("train-x")
    kept.shared.finish("train-x", 3, lambda: ONE)  # beside the checkpoint, then
    assert keeper(tmp_path / "run").load("train-x") is not None


def finish_many(folder: Path, shared: Path) -> None:
    kept = keeper(folder, 0.0, shared)
    assert kept.shared is not None
    for number in range(20):
        kept.shared.load(f"train-{number}")
        kept.shared.finish(f"train-{number}", 1, lambda: {"w": torch.ones(2000)})


def test_two_processes_may_finish_the_same_training_at_once(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    both = [FORK.Process(target=finish_many, args=(tmp_path / name, shared)) for name in ("a", "b")]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(list(shared.iterdir())) == 20
    assert all(read_loop_state(path, "") is not None for path in shared.iterdir())


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loops that make a step, by name."""
    monkeypatch.setattr(run_checkpoints, "STEP_SECONDS", 0.0)
    names: list[str] = []
    offer = LoopCheckpoints.offer

    def noting(self: LoopCheckpoints, name: str, *rest: Any) -> None:
        names.append(name.split("-")[0])
        offer(self, name, *rest)

    monkeypatch.setattr(LoopCheckpoints, "offer", noting)
    return names


def alike(method: str) -> dict[str, dict[str, Any]]:
    given = sections(
        method,
        run={"rounds": 1, "participation": 1.0},
        method={"local_epochs": 2, "batch": 16, "momentum": 0.5},
    )
    given["model"] = {"width": 4, "depth": 2, "norm": "batch"}
    return given


def test_methods_that_train_alike_share_their_clients_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have the numbers that they have alone; a round's seconds count what it has not done."""
    alone = run(alike("dense"), tmp_path / "alone")
    trained = noted(monkeypatch)
    shared = tmp_path / "shared"
    run(alike("fedavg"), tmp_path / "first", trained=shared)
    assert trained == ["train"] * (2 * 4)
    assert len(list(shared.iterdir())) == 4
    for path in shared.iterdir():
        done = LoopState.from_bytes(path.read_bytes()[HASH_BYTES:])
        path.write_bytes(run_checkpoints._with_hash(replace(done, seconds=1000.0), ""))
    trained.clear()
    taken = run(alike("dense"), tmp_path / "second", trained=shared)
    assert set(trained) == {"distillation"}
    assert_same(alone, taken)
    assert 4000.0 < taken.metrics[0]["seconds"] < 4100.0


def test_another_training_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = noted(monkeypatch)
    run(alike("fedavg"), tmp_path / "first", trained=tmp_path / "shared")
    changes: list[tuple[str, dict[str, Any]]] = [
        ("method", {"lr": 0.5}),
        ("run", {"seed": 1}),
        ("partition", {"alpha": 2.0}),
        ("model", {"width": 5}),
    ]
    for number, (section, change) in enumerate(changes):
        given = alike("fedavg")
        given[section] = {**given[section], **change}
        trained.clear()
        run(given, tmp_path / f"other-{number}", trained=tmp_path / "shared")
        assert trained == ["train"] * (2 * 4), section


def test_only_training_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the stratification of one seed in the run of another."""
    noted(monkeypatch)
    shared = tmp_path / "shared"
    runs: list[RunResult] = []
    for seed in (0, 1):
        given = alike("fedhydra")
        given["run"]["seed"] = seed
        runs.append(run(given, tmp_path / f"shared-{seed}", trained=shared))
    assert_same(runs[1], run(given, tmp_path / "alone"))
    assert {path.name.split("-")[0] for path in shared.iterdir()} == {"train"}
    assert not torch.equal(*(one.artefacts["stratification"] for one in runs))


def test_rounds_after_rounds_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their models would fill a disk."""
    noted(monkeypatch)
    run(sections("fedavg"), tmp_path / "runs", trained=tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_custom_or_private_clients_are_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what a network of somebody else's depends on."""
    noted(monkeypatch)
    monkeypatch.setattr(client_training, "training_digest", None)  # and so is not asked for
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    settings = resolve(alike("fedavg"))
    from fedsynth.models.registry import own_model

    settings = replace(settings, model=own_model(own))
    simulate(settings, output=tmp_path / "own", trained=tmp_path / "shared", quiet=True)
    private = alike("fedavg")
    private["model"]["norm"] = "instance"
    private["privacy"] = {"noise_multiplier": 1.0}
    run(private, tmp_path / "private", trained=tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


# ------------------------------------------------------------------------------------------ digest


class Images:
    """What a digest sees of clients."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x = x
        self._y = y

    def images(self, where: Tensor) -> Tensor:
        return self._x[where]

    def labels(self, where: Tensor) -> Tensor:
        return self._y[where]


def test_a_digest_has_all_of_a_training_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing is changed at a time; each digest is another."""
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    pull = Pull(0.5, torch.zeros(20), torch.ones(20))
    sgd = SgdSettings(2, 3, MomentumSgd(0.1, 0.9))
    first = torch.arange(5)

    def digest(
        model: nn.Module = network,
        where: Tensor = first,
        how: SgdSettings = sgd,
        seed: int = 0,
        penalty: Pull | None = pull,
        data: tuple[Tensor, Tensor] = (x, y),
        precision: torch.dtype = torch.float32,
    ) -> str:
        learner = Learner(model, where, how, torch.Generator().manual_seed(seed), penalty)
        clients: Any = Images(*data)
        assert isinstance(clients, Images | ExactClientView)
        return training_digest(learner, clients, torch.device("cpu"), precision)

    def moved(name: str) -> nn.Module:
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
        state = {key: value.clone() for key, value in network.state_dict().items()}
        state[name] += 1
        other.load_state_dict(state)
        return other

    same = digest()
    assert digest() == same
    pixel = x.clone()
    label = y.clone()
    pixel[4, 0, 7, 7] += 1
    label[4] = 0
    wider = nn.Sequential(*network, nn.Identity())
    found = [
        *(digest(model=moved(name)) for name in network.state_dict()),
        digest(model=wider),
        digest(where=torch.arange(4)),
        digest(where=torch.tensor([1, 0, 2, 3, 4])),
        digest(how=replace(sgd, epochs=3)),
        digest(precision=torch.bfloat16),
        digest(how=replace(sgd, batch=2)),
        digest(how=replace(sgd, radius=1.0)),
        digest(how=replace(sgd, steps=3)),
        digest(how=replace(sgd, optimiser=MomentumSgd(0.1, 0.9, 0.1))),
        digest(seed=1),
        digest(penalty=None),
        digest(penalty=replace(pull, weight=0.6)),
        digest(penalty=replace(pull, center=torch.ones(20))),
        digest(penalty=replace(pull, linear=torch.zeros(20))),
        digest(data=(pixel, y)),
        digest(data=(x, label)),
    ]
    monkeypatch.setattr(client_training, "__version__", "another")
    found.append(digest())
    assert len({same, *found}) == 1 + len(found)
