"""FedStats: sensitivities, sums, accounting, the server's arithmetic, images, and covariances."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedsynth as fs
from fedsynth import ModelParameters, RoundContext
from fedsynth.core.capabilities import exchange_of
from fedsynth.core.client import ExactClientView, Group, PrivateClientView
from fedsynth.core.sums import Pool
from fedsynth.data.images import denormalise
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.evaluation.accuracy import predict
from fedsynth.features import FeatureMap, register_features
from fedsynth.features.scattering import low_pass
from fedsynth.methods.fedstats import (
    CENTRE,
    COVARIANCES,
    MOMENTS,
    PRINCIPAL,
    STEP,
    FedStatsState,
    StatisticSums,
)
from fedsynth.methods.fedstats import PIXELS as PICTURE
from fedsynth.methods.statistics import moments as cm
from fedsynth.methods.statistics.moments import released_roots
from fedsynth.methods.statistics.pictures import (
    PixelMoments,
    class_shares,
    pixel_rows,
    pixel_width,
)
from fedsynth.models.on_features import Embedding, FeatureLinear, root_names
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import FIRST, MAIN, ReleasePlan
from fedsynth.privacy.products import Grams, svec
from fedsynth.privacy.randomness import SecretGenerator
from tests.digits import SPEC, charge_for, digits, round_context
from tests.privacy.support import HOSTILE, guard
from tests.quick_runs import verified
from tests.raising import raises

PIXELS = fs.FedStats(features="pixels", second_moments="yes")
PICTURES = fs.FedStats(features="pixels", second_moments="no", ipc=1, image_steps=1)
WHITE = fs.FedStats(features="scattering", whitening="yes")
QUICK = fs.FedStats(features="pixels", ipc=2, image_steps=5)
INITIAL = FedStatsState(FeatureLinear(QUICK.map_of(SPEC), SPEC).state_dict())
PRIVATE = fs.PrivacySettings(noise_multiplier=1.0)
ALL_RECORDS = list(range(20))
WIDTH = 65  # 8×8 cells and the constant
BLOCKS = ((3, 2),)
MAP = FeatureMap("grid", (1, 2, 3), 6, 2.0, 1.0, "a test", lambda x: x.flatten(1), BLOCKS)
VALUES = st.one_of(st.floats(-9, 9, width=32), st.sampled_from(HOSTILE))


def network(method: fs.FedStats = PIXELS) -> FeatureLinear:
    net: Any = method.network(SPEC)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net.classifier.weight.copy_(torch.randn(10, net.embedding_size, generator=generator))
        if hasattr(net, "directions"):  # as of a dishonest server: neither orthogonal nor of norm 1
            net.directions.copy_(3 * torch.randn(net.directions.shape, generator=generator))
    return net  # type: ignore[no-any-return]


def context(number: int = 1, sigma: Any = None, method: Any = PIXELS, **other: Any) -> RoundContext:
    privacy = None if sigma is None else fs.PrivacySettings(noise_multiplier=sigma)
    federation = {"rounds": 3, "clients": 2, "nominal": 20.0, **other}
    return round_context(privacy, number, network=network(method), **federation)


def data() -> Any:
    return digits(np.arange(20) % 10)


def packed(z: np.ndarray) -> np.ndarray:
    """Returns the upper triangles of z zᵀ, whose norm is that of the products."""
    i, j = np.triu_indices(z.shape[1])
    return np.asarray(z[:, i] * z[:, j] * np.where(i == j, 1, 2**0.5))


@dataclass(frozen=True)
class Case:
    """A release: its method, round, exchange and name, and its field of an upload."""

    method: fs.FedStats
    number: int
    exchange: str
    name: str
    field: str = "sums"

    def plan(self, **other: Any) -> ReleasePlan:
        ctx = context(self.number, method=self.method, **other)
        return next(p for p in self.method.release_plans(PRIVATE, ctx) if p.name == self.name)

    def step(self, clients: Group, ctx: Any = None) -> Tensor:
        """Returns the clients' uploads, [clients, D]."""
        message = ModelParameters(network(self.method).state_dict(), 1.0)
        take = exchange_of(self.method, self.exchange).client_step
        # without privacy nothing is whitened or shortened, and no covariances are sent
        sigma = 1.0 if self.field in (COVARIANCES, "principal") else None
        ctx = ctx or context(self.number, sigma, self.method)
        replies = take(message, clients, [{} for _ in clients.ids], ctx)
        return torch.stack([getattr(reply, self.field).double() for reply, _ in replies])

    def sums(self, images: Any, *parts: list[int]) -> Tensor:
        """Returns the noiseless uploads of clients with these records."""
        part_tensors = [torch.tensor(part).long() for part in parts]
        return self.step(ExactClientView(range(len(parts)), images, part_tensors))

    def release(self, part: Tensor, ctx: Any) -> tuple[Tensor, Ledger]:
        """Returns the upload of a private client and its ledger."""
        ledger, generator = Ledger("c"), SecretGenerator(test_only=np.random.default_rng(0))
        budgets = charge_for(self.method, ctx, [0], [guard(ledger)], [generator], self.exchange)
        clients = PrivateClientView([0], data(), [part], budgets, nominal_size=20.0)
        return self.step(clients, ctx)[0], ledger


