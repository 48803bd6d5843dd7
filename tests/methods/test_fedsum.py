"""FedSum: its numbers beside NumPy's, sums that add up for any partition, and what a private round
releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fedsynth import RunSettings, resolve, simulate
from fedsynth.core.charging import charge_for
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import RoundContext, round_context
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.federation.observer import Observer
from fedsynth.methods.fedsum import CondensedState, FedSum, NetworkSums
from fedsynth.methods.shared.class_sums import COUNTS
from fedsynth.methods.shared.noise_shares import total_of
from fedsynth.methods.shared.private_condensation import IMAGES
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy import mechanisms
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import ForbiddenLayerError, RequestRefusedError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums, clip_rows
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation import network_sums
from fedsynth.synthesizer.condensation.network_sums import SharedNetworks, private_sums
from fedsynth.synthesizer.condensation.perturbation import Perturbations

SPEC = dataset_spec("digits")
CPU = torch.device("cpu")
CONVNET = ModelSettings(width=4, depth=2)
WIDTH = 4 * 4 + 10
TINY: dict[str, Any] = {"networks": 3, "ipc": 2, "iterations": 6, "server_epochs": 2}


def data(n: int = 60, labels: np.ndarray | None = None) -> ImageData:
    images = np.random.default_rng(0).integers(0, 256, (n, 1, 8, 8)).astype(np.uint8)
    return from_arrays(images, np.arange(n) % 10 if labels is None else labels, SPEC)


def context(
    model: ModelSettings = CONVNET, privacy: PrivacySettings | None = None, **other: Any
) -> RoundContext:
    architecture = build_model(model, SPEC.image_shape, 10, 0)
    return round_context(1, 0, CPU, SPEC, architecture, 60.0, privacy, **other)


def start(ctx: RoundContext) -> CondensedState:
    return CondensedState(ctx.architecture.state_dict())


def uploads(
    method: FedSum, ctx: RoundContext, images: ImageData, parts: Sequence[Tensor]
) -> dict[int, NetworkSums]:
    """Of open clients with these records, in one group."""
    clients = OpenClients(range(len(parts)), images, parts)
    results = method.client_step(method.broadcast(start(ctx), ctx), clients, [{}] * len(parts), ctx)
    return {k: sent for k, (sent, _) in enumerate(results)}


# --------------------------------------------------------------------------- numbers, beside NumPy


def test_one_round_is_numpys() -> None:
    """Softmax regression, whose features are [x; b·(Wx + c)]: sums, pooled means, and two steps of
    the images, by networks that alternate."""
    b, lr, ipc = 0.5, 0.3, 2
    method = FedSum(
        networks=2, ipc=ipc, iterations=2, image_lr=lr, logit_weight=b, server_epochs=0, radius=1.0
    )
    ctx = context(ModelSettings("linear"))
    images = data()
    parts = [torch.arange(13), torch.arange(13, 60)]
    sent = uploads(method, ctx, images, parts)
    state = method.server_step(start(ctx), sent, ctx)

    drawn = Perturbations(ctx.architecture, 1.0, seed=0, round=1, device=CPU)
    maps = []
    for _ in range(2):
        layer: Any = drawn.draw().classifier
        W, c = layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy()
        maps.append((np.vstack([np.eye(64), b * W]), np.concatenate([np.zeros(64), b * c])))
    x = OpenClients([0], images, [torch.arange(60)]).images(torch.arange(60)).flatten(1).numpy()
    y = images.labels.numpy()
    S = method.broadcast(start(ctx), ctx).images.view(10, ipc, 64).numpy().copy()
    targets = []
    for m, (A, a) in enumerate(maps):
        centre = S.mean(1) @ A.T + a
        apart = x @ A.T + a - centre[y]
        for k, part in enumerate(parts):
            mine = np.isin(np.arange(60), part.numpy())
            expected = np.stack([apart[mine & (y == c)].sum(0) for c in range(10)])
            np.testing.assert_allclose(sent[k].sums[m].numpy(), expected, atol=2e-4)
        targets.append(np.stack([(x @ A.T + a)[y == c].mean(0) for c in range(10)]))
    assert sent[0].counts.tolist() == np.bincount(y[:13], minlength=10).tolist()
    for (A, a), target in zip(maps, targets, strict=True):
        gradient = 2 * (S.mean(1) @ A.T + a - target) @ A / ipc
        S = S - lr * gradient[:, None, :]
    np.testing.assert_allclose(state.images.view(10, ipc, 64).numpy(), S, atol=1e-4)


def test_the_pooled_means_are_what_the_images_move_to() -> None:
    """Many steps with one network of few features: synthetic class means reach the real ones."""
    method = FedSum(
        networks=1, ipc=4, iterations=100, image_lr=1.0, server_epochs=0, logit_weight=0.5, radius=1
    )
    ctx = context(ModelSettings("linear"))
    images = data()
    state = method.server_step(start(ctx), uploads(method, ctx, images, [torch.arange(60)]), ctx)
    real = OpenClients([0], images, [torch.arange(60)]).images(torch.arange(60))
    for c in range(10):
        made = state.images.view(10, 4, 1, 8, 8)[c].mean(0)
        torch.testing.assert_close(made, real[images.labels == c].mean(0), atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------- any partition alike


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@given(owners=st.lists(st.integers(0, 4), min_size=60, max_size=60))
@settings(max_examples=10, deadline=None)
def test_sums_of_clients_add_up_to_those_of_all_data(owners: list[int]) -> None:
    """To 1e-6, whoever has which example, clients without any among them."""
    method = FedSum(**TINY)
    ctx = context()
    images = data()
    who = torch.tensor(owners)
    parts = [torch.nonzero(who == k).flatten() for k in range(5)]
    pooled = total_of(uploads(method, ctx, images, parts))
    counts, sums = pooled.counts, pooled.sums
    alone = total_of(uploads(method, ctx, images, [torch.arange(60)]))
    held, whole = alone.counts, alone.sums
    assert torch.equal(counts, held)
    assert relative(sums, whole) < 1e-6


def test_a_run_does_not_depend_on_alpha() -> None:
    """Images and model after two rounds; FedDM's own depend on who has what."""

    def run(alpha: float) -> Any:
        return simulate(
            resolve(
                {
                    "run": {"method": "fedsum", "rounds": 2, "device": "cpu"},
                    "model": {"width": 4, "depth": 2},
                    "partition": {"alpha": alpha, "clients": 4, "min_size": 0},
                    "method": TINY,
                }
            )
        )

    one, other = run(0.05), run(100.0)
    sizes = [[float(u.counts.sum()) for u in r.uploads.values()] for r in (one, other)]
    assert sizes[0] != sizes[1]
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name], atol=1e-4, rtol=1e-3)


