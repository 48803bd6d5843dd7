"""MOON, FedBN and SOLO: two rounds on tiny linear networks against NumPy, whose gradients are
central differences of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedsynth.core.client import OpenClients
from fedsynth.core.context import round_context
from fedsynth.data.images import from_arrays
from fedsynth.data.registry import DatasetSpec
from fedsynth.federation.exchange.server import Server
from fedsynth.methods.fedbn import FedBN
from fedsynth.methods.moon import Moon
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.methods.solo import Solo
from tests.rounds import play

Array = npt.NDArray[np.float64]
SPEC = DatasetSpec("tiny", 1, 2, 2, 3, 9, 3, (0.0,), (1.0,), ("a", "b", "c"), "made up")
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 1, 2, 2)).astype(np.uint8)
X, Y = PIXELS.reshape(9, 4) / 255, np.array([0, 1, 2, 0, 1, 1, 2, 2, 0])
PARTS, SIZES = [np.arange(4), np.arange(4, 9)], (4, 5)
STEPS, RATE = 3, 0.5
# an epoch is one step on all examples
FULL: dict[str, Any] = {
    "batch": 10,
    "lr": RATE,
    "momentum": 0.0,
    "local_epochs": STEPS,
}


class Deep(nn.Module):
    """z = A x (after batch norm of x, if asked for), logits = W z; weights are the same in each."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.body, self.classifier = nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.body.weight.data = torch.linspace(-1, 1, 12).view(3, 4)
        self.classifier.weight.data = torch.linspace(1, -0.5, 9).view(3, 3)

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(self.norm(x.flatten(1)))
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits


AW: Array = np.concatenate([np.linspace(-1, 1, 12), np.linspace(1, -0.5, 9)])


def embeddings(w: Array, x: Array) -> Array:
    return x @ w[:12].reshape(3, 4).T


def cross_entropy(w: Array, x: Array, y: Array) -> float:
    logits = embeddings(w, x) @ w[12:21].reshape(3, 3).T
    return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean())


def descended(w: Array, loss: Callable[[Array], float]) -> Array:
    for _ in range(STEPS):
        unit = np.eye(len(w)) * 1e-5
        w = w - RATE * np.array([(loss(w + e) - loss(w - e)) / 2e-5 for e in unit])
    return w


def two_rounds(
    method: TrainsLocally, model: nn.Module, device: torch.device
) -> tuple[list[dict[str, Array]], list[list[Any]]]:
    """The global model and the clients' memories after each round."""
    start = {name: value.clone().to(device) for name, value in model.state_dict().items()}
    server = Server(method, start)
    clients = OpenClients(
        (0, 1), from_arrays(PIXELS, Y, SPEC).to(device), [torch.as_tensor(part) for part in PARTS]
    )
    memories: dict[int, Any] = {}
    models, remembered = [], []
    for number in (1, 2):
        ctx = round_context(
            number, 0, device, SPEC, model, 4.5, clients=2, participants=(0, 1), sizes=SIZES
        )
        play(server, [clients], memories, ctx)
        models.append(as_arrays(server.state.parameters))
        remembered.append([as_arrays(memories[k]) for k in (0, 1)])
    return models, remembered


def as_arrays(parameters: Any) -> dict[str, Array]:
    return {name: value.detach().cpu().double().numpy() for name, value in parameters.items()}


def joined(parameters: dict[str, Array]) -> Array:
    return np.concatenate(
        [parameters["body.weight"].ravel(), parameters["classifier.weight"].ravel()]
    )


def cosine(a: Array, b: Array) -> Array:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def test_moon(device: torch.device) -> None:
    """Eq. 3, with each client's own last model; in its first round that is the global one."""
    whole, last, expected = AW, [AW, AW], []
    for _ in range(2):

        def loss(
            w: Array, k: int, whole: Array = whole, last: tuple[Array, ...] = tuple(last)
        ) -> float:
            x = X[PARTS[k]]
            near, far = (
                np.exp(cosine(embeddings(w, x), embeddings(other, x)) / 0.5)
                for other in (whole, last[k])
            )
            return cross_entropy(w, x, Y[PARTS[k]]) + 2.0 * float(
                -np.log(near / (near + far)).mean()
            )

        last = [descended(whole, lambda w, k=k, loss=loss: loss(w, k)) for k in range(2)]  # type: ignore[misc]
        whole = (4 * last[0] + 5 * last[1]) / 9
        expected.append(whole)
    found, _ = two_rounds(Moon(**FULL, mu=2.0), Deep(norm=False), device)
    plain, _ = two_rounds(Moon(**FULL, mu=0.0), Deep(norm=False), device)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(joined(one), other, atol=5e-5)
    assert np.abs(joined(plain[1]) - expected[1]).max() > 0.01  # the term does something


def test_fedbn(device: torch.device) -> None:
    """Batch norm of the inputs, whose statistics are then constants: γ, β and they stay with each
    client, the rest is averaged."""
    whole, own, expected = AW, [np.array([1.0] * 4 + [0.0] * 4)] * 2, []
    for _ in range(2):
        made = []
        for k in range(2):
            x = X[PARTS[k]]
            standard = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

            def loss(w: Array, k: int = k, standard: Array = standard) -> float:
                return cross_entropy(w[:21], standard * w[21:25] + w[25:], Y[PARTS[k]])

            made.append(descended(np.concatenate([whole, own[k]]), loss))
        whole = (made[0][:21] + made[1][:21]) / 2  # 1/K, whatever their sizes
        own = [w[21:] for w in made]
        expected.append((whole, own))
    models, memories = two_rounds(FedBN(**FULL), Deep(norm=True), device)
    for model, memory, (common, each) in zip(models, memories, expected, strict=True):
        np.testing.assert_allclose(joined(model), common, atol=5e-5)
        for k in range(2):
            np.testing.assert_allclose(
                np.concatenate([memory[k]["norm.weight"], memory[k]["norm.bias"]]),
                each[k],
                atol=5e-5,
            )
    for k in range(2):  # running statistics: momentum 0.1, six steps
        np.testing.assert_allclose(
            memories[1][k]["norm.running_mean"], X[PARTS[k]].mean(0) * (1 - 0.9**6), atol=1e-5
        )


def test_solo(device: torch.device) -> None:
    """Each goes on with its own model; the common one stays what it was."""
    each: list[Array] = [AW, AW]
    models, memories = two_rounds(Solo(**FULL), Deep(norm=False), device)
    for model, memory in zip(models, memories, strict=True):
        each = [
            descended(w, lambda v, k=k: cross_entropy(v, X[PARTS[k]], Y[PARTS[k]]))
            for k, w in enumerate(each)
        ]  # type: ignore[misc]
        for k in range(2):
            np.testing.assert_allclose(joined(memory[k]), each[k], atol=5e-5)
        np.testing.assert_allclose(joined(model), AW, atol=1e-6)