RELEASES = (
    Case(PIXELS, 1, FIRST, CENTRE),
    Case(PIXELS, 1, MAIN, MOMENTS),
    Case(PIXELS, 2, MAIN, STEP),
    Case(PICTURES, 1, MAIN, MOMENTS),  # without second moments
    Case(PICTURES, 1, FIRST, PICTURE, "pictures"),
    Case(WHITE, 1, FIRST, COVARIANCES, COVARIANCES),
    Case(PICTURES, 1, MAIN, PRINCIPAL, "principal"),
)
each_release = pytest.mark.parametrize("case", RELEASES)


@each_release
def test_sensitivity_is_at_most_the_clip(case: Case) -> None:
    plan, images = case.plan(), data()
    images.images[10], images.images[11] = 0, 255
    total = case.sums(images, ALL_RECORDS)
    assert total.shape[1] == plan.dimension
    for removed in range(8, 20):
        remaining = [n for n in ALL_RECORDS if n != removed]
        change = float((total - case.sums(images, remaining)).norm())
        assert change <= plan.clip * (1 + 1e-5)
        # of a black image all scattering coefficients are 0
        assert change > 0.02 * plan.clip or (case.name == COVARIANCES and removed == 10)


@each_release
def test_open_and_noiseless_sums_equal_pooled_sums(case: Case, without_noise: None) -> None:
    pooled = case.sums(data(), ALL_RECORDS).sum(0)
    by_class = [[n for n in ALL_RECORDS if n % 10 == c] for c in range(10)]
    for parts in (by_class, [list(range(7)), list(range(7, 20)), []]):
        actual = case.sums(data(), *parts).sum(0)
        torch.testing.assert_close(actual, pooled, rtol=1e-6, atol=1e-6)
    private, ledger = case.release(torch.arange(20), context(case.number, 1.0, case.method))
    torch.testing.assert_close(private, pooled, rtol=1e-5, atol=1e-5)
    assert case.plan().quantity in [row.quantity for row in ledger.releases]


@each_release
@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_clients_without_records_send_noise(case: Case, aggregation: str) -> None:
    """The upload must not reveal that the client has no records."""
    case = replace(case, method=replace(case.method, aggregation=aggregation))
    plan = case.plan(clients=5)
    actual, _ = case.release(torch.arange(0), context(case.number, 3.0, case.method, clients=5))
    shares = 4 if aggregation == "secure" else 1
    expected = 3.0 * plan.relative_noise_multiplier * plan.clip / shares**0.5
    assert float(actual.std()) == pytest.approx(expected, rel=0.2)


