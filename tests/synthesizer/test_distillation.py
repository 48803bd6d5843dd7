"""Losses, generators, FedHydra's Eqs. 2 to 11, and epochs of FedHydra's and DENSE's servers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import Dense
from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.generated import generator_tally, tally
from fedsynth.models.flat import flatten
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation import ensemble, losses, stratification
from fedsynth.synthesizer.distillation.ensemble import OneShotDistillation, OneShotSettings
from fedsynth.synthesizer.distillation.generator import DoublingConv2d, make_generator
from tests.digits import SPEC, convnet
from tests.rounds import take_step

RATES: dict[str, Any] = {"generator_lr": 0.05, "server_lr": 0.1}
SMALL_SETTINGS = {"generator_batch": 6, "generator_width": 4, "latent": 5, **RATES}
FIELDS = ("generator_reset", "learn_noise", "generator_beta1", "student_images", "replay")
DENSE: dict[str, Any] = {"hard_weight": 0.0}
DENSE.update({name: getattr(Dense(), name) for name in FIELDS})
LITERAL: dict[str, Any] = {"student_images": "all", "replay": False, "generator_reset": False}
LITERAL["server_momentum"] = 0.0
SEED, ROUND = 3, 2
Passes = list[tuple[Tensor, Tensor]]


def models(device: torch.device, norm: str = "instance") -> list[Any]:
    networks = [convnet(norm, seed).to(device).eval() for seed in range(3)]
    for client in networks[:-1]:
        client.requires_grad_(False)
    return networks


def logits(*rows: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device).log()


def test_entropy_loss_of_one_class_has_a_finite_gradient() -> None:
    one_class = torch.eye(10)[:1].mul(1000).requires_grad_()
    loss = losses.information_entropy_loss(one_class)
    assert loss.item() == pytest.approx(0.0)
    assert torch.isfinite(torch.autograd.grad(loss, one_class)[0]).all()


def test_fedhydra_eqs_15_and_17_to_19(device: torch.device) -> None:
    p = logits((0.8, 0.2), (0.3, 0.7), device=device)
    q = logits((0.5, 0.5), (0.6, 0.4), device=device)
    kl = [0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)]
    kl.append(0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4))
    everywhere = losses.adversarial_loss(p, q, only_disagreement=False)
    q2 = logits((0.9, 0.1), (0.6, 0.4), device=device)  # agrees on the first image only
    disagreement = losses.adversarial_loss(p, q2, only_disagreement=True)
    ce = -(math.log(0.5) + math.log(0.4)) / 2  # hard labels 0 and 1
    actual = torch.stack([everywhere, disagreement, losses.student_loss(p, q, 0.5)])
    expected = [-sum(kl) / 2, -kl[1] / 2, sum(kl) / 2 + 0.5 * ce]
    assert actual.tolist() == pytest.approx(expected)


def test_batch_norm_loss_equals_a_loop_over_layers(device: torch.device) -> None:
    """Checks FedHydra's Eq. 14 for two models, and that hooks are removed after an error."""
    clients = models(device, norm="batch")[:2]
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(6, 1, 8, 8, generator=draws).to(device).requires_grad_()
    expected = torch.zeros((), device=device)
    for model in clients:
        model.train()(torch.randn(32, 1, 8, 8, generator=draws).to(device))
        h: Tensor = x
        for layer in model.eval().features:
            if isinstance(layer, nn.BatchNorm2d):
                mean, variance = h.mean((0, 2, 3)), h.var((0, 2, 3), unbiased=False)
                expected = expected + (mean - layer.running_mean).norm()  # type: ignore[operator]
                expected = expected + (variance - layer.running_var).norm()  # type: ignore[operator]
            h = layer(h)
    with losses.batch_norm_matching(clients) as loss:
        for model in clients:
            model(x)
        value: Any = loss()
    torch.testing.assert_close(value, expected / 2)
    assert torch.autograd.grad(value, x)[0].abs().sum() > 0
    with pytest.raises(RuntimeError, match="on purpose"), losses.batch_norm_matching(clients):
        raise RuntimeError("on purpose")
    assert not any(layer._forward_pre_hooks for model in clients for layer in model.modules())
    plain = models(device)[0]
    assert (losses.has_statistics(clients[0]), losses.has_statistics(plain)) == (True, False)


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10", "office-caltech-10"])
def test_generated_images_have_shape_and_pixel_range(name: str) -> None:
    spec = dataset_spec(name)
    generator = make_generator(spec, 0, width=4)
    z = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels, normal = generator(z), generator.normalised(z)
    assert pixels.shape == (3, *spec.image_shape)
    assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 1
    std, mean = (torch.tensor(values).view(-1, 1, 1) for values in (spec.std, spec.mean))
    torch.testing.assert_close(normal * std + mean, pixels, atol=1e-5, rtol=1e-5)
    state = torch.get_rng_state()
    a, b, c = (make_generator(spec, 0, k, width=4).eval() for k in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a(z), b(z))
    assert not torch.equal(a(z), c(z))


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (2, 5), (1, 1)])
def test_doubling_layer_equals_two_layers(rows: int, columns: int, device: torch.device) -> None:
    fused = DoublingConv2d(3, 4).double().to(device)
    separate = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3, padding=1)).double()
    separate[1].load_state_dict(fused.state_dict())
    draws = torch_generator(0, "test", device=device)
    shape: dict[str, Any] = {"dtype": torch.double, "device": device, "generator": draws}
    x = torch.randn(2, 3, rows, columns, **shape).requires_grad_()
    weights = torch.randn(2, 4, 2 * rows, 2 * columns, **shape)
    outputs = [layer(x) for layer in (fused, separate.to(device))]
    torch.testing.assert_close(*outputs)
    gradients = [
        torch.autograd.grad((output * weights).sum(), [x, *layer.parameters()])
        for output, layer in zip(outputs, (fused, separate), strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_tally_leaves_networks_unchanged(device: torch.device) -> None:
    teacher = models(device, norm="batch")[0].train()
    generator = make_generator(SPEC, 0, latent=5, width=4).to(device)
    old = [v.clone() for net in (teacher, generator) for v in net.state_dict().values()]
    counts = generator_tally(teacher, generator)
    assert int(counts.sum()) == 256
    assert torch.equal(counts, generator_tally(teacher, generator))
    new = [v for net in (teacher, generator) for v in net.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert teacher.training


def test_stratification_eqs_2_to_11(device: torch.device) -> None:
    steps = [[4.0, 2.0], [3.0, 1.0]], [[2.0, 2.0], [2.0, 1.0]], [[1.0, 1.0], [2.5, 1.0]]
    guidance = stratification.guidance(torch.tensor(steps, device=device), 1e-3)
    assert guidance.tolist() == [[3.0, 1.0], [0.5, 0.0]]
    near_zero = stratification.guidance(torch.tensor([[[2.0]], [[0.0]]]), 0.01)
    assert float(near_zero) == pytest.approx(200.0)
    u = torch.tensor([[3.0, 1.0], [0.0, 0.0], [1.0, 0.0]], device=device)
    assert stratification.share_of_clients(u).tolist() == [[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]
    assert stratification.share_of_clients(u.T).T.tolist() == [[0.75, 1.0], [0.0, 0.0], [0.25, 0.0]]
    rng = np.random.default_rng(0)
    m, n, c = 3, 5, 4
    logits, y = rng.normal(size=(m, n, c)), rng.integers(0, c, n)
    by_class, by_client = rng.random((c, m)), rng.random((c, m))
    softmax = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    weights = by_class[y][:, :, None] * by_client.T  # [n, m, c]
    expected, votes = (np.einsum("nmc,mnc->nc", weights, v) for v in (logits, softmax))
    tensors = [torch.tensor(a, device=device) for a in (logits, y, by_class, by_client)]
    np.testing.assert_allclose(stratification.stratified_aggregation(*tensors).cpu(), expected)
    actual = stratification.stratified_probabilities(*tensors).softmax(dim=1).cpu()
    np.testing.assert_allclose(actual, votes / votes.sum(1, keepdims=True))


def test_pair_losses_equal_separate_loops(device: torch.device) -> None:
    clients = [model.requires_grad_(False) for model in models(device)]
    sizes = {"steps": 4, "batch": 5, "latent": 6, "width": 4, "learning_rate": 1e-2}
    losses = [stratification.pair_losses(model, SPEC, 7, device, **sizes) for model in clients]
    actual = torch.stack(losses, dim=2)
    draws = torch_generator(7, "stratification noise", device=device)
    z = torch.randn(5, 6, generator=draws, device=device)
    for k, model in enumerate(clients):
        for j in range(0, 10, 4):
            generator = make_generator(SPEC, 7, latent=6, width=4).to(device)
            adam = torch.optim.Adam(generator.parameters(), 1e-2)
            labels = torch.full((5,), j, device=device)
            for step in range(4):
                loss = F.cross_entropy(model(generator.normalised(z)), labels)
                take_step(adam, loss)
                assert float(actual[step, j, k]) == pytest.approx(float(loss.detach()), rel=5e-3)


def distil(device: Any, epochs: int, steps: int, hooks: Any = None, **settings: Any) -> Any:
    """Distils two models into a third; returns the distillation, batches per epoch and student."""
    *clients, student = models(device)
    values = {**SMALL_SETTINGS, "server_epochs": epochs, "generator_steps": steps, **settings}
    fixed: Any = (ensemble.average_of_logits, student, SPEC, SEED, ROUND)
    training = OneShotDistillation(OneShotSettings(**values), clients, *fixed, **(hooks or {}))
    batches = []
    for epoch in range(epochs):
        batches.append(training.train_generator(epoch))
        training.train_student(epoch, batches[-1])
        training.measure_student(epoch)
    return training, batches, student


def plain_epochs(device: torch.device, **changes: Any) -> tuple[Any, nn.Module]:
    """Runs Algorithm 1 in plain torch; returns the tallies of three epochs, and the student."""
    settings = OneShotSettings(**{**SMALL_SETTINGS, **changes})
    *clients, student = models(device)
    draws = torch_generator(SEED, "one-shot draws", ROUND, device=device)
    shuffle = torch_generator(SEED, "one-shot replay", ROUND)
    sgd = torch.optim.SGD(student.parameters(), 0.1, settings.server_momentum)
    past: list[tuple[Tensor, Tensor]] = []
    tallies = []

    def answer(x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in clients]).mean(dim=0)

    for epoch in range(3):
        z = torch.randn(6, 5, generator=draws, device=device)
        labels = torch.randint(10, (6,), generator=draws, device=device)
        if epoch == 0 or settings.generator_reset:
            numbers = (SEED, ROUND, epoch) if epoch else (SEED, ROUND)
            generator = make_generator(SPEC, *numbers, latent=5, width=4).to(device).train()
            betas = (settings.generator_beta1, 0.999)
            adam = torch.optim.Adam([{"params": generator.parameters()}], 0.05, betas=betas)
        if settings.learn_noise:
            adam.add_param_group({"params": [z.requires_grad_()]})
        batches, values = [], []
        for _ in range(4):
            x = generator.normalised(z)
            p = answer(x)
            disagreement = losses.adversarial_loss(p, student(x), only_disagreement=False)
            loss = F.cross_entropy(p, labels) + 0.5 * disagreement
            take_step(adam, loss)
            batches.append((x.detach(), p.detach()))
            values.append(float(loss.detach()))
        if settings.student_images == "last":
            x = generator.normalised(z).detach()
            batches = [(x, answer(x))]
        if settings.student_images == "best":
            batches = [batches[values.index(min(values))]]
        past = [*(past if settings.replay else []), *batches]
        for position in torch.randperm(len(past), generator=shuffle).tolist():
            x, p = past[position]
            take_step(sgd, losses.student_loss(p, student(x), settings.hard_weight))
        with torch.no_grad():
            tallies.append(sum(tally(p, labels, student(x)) for x, p in batches))
    return tallies, student


@pytest.mark.parametrize(
    "settings",
    [{}, {"student_images": "last"}, LITERAL, DENSE],
    ids=["fedhydra", "last", "literal", "dense"],
)
def test_epochs_equal_plain_torch(settings: dict[str, Any], device: torch.device) -> None:
    training, _, student = distil(device, 3, 4, **settings)
    tallies, expected = plain_epochs(device, **settings)
    torch.testing.assert_close(flatten(student), flatten(expected), atol=1e-4, rtol=1e-3)
    assert torch.equal(training.tallies, torch.stack(tallies))
    _, other = plain_epochs(device, **{**settings, "hard_weight": 3.0})
    assert not torch.allclose(flatten(student), flatten(other), atol=1e-3)


@pytest.mark.parametrize(("epochs", "averaged"), [(8, 2), (5, 2), (4, 1), (1, 1)])
def test_average_is_of_students_after_last_quarter(
    epochs: int, averaged: int, device: torch.device
) -> None:
    students: list[dict[str, Tensor]] = []

    def measure(student: nn.Module) -> float:
        students.append({name: v.clone() for name, v in student.state_dict().items()})
        return len(students) / 10

    training, _, student = distil(device, epochs, 2, {"measure": measure})
    assert training.accuracies.tolist() == [(epoch + 1) / 10 for epoch in range(epochs)]
    torch.testing.assert_close(students[-1], dict(student.state_dict()), rtol=0, atol=0)
    for name, mean in training.average.state_dict().items():
        values = [copy[name] for copy in students[-averaged:]]
        expected = torch.stack(values).double().mean(dim=0)
        if not mean.is_floating_point():  # the number of batches
            expected = values[-1]
        torch.testing.assert_close(mean.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """The images and targets of the student's passes."""
    passes: Passes = []
    original = OneShotDistillation._images_and_targets
    record = lambda *args: passes.append(original(*args)) or passes[-1]  # noqa: E731
    monkeypatch.setattr(OneShotDistillation, "_images_and_targets", record)
    return passes


def test_ensemble_labels_new_views_in_each_pass(passes: Passes, device: torch.device) -> None:
    """Grey images are mirrored for the student but not cropped."""
    frozen = {"server_lr": 0.0, "flips": True, "crop": 0.125}
    _, ((first,), *_), _ = distil(device, 3, 1, **frozen)
    variants = torch.stack([first.images, first.images.flip(3)])
    views = [x for x, _ in passes]
    first_views = [x for x in views if (x == variants).all(dim=(2, 3, 4)).any(dim=0).all()]
    assert len(views) == 1 + 2 + 3
    assert len(first_views) == 3  # of the first epoch's images
    assert not torch.equal(first_views[0], first_views[1])
    *clients, _ = models(device)
    for images, answer in passes:
        torch.testing.assert_close(answer, torch.stack([m(images) for m in clients]).mean(dim=0))


def test_student_learns_custom_targets_on_same_images(passes: Passes, device: Any) -> None:
    """The generator is trained on the average; the student learns the first model's logits."""
    distil(device, 2, 2, server_lr=0.0)
    distil(device, 2, 2, {"targets": lambda logits, labels: logits[0]}, server_lr=0.0)
    first = models(device)[0]
    middle = len(passes) // 2
    for (x, _), (same, answer) in zip(passes[:middle], passes[middle:], strict=True):
        assert torch.equal(x, same)
        torch.testing.assert_close(answer, first(x))
