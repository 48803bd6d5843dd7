"""Losses and generators of data-free distillation, and FedHydra's Eqs. 2 to 11, against numbers,
plain layers and loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation.generated import generator_tally
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation import stratification
from fedsynth.synthesizer.distillation.generator import DoublingConv2d, make_generator
from fedsynth.synthesizer.distillation.losses import (
    activation_loss,
    adversarial_loss,
    batch_norm_matching,
    distillation_loss,
    generator_loss,
    has_statistics,
    information_entropy_loss,
    one_hot_loss,
    student_loss,
)
from fedsynth.synthesizer.distillation.stratification import (
    guidance,
    pair_losses,
    share_of_clients,
    stratified_aggregation,
    stratified_probabilities,
)


def logits(*rows: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns logits whose softmax equals these probabilities."""
    return torch.tensor(rows, device=device).log()


def test_fedkf_eqs_2_to_6(device: torch.device) -> None:
    p = logits((0.5, 0.5), (0.9, 0.1), device=device)  # mean (0.7, 0.3)
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3)) / math.log(2)
    certain = -(math.log(0.5) + math.log(0.9)) / 2
    f = torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.0, 0.5]], device=device)
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


def test_information_entropy_is_finite_for_missing_classes() -> None:
    certain = torch.eye(10)[:1].mul(1000).requires_grad_()
    loss = information_entropy_loss(certain)
    assert loss.item() == pytest.approx(0.0)
    assert torch.isfinite(torch.autograd.grad(loss, certain)[0]).all()


def test_fedhydra_eqs_15_and_17_to_19(device: torch.device) -> None:
    p = logits((0.8, 0.2), (0.3, 0.7), device=device)
    q = logits((0.5, 0.5), (0.6, 0.4), device=device)
    kl = [0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)]
    kl.append(0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4))
    assert float(adversarial_loss(p, q, only_disagreement=False)) == pytest.approx(-sum(kl) / 2)
    q2 = logits((0.9, 0.1), (0.6, 0.4), device=device)  # agrees on the first image only
    assert float(adversarial_loss(p, q2, only_disagreement=True)) == pytest.approx(-kl[1] / 2)
    ce = -(math.log(0.5) + math.log(0.4)) / 2  # hard labels 0 and 1
    assert float(student_loss(p, q, 0.5)) == pytest.approx(sum(kl) / 2 + 0.5 * ce)


def test_batch_norm_loss_equals_a_loop_over_layers(device: torch.device) -> None:
    """Checks FedHydra's Eq. 14 for two models, and that hooks are removed after an error."""
    settings = ModelSettings(width=4, depth=2, norm="batch")
    clients: list[Any] = [build_model(settings, (1, 8, 8), 10, k).to(device) for k in range(2)]
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
    with batch_norm_matching(clients) as loss:
        for model in clients:
            model(x)
        value: Any = loss()
    torch.testing.assert_close(value, expected / 2)
    assert torch.autograd.grad(value, x)[0].abs().sum() > 0
    with pytest.raises(RuntimeError, match="on purpose"), batch_norm_matching(clients):
        raise RuntimeError("on purpose")
    assert not any(layer._forward_pre_hooks for model in clients for layer in model.modules())
    other = build_model(ModelSettings(width=4, depth=2), (1, 8, 8), 10, 0)
    assert (has_statistics(clients[0]), has_statistics(other)) == (True, False)


DIGITS = dataset_spec("digits")


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


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (2, 5), (1, 1)])
def test_doubling_convolution_equals_two_layers(
    rows: int, columns: int, device: torch.device
) -> None:
    """A broken version would mirror or shift the kernel, miss edges or a weight's gradient."""
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


