"""FedFA+'s ablations: other variances, fusions, stages and other papers' augmentations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedsynth import FedAvg
from fedsynth.core.client import ExactClientView
from fedsynth.errors import SettingError
from fedsynth.federation.server import Server
from fedsynth.methods.fedfa_plus import FUSIONS, FedFAPlus
from fedsynth.models.flat import flatten
from fedsynth.seeding import torch_generator
from fedsynth.training import feature_mixing as fm
from tests.digits import convnet, digits, round_context
from tests.methods.tiny_problem import FULL
from tests.raising import raises
from tests.rounds import play_round, take_step

PARTS = [torch.arange(4), torch.arange(4, 8)]
SETTINGS: dict[str, Any] = {**FULL, "lr": 0.05, "parts": "augmentation", "probability": 1.0}
ABLATIONS: list[dict[str, Any]] = [
    *({"augmentation": name} for name in ("fedfa", "fedfa-c", "fedfa-r", *fm.ALTERNATIVES)),
    {"fusion": "direct"},
    {"stages": "2"},
    {"augmentation": "m-mixup", "stages": "1", "with_fedfa": True},
    {"augmentation": "mixstyle", "with_fedfa": True, "fusion": "direct"},
]


def moments(x: Any, axes: Any, eps: float) -> Any:
    return x.mean(axes, keepdims=True), np.sqrt(x.var(axes, keepdims=True) + eps)


def test_augmentations_equal_numpy(device: torch.device) -> None:
    x = np.random.default_rng(0).normal(2, 3, size=(4, 3, 6, 5))
    order, shares = np.array([2, 0, 3, 1]), np.array([0.1, 0.4, 0.7, 1.0])
    (mu, sd), (m, s), (m_in, s_in) = (
        moments(x, axes, eps) for axes, eps in (((2, 3), 1e-6), (1, 1e-5), ((2, 3), 1e-5))
    )
    w = shares[:, None, None, None]
    norm, spectrum = (x - m_in) / s_in, np.fft.fft2(x)
    amplitude = (abs(np.fft.fft2(norm)) + abs(spectrum)) / 2
    styled = (x - mu) / sd * (w * sd + (1 - w) * sd[order]) + w * mu + (1 - w) * mu[order]
    t, partner, share = (torch.tensor(v, device=device) for v in (x, order, shares))
    for actual, expected in (
        (fm.mixup(t, partner, 0.3), 0.3 * x + 0.7 * x[order]),
        (fm.mixstyle(t, partner, share), styled),
        (fm.moex(t, partner), (x - m) / s * s[order] + m[order]),
        (fm.scnorm(t), np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum))).real),
    ):
        np.testing.assert_allclose(actual.cpu().numpy(), expected, atol=1e-6)
    t.requires_grad_()
    (gradient,) = torch.autograd.grad(fm.mixstyle(t, partner, share).sum(), t)
    constant = (w * sd + (1 - w) * sd[order]) / sd + 0 * x  # the statistics have no gradient
    np.testing.assert_allclose(gradient.cpu().numpy(), constant, atol=1e-6)


def run_rounds(method: Any) -> tuple[Any, dict[int, Any]]:
    clients = ExactClientView([0, 1], digits(np.arange(8)), PARTS)
    server, states, uploads = Server(method, dict(convnet().state_dict())), dict[int, Any](), {}
    for number in (1, 2):
        ctx = round_context(None, number, nominal=4.0, clients=2)
        uploads = play_round(server, [clients], states, ctx)
    return server.state, uploads


def plain_loss(net: Any, x: Any, y: Any, method: Any, draws: Any, fused: Any, ema: Any) -> Any:
    """One batch in plain torch. `fused` and `ema` are by stage, of means and deviations."""
    name, lam, n = method.augmentation, 1.0, len(x)
    rng = np.random.default_rng(int(torch.randint(2**62, (), generator=draws["mixing"])))
    stages = [int(k) for k in method.stages.split(",")] if method.stages else [1, 2]
    perm, place = np.arange(n), -1
    if name in ("mixstyle", "dac-sc"):
        rng.random(len(stages))
    elif name in ("mixup", "m-mixup", "moex"):
        rng.random()
        perm = rng.permutation(n)
        lam = 0.9 if name == "moex" else rng.beta(*{"mixup": (1, 1), "m-mixup": (2, 2)}[name])
        place = [0, *stages][rng.integers(len(stages) + 1)] if name == "m-mixup" else 0
    h = lam * x + (1 - lam) * x[perm] if place == 0 and name != "moex" else x
    for stage in (1, 2):
        h = net.features[4 * stage - 4 : 4 * stage](h)
        if stage not in stages:
            continue
        if method.with_fedfa or name.startswith("fedfa"):
            old = h.mean((2, 3)), (h.var((2, 3), correction=0) + 1e-6).sqrt()
            new = []
            for i, value in enumerate(old):
                mean = value.detach().mean(0)
                before = ema.get((stage, i), mean)
                ema[stage, i] = 0.99 * before + 0.01 * mean
                wide = (value.var(0, correction=0) + 1e-6) * (fused.get((stage, i), 1.0) + 1)
                if name == "fedfa-c":
                    wide = value.var(0, correction=0) + 1e-6
                if name == "fedfa-r":
                    wide = torch.rand(4, generator=draws["noise"])
                new.append(value + torch.randn(n, 4, generator=draws["noise"]) * wide.sqrt())
            (mu, sd), (new_mu, new_sd) = ([v[..., None, None] for v in vs] for vs in (old, new))
            h = (h - mu) / sd * new_sd + new_mu
        if name == "mixstyle":
            w = torch.from_numpy(rng.beta(0.1, 0.1, n)).float()
            h = fm.mixstyle(h, torch.from_numpy(rng.permutation(n)), w)
        elif name == "dac-sc":
            h = fm.scnorm(h)
        elif name == "moex" and stage == stages[0]:
            h = fm.moex(h, torch.from_numpy(perm))
        elif place == stage:
            h = lam * h + (1 - lam) * h[perm]
    z = net.classifier(h.flatten(1))
    return lam * F.cross_entropy(z, y) + (1 - lam) * F.cross_entropy(z, y[perm])


@pytest.mark.parametrize(
    "changes", ABLATIONS, ids=lambda changes: "-".join(map(str, changes.values()))
)
def test_two_rounds_equal_plain_torch(changes: dict[str, Any]) -> None:
    """Only federated variances send statistics. CPU only (TF32)."""
    method: Any = FedFAPlus(**SETTINGS, **changes)
    state, uploads = run_rounds(method)
    clients = ExactClientView([0, 1], digits(np.arange(8)), PARTS)
    net, fused, emas = convnet(), dict[Any, Any](), [dict[Any, Any](), dict[Any, Any]()]
    for number in (1, 2):
        models = []
        for k, part in enumerate(PARTS):
            model = convnet(weights=net.state_dict())
            purposes = {"mixing": "augmentation mixing", "noise": "augmentation"}
            draws = {key: torch_generator(0, name, number, k) for key, name in purposes.items()}
            order = torch_generator(0, "local training", number, k)
            sgd = torch.optim.SGD(model.parameters(), 0.05)
            for _ in range(3):
                batch = part[torch.randperm(4, generator=order)]
                x, y = clients.images(batch), clients.labels(batch)
                take_step(sgd, plain_loss(model, x, y, method, draws, fused, emas[k]))
            models.append(model.state_dict())
        for key in emas[0]:
            fused[key] = FUSIONS[method.fusion](torch.stack([ema[key] for ema in emas]))
        net = convnet(weights={name: (models[0][name] + models[1][name]) / 2 for name in models[0]})
    parameters = torch.cat([state.parameters[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(parameters, flatten(net), atol=1e-4, rtol=1e-3)
    federated = method.with_fedfa or method.augmentation == "fedfa"
    assert len(uploads[0].statistics) == federated * 2 * (1 if method.stages else 2)


@pytest.mark.parametrize("name", ["fedfa", "fedfa-c", "fedfa-r", *fm.ALTERNATIVES])
def test_augmentations_of_no_batch_are_fedavg(name: str) -> None:
    never = {**SETTINGS, "probability": 0.0, "mix_probability": 0.0}
    method = FedFAPlus(**never, augmentation=name)
    state, _ = run_rounds(method)
    plain, _ = run_rounds(FedAvg(**{key: SETTINGS[key] for key in FULL}))
    always, _ = run_rounds(replace(method, probability=1.0, mix_probability=1.0))
    for key, value in plain.parameters.items():
        torch.testing.assert_close(state.parameters[key], value, atol=5e-5, rtol=0)
    assert any(not torch.allclose(always.parameters[key], v) for key, v in plain.parameters.items())


def test_unsupported_ablations_are_refused() -> None:
    for settings in ({"stages": "0"}, {"stages": "1;2"}, {"with_fedfa": True}):
        with raises(SettingError, f"method.{next(iter(settings))}"):
            FedFAPlus(**settings)
    with raises(SettingError, "method.stages"):
        FedFAPlus(stages="1,3").check_model(convnet())


def test_direct_fusion_sends_the_variance_across_clients() -> None:
    values = torch.tensor([[0.0, 1.0], [4.0, 2.0]])
    torch.testing.assert_close(FUSIONS["direct"](values), torch.tensor([4.0, 0.25]) + 1e-6)
    assert float(FUSIONS["adaptive"](values).mean()) == pytest.approx(1)
