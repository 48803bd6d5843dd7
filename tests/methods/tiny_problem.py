"""Nine images of four pixels, three clients and their rounds, small enough for NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor, nn

from fedsynth import DatasetSpec, RoundContext, from_arrays
from fedsynth.core.client import ExactClientView
from fedsynth.federation.server import Server
from tests.digits import CPU
from tests.rounds import play_round

Array = npt.NDArray[np.float64]
softmax = partial(special.softmax, axis=1)
SPEC = DatasetSpec("tiny", 1, 2, 2, 3, 9, 3, (0.0,), (1.0,), ("a", "b", "c"), "made up")
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 1, 2, 2)).astype(np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 1, 2, 2, 0])
PARTS = [torch.arange(2), torch.arange(2, 5), torch.arange(5, 9)]
ALL, SIZES = (0, 1, 2), (2, 3, 4)
X = PIXELS.reshape(9, 4) / 255
# an epoch is one step on all examples
FULL: dict[str, Any] = {"batch": 10, "lr": 0.5, "momentum": 0.0, "local_epochs": 3}


def clients(device: torch.device, ids: Sequence[int] = ALL) -> ExactClientView:
    data = from_arrays(PIXELS, LABELS, SPEC).to(device)
    return ExactClientView(ids, data, [PARTS[k] for k in ids])


def context(number: int, device: Any = CPU, network: Any = None, active: Any = ALL) -> RoundContext:
    model, federation = network or TwoLayers(), {"clients": 3, "sizes": SIZES}
    return RoundContext(number, 0, device, SPEC, model, 3.0, participants=active, **federation)


def run_rounds(
    method: Any, network: Any, device: Any, active: Any = (ALL, ALL), grouped: bool = True
) -> Any:
    """Returns models after each round, the last state and client states; groups may be of one client."""
    server = Server(method, {n: v.to(device) for n, v in network().state_dict().items()})
    client_states: dict[int, Any] = {}
    models = []
    for number, ids in enumerate(active, 1):
        groups = [clients(device, group) for group in ([ids] if grouped else [(k,) for k in ids])]
        play_round(server, groups, client_states, context(number, device, network(), ids))
        models.append(as_arrays(server.state.parameters))
    return models, server.state, client_states


def as_arrays(parameters: Any) -> dict[str, Array]:
    return {name: value.detach().cpu().double().numpy() for name, value in parameters.items()}


class TwoLayers(nn.Module):
    """z = A x (optionally after batch norm of x), logits = W z + b, with fixed weights."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.body, self.classifier = nn.Linear(4, 3, bias=False), nn.Linear(3, 3)
        self.body.weight.data = torch.linspace(-1, 1, 12).view(3, 4)
        self.classifier.weight.data = torch.linspace(1, -0.5, 9).view(3, 3)
        self.classifier.bias.data = torch.tensor([0.1, 0.0, -0.2])

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(self.norm(x.flatten(1)))
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x))
        return logits


def flat(parameters: dict[str, Array]) -> Array:
    """Returns [24]: A, W and b of `TwoLayers`."""
    names = ("body.weight", "classifier.weight", "classifier.bias")
    return np.concatenate([parameters[name].ravel() for name in names])


START = flat(as_arrays(TwoLayers().state_dict()))


def embeddings(w: Array, x: Array) -> Array:
    return x @ w[:12].reshape(3, 4).T


def logits(w: Array, z: Array) -> Array:
    return z @ w[12:21].reshape(3, 3).T + w[21:24]


def label_losses(z: Array, y: npt.NDArray[np.int64]) -> Array:
    return -special.log_softmax(z, axis=1)[np.arange(len(y)), y]


def cross_entropy(w: Array, x: Array, y: npt.NDArray[np.int64]) -> float:
    return float(label_losses(logits(w, embeddings(w, x)), y).mean())


def descend(w: Array, loss: Callable[[Array], float], steps: int = 3) -> Array:
    for _ in range(steps):
        unit = np.eye(len(w)) * 1e-5
        w = w - 0.5 * np.array([(loss(w + e) - loss(w - e)) / 2e-5 for e in unit])
    return w
