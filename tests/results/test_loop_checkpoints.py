"""What is kept of a round's long loops, when, and what other runs may take of it."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedsynth import resolve, simulate
from fedsynth.methods.shared import client_training
from fedsynth.methods.shared.client_training import training_digest
from fedsynth.models.registry import own_model
from fedsynth.results import run_checkpoints
from fedsynth.results.checkpoint import CheckpointFolder
from fedsynth.results.run_checkpoints import HASH_BYTES, LoopCheckpoints, LoopState, read_loop_state
from fedsynth.seeding import forked_rng
from fedsynth.training.many_clients import Learner
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings
from tests.simulation.test_resume import assert_same, run, sections

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


def test_what_is_damaged_or_another_runs_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper(tmp_path, 0.0)
    kept.load("train-0")
    kept.offer("train-0", 1, lambda: ONE)
    path = tmp_path / "steps-1-train-0"
    whole = path.read_bytes()
    assert keeper(tmp_path).load("train-0") is not None
    that_run = LoopCheckpoints(CheckpointFolder(tmp_path, "that run"), 1, 0.0)
    assert that_run.load("train-0") is None
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-5], b""):
        path.write_bytes(content)
        assert keeper(tmp_path).load("train-0") is None
    path.write_bytes(whole)
    monkeypatch.setattr(run_checkpoints, "FORMAT", 0)
    assert keeper(tmp_path).load("train-0") is None


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
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(finish_many, [(tmp_path / name, shared) for name in ("a", "b")])
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
    assert {path.name.split("-")[0] for path in shared.iterdir()} == {"train"}
    assert_same(alone, taken)
    assert 4000.0 < taken.metrics[0]["seconds"] < 4100.0


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
    own = own_model(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    settings = replace(resolve(alike("fedavg")), model=own)
    simulate(settings, output=tmp_path / "own", trained=tmp_path / "shared", quiet=True)
    private = alike("fedavg")
    private["model"]["norm"] = "instance"
    private["privacy"] = {"noise_multiplier": 1.0}
    run(private, tmp_path / "private", trained=tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


# ------------------------------------------------------------------------------------------ digest


class Images(NamedTuple):
    """The part of clients that a digest reads."""

    x: Tensor
    y: Tensor

    def images(self, where: Tensor) -> Tensor:
        return self.x[where]

    def labels(self, where: Tensor) -> Tensor:
        return self.y[where]


def small_network(moved: str = "", *more: nn.Module) -> nn.Module:
    """The same weights and buffers in every call, but for the one that is moved."""
    with forked_rng(0, "a network"):
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10), *more)
    if moved:
        network.state_dict()[moved].add_(1)
    return network


def test_a_digest_has_all_of_a_training_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing is changed at a time; each digest is another."""
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6)
    sgd = SgdSettings(2, 3, MomentumSgd(0.1, 0.9))
    pull = Pull(0.5, torch.zeros(20), torch.ones(20))
    usual: dict[str, Any] = {
        "network": small_network(),
        "where": torch.arange(5),
        "settings": sgd,
        "seed": 0,
        "penalty": pull,
        "data": Images(x, y),
        "precision": torch.float32,
    }

    def digest(**changed: Any) -> str:
        given = {**usual, **changed}
        *learner, seed, penalty, data, precision = given.values()
        generator = torch.Generator().manual_seed(seed)
        one = Learner(*learner, generator, penalty)
        return training_digest(one, data, torch.device("cpu"), precision)

    same = digest()
    assert digest() == same
    pixel, label = x.clone(), y.clone()
    pixel[4, 0, 7, 7] += 1
    label[4] = 0
    networks = [small_network(name) for name in small_network().state_dict()]
    changes: dict[str, list[Any]] = {
        "network": [*networks, small_network("", nn.Identity())],
        "where": [torch.arange(4), torch.tensor([1, 0, 2, 3, 4])],
        "settings": [
            *(replace(sgd, **{name: 3}) for name in ("epochs", "steps")),
            *(replace(sgd, batch=2), replace(sgd, radius=1.0)),
            replace(sgd, optimiser=MomentumSgd(0.1, 0.9, 0.1)),
        ],
        "seed": [1],
        "penalty": [
            *(None, replace(pull, weight=0.6)),
            *(replace(pull, center=torch.ones(20)), replace(pull, linear=torch.zeros(20))),
        ],
        "data": [Images(pixel, y), Images(x, label)],
        "precision": [torch.bfloat16],
    }
    found = [digest(**{name: value}) for name, values in changes.items() for value in values]
    monkeypatch.setattr(client_training, "__version__", "another")
    found.append(digest())
    assert len({same, *found}) == 1 + len(found)
