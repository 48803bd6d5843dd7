"""Condensation and its losses, augmentation, students of synthetic sets, images from statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ot
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import wasserstein_distance
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import ModelSettings, StudentSettings, resolve, simulate, train_student
from fedsynth import synthesizer as syn
from fedsynth.config.loading import code_options, with_own_code
from fedsynth.core.client import ExactClientView
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataError, DivergedError, SettingError
from fedsynth.features.registry import feature_map
from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.models.on_features import embedded
from fedsynth.models.registry import build_model
from fedsynth.privacy import BudgetExceededError, DataOwner, PrivacyError
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.condensation import augmentation, losses, student
from fedsynth.synthesizer.condensation import from_statistics as images_from
from fedsynth.synthesizer.condensation.losses import DistributionMatcher, unit_directions
from fedsynth.synthesizer.condensation.matching import ExactMatcher, NetworkFeatures
from fedsynth.synthesizer.condensation.sets import BatchIndices
from tests.digits import CPU, digits
from tests.quick_runs import quick_sections
from tests.raising import raises
from tests.synthesizer.test_matchers import WIDTH, features_of, network, synthetic

LABELS = np.array([0, 0, 0, 0, 0, 1, 1, 2, 0, 1])
PARTS = [torch.arange(8), torch.arange(8, 10)]
Array = npt.NDArray[np.float64]
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
THREE_CLASSES = torch.arange(6) % 3
CLASSES, SHAPE, COLOUR = 3, (1, 8, 8), dataset_spec("cifar10")
residual = partial(syn.ResidualMatching, clip=1.0)
condense = partial(syn.condense, per_class=1, lr=0.1)


def exact(device: torch.device = CPU, ids: Sequence[int] = (0, 1)) -> ExactMatcher:
    data = digits(LABELS, device=device)
    data.images[8:] = 255  # far from client 0's images
    clients = ExactClientView(ids, data, [PARTS[k] for k in ids])
    batches = BatchIndices(clients, clients.pairs(1), 100, 1, seed=0, round=1)
    return ExactMatcher(clients, batches)


def gaussian(x: Array, y: Array, blur: float) -> float:
    return -float(blur**2 * np.exp(-cdist(x, y, "sqeuclidean") / (2 * blur**2)).mean())


def energy(x: Array, y: Array, blur: float) -> float:
    return float(cdist(x, y).mean())


def sinkhorn(x: Array, y: Array, blur: float) -> float:
    """Returns POT's Sinkhorn cost of ½‖x − y‖², with ε = blur²."""
    n, m = np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y))
    matrix, options = cdist(x, y, "sqeuclidean") / 2, {"numItermax": 20_000, "stopThr": 1e-12}
    plan = ot.sinkhorn(n, m, matrix, blur**2, method="sinkhorn_log", **options)
    return float((plan * matrix).sum() + blur**2 * (plan * np.log(plan / (n[:, None] * m))).sum())


@pytest.mark.parametrize("cost", [gaussian, energy, sinkhorn])
def test_gradient_matches_the_oracle(cost: Any, device: torch.device) -> None:
    """Regression: a Sinkhorn schedule that starts from the spread of all pairs."""
    S, net, matching = synthetic(5, device), network().to(device).double(), cost.__name__
    gradient = DistributionMatcher(exact(device), matching, 0.5).gradient(0, features_of(device), S)
    clients = exact(device).clients
    pairs = clients.pairs(1)

    def cloud(images: Tensor) -> Array:
        h = net.embed(images.double())
        both = torch.cat([h, net.classifier(h)], 1) / WIDTH**0.5
        return both.cpu().numpy()  # type: ignore[no-any-return]

    def divergence(x: Array, y: Array) -> float:
        return 2 * WIDTH * (cost(x, y, 0.5) - cost(x, x, 0.5) / 2 - cost(y, y, 0.5) / 2)

    def value(images: Tensor) -> float:
        sources = zip(pairs.position.tolist(), pairs.label.tolist(), strict=True)
        real = [cloud(clients.images(clients.examples(k, c))) for k, c in sources]
        return sum(divergence(cloud(x), y) for x, y in zip(images, real, strict=True))

    with torch.no_grad():
        step = 1e-4 / float(gradient.norm())
        slope = value(S.double() + step * gradient) - value(S.double() - step * gradient)
    # geomloss stops its Sinkhorn iterations early, so its gradient is an approximation
    expected = float(gradient.double().square().sum())
    tolerance = 5e-2 if matching == "sinkhorn" else 1e-3
    assert slope / (2 * step) == pytest.approx(expected, rel=tolerance)
    alone = DistributionMatcher(exact(device, [0]), matching, 0.5)
    single = alone.gradient(0, features_of(device), S[:3])
    torch.testing.assert_close(single, gradient[:3], atol=1e-5, rtol=1e-4)


