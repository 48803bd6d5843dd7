"""Rounds of FedAvg with many small clients, by fedsynth and by a plain loop over the clients.

The network is LeNet-5. Each client has 20 images and takes one step. The plain loop has one
network, loads the global weights for each client, trains with `torch.optim.SGD` and averages the
results. Its network is LeNet-5 as tutorials write it, or fedsynth's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import public_context
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.server import Server, negotiate_terms, run_round
from fedsynth.methods.fedavg import FedAvg
from fedsynth.models.registry import ModelSettings

Round = Callable[[], list[Tensor]]
OWN_NETWORK = "plain loop, fedsynth's LeNet-5"
IMAGES = 20  # of a client
LR, MOMENTUM = 0.01, 0.9


def drawn(clients: int) -> ImageData:
    """Returns random images and labels for all clients."""
    spec = dataset_spec("mnist")
    generator = torch.Generator().manual_seed(0)
    count = clients * IMAGES
    images = torch.randint(256, (count, *spec.image_shape), generator=generator, dtype=torch.uint8)
    return ImageData(images, torch.randint(10, (count,), generator=generator), spec)


def round_of_fedsynth(clients: int, data: ImageData) -> tuple[nn.Module, Round]:
    """Returns the initial network, and a function that runs a round of fedsynth."""
    method = FedAvg(local_epochs=1, batch=IMAGES, lr=LR, momentum=MOMENTUM)
    partition = PartitionSettings(clients=clients)
    settings = RunSettings(method, rounds=1, model=ModelSettings("lenet5"), partition=partition)
    context = public_context(settings, data.spec, torch.device("cpu"))
    runtimes = []
    for number, records in enumerate(torch.arange(len(data)).split(IMAGES)):
        parts = ClientData(data, records, records[:0])
        runtimes.append(ClientRuntime(number, settings, context, parts))
    exchange = InProcess(runtimes)
    _, context = negotiate_terms(settings, context, exchange)

    def run() -> list[Tensor]:
        server = Server.begun(method, context)
        run_round(server, exchange, context)
        return list(server.state.parameters.values())

    return context.architecture, run


def textbook() -> nn.Module:
    """Returns LeNet-5 as tutorials write it, which fedsynth's LeNet-5 computes in another order."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def round_of_plain_loop(
    model: nn.Module, weights: Sequence[Tensor], clients: int, data: ImageData
) -> Round:
    """Returns a function that runs a round of a plain loop. The images are normalised before."""
    images, labels = normalise(data.images, data.spec), data.labels
    start = dict(zip(model.state_dict(), weights, strict=True))

    def run() -> list[Tensor]:
        total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for records in torch.arange(len(labels)).split(IMAGES):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
            for batch in records[torch.randperm(IMAGES)].split(IMAGES):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                total[name].add_(tensor, alpha=1 / clients)
        return list(total.values())

    return run


def rounds(clients: int) -> dict[str, Round]:
    """Returns the rounds to compare, which have the same result."""
    data = drawn(clients)
    network, round_here = round_of_fedsynth(clients, data)
    weights = [tensor.clone() for tensor in network.state_dict().values()]
    found = {"fedsynth": round_here}
    for name, model in (("plain loop", textbook()), (OWN_NETWORK, copy.deepcopy(network))):
        found[name] = round_of_plain_loop(model.train(), weights, clients, data)
    for run in found.values():
        torch.testing.assert_close(run(), round_here())
    return found
