"""Partial participation: reproducible sampling, and its effects on ledgers, σ and the clients'
memories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.config.participation import Participation, most_rounds, shown_rounds
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.errors import SettingError
from fedsynth.federation.context import plan_of
from fedsynth.federation.run_data import data_set_id
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.releases import Release
from fedsynth.results.report_facts import headline
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation import sets

FEW = {"iterations": 2, "ipc": 1, "server_epochs": 2}
FAST = {"fedavg": {"local_epochs": 1}, "feddm": FEW, "fedaf": FEW}


def tiny(method: str = "fedavg", rounds: int = 3, **sections: Any) -> RunSettings:
    base = {
        "run": {"method": method, "rounds": rounds, "participation": 0.5},
        "partition": {"clients": 4},
        "model": {"width": 4, "depth": 2},
        "method": FAST[method],
    }
    return resolve({**base, **sections})


def test_rounds_sample_four_of_twenty_by_seed() -> None:
    draw = Participation(0, 20, 0.2)
    rounds = [draw.in_round(n) for n in range(1, 201)]
    assert all(len(set(ids)) == 4 and list(ids) == sorted(ids) for ids in rounds)
    assert rounds[:5] == [Participation(0, 20, 0.2).in_round(n) for n in range(1, 6)]
    assert rounds[:5] != [Participation(1, 20, 0.2).in_round(n) for n in range(1, 6)]
    counts = np.bincount(np.concatenate(rounds), minlength=20)
    assert counts.min() > 20  # 40 expected, deviation 5.7
    assert draw.rounds_of(3, 200) == tuple(n for n, ids in enumerate(rounds, 1) if 3 in ids)
    assert len(Participation(0, 3, 0.33).in_round(1)) == 1
    assert Participation(0, 3, 1.0).in_round(7) == (0, 1, 2)
    with pytest.raises(SettingError, match=r"run.participation must be at least 0.1 "):
        Participation(0, 10, 0.01)  # not rounded up to one client


def test_most_rounds_match_counted_rounds() -> None:
    draw, groups, rounds = Participation(3, 12, 0.3), (0, 1, 0, 2) * 3, (1, 2, 7, 40)
    expected = [
        [max(len(draw.rounds_of(k, n)) for k in range(12) if groups[k] == g) for g in range(3)]
        for n in rounds
    ]
    assert most_rounds(draw, groups, rounds).tolist() == expected
    full = most_rounds(Participation(3, 12, 1.0), groups, (1, 10**12))
    assert full.tolist() == [[1, 1, 1], [10**12] * 3]


def test_plan_matches_composition_per_client(tmp_path: Path) -> None:
    """The reference composes the spent and the planned rows of each client."""
    terms = {"noise_multiplier": 2.0, "ledger": tmp_path, "sample_rate": 0.1, "mechanism": "dp-sgd"}
    settings = tiny(rounds=6, privacy=terms)
    spent = Release(1, "images", "m", "c", 3.0, 1.0, 1.0, "full", 4, 7)
    for client, count in (("client-001", 1), ("client-002", 5), ("client-003", 1)):
        path = tmp_path / f"{client}.jsonl"
        ledger = Ledger(client, path, dataset=data_set_id(settings))
        for _ in range(count):
            ledger.charge(spent)
    run = plan_of(settings)
    participation = Participation(0, 4, 0.5)
    for number in run.shown_rounds:
        rows = [
            [*history.releases, *run.planned(participation.rounds_of(k, number))]
            for k, history in enumerate(run.histories)
        ]
        expected = max(epsilon(part, 1e-5) for part in rows)
        assert run.planned_epsilon(number) == pytest.approx(expected, rel=1e-12)
    assert run.planned_epsilon() == run.planned_epsilon(6)


def test_long_plans_state_epsilon_after_chosen_rounds() -> None:
    assert shown_rounds(1000) == tuple(range(1, 1001))
    assert shown_rounds(1001)[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert shown_rounds(1001)[-3:] == (800, 1000, 1001)
    assert len(shown_rounds(10**12)) < 50


def test_planning_draws_each_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a plan must not grow with the square of the rounds or with clients × rounds."""
    drawn: list[int] = []
    draw = Participation._drawn
    monkeypatch.setattr(Participation, "_drawn", lambda *args: drawn.append(args[1]) or draw(*args))
    settings = tiny(
        run={"method": "fedavg", "rounds": 40, "participation": 0.1, "seed": 987},
        partition={"clients": 200},
        privacy={"epsilon": 8.0},
    )
    run = plan_of(settings)
    headline(run)
    assert len(list(map(run.planned_epsilon, run.shown_rounds))) == 40
    assert sorted(drawn) == list(range(1, 41))


