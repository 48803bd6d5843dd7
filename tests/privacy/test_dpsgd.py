"""DP-SGD: Opacus' per-example gradients through our mechanism."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.privacy import dpsgd
from fedsynth.privacy.dpsgd import DpSgdSettings, check_model, dp_sgd, group_norm_twin
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.training.optimisers import MomentumSgd


def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    for i, p in enumerate(model.parameters()):
        p.data = torch.linspace(-1, 1, p.numel()).view_as(p) * (i + 1)
    return model


def run(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    sigma: float,
    clip: float,
    rate: float = 1.0,
    steps: int = 1,
    expected: float = 8.0,
) -> None:
    size = sum(p.numel() for p in model.parameters())
    row = Release(
        1,
        "model update",
        "dp-sgd",
        "gradients",
        sigma,
        clip,
        rate,
        "poisson" if rate < 1 else "full",
        steps,
        size,
    )
    series = GaussianSums(row, 1, Guard(Ledger("c"), 1e-5, None), SecretGenerator())
    dp_sgd(model, lambda i: x[i], y, series, steps, DpSgdSettings(MomentumSgd(0.5), expected))
    assert series.steps_left == 0


def test_one_step_equals_numpy() -> None:
    """w ← w − lr · Σ_i clip(∇ℓ_i) / expected batch size: by hand for softmax regression, σ → 0."""
    rng = np.random.default_rng(0)
    x, y, clip = rng.normal(size=(5, 4)), np.array([0, 1, 2, 1, 0]), 0.8
    model = linear()
    w, b = (p.detach().numpy().astype(float) for p in (model[1].weight, model[1].bias))
    total_w, total_b = np.zeros_like(w), np.zeros_like(b)
    for xi, yi in zip(x, y, strict=True):
        logits = w @ xi + b
        p = np.exp(logits - logits.max())
        residual = p / p.sum() - np.eye(3)[yi]
        gw, gb = np.outer(residual, xi), residual
        scale = min(1, clip / np.sqrt((gw**2).sum() + (gb**2).sum()))
        total_w, total_b = total_w + scale * gw, total_b + scale * gb
    run(
        model,
        torch.tensor(x, dtype=torch.float32).view(5, 1, 2, 2),
        torch.tensor(y),
        sigma=1e-9,
        clip=clip,
    )
    np.testing.assert_allclose(model[1].weight.detach().numpy(), w - 0.5 * total_w / 8, atol=1e-5)
    np.testing.assert_allclose(model[1].bias.detach().numpy(), b - 0.5 * total_b / 8, atol=1e-5)


def test_large_networks_take_few_examples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the per-example gradients that are held, by the public number of parameters; what
    is computed stays the same."""
    x, y = torch.randn(7, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 3
    seen, whole, pieces = [], linear(), linear()
    run(whole, x, y, sigma=1e-9, clip=0.8)
    monkeypatch.setattr(dpsgd, "PHYSICAL_BYTES", 2 * 4 * 15 * 3)  # 15 parameters, three examples
    original = dpsgd._per_example_gradients
    monkeypatch.setattr(
        dpsgd, "_per_example_gradients", lambda *args: seen.append(len(args[3])) or original(*args)
    )
    run(pieces, x, y, sigma=1e-9, clip=0.8)
    assert seen == [2, 2, 2, 2]  # a power of two within the bound, the last one filled up
    torch.testing.assert_close(whole[1].weight, pieces[1].weight)


def test_an_empty_sample_still_gets_noise_and_the_public_divisor() -> None:
    """Catches: empty batch skipped, division by the realised batch size."""
    moved = []
    for _ in range(200):
        model, before = linear(), linear()
        run(
            model,
            torch.zeros(0, 1, 2, 2),
            torch.zeros(0, dtype=torch.int64),
            sigma=2.0,
            clip=1.0,
            rate=0.5,
        )
        moved.append(
            torch.cat(
                [
                    (p - q).flatten()
                    for p, q in zip(model.parameters(), before.parameters(), strict=True)
                ]
            ).detach()
        )
    assert torch.stack(moved).std() == pytest.approx(0.5 * 2.0 / 8, rel=0.05)


def test_one_bad_example_does_not_poison_the_others() -> None:
    x = torch.ones(3, 1, 2, 2)
    good, bad = linear(), linear()
    run(good, x[:2], torch.tensor([0, 1]), sigma=1e-9, clip=1.0)
    x[2] = float("nan")
    run(bad, x, torch.tensor([0, 1, 2]), sigma=1e-9, clip=1.0)
    torch.testing.assert_close(bad[1].weight, good[1].weight)


def test_batch_norm_is_named_and_group_norm_offered() -> None:
    with pytest.raises(
        ForbiddenLayerError, match=r"'features\.1' is BatchNorm2d.*model.norm=group"
    ):
        check_model(ConvNet((1, 8, 8), 10, width=4, depth=1, norm="batch"))
    check_model(ConvNet((1, 8, 8), 10, width=4, depth=1, norm="group"))


def test_the_model_is_left_without_hooks_and_the_convnet_trains() -> None:
    model = ConvNet((1, 8, 8), 3, width=4, depth=1)
    run(model, torch.randn(6, 1, 8, 8), torch.arange(6) % 3, sigma=0.1, clip=1.0, steps=2)
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in model.modules())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_group_norm_twin_can_be_trained_and_keeps_the_other_weights() -> None:
    model = ConvNet((1, 8, 8), 10, width=8, depth=2, norm="batch")
    with pytest.raises(ForbiddenLayerError, match="group_norm_twin"):
        check_model(model)
    twin = group_norm_twin(model)
    check_model(twin)
    assert twin(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert torch.equal(twin.classifier.weight, model.classifier.weight)  # type: ignore[arg-type,union-attr]
    assert isinstance(model.features[1], nn.BatchNorm2d)  # the model itself is as it was


def test_a_penalty_adds_its_gradient_and_is_no_examples() -> None:
    """Without noise a penalised step differs from a plain one by lr times the penalty's gradient;
    clipping and noise do not touch it."""
    x, y = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 10
    results = []
    for penalty in (
        None,
        lambda net: 100 * sum(p.square().sum() for p in net.parameters()) + 0 * net(x).sum(),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # noqa: TID251
            model = ConvNet((1, 8, 8), 10, width=4, depth=1)
        start = flatten(model)
        release = Release(1, "m", "dp-sgd", "g", 1e-9, 1.0, 1.0, "full", 1, len(start))
        series = GaussianSums(release, 1, Guard(Ledger("0"), 1e-5, None), SecretGenerator())
        dp_sgd(model, lambda i: x[i], y, series, 1, DpSgdSettings(MomentumSgd(0.01), 8.0), penalty)
        results.append(flatten(model))
    torch.testing.assert_close(results[1] - results[0], -0.01 * 200 * start, atol=1e-5, rtol=1e-4)


def test_a_loss_of_ones_own_is_clipped_example_by_example() -> None:
    """Against a loop over examples; catches a loss that is not used, or whose examples share a
    gradient."""
    x, y = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = ConvNet((1, 8, 8), 10, width=4, depth=1)
    before = flatten(model)

    def loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        z = network.embed(images)  # type: ignore[operator]
        plain = nn.functional.cross_entropy(network.classifier(z), labels, reduction="none")  # type: ignore[operator]
        return plain + 3 * z.square().mean(dim=1)  # type: ignore[no-any-return]

    total = torch.zeros_like(before)
    for i in range(5):
        gradients = torch.autograd.grad(
            loss(model, x[i : i + 1], y[i : i + 1]).sum(), list(model.parameters())
        )
        row = torch.cat([g.flatten() for g in gradients])
        total += row * min(1.0, 0.5 / float(row.norm()))
    release = Release(1, "m", "dp-sgd", "g", 1e-9, 0.5, 1.0, "full", 1, len(before))
    series = GaussianSums(release, 1, Guard(Ledger("0"), 1e-5, None), SecretGenerator())
    dp_sgd(model, lambda i: x[i], y, series, 1, DpSgdSettings(MomentumSgd(0.1), 5.0), None, loss)
    torch.testing.assert_close(flatten(model) - before, -0.1 * total / 5, atol=1e-6, rtol=1e-3)
