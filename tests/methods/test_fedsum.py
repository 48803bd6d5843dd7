"""FedSum: rounds against NumPy, sums over any partition, and private releases."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth import FedDM, FedSum, ModelSettings, PrivacySettings, RoundContext, resolve, simulate
from fedsynth.core.client import ExactClientView
from fedsynth.errors import SettingError
from fedsynth.methods.feddm import perturbed
from fedsynth.methods.shared.class_sums import COUNTS, IMAGES
from fedsynth.methods.shared.fedsum_settings import CondensedState, NetworkSums
from fedsynth.methods.shared.noise_shares import summed
from fedsynth.models.registry import build_model
from fedsynth.privacy import Ledger, Release, epsilon
from fedsynth.privacy.errors import ForbiddenLayerError, RequestRefusedError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from tests import digits as setup
from tests.digits import HOSTILE, SPEC, client_uploads, convnet, digits, private_clients
from tests.privacy.support import guard
from tests.quick_runs import quick_sections

WIDTH = 4 * 4 + 10
RELEASE = GaussianSumMechanism.release
TINY: dict[str, Any] = {"networks": 3, "ipc": 2, "iterations": 6, "server_epochs": 2}
DATA = digits(np.arange(60) % 10)


def context(privacy: PrivacySettings | None = None, **other: Any) -> RoundContext:
    return setup.round_context(privacy, nominal=60.0, **other)


def initial_state(ctx: RoundContext) -> CondensedState:
    return CondensedState(ctx.architecture.state_dict())


def uploads(method: FedSum, ctx: RoundContext, *parts: Tensor) -> dict[int, NetworkSums]:
    return dict(enumerate(client_uploads(method, ctx, clients(*parts))))


def clients(*parts: Tensor) -> ExactClientView:
    return ExactClientView(range(len(parts)), DATA, parts)


def test_one_round_equals_numpy() -> None:
    """Softmax regression has features [x; b·(Wx + c)]. The networks alternate."""
    b, lr, ipc = 0.5, 0.3, 2
    two = {"networks": 2, "iterations": 2, "server_epochs": 0, "radius": 1.0}
    method = FedSum(ipc=ipc, image_lr=lr, logit_weight=b, **two)
    ctx = context(network=build_model(ModelSettings("linear"), SPEC.image_shape, 10, 0))
    parts = torch.arange(60).split([13, 47])
    upload = uploads(method, ctx, *parts)
    state = method.server_step(initial_state(ctx), upload, ctx)

    drawn = perturbed(ctx.architecture, 1.0, "sphere", ctx)
    maps = []
    for _ in range(2):
        layer: Any = next(drawn).classifier
        W, c = layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy()
        maps.append((np.vstack([np.eye(64), b * W]), np.concatenate([np.zeros(64), b * c])))
    x = clients(torch.arange(60)).images(torch.arange(60)).flatten(1).numpy()
    y = DATA.labels.numpy()
    S = method.broadcast(initial_state(ctx), ctx).images.view(10, ipc, 64).numpy().copy()
    targets = []
    for m, (A, a) in enumerate(maps):
        centre = S.mean(1) @ A.T + a
        deviations = x @ A.T + a - centre[y]
        for k, part in enumerate(parts):
            member = np.isin(np.arange(60), part.numpy())
            expected = np.stack([deviations[member & (y == c)].sum(0) for c in range(10)])
            np.testing.assert_allclose(upload[k].sums[m].numpy(), expected, atol=2e-4)
        targets.append(np.stack([(x @ A.T + a)[y == c].mean(0) for c in range(10)]))
    assert upload[0].counts.tolist() == np.bincount(y[:13], minlength=10).tolist()
    for (A, a), target in zip(maps, targets, strict=True):
        gradient = 2 * (S.mean(1) @ A.T + a - target) @ A / ipc
        S = S - lr * gradient[:, None, :]
    np.testing.assert_allclose(state.images.view(10, ipc, 64).numpy(), S, atol=1e-4)


@given(owners=st.lists(st.integers(0, 4), min_size=60, max_size=60))
@settings(max_examples=10, deadline=None)
def test_client_sums_equal_pooled_sums(owners: list[int]) -> None:
    method, ctx, owner = FedSum(**TINY), context(), torch.tensor(owners)
    parts = [torch.nonzero(owner == k).flatten() for k in range(5)]
    client_sums = uploads(method, ctx, *parts)
    pooled = summed(client_sums)
    separate = summed(uploads(method, ctx, torch.arange(60)))
    assert torch.equal(pooled.counts, separate.counts)
    assert float((pooled.sums - separate.sums).norm()) < 1e-6 * float(separate.sums.norm())
    assert client_sums[0].nbytes == 4 * (3 * 10 * WIDTH + 10)


@pytest.mark.parametrize(
    ("perturbation", "augment"), [("sphere", "none"), ("ball", "siamese"), ("fresh", "siamese")]
)
def test_server_and_clients_use_the_same_networks(perturbation: str, augment: str) -> None:
    """Real images equal to S have sums of zero about S in every network."""
    method, ctx = FedSum(**TINY, perturbation=perturbation, augment=augment), context()
    clients = ExactClientView([0], digits(np.repeat(np.arange(10), 2)), [torch.arange(20)])
    pixels = clients.images(torch.arange(20))
    state = replace(initial_state(ctx), images=pixels, condensed=torch.ones(10, dtype=torch.bool))
    (upload,) = client_uploads(method, ctx, clients, state=state)
    assert upload.sums.abs().max() < 1e-4
    new_state = method.server_step(state, {0: upload}, ctx)
    torch.testing.assert_close(new_state.images, pixels, atol=1e-3, rtol=0)


def test_noiseless_private_sums_equal_open_sums() -> None:
    method, ctx = FedSum(**TINY), context(PrivacySettings(noise_multiplier=1e-12, clip=1e6))
    (upload,) = client_uploads(method, ctx, private_clients(method, ctx, DATA))
    (exact,) = client_uploads(method, context(), clients(torch.arange(60)))
    torch.testing.assert_close(upload.sums, exact.sums, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(upload.counts, exact.counts, atol=1e-4, rtol=0)


def test_round_charges_exactly_its_releases() -> None:
    """μ² = M/σ² + M/(count_noise·σ)², and ε equals one Gaussian's with this μ."""
    method, sigma, ledger = FedSum(**TINY, count_noise=2.0), 3.0, Ledger("0")
    ctx = context(PrivacySettings(noise_multiplier=sigma))
    release = patch.object(GaussianSumMechanism, "release", autospec=True, side_effect=RELEASE)
    with release as spy:
        client_uploads(method, ctx, private_clients(method, ctx, DATA, ledgers=[ledger]))
    released = [call.args[0].noise_std for call in spy.call_args_list]
    rows = {row.quantity: row for row in ledger.releases}
    sums, counts = rows["class sums of features"], rows["class counts"]
    assert (sums.steps, sums.dimension) == (3, 10 * WIDTH)
    assert (counts.steps, counts.dimension, counts.sensitivity) == (1, 10, 1.0)
    assert released == [sigma * sums.sensitivity] * 3 + [pytest.approx(2 * sigma / sqrt(3))]
    mu = sqrt(3 / sigma**2 + 3 / (2 * sigma) ** 2)
    combined = Release(1, "all", "gaussian", "x", 1 / mu, 1.0, 1.0, "full", 1, 1)
    assert epsilon(ledger.releases, 1e-5) == pytest.approx(epsilon([combined], 1e-5), rel=1e-3)