def test_own_loss_is_minimised(tmp_path: Path) -> None:
    """The squared distance of the means, as a user's loss, is the loss of Eq. 9."""
    file = tmp_path / "loss.py"
    file.write_text("def means(x, y):\n    return (x.mean(0) - y.mean(0)).square().sum()\n")
    with pytest.raises(SettingError, match=f"Load it with --matching {file}:means"):
        resolve({"method": {"matching": f"{file}:means"}})
    own = with_own_code({"method": {"matching": f"{file}:means"}})["method"]["matching"]
    means = DistributionMatcher(exact(), own, 1.0).gradient(0, features_of(), synthetic(5))
    torch.testing.assert_close(means, exact().gradient(0, features_of(), synthetic(5)))
    run = simulate(resolve(quick_sections("feddm", method={"matching": own})))
    assert run.summary["sources"]["loss"]["file"] == "loss.py"
    assert code_options(run.settings) == ["--matching", f"{file}:means"]
    file.write_text("def means(x, y):\n    return x\n")
    own = with_own_code({"method": {"matching": f"{file}:means"}})["method"]["matching"]
    with pytest.raises(SettingError, match="the loss raises ValueError: the loss must return"):
        simulate(resolve(quick_sections("feddm", method={"matching": own})))


def test_columns_can_exclude_the_logits() -> None:
    """Without logits the classifier has no influence."""
    matcher, gradients = DistributionMatcher(exact(), "energy", 1.0, 16), []
    for factor in (1, 3):
        net = network()
        net.classifier.weight.mul_(factor)
        gradients.append(matcher.gradient(0, NetworkFeatures(net, 1.0, None), synthetic(5)))
    torch.testing.assert_close(*gradients)


def test_distribution_losses_run_only_without_privacy() -> None:
    for method, kind, norm in (("feddm", "energy", "instance"), ("fedaf", "gaussian", "batch")):
        sections = quick_sections(method, method={"matching": kind}, model={"norm": norm})
        assert simulate(resolve(sections)).accuracy > 0
        private = {"model": {"norm": "instance"}, "privacy": {"epsilon": 10.0}}
        with raises(SettingError, "method.matching"):
            simulate(resolve({**sections, **private}))


def test_eqs_8_and_12_average_over_holders_of_a_class() -> None:
    """Values of clients without a class must not spread."""
    a = torch.tensor([[2.0, 0, 0], [math.nan] * 3, [9, 9, 9]])
    b = torch.tensor([[4.0, 2, 0], [0, 6, 0], [math.inf] * 3])
    holds = [torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])]
    mean, has_holder = losses.average_over_holders([a, b], holds)
    assert has_holder.tolist() == [True, True, False]
    assert mean.tolist() == [[3, 1, 0], [0, 6, 0], [0, 0, 0]]


def distance(u: Tensor, v: Tensor, client: Tensor, kind: Any, directions: Tensor) -> Tensor:
    return losses.collaborative_distance(u, v, client, distance=kind, directions_PC=directions)


