"""FedStats: what each release may move, sums that do not depend on who has what, accounting by a
formula, and the server's arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_ndtr
from torch import Tensor

from fedsynth import FedStats, PartitionSettings, PrivacySettings, RunSettings, simulate
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import RoundContext, round_context
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.features.registry import feature_map
from fedsynth.methods.fedstats import StatisticSums
from fedsynth.methods.shared.noise_shares import Pool
from fedsynth.methods.statistics.class_moments import ClassMoments, Spectrum, target_norm
from fedsynth.methods.statistics.releases import CENTRE, MOMENTS, STEP
from fedsynth.models.feature_linear import FeatureLinear, feature_linear
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.randomness import SecretGenerator

SPEC, CPU = dataset_spec("digits"), torch.device("cpu")
PIXELS = FedStats(features="pixels", second_moments="yes")
PHASES = ((1, FIRST, CENTRE), (1, MAIN, MOMENTS), (2, MAIN, STEP))


def network(method: FedStats = PIXELS) -> FeatureLinear:
    net = feature_linear(method.map_of(SPEC), SPEC)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net.classifier.weight.copy_(torch.randn(10, net.embedding_size, generator=generator))
    return net


def context(number: int, sigma: float | None = None, **other: Any) -> RoundContext:
    privacy = None if sigma is None else PrivacySettings(noise_multiplier=sigma)
    return round_context(
        number, 0, CPU, SPEC, network(), 20.0, privacy, **{"rounds": 3, "clients": 2, **other}
    )


def images(count: int, seed: int = 0) -> ImageData:
    draws = np.random.default_rng(seed)
    pixels = draws.integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)
    return from_arrays(pixels, np.arange(count) % 10, SPEC)


def sums(method: FedStats, data: ImageData, parts: list[list[int]], number: int, phase: str) -> Any:
    """What clients with these records send, without noise, [clients, D]."""
    clients = OpenClients(range(len(parts)), data, [torch.tensor(p).long() for p in parts])
    message = ModelParameters(network(method).state_dict(), 1.0)
    step = method.first_step if phase == FIRST else method.client_step
    replies = step(message, clients, [{} for _ in parts], context(number))
    return torch.stack([reply.sums.double() for reply, _ in replies])


# ------------------------------------------------------------------------------------- sensitivity


@pytest.mark.parametrize(("number", "phase", "name"), PHASES)
@pytest.mark.parametrize("second", ["yes", "no"])
def test_one_example_moves_each_release_by_at_most_its_clip(
    number: int, phase: str, name: str, second: str
) -> None:
    """Also one that is black, white, or of the other examples' class: what the plan charges."""
    method = FedStats(features="pixels", second_moments=second)
    plans = method.private_plans(PrivacySettings(noise_multiplier=1.0), context(number))
    clip = next(plan.clip for plan in plans if plan.name == name)
    data = images(12)
    pixels = data.images.clone()
    pixels[10], pixels[11] = 0, 255
    data = from_arrays(pixels, data.labels, SPEC)
    everybody = sums(method, data, [list(range(12))], number, phase)
    for left_out in range(12):
        rest = [n for n in range(12) if n != left_out]
        moved = float((everybody - sums(method, data, [rest], number, phase)).norm())
        assert moved <= clip * (1 + 1e-5)
        assert moved > 0.02 * clip


@pytest.mark.parametrize(("number", "phase", "name"), PHASES)
def test_sums_over_clients_are_those_of_the_pooled_data(number: int, phase: str, name: str) -> None:
    """However the records are divided; a client without any gives zeros."""
    data = images(20)
    pooled = sums(PIXELS, data, [list(range(20))], number, phase).sum(0)
    by_class = [[n for n in range(20) if n % 10 == c] for c in range(10)]
    for parts in (by_class, [list(range(7)), list(range(7, 20)), []]):
        torch.testing.assert_close(
            sums(PIXELS, data, parts, number, phase).sum(0), pooled, rtol=1e-6, atol=1e-6
        )


class Silent(SecretGenerator):
    """No noise, so that a release is the sum."""

    def __init__(self) -> None:
        super().__init__(test_only=np.random.default_rng(0))

    def normal(
        self, shape: tuple[int, ...], standard_deviation: float, device: torch.device | str = "cpu"
    ) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize(("number", "phase", "name"), PHASES)
