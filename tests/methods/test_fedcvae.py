"""FedCVAE: the ELBO, the server's sampling, whole rounds, and the noise and counts of private runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributions, nn
from torch.nn import functional as F

from fedsynth import FedCVAEEns, FedCVAEKd, PrivacySettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.methods.fedcvae import DecoderAndCounts, GeneratedState, LatentNoise
from fedsynth.methods.shared.class_sums import COUNTS
from fedsynth.privacy.dpsgd import example_gradients
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.cvae import make_cvae, truncated_normal
from tests.methods.tiny_problem import LABELS, PARTS, SIZES, SPEC, TwoLayers, X, context, run_rounds
from tests.raising import raises
from tests.rounds import take_step

MODEL: dict[str, Any] = {"latent": 3, "width": 2}
Y = torch.from_numpy(LABELS)
PIXELS = torch.from_numpy(X).float().view(9, 1, 2, 2)


@pytest.mark.parametrize("channels", [1, 3])
def test_elbo_equals_numpy(channels: int, device: torch.device) -> None:
    """On images whose sides the layers do not divide."""
    color = (0.4,) * channels, (0.2,) * channels
    spec = replace(SPEC, channels=channels, height=18, width=5, mean=color[0], std=color[1])
    model = make_cvae(spec, 0, **MODEL, norm="group").to(device)
    pixels, noise = torch.rand(4, channels, 18, 5), torch.randn(4, 3)
    y = Y[:4].to(device)
    losses = model.elbo_losses((pixels.to(device) - 0.4) / 0.2, y, noise.to(device), beta=0.7)

    padded = torch.zeros(4, channels, 32, 16)
    padded[..., :18, :5] = pixels
    encoded = model.encoder(padded.to(device)).detach().cpu().double().numpy()
    mu, log_variance = encoded.T.reshape(2, 3, 4)
    z = torch.from_numpy(mu.T + np.exp(log_variance.T / 2) * noise.double().numpy())
    inputs = torch.cat([z, torch.eye(3)[Y[:4]]], dim=1).float().to(device)
    p = 1 / (1 + np.exp(-model.decoder(inputs).detach().cpu().double().numpy()))
    x = pixels.double().numpy()
    reconstruction = (p - x) ** 2 if channels > 1 else -x * np.log(p) - (1 - x) * np.log(1 - p)
    kl = 0.5 * (mu**2 + np.exp(log_variance) - 1 - log_variance).sum(axis=0)
    expected = reconstruction.sum(axis=(1, 2, 3)) + 0.7 * kl
    np.testing.assert_allclose(losses.detach().cpu().numpy(), expected, rtol=1e-4)


def test_layers_are_those_of_the_public_code() -> None:
    model = make_cvae(dataset_spec("mnist"), 0, latent=10, width=32, norm="batch")
    norms = [(m.num_features, m.eps) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms[:4] == [(32, 1e-5), (32, 1e-5), (64, 1e-5), (64, 1e-5)]
    assert norms[4:] == [(64, 1e-3), (32, 1e-3), (32, 1e-3)]
    matrices = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
    assert matrices == [(500, 256), (20, 500), (256, 20)]


def test_server_samples_label_distributions_and_truncated_normal() -> None:
    z = truncated_normal(4000, 2, 1.5, torch_generator(0, "z")).flatten().numpy()
    assert stats.kstest(z, stats.truncnorm(-1.5, 1.5).cdf).pvalue > 0.01
    method, counts = FedCVAEEns(**MODEL), torch.tensor([[6.0, 0.0, 2.0], [0.0, 5.0, 0.0]])
    decoders = [make_cvae(SPEC, k, **MODEL, norm="batch").decoder for k in range(2)]
    teachers = list(zip(decoders, counts, strict=True))
    inputs, pixels, labels = method.draw_from(teachers, 1000, torch_generator(0, "draws"))
    of_first, of_second = labels.split([615, 385])  # ⌊1000 · 8/13⌋ and the rest
    assert stats.chisquare(np.bincount(of_first)[[0, 2]], [0.75 * 615, 0.25 * 615]).pvalue > 0.01
    assert set(of_first.tolist()) == {0, 2}
    assert set(of_second.tolist()) == {1}
    assert torch.equal(inputs[:, 3:].argmax(1), labels)
    assert float(inputs[:, :3].abs().max()) <= 3
    for decoder, part in zip(decoders, (slice(615), slice(615, None)), strict=True):
        torch.testing.assert_close(pixels[part], torch.sigmoid(decoder(inputs[part])))
    few = [(decoders[0], counts[0]), (decoders[1], counts[1] / 5)]  # one record of nine
    for teachers in (few, few[::-1]):
        assert len(method.draw_from(teachers, 8, torch_generator(0, "draws"))[2]) == 8


def in_plain_torch(method: Any, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Returns the classifier and the images after one round of clients 0 and 1."""
    draws = torch_generator(0, "z", 1, device=device)
    drawn = []
    for k in (0, 1):
        model = make_cvae(SPEC, 0, k, **MODEL, norm="batch").to(device)
        adam = torch.optim.Adam(model.parameters(), method.lr)
        shuffle = torch_generator(0, "local training", 1, k)
        noise = torch_generator(0, "reparametrisation", 1, k, device=device)
        for _ in range(method.local_epochs):
            i = PARTS[k][torch.randperm(SIZES[k], generator=shuffle)]
            x, hot = PIXELS[i].to(device), torch.eye(3)[Y[i]].to(device)
            mu, log_variance = model.encoder(F.pad(x, (0, 14, 0, 14))).split(3, dim=1)
            posterior = distributions.Normal(mu, (log_variance / 2).exp())
            z = mu + posterior.scale * torch.randn(mu.shape, generator=noise, device=device)
            p = torch.sigmoid(model.decoder(torch.cat([z, hot], 1)))
            kl = distributions.kl_divergence(posterior, distributions.Normal(0.0, 1.0)).sum()
            loss = F.binary_cross_entropy(p, x, reduction="sum") + method.beta * kl
            take_step(adam, loss / len(i))
        decoder, number = model.decoder.eval(), (4, 6)[k]  # n = (2, 3) of 10 images
        z = truncated_normal(number, 3, method.truncation, draws)
        shares = torch.bincount(Y[PARTS[k]], minlength=3).float().to(device)
        y = torch.multinomial(shares, number, replacement=True, generator=draws)
        drawn.append((z, y, torch.sigmoid(decoder(torch.cat([z, F.one_hot(y, 3)], 1)))))
    z, y, x = (torch.cat(parts).detach() for parts in zip(*drawn, strict=True))
    if isinstance(method, FedCVAEKd):
        decoder = make_cvae(SPEC, 0, 3, **MODEL, norm="batch").decoder.to(device)
        adam = torch.optim.Adam(decoder.parameters(), method.decoder_lr)
        for _ in range(method.decoder_epochs):
            p = torch.sigmoid(decoder(torch.cat([z, F.one_hot(y, 3)], 1)))
            take_step(adam, F.binary_cross_entropy(p, x, reduction="sum") / 10)
        z = truncated_normal(10, 3, method.truncation, draws)
        y = torch.multinomial(torch.ones(3).to(device), 10, replacement=True, generator=draws)
        x = torch.sigmoid(decoder.eval()(torch.cat([z, F.one_hot(y, 3)], 1))).detach()
    network = TwoLayers().to(device)
    adam = torch.optim.Adam(network.parameters(), method.server_lr)
    for _ in range(method.server_epochs):
        take_step(adam, F.cross_entropy(network(x), y))
    return network, x