def test_clip_rate_and_participation_are_fixed() -> None:
    for wrong in ({"clip": 1.0}, {"sample_rate": 0.5}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            PIXELS.release_plans(replace(PRIVATE, **wrong), context(1))  # type: ignore[arg-type]
    with raises(SettingError, "run.participation"):
        fs.simulate(fs.RunSettings(PIXELS, participation=0.5, privacy=PRIVATE))


@pytest.mark.parametrize(
    ("largest", "shares"),
    [
        ("centre", {"centre_share": 0.6, "moment_share": 0.5}),
        ("moment", {"centre_share": 0.4, "moment_share": 0.6}),
        ("pixel", {"ipc": 5, "pixel_share": 0.9}),
        ("covariance", {"whitening": "yes", "covariance_share": 0.89}),
    ],
)
def test_the_largest_of_too_large_shares_is_named(largest: str, shares: dict[str, Any]) -> None:
    with raises(SettingError, f"method.{largest}_share"):
        fs.FedStats(**shares)


def test_settings_without_sure_images_are_refused() -> None:
    fs.FedStats(ipc=5).check_images()
    with raises(SettingError, "method.ipc"):
        fs.FedStats().check_images()
    with raises(SettingError, "method.aggregation"):
        fs.FedStats(ipc=5, aggregation="secure").check_images()


def test_closed_form_is_ridge_regression() -> None:
    draws = np.random.default_rng(0)
    z = draws.normal(size=(200, 5))
    z /= np.maximum(1, np.linalg.norm(z, axis=1, keepdims=True))
    labels = draws.integers(0, 3, 200)
    e = np.eye(3)[labels] - 1 / 3
    sums_D = 0.5**0.5 * np.concatenate([packed(z).sum(0), (e.T @ z).ravel() / cm.target_norm(3)])
    pool = Pool(torch.from_numpy(sums_D), 0.7, 200.0)
    second, crossed, noise = cm.second_and_crossed(pool, 5, 3)
    np.testing.assert_allclose(second, z.T @ z / 200, atol=1e-12)
    spectrum = cm.Spectrum.of(second, noise, ridge=0.5)
    ridge = 0.5 * (0.7 * 2**0.5 / 200) * 5**0.5
    expected = np.linalg.solve(z.T @ z / 200 + ridge * np.eye(5), (e.T @ z / 200).T).T
    weight = spectrum.solve(crossed * cm.target_norm(3))
    np.testing.assert_allclose(weight, expected, atol=1e-9)
    # negative eigenvalues become the ridge
    second = torch.diag(torch.tensor([-2.0, 1.0])).double()
    spectrum = cm.Spectrum.of(second, 1.0, ridge=0.1)
    assert spectrum.values.tolist() == pytest.approx([0.1 * 2**0.5, 1 + 0.1 * 2**0.5])
    step = spectrum.step(torch.tensor([[1.0, 0.0]]).double(), floor=4.0)
    assert step.tolist() == [pytest.approx([0.25, 0.0])]


def test_features_that_are_not_finite_are_dropped() -> None:
    def broken(x: Tensor) -> Tensor:
        return torch.where(x[:, :, 3, 3] > 0.6, torch.nan, x.flatten(1) - 0.5)

    failing = FeatureMap("broken", SPEC.image_shape, 64, 4.0, 2.0, "a test", broken)
    register_features("broken", lambda shape: failing)
    train, test = fs.load_dataset("digits")
    few = train.subset(torch.arange(200))
    run = fs.RunSettings(fs.FedStats(features="broken"), rounds=2)
    result = fs.simulate(run, data=(few, test), parts=list(np.arange(200).reshape(2, 100)))
    assert all(bool(torch.isfinite(value).all()) for value in result.model.state_dict().values())


@pytest.mark.parametrize("method", [PIXELS, PICTURES, WHITE])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_releases_of_a_run_spend_the_whole_budget(method: fs.FedStats, rounds: int) -> None:
    """Shares of μ², which are 1/ratio², add up to 1."""
    plans = method.release_plans(PRIVATE, context(1, method=method, rounds=rounds))
    shares = {plan.name: plan.relative_noise_multiplier**-2 for plan in plans}
    step = shares.get(STEP, 0.0)
    assert sum(shares.values()) + max(0, rounds - 2) * step == pytest.approx(1.0)
    assert (STEP in shares) == (rounds > 1)
    if step:
        assert (shares[MOMENTS] == pytest.approx(step)) == (not method.has_second(PRIVATE))
    if method is PICTURES:
        assert shares[PICTURE] == pytest.approx(method.pixel_share)
    if method is WHITE:
        assert shares[COVARIANCES] == pytest.approx(method.covariance_share)


@pytest.mark.parametrize("second", ["yes", "no"])
def test_class_means_equal_numpy(second: str) -> None:
    """Classes are equally frequent, and means are taken about the common mean."""
    z = 0.1 * np.random.default_rng(0).normal(size=(20, 64))
    labels = np.arange(20) % 10
    crossed = (np.eye(10)[labels] - 0.1).T @ z / cm.target_norm(10)
    sums = crossed.ravel()
    if second == "yes":
        sums = 0.5**0.5 * np.concatenate([packed(z).sum(0), sums])
    method = fs.FedStats(features="pixels", ipc=1, image_steps=1, second_moments=second)
    upload, ctx = StatisticSums(torch.from_numpy(sums).float(), torch.zeros(0)), context(rounds=1)
    state: Any = method.at_end(method.server_step(INITIAL, {0: upload}, ctx), ctx)
    means = np.stack([z[labels == c].mean(axis=0) for c in range(10)])
    np.testing.assert_allclose(state.class_means, means - means.mean(axis=0), atol=1e-5)


def test_images_depend_only_on_the_last_server_state() -> None:
    """Drawn images follow optimised images, which stay unchanged."""
    draws = torch.Generator().manual_seed(0)
    sums = torch.randn(10 * 64, generator=draws)
    upload, ctx = {0: StatisticSums(sums, torch.zeros(0))}, context(rounds=1)

    def images(method: fs.FedStats) -> Tensor:
        """Returns [classes, images, 64] in bytes; checks labels and soft labels."""
        state: Any = method.at_end(method.server_step(INITIAL, upload, ctx), ctx)
        x, labels, _ = method.synthetic(state, ctx)
        per_class = method.ipc + method.drawn_ipc
        assert labels.tolist() == [c for c in range(10) for _ in range(per_class)]
        torch.testing.assert_close(state.soft_labels.sum(dim=1), torch.ones(10 * per_class))
        return denormalise(x, SPEC).view(10, per_class, -1)

    method = replace(QUICK, second_moments="no")
    optimised, both = images(method), images(replace(method, drawn_ipc=3))
    assert torch.equal(optimised, images(method))
    assert torch.equal(both[:, :2], optimised)
    assert len(both.flatten(0, 1).unique(dim=0)) == 50
    early_state: Any = method.server_step(INITIAL, upload, context(rounds=2))
    assert method.synthetic(early_state, ctx) is None


@pytest.mark.usefixtures("repeatable_noise")
@pytest.mark.parametrize("epsilon", [None, 50.0])
def test_classifier_of_a_run_with_pictures_is_balanced(epsilon: float | None) -> None:
    """The shares come from the released moments. Half of the classes are rare."""
    train, test = fs.load_dataset("digits")
    common = np.flatnonzero(train.labels.numpy() >= 5)
    rare = np.flatnonzero(train.labels.numpy() < 5)[:70]
    data = (train.subset(np.sort(np.concatenate([common, rare]))), test)
    privacy = None if epsilon is None else fs.PrivacySettings(epsilon=epsilon)
    recalls = {}
    for balanced in (True, False):
        method = fs.FedStats(drawn_ipc=1, balanced=balanced)
        run = fs.simulate(fs.RunSettings(method, rounds=2, privacy=privacy), data=data, quiet=True)
        state = run.model.state_dict()
        right = predict(run.model, test).argmax(dim=1) == test.labels
        recalls[balanced] = float(right[test.labels < 5].double().mean())
        assert ("classifier.bias" in state) is balanced
        if balanced:
            bias = state["classifier.bias"]
            assert bias[:5].mean() > bias[5:].mean() + 0.8
            if epsilon is None:
                expected = -(torch.bincount(data[0].labels) / len(data[0])).log()
                torch.testing.assert_close(bias, expected - expected.mean(), atol=1e-4, rtol=0)
    assert recalls[True] > recalls[False] + 0.05


def test_class_that_may_be_absent_is_not_favoured() -> None:
    labels = torch.tensor([0] * 30 + [1] * 28 + [2] * 2)
    sums = pixel_rows(torch.full((60, WIDTH), WIDTH**-0.5), labels, 4).sums()
    sums[-WIDTH * 4 :] *= WIDTH**0.5 * low_pass((1, 8, 8))(torch.ones(1, 1, 8, 8))[0, -1]
    exact = class_shares(Pool(sums, 0.0, 60), WIDTH, 4)
    torch.testing.assert_close(exact.float(), torch.tensor([0.5, 28 / 60, 2 / 60, 0.5]))
    noisy = class_shares(Pool(sums, 1.0, 60), WIDTH, 4)  # of 0.07 in a share
    assert noisy[2] == noisy[3] == noisy.max()
    negative = class_shares(Pool(-sums, 0.5, 60), WIDTH, 4)
    torch.testing.assert_close(negative, torch.full_like(negative, 1 / 4))


def test_run_that_exhausts_its_budget_exports_images(tmp_path: Path) -> None:
    """An ε of shared noise needs the assumption next to it."""
    method, privacy = replace(QUICK, aggregation="secure"), replace(PRIVATE, noise_multiplier=3.0)
    settings = fs.RunSettings(method, rounds=6, privacy=replace(privacy, epsilon=1.2))
    run = fs.simulate(settings, output=tmp_path, quiet=True)
    assert 1 <= len(run.metrics) < 6
    share = fs.export_run(str(verified(run)), tmp_path / "share")
    actual = fs.load_synthetic(share)
    assert len(actual.labels) == len(actual.soft_labels) == 20
    text = (share / "README.md").read_text()
    assert "classifier, which was not trained on them" in text
    assert "because clients shared noise: assumed, not executed." in text


@pytest.mark.parametrize(("second", "aggregation"), [("no", "own"), ("yes", "secure")])
def test_signal_to_noise_equals_a_simulation(second: str, aggregation: str) -> None:
    """Sums orthogonal classes of equal examples over four clients who each add noise."""
    method = fs.FedStats(features="pixels", second_moments=second, aggregation=aggregation)
    privacy = fs.PrivacySettings(noise_multiplier=3.0)
    ctx = context(1, 3.0, method, nominal=50.0, clients=4)
    plans = {plan.name: plan for plan in method.release_plans(privacy, ctx)}
    z, e = np.eye(64)[:10], np.eye(10) - 0.1  # an example of each class
    crossed = np.einsum("nc,nd->ncd", e / cm.target_norm(10), z).reshape(10, -1)
    both = 0.5**0.5 * np.concatenate([packed(z), crossed], axis=1)
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


@given(st.lists(VALUES, min_size=4, max_size=4), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_hostile_vectors_respect_the_sensitivity(u: list[float], label: int) -> None:
    sums = pixel_rows(torch.tensor([u]), torch.tensor([label]), 3).sums()
    assert float(sums.norm()) <= 1 + 1e-9
    assert bool(torch.isfinite(sums).all())


def test_pictures_and_whitening_depend_on_public_shapes() -> None:
    colour, grey = dataset_spec("cifar10"), dataset_spec("mnist")
    for pictures, released in {"auto": [True, False], "yes": [True] * 2, "no": [False] * 2}.items():
        method = fs.FedStats(ipc=1, pictures=pictures)
        assert [method.releases_pictures(spec) for spec in (grey, colour)] == released
    vectors = replace(grey, height=1, width=64)
    assert not fs.FedStats(ipc=1).releases_pictures(vectors)
    shapes = ((1, 8, 8), (1, 28, 28), (3, 32, 32))
    specs = [
        replace(SPEC, channels=c, height=h, width=w, mean=(0.5,) * c, std=(0.5,) * c)
        for c, h, w in shapes
    ]
    choices = {"auto": [False, True, False], "yes": [True] * 3, "no": [False] * 3}
    for choice, whitens in choices.items():
        assert [
            replace(WHITE, whitening=choice).has_whitening_matrices(spec) for spec in specs
        ] == whitens


def test_means_and_directions_above_the_noise_equal_numpy() -> None:
    draws = np.random.default_rng(0)
    x = draws.random((60, 1, 8, 8)).astype(np.float32)
    labels = np.sort(np.r_[np.arange(10), draws.integers(0, 4, 50)])
    pixels = low_pass((1, 8, 8))(torch.from_numpy(x))
    sums = pixel_rows(pixels, torch.from_numpy(labels), 10).sums()
    actual = PixelMoments.unpacked(Pool(sums, 0.0, 60), WIDTH, 10)
    v = x.reshape(60, -1)
    v = v / np.linalg.norm(v, axis=1, keepdims=True)
    means = np.stack([v[labels == c].mean(axis=0) for c in range(10)])
    np.testing.assert_allclose(actual.means, means, atol=1e-5)
    np.testing.assert_allclose(actual.overall, v.mean(axis=0), atol=1e-5)
    about = v - means[labels]
    np.testing.assert_allclose(actual.roots @ actual.roots.T, about.T @ about / 60, atol=1e-5)
    # directions below the noise are dropped
    noise = torch.from_numpy(draws.normal(size=pixel_width(WIDTH, 10)))
    actual = PixelMoments.unpacked(Pool(10.0 * noise, 10.0, 1000.0), WIDTH, 10)
    assert bool(torch.isfinite(actual.means).all())
    assert actual.roots.shape[1] < 22
    assert PixelMoments.unpacked(Pool(10.0 * noise, 0.0, 1000.0), WIDTH, 10).roots.shape[1] > 25


def test_images_are_drawn_around_class_means() -> None:
    means = 0.2 + torch.eye(64, dtype=torch.float64)[:10]
    roots = 0.05 * torch.eye(64, dtype=torch.float64)
    moments = PixelMoments(means, roots, means.mean(dim=0))
    images = moments.drawn(50, (1, 8, 8), (0.5, 1.0), torch.Generator().manual_seed(0))
    assert images.shape == (10, 50, 1, 8, 8)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert images.flatten(2).mean(dim=1).argmax(dim=1).tolist() == list(range(10))
    deviations = [float(part.std(dim=1).mean()) for part in (images[:, -10:], images[:, :10])]
    assert deviations[0] > 1.3 * deviations[1]


def test_steps_have_momentum() -> None:
    method = fs.FedStats(features="pixels", second_moments="no", momentum=0.25)
    settings_of_run = {"rounds": 9, "sigma": 5.0, "noise": {"moments": 5.0}}
    rate, state = method.rate(context(3, **settings_of_run)), INITIAL
    weight = state.parameters["classifier.weight"].double()
    gradients = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0))
    moves = []
    for number, gradient in enumerate(gradients, start=2):
        upload = StatisticSums(20.0 * gradient.flatten(), torch.zeros(0))  # nominal size 20
        state = method.server_step(state, {0: upload}, context(number, **settings_of_run))  # type: ignore[assignment]
        moves.append(rate * gradient.double())
    expected = weight - moves[0] - (moves[1] + 0.25 * moves[0])
    actual = state.parameters["classifier.weight"].double()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_steps_start_from_zero_if_round_1_does_not_count() -> None:
    method = fs.FedStats(features="pixels", second_moments="no")
    state, ctx = FedStatsState(method.network(SPEC).state_dict()), context(2)
    gradient = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    upload = StatisticSums(20.0 * gradient.flatten(), torch.zeros(0))
    state = method.server_step(state, {0: upload}, ctx)  # type: ignore[assignment]
    weight = state.parameters["classifier.weight"]
    torch.testing.assert_close(weight, -method.rate(ctx) * gradient)