def test_rows_distance_equals_sorting_per_client() -> None:
    rng = np.random.default_rng(1)
    u, v, client = rng.normal(size=(5, 4)), rng.normal(size=(5, 4)), np.array([0, 0, 0, 1, 1])
    directions = next(unit_directions(7, 4, GENERATOR)).double()
    expected = 0.0
    for k in (0, 1):
        for theta in directions.numpy():
            u_sorted, v_sorted = (np.sort(w[client == k] @ theta) for w in (u, v))
            expected += np.abs(u_sorted - v_sorted).sum() / 7
    actual = distance(torch.tensor(u), torch.tensor(v), torch.tensor(client), "rows", directions)
    assert float(actual) == pytest.approx(expected)
    # the sorted distance ignores the order of classes
    a, b = torch.tensor([[1.0, 2, 3]]), torch.tensor([[3.0, 1, 2]])
    directions = next(unit_directions(3, 3, GENERATOR))
    assert float(distance(a, b, torch.zeros(1), "sorted", directions)) == 0


@pytest.mark.parametrize("kind", losses.DISTANCES)
def test_distance_gradients_are_finite_at_equality(kind: str, device: torch.device) -> None:
    """A detached term would have no gradient, a plain norm or POT's NaN at zero."""
    v = torch.randn(4, 5, generator=GENERATOR).double().to(device)
    directions = next(unit_directions(20, 5, GENERATOR)).double().to(device)
    client = torch.tensor([0, 0, 1, 1], device=device)

    def loss(u: Tensor) -> Tensor:
        return distance(u, v, client, kind, directions)

    u = (v + torch.randn(4, 5, generator=GENERATOR).to(device)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (u,))
    (gradient,) = torch.autograd.grad(loss(u), u)
    assert gradient.norm() > 0
    equal = v.clone().requires_grad_()
    (at_zero,) = torch.autograd.grad(loss(equal), equal)
    assert torch.isfinite(at_zero).all()
    assert float(loss(equal).detach()) == 0


def test_knowledge_matching_is_zero_at_equality_and_finite() -> None:
    v = torch.randn(3, 4, generator=GENERATOR).double()
    all_classes = torch.ones(3, dtype=torch.bool)
    leaf = v.clone().requires_grad_()
    loss = losses.knowledge_matching(leaf, losses.soft_labels(v, 1.5), all_classes, 1.5)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-12
    assert float(losses.knowledge_matching(v, losses.soft_labels(-v, 1.0), ~all_classes, 1.0)) == 0
    certain = torch.tensor([[1000.0, 0.0]]).requires_grad_()
    opposite = torch.tensor([[0.0, 1.0]])
    extreme = losses.knowledge_matching(certain, opposite, torch.tensor([True]), 1.0)
    (gradient,) = torch.autograd.grad(extreme, certain)
    assert torch.isfinite(torch.cat([extreme[None], gradient[0]])).all()
    fixed = {"soft_CC": losses.soft_labels(v, 1.0), "usable_C": all_classes, "temperature": 1.0}
    assert torch.autograd.gradcheck(partial(losses.knowledge_matching, **fixed), (leaf,))