def released_sums(method: Any, images: Any, part: Any, clip: float) -> list[tuple[Tensor, bool]]:
    """Returns a client's sums before noise, with a flag for counts."""
    sums: list[tuple[Tensor, bool]] = []

    def record(mechanism: Any) -> Any:
        sums.append((mechanism._sums.clone(), mechanism._sums.numel() == 10))
        return RELEASE(mechanism)

    mechanism = "features" if isinstance(method, FedDM) else ""
    ctx = context(PrivacySettings(noise_multiplier=1e-9, clip=clip, mechanism=mechanism))
    with patch.object(GaussianSumMechanism, "release", record):
        part_N = torch.tensor(part, dtype=torch.int64)
        client_uploads(method, ctx, private_clients(method, ctx, images, [part_N]))
    return sums


SUMMING = (
    FedSum(**TINY, logit_weight=5.0),
    FedDM(ipc=2, iterations=1, networks=1, logit_weight=5.0),  # later sums are about new images
)


@pytest.mark.parametrize("method", SUMMING, ids=lambda method: method.name)
@given(extra=st.integers(0, 2), label=st.integers(0, 9), records=st.integers(0, 12))
@settings(max_examples=10, deadline=None)
def test_sensitivity_of_sums_and_counts(method: Any, extra: int, label: int, records: int) -> None:
    """Adding a record moves one class's sum by at most the clip, and its count by one."""
    images, clip = digits([*(np.arange(12) % 10), label], HOSTILE[extra]), 0.05
    sums_D = released_sums(method, images, range(records), clip)
    sums_Dx = released_sums(method, images, [*range(records), 12], clip)
    assert sorted(counts for _, counts in sums_Dx) == [False] * method.networks + [True]
    for (sum_D, counts), (sum_Dx, _) in zip(sums_D, sums_Dx, strict=True):
        change = sum_Dx - sum_D
        if counts:
            assert change.flatten().tolist() == [float(c == label) for c in range(10)]
        else:
            assert 0.9 * clip < change.norm() <= clip * (1 + 1e-4)
            assert change[[c for c in range(10) if c != label]].abs().max() < 1e-6