def test_private_sums_are_the_open_ones_plus_noise(number: int, phase: str, name: str) -> None:
    from fedsynth.core.charging import charge_for

    data = images(20)
    where = context(number, sigma=1.0)
    guard = Guard(Ledger("c"), 1e-5, None)
    allowances = charge_for(PIXELS, where, [0], [guard], [Silent()], phase)
    clients = PrivateClients([0], data, [torch.arange(20)], allowances, nominal_size=20.0)
    message = ModelParameters(network().state_dict(), 1.0)
    step = PIXELS.first_step if phase == FIRST else PIXELS.client_step
    ((reply, _),) = step(message, clients, [{}], where)
    expected = sums(PIXELS, data, [list(range(20))], number, phase)[0]
    torch.testing.assert_close(reply.sums.double(), expected, rtol=1e-5, atol=1e-5)
    assert [row.quantity for row in guard.ledger.releases] == [
        plan.quantity
        for plan in PIXELS.private_plans(PrivacySettings(noise_multiplier=1.0), where)
        if plan.name == name
    ]


@pytest.mark.parametrize(("number", "phase", "name"), PHASES)
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_a_client_without_records_sends_noise_like_everybody(
    number: int, phase: str, name: str, aggregation: str
) -> None:
    """Else its upload says that it has none. The noise is what is charged, divided by √H where it
    is shared: with H = 4 of 5 clients half of it."""
    from fedsynth.core.charging import charge_for

    sigma = 3.0
    method = replace(PIXELS, aggregation=aggregation)
    where = context(number, sigma=sigma, clients=5)
    plans = method.private_plans(PrivacySettings(noise_multiplier=sigma), where)
    plan = next(one for one in plans if one.name == name)
    drawn = SecretGenerator(test_only=np.random.default_rng(0))
    allowances = charge_for(method, where, [0], [Guard(Ledger("c"), 1e-5, None)], [drawn], phase)
    nobody = torch.arange(0)
    clients = PrivateClients([0], images(20), [nobody], allowances, nominal_size=20.0)
    message = ModelParameters(network().state_dict(), 1.0)
    step = method.first_step if phase == FIRST else method.client_step
    ((reply, _),) = step(message, clients, [{}], where)
    charged = sigma * plan.noise_ratio * plan.clip
    expected = charged / (2 if aggregation == "secure" else 1)
    assert float(reply.sums.double().std()) == pytest.approx(expected, rel=0.2)


# -------------------------------------------------------------------------------------- accounting


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of one Gaussian release with sensitivity over noise μ, by bisection of Balle and Wang's
    formula (arXiv 1805.06530, Theorem 8)."""

    def excess(epsilon: float) -> float:
        first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
        return first - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)) - delta

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_epsilon_is_that_of_one_gaussian_release(rounds: int, aggregation: str) -> None:
    """μ² adds up over centre, moments and steps; with all of them σ is that of a single release."""
    method = FedStats(features="pixels", aggregation=aggregation, centre_share=0.1)
    iid = PartitionSettings("iid", clients=3)
    privacy = PrivacySettings(noise_multiplier=2.0)
    result = simulate(RunSettings(method, rounds=rounds, partition=iid, privacy=privacy))
    assert result.privacy is not None
    found = result.privacy["guarantee"]["epsilon"]  # type: ignore[index]
    assert found == pytest.approx(gaussian_epsilon(1 / 2.0, 1e-5), rel=1e-6)
    rows = result.privacy["ledger"]
    assert len(rows) == (2 if rounds == 1 else 3)  # type: ignore[arg-type]
    assert ["together" in row["mechanism"] for row in rows] == (  # type: ignore[attr-defined]
        [aggregation == "secure"] * len(rows)  # type: ignore[arg-type]
    )
    assumed = str(result.privacy["trust_model"]["secure_aggregation"])  # type: ignore[index]
    assert assumed.startswith("assumed, not executed" if aggregation == "secure" else "none")


def test_clients_of_a_secure_sum_add_their_share_of_the_noise() -> None:
    """1/√H each, so that H of them have what is charged; H is below the number of clients."""
    for aggregation, honest, shares in (("own", 0, 1), ("secure", 0, 3), ("secure", 2, 2)):
        method = FedStats(features="pixels", aggregation=aggregation, honest=honest)
        plans = method.private_plans(PrivacySettings(noise_multiplier=1.0), context(1, clients=4))
        assert {plan.shares for plan in plans} == {shares}
    with pytest.raises(SettingError, match="honest"):
        FedStats(features="pixels", aggregation="secure", honest=4).private_plans(
            PrivacySettings(noise_multiplier=1.0), context(1, clients=4)
        )


def test_no_more_clients_than_the_noise_counts_on_make_nothing() -> None:
    """One of them may be who looks, and knows its own noise."""
    method = FedStats(features="pixels", aggregation="secure", honest=3)
    where = context(1, sigma=1.0, clients=4)
    state = method.initial_state(network().state_dict())
    one = StatisticSums(torch.ones(64))
    some = dict.fromkeys(range(3), one)
    assert method.first_aggregate(state, some, where) is state
    assert method.first_aggregate(state, {**some, 3: one}, where) is not state


def test_clip_rate_and_participation_are_the_theorem_s() -> None:
    for wrong in ({"clip": 1.0}, {"sample_rate": 0.5}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            PIXELS.private_plans(PrivacySettings(epsilon=1.0, **wrong), context(1))
    with pytest.raises(SettingError, match="participation"):
        simulate(RunSettings(PIXELS, participation=0.5, privacy=PrivacySettings(epsilon=1.0)))
    with pytest.raises(SettingError, match="moment_share"):
        FedStats(centre_share=0.5, moment_share=0.5)
    assert issubclass(PrivacySettingError, Exception)


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
    step = spectrum.step(torch.tensor([[1.0, 0.0]]).double(), least=4.0)
    assert step.tolist() == [pytest.approx([0.25, 0.0])]


# -------------------------------------------------------------------------------------------- runs


def run(alpha: float = 0.5, second: str = "yes", **other: Any) -> Any:
    parts = PartitionSettings("dirichlet-plain", clients=4, alpha=alpha)
    method = FedStats(features="pixels", second_moments=second)
    return simulate(RunSettings(method, rounds=3, partition=parts, **other))


@pytest.mark.parametrize("second", ["yes", "no"])
def test_alpha_does_not_matter(second: str) -> None:
    """The model of an open run, to rounding, whoever has which classes."""
    models = [run(alpha, second).model.state_dict() for alpha in (0.05, 100.0)]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-4, atol=1e-5)


def test_a_private_run_learns_and_steps_help_an_open_one() -> None:
    accuracies = [row["test_accuracy"] for row in run().metrics]
    assert accuracies[0] > 0.88
    assert accuracies[-1] >= accuracies[0]
    assert run(privacy=PrivacySettings(epsilon=8.0)).accuracy > 0.75


def test_features_that_are_not_finite_are_dropped_and_not_spread() -> None:
    """A user's own map that fails on some images."""
    from fedsynth.features import FeatureMap, register_features

    def broken(x: Tensor) -> Tensor:
        made = x.flatten(1) - 0.5
        return torch.where(x.mean(dim=(1, 2, 3))[:, None] > 0.4, torch.nan, made)

    register_features(
        "broken", lambda shape: FeatureMap("broken", shape, 64, 4.0, 2.0, "a test", broken)
    )
    train, test = load_dataset("digits")
    few = train.subset(torch.arange(200))
    parts = [np.arange(100), np.arange(100, 200)]
    result = simulate(
        RunSettings(FedStats(features="broken"), rounds=2), data=(few, test), parts=parts
    )
    assert all(bool(torch.isfinite(one).all()) for one in result.model.state_dict().values())
    assert feature_map("broken", (1, 8, 8)).dimension == 64