def records(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % CLASSES


def fixed_network() -> nn.Module:
    with forked_rng(1, "network"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())


def conv_network() -> nn.Module:
    with forked_rng(1, "network"):
        return ConvNet((1, 8, 8), CLASSES, width=16, depth=2)


def owner(count: int = 60, epsilon: float = 5.0) -> DataOwner:
    settings = {"nominal_size": 60, "epsilon": epsilon, "delta": 1e-5, "bounds": (0, 1)}
    return DataOwner("a", *records(count), classes=CLASSES, **settings)


def autograd_gradient(network: nn.Module, synthetic: Tensor) -> Tensor:
    """Returns the gradient of Σ_c ‖mean u(B_c) − mean u(S_c)‖², with all records as B_c."""
    x, y = records()
    leaf = synthetic.clone().requires_grad_()
    if isinstance(network, ConvNet):
        embedded = [network.embed(x), network.embed(leaf.flatten(0, 1))]
        real, fake = [torch.cat([h, network.classifier(h)], dim=1) for h in embedded]
    else:
        real, fake = network(x), network(leaf.flatten(0, 1))
    means = torch.stack([real[y == label].mean(dim=0) for label in range(CLASSES)])
    loss = (means - fake.view(CLASSES, synthetic.shape[1], -1).mean(dim=1)).square().sum()
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("wrong", [{"per_class": 0}, {"lr": math.nan}, {"lr": -1.0}])
def test_invalid_numbers_are_refused_before_charging(wrong: Any) -> None:
    """Regression: they spent the whole budget."""
    data_owner = owner()
    with pytest.raises(SettingError, match=next(iter(wrong))):
        syn.condense(
            syn.ResidualMatching(data_owner, fixed_network, clip=1.0, steps=1),
            **{"per_class": 1, "lr": 1.0} | wrong,
        )
    assert data_owner.spent() == 0


def test_objectives_have_the_gradient_of_the_loss(without_noise: None) -> None:
    """Private objectives have no noise, and a clip that no record reaches."""
    plan = {"clip": 1e3, "steps": 1}
    distance = {"loss": lambda real, synthetic: syn.mean_distance(real, synthetic)}
    objectives: tuple[tuple[Any, Any], ...] = (
        (conv_network, syn.FeatureMatching(*records(), conv_network, classes=CLASSES, steps=1)),
        (conv_network, syn.ResidualMatching(owner(), conv_network, **plan)),
        (fixed_network, syn.ResidualMatching(owner(), fixed_network, **plan)),
        (conv_network, syn.GradientMatching(owner(), conv_network, **plan)),
        (fixed_network, syn.GradientMatching(owner(), fixed_network, **distance, **plan)),
    )
    for make_network, objective in objectives:
        synthetic = objective.start(2, seed=0)
        objective.begin(synthetic)
        expected = autograd_gradient(make_network(), synthetic)
        assert torch.allclose(objective.gradient(0, synthetic), expected, atol=1e-5)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :16] - x.mean()


def test_only_the_loop_charges_whatever_the_number_of_records() -> None:
    charges = {}
    for count in (60, 61):
        data_owner = owner(count, epsilon=2.0)
        objective = residual(data_owner, fixed_network, steps=3, sample_rate=0.5)
        condense(objective)
        charges[count] = (data_owner._ledger.releases, objective._divisor, data_owner.spent())
    assert charges[60] == charges[61]
    assert 1.99 < charges[60][2] <= 2.0
    data_owner, other_owner = owner(epsilon=2.0), owner(epsilon=2.0)
    objective = residual(data_owner, fixed_network, steps=2)
    assert data_owner.spent() == 0
    condense(objective)
    with pytest.raises(BudgetExceededError):
        condense(objective)
    with raises(PrivacyError, "step.dependence"):
        condense(residual(other_owner, Mixing, steps=2))
    assert other_owner.spent() == 0


def test_networks_and_losses_are_checked_before_use() -> None:
    networks = iter([fixed_network(), fixed_network(), Mixing()])
    with pytest.raises(PrivacyError, match="mixes the examples"):
        condense(residual(owner(), lambda: next(networks), steps=3))

    def noisy(real: Tensor, synthetic: Tensor) -> Tensor:
        return syn.mean_distance(real, synthetic) * torch.rand(())

    data_owner = owner()
    random_loss = syn.GradientMatching(data_owner, fixed_network, loss=noisy, clip=1.0, steps=1)
    with pytest.raises(PrivacyError, match="draws random numbers"):
        condense(random_loss)
    assert data_owner.spent() == 0
    with pytest.raises(ValueError, match="start must have shape"):
        condense(random_loss, per_class=2, start=torch.zeros(3, 1, 1, 8, 8))
    with pytest.raises(TypeError, match="must be a function that returns a network"):
        condense(residual(data_owner, fixed_network(), steps=1))
    with pytest.raises(ValueError, match="start must be finite"):
        condense(random_loss, per_class=2, start=torch.full((CLASSES, 2, 1, 8, 8), torch.nan))
    # the gradient of a deviation is not finite where all start records are equal
    spread = syn.GradientMatching(
        data_owner, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8)),
        loss=lambda real, made: (made.var(0).sqrt() - 1).square().sum() + real.sum() * made.sum(),
        clip=1.0, steps=1,
    )  # fmt: skip
    with pytest.raises(PrivacyError, match="no finite value"):
        condense(spread, per_class=3, start=torch.full((CLASSES, 3, 1, 8, 8), 0.5))
    assert data_owner.spent() == 0


