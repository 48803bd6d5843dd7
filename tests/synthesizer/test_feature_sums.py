"""Mechanism `features`: what is released, how often, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth.core.charging import charge_for
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import Compute, RoundContext, round_context
from fedsynth.core.state import ServerState
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.observer import Observer
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods.feddm import FedDM
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.feature_sums import FeatureSumMatcher
from fedsynth.synthesizer.condensation.loop import NetworkFeatures
from fedsynth.synthesizer.condensation.matchers import ExactMatcher
from fedsynth.synthesizer.condensation.perturbation import Perturbations
from fedsynth.synthesizer.condensation.real_batches import BatchIndices

SPEC, N, IPC, WIDTH = dataset_spec("digits"), 60, 2, 4 * 4 + 10


def data(n: int = N, seed: int = 0, labels: np.ndarray | None = None) -> ImageData:
    images = np.random.default_rng(seed).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, np.arange(n) % 10 if labels is None else labels, SPEC)


def network() -> Any:
    return build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0).requires_grad_(
        False
    )


def group(images: ImageData, parts: list[Tensor]) -> PrivateClients:
    return PrivateClients(range(len(parts)), images, parts, [])


def charged_group(method: FedDM, ctx: RoundContext, images: ImageData, n: int) -> PrivateClients:
    guard = Guard(Ledger("0"), 1e-5, None)
    charged = charge_for(method, ctx, [0], [guard], [SecretGenerator()])
    return PrivateClients([0], images, [torch.arange(n)], charged)


def matcher(
    clients: PrivateClients, networks: int, sigma: float, clip: float, floor: float = 1.0
) -> FeatureSumMatcher:
    sums = Release(1, "sums", "features", "x", sigma, clip, 1.0, "full", networks, 10 * WIDTH)
    counts = Release(1, "counts", "features", "1", sigma, 1.0, 1.0, "full", 1, 10)
    guards = [Guard(Ledger(str(k)), 1e-5, None) for k in clients.ids]
    series, counted = (
        [GaussianSums(row, 10, guard, SecretGenerator()) for guard in guards]
        for row in (sums, counts)
    )
    return FeatureSumMatcher(clients, series, counted, networks, floor)


def synthetic(segments: int = 10) -> Tensor:
    return torch.randn(segments, IPC, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_without_noise_and_clipping_the_gradient_is_the_exact_one() -> None:
    """At the releasing step and at later ones, for two clients; class means are divided by the
    (noiseless) true counts."""
    images, parts = data(), [torch.arange(23), torch.arange(23, N)]
    features, S = NetworkFeatures(network(), 1.0, None), synthetic(20)
    open_clients = OpenClients([0, 1], images, parts)
    batches = BatchIndices(
        open_clients, open_clients.segments(1), 100, 1, small_class="all", seed=0, round=1
    )
    exact = ExactMatcher(open_clients, batches)
    ours = matcher(group(images, parts), 1, 1e-12, 1e6)
    assert ours.counts.tolist() == pytest.approx(
        [int((images.labels[p] == c).sum()) for p in parts for c in range(10)]
    )
    torch.testing.assert_close(
        ours.gradient(0, features, S), exact.gradient(0, features, S), atol=1e-5, rtol=1e-4
    )
    moved = S + 0.1
    torch.testing.assert_close(
        ours.gradient(1, features, moved), exact.gradient(0, features, moved), atol=1e-5, rtol=1e-4
    )


def test_data_are_touched_m_plus_one_times_however_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: fresh noise on cached clean sums, a release for each step. After M steps the data
    could be gone."""
    calls: list[int] = []
    original = PrivateClients.class_sums

    def spy(self: PrivateClients, series: Any, rows: Any) -> Any:
        calls.append(1)
        return original(self, series, rows)

    monkeypatch.setattr(PrivateClients, "class_sums", spy)
    clients = group(data(), [torch.arange(N)])
    features, S, ours = (
        NetworkFeatures(network(), 1.0, None),
        synthetic(),
        matcher(clients, 3, 1.0, 1.0),
    )
    first = [ours.gradient(t, features, S) for t in range(3)]
    clients._data = None  # type: ignore[assignment]
    again = [ours.gradient(t, features, S) for t in range(3, 9)]
    assert len(calls) == 4
    for t in range(6):
        assert torch.equal(again[t], first[t % 3])
    assert not torch.equal(first[0], first[1])  # other noise in each release


def test_networks_come_again_after_a_period() -> None:
    networks = Perturbations(network(), 1.0, seed=0, round=1, device=torch.device("cpu"), period=3)
    drawn = [flatten(networks.draw()) for _ in range(7)]
    for t in range(4):
        assert torch.equal(drawn[t], drawn[t + 3])
    assert not torch.equal(drawn[0], drawn[1])


