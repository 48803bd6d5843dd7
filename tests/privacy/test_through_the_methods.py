"""The wiring: what FedDM and FedAvg release, end to end, is the theorem's statistic at the public
scale and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ClientGroup, ExactClientView, PrivateClientView
from fedsynth.core.method import Method
from fedsynth.data.partition import partition
from fedsynth.federation.client_runtime import ClientBudget
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.feddm import FedDM
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.matching import NetworkFeatures, frozen_means
from fedsynth.synthesizer.condensation.private_matchers import GradientMatcher, ResidualMatcher
from tests.digits import HOSTILE, charged, context, convnet, digits
from tests.privacy.support import guard, release


def moves(method: Method, memory: dict[str, Tensor], start: Any, **privacy: Any) -> list[Tensor]:
    """Returns how far a client moves from `start`, openly and privately at 4 times its size."""
    data = digits(np.arange(60) % 10)
    settings = PrivacySettings(noise_multiplier=1e-12, clip=1e6, sample_rate=1.0, **privacy)
    found = []
    for ctx in (context(None, nominal=240.0), context(settings, nominal=240.0)):
        clients: ClientGroup = ExactClientView([0], data, [torch.arange(60)])
        if ctx.privacy is not None:
            clients = charged(method, ctx, data)
        message = method.broadcast(method.initial_state(ctx.architecture.state_dict()), ctx)
        ((upload, _),) = method.client_step(message, clients, [memory], ctx)
        arrays = dict(upload.arrays())
        first = start or {f"parameters.{k}": v for k, v in ctx.architecture.state_dict().items()}
        found.append(torch.cat([(arrays[name] - first[name]).flatten() for name in first]))
    return found


@pytest.mark.parametrize("mechanism", ["residual", "gradient"])
def test_feddm_divides_by_the_nominal_size_and_not_by_the_true_one(mechanism: str) -> None:
    start = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    method = FedDM(ipc=2, iterations=1, image_lr=1.0, min_examples=1)
    exact, private = moves(method, {"images": start}, {"images": start}, mechanism=mechanism)
    torch.testing.assert_close(private, exact * 60 / 240, atol=1e-5, rtol=1e-3)


def test_fedavg_divides_by_the_nominal_size() -> None:
    method = FedAvg(local_epochs=1, batch=100, lr=0.1, momentum=0.0)
    exact, private = moves(method, {}, None)
    torch.testing.assert_close(private, exact * 60 / 240, atol=1e-6, rtol=1e-3)


@given(extra=st.sampled_from(HOSTILE), label=st.integers(0, 9), records=st.integers(0, 12))
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("matcher", [ResidualMatcher, GradientMatcher])
def test_adding_an_example_moves_the_released_sums_by_at_most_the_clip(
    matcher: Any, extra: np.ndarray, label: int, records: int
) -> None:
    """Through the real matcher, every example's residual above the clip in both halves."""
    clip = 0.05
    features = NetworkFeatures(convnet().requires_grad_(False), 5.0, None)
    S = torch.randn(10, 2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = digits([*(np.arange(12) % 10), label], extra)
    sums: list[Tensor] = []

    class Spy(GaussianSumMechanism):
        def release(self) -> Any:
            assert self._sums is not None
            sums.append(self._sums.clone())
            return super().release()

    width = frozen_means(features, S).shape[1] if matcher is ResidualMatcher else S[0].numel()
    row = release(noise_multiplier=1e-9, sensitivity=clip, dimension=10 * width)
    for part in (torch.arange(records), torch.tensor([*range(records), 12])):
        series = Spy(row, 10, guard(), SecretGenerator())
        matcher(PrivateClientView([0], data, [part], []), [series], 1.0).gradient(0, features, S)
    moved = sums[1].cpu() - sums[0].cpu()
    assert 0.9 * clip < moved.norm() <= clip * (1 + 1e-4)
    assert moved[[c for c in range(10) if c != label]].abs().max() < 1e-6


def private_run(method: str = "feddm", **privacy: Any) -> Any:
    """Returns settings of a run whose clients are partly empty, and 200 records."""
    trains = {"local_epochs": 1, "batch": 100}
    fast = {"feddm": {"iterations": 2, "ipc": 1, "server_epochs": 1, "batch": 3}}
    sections = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"kind": "dirichlet-plain", "clients": 4, "alpha": 0.01, "seed": 9},
        "model": {"width": 4},
        "method": fast.get(method, trains),
        "privacy": {"noise_multiplier": 3.0, **privacy},
    }
    return resolve(sections), digits(np.arange(200) % 10)


@pytest.mark.parametrize(
    ("method", "rate", "steps"), [("feddm", 30 / 359.5, 2), ("fedavg", 100 / 359.5, 4)]
)
def test_the_schedule_comes_from_the_specification_and_not_from_the_data(
    method: str, rate: float, steps: int
) -> None:
    """Catches: q, steps or nominal size from len(train)."""
    settings_, data = private_run(method)
    report: Any = simulate(settings_, data=(data, data)).privacy
    (row,) = report["ledger"]
    assert row["sample_rate"] == pytest.approx(rate)
    assert row["steps"] == steps


