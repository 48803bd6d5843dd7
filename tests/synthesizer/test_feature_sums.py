"""Mechanism `features`: what is released, how often, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.data.images import ImageData
from fedsynth.methods.feddm import FedDM
from fedsynth.models.flat import flatten
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.matching import ExactMatcher, NetworkFeatures
from fedsynth.synthesizer.condensation.private_matchers import FeatureSumMatcher
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import HOSTILE, charged, context, convnet, digits

N, IPC, WIDTH = 60, 2, 4 * 4 + 10


def data(n: int = N) -> ImageData:
    return digits(np.arange(n) % 10)


def seen(logit_weight: float = 1.0) -> NetworkFeatures:
    return NetworkFeatures(convnet().requires_grad_(False), logit_weight, None)


def group(images: ImageData, parts: list[Tensor]) -> PrivateClientView:
    return PrivateClientView(range(len(parts)), images, parts, [])


def matcher(
    clients: PrivateClientView,
    networks: int,
    sigma: float,
    clip: float,
    series: type = GaussianSumMechanism,
) -> FeatureSumMatcher:
    sums = Release(1, "sums", "features", "x", sigma, clip, 1.0, "full", networks, 10 * WIDTH)
    counts = Release(1, "counts", "features", "1", sigma, 1.0, 1.0, "full", 1, 10)
    guards = [BudgetEnforcer(Ledger(str(k)), 1e-5, None) for k in clients.ids]
    of_sums, of_counts = (
        [series(row, 10, guard, SecretGenerator()) for guard in guards] for row in (sums, counts)
    )
    return FeatureSumMatcher(clients, of_sums, of_counts, networks, 1.0)


def synthetic(segments: int = 10) -> Tensor:
    return torch.randn(segments, IPC, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_without_noise_and_clipping_the_gradient_is_the_exact_one() -> None:
    """At the releasing step and at later ones, for two clients; class means are divided by the
    (noiseless) true counts."""
    images, parts = data(), [torch.arange(23), torch.arange(23, N)]
    features, S = seen(), synthetic(20)
    clients = ExactClientView([0, 1], images, parts)
    batches = BatchIndices(clients, clients.segments(1), 100, 1, seed=0, round=1)
    exact = ExactMatcher(clients, batches)
    ours = matcher(group(images, parts), 1, 1e-12, 1e6)
    held = [int((images.labels[p] == c).sum()) for p in parts for c in range(10)]
    assert ours.counts.tolist() == pytest.approx(held)
    for step, at in ((0, S), (1, S + 0.1)):
        expected = exact.gradient(0, features, at)
        torch.testing.assert_close(
            ours.gradient(step, features, at), expected, atol=1e-5, rtol=1e-4
        )


def test_data_are_touched_m_plus_one_times_however_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: fresh noise on cached clean sums, a release for each step."""
    calls: list[int] = []
    original = PrivateClientView.class_sums

    def spy(self: PrivateClientView, series: Any, rows: Any) -> Any:
        calls.append(1)
        return original(self, series, rows)

    monkeypatch.setattr(PrivateClientView, "class_sums", spy)
    clients = group(data(), [torch.arange(N)])
    features, S, ours = seen(), synthetic(), matcher(clients, 3, 1.0, 1.0)
    first = [ours.gradient(t, features, S) for t in range(3)]
    clients._data = None  # type: ignore[assignment]
    again = [ours.gradient(t, features, S) for t in range(3, 9)]
    assert len(calls) == 4
    for t in range(6):
        assert torch.equal(again[t], first[t % 3])
    assert not torch.equal(first[0], first[1])  # other noise in each release