@given(extra=st.integers(0, 2), label=st.integers(0, 9), records=st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_an_example_moves_sums_by_at_most_the_clip_and_counts_by_one(
    extra: int, label: int, records: int
) -> None:
    """On D and D + x, x black, white or noise, through the real matcher: features and logits
    jointly clipped, one class touched."""
    hostile = [
        np.zeros((1, 1, 8, 8)),
        np.full((1, 1, 8, 8), 255),
        np.random.default_rng(7).integers(0, 256, (1, 1, 8, 8)),
    ][extra]
    base = data(12)
    images = from_arrays(
        np.concatenate([base.images.numpy(), hostile.astype(np.uint8)]),
        np.array([*(np.arange(12) % 10), label]),
        SPEC,
    )
    clip, features, S = 0.05, NetworkFeatures(network(), 5.0, None), synthetic()
    sums: list[Tensor] = []

    class Spy(GaussianSums):
        def release(self) -> Any:
            assert self._sums is not None
            sums.append(self._sums.clone())
            return super().release()

    for part in (torch.arange(records), torch.cat([torch.arange(records), torch.tensor([12])])):
        clients = group(images, [part])
        series = [
            Spy(
                Release(1, "s", "m", "c", 1e-9, bound, 1.0, "full", 1, 10 * width),
                10,
                Guard(Ledger("0"), 1e-5, None),
                SecretGenerator(),
            )
            for bound, width in ((clip, WIDTH), (1.0, 1))
        ]
        FeatureSumMatcher(clients, series[:1], series[1:], 1, 1.0).gradient(0, features, S)
    counts, moved = sums[2] - sums[0], sums[3] - sums[1]
    assert counts.flatten().tolist() == [float(c == label) for c in range(10)]
    assert 0.9 * clip < moved.norm() <= clip * (1 + 1e-4)
    assert moved[[c for c in range(10) if c != label]].abs().max() < 1e-6


def context(privacy: PrivacySettings | None, nominal: float = 60.0) -> RoundContext:
    architecture = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    return round_context(1, 0, torch.device("cpu"), SPEC, architecture, nominal, privacy)


def test_classes_with_small_released_counts_are_not_sent_but_kept() -> None:
    """Half of the classes are not there: with little noise exactly the others are sent; the start
    of the next round has all."""
    images = data(200, labels=np.arange(200) % 5)
    method = FedDM(ipc=IPC, iterations=4, networks=2, min_examples=10)
    ctx = context(PrivacySettings(noise_multiplier=0.01, mechanism="features"))
    message = method.broadcast(ServerState(ctx.architecture.state_dict()), ctx)
    ((upload, memory),) = method.client_step(
        message, charged_group(method, ctx, images, 200), [{}], ctx
    )
    assert dict(upload.arrays())["labels"].tolist() == [c for c in range(5) for _ in range(IPC)]
    assert memory["images"].shape == (10 * IPC, 1, 8, 8)
    assert torch.isfinite(memory["images"]).all()


def test_charges_are_m_sums_and_one_count_with_the_shares_that_the_docs_say() -> None:
    """μ² = M/σ² + 1/σ_count² with σ_count = count_noise·σ/√M, so counts take 1/(1 +
    count_noise²)."""
    method = FedDM(networks=16, iterations=100, count_noise=3.0)
    ctx = context(PrivacySettings(noise_multiplier=8.0, mechanism="features"))
    sums, counts = (plan.release(1, 8.0) for plan in method.private_plans(ctx.privacy, ctx))  # type: ignore[arg-type]
    assert (sums.steps, counts.steps, counts.sensitivity, counts.dimension) == (16, 1, 1.0, 10)
    assert sums.sample_rate == counts.sample_rate == 1
    assert counts.noise_multiplier == pytest.approx(3 * 8 / 4)
    both, alone = 16 / 64 + 1 / 36, 1 / 36
    assert alone / both == pytest.approx(1 / (1 + 9))
    few = replace(method, iterations=5).private_plans(ctx.privacy, ctx)[0]  # type: ignore[arg-type]
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


@pytest.mark.parametrize("mechanism", ["features", "residual"])
def test_private_clients_are_never_compiled(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record more would move the others of its piece to another kernel: in bf16 the sums moved
    by 1.06 clips."""
    asked: list[bool] = []
    original = NetworkFeatures.__init__

    def spy(self: NetworkFeatures, *args: Any, **named: Any) -> None:
        asked.append(named["compiled"])
        original(self, *args, **{**named, "compiled": False})

    monkeypatch.setattr(NetworkFeatures, "__init__", spy)
    method = FedDM(ipc=1, iterations=1, min_examples=1)
    for privacy in (PrivacySettings(noise_multiplier=1.0, mechanism=mechanism), None):
        ctx = replace(context(privacy), compute=Compute(torch.device("cpu"), compiled=True))
        clients = (
            charged_group(method, ctx, data(), N)
            if privacy
            else OpenClients([0], data(), [torch.arange(N)])
        )
        method.client_step(
            method.broadcast(ServerState(ctx.architecture.state_dict()), ctx), clients, [{}], ctx
        )
    assert asked == [False, True]


def test_a_round_in_which_no_count_is_large_enough_ends_in_order(tmp_path: Any) -> None:
    """The ledger is charged, so there must be a report; the model stays, and the message does not
    speak of true counts."""
    notes: list[str] = []

    class Notes(Observer):
        def note(self, text: str) -> None:
            notes.append(text)

    images = data(200, labels=np.zeros(200, dtype=np.int64))
    sections = {
        "run": {"rounds": 1},
        "partition": {"kind": "iid", "clients": 2},
        "model": {"width": 4},
        "method": {"iterations": 1, "ipc": 1, "min_examples": 100_000},
        "privacy": {"noise_multiplier": 1.0, "mechanism": "features"},
    }
    result = simulate(resolve(sections), data=(images, images), output=tmp_path, observer=Notes())
    assert result.folder is not None
    assert (result.folder / "privacy_report.json").exists()
    assert any("released count" in text for text in notes)
    assert not any("min_examples examples" in text for text in notes)
    fresh = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    assert torch.equal(flatten(result.model), flatten(fresh))