@pytest.mark.parametrize(
    "method",
    [
        FedCVAEEns(**MODEL, samples=10, local_epochs=3, beta=0.6, truncation=2.0),
        FedCVAEKd(**MODEL, samples=10, decoder_samples=10, local_epochs=3, decoder_epochs=3),
    ],
)
def test_round_equals_plain_torch(method: Any, device: torch.device) -> None:
    models, state, _ = run_rounds(method, TwoLayers, device, active=((0, 1),))
    network, images = in_plain_torch(method, device)
    for name, value in network.state_dict().items():
        np.testing.assert_allclose(models[0][name], value.cpu().numpy(), atol=5e-4)
    torch.testing.assert_close(state.images, images, atol=1e-3, rtol=0)  # Adam amplifies rounding
    synthetic, labels, soft = method.synthetic(state, context(1, device))
    assert synthetic is state.images
    assert len(labels) == 10
    assert soft is None


def test_private_noise_of_an_example_depends_only_on_it() -> None:
    model = make_cvae(SPEC, 0, **MODEL, norm="group")
    order = torch.arange(9).roll(2)

    def moved(privacy: PrivacySettings | None) -> float:
        ctx, rows = replace(context(1), privacy=privacy), []
        for positions in (torch.arange(9), order):
            task = FedCVAEEns(**MODEL).task(0, None, {}, ctx)  # type: ignore[arg-type]
            task.before_step(model)  # type: ignore[misc]
            g = example_gradients(model, PIXELS[positions], Y[positions], task.loss)  # type: ignore[arg-type]
            rows.append(g[positions.argsort()])
        return float((rows[0] - rows[1]).abs().max() / rows[0].abs().max())

    private = PrivacySettings(noise_multiplier=1.0)
    assert moved(private) < 1e-5 < 0.01 < moved(None)  # noise by position: not of a private run
    noise = LatentNoise(4000, torch_generator(0, "draws"), replace(context(1), privacy=private))
    noise.before_step(model)
    for row in noise(PIXELS).numpy():
        assert stats.kstest(row, "norm").pvalue > 0.01


def test_noisy_counts_are_left_out_and_batch_norm_is_refused() -> None:
    method, ctx = FedCVAEEns(**MODEL, samples=8), replace(context(1), noise={COUNTS: 3.0})
    decoder = make_cvae(SPEC, 0, **MODEL, norm="batch").decoder.state_dict()

    def after(*counts: float) -> GeneratedState:
        upload = DecoderAndCounts(decoder, 1.0, torch.tensor(counts))
        state = GeneratedState(TwoLayers().state_dict())
        return method.server_step(state, {0: upload}, ctx)

    assert set(after(7.0, -9.0, 5.9).labels.tolist()) == {0}  # type: ignore[union-attr]
    assert after(5.9, 2.0, -1.0).images is None
    with raises(SettingError, "method.norm"):
        FedCVAEEns(norm="batch").release_plans(PrivacySettings(noise_multiplier=1.0), context(1))