def test_executed_releases_are_those_that_were_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an empty client skipped, a step more or less than accounted."""
    released: list[float] = []
    original = GaussianSumMechanism.release

    def spy(self: GaussianSumMechanism) -> Any:
        released.append(1)
        return original(self)

    monkeypatch.setattr(GaussianSumMechanism, "release", spy)
    for method, steps, privacy in (
        ("feddm", 2, {}),
        ("feddm", 2 + 1, {"mechanism": "features"}),  # two networks, and the counts
        ("fedavg", 4, {}),
        ("fedfm", 4 + 2, {}),  # and the anchors' sums and counts
    ):
        released.clear()
        settings_, data = private_run(method, **privacy)
        assert min(map(len, partition(data.labels.numpy(), settings_.resolved_partition, 10))) == 0
        simulate(settings_, data=(data, data))
        assert len(released) == 4 * 2 * steps


def test_clients_of_a_run_have_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: one key for all clients of a run."""
    draws: list[tuple[int, Tensor]] = []
    original = SecretGenerator.normal

    def spy(self: SecretGenerator, *args: Any) -> Tensor:
        noise = original(self, *args)
        draws.append((id(self), noise.flatten() / noise.std()))
        return noise

    monkeypatch.setattr(SecretGenerator, "normal", spy)
    settings_, data = private_run()
    simulate(settings_, data=(data, data))
    assert len({key for key, _ in draws}) == 4
    noises = torch.stack([noise for _, noise in draws])
    correlations = torch.corrcoef(noises) - torch.eye(len(draws))
    assert correlations.abs().max() < 0.4  # independent draws of 260 numbers: 5 deviations are 0.31


def test_what_a_private_run_writes_is_public(tmp_path: Path) -> None:
    """Catches: clean losses, counts or timings in logs."""
    settings_, data = private_run()
    result = simulate(settings_, data=(data, data), output=tmp_path)
    assert result.folder is not None
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert {key for row in rows for key in row} == {
        "round", "test_accuracy", "epsilon", "upload_floats", "upload_bytes", "client_upload_bytes",
    }  # fmt: skip
    # equal, also for empty clients
    assert {tuple(row["client_upload_bytes"]) for row in rows} == {(10 * (64 * 4 + 8),) * 4}
    summary = json.loads((result.folder / "summary.json").read_text())
    assert set(summary) == {
        "method", "dataset", "rounds", "test_accuracy", "upload_bytes", "upload_floats_per_round", "device", "seed",
        "differential_privacy", "folder", "settings",
    }  # fmt: skip
    kinds = (".json", ".jsonl", ".md", ".toml")
    files = [p for p in result.folder.rglob("*") if p.suffix in kinds]
    outside = [p for p in files if "simulation_only" not in p.parts]
    assert len(outside) == 10
    start = json.loads((result.folder / "privacy_start.json").read_text())
    assert set(start) == {
        *("schema_version", "noise_multiplier", "data_set", "test_images", "ledgers"),
        "simulated",  # a simulation or a run over nodes: the same whatever the data
        "warnings",  # from public images and weights, before any data are read
        "run",  # the folder's name and the day: known before any data are read
    }
    assert set(start["run"]) == {"id", "date"}
    assert {(one["rows"], len(one)) for one in start["ledgers"].values()} == {(0, 2)}
    # the true number of records, as a number and not inside a hash or a fraction
    count = re.compile(r"(?<![\w.])200(?![\w.])")
    assert not any(count.search(p.read_text().replace(str(tmp_path), "")) for p in outside)


def test_a_ledger_with_an_unaccounted_release_rules_every_budget_out(tmp_path: Path) -> None:
    settings_, data = private_run(mechanism="paper", ledger=tmp_path)
    simulate(settings_, data=(data, data))
    capped, _ = private_run(mechanism="residual", epsilon=100.0, ledger=tmp_path)
    with pytest.raises(UnaccountedReleaseError, match="epsilon=100 cannot be guaranteed"):
        simulate(capped, data=(data, data))
    noisy, _ = private_run(mechanism="residual", ledger=tmp_path)
    result = simulate(noisy, data=(data, data))
    report: Any = result.privacy
    assert report["guarantee"] is None
    assert any(
        "FedDM's Algorithm 1 as printed" in reason for reason in report["verdict"]["reasons"]
    )
    assert result.summary["differential_privacy"]["guarantee"] is False
    assert not any("epsilon" in row for row in result.metrics)


def test_a_cap_met_inside_a_round_still_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may charge the same ledger between the check and the charge."""
    monkeypatch.setattr(ClientBudget, "check", lambda self, number: None)
    settings_, data = private_run(epsilon=0.2)
    result = simulate(settings_, data=(data, data), output=tmp_path)
    assert len(result.metrics) == 1
    assert result.folder is not None
    assert "ended after" in (result.folder / "privacy_report.md").read_text()