@pytest.mark.parametrize("aggregation", ["own", "secure"])
def test_rate_gives_the_intended_logit_noise(aggregation: str) -> None:
    """Simulates a logit's noise after all steps, with each client's noise or shares of it."""
    method = fs.FedStats(features="pixels", second_moments="no", aggregation=aggregation)
    privacy = fs.PrivacySettings(noise_multiplier=5.0)
    plans = method.release_plans(privacy, context(rounds=12, clients=4))
    noise = {plan.name: 5.0 * plan.relative_noise_multiplier * plan.clip for plan in plans}
    rate = method.rate(context(rounds=12, clients=4, sigma=5.0, noise=noise))
    shares = 3 if aggregation == "secure" else 1
    noise_std = noise["step"] * math.sqrt(4 / shares) / (4 * 20.0)
    draws = noise_std * np.random.default_rng(0).normal(size=(12, 4000))
    velocity = weight = np.zeros(4000)
    for gradient in draws:
        velocity = method.momentum * velocity + gradient
        weight = weight - rate * velocity
    assert weight.std() == pytest.approx(method.logit_noise, rel=0.1)


@given(
    st.floats(0, 0.95),
    st.integers(1, 40),
    st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    st.floats(0.01, 10),
)
def test_step_rate_is_limited_by_noise_or_maximum(
    momentum: float, steps: int, noise: float, logit_noise: float
) -> None:
    """The total weight counts constant gradients of 1, added step by step."""
    velocity = weight = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        weight += velocity
    assert cm.total_weight(steps, momentum) == pytest.approx(weight, rel=1e-9)
    rate = cm.step_rate(noise, steps, logit_noise, 200.0, momentum)
    assert rate <= 200.0
    assert rate * weight * noise <= logit_noise * (1 + 1e-9)
    assert rate == 200.0 or rate * weight * noise >= logit_noise * (1 - 1e-9)