def test_second_moments_go_by_the_settings_alone() -> None:
    auto = FedStats()
    assert auto.has_second(None)
    assert not auto.has_second(PrivacySettings(epsilon=8.0))
    for second, expected in (("yes", True), ("no", False)):
        method = FedStats(second_moments=second)
        assert method.has_second(None) == method.has_second(PrivacySettings(epsilon=1.0))
        assert method.has_second(None) == expected


@pytest.mark.parametrize("second", ["yes", "no"])
def test_releases_of_a_run_take_the_whole_budget_without_second_moments_evenly(second: str) -> None:
    """Shares of μ² are 1/ratio²."""
    method = FedStats(features="pixels", second_moments=second)
    plans = method.private_plans(PrivacySettings(noise_multiplier=1.0), context(1))
    shares = {plan.name: plan.noise_ratio**-2 for plan in plans}
    assert shares[CENTRE] + shares[MOMENTS] + 2 * shares[STEP] == pytest.approx(1.0)
    assert (shares[MOMENTS] == pytest.approx(shares[STEP])) == (second == "no")


@pytest.mark.parametrize("second", ["yes", "no"])
def test_a_run_of_one_round_leaves_nothing_of_its_budget(second: str) -> None:
    """There are no steps, so that moments have all that the centre has not."""
    method = FedStats(features="pixels", second_moments=second)
    plans = method.private_plans(PrivacySettings(noise_multiplier=1.0), context(1, rounds=1))
    assert sum(plan.noise_ratio**-2 for plan in plans) == pytest.approx(1.0)


def test_the_report_says_which_model_it_is() -> None:
    """Catches: the settings of a ConvNet, drawn from a seed, in a report of a run without one."""
    settings = RunSettings(FedStats(), rounds=1, privacy=PrivacySettings(epsilon=8.0))
    report: Any = simulate(settings, quiet=True).privacy
    items = report["public_items"]
    assert "convnet" not in str(items)
    assert items["architecture and initial weights"].startswith("the method's own")
    assert items["model"].startswith("linear in the features")