def test_a_group_and_single_clients_send_the_same() -> None:
    method = FedSum(**TINY)
    ctx = context()
    images = data()
    parts = [torch.arange(25), torch.arange(25, 60)]
    together = uploads(method, ctx, images, parts)
    for k, part in enumerate(parts):
        alone = uploads(method, ctx, images, [part])[0]
        torch.testing.assert_close(alone.sums, together[k].sums, atol=1e-5, rtol=1e-5)
        assert torch.equal(alone.counts, together[k].counts)


@pytest.mark.parametrize("augment", ["none", "siamese"])
@pytest.mark.parametrize("perturbation", ["sphere", "ball", "fresh"])
def test_server_and_clients_look_through_the_same_networks(perturbation: str, augment: str) -> None:
    """Real images that are S themselves have sums of zero about S, in every network."""
    method = FedSum(**TINY, perturbation=perturbation, augment=augment)
    ctx = context()
    images = data(20, labels=np.repeat(np.arange(10), 2))
    pixels = OpenClients([0], images, [torch.arange(20)]).images(torch.arange(20))
    state = replace(start(ctx), images=pixels, kept=torch.ones(10, dtype=torch.bool))
    clients = OpenClients([0], images, [torch.arange(20)])
    ((sent, _),) = method.client_step(method.broadcast(state, ctx), clients, [{}], ctx)
    assert sent.sums.abs().max() < 1e-4
    after = method.server_step(state, {0: sent}, ctx)
    torch.testing.assert_close(after.images, pixels, atol=1e-3, rtol=0)


# -------------------------------------------------------------------------------------- with privacy


def charged(method: FedSum, ctx: RoundContext, ledger: Ledger | None = None) -> list[Any]:
    guard = Guard(ledger or Ledger("0"), 1e-5, None)
    return charge_for(method, ctx, [0], [guard], [SecretGenerator()])


def test_without_noise_and_clipping_private_sums_are_the_open_ones() -> None:
    method = FedSum(**TINY)
    private = context(privacy=PrivacySettings(noise_multiplier=1e-12, clip=1e6))
    images = data()
    clients = PrivateClients([0], images, [torch.arange(60)], charged(method, private))
    message = method.broadcast(start(private), private)
    ((sent, _),) = method.client_step(message, clients, [{}], private)
    exact = uploads(method, context(), images, [torch.arange(60)])[0]
    torch.testing.assert_close(sent.sums, exact.sums, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sent.counts, exact.counts, atol=1e-4, rtol=0)