@pytest.mark.parametrize(
    ("method", "privacy"),
    [("fedavg", {"sample_rate": 1.0}), ("feddm", {"mechanism": "paper"})],  # paper is not checked
)
def test_unwritable_ledger_prevents_all_charges(
    method: str, privacy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = {"noise_multiplier": 3.0, "ledger": tmp_path, **privacy}
    settings = tiny(method, run={"method": method, "rounds": 1}, privacy=privacy)
    simulate(settings)
    original = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    check = Ledger.check_writable

    def refuse(self: Ledger) -> None:
        if self.path == max(original):  # as root, file modes refuse nothing
            raise LedgerError("cannot write to ledger")
        check(self)

    monkeypatch.setattr(Ledger, "check_writable", refuse)
    with pytest.raises(LedgerError, match="cannot write"):
        simulate(settings)
    assert {path: path.read_bytes() for path in original} == original


@pytest.mark.parametrize("method", ["feddm", "fedaf"])
def test_returning_clients_keep_their_images(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    restore_images = sets.restore_images

    def spy(start: Any, segments: Any, memories: Any) -> None:
        seen.append(tuple("images" in m for m in memories))
        new = start.clone()
        restore_images(start, segments, memories)
        for position, memory in enumerate(memories):
            rows = segments.of(position)
            expected = memory["images"].view_as(start[rows]) if "images" in memory else new[rows]
            assert torch.equal(start[rows], expected)

    monkeypatch.setattr(sets, "restore_images", spy)
    simulate(tiny(method, rounds=4))
    participation, returning = Participation(0, 4, 0.5), set[int]()
    for number, flags in enumerate(seen, 1):
        assert flags == tuple(k in returning for k in participation.in_round(number))
        returning |= set(participation.in_round(number))
    assert any(len(set(flags)) == 2 for flags in seen)  # the mixed case happened


def test_epsilon_counts_rounds_of_each_client(tmp_path: Path) -> None:
    settings = tiny("feddm", rounds=4, privacy={"epsilon": 5.0})
    result = simulate(settings, output=tmp_path)
    rounds = [len(Participation(0, 4, 0.5).rounds_of(k, 4)) for k in range(4)]
    assert len(set(rounds)) > 1
    guarantee: Any = result.privacy["guarantee"]
    spent = [guarantee["epsilon_by_client"][f"client-{k:03d}"] for k in range(4)]
    assert 4.95 < max(spent) <= 5.0
    assert np.argsort(spent, kind="stable").tolist() == np.argsort(rounds, kind="stable").tolist()
    sections = settings.to_mapping()
    full = plan_of(resolve({**sections, "run": {**sections["run"], "participation": 1.0}}))
    assert result.summary["differential_privacy"]["noise_multiplier"] < full.sigma
    assert verify_run(result.folder).problems == []


def test_data_set_id_ignores_local_split() -> None:
    plain = data_set_id(tiny())
    assert data_set_id(tiny(partition={"clients": 4, "local_test": 0.2})) == plain
    assert data_set_id(tiny(partition={"clients": 4, "subset": 0.5})) != plain
    # the id of the first version: ledgers are long-lived
    assert data_set_id(resolve({})) == "digits-3840bad0acf7"