def test_generators_are_reproducible_by_seed() -> None:
    state = torch.get_rng_state()
    a, b, c = (make_generator(DIGITS, 0, k, width=4).eval() for k in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    z = torch.randn(2, 100)
    assert torch.equal(a(z), b(z))
    assert not torch.equal(a(z), c(z))


def test_tally_leaves_networks_unchanged(device: torch.device) -> None:
    settings = ModelSettings(width=4, depth=2, norm="batch")
    teacher = build_model(settings, (1, 8, 8), 10, 0).to(device).train()
    generator = make_generator(DIGITS, 0, latent=5, width=4).to(device)
    old = [v.clone() for net in (teacher, generator) for v in net.state_dict().values()]
    counts = generator_tally(teacher, generator)
    assert int(counts.sum()) == 256
    assert torch.equal(counts, generator_tally(teacher, generator))
    new = [v for net in (teacher, generator) for v in net.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert teacher.training


def test_stratification_eqs_2_and_3(device: torch.device) -> None:
    """Two classes, two clients, three steps; also a minimum near zero."""
    first, second, third = (
        [[4.0, 2.0], [3.0, 1.0]],
        [[2.0, 2.0], [2.0, 1.0]],
        [[1.0, 1.0], [2.5, 1.0]],
    )
    losses = torch.tensor([first, second, third], device=device)
    assert guidance(losses, 1e-3).tolist() == [[3.0, 1.0], [0.5, 0.0]]
    assert guidance(torch.tensor([[[2.0]], [[0.0]]]), 0.01).tolist() == [[pytest.approx(200.0)]]


def test_stratification_eqs_4_to_7_with_zero_rows(device: torch.device) -> None:
    u = torch.tensor([[3.0, 1.0], [0.0, 0.0], [1.0, 0.0]], device=device)
    assert share_of_clients(u).tolist() == [[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]
    assert share_of_clients(u.T).T.tolist() == [[0.75, 1.0], [0.0, 0.0], [0.25, 0.0]]


def test_stratification_eqs_8_to_11_equal_a_triple_loop(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    m, n, c = 3, 5, 4
    logits, y = rng.normal(size=(m, n, c)), rng.integers(0, c, n)
    by_class, by_client = rng.random((c, m)), rng.random((c, m))
    softmax = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    expected, votes = np.zeros((n, c)), np.zeros((n, c))
    for i in range(n):
        for k in range(m):
            for j in range(c):
                weight = by_class[y[i], k] * by_client[j, k]
                expected[i, j] += weight * logits[k, i, j]
                votes[i, j] += weight * softmax[k, i, j]
    tensors = [torch.tensor(a, device=device) for a in (logits, y, by_class, by_client)]
    np.testing.assert_allclose(stratified_aggregation(*tensors).cpu(), expected)
    actual = stratified_probabilities(*tensors).softmax(dim=1).cpu()
    np.testing.assert_allclose(actual, votes / votes.sum(1, keepdims=True))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("pairs", [64, 20])  # all models together, or two and one
def test_pair_losses_equal_separate_loops(
    batched: bool, pairs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithm 2 per pair, with equal initial weights and noise."""
    monkeypatch.setattr(stratification, "PAIRS", pairs)
    settings = ModelSettings(width=4, depth=2)
    clients = [build_model(settings, (1, 8, 8), 10, seed).to(device).eval() for seed in range(3)]
    for model in clients:
        model.requires_grad_(False)
    sizes = {"steps": 4, "batch": 5, "latent": 6, "width": 4}
    losses = pair_losses(clients, DIGITS, 7, device, **sizes, batched=batched)
    draws = torch_generator(7, "stratification noise", device=device)
    z = torch.randn(5, 6, generator=draws, device=device)
    for k, model in enumerate(clients):
        for j in range(0, 10, 4):
            generator = make_generator(DIGITS, 7, latent=6, width=4).to(device)
            adam = torch.optim.Adam(generator.parameters(), 1e-2)
            labels = torch.full((5,), j, device=device)
            for step in range(4):
                loss = F.cross_entropy(model(generator.normalised(z)), labels)
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                assert float(losses[step, j, k]) == pytest.approx(float(loss.detach()), rel=5e-3)
