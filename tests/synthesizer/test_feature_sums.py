"""Mechanism `features`: releases, charges, and the gradient of released sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.data.images import ImageData
from fedsynth.methods.feddm import FedDM
from fedsynth.models.flat import flatten
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.matching import ExactMatcher, NetworkFeatures
from fedsynth.synthesizer.condensation.private_matchers import FeatureSumMatcher
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import convnet, digits, private_clients, round_context
from tests.privacy.support import series

N, IPC, WIDTH = 60, 2, 4 * 4 + 10


def data(n: int = N) -> ImageData:
    return digits(np.arange(n) % 10)


def features_of(logit_weight: float = 1.0) -> NetworkFeatures:
    return NetworkFeatures(convnet().requires_grad_(False), logit_weight, None)


def group(images: ImageData, parts: list[Tensor]) -> PrivateClientView:
    return PrivateClientView(range(len(parts)), images, parts, [])


def matcher(
    clients: PrivateClientView, networks: int, sigma: float, clip: float
) -> FeatureSumMatcher:
    row = {"noise_multiplier": sigma, "sensitivity": clip, "steps": networks}
    sum_series = [series(10, **row, dimension=10 * WIDTH) for _ in clients.ids]
    row = {"noise_multiplier": sigma, "sensitivity": 1.0, "dimension": 10}
    count_series = [series(10, **row) for _ in clients.ids]
    return FeatureSumMatcher(clients, sum_series, count_series, networks, 1.0)


def synthetic(segments: int = 10) -> Tensor:
    return torch.randn(segments, IPC, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_noiseless_gradient_equals_the_exact_gradient() -> None:
    """Checks the releasing step and later ones for two clients; sums are divided by the noiseless
    counts."""
    images, parts = data(), [torch.arange(23), torch.arange(23, N)]
    features, S = features_of(), synthetic(20)
    clients = ExactClientView([0, 1], images, parts)
    batches = BatchIndices(clients, clients.segments(1), 100, 1, seed=0, round=1)
    exact = ExactMatcher(clients, batches)
    private = matcher(group(images, parts), 1, 1e-12, 1e6)
    counts = [int((images.labels[p] == c).sum()) for p in parts for c in range(10)]
    assert private.counts.tolist() == pytest.approx(counts)
    for step, S_step in ((0, S), (1, S + 0.1)):
        expected = exact.gradient(0, features, S_step)
        torch.testing.assert_close(
            private.gradient(step, features, S_step), expected, atol=1e-5, rtol=1e-4
        )


def test_records_are_read_once_per_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken version would add new noise to cached clean sums, or release at each step."""
    calls: list[int] = []
    original = PrivateClientView.class_sums

    def spy(self: PrivateClientView, series: Any, rows: Any) -> Any:
        calls.append(1)
        return original(self, series, rows)

    monkeypatch.setattr(PrivateClientView, "class_sums", spy)
    clients = group(data(), [torch.arange(N)])
    features, S, private = features_of(), synthetic(), matcher(clients, 3, 1.0, 1.0)
    first = [private.gradient(t, features, S) for t in range(3)]
    clients._data = None  # type: ignore[assignment]
    repeated = [private.gradient(t, features, S) for t in range(3, 9)]
    assert len(calls) == 4
    for t in range(6):
        assert torch.equal(repeated[t], first[t % 3])
    assert not torch.equal(first[0], first[1])  # different noise in each release


def test_classes_of_small_counts_are_stored_but_not_sent() -> None:
    """Half of the classes are missing. With little noise the others are sent; the next round starts
    from all."""
    method = FedDM(ipc=IPC, iterations=4, networks=2, min_examples=10)
    ctx = round_context(PrivacySettings(noise_multiplier=0.01, mechanism="features"), nominal=60.0)
    message = method.broadcast(method.initial_state(ctx.architecture.state_dict()), ctx)
    clients = private_clients(method, ctx, digits(np.arange(200) % 5))
    ((upload, memory),) = method.client_step(message, clients, [{}], ctx)
    assert dict(upload.arrays())["labels"].tolist() == [c for c in range(5) for _ in range(IPC)]
    assert memory["images"].shape == (10 * IPC, 1, 8, 8)
    assert torch.isfinite(memory["images"]).all()


def test_charges_are_m_sums_and_one_count() -> None:
    """σ_count = count_noise·σ/√M. Without counts, σ = 3.73√M, 1.39√M, 0.50√M give ε = 1, 3, 10 at
    δ = 1e-5 in one round; counts take 1/(1 + count_noise²) of μ²."""
    method = FedDM(networks=16, iterations=100, count_noise=3.0)
    privacy = PrivacySettings(noise_multiplier=8.0, mechanism="features")
    sums, counts = (plan.release(1, 8.0) for plan in method.release_plans(privacy, round_context()))
    assert (sums.steps, counts.steps, counts.sensitivity, counts.dimension) == (16, 1, 1.0, 10)
    assert sums.sample_rate == counts.sample_rate == 1
    assert counts.noise_multiplier == pytest.approx(3 * 8 / 4)
    few = replace(method, iterations=5).release_plans(privacy, round_context())[0]
    assert few.steps == 5  # unused networks are not released
    for target, factor in ((1.0, 3.73), (3.0, 1.39), (10.0, 0.50)):
        row = replace(sums, noise_multiplier=factor * 4)
        assert epsilon([row], 1e-5) == pytest.approx(target, rel=0.02)


def test_round_without_large_counts_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger is charged, so a report is due. The model stays, and the warning blames the
    noise, not true counts."""
    images = digits(np.zeros(200, dtype=np.int64))
    sections = {
        "run": {"rounds": 1},
        "partition": {"kind": "iid", "clients": 2},
        "model": {"width": 4, "depth": 2},
        "method": {"iterations": 1, "ipc": 1, "min_examples": 100_000},
        "privacy": {"noise_multiplier": 1.0, "mechanism": "features"},
    }
    result = simulate(resolve(sections), data=(images, images), output=tmp_path)
    assert (result.folder / "privacy_report.json").exists()  # type: ignore[operator]
    assert "noise hides the counts" in "".join(capsys.readouterr())
    assert torch.equal(flatten(result.model), flatten(convnet()))
