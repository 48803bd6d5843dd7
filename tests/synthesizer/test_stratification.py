"""FedHydra's Eqs. 2 to 11 against numbers by hand and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation import stratification
from fedsynth.synthesizer.distillation.generator import make_generator
from fedsynth.synthesizer.distillation.stratification import (
    guidance,
    pair_losses,
    share_of_clients,
    stratified_aggregation,
    stratified_probabilities,
)

DIGITS = dataset_spec("digits")


def test_eqs_2_and_3(device: torch.device) -> None:
    """Two classes, two clients, three steps; and a minimum near zero."""
    first, second, third = (
        [[4.0, 2.0], [3.0, 1.0]],
        [[2.0, 2.0], [2.0, 1.0]],
        [[1.0, 1.0], [2.5, 1.0]],
    )
    losses = torch.tensor([first, second, third], device=device)
    assert guidance(losses, 1e-3).tolist() == [[3.0, 1.0], [0.5, 0.0]]
    assert guidance(torch.tensor([[[2.0]], [[0.0]]]), 0.01).tolist() == [[pytest.approx(200.0)]]


def test_eqs_4_to_7_and_rows_of_zeros(device: torch.device) -> None:
    u = torch.tensor([[3.0, 1.0], [0.0, 0.0], [1.0, 0.0]], device=device)
    assert share_of_clients(u).tolist() == [[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]
    assert share_of_clients(u.T).T.tolist() == [[0.75, 1.0], [0.0, 0.0], [0.25, 0.0]]


def test_eqs_8_to_11_equal_a_triple_loop(device: torch.device) -> None:
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
    found = stratified_probabilities(*tensors).softmax(dim=1).cpu()
    np.testing.assert_allclose(found, votes / votes.sum(1, keepdims=True))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("pairs", [64, 20])  # all models at once, or two and one
def test_pair_losses_equal_separate_loops(
    batched: bool, pairs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithm 2 pair by pair: the same initial weights and noise for all."""
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
