"""Steps of condensation to time: fedsynth's, and plain ones, as a careful reader of the papers
would write first.

The plain steps are fair: float32, weights frozen, real features detached, batches of the paper's
size. They take one client and one class at a time, one call for the embedding and one for the
logits, a fresh perturbed copy of the model at every step, and a loop over examples where gradients
are clipped. They share no code with the engine but the network.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.data.images import from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.methods.feddm import FedDM
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.privacy.plans import charge_round
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings

IPC = 10
BATCH = 256


class Case:
    """One shape: data, model and the steps to time; every step is a whole client step of `steps`
    iterations. A client has more images of each class than a batch, as in real runs.
    """

    def __init__(
        self, dataset: str, width: int, clients: int, steps: int, batch: int, device: torch.device
    ) -> None:
        spec = dataset_spec(dataset)
        per_client = spec.classes * (BATCH + 44)
        n = clients * per_client
        images = np.random.default_rng(0).integers(0, 256, (n, *spec.image_shape), dtype=np.uint8)
        self.data = from_arrays(images, np.arange(n) % spec.classes, spec).to(device)
        self.parts = list(torch.arange(n).split(per_client))
        model = build_model(ModelSettings(width=width), spec.image_shape, spec.classes, 0)
        self.context = RoundContext(1, 0, device, spec, model.to(device), nominal_size=per_client)
        self.method = FedDM(ipc=IPC, iterations=steps, batch=batch)

    def images(self, client: int) -> list[Tensor]:
        """Returns the normalised images [n_c, C, H, W] of each class of a client."""
        view = ExactClientView([client], self.data, [self.parts[client]])
        classes = range(self.data.spec.classes)
        return [view.images(view.examples(0, number)) for number in classes]

    def engine(self, precision: torch.dtype, compiled: bool = False) -> None:
        """Runs all clients, as many at once as the memory bound allows."""
        context = replace(self.context, precision=precision, compiled=compiled)
        ids = range(len(self.parts))
        at_once = max(1, context.memory_bytes // 2 // (self.method.client_bytes(context) or 1))
        for first in ids[::at_once]:
            clients = ids[first : first + at_once]
            parts = [self.parts[k] for k in clients]
            self._step(ExactClientView(clients, self.data, parts), context)

    def private(self, mechanism: str, precision: torch.dtype = torch.float32) -> None:
        """Runs the first client's private step of the same expected batch."""
        privacy = PrivacySettings(noise_multiplier=1.0, mechanism=mechanism)
        context = replace(self.context, privacy=privacy, precision=precision)
        plans = self.method.release_plans(privacy, context)
        guard = BudgetEnforcer(Ledger("0"))
        charged = charge_round(plans, 1, 1.0, guard, SecretGenerator())
        self._step(PrivateClientView([0], self.data, self.parts[:1], [charged]), context)

    def _step(self, clients: Any, context: RoundContext) -> None:
        state = ServerState(context.architecture.state_dict())
        message: Any = self.method.broadcast(state, context)
        self.method.client_step(message, clients, [{}] * len(clients.ids), context)

    def plain(self) -> None:
        """Runs one client after the other by the plain step."""
        generator = torch.Generator(self.context.device).manual_seed(0)
        for client in range(len(self.parts)):
            plain_step(
                self.context.architecture, self.images(client), self.method.iterations, generator
            )


def perturbed(model: nn.Module, radius: float, generator: torch.Generator) -> nn.Module:
    """Returns a copy of the model with Gaussian noise rescaled to the ball."""
    network = copy.deepcopy(model)
    noises = [
        torch.randn(p.shape, generator=generator, device=p.device) for p in network.parameters()
    ]
    norm = torch.sqrt(
        sum((n.square().sum() for n in noises), torch.zeros((), device=noises[0].device))
    )
    for p, noise in zip(network.parameters(), noises, strict=True):
        p.data += noise * torch.clamp(radius / norm, max=1.0)
        p.requires_grad_(False)
    return network


def class_loss(network: nn.Module, real_NCHW: Tensor, synthetic_ICHW: Tensor) -> Tensor:
    """Returns Eq. 9 for one class."""
    with torch.no_grad():
        real_h = network.embed(real_NCHW).mean(dim=0)  # type: ignore[operator]
        real_z = network(real_NCHW).mean(dim=0)
    h = network.embed(synthetic_ICHW).mean(dim=0)  # type: ignore[operator]
    z = network(synthetic_ICHW).mean(dim=0)
    loss: Tensor = (real_h - h).square().sum() + (real_z - z).square().sum()
    return loss


def plain_step(
    model: nn.Module, images_by_class: list[Tensor], steps: int, generator: torch.Generator
) -> None:
    """Condenses one client's normalised images [n_c, C, H, W] of each class."""
    synthetic = [x[:IPC].clone().requires_grad_() for x in images_by_class]
    optimiser = torch.optim.SGD(synthetic, lr=1.0)
    for _ in range(steps):
        network = perturbed(model, 5.0, generator)
        loss = torch.zeros((), device=synthetic[0].device)
        for real, images in zip(images_by_class, synthetic, strict=True):
            chosen = torch.randperm(len(real), generator=generator, device=real.device)[:BATCH]
            loss = loss + class_loss(network, real[chosen], images)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def gradient_step(network: nn.Module, images_by_class: list[Tensor]) -> list[Tensor]:
    """Returns noisy sums of clipped image gradients (Eq. 15), one for each class, by a loop over
    examples, with a clip of 1 and σ = 1.
    """
    sums = []
    for real in images_by_class:
        total = torch.zeros_like(real[:IPC])
        for x in real:
            leaf = real[:IPC].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(class_loss(network, x[None], leaf), leaf)
            total += gradient / gradient.norm().clamp_min(1)
        sums.append(total + torch.randn_like(total))
    return sums
