"""Local training of many clients in one pass (`synthesizer/together.py`) beside one client after another, alternately in one run.

    python benchmarks/local_training.py [--quick] [--json] [--device cuda]

Clients of unequal sizes (log-normal, mean 60, the same in every row), batches of 10 and 32, two passes, momentum 0.9, random images: only time
is measured. Rows with convolutions say why `trains_together` says no to them on a CPU; on a GPU they are what to look at first.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import alternating, arguments, machine, saver
from torch import Tensor, nn

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.synthesizer.together import Learner, train_together, trains_together
from fedsynth.synthesizer.training import SgdSettings, train_on

SYNTHETIC, MNIST = (1, 1, 60), (1, 28, 28)  # FedProx's synthetic data have 60 features
# case, network, an image's shape, clients, batch
CASES: tuple[tuple[str, ModelSettings, tuple[int, int, int], int, int], ...] = (
    ("softmax regression, 60 features", ModelSettings("linear"), SYNTHETIC, 30, 10),
    ("softmax regression, 60 features", ModelSettings("linear"), SYNTHETIC, 300, 10),
    ("softmax regression, 784 features", ModelSettings("linear"), MNIST, 30, 10),
    ("softmax regression, 784 features", ModelSettings("linear"), MNIST, 300, 10),
    ("LeNet-5", ModelSettings("lenet5"), MNIST, 30, 10),
    ("LeNet-5", ModelSettings("lenet5"), MNIST, 30, 32),
    ("ConvNet of width 16", ModelSettings(width=16), MNIST, 30, 10),
    ("ConvNet of width 16", ModelSettings(width=16), MNIST, 30, 32),
    ("ConvNet of width 32", ModelSettings(width=32), MNIST, 30, 10),
)


def learners(model: nn.Module, sizes: list[int], batch: int) -> list[Learner]:
    """Clients whose examples are consecutive ones."""
    parts = torch.arange(sum(sizes), device=next(model.parameters()).device).split(sizes)
    sgd = SgdSettings(epochs=2, batch=batch, learning_rate=0.01, momentum=0.9)
    return [Learner(copy.deepcopy(model), part, sgd, torch.Generator().manual_seed(k)) for k, part in enumerate(parts)]


def one_after_another(each: list[Learner], x: Tensor, y: Tensor) -> None:
    for one in each:
        mine = one.where
        train_on(one.model, lambda i, mine=mine: x[mine[i]], y[mine], one.settings, one.generator)  # type: ignore[misc]


def measure(
    name: str, settings: ModelSettings, shape: tuple[int, int, int], clients: int, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    device, clients = torch.device(options.device), 3 if options.quick else clients
    sizes = [max(1, round(n)) for n in np.random.default_rng(0).lognormal(np.log(60) - 0.5, 1.0, clients)]
    model = build_model(settings, shape, 10, 0).to(device)
    x, y = torch.randn(sum(sizes), *shape, device=device), torch.arange(sum(sizes), device=device) % 10
    runs: dict[str, Callable[[], object]] = {
        "one after another": lambda: one_after_another(learners(model, sizes, batch), x, y),
        "together": lambda: train_together(learners(model, sizes, batch), x.__getitem__, y.__getitem__),
    }
    times = alternating(runs, 1 if options.quick else options.repeats, device)
    medians = {key: statistics.median(values) for key, values in times.items()}
    row = {
        "case": name,
        "clients": clients,
        "batch": batch,
        "examples": sum(sizes),
        "seconds": medians,
        "used together": trains_together(model),
    }
    return {**row, "ratio": medians["one after another"] / medians["together"], **machine()}


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_large_allocations()
    save = saver("local_training", options)
    for case in CASES:
        save(measure(*case, options))


if __name__ == "__main__":
    main()
