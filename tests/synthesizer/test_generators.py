"""Generators and their losses against hand-computed numbers; a distillation without data that
works."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedsynth.data.images import normalise
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.models.convnet import ConvNet
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.generators import (
    DoublingConv2d,
    Generator,
    activation_loss,
    distillation_loss,
    generator_loss,
    information_entropy_loss,
    make_generator,
    one_hot_loss,
)
from fedsynth.synthesizer.generation.one_teacher import (
    DataFreeDistiller,
    Distillation,
)
from fedsynth.training.loop import load_tensors, named_tensors
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import SgdSettings, train_on

DIGITS = dataset_spec("digits")


def logits(*rows: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Logits whose softmax are these probabilities."""
    return torch.tensor(rows, device=device).log()


def test_eqs_2_to_6_by_hand(device: torch.device) -> None:
    p = logits((0.5, 0.5), (0.9, 0.1), device=device)  # mean (0.7, 0.3)
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    certain = -(math.log(0.5) + math.log(0.9)) / 2
    f = torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.0, 0.5]], device=device)
    entropy /= math.log(2)
    assert float(information_entropy_loss(p)) == pytest.approx(-entropy)  # Eq. 3, over log C
    assert float(one_hot_loss(p)) == pytest.approx(certain)  # Eq. 2
    assert float(activation_loss(f)) == pytest.approx(-(3.0 + 3.5) / 6)  # Eq. 4, of the mean
    # Eq. 5
    assert float(generator_loss(f, p, 0.2, 0.1)) == pytest.approx(
        -entropy + 0.2 * certain - 0.1 * 6.5 / 6
    )
    q = logits((0.25, 0.75), (0.9, 0.1), device=device)
    kl = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert float(distillation_loss(p, q)) == pytest.approx(kl)  # Eq. 6: KL(teacher ‖ student)


@pytest.mark.parametrize("times", [2, 84])
def test_the_activation_loss_does_not_grow_with_the_features(times: int) -> None:
    """A teacher whose every feature is there `times` times over pulls a generator no harder."""
    draws = torch.Generator().manual_seed(0)
    features = torch.randn(7, 5, generator=draws, requires_grad=True)
    one, many = activation_loss(features), activation_loss(features.repeat(1, times))
    torch.testing.assert_close(many, one)
    pulls = [torch.autograd.grad(loss, features)[0] for loss in (one, many)]
    torch.testing.assert_close(pulls[1], pulls[0])


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_information_entropy_loss_spans_the_same_range_for_any_number_of_classes(
    classes: int,
) -> None:
    """−1 where all classes are alike and 0 where there is one; without the division −log C and
    0. No NaN where a class is never predicted."""
    even = torch.eye(classes).mul(1000).requires_grad_()
    assert information_entropy_loss(even).item() == pytest.approx(-1.0)
    sure = information_entropy_loss(even[:1])
    assert sure.item() == pytest.approx(0.0)
    assert torch.isfinite(torch.autograd.grad(sure, even)[0]).all()


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10", "office-caltech-10"])
@pytest.mark.parametrize("classes", [0, 10])
def test_images_have_the_data_sets_shape_and_pixels_between_0_and_1(
    name: str, classes: int
) -> None:
    spec = dataset_spec(name)
    generator = make_generator(spec, 0, width=4, classes=classes)
    z = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2]) if classes else None
    with torch.no_grad():
        pixels, normal = generator(z, labels), generator.normalised(z, labels)
    assert pixels.shape == (3, *spec.image_shape)
    assert float(pixels.min()) >= 0
    assert float(pixels.max()) <= 1
    std, mean = (torch.tensor(values).view(-1, 1, 1) for values in (spec.std, spec.mean))
    torch.testing.assert_close(normal * std + mean, pixels, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (2, 5), (1, 1)])