@given(extra=st.integers(0, 2), label=st.integers(0, 9), records=st.integers(0, 12))
@settings(max_examples=12, deadline=None)
def test_an_example_moves_sums_by_at_most_the_clip_and_counts_by_one(
    extra: int, label: int, records: int
) -> None:
    """On D and D + x, x black, white or noise, through the real matcher: features and logits
    jointly clipped, one class touched."""
    images = digits([*(np.arange(12) % 10), label], HOSTILE[extra])
    clip, sums = 0.05, list[Tensor]()

    class Spy(GaussianSumMechanism):
        def release(self) -> Any:
            assert self._sums is not None
            sums.append(self._sums.clone())
            return super().release()

    for part in (torch.arange(records), torch.cat([torch.arange(records), torch.tensor([12])])):
        noisy = matcher(group(images, [part]), 1, 1e-9, clip, Spy)
        noisy.gradient(0, seen(5.0), synthetic())
    counts, moved = sums[2] - sums[0], sums[3] - sums[1]
    assert counts.flatten().tolist() == [float(c == label) for c in range(10)]
    assert 0.9 * clip < moved.norm() <= clip * (1 + 1e-4)
    assert moved[[c for c in range(10) if c != label]].abs().max() < 1e-6


def test_classes_with_small_released_counts_are_not_sent_but_kept() -> None:
    """Half of the classes are not there: with little noise exactly the others are sent; the start
    of the next round has all."""
    method = FedDM(ipc=IPC, iterations=4, networks=2, min_examples=10)
    ctx = context(PrivacySettings(noise_multiplier=0.01, mechanism="features"), nominal=60.0)
    message = method.broadcast(method.initial_state(ctx.architecture.state_dict()), ctx)
    clients = charged(method, ctx, digits(np.arange(200) % 5))
    ((upload, memory),) = method.client_step(message, clients, [{}], ctx)
    assert dict(upload.arrays())["labels"].tolist() == [c for c in range(5) for _ in range(IPC)]
    assert memory["images"].shape == (10 * IPC, 1, 8, 8)
    assert torch.isfinite(memory["images"]).all()


def test_charges_are_m_sums_and_one_count_with_the_shares_that_the_docs_say() -> None:
    """μ² = M/σ² + 1/σ_count² with σ_count = count_noise·σ/√M, so counts take 1/(1 +
    count_noise²)."""
    method = FedDM(networks=16, iterations=100, count_noise=3.0)
    privacy = PrivacySettings(noise_multiplier=8.0, mechanism="features")
    sums, counts = (plan.release(1, 8.0) for plan in method.release_plans(privacy, context()))
    assert (sums.steps, counts.steps, counts.sensitivity, counts.dimension) == (16, 1, 1.0, 10)
    assert sums.sample_rate == counts.sample_rate == 1
    assert counts.noise_multiplier == pytest.approx(3 * 8 / 4)
    few = replace(method, iterations=5).release_plans(privacy, context())[0]
    assert few.steps == 5  # a network that no step uses is not released


@pytest.mark.parametrize(("target", "factor"), [(1.0, 3.73), (3.0, 1.39), (10.0, 0.50)])
def test_the_noise_that_m_networks_need(target: float, factor: float) -> None:
    """privacy.md: σ = 3.73√M, 1.39√M, 0.50√M for ε = 1, 3, 10 at δ = 1e-5, one round, without
    counts."""
    row = Release(1, "sums", "features", "x", factor * 4, 1.0, 1.0, "full", 16, 10)
    assert epsilon([row], 1e-5) == pytest.approx(target, rel=0.02)
    if target == 1.0:
        assert epsilon([row, replace(row, noise_multiplier=10.0, steps=1)], 1e-5) == pytest.approx(
            1.07, abs=0.01
        )


def test_a_round_in_which_no_count_is_large_enough_ends_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger is charged, so there must be a report; the model stays, and the message does not
    speak of true counts."""
    images = digits(np.zeros(200, dtype=np.int64))
    sections = {
        "run": {"rounds": 1},
        "partition": {"kind": "iid", "clients": 2},
        "model": {"width": 4, "depth": 2},
        "method": {"iterations": 1, "ipc": 1, "min_examples": 100_000},
        "privacy": {"noise_multiplier": 1.0, "mechanism": "features"},
    }
    result = simulate(resolve(sections), data=(images, images), output=tmp_path)
    assert result.folder is not None
    assert (result.folder / "privacy_report.json").exists()
    said = "".join(capsys.readouterr())
    assert "released count" in said
    assert "min_examples examples" not in said
    assert torch.equal(flatten(result.model), flatten(convnet()))