def test_white_signal_equals_white_examples() -> None:
    """Examples are ±√d·axes of a block each, whose channels and cells are white."""
    blocks = ((3, 2), (4, 2))
    axes = np.eye(14)
    z = 2**-0.5 * np.stack([axes[i] + axes[6 + j] for i in range(6) for j in range(8)])
    sums = Grams(torch.from_numpy(z), blocks, cm.CELLS_PART).sums()
    assert float(sums.norm()) / len(z) == pytest.approx(cm.white_signal(blocks))


def exact_pool(Z: np.ndarray) -> Pool:
    z = torch.from_numpy(Z.reshape(-1, 6) / MAP.norm_bound)
    return Pool(Grams(z, BLOCKS, cm.CELLS_PART).sums(), 0.0, len(z))


def test_roots_are_covariance_powers_of_equal_trace() -> None:
    rng = np.random.default_rng(0)
    spread = np.array([1.0, 0.3, 0.1])[:, None] * np.array([1.0, 0.5])
    Z = 0.3 + 0.3 * spread * rng.normal(size=(400, 3, 2))
    assert np.linalg.norm(Z, axis=(1, 2)).max() < MAP.norm_bound
    centre = torch.from_numpy(Z.mean(0).ravel())
    actual = released_roots(exact_pool(Z), centre, 0.0, MAP)
    about = (Z - Z.mean(0)) / MAP.norm_bound
    for name, pattern in zip(root_names(BLOCKS), ("nas,nbs->ab", "nas,nat->st"), strict=True):
        covariance = np.einsum(pattern, about, about) / 400
        values, vectors = np.linalg.eigh(covariance)
        floored = np.maximum(values, cm.FLOOR * values.mean())
        root = vectors @ np.diag(floored ** (-cm.POWER / 2)) @ vectors.T
        root *= np.sqrt(np.trace(covariance) / np.trace(root @ covariance @ root))
        np.testing.assert_allclose(actual[name], root, rtol=1e-4, atol=1e-5)