def test_condensation_is_reproducible_and_bounded() -> None:
    matching, state = partial(syn.FeatureMatching, *records()), torch.get_rng_state()

    def random_network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16))

    objective = matching(random_network, classes=CLASSES, steps=5, bounds=(0, 1))
    first, second = (condense(objective, per_class=2, lr=50.0) for _ in range(2))
    assert torch.equal(first.x, second.x)
    assert torch.equal(state, torch.get_rng_state())
    assert 0 <= first.x.min() <= first.x.max() <= 1
    assert first.y.tolist() == [0, 0, 1, 1, 2, 2]
    with raises(DataError, "data.invalid"):
        matching(fixed_network, classes=4, steps=1)
    unbounded = matching(fixed_network, classes=CLASSES, steps=20)
    with raises(DivergedError, "training.diverged"):
        condense(unbounded, lr=1e30)


def test_sliced_distance_equals_scipy_along_directions() -> None:
    u, v = torch.randn(7, 3), torch.randn(4, 3) + 1
    directions = torch.randn(3, 5, generator=torch_generator(2, "slicing directions"))
    directions /= directions.norm(dim=0)
    rows = zip((u @ directions).T.numpy(), (v @ directions).T.numpy(), strict=True)
    expected = np.mean([wasserstein_distance(a, b) for a, b in rows])
    actual = syn.sliced_wasserstein(u, v, projections=5, seed=2)
    assert float(actual) == pytest.approx(expected, rel=1e-5)
    leaf = v.clone().requires_grad_()
    syn.sliced_wasserstein(u, leaf).backward()
    assert bool(leaf.grad.abs().sum() > 0)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_images_of_a_pair_share_their_transform() -> None:
    x = torch.rand(1, 3, 16, 16, generator=draws())
    t = augmentation.SiameseAugmentation(40, draws(1), flip=True)
    out = t(x.expand(80, -1, -1, -1), torch.arange(40).repeat(2))
    assert torch.equal(out[:40], out[40:])
    assert len(out[:40].flatten(1).unique(dim=0)) > 30  # pairs differ
    torch.testing.assert_close(t(x, torch.tensor([7])), out[7:8])
    ramp = torch.linspace(0, 1, 16).expand(400, 1, 16, 16)
    for flip in (False, True):
        t = augmentation.SiameseAugmentation(400, draws(3), flip=flip)
        out = t(ramp, torch.arange(400))
        slopes = out[:, 0, 6:10, 12].mean(1) - out[:, 0, 6:10, 3].mean(1)
        assert bool((slopes < -0.5).any()) is flip


def test_warped_images_differ_and_blends_mix_two() -> None:
    x = torch.zeros(5, 1, 16, 16)
    x[:, :, 5:11, 6:10] = 1.0
    copies = augmentation.warped(x, draws())
    assert 0 <= float(copies.min()) <= float(copies.max()) <= 1
    distances = (copies[:, None] - copies[None]).abs().amax(dim=(2, 3, 4))
    assert float(distances[~torch.eye(5, dtype=torch.bool)].min()) > 0.2  # of equal images
    brightness = copies.sum(dim=(1, 2, 3)) / x.sum(dim=(1, 2, 3))
    assert 0.4 < float(brightness.min()) < float(brightness.max()) < 2.0  # the figure is visible
    x = torch.eye(4).view(4, 1, 2, 2)
    blends = augmentation.blended(x, draws()).flatten(1)
    torch.testing.assert_close(blends.sum(dim=1), torch.ones(4))
    assert int((blends > 1e-6).sum(dim=1).max()) <= 2
    assert bool((blends.diagonal() > 0).all())  # each image contributes to its blend


