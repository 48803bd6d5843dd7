"""Local training of many clients in one pass (`training/many_clients.py`) beside one client after
another, alternately in one run.

    python benchmarks/local_training.py [--quick] [--json] [--device cuda]

Clients of log-normal sizes with mean 60 ("uneven"), of one size, or one that has a hundred times
what the others have; two passes, momentum 0.9, random images: only time is measured. Rows that are
not "used together" say why: `worth_batching` and `FEW` decide.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth.cli.process import keep_large_allocations
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.training.many_clients import FEW, Learner, train_together, worth_batching
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import SgdSettings, train_on
from library.machine import arguments, machine, medians, saver


def uneven(clients: int) -> list[int]:
    return [
        max(1, round(n)) for n in np.random.default_rng(0).lognormal(np.log(60) - 0.5, 1.0, clients)
    ]


SYNTHETIC, MNIST = (1, 1, 60), (1, 28, 28)  # FedProx's synthetic data have 60 features
# case, network, an image's shape, sizes, batch
CASES: tuple[tuple[str, ModelSettings, tuple[int, int, int], list[int], int], ...] = (
    (
        "30 uneven, softmax regression, 60 features",
        ModelSettings("linear"),
        SYNTHETIC,
        uneven(30),
        10,
    ),
    (
        "300 uneven, softmax regression, 60 features",
        ModelSettings("linear"),
        SYNTHETIC,
        uneven(300),
        10,
    ),
    ("30 uneven, softmax regression, 784 features", ModelSettings("linear"), MNIST, uneven(30), 10),
    (
        "300 uneven, softmax regression, 784 features",
        ModelSettings("linear"),
        MNIST,
        uneven(300),
        10,
    ),
    ("100 even, softmax regression, 784 features", ModelSettings("linear"), MNIST, [60] * 100, 32),
    ("10 even, softmax regression, 784 features", ModelSettings("linear"), MNIST, [600] * 10, 64),
    ("10 even, softmax regression, 784 features", ModelSettings("linear"), MNIST, [600] * 10, 256),
    (
        "one large of 100, softmax regression, 784 features",
        ModelSettings("linear"),
        MNIST,
        [6000] + [60] * 99,
        32,
    ),
    ("2 even, softmax regression, 60 features", ModelSettings("linear"), SYNTHETIC, [200] * 2, 10),
    ("30 uneven, LeNet-5", ModelSettings("lenet5"), MNIST, uneven(30), 10),
    ("30 uneven, LeNet-5", ModelSettings("lenet5"), MNIST, uneven(30), 32),
    ("30 uneven, ConvNet of width 16", ModelSettings(width=16), MNIST, uneven(30), 10),
    ("30 uneven, ConvNet of width 16", ModelSettings(width=16), MNIST, uneven(30), 32),
    ("30 uneven, ConvNet of width 32", ModelSettings(width=32), MNIST, uneven(30), 10),
)


def learners(model: nn.Module, sizes: list[int], batch: int) -> list[Learner]:
    """Clients whose examples are consecutive ones."""
    parts = torch.arange(sum(sizes), device=next(model.parameters()).device).split(sizes)
    sgd = SgdSettings(epochs=2, batch=batch, optimiser=MomentumSgd(0.01, 0.9))
    return [
        Learner(copy.deepcopy(model), part, sgd, torch.Generator().manual_seed(k))
        for k, part in enumerate(parts)
    ]


def one_after_another(each: list[Learner], x: Tensor, y: Tensor) -> None:
    for one in each:
        images = partial(_of_client, x, one.where)
        train_on(one.model, images, y[one.where], one.settings, one.generator)


def _of_client(x: Tensor, mine: Tensor, where: Tensor) -> Tensor:
    return x[mine[where]]


def measure(
    name: str,
    settings: ModelSettings,
    shape: tuple[int, int, int],
    sizes: list[int],
    batch: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    device = torch.device(options.device)
    sizes = sizes[:3] if options.quick else sizes
    model = build_model(settings, shape, 10, 0).to(device)
    x = torch.randn(sum(sizes), *shape, device=device)
    y = torch.arange(sum(sizes), device=device) % 10
    runs: dict[str, Callable[[], object]] = {
        "one after another": lambda: one_after_another(learners(model, sizes, batch), x, y),
        "together": lambda: train_together(
            learners(model, sizes, batch), x.__getitem__, y.__getitem__
        ),
    }
    times = medians(runs, options)
    used = len(sizes) >= FEW and worth_batching(model, batch, math.prod(shape))
    row = {
        "case": name,
        "clients": len(sizes),
        "batch": batch,
        "examples": sum(sizes),
        "seconds": times,
        "used together": used,
    }
    return {**row, "ratio": times["one after another"] / times["together"], **machine()}


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_large_allocations()
    save = saver("local_training", options)
    for case in CASES:
        save(measure(*case, options))


if __name__ == "__main__":
    main()