def test_a_round_is_charged_m_sums_and_the_counts_and_releases_just_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """μ² = M/σ² + M/(count_noise·σ)²; ε is that of one Gaussian with this μ."""
    method = FedSum(**TINY, count_noise=2.0)
    sigma = 3.0
    ctx = context(privacy=PrivacySettings(noise_multiplier=sigma))
    ledger = Ledger("0")
    released: list[float] = []
    original = GaussianSums.release

    def spy(self: GaussianSums) -> Any:
        released.append(self.deviation)
        return original(self)

    monkeypatch.setattr(GaussianSums, "release", spy)
    clients = PrivateClients([0], data(), [torch.arange(60)], charged(method, ctx, ledger))
    method.client_step(method.broadcast(start(ctx), ctx), clients, [{}], ctx)
    rows = {row.quantity: row for row in ledger.releases}
    sums, counts = rows["class sums of features"], rows["class counts"]
    assert (sums.steps, sums.dimension) == (3, 10 * WIDTH)
    assert (counts.steps, counts.dimension, counts.sensitivity) == (1, 10, 1.0)
    assert released == [sigma * sums.sensitivity] * 3 + [pytest.approx(2 * sigma / sqrt(3))]
    mu = sqrt(3 / sigma**2 + 3 / (2 * sigma) ** 2)
    one = Release(1, "all", "gaussian", "x", 1 / mu, 1.0, 1.0, "full", 1, 1)
    assert epsilon(ledger.releases, 1e-5) == pytest.approx(epsilon([one], 1e-5), rel=1e-3)


def networks(ctx: RoundContext, method: FedSum) -> SharedNetworks:
    model = ctx.load(ctx.architecture.state_dict()).requires_grad_(False).eval()
    return method._networks(model, ctx)


HOSTILE = {
    "black": np.zeros((1, 1, 8, 8)),
    "white": np.full((1, 1, 8, 8), 255),
    "noise": np.random.default_rng(7).integers(0, 256, (1, 1, 8, 8)),
}


def moved(extra: str, label: int, records: int, clip: float) -> tuple[list[Tensor], Tensor]:
    """How far one example more moves each network's un-noised sums [classes, D], and the counts
    [classes]."""
    base = data(12)
    images = from_arrays(
        np.concatenate([base.images.numpy(), HOSTILE[extra].astype(np.uint8)]),
        np.array([*(np.arange(12) % 10), label]),
        SPEC,
    )
    ctx = context()
    method = FedSum(**TINY, logit_weight=5.0)
    S = method.broadcast(start(ctx), ctx).images.view(10, 2, 1, 8, 8)
    seen: list[list[Tensor]] = []

    class Spy(GaussianSums):
        def release(self) -> Any:
            assert self._sums is not None
            seen[-1].append(self._sums.clone())
            return super().release()

    for part in (torch.arange(records), torch.cat([torch.arange(records), torch.tensor([12])])):
        seen.append([])
        sums = Release(1, "s", "m", "c", 1e-9, clip, 1.0, "full", 3, 10 * WIDTH)
        counts = Release(1, "n", "m", "c", 1e-9, 1.0, 1.0, "full", 1, 10)
        guard = Guard(Ledger("0"), 1e-5, None)
        series = [[Spy(row, 10, guard, SecretGenerator())] for row in (sums, counts)]
        private_sums(PrivateClients([0], images, [part], []), *series, networks(ctx, method), S)
    *each, count = [after - before for before, after in zip(*seen, strict=True)]
    return each, count


def check_sensitivity(extra: str, label: int, records: int) -> None:
    """One class's sum moves, by at most the clip (here: all of it), and one count, by one."""
    clip = 0.05
    each, counts = moved(extra, label, records, clip)
    assert len(each) == 3
    assert counts.flatten().tolist() == [float(c == label) for c in range(10)]
    for one in each:
        assert 0.9 * clip < one.norm() <= clip * (1 + 1e-4)
        assert one[[c for c in range(10) if c != label]].abs().max() < 1e-6