def test_noise_of_the_centre_is_subtracted() -> None:
    """A noisy centre's outer product would flatten the covariance."""
    rng = np.random.default_rng(1)
    spread = np.array([1.0, 0.5, 0.3])[:, None] * np.array([1.0, 0.5])
    pool = exact_pool(0.5 * spread * rng.normal(size=(4000, 3, 2)))
    exact = released_roots(pool, torch.zeros(6), 0.0, MAP)["channels_root_0"]
    errors = []
    for deviation in (0.1, 0.0):
        draws = np.random.default_rng(2)
        centres = torch.from_numpy(0.1 * draws.normal(size=(200, 6)))
        roots = [released_roots(pool, centre, deviation, MAP) for centre in centres]
        mean = torch.stack([root["channels_root_0"] for root in roots]).mean(0)
        errors.append(float((mean - exact).norm()))
    assert errors[0] < 0.75 * errors[1]


def test_noisy_covariances_give_roots_near_identity() -> None:
    """Regression: a trace of both signs in the scale."""
    draws = torch.Generator().manual_seed(0)
    for size in (3, 9, 41, 98):
        for signal in (0.0, 3.0):  # one direction just above the noise
            for _ in range(50):
                noise = torch.randn(size, size, generator=draws, dtype=torch.float64)
                noise = (noise.triu() + noise.triu(1).T) * 0.5**0.5
                noise.diagonal().mul_(2**0.5)
                noise[0, 0] += signal * (2 * size) ** 0.5
                values = torch.linalg.eigvalsh(cm._root(noise, 1.0))
                assert float(values.min()) > 0.4
                assert float(values.max()) < 1.3 * max(1.0, signal + 1) ** (cm.POWER / 2)


