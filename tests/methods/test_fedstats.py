"""FedStats: sensitivities, sums over any partition, accounting, the server's arithmetic, images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import (
    FedStats,
    PrivacySettings,
    RunSettings,
    export_run,
    load_synthetic,
    simulate,
)
from fedsynth.core.client import ExactClientView, Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ImageData, denormalise
from fedsynth.data.load import load_dataset
from fedsynth.errors import SettingError
from fedsynth.features import FeatureMap, register_features
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics.class_moments import PIXELS as PICTURE
from fedsynth.methods.statistics.class_moments import ClassMoments, Spectrum, target_norm
from fedsynth.methods.statistics.settings import CENTRE, MOMENTS, STEP, FedStatsState, StatisticSums
from fedsynth.methods.statistics.whitening import COVARIANCES
from fedsynth.models.on_features import FeatureLinear
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, MAIN, ReleasePlan
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.results.verification import verify_run
from tests.digits import SPEC, charge_for, digits, round_context
from tests.privacy.support import guard

PIXELS = FedStats(features="pixels", second_moments="yes")
PICTURES = FedStats(features="pixels", second_moments="no", ipc=1, image_steps=1)
WHITE = FedStats(features="scattering", whitening="yes")
RELEASES = (  # a method, the round and exchange of a release, its name, and its field of an upload
    (PIXELS, 1, FIRST, CENTRE, "sums"),
    (PIXELS, 1, MAIN, MOMENTS, "sums"),
    (PIXELS, 2, MAIN, STEP, "sums"),
    (PICTURES, 1, MAIN, MOMENTS, "sums"),  # without second moments
    (PICTURES, 1, FIRST, PICTURE, "pictures"),
    (WHITE, 1, FIRST, COVARIANCES, COVARIANCES),
)
each_release = pytest.mark.parametrize(("method", "number", "phase", "name", "field"), RELEASES)
LABELS = np.arange(20) % 10
ALL_RECORDS = list(range(20))


def network(method: FedStats = PIXELS) -> FeatureLinear:
    net: Any = method.network(None, SPEC, 0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net.classifier.weight.copy_(torch.randn(10, net.embedding_size, generator=generator))
    return net  # type: ignore[no-any-return]


def context(
    number: int, sigma: float | None = None, method: FedStats = PIXELS, **other: Any
) -> RoundContext:
    privacy = None if sigma is None else PrivacySettings(noise_multiplier=sigma)
    federation = {"rounds": 3, "clients": 2, **other}
    return round_context(privacy, number, network=network(method), nominal=20.0, **federation)


def step(
    method: FedStats, clients: Group, number: int, phase: str, field: str, ctx: Any = None
) -> Tensor:
    """Returns the clients' uploads of one release, [clients, D]."""
    message = ModelParameters(network(method).state_dict(), 1.0)
    take = method.first_step if phase == FIRST else method.client_step
    # without privacy nothing is whitened, and no covariances are sent
    call_context = ctx or context(number, 1.0 if field == COVARIANCES else None, method)
    replies = take(message, clients, [{} for _ in clients.ids], call_context)
    return torch.stack([getattr(reply, field).double() for reply, _ in replies])


def sums(
    method: FedStats, data: ImageData, parts: list[list[int]], number: int, phase: str, field: str
) -> Tensor:
    """Returns the noiseless uploads of clients with these records."""
    clients = ExactClientView(range(len(parts)), data, [torch.tensor(p).long() for p in parts])
    return step(method, clients, number, phase, field)


def plan_of(method: FedStats, number: int, name: str, **other: Any) -> ReleasePlan:
    privacy = PrivacySettings(noise_multiplier=1.0)
    plans = method.release_plans(privacy, context(number, method=method, **other))
    return next(plan for plan in plans if plan.name == name)


@each_release
def test_sensitivity_is_at_most_the_clip(
    method: FedStats, number: int, phase: str, name: str, field: str
) -> None:
    """Examples include a black and a white one; the plan charges the clip."""
    plan = plan_of(method, number, name)
    data = digits(LABELS)
    data.images[10], data.images[11] = 0, 255
    total = sums(method, data, [ALL_RECORDS], number, phase, field)
    assert total.shape[1] == plan.dimension
    for removed in range(8, 20):
        remaining = [n for n in ALL_RECORDS if n != removed]
        change = float((total - sums(method, data, [remaining], number, phase, field)).norm())
        assert change <= plan.clip * (1 + 1e-5)
        # of a black image all scattering coefficients are 0
        assert change > 0.02 * plan.clip or (name == COVARIANCES and removed == 10)