def colour_images(device: torch.device) -> Tensor:
    draws = torch_generator(0, "test images", device=device)
    return torch.randn(40, 3, 32, 32, generator=draws, device=device)


def test_views_mirror_about_half_of_the_images(device: torch.device) -> None:
    x = colour_images(device).requires_grad_()
    views = augmentation.Views(flips=True)(x, COLOUR, torch_generator(0, "views", device=device))
    mirrored = (views == x.flip(3)).flatten(1).all(dim=1)
    assert bool((mirrored != (views == x).flatten(1).all(dim=1)).all())
    assert 8 < int(mirrored.sum()) < 32  # of 40 images; fails with probability 1e-4
    views = augmentation.Views(True, 0.125)(x, COLOUR, torch_generator(1, "views", device=device))
    (gradient,) = torch.autograd.grad((views * 2).sum(), x)
    assert set(gradient.unique().tolist()) == {0.0, 2.0}  # cropped, or visible once


def test_crops_are_windows_of_the_padded_image(device: torch.device) -> None:
    """There are 9 × 9 windows of a picture with 4 black pixels at each edge."""
    x, views = colour_images(device), augmentation.Views(crop=0.125)
    assert views.edge(COLOUR) == 4
    crops = views(x, COLOUR, torch_generator(0, "views", device=device))
    black = -torch.tensor(COLOUR.mean) / torch.tensor(COLOUR.std)
    padded = black.view(3, 1, 1).repeat(40, 1, 40, 40).to(device)
    padded[:, :, 4:36, 4:36] = x
    windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # [40, 3, 9, 9, 32, 32]
    fits = torch.isclose(windows, crops[:, :, None, None], atol=1e-6).all(5).all(4).all(1)
    assert fits.sum(dim=(1, 2)).tolist() == [1] * 40
    assert len(fits.flatten(1).int().argmax(dim=1).unique()) > 20


def linear_network(seed: int = 0) -> nn.Module:
    return build_model(ModelSettings("linear"), (1, 8, 8), classes=3, seed=seed)


def test_augmented_copies_have_the_labels_of_the_teacher() -> None:
    teacher = linear_network(1)
    one_hot = torch.eye(3)[THREE_CLASSES]
    images, rows = student.augmented(IMAGES, one_hot, StudentSettings(views=2), teacher)
    assert images.shape == (18, 1, 8, 8)
    assert torch.equal(images[:6], IMAGES)
    assert torch.equal(rows[:6], one_hot)
    torch.testing.assert_close(rows[6:], student.soft_labels(teacher, images[6:]))
    assert not torch.equal(images[6:12], IMAGES)
    untaught = student.augmented(IMAGES, one_hot, StudentSettings(views=2), None)[1]
    assert torch.equal(untaught, one_hot.repeat(3, 1))


def test_student_training_is_reproducible() -> None:
    """Without copies, mixup ignores the teacher."""
    rng_state = torch.get_rng_state()

    def trained(labels: Tensor = THREE_CLASSES, teacher: Any = None, **values: int) -> Tensor:
        model = linear_network().eval()
        train_student(model, IMAGES, labels, StudentSettings(**values), teacher=teacher)
        if values["steps"] == 100:
            assert model(IMAGES).argmax(dim=1).tolist() == THREE_CLASSES.tolist()
        return flatten(model)

    copies = {"steps": 100, "views": 1}
    first = trained(**copies, seed=0)
    one_hot, few = torch.eye(3)[THREE_CLASSES], {"steps": 5, "views": 0}
    assert torch.equal(first, trained(one_hot, **copies, seed=0))
    assert not torch.equal(first, trained(**copies, seed=1))
    taught = trained(teacher=linear_network(1), **few)
    assert torch.equal(taught, trained(**few))
    assert not torch.equal(taught, trained(teacher=linear_network(1), **few, mixup=False))
    assert torch.equal(rng_state, torch.get_rng_state())