def test_doubling_and_convolution_in_one_are_the_two_layers(
    rows: int, columns: int, device: torch.device
) -> None:
    """Catches: a kernel that is mirrored or shifted, edges, and gradients that miss a weight."""
    one = DoublingConv2d(3, 4).double().to(device)
    two = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3, padding=1)).double()
    two[1].load_state_dict(one.state_dict())
    draws = torch_generator(0, "test", device=device)
    shape: dict[str, Any] = {"dtype": torch.double, "device": device, "generator": draws}
    x = torch.randn(2, 3, rows, columns, **shape).requires_grad_()
    weigh = torch.randn(2, 4, 2 * rows, 2 * columns, **shape)
    found = [layer(x) for layer in (one, two.to(device))]
    torch.testing.assert_close(*found)
    gradients = [
        torch.autograd.grad((made * weigh).sum(), [x, *layer.parameters()])
        for made, layer in zip(found, (one, two), strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_a_generator_is_reproduced_by_its_seed_and_labels_matter() -> None:
    state = torch.get_rng_state()
    a, b, c = (make_generator(DIGITS, 0, k, width=4, classes=10).eval() for k in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    z, zero, one = torch.randn(2, 100), torch.tensor([0, 0]), torch.tensor([1, 1])
    assert torch.equal(a(z, zero), b(z, zero))
    assert not torch.equal(a(z, zero), c(z, zero))
    assert not torch.equal(a(z, zero), a(z, one))
    with pytest.raises(ValueError, match="needs labels"):
        a(z)


def pair(device: torch.device, seed: int = 0) -> Distillation:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        teacher = ConvNet((1, 8, 8), 10, width=4, depth=2).to(device)
    return distillation(teacher, seed, device)


def distillation(teacher: nn.Module, seed: int, device: torch.device, **other: Any) -> Distillation:
    generator = make_generator(DIGITS, seed, latent=5, width=4).to(device)
    draws = torch.Generator(device).manual_seed(seed)
    weights = {"one_hot_weight": 0.2, "activation_weight": 0.1, **other}
    return Distillation(teacher, generator, draws, batch=6, learning_rate=1e-2, **weights)


def test_the_teachers_batch_norm_statistics_count_where_they_are_asked_for(
    device: torch.device,
) -> None:
    """Catches: hooks that go when they are registered."""
    settings = ModelSettings(width=4, depth=2, norm="batch")
    teacher: Any = build_model(settings, (1, 8, 8), 10, 0).to(device)
    made = []
    for weight in (0.0, 1.0):
        one = distillation(teacher, 0, device, activation_weight=0.0, bn_weight=weight)
        z = torch.randn(6, 5, generator=torch.Generator(device).manual_seed(1), device=device)
        x = one.generator.normalised(z).detach()
        one._teacher(x)
        found = float(one._statistics())
        first = teacher.features[0](x)
        mean, variance = first.mean((0, 2, 3)), first.var((0, 2, 3), correction=0)
        # of the first layer alone; running ones are 0 and 1
        least = float(mean.detach().norm() + (variance.detach() - 1).norm())
        assert (found > least) == (weight > 0)
        assert found == 0 or weight > 0
        one.step()
        made.append(torch.cat([p.detach().flatten() for p in one.generator.parameters()]))
    assert float((made[0] - made[1]).abs().max()) > 1e-3


def test_memory_goes_on_as_if_it_had_never_stopped(device: torch.device) -> None:
    straight, first = pair(device), pair(device)
    for _ in range(2):
        straight.step()
        first.step()
    memory = {"other": torch.zeros(1), **named_tensors(first.state)}
    for value in first.generator.state_dict().values():  # a copy, not a view
        value.zero_()
    second = pair(device, seed=3)
    load_tensors(second.state, memory)
    second._draws.set_state(straight._draws.get_state())
    torch.testing.assert_close(straight.step()[0], second.step()[0])
    torch.testing.assert_close(straight.step()[0], second.step()[0])


def test_looking_at_what_is_generated_changes_nothing(device: torch.device) -> None:
    """A tally leaves generator, draws and batch-norm terms alone: training goes on bit for bit, and
    looking twice sees the same."""
    looked, alone = pair(device), pair(device)
    looked.step()
    alone.step()
    before = {name: v.clone() for name, v in looked.generator.state_dict().items()}
    counts = looked.tally()
    assert counts.shape == (1, 10)
    assert int(counts.sum()) == 256
    assert torch.equal(counts, looked.tally())
    assert all(torch.equal(v, before[n]) for n, v in looked.generator.state_dict().items())
    assert torch.equal(looked.step()[0], alone.step()[0])


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_with_a_kl_weight_the_generator_seeks_where_the_student_errs(
    weight: float, device: torch.device
) -> None:
    """The gradient of a step against plain torch."""
    student = build_model(ModelSettings(width=4, depth=2), (1, 8, 8), 10, 7).to(device)

    def gradient(one: Distillation) -> torch.Tensor:
        grads = [p.grad for p in one.generator.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])

    stepped, plain, without = pair(device), pair(device), pair(device)
    stepped._kl_weight = weight
    images, answer = stepped.step(student)
    without.step(student)
    teacher: Any = plain._teacher
    assert all(p.grad is None for p in student.parameters())  # its own training has them
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not images.requires_grad
    torch.testing.assert_close(teacher(images), answer)
    z = torch.randn(6, 5, generator=torch.Generator(device).manual_seed(0), device=device)
    x = plain.generator.normalised(z)
    f = teacher.embed(x)
    t, s = teacher.classifier(f), student(x).log_softmax(1)
    fixed = t.detach().softmax(1)
    kl = (fixed * (fixed.log() - s)).sum(1).mean()
    (generator_loss(f, t, 0.2, 0.1) - weight * kl).backward()
    torch.testing.assert_close(gradient(stepped), gradient(plain), atol=1e-5, rtol=1e-3)
    apart = (gradient(stepped) - gradient(without)).norm()
    assert bool(apart > 1e-2 * gradient(without).norm()) == (weight > 0)


@pytest.mark.slow
def test_a_student_learns_the_digits_without_any() -> None:
    train, test = load_dataset("digits")
    teacher, student = (
        build_model(ModelSettings(width=8, depth=2), (1, 8, 8), 10, seed) for seed in (0, 1)
    )
    x = normalise(train.images, train.spec)
    sgd = SgdSettings(10, 32, MomentumSgd(0.05, 0.9))
    train_on(teacher, lambda i: x[i], train.labels, sgd, torch.Generator().manual_seed(0))
    small: dict[str, Any] = {"steps": 250, "batch": 32, "learning_rate": 0.1, "width": 4}
    distiller = DataFreeDistiller(teacher, train.spec, **small)
    generator = distiller.fit(student)
    assert isinstance(generator, Generator)
    assert distiller.facts(generator)["class_entropy_share"] > 0.5  # collapsed: 0
    assert accuracy(teacher, test) > 0.9
    assert accuracy(student, test) > 0.4  # chance is 0.1
