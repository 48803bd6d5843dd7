"""FedAvg against NumPy, and its private form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsynth.core.charging import charge_for
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import round_context
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ImageData, from_arrays, normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.exchange.server import Server
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.shared.aggregation import average
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from tests.rounds import play

SPEC = dataset_spec("digits")


def data(n: int = 30) -> ImageData:
    rng = np.random.default_rng(0)
    return from_arrays(
        rng.integers(0, 256, (n, 1, 8, 8)).astype(np.uint8), rng.integers(0, 10, n), SPEC
    )


def softmax_gradient(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    logits = x @ w.T + b
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    r = p / p.sum(axis=1, keepdims=True) - np.eye(10)[y]
    return r.T @ x / len(x), r.mean(axis=0)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.5, 0.1)])
def test_two_rounds_on_a_linear_model_equal_numpy(momentum: float, decay: float) -> None:
    """Full-batch local steps (3 epochs), weights n_k: softmax regression by hand, heavy-ball
    velocity new in each round."""
    images, parts = data(), [torch.arange(0, 8), torch.arange(8, 30)]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    context = round_context(1, 0, torch.device("cpu"), SPEC, model, 15.0, clients=2)
    method, clients = (
        FedAvg(local_epochs=3, batch=100, lr=0.1, momentum=momentum, weight_decay=decay),
        OpenClients([0, 1], images, parts),
    )
    w, b = (p.detach().numpy().astype(np.float64) for p in model.parameters())
    x, y = (
        normalise(images.images, SPEC).flatten(1).numpy().astype(np.float64),
        images.labels.numpy(),
    )
    server = Server(method, model.state_dict())
    for _ in range(2):
        play(server, [clients], {}, context)
        locals_ = []
        for part in parts:
            wk, bk, vw, vb = w.copy(), b.copy(), np.zeros_like(w), np.zeros_like(b)
            for _ in range(3):
                gw, gb = softmax_gradient(wk, bk, x[part], y[part])
                vw, vb = momentum * vw + gw + decay * wk, momentum * vb + gb + decay * bk
                wk, bk = wk - 0.1 * vw, bk - 0.1 * vb
            locals_.append((wk, bk))
        w = (8 * locals_[0][0] + 22 * locals_[1][0]) / 30
        b = (8 * locals_[0][1] + 22 * locals_[1][1]) / 30
    np.testing.assert_allclose(server.state.parameters["1.weight"].numpy(), w, atol=1e-5)
    np.testing.assert_allclose(server.state.parameters["1.bias"].numpy(), b, atol=1e-5)


def test_private_uploads_do_not_show_sizes_and_steps_are_public() -> None:
    """n_k is private: uniform weights, ceil(epochs / q) steps for a client of 4 and one of 26
    examples alike."""
    architecture = build_model(ModelSettings(width=4, depth=1), SPEC.image_shape, 10, 0)
    privacy = PrivacySettings(noise_multiplier=1.0, sample_rate=0.4)
    context = round_context(1, 0, torch.device("cpu"), SPEC, architecture, 15.0, privacy, clients=2)
    ledgers = [Ledger("0"), Ledger("1")]
    method = FedAvg(local_epochs=1)
    guards = [Guard(x, 1e-5, None) for x in ledgers]
    charged = charge_for(method, context, [0, 1], guards, [SecretGenerator(), SecretGenerator()])
    parts = [torch.arange(4), torch.arange(4, 30)]
    clients = PrivateClients([0, 1], data(), parts, charged)
    message = method.broadcast(method.initial_state(architecture.state_dict()), context)
    uploads: list[Any] = [u for u, _ in method.client_step(message, clients, [{}, {}], context)]
    assert [u.weight for u in uploads] == [1.0, 1.0]
    assert [[r.steps for r in ledger.releases] for ledger in ledgers] == [[3], [3]]
    assert uploads[0].floats == sum(p.numel() for p in architecture.parameters())


def test_average_keeps_counters_and_weighs() -> None:
    a = ModelParameters({"w": torch.tensor([1.0, 0]), "n": torch.tensor(3)}, 1.0)
    b = ModelParameters({"w": torch.tensor([5.0, 4]), "n": torch.tensor(9)}, 3.0)
    out = average({0: a, 1: b})
    torch.testing.assert_close(out["w"], torch.tensor([4.0, 3.0]))
    assert out["n"] == 3
