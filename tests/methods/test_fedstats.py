"""FedStats: what each release may move, sums that do not depend on who has what, accounting by a
formula, and the server's arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth import FedStats, PartitionSettings, PrivacySettings, RunSettings, simulate
from fedsynth.core.client import ClientGroup, ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import charge_for
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.errors import SettingError
from fedsynth.features import FeatureMap, register_features
from fedsynth.features.registry import feature_map
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics.class_moments import PIXELS as PICTURE
from fedsynth.methods.statistics.class_moments import ClassMoments, Spectrum, target_norm
from fedsynth.methods.statistics.settings import CENTRE, MOMENTS, STEP
from fedsynth.methods.statistics.whitening import COVARIANCES
from fedsynth.models.on_features import FeatureLinear
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.plans import FIRST, MAIN, ReleasePlan
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from tests.digits import SPEC, digits
from tests.digits import context as some_context

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
EVERYBODY = list(range(20))


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
    return some_context(privacy, number, network=network(method), nominal=20.0, **federation)


def step(
    method: FedStats, clients: ClientGroup, number: int, phase: str, field: str, ctx: Any = None
) -> Tensor:
    """What these clients send in one release, [clients, D]."""
    message = ModelParameters(network(method).state_dict(), 1.0)
    take = method.first_step if phase == FIRST else method.client_step
    # without privacy nothing is whitened, and no covariances are sent
    round_context = ctx or context(number, 1.0 if field == COVARIANCES else None, method)
    replies = take(message, clients, [{} for _ in clients.ids], round_context)
    return torch.stack([getattr(reply, field).double() for reply, _ in replies])


def sums(
    method: FedStats, data: ImageData, parts: list[list[int]], number: int, phase: str, field: str
) -> Tensor:
    """What clients with these records send, without noise."""
    clients = ExactClientView(range(len(parts)), data, [torch.tensor(p).long() for p in parts])
    return step(method, clients, number, phase, field)


def plan_of(method: FedStats, number: int, name: str, **other: Any) -> ReleasePlan:
    privacy = PrivacySettings(noise_multiplier=1.0)
    plans = method.release_plans(privacy, context(number, method=method, **other))
    return next(plan for plan in plans if plan.name == name)


# ------------------------------------------------------------------------------------- sensitivity


@each_release
def test_one_example_moves_each_release_by_at_most_its_clip(
    method: FedStats, number: int, phase: str, name: str, field: str
) -> None:
    """Also one that is black, white, or of the other examples' class: what the plan charges."""
    plan = plan_of(method, number, name)
    data = digits(LABELS)
    data.images[10], data.images[11] = 0, 255
    everybody = sums(method, data, [EVERYBODY], number, phase, field)
    assert everybody.shape[1] == plan.dimension
    for left_out in range(8, 20):
        rest = [n for n in EVERYBODY if n != left_out]
        moved = float((everybody - sums(method, data, [rest], number, phase, field)).norm())
        assert moved <= plan.clip * (1 + 1e-5)
        # of a black image all scattering coefficients are 0
        assert moved > 0.02 * plan.clip or (name == COVARIANCES and left_out == 10)


@each_release
def test_sums_over_clients_are_those_of_the_pooled_data(
    method: FedStats, number: int, phase: str, name: str, field: str
) -> None:
    """However the records are divided; a client without any gives zeros."""
    data = digits(LABELS)
    pooled = sums(method, data, [EVERYBODY], number, phase, field).sum(0)
    by_class = [[n for n in EVERYBODY if n % 10 == c] for c in range(10)]
    for parts in (by_class, [list(range(7)), list(range(7, 20)), []]):
        actual = sums(method, data, parts, number, phase, field).sum(0)
        torch.testing.assert_close(actual, pooled, rtol=1e-6, atol=1e-6)


class Silent(SecretGenerator):
    """No noise, so that a release is the sum."""

    def __init__(self) -> None:
        super().__init__(test_only=np.random.default_rng(0))

    def normal(
        self, shape: tuple[int, ...], standard_deviation: float, device: torch.device | str = "cpu"
    ) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)


def release(
    method: FedStats, number: int, phase: str, field: str, part: Tensor, drawn: Any, ctx: Any
) -> tuple[Tensor, Ledger]:
    """What one private client sends, and what it is charged."""
    ledger = Ledger("c")
    charged = charge_for(method, ctx, [0], [BudgetEnforcer(ledger, 1e-5, None)], [drawn], phase)
    clients = PrivateClientView([0], digits(LABELS), [part], charged, nominal_size=20.0)
    return step(method, clients, number, phase, field, ctx)[0], ledger


@each_release
def test_private_sums_are_the_open_ones_plus_noise(
    method: FedStats, number: int, phase: str, name: str, field: str
) -> None:
    ctx = context(number, 1.0, method)
    actual, ledger = release(method, number, phase, field, torch.arange(20), Silent(), ctx)
    expected = sums(method, digits(LABELS), [EVERYBODY], number, phase, field)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert plan_of(method, number, name).quantity in [row.quantity for row in ledger.releases]


