"""Losses of distillation without data against numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsynth.models.registry import ModelSettings, build_model
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


def logits(*rows: tuple[float, ...], device: torch.device) -> Tensor:
    """Logits whose softmax are these probabilities."""
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


def test_information_entropy_of_a_class_that_is_never_predicted_is_finite() -> None:
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
    """FedHydra's Eq. 14, for two models; also that the hooks are removed after an error."""
    settings = ModelSettings(width=4, depth=2, norm="batch")
    clients: list[Any] = [
        build_model(settings, (1, 8, 8), 10, seed).to(device) for seed in range(2)
    ]
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in clients:
            model.train()(torch.randn(32, 1, 8, 8, generator=draws).to(device))
            model.eval()
    x = torch.randn(6, 1, 8, 8, generator=draws).to(device).requires_grad_()
    expected = torch.zeros((), device=device)
    for model in clients:
        h: Tensor = x
        for layer in model.features:
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
    assert has_statistics(clients[0])
    assert not has_statistics(other)
    with batch_norm_matching([other]) as loss:
        other(torch.zeros(2, 1, 8, 8))
        assert loss() == 0
