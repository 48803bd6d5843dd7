"""Generators against plain layers, and distillation of one teacher without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedsynth.data.images import normalise
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.evaluation.generated import generator_tally
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.data_free import DataFreeDistiller
from fedsynth.synthesizer.distillation.generator import DoublingConv2d, make_generator
from fedsynth.synthesizer.distillation.losses import generator_loss
from fedsynth.training.sgd import MomentumSgd, SgdSettings, train_on

DIGITS = dataset_spec("digits")


def network(seed: int, norm: str = "instance", width: int = 4) -> nn.Module:
    return build_model(ModelSettings(width=width, depth=2, norm=norm), (1, 8, 8), 10, seed)


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10", "office-caltech-10"])
def test_images_have_the_data_sets_shape_and_pixels_between_0_and_1(name: str) -> None:
    spec = dataset_spec(name)
    generator = make_generator(spec, 0, width=4)
    z = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels, normal = generator(z), generator.normalised(z)
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


def test_a_generator_is_reproduced_by_its_seed() -> None:
    state = torch.get_rng_state()
    a, b, c = (make_generator(DIGITS, 0, k, width=4).eval() for k in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    z = torch.randn(2, 100)
    assert torch.equal(a(z), b(z))
    assert not torch.equal(a(z), c(z))


def test_a_tally_changes_neither_network(device: torch.device) -> None:
    teacher = network(0, "batch").to(device).train()
    generator = make_generator(DIGITS, 0, latent=5, width=4).to(device)
    before = [v.clone() for net in (teacher, generator) for v in net.state_dict().values()]
    counts = generator_tally(teacher, generator)
    assert counts.shape == (1, 10)
    assert int(counts.sum()) == 256
    assert torch.equal(counts, generator_tally(teacher, generator))
    after = [v for net in (teacher, generator) for v in net.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert teacher.training


@pytest.mark.parametrize("kl", [0, 0.5])
def test_terms_of_the_generators_loss(kl: float) -> None:
    """FedKF's loss and the official code's KL term against plain torch."""
    teacher: Any = network(0)
    student = network(7)
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    f = teacher.embed(x)
    t, s = teacher.classifier(f).log_softmax(1), student(x).log_softmax(1)
    divergence = (t.exp() * (t - s)).sum(1).mean()
    expected = generator_loss(f, teacher.classifier(f), 0.2, 0.02) - kl * divergence
    found = DataFreeDistiller(teacher, DIGITS, kl_weight=kl)._generator_loss(x, teacher, student)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_student_learns_the_digits_without_any() -> None:
    train, test = load_dataset("digits")
    teacher, student = (network(seed, width=8) for seed in (0, 1))
    x = normalise(train.images, train.spec)
    sgd = SgdSettings(10, 32, MomentumSgd(0.05, 0.9))
    train_on(teacher, lambda i: x[i], train.labels, sgd, torch.Generator().manual_seed(0))
    before = [v.clone() for v in teacher.state_dict().values()]
    small: dict[str, Any] = {"steps": 250, "batch": 32, "learning_rate": 0.1, "width": 4}
    distiller = DataFreeDistiller(teacher, train.spec, **small)
    generator = distiller.fit(student)
    assert distiller.facts(generator)["class_entropy_share"] > 0.5  # collapsed: 0
    assert all(
        torch.equal(a, b) for a, b in zip(before, teacher.state_dict().values(), strict=True)
    )
    assert accuracy(teacher, test) > 0.9
    assert accuracy(student, test) > 0.4  # chance is 0.1