def test_classes_below_the_noise_floor_are_excluded() -> None:
    """The floor is two deviations of the sum of K clients' noise."""
    method, noise_std, k = FedSum(**TINY), 4.0, 9
    noise = {COUNTS: noise_std, IMAGES: 1.0}
    ctx = context(PrivacySettings(noise_multiplier=1.0), noise=noise, clients=k)
    floor = 2 * noise_std * sqrt(k)
    counts = torch.zeros(10)
    counts[:3] = torch.tensor([floor * 1.01, floor * 0.99, -floor]) / k
    client_sums = {i: NetworkSums(torch.zeros(3, 10, WIDTH), counts) for i in range(k)}
    state = method.server_step(initial_state(ctx), client_sums, ctx)
    assert state.condensed.tolist() == [True] + [False] * 9
    assert method.synthetic(state, ctx)[1].tolist() == [0, 0]  # type: ignore[index]
    start_images = method.broadcast(initial_state(ctx), ctx).images
    assert torch.equal(state.images[2:], start_images[2:])  # missing classes are unchanged
    assert method.facts(state, ctx) == {"condensed_classes": 1}


def test_secure_aggregation_shares_noise_of_honest_clients() -> None:
    """Each client adds 1/√H of the charged noise."""
    sigma, open_method = 3.0, FedSum(**TINY)
    privacy = PrivacySettings(noise_multiplier=sigma)
    ctx = context(privacy, clients=5, noise={COUNTS: 7.0})
    plain = [plan.release(1, sigma) for plan in open_method.release_plans(privacy, ctx)]
    for honest, shares in ((0, 4), (3, 3)):
        method = replace(open_method, aggregation="secure", honest=honest)
        plans = method.release_plans(privacy, ctx)
        assert [plan.shares for plan in plans] == [shares, shares]
        rows = [plan.release(1, sigma) for plan in plans]
        assert epsilon(rows, 1e-5) == epsilon(plain, 1e-5)
        (allowance,) = setup.charge_for(method, ctx, [0], [guard()], [SecretGenerator()])
        expected = sigma * plans[0].clip / sqrt(shares)
        assert allowance.take(IMAGES).noise_std == pytest.approx(expected)
        assert method.pooled_deviation(COUNTS, 5, ctx) == pytest.approx(7 * sqrt(5 / shares))
    method = replace(open_method, aggregation="secure")
    client_sums = {k: NetworkSums(torch.zeros(3, 10, WIDTH), torch.ones(10)) for k in range(5)}
    too_few = {k: client_sums[k] for k in range(4)}
    assert method.server_step(initial_state(ctx), too_few, ctx).images is None
    assert method.server_step(initial_state(ctx), client_sums, ctx).images is not None
    with pytest.raises(SettingError, match="honest"):
        replace(method, honest=5).release_plans(privacy, ctx)


def test_few_participants_bad_requests_and_batch_norm_are_refused() -> None:
    """Two of four clients take part, too few for complete noise of two or three."""
    run, partition = {"rounds": 1, "participation": 0.5}, {"clients": 4}
    noise = {"noise_multiplier": 0.5}
    sections = quick_sections("fedsum", run=run, partition=partition, privacy=noise)
    for honest in (0, 2, 3):
        sections["method"] = {**TINY, "aggregation": "secure", "honest": honest}
        with pytest.raises(SettingError, match="selects only 2 clients"):
            simulate(resolve(sections))
    sections["method"]["honest"] = 2
    sections["run"]["participation"] = 0.75
    rows: Any = simulate(resolve(sections)).privacy["ledger"]  # type: ignore[index]
    assert {row["shares"] for row in rows} == {2}
    # malformed requests and batch norm
    method, ctx = FedSum(**TINY), context()
    request = method.broadcast(initial_state(ctx), ctx)
    method.check_request(request, ctx)
    with pytest.raises(RequestRefusedError, match="images"):
        method.check_request(replace(request, images=request.images[:-1]), ctx)
    normed = context(network=convnet("batch"))
    with pytest.raises(ForbiddenLayerError):
        method.release_plans(PrivacySettings(noise_multiplier=1.0), normed)


@pytest.mark.parametrize("start_from", ["noise", "random-process"])
def test_start_images_depend_only_on_the_seed(start_from: str) -> None:
    method, ctx, other = FedSum(**TINY, start=start_from), context(), context(seed=1)
    images = method.broadcast(initial_state(ctx), ctx).images
    assert torch.equal(images, method.broadcast(initial_state(ctx), ctx).images)
    assert not torch.equal(images, method.broadcast(initial_state(other), other).images)
    all_classes = torch.ones(10, dtype=torch.bool)
    stepped = replace(initial_state(ctx), images=images + 1, condensed=all_classes)
    assert torch.equal(method.broadcast(stepped, ctx).images, images + 1)
    assert torch.equal(replace(method, restart=True).broadcast(stepped, ctx).images, images)
