"""CPU seconds of fedsynth compared with the algorithms of other libraries.

    python benchmarks/peers.py [--quick] [--repeats N] [--only dp-sgd]

A step of DP-SGD is compared with Opacus (per-example gradients by hooks, and ghost clipping), and a
round of FedAvg with many small clients is compared with a plain loop, which has one network, loads
the global weights for each client, trains with `torch.optim.SGD` and averages the results. Each
client has 20 images and takes one step. The runs of a case alternate.
Seconds are CPU seconds of one thread, which other processes on the machine change little. Each case
is measured in a separate process, and the memory of DP-SGD in a separate child process.
`condense.py` compares FedDM's step with a plain loop, and `commands.py` measures commands.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fedsynth.cli.application import keep_large_allocations
from fedsynth.config.settings import RunSettings
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import public_context
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.server import Server, negotiate_terms, run_round
from fedsynth.methods.fedavg import FedAvg
from fedsynth.models.registry import ModelSettings, build_model, parameter_count
from fedsynth.privacy.dpsgd import DpSgdSettings, dp_sgd
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.passes import Units
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.training.sgd import MomentumSgd
from library.machine import medians, peak_growth, run_cases, timing_options

CLIP = 1.0
LR, MOMENTUM = 0.01, 0.9
IMAGES = 20  # of a client
Round = Callable[[], list[Tensor]]


class Step(NamedTuple):
    """A step of DP-SGD: a model, the shape of a data set, the batch size, and steps of a run."""

    model: ModelSettings
    dataset: str
    batch: int
    steps: int = 3


RESNET = ModelSettings("torchvision:resnet18", norm="group")
CASES: dict[str, Step | int] = {
    "dp-sgd ConvNet-128 b64": Step(ModelSettings("convnet", width=128), "mnist", 64),
    "dp-sgd ConvNet-128 b256": Step(ModelSettings("convnet", width=128), "mnist", 256),
    "dp-sgd CNN1 b256": Step(ModelSettings("cnn1", norm="group"), "cifar10", 256),
    "dp-sgd ResNet-18 b32": Step(RESNET, "cifar10", 32, 1),
    "dp-sgd ResNet-18, 64×64 b32": Step(RESNET, "tiny-imagenet", 32, 1),
    "dp-sgd LeNet-5 b64": Step(ModelSettings("lenet5"), "mnist", 64, 20),
    "dp-sgd linear b64": Step(ModelSettings("linear"), "mnist", 64, 20),
    **{f"{clients} clients": clients for clients in (10, 100, 1000)},
}


def ours(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Trains by fedsynth's DP-SGD, with every record in each step."""
    parameters = parameter_count(model)
    release = Release(
        0, "model", "dp-sgd", "gradient", 1.0, CLIP, 1.0, "full", steps, dimension=parameters
    )
    budget = BudgetEnforcer(Ledger("0"))
    mechanism = GaussianSumMechanism(release, 1, budget, SecretGenerator())
    settings = DpSgdSettings(MomentumSgd(LR), len(x))
    dp_sgd(model, lambda i: (x[i], y[i]), mechanism, settings, Units(len(y)))


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Trains by Opacus with per-example gradients."""
    wrapped = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), LR), **settings(x))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        optimizer.step()
    wrapped.to_standard_module()


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Trains by Opacus with ghost clipping."""
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    sgd = torch.optim.SGD(model.parameters(), LR)
    optimizer = DPOptimizerFastGradientClipping(sgd, **settings(x))
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
    wrapped.to_standard_module()


def add_residual(block: Any, x: Tensor) -> Tensor:
    """Computes a block of ResNet-18 without operations in place, which Opacus' hooks refuse."""
    h = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
    return (h + (x if block.downsample is None else block.downsample(x))).relu()


def settings(x: Tensor) -> dict[str, Any]:
    """Returns the settings of Opacus' optimizers."""
    return {"noise_multiplier": 1.0, "max_grad_norm": CLIP, "expected_batch_size": len(x)}


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
    backend = InProcess(runtimes)
    _, context = negotiate_terms(settings, context, backend)

    def run() -> list[Tensor]:
        server = Server.begun(method, context)
        run_round(server, backend, context)
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
            batch = records[torch.randperm(IMAGES)]
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
    plain_round = round_of_plain_loop(textbook().train(), weights, clients, data)
    torch.testing.assert_close(plain_round(), round_here())
    return {"fedsynth": round_here, "plain loop": plain_round}


def peak_megabytes(run: Callable[[], object]) -> int:
    """Returns by how many MB a run raises the memory of a new process at its peak."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(int(peak_growth(run))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reader, 20))


def measure(case: Step | int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a step of DP-SGD, or of a round with a number of clients."""
    BasicBlock.forward = add_residual
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus' hooks
    torch.set_num_threads(1)
    keep_large_allocations()
    if isinstance(case, Step):
        return measure_step(case, options)
    times = medians(rounds(case), options, time.process_time)
    return {
        "milliseconds": {name: 1000 * value for name, value in times.items()},
        "ratio": {name: times["fedsynth"] / value for name, value in times.items()},
    }


def measure_step(step: Step, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the milliseconds and memory of a step, and the ratio to the faster one of Opacus."""
    spec = dataset_spec(step.dataset)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(step.batch, *spec.image_shape, generator=generator)
    y = torch.arange(step.batch) % spec.classes
    network = build_model(step.model, spec.image_shape, spec.classes, 0)
    for layer in network.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    steps = 1 if options.quick else step.steps

    def training(train: Callable[..., None]) -> Callable[[], None]:
        return lambda: train(copy.deepcopy(network).train(), x, y, steps)

    peers = {"opacus hooks": opacus_hooks, "opacus ghost": opacus_ghost}
    runs = {"fedsynth": training(ours), **{name: training(run) for name, run in peers.items()}}
    for train in (ours, *peers.values()):  # loads what is imported on the first call
        train(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), spec.classes)), x[:2], y[:2], 1)
    memory = {name: peak_megabytes(run) for name, run in runs.items()}
    times = medians(runs, options, time.process_time)
    faster = min(times[name] for name in peers)
    milliseconds = {name: round(1000 * value / steps, 2) for name, value in times.items()}
    return {
        "milliseconds": milliseconds,
        "megabytes": memory,
        "ratio to the faster": round(times["fedsynth"] / faster, 2),
    }


def main() -> None:
    options = timing_options(__doc__).parse_args()
    run_cases("peers", options, CASES, measure, separate_processes=True)


if __name__ == "__main__":
    main()