@each_release
def test_client_sums_equal_pooled_sums(
    method: FedStats, number: int, phase: str, name: str, field: str
) -> None:
    """Any partition gives the same sums; a client without records sends zeros."""
    data = digits(LABELS)
    pooled = sums(method, data, [ALL_RECORDS], number, phase, field).sum(0)
    by_class = [[n for n in ALL_RECORDS if n % 10 == c] for c in range(10)]
    for parts in (by_class, [list(range(7)), list(range(7, 20)), []]):
        actual = sums(method, data, parts, number, phase, field).sum(0)
        torch.testing.assert_close(actual, pooled, rtol=1e-6, atol=1e-6)


def release(
    method: FedStats, number: int, phase: str, field: str, part: Tensor, ctx: Any
) -> tuple[Tensor, Ledger]:
    """Returns the upload of a private client and its ledger."""
    ledger, generator = Ledger("c"), SecretGenerator(test_only=np.random.default_rng(0))
    allowances = charge_for(method, ctx, [0], [guard(ledger)], [generator], phase)
    clients = PrivateClientView([0], digits(LABELS), [part], allowances, nominal_size=20.0)
    return step(method, clients, number, phase, field, ctx)[0], ledger


@each_release
def test_private_sums_are_open_sums_plus_noise(
    method: FedStats, number: int, phase: str, name: str, field: str, without_noise: None
) -> None:
    ctx = context(number, 1.0, method)
    actual, ledger = release(method, number, phase, field, torch.arange(20), ctx)
    expected = sums(method, digits(LABELS), [ALL_RECORDS], number, phase, field)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert plan_of(method, number, name).quantity in [row.quantity for row in ledger.releases]


@each_release
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_clients_without_records_send_noise(
    method: FedStats, number: int, phase: str, name: str, field: str, aggregation: str
) -> None:
    """The upload must not reveal that the client has no records."""
    method = replace(method, aggregation=aggregation)
    plan = plan_of(method, number, name, clients=5)
    ctx = context(number, 3.0, method, clients=5)
    actual, _ = release(method, number, phase, field, torch.arange(0), ctx)
    expected = (
        3.0 * plan.relative_noise_multiplier * plan.clip / (2 if aggregation == "secure" else 1)
    )
    assert float(actual.std()) == pytest.approx(expected, rel=0.2)


def test_clip_rate_and_participation_are_fixed() -> None:
    for wrong in ({"clip": 1.0}, {"sample_rate": 0.5}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            PIXELS.release_plans(PrivacySettings(epsilon=1.0, **wrong), context(1))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="participation"):
        simulate(RunSettings(PIXELS, participation=0.5, privacy=PrivacySettings(epsilon=1.0)))
    with pytest.raises(SettingError, match="moment_share"):
        FedStats(centre_share=0.5, moment_share=0.5)


def test_closed_form_is_ridge_regression() -> None:
    """Compares NumPy's solver on moments that were packed, summed and unpacked."""
    draws = np.random.default_rng(0)
    z = draws.normal(size=(200, 5))
    z /= np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
    labels = draws.integers(0, 3, 200)
    e = np.eye(3)[labels] - 1 / 3
    triangle = np.array([z[:, i] @ z[:, j] * (1 if i == j else 2**0.5)
                         for i in range(5) for j in range(i, 5)])  # fmt: skip
    sums_D = 0.5**0.5 * np.concatenate([triangle, (e.T @ z).ravel() / target_norm(3)])
    moments = ClassMoments.unpacked(Pool(torch.from_numpy(sums_D), 0.7, 200.0), 5, 3)
    np.testing.assert_allclose(moments.second, z.T @ z / 200, atol=1e-12)
    spectrum = Spectrum.of(moments, ridge=0.5)
    ridge = 0.5 * (0.7 * 2**0.5 / 200) * 5**0.5
    expected = np.linalg.solve(z.T @ z / 200 + ridge * np.eye(5), (e.T @ z / 200).T).T
    np.testing.assert_allclose(spectrum.solve(moments.crossed), expected, atol=1e-9)


def test_negative_eigenvalues_become_the_ridge() -> None:
    moments = ClassMoments(torch.diag(torch.tensor([-2.0, 1.0])).double(), torch.zeros(2, 2), 1.0)
    spectrum = Spectrum.of(moments, ridge=0.1)
    assert spectrum.values.tolist() == pytest.approx([0.1 * 2**0.5, 1 + 0.1 * 2**0.5])
    step = spectrum.step(torch.tensor([[1.0, 0.0]]).double(), floor=4.0)
    assert step.tolist() == [pytest.approx([0.25, 0.0])]