def test_embedding_transforms_vectors_by_blocks() -> None:
    rng = np.random.default_rng(3)
    Z = 0.05 * rng.normal(size=(4, 3, 2))
    channel_root, cell_root = rng.normal(size=(3, 3)), rng.normal(size=(2, 2))
    arrays = {"centre": np.zeros(6), "channels_root_0": channel_root, "cells_root_0": cell_root}
    parameters = {name: torch.from_numpy(array) for name, array in arrays.items()}
    actual = Embedding.of(parameters, MAP)(torch.from_numpy(Z.reshape(4, 6)))
    expected = (channel_root @ Z @ cell_root).reshape(4, 6)
    expected /= np.maximum(1, np.linalg.norm(expected, axis=1, keepdims=True))
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_largest_directions_are_shortened_to_the_noise() -> None:
    """The map of exact second moments equals NumPy's, and shortened vectors have one spectrum."""
    rng = np.random.default_rng(4)
    z = rng.normal(size=(500, 6)) * [9, 5, 3, 1, 0.5, 0.1]
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    basis, _ = np.linalg.qr(rng.normal(size=(6, 4)))
    directions = torch.from_numpy(basis)
    sums = cm.principal_rows(torch.from_numpy(z), directions).sums()
    y = z @ basis
    np.testing.assert_allclose(sums[:-1], packed(y).sum(axis=0), atol=1e-9)
    noise = 0.02
    shorten, factor = cm.principal_shortening(Pool(sums, 500 * noise, 500.0), directions)
    floor = cm.SHORTENED * noise * 8**0.5
    values, vectors = np.linalg.eigh(y.T @ y / 500)
    removed = 1 - (np.maximum(values, floor) / floor) ** -0.5
    turned = basis @ vectors
    expected = z - (z @ turned * removed) @ turned.T
    actual = shorten(torch.from_numpy(z))
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    after = np.linalg.eigvalsh((expected @ basis).T @ (expected @ basis) / 500)
    np.testing.assert_allclose(after[values > floor], floor, rtol=1e-6)
    assert (values > floor).sum() >= 2
    _, factor = cm.principal_shortening(Pool(sums, 0.0, 500.0), directions)
    left = 1 - values.sum()  # without noise, almost nothing is left along the directions
    assert factor == pytest.approx(left**-0.5, rel=1e-3)


