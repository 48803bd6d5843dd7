"""Shapes of condensation to time, and operations to count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import DatasetSpec
from fedsynth.methods.feddm import FedDM
from fedsynth.models.convnet import ConvNet
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.plans import charge_round
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from library.machine import seconds
from library.reference import client_step

IPC = 10
BATCH = 256


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the operations per second of a 3×3 convolution without padding, the best of ten.

    A convolution needs fewer multiplications than are counted (Winograd), so it can be faster than
    a matrix product of the same size.
    """
    n, channels, size = (256, 256, 32) if device.type == "cuda" else (32, 128, 16)
    x = torch.randn(n, channels, size, size, device=device).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    operations = 2 * n * channels * (size - 2) ** 2 * weight[0].numel()
    with torch.no_grad():
        times = [seconds(lambda: F.conv2d(x, weight), device) for _ in range(10)]
    return operations / min(times)


def forward_flops(network: ConvNet, shape: tuple[int, int, int]) -> float:
    """Returns the operations of one image's forward pass, from the layers' output sizes."""
    total = 0.0

    def count(layer: Any, inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += 2 * output[0].numel() * layer.weight[0].numel()

    layers = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(torch.zeros(1, *shape, device=next(network.parameters()).device))
    for hook in hooks:
        hook.remove()
    return total


class Case:
    """One shape: data, model and the steps to time; every step is a whole client step of `steps`
    iterations. A client has more images of each class than a batch, as in real runs.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        width: int,
        clients: int,
        steps: int,
        device: torch.device,
    ) -> None:
        rng = np.random.default_rng(0)
        per_client = spec.classes * (BATCH + 44)
        n = clients * per_client
        images = rng.integers(0, 256, (n, *spec.image_shape), dtype=np.uint8)
        self.data: ImageData = from_arrays(images, np.arange(n) % spec.classes, spec).to(device)
        self.parts = list(torch.arange(n).split(per_client))
        self.spec = spec
        self.steps = steps
        self.device = device
        model = build_model(ModelSettings(width=width), spec.image_shape, spec.classes, 0).to(
            device
        )
        self.context = RoundContext(1, 0, device, spec, model, nominal_size=per_client)
        self.method = FedDM(ipc=IPC, iterations=steps, batch=BATCH)

    def engine(self, precision: torch.dtype, compiled: bool = False) -> None:
        """Runs all clients, as many at once as the memory bound allows."""
        context = replace(self.context, precision=precision, compiled=compiled)
        ids = range(len(self.parts))
        at_once = max(1, context.memory_bytes // 2 // (self.method.client_bytes(context) or 1))
        for first in ids[::at_once]:
            clients = ids[first : first + at_once]
            self._step(
                ExactClientView(clients, self.data, [self.parts[k] for k in clients]),
                context,
            )

    def private(self, mechanism: str, precision: torch.dtype = torch.float32) -> None:
        """Runs the private step of the same expected batch."""
        privacy = PrivacySettings(noise_multiplier=1.0, mechanism=mechanism)
        context = replace(self.context, privacy=privacy, precision=precision)
        ids = range(len(self.parts))
        plans = self.method.release_plans(privacy, context)
        charged = []
        for k in ids:
            guard = BudgetEnforcer(Ledger(str(k)), 1e-5, None)
            charged.append(charge_round(plans, 1, 1.0, guard, SecretGenerator()))
        self._step(PrivateClientView(ids, self.data, self.parts, charged), context)

    def _step(self, clients: Any, context: RoundContext) -> None:
        message: Any = self.method.broadcast(
            ServerState(context.architecture.state_dict()), context
        )
        self.method.client_step(message, clients, [{}] * len(clients.ids), context)

    def reference(self) -> None:
        """Runs one client after the other."""
        everything = ExactClientView(range(len(self.parts)), self.data, self.parts)
        generator = torch.Generator(self.device).manual_seed(0)
        for position in range(len(self.parts)):
            classes = [
                everything.images(everything.examples(position, c))
                for c in range(self.spec.classes)
            ]
            client_step(
                self.context.architecture,
                classes,
                [x[:IPC] for x in classes],
                steps=self.steps,
                batch=BATCH,
                learning_rate=1.0,
                radius=5.0,
                generator=generator,
            )