def test_features_that_are_not_finite_are_dropped() -> None:
    """Uses a feature map that fails on some images."""

    def broken(x: Tensor) -> Tensor:
        features = x.flatten(1) - 0.5
        return torch.where(x.mean(dim=(1, 2, 3))[:, None] > 0.4, torch.nan, features)

    register_features(
        "broken", lambda shape: FeatureMap("broken", shape, 64, 4.0, 2.0, "a test", broken)
    )
    train, test = load_dataset("digits")
    few = train.subset(torch.arange(200))
    run = RunSettings(FedStats(features="broken"), rounds=2)
    result = simulate(run, data=(few, test), parts=list(np.arange(200).reshape(2, 100)))
    assert all(bool(torch.isfinite(value).all()) for value in result.model.state_dict().values())


@pytest.mark.parametrize("method", [PIXELS, PICTURES, WHITE])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_releases_of_a_run_spend_the_whole_budget(method: FedStats, rounds: int) -> None:
    """Shares of μ², which are 1/ratio², add up to 1. Without second moments, moments have a step's
    share."""
    privacy = PrivacySettings(noise_multiplier=1.0)
    plans = method.release_plans(privacy, context(1, method=method, rounds=rounds))
    shares = {plan.name: plan.relative_noise_multiplier**-2 for plan in plans}
    step = shares.get(STEP, 0.0)
    assert sum(shares.values()) + max(0, rounds - 2) * step == pytest.approx(1.0)
    assert (STEP in shares) == (rounds > 1)
    if step:
        assert (shares[MOMENTS] == pytest.approx(step)) == (not method.has_second(privacy))
    if method is PICTURES:
        assert shares[PICTURE] == pytest.approx(method.pixel_share)
    if method is WHITE:
        assert shares[COVARIANCES] == pytest.approx(method.covariance_share)


QUICK = FedStats(features="pixels", ipc=2, image_steps=5)


def image_context(number: int = 1, rounds: int = 1, sigma: float | None = None) -> RoundContext:
    privacy = None if sigma is None else PrivacySettings(noise_multiplier=sigma)
    network = FeatureLinear(QUICK.map_of(SPEC), SPEC)
    return round_context(privacy, number, network=network, nominal=20.0, rounds=rounds)


def initial_state() -> FedStatsState:
    network = FeatureLinear(QUICK.map_of(SPEC), SPEC)
    return FedStatsState(network.state_dict())


@pytest.mark.parametrize("second", ["yes", "no"])
def test_class_means_equal_numpy(second: str) -> None:
    """Classes are equally frequent, and means are taken about the common mean."""
    z = 0.1 * np.random.default_rng(0).normal(size=(20, 64))
    labels = np.arange(20) % 10
    crossed = (np.eye(10)[labels] - 0.1).T @ z / target_norm(10)
    squares = np.array([z[:, i] @ z[:, j] * (1 if i == j else 2**0.5)
                        for i in range(64) for j in range(i, 64)])  # fmt: skip
    sums = crossed.ravel()
    if second == "yes":
        sums = 0.5**0.5 * np.concatenate([squares, sums])
    method = FedStats(features="pixels", ipc=1, image_steps=1, second_moments=second)
    upload = StatisticSums(torch.from_numpy(sums).float())
    state = method.at_end(
        method.server_step(initial_state(), {0: upload}, image_context()), image_context()
    )
    means = np.stack([z[labels == c].mean(axis=0) for c in range(10)])
    assert state.class_means is not None
    np.testing.assert_allclose(state.class_means, means - means.mean(axis=0), atol=1e-5)


def test_images_depend_only_on_the_last_server_state() -> None:
    """Equal sums give equal images without clients or their data."""
    method = replace(QUICK, second_moments="no")
    first, second = (final_state(method) for _ in range(2))
    assert torch.equal(first.images, second.images)  # type: ignore[arg-type]
    torch.testing.assert_close(first.soft_labels.sum(dim=1), torch.ones(20))  # type: ignore[union-attr]
    early_state = method.server_step(initial_state(), random_sums(), image_context(rounds=2))
    assert method.synthetic(early_state, image_context()) is None


def random_sums() -> dict[int, StatisticSums]:
    draws = torch.Generator().manual_seed(0)
    return {0: StatisticSums(torch.randn(10 * 64, generator=draws))}