def embed(pixels: Tensor) -> Tensor:
    features = feature_map("whitened-scattering", SHAPE)
    return embedded(features(pixels), torch.zeros(features.dimension), features.radius)


def statistics() -> images_from.ReleasedStatistics:
    means = torch.randn(3, feature_map("whitened-scattering", SHAPE).dimension, generator=draws())
    means = 0.3 * F.normalize(means - means.mean(dim=0), dim=1)
    compute = partial(map, partial(images_from.compute_part, embed))
    return images_from.ReleasedStatistics(compute, 20 * means, means)


def start_images(released: images_from.ReleasedStatistics, seed: int = 0) -> Tensor:
    return images_from.public_start(released, 2, SHAPE, draws(seed))


def test_images_start_in_their_classes_and_approach_the_means() -> None:
    released = statistics()
    start = start_images(released)
    assert torch.equal(start, start_images(released))
    assert not torch.equal(start, start_images(released, seed=1))
    assert len(start.flatten(0, 1).flatten(1).unique(dim=0)) == 6
    scores = embed(start.flatten(0, 1)) @ released.weight.T
    correct = scores.argmax(dim=1) == torch.arange(3).repeat_interleave(2)
    assert float(correct.float().mean()) > 0.8
    steps = images_from.ImageSteps(image_steps=30)
    images = images_from.images_from_statistics(released, start, steps)
    z = [embed(batch.flatten(0, 1)).unflatten(0, (3, 2)) for batch in (start, images)]
    assert released.distance(z[1]) < 0.7 * released.distance(z[0])
    assert torch.equal(start, start_images(released))  # not changed in place
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_class_means_that_are_hidden_by_noise_do_not_pull_images() -> None:
    released = replace(statistics(), class_means=torch.zeros(3, statistics().weight.shape[1]))
    z = embed(start_images(released).flatten(0, 1)).unflatten(0, (3, 2)).requires_grad_(True)
    distance = released.distance(z)
    assert distance == 0
    assert not torch.autograd.grad(distance, z)[0].any()


def test_soft_labels_at_a_low_temperature_keep_their_sum() -> None:
    uniform = torch.full((1, 10), 0.1)
    torch.testing.assert_close(student.softened(uniform, 0.01), uniform)


def test_gradient_in_parts_equals_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_from, "AT_ONCE", 2)
    released = statistics()
    pixels = start_images(released).flatten(0, 1).requires_grad_(True)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    z = embed(pixels)
    loss = released.distance(z.unflatten(0, (3, 2))) + 0.7 * images_from.total_variation(pixels)
    wrong = F.cross_entropy(z @ released.weight.T, labels)
    (expected,) = torch.autograd.grad(loss + 0.3 * wrong, pixels)
    settings = images_from.ImageSteps(teacher_weight=0.3, smoothness=0.7)
    pulled = images_from._pull(released, z.detach(), labels, settings)
    actual, embeddings = images_from._gradient(released, pixels.detach(), pulled, settings)
    torch.testing.assert_close(embeddings, z.detach())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert float(actual.abs().amax(dim=(1, 2, 3)).min()) > 0  # every image has a gradient


def test_shrinkage_halves_the_error_of_noisy_means() -> None:
    draws = np.random.default_rng(0)
    truth = draws.normal(size=(200, 50)) * 0.5
    noisy = torch.from_numpy(truth + draws.normal(size=truth.shape))
    errors = [(means.numpy() - truth) ** 2 for means in (images_from.shrunk(noisy, 1.0), noisy)]
    assert errors[0].mean() < 0.4 * errors[1].mean()
    assert torch.equal(images_from.shrunk(noisy, 0.0), noisy)