@given(extra=st.sampled_from(sorted(HOSTILE)), label=st.integers(0, 9), records=st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_an_example_moves_sums_by_at_most_the_clip_and_counts_by_one(
    extra: str, label: int, records: int
) -> None:
    check_sensitivity(extra, label, records)


def about_the_batch(u: Any, centre: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A twin whose centre is the mean of the real images at hand: not a function of one example."""

    def rows(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        made: Tensor = u.real(x_NCHW, segment_N % 10)
        return made - made[segment_N >= 0].mean(dim=0)

    return rows


def clipped_apart(rows_ND: Tensor, clip: float) -> Tensor:
    """A twin that clips embedding and logits each for itself: up to √2 clips together."""
    if rows_ND.shape[1] == 1:
        return clip_rows(rows_ND, clip)
    return torch.cat([clip_rows(rows_ND[:, :16], clip), clip_rows(rows_ND[:, 16:], clip)], dim=1)


def unclipped(rows_ND: Tensor, clip: float) -> Tensor:
    return rows_ND.double()


TWINS = {
    "centred at the batch": (network_sums, "_about", about_the_batch),
    "clipped apart": (mechanisms, "clip_rows", clipped_apart),
    "not clipped": (mechanisms, "clip_rows", unclipped),
}


@pytest.mark.parametrize("name", TWINS)
def test_broken_twins_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sensitivity("white", 3, 8)
    monkeypatch.setattr(*TWINS[name])
    with pytest.raises(AssertionError):
        check_sensitivity("white", 3, 8)


def test_a_class_below_the_noise_of_all_clients_counts_is_left_out() -> None:
    """The floor is two deviations of the sum of K clients' noise."""
    method = FedSum(**TINY)
    deviation, k = 4.0, 9
    noise = {COUNTS: deviation, IMAGES: 1.0}
    privacy = PrivacySettings(noise_multiplier=1.0)
    ctx = context(privacy=privacy, noise=noise, clients=k)
    floor = 2 * deviation * sqrt(k)
    counts = torch.zeros(10)
    counts[:3] = torch.tensor([floor * 1.01, floor * 0.99, -floor]) / k
    sent = {i: NetworkSums(torch.zeros(3, 10, WIDTH), counts) for i in range(k)}
    state = method.server_step(start(ctx), sent, ctx)
    assert state.kept.tolist() == [True] + [False] * 9
    made = method.synthetic(state, ctx)
    assert made is not None
    assert made[1].tolist() == [0, 0]
    before = method.broadcast(start(ctx), ctx).images
    assert torch.equal(state.images[2:], before[2:])  # what nobody has stays as it was
    assert method.facts(state, ctx) == {"condensed_classes": 1}


def test_securely_aggregated_noise_is_that_of_h_clients(tmp_path: Path) -> None:
    """Each adds 1/√H of what is charged; H is all but one unless it is set; ε is that of own noise;
    and of a sum with no more clients than H nothing is made."""
    sigma = 3.0
    privacy = PrivacySettings(noise_multiplier=sigma)
    own = FedSum(**TINY)
    ctx = context(privacy=privacy, clients=5, noise={COUNTS: 7.0})
    for honest, shares in ((0, 4), (3, 3)):
        method = replace(own, aggregation="secure", honest=honest)
        plans = method.private_plans(privacy, ctx)
        assert [plan.shares for plan in plans] == [shares, shares]
        rows = [plan.release(1, sigma) for plan in plans]
        plain = [plan.release(1, sigma) for plan in own.private_plans(privacy, ctx)]
        assert epsilon(rows, 1e-5) == epsilon(plain, 1e-5)
        series = charged(method, ctx)[0].take(IMAGES)
        assert series.deviation == pytest.approx(sigma * plans[0].clip / sqrt(shares))
        assert method.pooled_deviation(COUNTS, 5, ctx) == pytest.approx(7 * sqrt(5 / shares))
    method = replace(own, aggregation="secure")
    sent = {k: NetworkSums(torch.zeros(3, 10, WIDTH), torch.ones(10)) for k in range(5)}
    few = {k: sent[k] for k in range(4)}
    assert method.server_step(start(ctx), few, ctx).images is None
    assert method.server_step(start(ctx), sent, ctx).images is not None
    with pytest.raises(SettingError, match="honest"):
        replace(method, honest=5).private_plans(privacy, ctx)


def test_a_run_says_what_it_assumes(sections: dict[str, dict[str, Any]]) -> None:
    """And its ledger's rows say whose noise it was."""
    notes: list[str] = []

    class Notes(Observer):
        def note(self, text: str) -> None:
            notes.append(str(text))

    sections["method"]["aggregation"] = "secure"
    private = {**sections, "privacy": {"noise_multiplier": 0.5}}
    result = simulate(resolve(private), observer=Notes())
    assert any("aggregation assumed, not executed" in text for text in notes)
    rows = result.privacy["ledger"]
    assert all("2 clients" in row["mechanism"] for row in rows)


def test_shared_noise_needs_more_participants_than_shares(
    sections: dict[str, dict[str, Any]],
) -> None:
    """Two of four take part: noise of three, or of two, is never whole."""
    sections["partition"]["clients"] = 4
    sections["run"]["participation"] = 0.5
    sections["method"]["aggregation"] = "secure"
    private = {**sections, "privacy": {"noise_multiplier": 0.5}}
    for honest in (0, 2, 3):
        sections["method"]["honest"] = honest
        with pytest.raises(SettingError, match="2 of 4 clients take part"):
            simulate(resolve(private))
    sections["method"]["honest"] = 2
    sections["run"]["participation"] = 0.75
    assert simulate(resolve(private)).privacy is not None


@pytest.mark.parametrize("privacy", [None, PrivacySettings(noise_multiplier=1.0)])
def test_the_servers_condensation_is_compiled_without_privacy_alone(
    privacy: PrivacySettings | None, compiled: list[str]
) -> None:
    run = RunSettings(FedSum(**TINY), rounds=1, model=CONVNET, compile=True, privacy=privacy)
    simulate(run, quiet=True)
    assert {"_between", "_back"} <= set(compiled) if privacy is None else compiled == []


def test_requests_of_another_form_and_batch_norm_are_refused() -> None:
    method = FedSum(**TINY)
    ctx = context()
    sent = method.broadcast(start(ctx), ctx)
    method.check_request(sent, ctx)
    with pytest.raises(RequestRefusedError, match="images"):
        method.check_request(replace(sent, images=sent.images[:-1]), ctx)
    normed = context(replace(CONVNET, norm="batch"))
    with pytest.raises(ForbiddenLayerError):
        method.private_plans(PrivacySettings(noise_multiplier=1.0), normed)


# ----------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def sections() -> dict[str, dict[str, Any]]:
    return {
        "run": {"method": "fedsum", "rounds": 1, "device": "cpu"},
        "model": {"width": 4, "depth": 2},
        "partition": {"clients": 3},
        "method": dict(TINY),
    }


@pytest.mark.parametrize("privacy", [{}, {"noise_multiplier": 0.5}])
def test_a_runs_folder_has_the_servers_images(
    tmp_path: Path, sections: dict[str, dict[str, Any]], privacy: dict[str, float]
) -> None:
    result = simulate(resolve({**sections, "privacy": privacy}), output=tmp_path)
    assert result.folder is not None
    held = load_file(result.folder / "synthetic.safetensors")
    assert held["images"].shape == (len(held["labels"]), 1, 8, 8)
    assert set(held["client"].tolist()) == {-1}
    assert (result.folder / "synthetic.png").is_file()
    assert result.metrics[0]["condensed_classes"] == len(held["labels"].unique())


def test_what_goes_up_is_sums_and_counts_alone(sections: dict[str, dict[str, Any]]) -> None:
    result = simulate(resolve(sections))
    upload = result.uploads[0]
    assert upload.nbytes == 4 * (3 * 10 * WIDTH + 10)
    assert [name for name, _ in upload.arrays()] == ["sums", "counts"]


@pytest.mark.parametrize("start_from", ["noise", "random-process"])
def test_start_images_are_public_and_of_the_seed(start_from: str) -> None:
    method = FedSum(**TINY, start=start_from)
    ctx = context()
    made = method.broadcast(start(ctx), ctx).images
    assert torch.equal(made, method.broadcast(start(ctx), ctx).images)
    other = replace(ctx, federation=replace(ctx.federation, seed=1))
    assert not torch.equal(made, method.broadcast(start(other), other).images)
    kept = replace(start(ctx), images=made + 1, kept=torch.ones(10, dtype=torch.bool))
    assert torch.equal(method.broadcast(kept, ctx).images, made + 1)
    assert torch.equal(replace(method, restart=True).broadcast(kept, ctx).images, made)


def test_learns_with_and_without_privacy() -> None:
    """On the digits: 0.7 of a skewed federation in one round, and more than half at ε = 8."""
    base = {
        "run": {"method": "fedsum", "rounds": 1, "device": "cpu"},
        "model": {"width": 16, "depth": 2},
        "partition": {"alpha": 0.05, "clients": 5},
        "method": {"networks": 8},
    }
    assert simulate(resolve(base)).accuracy > 0.7
    assert simulate(resolve({**base, "privacy": {"epsilon": 8.0}})).accuracy > 0.5