def final_state(method: FedStats) -> FedStatsState:
    """Returns the state at the end of a round of the same sums."""
    stepped = method.server_step(initial_state(), random_sums(), image_context())
    state = method.at_end(stepped, image_context())
    assert isinstance(state, FedStatsState)
    return state


def pixels(method: FedStats) -> torch.Tensor:
    """Returns [classes, images, 64] in bytes; checks labels and soft labels."""
    state, per_class = final_state(method), method.ipc + method.drawn_ipc
    actual = method.synthetic(state, image_context())
    assert actual is not None
    assert actual[1].tolist() == [c for c in range(10) for _ in range(per_class)]
    assert state.soft_labels is not None
    assert len(state.soft_labels) == len(actual[0])
    return denormalise(actual[0], SPEC).view(10, per_class, -1)


def test_drawn_images_follow_optimised_images() -> None:
    """Drawn images follow a class's optimised images, which stay unchanged; all differ."""
    optimised = replace(QUICK, second_moments="no")
    both = pixels(replace(optimised, drawn_ipc=3))
    assert torch.equal(both[:, :2], pixels(optimised))
    assert len(both.flatten(0, 1).unique(dim=0)) == 50


def test_export_states_the_trust_model_of_epsilon(tmp_path: Path) -> None:
    """An ε of shared noise needs the assumption next to it."""
    method = replace(QUICK, aggregation="secure")
    settings = RunSettings(method, rounds=1, privacy=PrivacySettings(epsilon=8.0))
    run = simulate(settings, output=tmp_path, quiet=True)
    assert verify_run(str(run.folder)).problems == []
    text = (export_run(str(run.folder), tmp_path / "share") / "README.md").read_text()
    assert "because clients shared noise: assumed, not executed." in text


def test_run_that_exhausts_its_budget_exports_images(tmp_path: Path) -> None:
    """Images are post-processing: they cost no budget and may be exported."""
    privacy = PrivacySettings(noise_multiplier=3.0, epsilon=1.2)
    run = simulate(RunSettings(QUICK, rounds=6, privacy=privacy), output=tmp_path, quiet=True)
    assert 1 <= len(run.metrics) < 6
    assert verify_run(str(run.folder)).problems == []
    share = export_run(str(run.folder), tmp_path / "share")
    actual = load_synthetic(share)
    assert len(actual.labels) == 20
    assert actual.soft_labels is not None
    text = (share / "README.md").read_text()
    assert "classifier, which was not trained on them" in text


@pytest.mark.parametrize(("second", "aggregation"), [("no", "own"), ("yes", "secure")])
def test_signal_to_noise_equals_a_simulation(second: str, aggregation: str) -> None:
    """Sums orthogonal classes of equal examples over four clients who each add noise."""
    method = FedStats(features="pixels", second_moments=second, aggregation=aggregation)
    privacy = PrivacySettings(noise_multiplier=3.0)
    network = FeatureLinear(method.map_of(SPEC), SPEC)
    ctx = round_context(privacy, network=network, nominal=50.0, rounds=3, clients=4)
    plans = {plan.name: plan for plan in method.release_plans(privacy, ctx)}
    z, e = np.eye(64)[:10], np.eye(10) - 0.1  # an example of each class
    crossed = np.einsum("nc,nd->ncd", e / target_norm(10), z).reshape(10, -1)
    i, j = np.triu_indices(64)
    squares = np.einsum("nd,ne->nde", z, z)[:, i, j] * np.where(i == j, 1, 2**0.5)
    both = 0.5**0.5 * np.concatenate([squares, crossed], axis=1)
    cases = {
        "moments": both if second == "yes" else crossed,
        "step": -method.step_clip * crossed,
        "centre": np.tile(plans["centre"].clip * np.eye(64)[0], (10, 1)),
    }
    draws = np.random.default_rng(0)
    for name, rows in cases.items():
        plan: ReleasePlan = plans[name]
        signal = np.linalg.norm(20 * rows.sum(axis=0))  # 200 examples
        deviation = 3.0 * plan.relative_noise_multiplier * plan.clip / plan.shares**0.5
        noise = draws.normal(0, deviation, (50, 4, rows.shape[1])).sum(axis=1)
        expected = signal / np.sqrt(np.square(noise).sum(axis=1).mean())
        assert plan.signal_to_noise(3.0, 200, 4) == pytest.approx(expected, rel=0.03)