def test_noise_alone_shortens_little() -> None:
    draws = torch.Generator().manual_seed(0)
    noise = torch.randn(20 * 21 // 2 + 1, generator=draws, dtype=torch.float64)
    shorten, factor = cm.principal_shortening(Pool(100 * noise, 100.0, 1e4), torch.eye(20))
    assert float(shorten.shortened.max()) < 0.35
    assert 1 <= factor < 1.02
    _, factor = cm.principal_shortening(Pool(100 * noise, 100.0, 10.0), torch.eye(20))
    assert factor >= 1


def test_regained_norm_is_unbiased_by_noise() -> None:
    """The mean factor of noisy releases is near that of the exact second moments."""
    exact = torch.diag(torch.tensor([0.3, 0.1] + [0.6 / 98] * 98, dtype=torch.float64))
    noise = 0.005
    floor = cm.SHORTENED * cm.noise_edge(noise, 100)
    known = exact.diagonal()[:2]
    expected = (1 - float((known - floor).sum())) ** -0.5
    draws = torch.Generator().manual_seed(0)
    factors = []
    for _ in range(5):
        release = torch.cat([svec(exact), torch.zeros(1)])
        release += noise * torch.randn(release.shape, generator=draws, dtype=torch.float64)
        _, factor = cm.principal_shortening(Pool(release, noise, 1.0), torch.eye(100))
        factors.append(factor)
    assert np.mean(factors) == pytest.approx(expected, rel=0.03)


def test_a_shortened_embedding_has_norm_1_and_one_result_per_row() -> None:
    directions, _ = torch.linalg.qr(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)))
    parameters = {"centre": torch.zeros(6), "directions": directions}
    rows = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    plain = Embedding.of({**parameters, "shortened": torch.zeros(2)}, MAP)
    assert plain.shortening is None
    embedding = Embedding.of({**parameters, "shortened": torch.tensor([0.5, 0.9])}, MAP)
    z = embedding(rows)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(9))
    assert not embedding.same(plain)
    assert torch.equal(embedding(rows.flip(0)).flip(0), z)
    assert float((z @ directions)[:, 1].abs().mean()) < 0.3 * float(
        (plain(rows) @ directions)[:, 1].abs().mean()
    )


@pytest.mark.parametrize(("share", "epsilon"), [(0.05, 8.0), (0.0, 8.0), (0.05, None)])
def test_only_private_runs_with_pictures_shorten(share: float, epsilon: float | None) -> None:
    method = replace(QUICK, second_moments="no", principal_share=share)
    parts = fs.PartitionSettings("iid", clients=2)
    privacy = None if epsilon is None else fs.PrivacySettings(epsilon=epsilon)
    run = fs.RunSettings(method, rounds=3, partition=parts, privacy=privacy)
    result = fs.simulate(run)
    state = result.model.state_dict()
    assert ("shortened" in state) == (share > 0)
    is_shortened = share > 0 and bool(state["shortened"].any())
    assert is_shortened == (share > 0 and epsilon is not None)
    assert result.accuracy > 0.5


def test_only_private_runs_whiten() -> None:
    names = root_names(WHITE.map_of(SPEC).blocks)
    for privacy in (None, fs.PrivacySettings(epsilon=8.0)):
        parts = fs.PartitionSettings("iid", clients=2)
        result = fs.simulate(fs.RunSettings(WHITE, rounds=2, partition=parts, privacy=privacy))
        state = result.model.state_dict()
        is_identity = [torch.equal(state[name], torch.eye(len(state[name]))) for name in names]
        assert is_identity == [privacy is None] * 2
    assert result.accuracy > 0.7


def test_unsupported_whitening_is_refused() -> None:
    assert not fs.FedStats().has_whitening_matrices(SPEC)
    with raises(SettingError, "method.whitening"):
        fs.FedStats(whitening="yes", features="pixels").has_whitening_matrices(SPEC)
    # "auto" is resolved with the data set
    automatic = fs.FedStats(covariance_share=0.89, moment_share=0.1)
    larger, none = replace(SPEC, height=12, width=12), torch.nn.Identity()
    ctx = RoundContext(1, 0, torch.device("cpu"), larger, none, 20.0, PRIVATE)
    with raises(SettingError, "method.covariance_share"):
        automatic.release_plans(PRIVATE, ctx)
    # and whether z is shortened
    large = fs.FedStats(principal_share=0.9, drawn_ipc=2)
    with raises(SettingError, "method.principal_share"):
        large.release_plans(PRIVATE, replace(ctx, rounds=2))