@each_release
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_a_client_without_records_sends_noise_like_everybody(
    method: FedStats, number: int, phase: str, name: str, field: str, aggregation: str
) -> None:
    """Else its upload says that it has none."""
    method = replace(method, aggregation=aggregation)
    plan = plan_of(method, number, name, clients=5)
    drawn = SecretGenerator(test_only=np.random.default_rng(0))
    ctx = context(number, 3.0, method, clients=5)
    actual, _ = release(method, number, phase, field, torch.arange(0), drawn, ctx)
    expected = (
        3.0 * plan.relative_noise_multiplier * plan.clip / (2 if aggregation == "secure" else 1)
    )
    assert float(actual.std()) == pytest.approx(expected, rel=0.2)


# -------------------------------------------------------------------------------------- accounting


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_epsilon_is_that_of_one_gaussian_release(rounds: int, aggregation: str) -> None:
    """μ² adds up over centre, moments and steps; with all of them σ is that of a single release."""
    method = FedStats(features="pixels", aggregation=aggregation, centre_share=0.1)
    iid = PartitionSettings("iid", clients=3)
    privacy = PrivacySettings(noise_multiplier=2.0)
    result = simulate(RunSettings(method, rounds=rounds, partition=iid, privacy=privacy))
    assert result.privacy is not None
    actual = result.privacy["guarantee"]["epsilon"]  # type: ignore[index]
    one = Release(1, "all", "gaussian", "x", 2.0, 1.0, 1.0, "full", 1, 1)
    assert actual == pytest.approx(epsilon([one], 1e-5), rel=1e-6)
    rows = result.privacy["ledger"]
    assert len(rows) == (2 if rounds == 1 else 3)  # type: ignore[arg-type]
    assert [row["shares"] > 1 for row in rows] == [aggregation == "secure"] * len(rows)


def test_clip_rate_and_participation_are_the_theorem_s() -> None:
    for wrong in ({"clip": 1.0}, {"sample_rate": 0.5}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            PIXELS.release_plans(PrivacySettings(epsilon=1.0, **wrong), context(1))
    with pytest.raises(SettingError, match="participation"):
        simulate(RunSettings(PIXELS, participation=0.5, privacy=PrivacySettings(epsilon=1.0)))
    with pytest.raises(SettingError, match="moment_share"):
        FedStats(centre_share=0.5, moment_share=0.5)


# ------------------------------------------------------------------------------------------ server


def test_the_closed_form_is_ridge_regression() -> None:
    """By NumPy's solver, on moments that were packed, summed and unpacked."""
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


def test_noise_s_negative_eigenvalues_become_the_ridge() -> None:
    moments = ClassMoments(torch.diag(torch.tensor([-2.0, 1.0])).double(), torch.zeros(2, 2), 1.0)
    spectrum = Spectrum.of(moments, ridge=0.1)
    assert spectrum.values.tolist() == pytest.approx([0.1 * 2**0.5, 1 + 0.1 * 2**0.5])
    step = spectrum.step(torch.tensor([[1.0, 0.0]]).double(), floor=4.0)
    assert step.tolist() == [pytest.approx([0.25, 0.0])]


# -------------------------------------------------------------------------------------------- runs


def test_features_that_are_not_finite_are_dropped_and_not_spread() -> None:
    """A user's own map that fails on some images."""

    def broken(x: Tensor) -> Tensor:
        made = x.flatten(1) - 0.5
        return torch.where(x.mean(dim=(1, 2, 3))[:, None] > 0.4, torch.nan, made)

    register_features(
        "broken", lambda shape: FeatureMap("broken", shape, 64, 4.0, 2.0, "a test", broken)
    )
    train, test = load_dataset("digits")
    few = train.subset(torch.arange(200))
    settings = RunSettings(FedStats(features="broken"), rounds=2)
    result = simulate(settings, data=(few, test), parts=list(np.arange(200).reshape(2, 100)))
    assert all(bool(torch.isfinite(one).all()) for one in result.model.state_dict().values())
    assert feature_map("broken", (1, 8, 8)).dimension == 64


@pytest.mark.parametrize("method", [PIXELS, PICTURES, WHITE])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_releases_of_a_run_take_the_whole_budget(method: FedStats, rounds: int) -> None:
    """Shares of μ² are 1/ratio²; without second moments, moments have what a step has."""
    privacy = PrivacySettings(noise_multiplier=1.0)
    plans = method.release_plans(privacy, context(1, method=method, rounds=rounds))
    shares = {plan.name: plan.relative_noise_multiplier**-2 for plan in plans}
    step = shares.get(STEP, 0.0)
    assert sum(shares.values()) + max(0, rounds - 2) * step == pytest.approx(1.0)
    assert (STEP in shares) == (rounds > 1)
    if step:
        assert (shares[MOMENTS] == pytest.approx(step)) == (not method.has_second(privacy))
    assert shares.get(PICTURE) == (
        pytest.approx(method.pixel_share) if method is PICTURES else None
    )
    own = pytest.approx(method.covariance_share)
    assert shares.get(COVARIANCES) == (own if method is WHITE else None)
